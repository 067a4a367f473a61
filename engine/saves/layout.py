"""Where things lie in a safetensors file: eight bytes of length, a JSON header padded with spaces, the tensors without holes.

Format: https://github.com/huggingface/safetensors#format. `hidden_states` come first, since how many rows there will be is often
not known when the first one is written; the others follow, largest items first, so that each begins at a multiple of its item size
once the hidden states end at a multiple of eight.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from engine.errors import SaveError
from engine.saves.selection import IntArray
from engine.saves.spec import ClientTensor, SaveDtype

ALIGNMENT = 8
LENGTH_BYTES = 8

ITEM_SIZES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "U8": 1}
STORED_NAMES: Mapping[SaveDtype, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
_CLIENT_NAMES = {"int64": "I64", "float32": "F32", "uint8": "U8"}

HIDDEN_STATES = "hidden_states"
SCALES = "hidden_states_scales"
TOKEN_IDS = "token_ids"
POSITIONS = "positions"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the header."""

    name: str
    dtype: str
    """As the header names it, for example `BF16`."""
    shape: tuple[int, ...]

    @property
    def item_size(self) -> int:
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.item_size


@dataclass(frozen=True)
class TailTensor:
    """A tensor that follows the hidden states; `values` is little-endian and of the entry's dtype and shape."""

    entry: TensorEntry
    values: npt.NDArray[np.generic]


def encode_header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The header's JSON, its length not in front and unpadded. `entries` are in the order in which they lie in the file."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, offset + entry.nbytes]}
        offset += entry.nbytes
    return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()


def pad_header(encoded: bytes, data_start: int) -> bytes:
    """The file's first `data_start` bytes: the header's length, the header, spaces."""
    size = data_start - LENGTH_BYTES
    assert len(encoded) <= size
    return size.to_bytes(LENGTH_BYTES, "little") + encoded.ljust(size)


def data_start_for(header_bytes: int, hidden_bytes: int, at_least: int = 0) -> int:
    """Smallest offset for the first tensor that leaves room for the header and lets `hidden_bytes` end at a multiple of eight.

    The item size of the hidden states divides both eight and their length, so they begin aligned as well.
    """
    start = max(LENGTH_BYTES + header_bytes, at_least)
    return start + -(start + hidden_bytes) % ALIGNMENT


def client_tail(name: str, tensor: ClientTensor) -> TailTensor:
    """Raises `SaveError` "out_of_range" for a number that the tensor's dtype can't hold."""
    try:
        with np.errstate(over="ignore"):
            values = np.asarray(tensor.values, dtype=np.dtype(tensor.dtype).newbyteorder("<")).reshape(-1)
    except (OverflowError, ValueError, TypeError) as error:
        raise SaveError("out_of_range", f"tensors.{name} holds a value that {tensor.dtype} can't hold") from error
    if tensor.dtype == "float32" and not np.isfinite(values).all():
        raise SaveError("out_of_range", f"tensors.{name} holds a value that is not finite in float32")
    return TailTensor(client_entry(name, tensor), values)


def client_entry(name: str, tensor: ClientTensor) -> TensorEntry:
    return TensorEntry(name, _CLIENT_NAMES[tensor.dtype], (len(tensor.values),))


def int64_tail(name: str, values: IntArray | Sequence[int]) -> TailTensor:
    return TailTensor(TensorEntry(name, "I64", (len(values),)), np.asarray(values, dtype="<i8"))
