"""How large a save's file can become, known before its first row is."""

import hashlib

from engine.saves import layout
from engine.saves.layout import TensorEntry
from engine.saves.selection import RowSelection
from engine.saves.spec import SaveSpec

LARGEST_COUNT = 10**19
"""Has as many digits as any number of tokens."""


def largest_header(spec: SaveSpec, width: int, max_rows: int) -> bytes:
    """The longest header that the file can get: `max_rows` rows are kept of a sequence as long as any."""
    entries = [TensorEntry(layout.HIDDEN_STATES, layout.STORED_NAMES[spec.dtype], (max_rows, len(spec.layers), width))]
    metadata = file_metadata(spec, LARGEST_COUNT, LARGEST_COUNT, hashlib.sha256().hexdigest())
    return layout.encode_header([*entries, *_tail_entries(spec, max_rows)], metadata)


def file_metadata(spec: SaveSpec, num_prompt_tokens: int, num_tokens: int, tokens_sha256: str) -> dict[str, str]:
    """The file's `__metadata__`, complete."""
    known_at_the_end = {
        "dtype": spec.dtype,
        "num_prompt_tokens": str(num_prompt_tokens),
        "num_tokens": str(num_tokens),
        "save_id": spec.save_id,
        "tokens_sha256": tokens_sha256,
    }
    return {**spec.metadata, **known_at_the_end}


def largest_file(spec: SaveSpec, width: int, num_rows: int) -> int:
    """Bytes that the file has at most, where the rows are chosen from at most `num_rows`; `width` is the model's."""
    kept = _most_kept(spec.rows, num_rows)
    states = TensorEntry(layout.HIDDEN_STATES, layout.STORED_NAMES[spec.dtype], (1 if spec.pooling else kept, len(spec.layers), width))
    header = layout.data_start_for(len(largest_header(spec, width, num_rows)), 0) + layout.ALIGNMENT
    return header + states.nbytes + sum(entry.nbytes for entry in _tail_entries(spec, kept))


def _tail_entries(spec: SaveSpec, rows: int) -> list[TensorEntry]:
    entries = [TensorEntry(layout.TOKEN_IDS, "I64", (rows,))]
    if not spec.rows.everything:
        entries.append(TensorEntry(layout.POSITIONS, "I64", (rows,)))
    if spec.dtype == "float8_e4m3fn":
        entries.append(TensorEntry(layout.SCALES, "F32", (rows, 1, 1)))
    return entries + [layout.client_entry(name, tensor) for name, tensor in spec.tensors.items()]


def _most_kept(rows: RowSelection, num_rows: int) -> int:
    """A pair from an end to a beginning, such as `[-10, 5]`, keeps fewer the longer the sequence gets; any other keeps more."""
    shrinks = any(start < 0 and end is not None and end >= 0 for start, end in rows.pairs)
    if shrinks:
        return num_rows
    starts, ends = rows.spans(num_rows)
    return int((ends - starts).sum())
