"""Reading a GGUF file: its metadata with typed errors, and its tensors as float32.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

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
    """An open GGUF file; tensors are memory-mapped."""

    def __init__(self, path: Path) -> None:
        try:
            reader = GGUFReader(path)
            values = {key: field.contents() for key, field in reader.fields.items()}
        except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
        self.metadata = GGUFMetadata(values, str(path))
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first, as in PyTorch (GGUF lists the fastest-moving dimension first)."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor, dequantised to float32 exactly as ggml does it."""
        tensor = self.tensors[name]
        weights: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        return weights.reshape(self.shape(name))
