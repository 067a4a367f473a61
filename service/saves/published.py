"""What a published file says of itself: enough of its header to know whose it is and whether it is whole."""

import os
from dataclasses import dataclass
from typing import Any

from engine.saves.header import Header, InvalidFile, read_header
from engine.saves.spec import SavedFile


@dataclass(frozen=True)
class PublishedFile:
    """A file with the metadata of a save."""

    save_id: str
    shape: tuple[int, ...]
    num_tokens: int
    bytes: int
    device: int
    inode: int
    whole: bool
    """Its size is what its header says."""


def read_published(fd: int) -> PublishedFile | None:
    """Reads the header of an open file; None where it isn't a save's. Anybody can have put it there: nothing in it is trusted.

    Raises `OSError`.
    """
    try:
        header = read_header(fd)
    except (InvalidFile, RecursionError):
        return None
    states = header.find("hidden_states")
    num_tokens = _num_tokens(header)
    save_id = header.metadata.get("save_id")
    if states is None or num_tokens is None or save_id is None:
        return None
    status = os.fstat(fd)
    whole = status.st_size == max(tensor.end for tensor in header.tensors)
    return PublishedFile(save_id, states.entry.shape, num_tokens, status.st_size, status.st_dev, status.st_ino, whole)


def file_fields(file: PublishedFile | SavedFile) -> dict[str, Any]:
    """What the record says of a save's file."""
    known = {"shape": file.shape, "num_tokens": file.num_tokens, "bytes": file.bytes, "device": file.device, "inode": file.inode}
    return known if isinstance(file, PublishedFile) else known | {"checksum": file.checksum}


def _num_tokens(header: Header) -> int | None:
    try:
        number = int(header.metadata["num_tokens"])
    except (KeyError, ValueError):
        return None
    return number if 0 <= number < 2**63 else None
