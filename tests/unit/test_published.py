"""What a file says of itself is taken only where a save can have written it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.saves.spec import SavedFile
from service.saves.published import PublishedFile, file_fields, read_published

STATES = {"dtype": "F32", "shape": [3, 2, 4], "data_offsets": [0, 96]}
SIZE_OF_DATA = 96
Reader = Callable[..., PublishedFile | None]


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    def read_file(metadata: dict[str, str], *, tensors: dict[str, Any] | None = None, lost: int = 0) -> PublishedFile | None:
        header = json.dumps({"__metadata__": metadata, **({"hidden_states": STATES} if tensors is None else tensors)}).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(SIZE_OF_DATA - lost)
        (tmp_path / "x").write_bytes(content)
        with (tmp_path / "x").open("rb") as file:
            return read_published(file.fileno())

    return read_file


def test_a_save_is_read_with_its_size_and_its_place(read: Reader, tmp_path: Path) -> None:
    file, status = read({"save_id": "a", "num_tokens": "3"}), (tmp_path / "x").stat()
    assert file == PublishedFile("a", (3, 2, 4), 3, status.st_size, status.st_dev, status.st_ino, whole=True)
    known = {"shape": (3, 2, 4), "num_tokens": 3, "bytes": status.st_size, "device": status.st_dev, "inode": status.st_ino}
    assert file_fields(file) == known
    assert file_fields(SavedFile(checksum="sha256:00", **known)) == known | {"checksum": "sha256:00"}


@pytest.mark.parametrize("lost", [1, -1, 96])
def test_a_file_of_another_size_than_its_header_says_is_not_whole(read: Reader, lost: int) -> None:
    file = read({"save_id": "a", "num_tokens": "3"}, lost=lost)
    assert file is not None
    assert not file.whole


@pytest.mark.parametrize(
    ("number", "taken"), [("0", 0), ("1", 1), (str(2**63 - 1), 2**63 - 1), (str(2**63), None), ("-1", None), ("x", None), ("", None)]
)
def test_the_number_of_tokens_is_one_that_the_registry_can_hold(read: Reader, number: str, taken: int | None) -> None:
    file = read({"save_id": "a", "num_tokens": number})
    assert (None if file is None else file.num_tokens) == taken


@pytest.mark.parametrize("missing", ["save_id", "num_tokens"])
def test_a_file_without_the_metadata_of_a_save_is_none(read: Reader, missing: str) -> None:
    metadata = {"save_id": "a", "num_tokens": "3"}
    del metadata[missing]
    assert read(metadata) is None


def test_a_file_without_hidden_states_is_none(read: Reader) -> None:
    assert read({"save_id": "a", "num_tokens": "3"}, tensors={"other": STATES}) is None


@pytest.mark.parametrize("content", [b"", b"text", b"\xff" * 64, (100_000).to_bytes(8, "little") + b"[" * 100_000])
def test_a_file_of_another_format_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with (tmp_path / "x").open("rb") as file:
        assert read_published(file.fileno()) is None
