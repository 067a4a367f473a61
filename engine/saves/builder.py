"""The content of one save: rows as they come, then the tensors beside them, the header, and the name."""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import Checksum, Durability
from engine.errors import SaveError
from engine.saves import layout
from engine.saves.bound import file_metadata, largest_header
from engine.saves.chunk import RowChunk, SaveEnd
from engine.saves.convert import (
    STORED_TYPES,
    RunningMean,
    Scratch,
    gather,
    layer_and_position,
    layer_of_mean,
    to_stored,
)
from engine.saves.digest import RunningDigest
from engine.saves.file import PartFile
from engine.saves.layout import TailTensor, TensorEntry
from engine.saves.lock import names_file
from engine.saves.publish import publish_file, remove_if_present
from engine.saves.received import ReceivedPositions
from engine.saves.retry import RetryPolicy
from engine.saves.spec import SavedFile, SaveSpec

PIECE_BYTES = 1 << 20
"""Rows gathered at once: small enough to stay in a core's cache between gathering, checking, converting and writing."""


@dataclass(frozen=True)
class WriterOptions:
    """What holds for all saves of a writer."""

    durability: Durability = "file"
    checksum: Checksum = "none"
    umask: int = 0o022
    retry_seconds: float = 5.0


class FileBuilder:
    """Only the thread that works on the save calls the methods.

    They raise `SaveError` and `OSError`; then `discard` is next. Where they raise `RetryLater`, the same call is to be made again, by
    whatever thread, and goes on where it stopped.

    Where the end of the save is known before its first row is written, the header is final and comes first, and the file is written
    from its first byte to its last, its checksum with it. Else room is left for the header, and rows are read back for the checksum.
    """

    def __init__(
        self,
        spec: SaveSpec,
        pages: torch.Tensor,
        options: WriterOptions,
        stop: threading.Event,
        *,
        num_rows: int | None,
        max_rows: int,
        end: Callable[[], SaveEnd] | None = None,
    ) -> None:
        """`pages` is `[num_pages, page_size, width]`. `stop` is set when the save has been cancelled. `end`: see `expect`."""
        self.spec = spec
        self._pages = pages
        self._options = options
        self._stop = stop
        self._num_rows = 1 if spec.pooling else num_rows
        self._max_rows = max_rows
        self._end = end
        self._width = pages.shape[2]
        self._row_bytes = len(spec.layers) * self._width * STORED_TYPES[spec.dtype].itemsize
        self._mean = RunningMean.zeros(len(spec.layers), self._width) if spec.pooling else None
        self._retry = RetryPolicy(options.retry_seconds)
        self._received = ReceivedPositions()
        self._current: RowChunk | None = None
        self._num_done = 0
        """Rows of the current chunk that need no further work."""
        self._scales: list[torch.Tensor] = []
        self._written_rows = 0
        self._data_start = 0
        self._header: bytes | None = None
        """Unpadded, once it is final."""
        self._header_written = False
        self._file: PartFile | None = None

    @property
    def bytes_written(self) -> int:
        return self._file.bytes_written if self._file else 0

    @property
    def write_seconds(self) -> float:
        return self._file.write_seconds if self._file else 0.0

    def expect(self, end: Callable[[], SaveEnd]) -> None:
        """`end` makes what `complete` will be given. May be called from any thread, and is of use until the first row is written."""
        self._end = self._end or end

    def add_rows(self, chunk: RowChunk, scratch: Scratch) -> None:
        """Writes the rows of a chunk behind those before it (pooled: adds them up), in pieces of bounded size."""
        if self._current is not chunk:
            self._begin_chunk(chunk)
        row_size = len(self.spec.layers) * self._width * self._pages.dtype.itemsize
        step = max(1, PIECE_BYTES // row_size)
        while self._num_done < chunk.count and not self._stop.is_set():
            positions = chunk.positions(self._num_done, step)
            piece = gather(self._pages, chunk, positions, scratch)
            locate = layer_and_position(self.spec.layers, positions)
            if self._mean:
                self._mean.add(piece, locate)
            else:
                self._write_rows(piece, locate, scratch)
            self._num_done += len(positions)
            self._retry.reset()

    def _begin_chunk(self, chunk: RowChunk) -> None:
        """Remembers which positions came, to compare them at the end with those that the tokens are of."""
        if chunk.pages.shape != (len(chunk.blocks), len(self.spec.layers)):
            raise SaveError("engine_error", f"rows of {len(self.spec.layers)} layers were submitted with pages {chunk.pages.shape}")
        self._received.add(chunk.bounds)
        self._current, self._num_done = chunk, 0

    def _write_rows(self, rows: torch.Tensor, locate: Callable[[int, int], str], scratch: Scratch) -> None:
        stored, scales = to_stored(rows, self.spec.dtype, locate, scratch)
        data = stored.reshape(-1).view(torch.uint8).numpy().data
        self._open().write_at(data, self._data_start + self._written_rows * self._row_bytes)
        if scales is not None:
            self._scales.append(scales)
        self._written_rows += len(rows)

    def _open(self) -> PartFile:
        """The temporary file, made at its first use, with its header where that is final by then, else with room for it."""
        if self._file is None:
            self._plan_header()
            self._file = self._create()
        if self._header is not None:
            self._write_header(self._file, self._header)
        return self._file

    def _plan_header(self) -> None:
        if self._end is not None:
            end = self._end()
            self._header = self._encoded_header(end, self._tail(end))
            header_bytes, num_rows = len(self._header), self._num_stored(end)
        else:
            header_bytes, num_rows = len(largest_header(self.spec, self._width, self._max_rows)), self._num_rows or 0
        self._data_start = layout.data_start_for(header_bytes, num_rows * self._row_bytes)

    def _create(self) -> PartFile:
        options, name = self._options, f".{self.spec.save_id}.part"
        digest = None if options.checksum == "none" else RunningDigest(options.checksum)
        write_back = options.durability != "none"
        return PartFile.create(self.spec.target.directory_fd, name, options.umask, self._retry, write_back=write_back, digest=digest)

    def _write_header(self, file: PartFile, header: bytes) -> None:
        if not self._header_written:
            file.write_at(memoryview(layout.pad_header(header, self._data_start)), 0)
            self._header_written = True

    def _num_stored(self, end: SaveEnd) -> int:
        return 1 if self.spec.pooling else len(end.token_ids)

    def _encoded_header(self, end: SaveEnd, tail: list[TailTensor]) -> bytes:
        shape = (self._num_stored(end), len(self.spec.layers), self._width)
        hidden = TensorEntry(layout.HIDDEN_STATES, layout.STORED_NAMES[self.spec.dtype], shape)
        token_ids = next(tensor for tensor in tail if tensor.entry.name == layout.TOKEN_IDS)
        tokens_sha256 = hashlib.sha256(token_ids.values.tobytes()).hexdigest()
        metadata = file_metadata(self.spec, end.num_prompt_tokens, end.num_tokens, tokens_sha256)
        return layout.encode_header([hidden, *(tensor.entry for tensor in tail)], metadata)

    def complete(self, end: SaveEnd, scratch: Scratch) -> "FinishedFile":
        """Writes all that is left and makes it as durable as asked; the file then lacks nothing but its name."""
        self._check(end)
        self.expect(lambda: end)
        if self._mean and not self._written_rows:
            self._write_rows(self._mean.row(), layer_of_mean(self.spec.layers), scratch)
        file, tail = self._open(), self._tail(end)
        self._finish_header(file, self._encoded_header(end, tail))
        tail_start = self._data_start + self._written_rows * self._row_bytes
        file.digest_up_to(tail_start)
        tail_bytes = b"".join(tensor.values.tobytes() for tensor in tail)
        file.write_at(memoryview(tail_bytes), tail_start)
        if self._options.durability == "none":
            file.flush()
        else:
            file.sync()
        shape = (self._written_rows, len(self.spec.layers), self._width)
        return FinishedFile(file, self.spec, shape, end.num_tokens, tail_start + len(tail_bytes))

    def _finish_header(self, file: PartFile, header: bytes) -> None:
        if self._header is None:
            self._make_room(file, len(header), self._written_rows * self._row_bytes)
            self._header = header
        if header != self._header:
            raise SaveError("engine_error", "the text ended otherwise than was known beforehand, and the header says so")
        self._write_header(file, header)

    def _check(self, end: SaveEnd) -> None:
        """A file whose rows are not those of its tokens is worse than none."""
        expected = np.arange(end.num_tokens) if end.positions is None else np.asarray(end.positions, dtype=np.int64)
        came = self._received.positions()
        if len(end.token_ids) != len(expected) or not np.array_equal(came, expected):
            message = f"{len(came)} rows came for {len(expected)} positions and {len(end.token_ids)} tokens, or of other positions"
            raise SaveError("engine_error", message)

    def _make_room(self, file: PartFile, header_bytes: int, hidden_bytes: int) -> None:
        """Moves the rows up where they don't end at a multiple of eight: possible only if their number was not known beforehand."""
        start = layout.data_start_for(header_bytes, hidden_bytes, at_least=self._data_start)
        if start > self._data_start:
            file.move(self._data_start, hidden_bytes, start - self._data_start)
            self._data_start = start

    def _tail(self, end: SaveEnd) -> list[TailTensor]:
        """What follows the hidden states, in order. The values of scales are complete once all rows have been written."""
        tail = [layout.int64_tail(layout.TOKEN_IDS, end.token_ids)]
        if end.positions is not None:
            tail.append(layout.int64_tail(layout.POSITIONS, end.positions))
        if self.spec.dtype == "float8_e4m3fn":
            scales = torch.cat([torch.empty(0), *self._scales]).numpy().astype("<f4")
            tail.append(TailTensor(TensorEntry(layout.SCALES, "F32", (self._num_stored(end), 1, 1)), scales))
        tail += [layout.client_tail(name, tensor) for name, tensor in self.spec.tensors.items()]
        return sorted(tail, key=lambda tensor: -tensor.entry.item_size)

    def discard(self) -> None:
        if self._file:
            self._file.discard()


@dataclass(frozen=True)
class FinishedFile:
    """A complete file that still has its temporary name."""

    file: PartFile
    spec: SaveSpec
    shape: tuple[int, int, int]
    num_tokens: int
    size: int

    def publish(self, *, sync_directory: bool) -> SavedFile:
        """Raises `SaveError` "conflict" where the name is taken, `OSError` and `RetryLater`; nothing of ours stands under the name then."""
        status, digest = os.fstat(self.file.fd), self.file.digest
        assert digest is None or digest.end == self.size
        self.file.retry.run(self._publish_name)
        if sync_directory:
            self._sync_directory()
        # Nothing after this can invalidate the file, so an error of `close` is ignored.
        with contextlib.suppress(OSError):
            self.file.close()
        return SavedFile(self.shape, self.num_tokens, self.size, status.st_dev, status.st_ino, None if digest is None else str(digest))

    def _publish_name(self) -> None:
        target = self.spec.target
        try:
            publish_file(target.directory_fd, self.file.name, target.name, replace=target.replace)
        except (OSError, SaveError):
            if not self._is_published():
                raise

    def _is_published(self) -> bool:
        """Whether the file stands under its name. Network file systems can lose the reply to a call, or repeat it."""
        target = self.spec.target
        with contextlib.suppress(OSError):
            if names_file(target.directory_fd, target.name, self.file.fd):
                remove_if_present(target.directory_fd, self.file.name)
                return True
        return False

    def _sync_directory(self) -> None:
        target = self.spec.target
        try:
            os.fsync(target.directory_fd)
        except OSError:
            # The name is not as durable as was promised, so the save has failed and must leave nothing.
            if names_file(target.directory_fd, target.name, self.file.fd):
                remove_if_present(target.directory_fd, target.name)
            raise
