"""What a request asks to be saved: layers, rows, dtype, target and the small tensors stored beside them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.errors import InvalidRequest, SaveError
from engine.layers import LayerId

SaveDtype = Literal["float32", "float16", "bfloat16", "float8_e4m3fn"]
Durability = Literal["none", "file", "full"]
Range = tuple[int, int]


@dataclass(frozen=True)
class RowSelection:
    """Which rows of a sequence are kept: ascending disjoint `[start, end)` pairs, negatives from the end, None = to the end."""

    pairs: tuple[tuple[int, int | None], ...] = ((0, None),)

    @property
    def everything(self) -> bool:
        return self.pairs == ((0, None),)

    @property
    def lookback(self) -> int:
        """How many rows at the end can change their membership while the sequence still grows."""
        bounds = [bound for pair in self.pairs for bound in pair if bound is not None and bound < 0]
        return max((-bound for bound in bounds), default=0)

    def ranges(self, total: int) -> list[Range]:
        """The kept ranges of a sequence of `total` rows: clamped, ascending, disjoint, never empty ones."""
        kept: list[Range] = []
        for start, end in self.pairs:
            low = _clamp(start, total)
            high = total if end is None else _clamp(end, total)
            low = max(low, kept[-1][1]) if kept else low
            if low < high:
                kept.append((low, high))
        return kept

    def settled(self, at_least: int) -> tuple[int, list[Range]]:
        """What is certain of a sequence that will have `at_least` rows or more.

        Returns `(horizon, ranges)`: the membership of rows below `horizon` can't change any more; of those the `ranges` are kept.
        Bounds counted from the end only move up, so a row further than `lookback` from it has been passed by all of them.
        """
        horizon = max(0, at_least - self.lookback)
        kept = [(low, min(high, horizon)) for low, high in self.ranges(at_least)]
        return horizon, [(low, high) for low, high in kept if low < high]

    def validate(self, total: int | None, param: str = "positions") -> None:
        """Raises `InvalidRequest` for pairs that are not ascending and disjoint, or out of range where `total` is known."""
        if not self.pairs:
            raise InvalidRequest(f"{param} must not be empty", param)
        previous_end: int | None = 0
        for start, end in self.pairs:
            if total is not None:
                for bound in (start, end):
                    if bound is not None and not -total <= bound <= total:
                        raise InvalidRequest(f"{param} holds {bound}, out of range for {total} positions", param)
                low, high = _clamp(start, total), total if end is None else _clamp(end, total)
                _check_order(previous_end or 0, low, high, (start, end), param)
                previous_end = high
                continue
            same_side = end is not None and (start < 0) == (end < 0)
            if same_side and end is not None and end <= start:
                raise InvalidRequest(f"{param} holds [{start}, {end}], which is empty", param)
            if previous_end is None or ((previous_end < 0) == (start < 0) and start < previous_end):
                raise InvalidRequest(f"{param} must be ascending and disjoint, [{start}, {end}] is not", param)
            previous_end = end


def _clamp(bound: int, total: int) -> int:
    return max(0, min(total, bound if bound >= 0 else total + bound))


def _check_order(previous_end: int, low: int, high: int, pair: tuple[int, int | None], param: str) -> None:
    if low >= high:
        raise InvalidRequest(f"{param} holds [{pair[0]}, {pair[1]}], which is empty", param)
    if low < previous_end:
        raise InvalidRequest(f"{param} must be ascending and disjoint, [{pair[0]}, {pair[1]}] is not", param)


ALL_ROWS = RowSelection()
LAST_ROW = RowSelection(((-1, None),))


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
