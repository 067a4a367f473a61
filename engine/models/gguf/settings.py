"""A GGUF file's settings of one architecture: every key is read, known to change nothing, or refused by name.

Meanings and defaults are those of llama.cpp (`src/llama-arch.cpp`, `src/llama-model.cpp`): a key that is absent has its default there.
"""

from typing import Any

import numpy as np

from engine.errors import ModelError
from engine.models.gguf.file import GGUFMetadata, Value

HARMLESS = frozenset({"vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned", "attention.layer_norm_epsilon"})
"""Keys that change no hidden state of the architectures that are read here."""


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class GGUFSettings:
    """The keys that begin with the architecture's name. Raises `ModelError`s that name file and key."""

    def __init__(self, metadata: GGUFMetadata) -> None:
        self.source = metadata.source
        self._metadata = metadata
        self._prefix = f"{metadata.architecture}."
        self._read: set[str] = set()

    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        self._read.add(key)
        return self._metadata.get(self._prefix + key, kind, default)

    def number(self, key: str, default: float | None = None) -> float:
        return shortest(self.get(key, float, default))

    def has(self, key: str) -> bool:
        return self._prefix + key in self._metadata.values

    def raw(self, key: str) -> Any:  # noqa: ANN401 - whatever the file holds; None where it holds nothing
        self._read.add(key)
        return self._metadata.values.get(self._prefix + key)

    def refuse_unless(self, key: str, *neutral: object) -> None:
        """Refuses a value that would change results in a way that isn't built. Absent is always neutral."""
        if self.has(key):
            value = self.raw(key)
            if not any(_equal(value, other) for other in neutral):
                raise self.error(f"{self._prefix}{key} = {value!r} is not supported")

    def refuse_unknown(self) -> None:
        """To be called when everything has been read."""
        known = self._read | HARMLESS
        keys = (key.removeprefix(self._prefix) for key in self._metadata.values if key.startswith(self._prefix))
        unknown = sorted(key for key in keys if key not in known)
        if unknown:
            raise self.error(f"the meaning of {self._prefix}{unknown[0]} is not known ({len(unknown)} such in all)")

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.source}: {message}")


def _equal(value: object, other: object) -> bool:
    if isinstance(value, float) and isinstance(other, int | float) and not isinstance(other, bool):
        return bool(np.float32(value) == np.float32(other))
    return value == other and isinstance(value, bool) == isinstance(other, bool)
