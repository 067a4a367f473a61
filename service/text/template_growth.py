"""How large a text or list can be that an operation of a chat template makes, judged before it runs.

Only what multiplies stands here: repeats, pads to a width, or puts one value in many places. What else a template can do makes at most a
small multiple of what it is given (escapes are the most, twelve characters for one), which is measured afterwards.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError
from markupsafe import soft_str

Size = Callable[[object], int]
LARGEST_EXPONENT = 64
LARGEST_NUMBER = 10**18
"""Of what `*` and `**` make of numbers."""
URL_MARKUP = 64
"""Characters that `urlize` writes around an address, beside its arguments."""


def operation_size(operator: str, left: Any, right: Any, size: Size) -> int:  # noqa: ANN401 - any values
    """Of `+`, `*`, `%`. Raises `SecurityError` for numbers that are too large."""
    if operator == "%":
        return _percent_size(left, right, size) if isinstance(left, str | bytes) else 0
    if operator == "+":
        return size(left) + size(right)
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return 0
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int):
            return size(value) * times
    return 0


def power(base: Any, exponent: Any) -> Any:  # noqa: ANN401 - any values
    _check_exponent(exponent)
    result = base**exponent
    if isinstance(result, int) and abs(result) > LARGEST_NUMBER:
        raise SecurityError(f"a number is larger than {LARGEST_NUMBER}")
    return result


def _check_exponent(exponent: object) -> None:
    if isinstance(exponent, int) and abs(exponent) > LARGEST_EXPONENT:
        raise SecurityError(f"an exponent is larger than {LARGEST_EXPONENT}")


def _check_bits(bits: int) -> None:
    if bits > LARGEST_NUMBER.bit_length():
        raise SecurityError(f"a number is larger than {LARGEST_NUMBER}")


def _percent_size(text: str | bytes, values: object, size: Size) -> int:
    shown = text if isinstance(text, str) else text.decode("latin-1")
    given = values if isinstance(values, tuple) else (values,)
    widths = _numbers_in(shown) + (_sum_of_numbers(given) if "*" in shown else 0)
    # Values of a mapping can be named more than once.
    times = shown.count("%") if isinstance(values, Mapping) else 1
    return len(shown) + widths + times * size(given)


def _numbers_in(text: str) -> int:
    """What all widths and precisions in a format come to, and any other number in it."""
    return sum(int(digits[:20]) for digits in re.findall(r"\d+", text))


def _sum_of_numbers(values: Sequence[object]) -> int:
    return sum(abs(value) for value in values if isinstance(value, int))


def _format_size(size: Size, text: str, *values: object, **named: object) -> int:
    given = (*values, *named.values())
    widths = _numbers_in(text) + (_sum_of_numbers(given) if re.search(r":[^{}]*\{", text) else 0)
    return len(text) + widths + text.count("{") * max(map(size, given), default=0)


def _format_map_size(size: Size, text: str, values: Mapping[str, object]) -> int:
    return _format_size(size, text, *values.values())


def _padded_size(size: Size, value: object, width: int = 80, *_fill: object) -> int:
    return max(size(value), width)


def _replaced_size(size: Size, value: Any, old: Any, new: object, *_count: object) -> int:  # noqa: ANN401 - texts or bytes
    found: int = value.count(old)
    return size(value) + found * max(0, size(new) - size(old))


def _joined_size(size: Size, separator: object, values: Any) -> int:  # noqa: ANN401 - any values
    return size(values) + len(values) * size(separator)


def _translated_size(size: Size, text: str | bytes, table: object, *_delete: object) -> int:
    longest = max(map(size, table.values()), default=1) if isinstance(table, Mapping) else 1
    return len(text) * max(longest, 1)


def _expanded_size(size: Size, text: Any, tabsize: int = 8) -> int:  # noqa: ANN401 - text or bytes
    tabs: int = text.count("\t" if isinstance(text, str) else b"\t")
    return size(text) + tabs * tabsize


def _number_size(size: Size, _number: int, length: int = 1, *_order: object, **_signed: object) -> int:
    return length


def _hex_size(size: Size, data: bytes, separator: object = "", *_bytes: object) -> int:
    return len(data) * (2 + size(separator))


METHODS: Mapping[str, Callable[..., int]] = {
    "center": _padded_size,
    "expandtabs": _expanded_size,
    "format": _format_size,
    "format_map": _format_map_size,
    "hex": _hex_size,
    "join": _joined_size,
    "ljust": _padded_size,
    "replace": _replaced_size,
    "rjust": _padded_size,
    "to_bytes": _number_size,
    "translate": _translated_size,
    "zfill": _padded_size,
}
"""Methods of texts, bytes and numbers; called with what they belong to and their arguments."""


def _filled_size(size: Size, value: object, count: int, fill_with: object = None) -> int:
    return size(value) + (0 if fill_with is None else count * (size(fill_with) + 1))


def _sliced_size(size: Size, value: object, slices: int, fill_with: object = None) -> int:
    return size(value) + slices * (size(fill_with) + 1)


def _indented_size(size: Size, value: object, width: int | str = 4, *_lines: object, **_named: object) -> int:
    text = soft_str(value)
    return len(text) + (len(text.splitlines()) + 1) * (width if isinstance(width, int) else len(width))


def _percent_filter_size(size: Size, value: object, *values: object, **named: object) -> int:
    return _percent_size(soft_str(value), named or values, size)


def _joined_filter_size(size: Size, values: Any, d: object = "", attribute: object = None) -> int:  # noqa: ANN401 - any values
    return _joined_size(size, d, values)


def _replaced_filter_size(size: Size, s: object, old: object, new: object, count: object = None) -> int:
    return _replaced_size(size, soft_str(s), soft_str(old), new)


def _rounded_size(size: Size, value: object, precision: int = 0, method: object = "common") -> int:
    _check_exponent(precision)  # of ten
    return 0


def _wrapped_size(
    size: Size, s: object, width: object = 79, break_long_words: object = True, wrapstring: object = None, *_more: object, **_named: object
) -> int:
    return size(s) + (size(s) + 1) * (1 if wrapstring is None else size(wrapstring))


def _urls_size(size: Size, value: object, *arguments: object, **named: object) -> int:
    return size(value) + len(soft_str(value).split()) * (URL_MARKUP + size((*arguments, *named.values())))


FILTERS: Mapping[str, Callable[..., int]] = {
    "batch": _filled_size,
    "center": _padded_size,
    "format": _percent_filter_size,
    "indent": _indented_size,
    "join": _joined_filter_size,
    "replace": _replaced_filter_size,
    "round": _rounded_size,
    "slice": _sliced_size,
    "urlize": _urls_size,
    "wordwrap": _wrapped_size,
}
"""Filters by name, called with the filter's own arguments."""
