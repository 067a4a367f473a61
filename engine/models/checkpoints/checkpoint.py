"""The safetensors files of a checkpoint: which tensors there are, and copying them into place bit by bit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError
from engine.models.checkpoints.hf_config import read_json_object
from engine.models.checkpoints.tensor_names import canonical_names

FLOAT_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
TORCH_DTYPES = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CHUNK_BYTES = 64 << 20
"""The most of a tensor that is read at once."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a file's header describes it."""

    file: Path
    name: str
    """As it is stored."""
    shape: tuple[int, ...]
    dtype: str
    """Safetensors' name: F32, BF16, …"""

    @property
    def nbytes(self) -> int:
        return FLOAT_DTYPES.get(self.dtype, 1) * torch.Size(self.shape).numel()


class Checkpoint:
    """A folder with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Tensors go by their canonical names (`tensor_names.py`), whatever prefix they are stored with. `wanted` says which count at all.
    """

    def __init__(
        self,
        folder: Path,
        progress: Callable[[int, int], None] | None = None,
        wanted: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._folder = folder
        stored = read_headers(folder)
        names = canonical_names(stored, str(folder))
        self._tensors = {name: stored[stored_name] for name, stored_name in names.items() if wanted(name)}
        self._progress = progress
        self._bytes_done = 0
        self._bytes_total = sum(tensor.nbytes for tensor in self._tensors.values())
        self._unread = set(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def unread(self) -> frozenset[str]:
        """Names of tensors that nobody has asked for."""
        return frozenset(self._unread)

    def copy(self, name: str, target: torch.Tensor) -> None:
        """Copies a tensor into `target`, converting it to the target's dtype.

        Raises `ModelError` where it is missing, of another shape, or not stored as floating-point numbers.
        """
        stored = self._checked(name, tuple(target.shape))
        self._read(stored, _chunks(stored), lambda start, end, source: target[start:end].copy_(source))

    def copy_parts(self, name: str, targets: Sequence[torch.Tensor]) -> None:
        """Copies a tensor's parts along its first dimension, one into each of the targets. Raises as `copy` does."""
        stored = self._checked(name, (len(targets), *targets[0].shape))
        each = [(number, number + 1) for number in range(len(targets))]
        self._read(stored, each, lambda start, _, source: targets[start].copy_(source[0]))

    def _read(self, stored: StoredTensor, ranges: Sequence[tuple[int, int]], put: Callable[[int, int, torch.Tensor], object]) -> None:
        """Gives `put` the ranges along the first dimension, one after the other."""
        try:
            # Opened per tensor: the pages of the mapped file leave memory as soon as they are copied.
            with safe_open(stored.file, framework="pt") as file:
                source = file.get_slice(stored.name)
                for start, end in ranges:
                    put(start, end, source[start:end])
                    self._advance((end - start) * stored.nbytes // stored.shape[0])
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{stored.file} can't be read: {error}") from None

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same numbers. Counts the second one as read where they do."""
        stored, other = self._checked(first, None), self._checked(second, None)
        if (stored.shape, stored.dtype) != (other.shape, other.dtype):
            return False
        with safe_open(stored.file, framework="pt") as file, safe_open(other.file, framework="pt") as other_file:
            left, right = file.get_slice(stored.name), other_file.get_slice(other.name)
            equal = all(torch.equal(left[start:end], right[start:end]) for start, end in _chunks(stored))
        if equal:
            self._unread.discard(second)
            self._advance(other.nbytes)
        return equal

    def _checked(self, name: str, shape: tuple[int, ...] | None) -> StoredTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise ModelError(f"{self._folder}: weight {name} is missing")
        if stored.dtype not in FLOAT_DTYPES:
            raise ModelError(f"{stored.file}: weight {name} is stored as {stored.dtype}; quantised checkpoints are not supported")
        if shape is not None:
            if stored.shape != shape:
                raise ModelError(f"{stored.file}: weight {name} has shape {list(stored.shape)}, expected {list(shape)}")
            self._unread.discard(name)
        return stored

    def _advance(self, nbytes: int) -> None:
        self._bytes_done += nbytes
        if self._progress is not None:
            self._progress(self._bytes_done, self._bytes_total)


def _chunks(stored: StoredTensor) -> list[tuple[int, int]]:
    """Ranges along the first dimension of at most `CHUNK_BYTES` (but at least one row) each."""
    rows = stored.shape[0]
    step = max(1, CHUNK_BYTES * rows // max(1, stored.nbytes))
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def has_weights(folder: Path) -> bool:
    """Whether there are weights at all; a folder without them is refused when they are loaded."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The floating-point dtype that most bytes of a checkpoint's weights have; None where none has one that can be computed in."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in read_headers(folder).values():
        if (dtype := TORCH_DTYPES.get(tensor.dtype)) is not None:
            sizes[dtype] = sizes.get(dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by their stored names; a single file goes before an index, as in transformers.

    With an index a tensor is that of the file which the index maps its name to: an older copy in another shard doesn't count.
    Raises `ModelError` for a file that is missing or damaged, and for a name that isn't where the index says.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return _read_header(single)
    if not index.is_file():
        raise ModelError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    weight_map = _weight_map(index)
    shards = {name: _read_header(_shard(folder, name, index)) for name in dict.fromkeys(weight_map.values())}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ModelError(f"{index} maps weight {name} to {shard}, which doesn't hold it")
    mapped = {name: shards[shard][name] for name, shard in weight_map.items()}
    return mapped | _unmapped(shards, weight_map, index)


def _unmapped(shards: Mapping[str, dict[str, StoredTensor]], weight_map: Mapping[str, str], index: Path) -> dict[str, StoredTensor]:
    """Tensors that the index forgets. One that two shards hold is refused: nothing says which of them is meant."""
    found: dict[str, StoredTensor] = {}
    for header in shards.values():
        for name, tensor in header.items():
            if name in weight_map:
                continue
            if name in found:
                raise ModelError(f"{index} doesn't map weight {name}, which {found[name].file.name} and {tensor.file.name} hold")
            found[name] = tensor
    return found


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    return {str(name): str(file) for name, file in weight_map.items()}


def _shard(folder: Path, name: str, index: Path) -> Path:
    file = folder / name
    if Path(name).name != name:
        raise ModelError(f"{index} lists {name!r}, which is not the name of a file in its folder")
    if not file.is_file():
        raise ModelError(f"{file} is missing, though {index.name} lists it")
    return file


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - the handle isn't iterable
            return {name: StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} can't be read: {error}") from None
