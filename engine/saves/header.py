"""Reading a safetensors header back: for inspection, and for the recovery of records after a crash."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.saves.layout import ITEM_SIZES, LENGTH_BYTES, TensorEntry

LARGEST_HEADER_BYTES = 100_000_000
"""The format's own limit."""


class InvalidFile(EngineError):
    """A file that no safetensors library would open."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and where its bytes lie, counted from the file's start."""

    entry: TensorEntry
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """Tensors in the order in which they lie in the file."""

    data_start: int
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, str]

    def find(self, name: str) -> StoredTensor | None:
        return next((tensor for tensor in self.tensors if tensor.entry.name == name), None)


def read_header(fd: int) -> Header:
    """Raises `InvalidFile` for anything that is not the header of a safetensors file, and `OSError`."""
    length = int.from_bytes(_read(fd, LENGTH_BYTES, 0), "little")
    if not 2 <= length <= LARGEST_HEADER_BYTES:
        raise InvalidFile(f"the header is said to be {length} bytes long")
    try:
        content = json.loads(_read(fd, length, LENGTH_BYTES), object_pairs_hook=_object_without_repeats)
    except ValueError as error:
        raise InvalidFile(f"the header is not JSON: {error}") from error
    return _parse(content, LENGTH_BYTES + length)


def _read(fd: int, size: int, offset: int) -> bytes:
    data = os.pread(fd, size, offset)
    if len(data) < size:
        raise InvalidFile("the file ends within its header")
    return data


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _parse(content: Any, data_start: int) -> Header:  # noqa: ANN401 — whatever a file holds
    if not isinstance(content, dict):
        raise InvalidFile("the header is not a JSON object")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidFile("__metadata__ is not an object of strings")
    tensors = [_tensor(name, value, data_start) for name, value in content.items()]
    return Header(data_start, tuple(sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))), metadata)


def _tensor(name: str, value: Any, data_start: int) -> StoredTensor:  # noqa: ANN401 — whatever a file holds
    try:
        entry = TensorEntry(name, value["dtype"], tuple(value["shape"]))
        start, end = value["data_offsets"]
        numbers = (*entry.shape, start, end)
        well_formed = entry.dtype in ITEM_SIZES and all(type(number) is int and number >= 0 for number in numbers)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidFile(f"the header's entry of {name} is malformed") from error
    if not well_formed:
        raise InvalidFile(f"the header's entry of {name} holds a dtype or a number that is not expected")
    return StoredTensor(entry, data_start + start, data_start + end)
