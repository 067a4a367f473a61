"""Where chat templates run: jinja2's sandbox, set up as transformers does, with bounds on what one rendering may take.

A template comes with a model and is not the client's, but what it does depends on what the client sends. So it can't reach files or
Python's internals, and it ends: see `Bounds`.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

CHECK_EVERY = 256
"""Steps between two looks at the clock."""
LARGEST_NUMBER = 10**18
"""Of what `**` makes and of what is passed to calls that can make something of any size."""


@dataclass(frozen=True)
class Bounds:
    """What one rendering may take. Loops over numbers are bounded by jinja2 itself (100,000 steps)."""

    cpu_seconds: float = 10.0
    """Of the rendering thread, so that a busy machine fails no request."""
    characters: int = 2**24
    """Of the result, and of any text that the template puts together on the way."""


class _Meter:
    """Counts what one rendering takes."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._end = time.thread_time() + bounds.cpu_seconds
        self._steps = 0
        self._written = 0

    def step(self, cost: int = 1) -> None:
        self._steps += cost
        if self._steps < CHECK_EVERY:
            return
        self._steps = 0
        if time.thread_time() > self._end:
            raise SecurityError(f"rendering takes more than {self._bounds.cpu_seconds:g} seconds")

    def write(self, text: str) -> None:
        self._written += len(text)
        self.check_size(self._written)

    def check_size(self, characters: int) -> None:
        if characters > self._bounds.characters:
            raise SecurityError(f"the text is longer than {self._bounds.characters} characters")


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model has said, for those who train on it. Here the text just stands there."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers: what is set inside isn't seen outside.
        return nodes.CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Macro) -> str:
        return str(caller())


class _Namespace(Namespace):
    """A template's `namespace(…)`. Names with an underscore in front could reach what the sandbox hides."""

    def __init__(*args: Any, **names: Any) -> None:  # noqa: ANN401 - a template may use any name, `self` included
        self, *mappings = args
        attributes = dict(*mappings, **names)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401 - any value
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't hold the name {name!r}")


class _DictMaker:
    """A template's `dict`: makes dictionaries, without being the type itself."""

    def __call__(self, *args: Any, **names: Any) -> dict[Any, Any]:  # noqa: ANN401 - any value
        return dict(*args, **names)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:  # noqa: ANN401 - any value
        return dict.fromkeys(*args)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles chat templates and renders them within bounds. Safe to use from several threads."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, bounds: Bounds | None = None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
        self._bounds = bounds or Bounds()
        self._meter: ContextVar[_Meter | None] = ContextVar("meter", default=None)
        self.filters["tojson"] = _to_json
        self.filters |= {name: self._sized(self.filters[name]) for name in ("batch", "center", "format", "indent", "slice")}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _DictMaker(),
            "namespace": _Namespace,
        }

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Raises whatever the template raises, and jinja2's `SecurityError` where it goes out of bounds."""
        meter = _Meter(self._bounds)
        token = self._meter.set(meter)
        try:
            return "".join(_metered(template.generate(dict(variables)), meter))
        finally:
            self._meter.reset(token)

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - any value
        self._step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401 - any value
        self._step()
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, N805 - as jinja2 declares it
        __self._step(CHECK_EVERY)  # `range` is one call, and many rounds of a loop
        if isinstance(getattr(__obj, "__self__", None), str):
            __self._check_numbers(args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - any value
        self._step()
        if operator == "**":
            return _power(left, right)
        if operator == "*":
            self._check_size(_product_size(left, right))
        elif isinstance(left, str) and isinstance(right, str):
            self._check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _step(self, cost: int = 1) -> None:
        meter = self._meter.get()
        if meter is not None:  # None while the template is compiled, which evaluates constants
            meter.step(cost)

    def _check_size(self, size: int) -> None:
        if size > self._bounds.characters:
            raise SecurityError(f"the text is longer than {self._bounds.characters} characters")

    def _check_numbers(self, values: tuple[Any, ...]) -> None:
        """Of a method or filter that pads a text to a width or repeats something."""
        for value in values:
            if isinstance(value, int):
                self._check_size(value)

    def _sized(self, text_filter: Callable[..., Any]) -> Callable[..., Any]:
        def bounded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any value
            self._check_numbers((*args, *kwargs.values()))
            return text_filter(*args, **kwargs)

        # jinja2 marks filters that want the environment with attributes of the function.
        bounded.__dict__.update(text_filter.__dict__)
        return bounded


def _metered(pieces: Iterator[str], meter: _Meter) -> Iterator[str]:
    for piece in pieces:
        meter.step()
        meter.write(piece)
        yield piece


def _product_size(left: object, right: object) -> int:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            return len(value) * times
    return 0


def _power(base: Any, exponent: Any) -> Any:  # noqa: ANN401 - any value
    if isinstance(exponent, int) and abs(exponent) > 64:
        raise SecurityError("an exponent is larger than 64")
    result = base**exponent
    if isinstance(result, int) and abs(result) > LARGEST_NUMBER:
        raise SecurityError(f"a number is larger than {LARGEST_NUMBER}")
    return result


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,  # noqa: ANN401 - any value
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which is not wanted here."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    # Local time without a zone, as transformers gives it.
    return datetime.now(UTC).astimezone().replace(tzinfo=None).strftime(pattern)
