"""What a request asks to be saved: layers, rows, dtype, target and the small tensors stored beside them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.errors import SaveError
from engine.layers import LayerId
from engine.saves.selection import ALL_ROWS, RowSelection

SaveDtype = Literal["float32", "float16", "bfloat16", "float8_e4m3fn"]


@dataclass(frozen=True)
class ClientTensor:
    """A small one-dimensional tensor that the client wants stored beside the states."""

    dtype: Literal["int64", "float32", "uint8"]
    values: Sequence[int] | Sequence[float]


class SaveTarget(Protocol):
    """An open directory and a name in it, with the locks that protect them. Owned by the save from submission on.

    Exactly one of `published` and `abandoned` is called, once, from a writer thread.
    """

    directory_fd: int
    name: str
    path: str
    """For messages only: files are opened by `directory_fd` and `name`."""
    replace: bool
    """Whether an existing file of that name is replaced."""

    def published(self) -> None:
        """The file stands under its name: releases the lock (the lock file stays) and the descriptors."""

    def abandoned(self) -> None:
        """There will be no file: removes the lock file and releases the descriptors."""


@dataclass(frozen=True)
class SaveSpec:
    """One file to be written for one request."""

    save_id: str
    target: SaveTarget
    layers: tuple[LayerId, ...]
    dtype: SaveDtype
    include_output_tokens: bool = False
    include_last_token: bool = False
    rows: RowSelection = ALL_ROWS
    pooling: Literal["mean"] | None = None
    tensors: Mapping[str, ClientTensor] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The file's `__metadata__` as far as it is known at submission (`user.*` included)."""

    @property
    def log_fields(self) -> dict[str, str]:
        """What log lines about the save say of it."""
        return {name: text for name, text in self.metadata.items() if name == "request_id"} | {"save_id": self.save_id}


@dataclass(frozen=True)
class SavedFile:
    """A published file, as the record keeps it."""

    shape: tuple[int, int, int]
    num_tokens: int
    """Rows of the sequence that the selection was taken from (prompt, or prompt and output)."""
    bytes: int
    device: int
    inode: int
    checksum: str | None = None
    """`sha256:…` or `xxh3:…` where the server computes one."""


@dataclass(frozen=True)
class SaveEvent:
    """A change in the life of a save. Events of one save come in order: running, writing, then one of the last three."""

    save_id: str
    status: Literal["running", "writing", "completed", "failed", "cancelled"]
    file: SavedFile | None = None
    error: SaveError | None = None
    seconds: float = 0.0
    """For the last three: time from the last computed token to the end of the save."""
    time_ns: int = field(default_factory=time.time_ns, compare=False)
    """When it happened, in nanoseconds since 1970."""
