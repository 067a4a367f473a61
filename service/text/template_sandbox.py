"""Where chat templates run: jinja2's sandbox, set up as transformers does, with bounds on what one rendering may take.

A template comes with a model and is not the client's, but what it does depends on what the client sends. So it can't reach files or
Python's internals, and it ends: see `Bounds`. All that makes a value goes through the `Meter` of the rendering: operators, literals,
filters, calls, and blocks of text (`_BoundedCode` has the compiled template do so where jinja2 has no hook for it).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial, wraps
from pprint import PrettyPrinter
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from service.text.template_bounds import CHECK_EVERY, Bounds, Buffer, Meter
from service.text.template_growth import FILTERS, METHODS, operation_size, power

DEEPEST = 1000
"""How deep containers can be nested and still be written out, by Python's limit on recursion."""
LONGEST_DATE_PATTERN = 1000


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

    def __repr__(self) -> str:
        # What it holds can be changed, so its size can't be known beforehand.
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't hold the name {name!r}")


class _DictMaker:
    """A template's `dict`: makes dictionaries, without being the type itself."""

    def __call__(self, *args: Any, **names: Any) -> dict[Any, Any]:  # noqa: ANN401 - any value
        return dict(*args, **names)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:  # noqa: ANN401 - any value
        return dict.fromkeys(*args)


class _BoundedCode(CodeGenerator):
    """Code that counts each block that it enters, and checks what literals, `~` and blocks of text make."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.step()")
        super().blockvisit(nodes, frame)

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.new_buffer()")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - as jinja2 names it
        self._checked(super().visit_Concat, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._checked(super().visit_Dict, node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._checked(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._checked(super().visit_Tuple, node, frame)
        else:  # what is assigned to
            super().visit_Tuple(node, frame)

    def _checked(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.checked(")
        visit(node, frame)
        self.write(")")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles chat templates and renders them within bounds. Safe to use from several threads."""

    code_generator_class = _BoundedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, bounds: Bounds | None = None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
        self._bounds = bounds or Bounds()
        self._meter: ContextVar[Meter | None] = ContextVar("meter", default=None)
        self.filters |= {"tojson": self._to_json, "pprint": self._pretty, "sum": self._sum}
        self.filters = {name: self._bounded_filter(name, function) for name, function in self.filters.items()}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _DictMaker(),
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]  # text of any length, out of nothing

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Raises whatever the template raises, and jinja2's `SecurityError` where it goes out of bounds."""
        meter = Meter(self._bounds)
        token = self._meter.set(meter)
        try:
            return self.concat(template.generate(dict(variables)))
        finally:
            self._meter.reset(token)

    @property
    def meter(self) -> Meter:
        """That of the rendering; one of its own for each constant that is evaluated while a template is compiled."""
        return self._meter.get() or Meter(self._bounds)

    def step(self) -> None:
        self.meter.step()

    def checked(self, value: Any) -> Any:  # noqa: ANN401 - any value
        return self.meter.checked(value)

    def new_buffer(self) -> Buffer:
        return Buffer(self.meter)

    def concat(self, pieces: Iterable[str]) -> str:
        if isinstance(pieces, Buffer):
            return "".join(pieces)
        buffer = self.new_buffer()
        buffer.extend(pieces)
        return "".join(buffer)

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - any value
        self.step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:  # noqa: ANN401 - any value
        self.step()
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, N805 - as jinja2 declares it
        meter = __self.meter
        meter.step(CHECK_EVERY)  # `range` is one call, and many rounds of a loop
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int) and method.__name__ in METHODS:
            args = tuple(_listed(args))
            meter.check(METHODS[method.__name__](meter.size, owner, *args, **kwargs))
        elif isinstance(__obj, Macro):
            meter.checked((args, kwargs))  # which it has as one value each
        return meter.checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - any value
        return self._operated(operator, left, right)

    def _operated(self, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - any value
        meter = self.meter
        meter.step()
        if operator == "**":
            return power(left, right)
        meter.check(operation_size(operator, left, right, meter.size))
        return meter.checked(self.binop_table[operator](left, right))

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        size_of = FILTERS.get(name)
        own = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja2's own first argument

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any value
            meter = self.meter
            meter.step()
            if size_of is not None:
                args = (*args[:own], *_listed(args[own:]))
                meter.check(size_of(meter.size, *args[own:], **kwargs))
            return meter.checked(function(*args, **kwargs))

        return bounded

    def _sum(self, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:  # noqa: ANN401 - any value
        """jinja2's own adds lists up without a look at the clock."""
        total = start
        for item in iterable if attribute is None else map(make_attrgetter(self, attribute), iterable):
            total = self._operated("+", total, item)
        return total

    def _pretty(self, value: Any) -> str:  # noqa: ANN401 - any value
        """jinja2's own, piece by piece."""
        buffer = self.new_buffer()
        PrettyPrinter(stream=buffer).pprint(value)  # type: ignore[arg-type]  # it only writes
        return self.concat(buffer).removesuffix("\n")

    def _to_json(
        self,
        value: Any,  # noqa: ANN401 - any value
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """jinja2's own filter escapes HTML, which is not wanted here."""
        dumps = partial(json.JSONEncoder, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
        meter = self.meter
        if separators is not None:
            meter.check(meter.size(value) + meter.size(value) // 2 * meter.size(separators))
        if indent is None:
            return dumps().encode(value)
        meter.check(DEEPEST * (indent if isinstance(indent, int) else len(indent)))
        return self.concat(dumps(indent=indent).iterencode(value))


def _listed(values: Sequence[Any]) -> Iterator[Any]:
    """The values, with a list for an iterator: its length must be known before it is used."""
    return (list(value) if isinstance(value, Iterator) else value for value in values)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > LONGEST_DATE_PATTERN:
        raise SecurityError(f"a pattern of a date is longer than {LONGEST_DATE_PATTERN} characters")
    # Local time without a zone, as transformers gives it.
    return datetime.now(UTC).astimezone().replace(tzinfo=None).strftime(pattern)
