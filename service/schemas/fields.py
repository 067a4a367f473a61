"""Field types shared by request bodies. What can't be said with bounds raises `InvalidRequest` with a message that names the field."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from engine.errors import InvalidRequest


def _encodable(text: str) -> str:
    # JSON can carry half of a surrogate pair; it has no UTF-8 form and would fail far from here.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode, it holds half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


def checked_text(value: object, param: str) -> str:
    """A string that has a UTF-8 form. Raises `InvalidRequest`."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a string, got {shown(value)}", param)
    try:
        return _encodable(value)
    except ValueError as error:
        raise InvalidRequest(f"{param} {error}", param) from None


def is_number(value: object) -> bool:
    """Whether a JSON value is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def kinds_of(values: list[Any]) -> set[type]:
    """The types of the items, at the speed of C: true and false are `bool`, other integers `int`."""
    return set(map(type, values))


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object, limit: int = 80) -> str:
    """A value as an error message shows it: short, whatever the client sent."""
    # Only the beginning of a long list or string is formatted.
    short = value[:limit] if isinstance(value, str | list) else value
    try:
        text = ascii(short)
    except ValueError:  # an integer with more digits than Python formats
        return "a very large number"
    return text if len(text) <= limit else text[:limit] + "…"


class Body(BaseModel):
    """A strict request body: no "5" for 5, no true for 1; null means the same as an absent field."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item is not None or name not in cls.model_fields}
