"""The page for people: `GET /`."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

import pytest

from service.http.pages import front_page
from service.schemas.answers import Front
from tests.http.gate import LateStart

if TYPE_CHECKING:
    from tests.http.conftest import Service, Services

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """What a page says and links to; raises where tags don't match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.links: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data


def page(service: Service, path: str) -> Page:
    response = service.client.get(path, headers=BROWSER)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    return Page(response.text)


def test_a_browser_gets_a_page_that_says_what_this_is_and_how_it_is(service: Service) -> None:
    front = page(service, "/")
    for part in ("Strata", "hidden states", "ready", "tiny", "LlamaForCausalLM", "2, 3, 6", "256"):
        assert part in front.text
    assert f"curl {service.url}/v1/completions" in front.text


def test_every_link_leads_somewhere(service: Service) -> None:
    front = page(service, "/")
    assert {"docs", "openapi.json", "metrics", "health"} <= set(front.links)
    for link in front.links:
        assert service.client.get(link).status_code == 200


def test_links_hold_behind_a_proxy_that_puts_the_service_below_a_path(service: Service) -> None:
    links = page(service, "/").links
    assert links
    assert all(urljoin("http://proxy/strata/", link).startswith("http://proxy/strata/") for link in links)


def test_the_page_loads_nothing_from_elsewhere(service: Service) -> None:
    html = page(service, "/")
    loading = [(tag, value) for tag, name, value in html.attributes if name in ("src", "srcset", "data", "action") or tag == "script"]
    assert loading == []
    assert [value for tag, name, value in html.attributes if tag == "link" and name == "href"] == ["data:,"]


def test_programs_get_json(service: Service) -> None:
    for accept in ("*/*", "application/json"):
        known = service.client.get("/", headers={"Accept": accept}).json()
        assert known["status"] == "ok"
        assert known["model"]["name"] == "tiny"
        assert known["links"]["metrics"] == "/metrics"


def test_the_page_tells_of_a_service_that_is_not_ready(services: Services) -> None:
    start = LateStart()
    with services.run(start.engine, until_ready=False) as service, start:
        assert "starting" in page(service, "/").text
        assert service.client.get("/").json()["model"] is None


@pytest.mark.parametrize("status", ["ok", "starting", "draining", "dead", "stopped"])
def test_every_state_has_its_words(status: Any) -> None:  # noqa: ANN401 - one of the names
    assert Page(front_page(Front(version="1", status=status, model=None, links={}), "/")).text


def test_names_are_escaped() -> None:
    model = {"name": "<script>alert(1)</script>", "default layers": [1]}
    html = front_page(Front(version="1", status="ok", model=model, links={}), "http://x/<b>/")
    assert "<script" not in html
    assert "<b>" not in html
    assert "<script>alert(1)</script>" in Page(html).text
