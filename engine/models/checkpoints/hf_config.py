"""Reads a checkpoint folder's JSON files. Every value is checked where it is read; errors name the file and the field."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from engine.errors import ModelError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEFAULT_DTYPE = torch.bfloat16
"""For checkpoints that name none and whose weights don't tell."""


def read_json_object(path: Path) -> dict[str, object]:
    """Raises `ModelError` for a file that is missing, unreadable or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


class JsonObject:
    """A JSON object with typed access. A null counts as absent, as it does for transformers' optional settings."""

    def __init__(self, source: str, values: Mapping[str, object]) -> None:
        self.source = source
        self.values = values

    def get(self, name: str) -> object:
        return self.values.get(name)

    def with_defaults(self, defaults: Mapping[str, object], nullable: Collection[str] = ()) -> "JsonObject":
        """The same object with absent settings filled in, and nulls too but for those of `nullable`, where null has a meaning."""
        given = {name: value for name, value in self.values.items() if value is not None or name in nullable or name not in defaults}
        return JsonObject(self.source, {**defaults, **given})

    def with_values(self, **values: object) -> "JsonObject":
        """The same object with these settings in the place of its own."""
        return JsonObject(self.source, {**self.values, **values})

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.source}: {message}")

    def optional_integer(self, name: str) -> int | None:
        """A positive integer or None."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(f"{name} must be a positive integer, not {value!r}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; one without a default is required."""
        value = self.optional_integer(name)
        if value is not None:
            return value
        if default is None:
            raise self.error(f"{name} is missing")
        return default

    def count(self, name: str, default: int) -> int:
        """An integer that isn't negative."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(f"{name} must be an integer that isn't negative, not {value!r}")
        return value

    def optional_number(self, name: str) -> float | None:
        """A positive number or None."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(f"{name} must be a positive number, not {value!r}")
        return float(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; one without a default is required."""
        value = self.optional_number(name)
        if value is not None:
            return value
        if default is None:
            raise self.error(f"{name} is missing")
        return default

    def numbers(self, name: str) -> tuple[float, ...]:
        """A required list of positive numbers."""
        value = self.get(name)
        if not isinstance(value, list):
            raise self.error(f"{name} must be a list of numbers")
        return tuple(JsonObject(self.source, {name: item}).number(name) for item in value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, not {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(f"{name} must be a string, not {value!r}")
        return value

    def child(self, name: str) -> "JsonObject | None":
        """The object under this name; None where it is absent or empty."""
        value = self.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{name} must be an object, not {value!r}")
        return JsonObject(f"{self.source}: {name}", value)


def read_config(folder: Path) -> JsonObject:
    """`config.json` of a model folder."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    path = folder / "config.json"
    return JsonObject(str(path), read_json_object(path))


def named_dtype(config: JsonObject) -> torch.dtype | None:
    """`dtype` (transformers 5) or `torch_dtype` (earlier); None where neither says."""
    name = config.text("dtype", config.text("torch_dtype", "auto")).removeprefix("torch.")
    if name == "auto":
        return None
    if name not in DTYPES:
        raise config.error(f"dtype {name} is not supported; supported are {', '.join(DTYPES)}")
    return DTYPES[name]
