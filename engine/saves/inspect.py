"""Whether a file keeps what `strata.hidden_states.v1` promises. Memory is bounded, however large the file."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.saves import layout
from engine.saves.convert import STORED_TYPES
from engine.saves.header import Header, InvalidFile, StoredTensor, read_header

FORMAT = "strata.hidden_states.v1"
PIECE_BYTES = 1 << 20
REQUIRED_METADATA = (
    "format",
    "model",
    "model_revision",
    "num_hidden_layers",
    "hidden_size",
    "layers",
    "layer_convention",
    "final_norm",
    "compute_dtype",
    "dtype",
    "num_prompt_tokens",
    "num_tokens",
    "save_id",
    "request_id",
    "created",
    "engine",
    "tokens_sha256",
)
_FLOATS = {layout.STORED_NAMES[name]: dtype for name, dtype in STORED_TYPES.items()}


@dataclass(frozen=True)
class FileReport:
    """What a file holds and what is wrong with it."""

    path: str
    size: int
    header: Header | None
    """None where it can't be read; `problems` says why."""
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def inspect_file(path: str | os.PathLike[str]) -> FileReport:
    """Reads the whole file. Raises `OSError` where it can't be opened or read; whatever it holds ends up in the report."""
    with Path(path).open("rb") as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        try:
            header = read_header(fd)
        except InvalidFile as error:
            return FileReport(os.fspath(path), size, None, (str(error),))
        problems = list(_layout_problems(header, size))
        # What follows reads tensors where the header says they lie.
        if not problems:
            problems = [*_shape_problems(header), *_metadata_problems(header), *_value_problems(fd, header), *_token_problems(fd, header)]
        return FileReport(os.fspath(path), size, header, tuple(problems))


def _layout_problems(header: Header, size: int) -> Iterator[str]:
    end = header.data_start
    for tensor in header.tensors:
        entry = tensor.entry
        if tensor.end - tensor.start != entry.nbytes:
            yield f"{entry.name} has {tensor.end - tensor.start} bytes, but its shape and dtype make {entry.nbytes}"
        if tensor.start != end:
            yield f"{entry.name} starts at byte {tensor.start}, but what lies before it ends at {end}"
        if tensor.start % entry.item_size:
            yield f"{entry.name} starts at byte {tensor.start}, not a multiple of its item size {entry.item_size}"
        end = tensor.end
    if end != size:
        yield f"the tensors end at byte {end}, the file at {size}"


def _shape_problems(header: Header) -> Iterator[str]:
    hidden, tokens, positions = (header.find(name) for name in (layout.HIDDEN_STATES, layout.TOKEN_IDS, layout.POSITIONS))
    if hidden is None or len(hidden.entry.shape) != 3 or hidden.entry.dtype not in _FLOATS:
        yield "hidden_states [rows, layers, width] of a float dtype is missing"
        return
    if tokens is None or len(tokens.entry.shape) != 1 or tokens.entry.dtype != "I64":
        yield "token_ids [tokens] int64 is missing"
        return
    rows, num_tokens = hidden.entry.shape[0], tokens.entry.shape[0]
    if rows not in (num_tokens, 1):
        yield f"hidden_states has {rows} rows for {num_tokens} token_ids"
    if positions is not None and (positions.entry.dtype != "I64" or positions.entry.shape != (num_tokens,)):
        yield f"positions is not int64 of the {num_tokens} tokens"
    scales = header.find(layout.SCALES)
    if (hidden.entry.dtype == "F8_E4M3") != (scales is not None):
        yield "hidden_states_scales and float8 hidden_states come only together"
    if scales is not None and (scales.entry.dtype, scales.entry.shape) != ("F32", (rows, 1, 1)):
        yield f"hidden_states_scales is not float32 [{rows}, 1, 1]"


def _metadata_problems(header: Header) -> Iterator[str]:
    metadata, hidden = header.metadata, header.find(layout.HIDDEN_STATES)
    missing = [key for key in REQUIRED_METADATA if key not in metadata]
    if missing or hidden is None:
        yield f"the metadata lacks {', '.join(missing)}"
        return
    if metadata["format"] != FORMAT:
        yield f"the format is {metadata['format']!r}, not {FORMAT!r}"
    if hidden.entry.dtype != {str(name): stored for name, stored in layout.STORED_NAMES.items()}.get(metadata["dtype"]):
        yield f"the metadata's dtype {metadata['dtype']} is not that of hidden_states, {hidden.entry.dtype}"
    yield from _layer_problems(metadata["layers"], metadata["final_norm"], metadata["hidden_size"], hidden)
    yield from _count_problems(header)


def _layer_problems(layers_json: str, final_norm: str, hidden_size: str, hidden: StoredTensor) -> Iterator[str]:
    try:
        layers = json.loads(layers_json)
    except ValueError:
        layers = None
    if not isinstance(layers, list):
        yield "the metadata's layers is not a JSON list"
        return
    if hidden.entry.shape[1:] != (len(layers), _whole_number(hidden_size)):
        yield f"hidden_states is {list(hidden.entry.shape)} for {len(layers)} layers of width {hidden_size}"
    if (final_norm == "true") != ("norm" in layers):
        yield f"final_norm is {final_norm} for the layers {layers_json}"


def _count_problems(header: Header) -> Iterator[str]:
    tokens = header.find(layout.TOKEN_IDS)
    total, prompt = (_whole_number(header.metadata[key]) for key in ("num_tokens", "num_prompt_tokens"))
    if tokens is None or total is None or prompt is None:
        yield "num_tokens or num_prompt_tokens is not a number"
        return
    kept = tokens.entry.shape[0]
    if kept > total or (kept < total and header.find(layout.POSITIONS) is None):
        yield f"{kept} token_ids, without positions, for num_tokens {total}" if kept < total else f"{kept} token_ids for num_tokens {total}"
    if prompt > total:
        yield f"num_prompt_tokens {prompt} is more than num_tokens {total}"


def _whole_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


def _value_problems(fd: int, header: Header) -> Iterator[str]:
    for tensor in header.tensors:
        dtype = _FLOATS.get(tensor.entry.dtype)
        if dtype is None:
            continue
        item = 0
        for piece in _pieces(fd, tensor):
            # Not every reduction knows float8; float32 holds all of the others exactly.
            bad = ~torch.isfinite(torch.frombuffer(piece, dtype=dtype).to(torch.float32))
            if bad.any():
                place = np.unravel_index(item + int(bad.nonzero()[0]), tensor.entry.shape)
                yield f"{tensor.entry.name} holds a value that is not finite at {[int(index) for index in place]}"
                break
            item += len(bad)


def _token_problems(fd: int, header: Header) -> Iterator[str]:
    tokens, positions = header.find(layout.TOKEN_IDS), header.find(layout.POSITIONS)
    if tokens is not None:
        digest = hashlib.sha256()
        for piece in _pieces(fd, tokens):
            digest.update(piece)
        if digest.hexdigest() != header.metadata.get("tokens_sha256"):
            yield "tokens_sha256 is not that of token_ids"
    if positions is not None and positions.entry.dtype == "I64":
        yield from _position_problems(fd, positions, _whole_number(header.metadata.get("num_tokens", "")))


def _position_problems(fd: int, positions: StoredTensor, num_tokens: int | None) -> Iterator[str]:
    previous = -1
    for piece in _pieces(fd, positions):
        values = np.frombuffer(piece, dtype="<i8")
        if (np.diff(values, prepend=previous) <= 0).any():
            yield "positions are not ascending"
            return
        previous = int(values[-1])
    if num_tokens is not None and previous >= num_tokens:
        yield f"positions go up to {previous}, but num_tokens is {num_tokens}"


def _pieces(fd: int, tensor: StoredTensor) -> Iterator[bytearray]:
    """The tensor's bytes, whole items at a time."""
    for offset in range(tensor.start, tensor.end, PIECE_BYTES):
        piece = bytearray(min(PIECE_BYTES, tensor.end - offset))
        if os.preadv(fd, [piece], offset) != len(piece):
            raise OSError(f"the file was cut short while it was read, at byte {offset}")
        yield piece
