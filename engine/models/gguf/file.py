"""Reading a GGUF file: its metadata with typed errors, and its tensors as float32.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.errors import ModelError

Value = TypeVar("Value", int, float, str, bool, list)  # type: ignore[type-arg]  # lists of any kind of item


@dataclass(frozen=True)
class GGUFMetadata:
    """The file's key-value pairs."""

    values: Mapping[str, Any]
    source: str
    """For messages."""

    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        """The value of `key`. Raises `ModelError` where it is missing without a default, or of another type."""
        value = self.values.get(key, default)
        if value is None:
            raise ModelError(f"{self.source} lacks the metadata key {key}")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.source}: the metadata key {key} should be of type {kind.__name__}, not {type(value).__name__}")
        return value

    def optional_int(self, key: str) -> int | None:
        return self.get(key, int) if key in self.values else None

    @property
    def architecture(self) -> str:
        return self.get("general.architecture", str)


class GGUFFile:
    """An open GGUF file, or all parts of a split one by the path of any of them; tensors are memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError` for a file that is damaged, cut short, or a part of which is missing."""
        readers = [_open(part) for part in parts_of(path)]
        values = {key: field.contents() for key, field in readers[0].fields.items()}
        self.metadata = GGUFMetadata(values, str(path))
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        expected = self.metadata.get("split.tensors.count", int, len(self.tensors))
        if len(self.tensors) != expected:
            raise ModelError(f"{path}: its parts hold {len(self.tensors)} tensors, but should hold {expected}")

    @property
    def dtype(self) -> str:
        """The dtype that most of the matrices are stored in, by bytes; bfloat16 for quantised ones."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                name = _PLAIN_DTYPES.get(tensor.tensor_type.name, "bfloat16")
                sizes[name] = sizes.get(name, 0) + int(tensor.n_bytes)
        return max(sizes, key=lambda name: sizes[name], default="bfloat16")

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first, as in PyTorch (GGUF lists the fastest-moving dimension first)."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor, dequantised to float32 exactly as ggml does it. Raises `ModelError` for a type that isn't read."""
        tensor = self.tensors[name]
        try:
            weights: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:  # what the library says of a type that it can't dequantise
            raise ModelError(
                f"{self.metadata.source}: the tensor {name} is of type {tensor.tensor_type.name}, which is not read"
            ) from error
        return weights.reshape(self.shape(name))


_PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def parts_of(path: Path) -> list[Path]:
    """The file itself, or all parts of a split file (`name-00001-of-00003.gguf`) in order. Raises `ModelError` where one is missing."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    name, count = found.group(1), int(found.group(3))
    parts = [path.with_name(f"{name}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(f"{path}: the part {missing[0]} is missing ({len(missing)} of {count} are)")
    return parts


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ModelError(f"{path} is not a GGUF file, or it is damaged or cut short") from error
