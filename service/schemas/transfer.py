"""`kv_transfer_params`: what a request wants saved (contract of `POST /v1/completions`)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from engine.errors import InvalidRequest
from engine.saves.selection import ALL_ROWS, LAST_ROW, RowSelection
from engine.saves.spec import ClientTensor
from service.config.units import MAX_TTL_SECONDS
from service.schemas.fields import Body, Text, checked_text, is_integer, kinds_of, shown

PREFIX = "kv_transfer_params"
IGNORED_FIELDS = frozenset({"do_remote_decode", "do_remote_prefill"})
RESERVED_TENSORS = frozenset({"hidden_states", "token_ids", "positions", "hidden_states_scales", "__metadata__"})
MAX_NAME_LENGTH = 256
BASE_EXTRA_BYTES = 2**20
EXTRA_BYTES_PER_TOKEN = 16
FLOAT32_MAX = 3.4028234663852886e38
POSITION_LIMIT = 2**62
ITEM_BYTES = {"int64": 8, "float32": 4, "uint8": 1}


def _positions(value: object) -> RowSelection:
    param = f"{PREFIX}.positions"
    if value == "all":
        return ALL_ROWS
    if value == "last":
        return LAST_ROW
    if not isinstance(value, list):
        raise InvalidRequest(f'{param} must be "all", "last" or a list of [start, end) pairs, got {shown(value)}', param)
    rows = RowSelection(tuple(_pair(pair, param) for pair in value))
    rows.validate(None, param)
    return rows


def _pair(value: object, param: str) -> tuple[int, int | None]:
    if isinstance(value, list) and len(value) == 2 and is_integer(value[0]) and (value[1] is None or is_integer(value[1])):
        start, end = value
        if max(abs(start), abs(end or 0)) < POSITION_LIMIT:
            return start, end
    raise InvalidRequest(f"{param} holds {shown(value)}; a pair is [start, end] with integers, end may be null", param)


def _layers(value: object) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{PREFIX}.layers must be a list of layer ids, got {shown(value)}", f"{PREFIX}.layers")
    return tuple(value)


def _tensors(value: object) -> dict[str, ClientTensor]:
    param = f"{PREFIX}.tensors"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object of name to list of numbers, got {shown(value)}", param)
    return {_tensor_name(name, param): _tensor(values, f"{param}.{name}") for name, values in value.items()}


def _tensor_name(name: str, param: str) -> str:
    if name in RESERVED_TENSORS:
        raise InvalidRequest(f"{param} holds {name!r}, a reserved name; reserved are {', '.join(sorted(RESERVED_TENSORS))}", param)
    return _name(name, param)


def _name(name: str, param: str) -> str:
    checked_text(name, param)
    if not 1 <= len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidRequest(f"{param} holds a name that is not 1 to {MAX_NAME_LENGTH} printable characters long", param)
    return name


def _tensor(values: object, param: str) -> ClientTensor:
    if not isinstance(values, list) or not values:
        raise InvalidRequest(f"{param} must be a list of at least one number, got {shown(values)}", param)
    kinds = kinds_of(values)
    if kinds == {bool}:
        return ClientTensor("uint8", list(map(int, values)))
    if kinds == {int}:
        if not (min(values) >= -(2**63) and max(values) < 2**63):
            raise InvalidRequest(f"{param} holds an integer that doesn't fit int64", param)
        return ClientTensor("int64", values)
    if not kinds <= {int, float}:
        raise InvalidRequest(f"{param} must hold only numbers or only booleans", param)
    if not (min(values) >= -FLOAT32_MAX and max(values) <= FLOAT32_MAX):
        raise InvalidRequest(f"{param} holds a number that is not a finite float32", param)
    return ClientTensor("float32", list(map(float, values)))


def _metadata(value: object) -> dict[str, str]:
    param = f"{PREFIX}.metadata"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object of string to string, got {shown(value)}", param)
    return {_name(name, param): checked_text(text, f"{param}.{name}") for name, text in value.items()}


def _wait(value: object) -> object:
    if isinstance(value, bool) or value == "accepted":
        return value
    raise InvalidRequest(f'{PREFIX}.wait must be true, false or "accepted", got {shown(value)}', f"{PREFIX}.wait")


_POSITIONS_SCHEMA = {
    "anyOf": [
        {"type": "string", "enum": ["all", "last"]},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        },
    ],
    "default": "all",
}
_LAYERS_SCHEMA = {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "integer"}, {"type": "string", "const": "norm"}]}}
_NUMBERS_SCHEMA = {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "number"}, {"type": "boolean"}]}}
_TENSORS_SCHEMA = {"type": "object", "additionalProperties": _NUMBERS_SCHEMA, "default": {}}
_METADATA_SCHEMA = {"type": "object", "additionalProperties": {"type": "string"}, "default": {}}


class TransferParams(Body):
    """What to save of a request. An unknown field is refused: a typo must not silently change training data."""

    model_config = ConfigDict(extra="forbid")

    hidden_states_path: Text | None = Field(None, description="Where to write; absent: the server names the file in the default root.")
    include_output_tokens: bool = Field(False, description="Rows for generated tokens too, without the last sampled one.")
    include_last_token: bool = Field(False, description="One more forward, so that the last sampled token has a row too.")
    layers: Annotated[tuple[object, ...] | None, PlainValidator(_layers), WithJsonSchema(_LAYERS_SCHEMA)] = Field(
        None, description="Layer ids; absent: the server's --layers."
    )
    positions: Annotated[RowSelection, PlainValidator(_positions), WithJsonSchema(_POSITIONS_SCHEMA)] = Field(
        ALL_ROWS, description="Token positions that are kept: ascending disjoint [start, end) pairs, negatives from the end."
    )
    pooling: Literal["mean"] | None = Field(None, description="One mean row over the kept positions instead of the rows.")
    dtype: Literal["auto", "float32", "float16", "bfloat16", "float8_e4m3fn"] = Field("auto", description="dtype on disk.")
    tensors: Annotated[Mapping[str, ClientTensor], PlainValidator(_tensors), WithJsonSchema(_TENSORS_SCHEMA)] = Field(
        {}, description="Small tensors stored beside the states; ints become int64, floats float32, bools uint8."
    )
    metadata: Annotated[Mapping[str, str], PlainValidator(_metadata), WithJsonSchema(_METADATA_SCHEMA)] = Field(
        {}, description="Copied into the file's metadata under the prefix `user.`."
    )
    wait: Annotated[bool | Literal["accepted"], BeforeValidator(_wait)] = Field(
        True, description="When to answer: once the file is published, once the text is done, or at once with 202."
    )
    idempotency_key: Text | None = Field(None, min_length=1, max_length=256, description="A repeated request returns the existing save.")
    on_conflict: Literal["error", "replace"] = Field("error", description="What to do where the target file exists.")
    ttl_seconds: float | None = Field(
        None, gt=0, le=MAX_TTL_SECONDS, description="Seconds from the end of the save until its file is removed; absent: --ttl-seconds."
    )
    extract: bool | None = Field(None, description="false: no file for this request; true: extract, with all defaults.")

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if not isinstance(value, dict):
            return value
        kept = {name: item for name, item in value.items() if name not in IGNORED_FIELDS}
        # Of the unknown names only the first, which is the one to be named: each would make an error of its own.
        unknown = [name for name in kept if name not in cls.model_fields]
        return {name: kept[name] for name in kept if name in cls.model_fields or name == unknown[0]} if unknown else kept

    @property
    def saves_output(self) -> bool:
        return self.include_output_tokens or self.include_last_token

    def check_size(self, num_tokens: int) -> None:
        """Metadata and client tensors (names, keys and values in bytes) take at most 1 MiB plus 16 bytes per token.

        `num_tokens` counts the prompt and the most tokens that may be generated. Raises `InvalidRequest`.
        """
        limit = BASE_EXTRA_BYTES + EXTRA_BYTES_PER_TOKEN * num_tokens
        size = sum(len(key.encode()) + len(text.encode()) for key, text in self.metadata.items())
        size += sum(len(name.encode()) + ITEM_BYTES[tensor.dtype] * len(tensor.values) for name, tensor in self.tensors.items())
        if size > limit:
            message = f"{PREFIX}.metadata and {PREFIX}.tensors take {size} bytes, at most {limit} are allowed (1 MiB and 16 per token)"
            raise InvalidRequest(message, f"{PREFIX}.tensors" if self.tensors else f"{PREFIX}.metadata")
