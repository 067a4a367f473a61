"""What forms of messages a chat template takes, found out by rendering short ones."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import product

from jinja2.exceptions import SecurityError

from service.wire import Json

Render = Callable[[Sequence[Json], Sequence[Json]], str]
"""Messages and tools to text; raises whatever the template raises."""
PROBES = ("probe-7f3a", "probe-e91c")
SHOWN_AS_DATA = re.compile(rf"text\\*['\"]\s*:\s*\\*['\"]{PROBES[0]}")
"""A part as Python or JSON shows it."""
FUNCTION: Json = {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}}
TOOLS: tuple[Json, ...] = ({"type": "function", "function": FUNCTION},)
CONTEXTS: Mapping[str, Sequence[tuple[str, str]]] = {
    "system": [("", "user"), ("user assistant", "user")],
    "developer": [("", "user"), ("user assistant", "user")],
    "user": [("", ""), ("user assistant", "")],
    "assistant": [("user", "user"), ("user", "tool user"), ("user", "")],
    "tool": [("user call", ""), ("user call", "assistant user")],
}
"""Between which messages templates take one of a role."""
OTHER_ROLE, OTHER_CONTEXTS = "other", [("user", ""), ("user assistant", "user")]


class TemplateProbes:
    """Asks a template once for each question, when the answer is first needed."""

    def __init__(self, source: str, render: Render) -> None:
        self._render = render
        self._named = frozenset(re.findall(r"['\"](\w+)['\"]", source))
        self._takes: dict[tuple[str, str], bool] = {}
        self._endless = False

    def takes_text(self, role: str) -> bool:
        """Whether content that is a string is written in messages of the role."""
        return self._known("text", role, self._text_is_written)

    def takes_parts(self, role: str) -> bool:
        """Whether the texts of all parts are written wherever a string is, and not as Python or JSON shows the parts."""
        return self._known("parts", role, self._parts_are_written)

    def takes_one_part(self, role: str) -> bool:
        return self._known("part", role, lambda role: any(self._written(role, _parts(PROBES[0]))))

    @cached_property
    def takes_objects(self) -> bool:
        """Whether arguments of tool calls may be objects. Most templates write those as JSON; a few only take text."""
        return not self._fails_with({}) or self._fails_with("{}")

    def _known(self, form: str, role: str, find: Callable[[str], bool]) -> bool:
        # Clients may use any role: those that the template can't tell apart share one answer.
        role = role if role in CONTEXTS or role in self._named else OTHER_ROLE
        if (form, role) not in self._takes:
            self._takes[form, role] = find(role)
        return self._takes[form, role]

    def _text_is_written(self, role: str) -> bool:
        return any(self._written(role, PROBES[0]))

    def _parts_are_written(self, role: str) -> bool:
        as_text, as_parts = self._written(role, PROBES[0]), self._written(role, _parts(*PROBES))
        return any(as_parts) and all(parts or not text for text, parts in zip(as_text, as_parts, strict=True))

    def _written(self, role: str, content: object) -> list[bool]:
        """In which conversations a template writes this content of a message of the role."""
        texts = PROBES[:1] if isinstance(content, str) else [part["text"] for part in content]  # type: ignore[attr-defined]
        contexts = CONTEXTS.get(role, OTHER_CONTEXTS)
        rendered = [
            self._probed(self._conversation(role, content, before, after, in_parts), tools)
            for (before, after), in_parts, tools in product(contexts, (False, True), ((), TOOLS))
        ]
        return [all(text in output for text in texts) and not SHOWN_AS_DATA.search(output) for output in rendered]

    def _conversation(self, role: str, content: object, before: str, after: str, in_parts: bool) -> list[Json]:
        message = {**self._filler(role), "content": content}
        if after.startswith("tool"):
            message |= {"tool_calls": [self._call()]}
        fillers = [[self._filler(name) for name in names.split()] for names in (before, after)]
        if in_parts:
            fillers = [[{**filler, "content": _parts(filler["content"])} for filler in some] for some in fillers]
        return [*fillers[0], message, *fillers[1]]

    def _filler(self, name: str) -> Json:
        if name == "call":
            return {"role": "assistant", "content": "x", "tool_calls": [self._call()]}
        if name == "tool":
            return {"role": name, "content": "x", "name": FUNCTION["name"], "tool_call_id": _call({})["id"]}
        return {"role": name, "content": "x"}

    def _call(self) -> Json:
        return _call({} if self.takes_objects else "{}")

    def _fails_with(self, arguments: object) -> bool:
        calling = {"role": "assistant", "content": "", "tool_calls": [_call(arguments)]}
        return not self._probed([{"role": "user", "content": PROBES[0]}, calling], ())

    def _probed(self, messages: Sequence[Json], tools: Sequence[Json]) -> str:
        """What the template makes of messages; nothing where it refuses them."""
        if self._endless:
            return ""
        try:
            return self._render(messages, tools)
        except SecurityError:  # it has taken all the time that a rendering may take, which must not happen once for each question
            self._endless = True
            return ""
        except Exception:  # whatever a template does with messages that it wasn't made for
            return ""


def _parts(*texts: str) -> list[Json]:
    return [{"type": "text", "text": text} for text in texts]


def _call(arguments: object) -> Json:
    # Nine letters and digits, which some templates insist on.
    return {"id": "probe7f3a", "type": "function", "function": {"name": FUNCTION["name"], "arguments": arguments}}
