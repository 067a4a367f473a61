"""`GET /saves/{id}/file`: exactly the bytes that were published, whole or in part, or a clear refusal."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from service.http import downloads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.http.conftest import Service, Services

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


class File:
    """A saved file and where it is downloaded."""

    def __init__(self, service: Service, **params: Any) -> None:  # noqa: ANN401 - fields of kv_transfer_params
        transfer = service.completed(kv_transfer_params=params)["kv_transfer_params"]
        self.id: str = transfer["save_id"]
        self.url: str = transfer["url"]
        self.path = Path(transfer["hidden_states_path"])
        self.content = self.path.read_bytes()
        self._client = service.client

    def get(self, **headers: str) -> httpx.Response:
        return self._client.get(self.url, headers={name.replace("_", "-"): value for name, value in headers.items()})

    @property
    def etag(self) -> str:
        return self._client.head(self.url).headers["ETag"]


@pytest.fixture(scope="module")
def file(service: Service) -> File:
    return File(service, hidden_states_path="read/größe 1.safetensors")


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_the_whole_file_with_its_headers(file: File) -> None:
    response = file.get()
    assert (response.status_code, response.content) == (200, file.content)
    headers = response.headers
    assert headers["Content-Length"] == str(len(file.content))
    assert headers["Content-Type"] == "application/octet-stream"
    assert headers["Accept-Ranges"] == "bytes"
    assert headers["Content-Disposition"] == "attachment; filename*=utf-8''gr%C3%B6%C3%9Fe%201.safetensors"
    assert headers["Last-Modified"] == formatdate(int(file.path.stat().st_mtime), usegmt=True)
    assert headers["ETag"].startswith(f'"{file.id}')
    assert headers["X-Request-Id"]


def test_the_url_is_that_of_the_answer(file: File) -> None:
    assert file.url == f"/saves/{file.id}/file"


def test_head_has_the_headers_of_get_and_no_bytes(service: Service, file: File) -> None:
    head = service.client.head(file.url)
    changing = {"date", "x-request-id"}
    assert (head.status_code, head.content) == (200, b"")
    assert {name: value for name, value in head.headers.items() if name not in changing} == {
        name: value for name, value in file.get().headers.items() if name not in changing
    }
    assert service.client.head(file.url, headers={"Range": "bytes=0-3"}).status_code == 200
    assert service.client.head("/saves/nothing/file").status_code == 404


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=8-99", 8, 100),
        ("bytes=100-", 100, None),
        ("bytes=-100", -100, None),
        ("bytes=-999999999", 0, None),
        ("bytes=10-999999999", 10, None),
        ("BYTES = 1 - 2", 1, 3),
    ],
)
def test_a_range_is_answered_with_its_bytes(file: File, asked: str, start: int, end: int | None) -> None:
    response = file.get(Range=asked)
    first, last, _ = slice(start, end).indices(len(file.content))
    assert (response.status_code, response.content) == (206, file.content[start:end])
    assert response.headers["Content-Range"] == f"bytes {first}-{last - 1}/{len(file.content)}"
    assert response.headers["Content-Length"] == str(last - first)
    assert response.headers["ETag"] == file.etag


@pytest.mark.parametrize("asked", ["bytes=99999999-", "bytes=-0", "bytes=99999999-99999999999"])
def test_a_range_behind_the_end_is_416_and_names_the_size(file: File, asked: str) -> None:
    response = file.get(Range=asked)
    assert refusal(response) == (416, "range_not_satisfiable")
    assert response.headers["Content-Range"] == f"bytes */{len(file.content)}"


@pytest.mark.parametrize(
    "asked", ["bytes=5-2", "bytes=", "bytes=-", "bytes=x-y", "rows=0-1", "bytes", "bytes=0-1,5-6", "bytes=0x1-2", f"bytes=0-{'9' * 5000}"]
)
def test_what_is_not_one_valid_range_is_answered_with_the_whole_file(file: File, asked: str) -> None:
    response = file.get(Range=asked)
    assert (response.status_code, response.content) == (200, file.content)


def test_a_range_of_another_state_of_the_file_is_answered_with_the_whole_one(file: File) -> None:
    modified = file.get().headers["Last-Modified"]
    for tag in (file.etag, modified):
        assert file.get(Range="bytes=0-1", If_Range=tag).status_code == 206
    for tag in ('"other"', f"W/{file.etag}", "Thu, 01 Jan 1970 00:00:00 GMT", "yesterday"):
        assert file.get(Range="bytes=0-1", If_Range=tag).status_code == 200


def test_a_client_that_has_the_file_gets_no_bytes(file: File) -> None:
    modified = file.get().headers["Last-Modified"]
    for known in (file.etag, f"W/{file.etag}", f'"a", {file.etag} , "b"', "*"):
        response = file.get(If_None_Match=known)
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["ETag"] == file.etag
    assert file.get(If_Modified_Since=modified).status_code == 304
    assert file.get(If_Modified_Since=modified, If_None_Match='"other"').status_code == 200
    for stale in ("Thu, 01 Jan 1970 00:00:00 GMT", "not a date", ""):
        assert file.get(If_Modified_Since=stale).status_code == 200


def test_a_condition_that_does_not_hold_is_412(file: File) -> None:
    modified = file.get().headers["Last-Modified"]
    for wanted in ('"other"', f"W/{file.etag}"):
        assert refusal(file.get(If_Match=wanted)) == (412, "precondition_failed")
    for wanted in (file.etag, "*", f'"other",{file.etag}'):
        assert file.get(If_Match=wanted).status_code == 200
    assert refusal(file.get(If_Unmodified_Since="Thu, 01 Jan 1970 00:00:00 GMT")) == (412, "precondition_failed")
    assert file.get(If_Unmodified_Since=modified).status_code == 200
    assert file.get(If_Unmodified_Since="Thu, 01 Jan 1970 00:00:00 GMT", If_Match="*").status_code == 200


def test_no_two_files_share_an_etag_and_it_changes_with_the_file(service: Service) -> None:
    one, other = File(service), File(service)
    assert one.etag != other.etag
    before = one.etag
    assert one.etag == before
    with one.path.open("r+b") as changed:
        changed.seek(-1, os.SEEK_END)
        changed.write(b"\x01")
    assert one.etag != before


def test_the_etag_holds_the_checksum_where_there_is_one(services: Services) -> None:
    with services.run(checksum="sha256") as service:
        saved = File(service)
        assert service.record(saved.id)["sha256"] in saved.etag


def test_before_the_save_has_completed_there_is_no_file(services: Services, slow_steps: None) -> None:
    with services.run() as service:
        answer = service.complete(**LONG, kv_transfer_params={"wait": "accepted", "include_output_tokens": True}).json()
        url = f"/saves/{answer['kv_transfer_params']['save_id']}/file"
        assert refusal(service.client.get(url)) == (409, "not_completed")
        service.client.delete(url.removesuffix("/file"))
        assert refusal(service.client.get(url)) == (409, "not_completed")


def test_an_unknown_save_has_no_file(service: Service) -> None:
    assert refusal(service.client.get("/saves/nothing/file")) == (404, "not_found")


def deleted(path: Path) -> None:
    path.unlink()


def moved(path: Path) -> None:
    path.rename(path.with_name("away"))


def replaced(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def linked(path: Path) -> None:
    path.rename(path.with_name("away"))
    path.symlink_to("away")


def linked_outside(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def directory_linked(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.symlink_to("elsewhere")


def directory_removed(path: Path) -> None:
    shutil.rmtree(path.parent)


def lengthened(path: Path) -> None:
    with path.open("ab") as grown:
        grown.write(b"\0")


def overwritten(path: Path) -> None:
    """What it looks like when a new file has got the inode of the deleted one, and the same size."""
    path.write_bytes(b"x" * path.stat().st_size)


def made_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES = [
    deleted,
    moved,
    replaced,
    linked,
    linked_outside,
    directory_linked,
    directory_removed,
    lengthened,
    overwritten,
    made_a_pipe,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_file_that_is_not_the_published_one_any_more_is_gone(service: Service, change: Callable[[Path], None]) -> None:
    saved = File(service, hidden_states_path=f"{change.__name__}/x.safetensors")
    change(saved.path)
    assert refusal(saved.get()) == (410, "gone")
    assert service.record(saved.id)["status"] == "completed"


def test_a_file_that_was_moved_away_and_back_is_there_again(service: Service) -> None:
    saved = File(service, hidden_states_path="back/x.safetensors")
    saved.path.rename(saved.path.with_name("away"))
    assert saved.get().status_code == 410
    saved.path.with_name("away").rename(saved.path)
    assert saved.get().content == saved.content


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PIECE_BYTES", 64)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_many_clients_read_one_file_at_once_and_no_descriptor_is_left(service: Service, small_pieces: None, file: File) -> None:
    def download(number: int) -> bytes:
        with httpx.Client(base_url=service.url, trust_env=False, timeout=None) as client:
            return client.get(file.url, headers={"Range": f"bytes={number}-"} if number else {}).content

    before = open_descriptors()
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(download, range(72)))
    assert answers == [file.content[number:] for number in range(72)]
    while open_descriptors() > before:  # connections that are just being closed
        pass


def test_a_download_goes_on_while_its_file_is_removed(service: Service, small_pieces: None) -> None:
    saved = File(service)
    with service.client.stream("GET", saved.url) as response:
        pieces: Iterator[bytes] = response.iter_raw(16)
        start = next(pieces)
        assert httpx.delete(f"{service.url}/saves/{saved.id}", trust_env=False).status_code == 204
        assert start + b"".join(pieces) == saved.content
    assert saved.get().status_code == 404


def test_conditions_and_ranges_leave_no_descriptor_open(service: Service, file: File) -> None:
    file.get()
    before = open_descriptors()
    for _ in range(5):
        file.get(If_None_Match="*")
        file.get(If_Match='"x"')
        file.get(Range="bytes=999999999-")
        service.client.head(file.url)
    assert open_descriptors() <= before + 1


def test_two_downloads_of_different_files_do_not_mix(service: Service, small_pieces: None) -> None:
    files = [File(service, layers=[number]) for number in range(6)]
    barrier = threading.Barrier(6)

    def download(saved: File) -> bytes:
        with httpx.Client(base_url=service.url, trust_env=False, timeout=None) as client:
            barrier.wait()
            return client.get(saved.url).content

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(download, files)) == [saved.content for saved in files]
