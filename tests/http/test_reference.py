"""The API reference, `/docs`: complete, from this service alone, and readable where there are keys."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin

import pytest

from service.http.auth import hashed_line, new_key

if TYPE_CHECKING:
    from tests.http.conftest import Service, Services

FILES = Path(str(files("service.http"))) / "reference_files"
VENDORED = FILES / "swagger-ui"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Links(HTMLParser):
    """Whatever a page loads or leads to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "action", "data")]


def links(service: Service) -> list[str]:
    response = service.client.get("/docs")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    return [link for link in Links(response.text).found if link != "data:,"]


def test_whatever_the_page_names_is_there_below_any_path(service: Service) -> None:
    named = links(service)
    assert {"docs/swagger-ui/swagger-ui-bundle.js", "docs/swagger-ui/swagger-ui.css", "docs/reference.js", "openapi.json"} <= set(named)
    for link in named:
        assert urljoin("http://proxy/strata/docs", link).startswith("http://proxy/strata/")
        assert service.client.get(urljoin("/docs", link)).status_code == 200


def test_scripts_styles_and_requests_may_come_from_this_service_only(service: Service) -> None:
    for path in ("/docs", "/docs/reference.js"):
        headers = service.client.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
        assert policy["img-src"] == "data:"
        assert headers["x-content-type-options"] == "nosniff"


def test_nothing_that_is_ours_names_another_host() -> None:
    for file in FILES.iterdir():
        if file.is_file():
            assert not re.search(r"https?:|[\"'(=]//", file.read_text(encoding="utf-8")), file.name


def test_styles_load_nothing() -> None:
    styles = (VENDORED / "swagger-ui.css").read_text(encoding="utf-8")
    assert "@import" not in styles
    assert all(re.match(r"[\"']?data:", target) for target in re.findall(r"url\(([^)]{0,10})", styles))


def test_vendored_files_are_those_that_were_published() -> None:
    lines = (VENDORED / "ORIGIN.txt").read_text(encoding="utf-8").splitlines()
    known = dict(reversed(line.split("  ")) for line in lines if re.match("[0-9a-f]{64}  ", line))
    assert known.keys() == {file.name for file in VENDORED.iterdir()} - {"ORIGIN.txt"}
    assert {"LICENSE", "NOTICE", "swagger-ui-bundle.js.LICENSE.txt"} <= known.keys()
    assert {name: hashlib.sha256((VENDORED / name).read_bytes()).hexdigest() for name in known} == known


def test_files_are_sent_again_only_when_they_have_changed(service: Service) -> None:
    first = service.client.get("/docs/swagger-ui/swagger-ui.css")
    again = service.client.get("/docs/swagger-ui/swagger-ui.css", headers={"If-None-Match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")


@pytest.mark.parametrize("path", ["/docs/", "/docs/nothing", "/docs/swagger-ui", "/docs/%2e%2e/a", "/docs/../http/app.py", "/docs/%00"])
def test_nothing_else_is_served(service: Service, path: str) -> None:
    assert service.client.get(path).status_code == 404


def test_the_page_needs_no_key_and_what_it_shows_does(services: Services, tmp_path: Path) -> None:
    keys, key = tmp_path / "keys", new_key()
    keys.write_text(hashed_line(key, "alice") + "\n")
    with services.run(api_keys_file=keys) as service:
        for link in ["/docs", *links(service)]:
            status = service.client.get(urljoin("/docs", link)).status_code
            assert status == (200 if urljoin("/docs", link).startswith("/docs") else 401), link
        for path in ("/docsx", "/docs.json"):
            assert service.client.get(path).status_code == 401
        assert service.client.get("/openapi.json", headers={"Authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_a_browser_shows_every_route(service: Service, tmp_path: Path) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom"]
    shown = subprocess.run([str(BROWSER), *options, f"{service.url}/docs"], capture_output=True, text=True, check=True)
    paths = service.client.get("/openapi.json").json()["paths"]
    assert shown.stdout.count('<div class="opblock ') == sum(len(methods) for methods in paths.values())
    assert all(f'data-path="{path}"' in shown.stdout for path in paths)
    assert "Content Security Policy" not in shown.stderr
