"""Chat templates: what they are given, what they refuse, and that none of them can hang or take all memory."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.errors import InvalidRequest, ModelError
from service.text.chat_templates import ChatTemplates, Conversation
from service.text.template_bounds import Bounds
from service.text.template_sandbox import TemplateSandbox

Json = dict[str, Any]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}{% if add_generation_prompt %}[model]{% endif %}"
HI: Json = {"role": "user", "content": "Hi"}


def templates(source: str, bounds: Bounds | None = None) -> ChatTemplates:
    return ChatTemplates({"default": source}, TOKENS, TemplateSandbox(bounds))


def render(source: str, *messages: Json, bounds: Bounds | None = None, **fields: Any) -> str:  # noqa: ANN401 - any field
    return templates(source, bounds).render(Conversation(messages or [HI], **fields))


def refusal(source: str, *messages: Json, bounds: Bounds | None = None, **fields: Any) -> str:  # noqa: ANN401 - any field
    with pytest.raises(InvalidRequest) as caught:
        render(source, *messages, bounds=bounds, **fields)
    assert caught.value.param in ("messages", "continue_final_message")
    return str(caught.value)


def test_special_tokens_and_arguments_are_variables() -> None:
    assert render("{{ bos_token }}{{ eos_token }}{{ sep_token }}{{ x }}", arguments={"x": 5, "eos_token": "E"}) == "<s>E5"


def test_blocks_leave_no_space_and_no_line_behind() -> None:
    assert render("a\n  {% if true %}\n  b\n  {% endif %}\nc\n") == "a\n  b\nc"


def test_loops_can_be_left_and_gone_on_with() -> None:
    assert (
        render("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "023"
    )


def test_json_is_not_escaped() -> None:
    assert render("{{ x | tojson }}", arguments={"x": {"b": "<é & '>", "a": [1, None]}}) == '{"b": "<é & \'>", "a": [1, null]}'
    assert render("{{ x | tojson(indent=1) }}", arguments={"x": [1]}) == "[\n 1\n]"


def test_marks_of_what_a_model_said_are_taken() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ messages[0].content }}{% endgeneration %}{{ x }}"
    assert render(source) == "Hi1"


def test_the_date_can_be_asked_for() -> None:
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_namespaces_and_dictionaries_can_be_made() -> None:
    assert render(
        "{% set n = namespace(a=1, self=2) %}{% set n.a = n.a + n.self %}{{ n.a }}{{ dict(a=1) }}{{ dict.fromkeys([1], 2) }}"
    ) == ("3{'a': 1}{1: 2}")


def test_fields_that_are_null_are_missing() -> None:
    assert render("{{ messages[0].content is defined }}{{ messages[0].x is defined }}", {**HI, "x": None}) == "TrueFalse"
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"


def test_reasoning_goes_by_either_name() -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert render(source, {"role": "assistant", "content": "", name: "hm"}) == "hmhm"


def test_what_a_template_raises_reaches_the_client() -> None:
    assert refusal("{{ raise_exception('roles must alternate') }}") == "the chat template refuses the messages: roles must alternate"


@pytest.mark.parametrize(
    "source",
    [
        "{{ x.y }}",
        "{{ 1 + 'a' }}",
        "{{ messages[0].content.nope() }}",
        "{{ 1 / 0 }}",
        "{{ messages | tojson | nope }}",
        "{% include 'x' %}",
    ],
)
def test_failures_of_a_template_are_the_clients_to_know(source: str) -> None:
    if "nope }}" in source:
        with pytest.raises(ModelError, match="nope"):
            templates(source)
    else:
        assert "refuses the messages" in refusal(source)


def test_long_messages_of_a_template_are_cut() -> None:
    assert len(refusal("{{ raise_exception('x' * 10000) }}")) < 600


def test_a_template_that_is_not_valid_is_named() -> None:
    with pytest.raises(ModelError, match="the chat template is not valid"):
        templates("{% for %}")


def test_without_a_template_there_is_a_reason() -> None:
    with pytest.raises(InvalidRequest, match="this model has no chat template"):
        ChatTemplates({}, {}).render(Conversation([HI]))
    with pytest.raises(InvalidRequest, match="no chat template for all messages, only rag"):
        ChatTemplates({"rag": "x"}, {}).render(Conversation([HI]))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("An answer", "<s>[user]Hi;[assistant]An answer"),
        ("  An answer \n", "<s>[user]Hi;[assistant]  An answer \n"),
        ("continue- x ;", "<s>[user]Hi;[assistant]continue- x ;"),
    ],
)
def test_the_last_message_can_stay_open(content: str, expected: str) -> None:
    last = {"role": "assistant", "content": content}
    assert render(PLAIN, HI, last, continue_final_message=True, add_generation_prompt=False) == expected


def test_an_open_message_that_is_trimmed_ends_with_its_text() -> None:
    last = {"role": "assistant", "content": "An answer  "}
    source = PLAIN.replace("m.content", "m.content | trim")
    assert render(source, HI, last, continue_final_message=True, add_generation_prompt=False) == "<s>[user]Hi;[assistant]An answer"


@pytest.mark.parametrize(
    ("source", "last"),
    [
        ("{{ messages[0].content }}", {"role": "assistant", "content": "gone"}),
        ("nothing", {"role": "assistant", "content": "x"}),
        (PLAIN, {"role": "assistant"}),
        (PLAIN.replace("m.content", "m.content | upper"), {"role": "assistant", "content": "x"}),
    ],
)
def test_what_cannot_stay_open_is_refused(source: str, last: Json) -> None:
    assert "continue_final_message" in refusal(source, HI, last, continue_final_message=True, add_generation_prompt=False)


def test_parts_stay_parts_where_a_template_takes_them() -> None:
    parts: Json = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    loop = "{% for p in m.content %}<{{ p.text }}>{% endfor %}"
    takes_parts = f"{{% for m in messages %}}{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{loop}{{% endif %}}{{% endfor %}}"
    assert render(takes_parts, parts) == "<a><b>"
    assert render(takes_parts) == "Hi"
    assert render(PLAIN, parts) == "<s>[user]a\nb;[model]"
    assert render(f"{{% for m in messages %}}{loop}{{% endfor %}}") == "<Hi>"


def parts(role: str, *texts: str) -> Json:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
CALLING: Json = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("shown", ["m.content", "m.content | string | trim", "m.content | tojson", "'%s' % m.content"])
def test_parts_are_joined_in_the_roles_where_a_template_would_show_them_as_data(role: str, shown: str) -> None:
    loop = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}"
    source = f"{{% for m in messages %}}{{% if m.role == '{role}' %}}{{{{ {shown} }}}}{{% else %}}{loop}{{% endif %}};{{% endfor %}}"
    texts = [parts(other, "a", "b") for other in ROLES if other != role]
    expected = '"a\\nb"' if "tojson" in shown else "a\nb"
    assert render(source, *texts, parts(role, "a", "b")) == "<a><b>;" * len(texts) + f"{expected};"


def test_parts_are_joined_where_a_template_would_write_only_the_first() -> None:
    source = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }};{% endfor %}"
    assert render(source, parts("user", "a", "b")) == "a\nb;"
    only_first_part = "{% for m in messages %}{{ m.content[0].text }};{% endfor %}"
    assert render(only_first_part, parts("user", "a", "b")) == "a\nb;"


def test_parts_are_joined_where_only_conversations_with_tools_show_them_as_data() -> None:
    loop = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}"
    source = f"{{% for m in messages %}}{{% if tools %}}{{{{ m.content }}}}{{% else %}}{loop}{{% endif %}};{{% endfor %}}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render(source, parts("system", "a", "b"), HI, tools=tools) == "a\nb;Hi;"


def test_parts_of_other_types_are_texts() -> None:
    content = [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}, {"type": "output_text", "text": "c", "x": None}]
    assert render("{{ messages[0].content }}", {"role": "user", "content": content}) == "a\nb\nc"
    whole = "{% for p in messages[0].content %}{{ p.text if p.text is defined and p | length == 2 else p }}{% endfor %}"
    assert render(whole, {"role": "user", "content": content}) == "abc"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_content_is_empty_where_a_template_fails_without(content: Json) -> None:
    needs = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }};{% endfor %}"
    assert render(needs, HI, {**CALLING, **content}, HI) == "user:Hi;assistant:;user:Hi;"
    asks = "{% for m in messages %}{{ m.content is defined }};{% endfor %}"
    assert render(asks, HI, {**CALLING, **content}) == "True;False;"
    only_parts = "{% for m in messages %}{{ m.role + ':' + m.content[0].text }};{% endfor %}"
    assert render(only_parts, HI, {**CALLING, **content}) == "user:Hi;assistant:;"


@pytest.mark.parametrize(
    "empty", [{"tool_calls": []}, {"tool_calls": None}, {"name": ""}, {"annotations": []}, {"refusal": None}, {"function_call": {}}]
)
def test_empty_fields_are_absent(empty: Json) -> None:
    name = next(iter(empty))
    answer = {"role": "assistant", "content": "x"}
    assert render(f"{{{{ messages[0].{name} is defined }}}}{{{{ messages[0].content }}}}", {**answer, **empty}) == "Falsex"


def test_a_refusal_is_what_was_said() -> None:
    assert render(PLAIN, {"role": "assistant", "content": None, "refusal": "No."}) == "<s>[assistant]No.;[model]"
    assert render(PLAIN, {"role": "assistant", "content": "x", "refusal": "No."}) == "<s>[assistant]x;[model]"


def test_what_a_tool_leaves_open_is_given_where_a_template_fails_without() -> None:
    tool: Json = {"type": "function", "function": {"name": "f", "description": None, "strict": None, "parameters": None}}
    assert render("{{ tools | tojson }}", tools=[tool]) == '[{"type": "function", "function": {"name": "f"}}]'
    needs = "{% for t in tools %}{{ t.function.name + t.function.description }}{{ t.function.parameters | tojson }}{% endfor %}"
    assert render(needs, tools=[tool]) == 'f{"type": "object", "properties": {}}'
    null_default = {"type": "object", "properties": {"a": {"default": None}}}
    kept: Json = {"type": "function", "function": {"name": "f", "parameters": null_default}}
    assert '"default": null' in render("{{ tools | tojson }}", tools=[kept])


def test_a_refusal_has_the_words_that_remain_once_content_is_given() -> None:
    assert refusal("{{ raise_exception('no') }}", HI).endswith(": no")
    needs = "{% for m in messages %}{{ m['content'] + '' }}{% endfor %}{{ raise_exception('no') }}"
    assert refusal(needs, HI, {"role": "assistant"}).endswith(": no")


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": " "}])
def test_a_call_without_arguments_has_none(arguments: Json) -> None:
    message: Json = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", **arguments}}]}
    call = "messages[0].tool_calls[0]"
    assert render(f"{{{{ {call}.function.arguments | tojson }}}}", message) == "{}"
    assert (
        render("{% for m in messages %}{% for c in m.tool_calls %}{{ 'x' + c.function.arguments }}{% endfor %}{% endfor %}", message)
        == "x{}"
    )
    assert render(f"{{{{ {call}['type'] + {call}.function.name }}}}", message) == "functionf"


def test_arguments_of_calls_are_objects_unless_a_template_needs_text() -> None:
    def message(arguments: object) -> Json:
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]}

    as_json = "{% for m in messages %}-{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    as_text = "{% for m in messages %}-{% for c in m.tool_calls %}{{ 'x' + c.function.arguments }}{% endfor %}{% endfor %}"
    assert render(as_json, message('{"a": 1}')) == render(as_json, message({"a": 1})) == '-{"a": 1}'
    assert render(as_json, message("")) == "-{}"
    assert render(as_json, message("not json")) == '-"not json"'
    assert render(as_text, message('{"a": 1}')) == '-x{"a": 1}'


def test_messages_are_left_as_they_were() -> None:
    message: Json = {"role": "user", "content": [{"type": "text", "text": "a"}], "x": None}
    for source in (PLAIN, "{{ messages[0].content[0].text }}"):
        render(source, message, continue_final_message=True, add_generation_prompt=False)
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}], "x": None}


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ dict.mro() }}",
        "{{ raise_exception.__globals__ }}",
        "{% set n = namespace() %}{% set n.__init__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ '{0.__class__}'.format(messages) }}",
    ],
)
def test_templates_do_not_reach_what_is_behind_them(source: str) -> None:
    try:
        text = render(source)
    except InvalidRequest:
        return
    assert text == ""  # an attribute that isn't there


SMALL = Bounds(cpu_seconds=0.2, characters=10_000)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{{ i }}{% endfor %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% set x = i * j %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% set r = range(90000) %}{% set x %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}{% endset %}",
        "{% set r = range(90000) %}{% for i in r %}{% for j in r %}{% if i == j %}{% endif %}{% endfor %}{% endfor %}",
    ],
)
def test_endless_templates_end(source: str) -> None:
    refusal(source, bounds=SMALL)


def nested(made: str = "[{0}, {0}]", name: str = "s") -> str:
    """Forty containers in one another, which are 2**40 texts where they are written out."""
    made = made.format(f"{name}.x")
    return f"{{% set {name} = namespace(x=['abcdefgh']) %}}{{% for i in range(40) %}}{{% set {name}.x = {made} %}}{{% endfor %}}"


LARGE = {
    "repeated text": "{{ 'x' * n }}",
    "repeated text, the other way round": "{{ n * 'x' }}",
    "repeated list": "{{ [1] * n }}",
    "repeated bytes": "{{ 'x'.encode() * n }}",
    "power": "{{ 10 ** n }}",
    "power, by itself small": "{{ 9 ** 60 }}",
    "product of numbers": "{% set s = namespace(x=9) %}{% for i in range(40) %}{% set s.x = s.x * s.x %}{% endfor %}",
    "number of bytes": "{{ (1).to_bytes(n, 'big') | length }}",
    "rounded number": "{{ 5 | round(-n) }}",
    "center": "{{ 'x' | center(n) }}",
    "center as a method": "{{ 'x'.center(n) }}",
    "indent": "{{ 'x\ny' | indent(n) }}",
    "indent with a text": "{{ 'x\ny\nz' | indent(many) }}",
    "zfill": "{{ 'x'.zfill(n) }}",
    "ljust": "{{ 'x'.ljust(n) }}",
    "ljust of bytes": "{{ 'x'.encode().ljust(n) }}",
    "method by another name": "{% set f = 'x'.ljust %}{{ f(n) | length }}",
    "expandtabs": "{{ '\t'.expandtabs(n) | length }}",
    "expandtabs by name": "{{ '\t'.expandtabs(tabsize=n) | length }}",
    "translate": "{{ ('x' * 200).translate({120: many}) | length }}",
    "batch": "{{ [1] | batch(n, 0) | list | length }}",
    "slice": "{{ [1] | slice(n) | list | length }}",
    "width from a value": "{{ '%*d' | format(n, 1) }}",
    "width in a text": "{{ '%999999999d' | format(1) | length }}",
    "width in a text, by operator": "{{ ('%999999999d' % 1) | length }}",
    "width by operator from a value": "{{ ('%*d' % (n, 1)) | length }}",
    "precision": "{{ '%.999999999f' | format(1) | length }}",
    "width in braces": "{{ '{:999999999}'.format(1) | length }}",
    "width in braces from a value": "{{ '{:{w}}'.format(1, w=n) | length }}",
    "mapping in braces": "{{ '{x:999999999}'.format_map({'x': 1}) | length }}",
    "one value in many places": "{{ ('{0}' * 200).format(many) | length }}",
    "one named value in many places": "{{ (('%(x)s' * 200) % {'x': many}) | length }}",
    "replace": "{{ ('x' * 200) | replace('x', many) | length }}",
    "replace as a method": "{{ ('x' * 200).replace('x', many) | length }}",
    "replace of nothing": "{{ ('x' * 200).replace('', many) | length }}",
    "replace of bytes": "{{ ('x' * 200).encode().replace('x'.encode(), many.encode()) | length }}",
    "join": "{{ range(200) | list | join(many) | length }}",
    "join of a range": "{{ range(200) | map('string') | join(many) | length }}",
    "join as a method": "{{ many.join(('x ' * 200).split()) | length }}",
    "join of one text many times": "{{ ([many] * 200) | join | length }}",
    "join of one text many times, made on the way": "{{ range(200) | map('center', 5000) | join | length }}",
    "list of one text many times": "{{ range(200) | map('center', 5000) | list | length }}",
    "wordwrap": "{{ ('x' * 5000) | wordwrap(1, true, many) | length }}",
    "urlize": "{{ ('http://x.org ' * 100) | urlize(target=many) | length }}",
    "lists added up": "{{ ([[1] * 2000] * 2000) | sum(start=[]) | length }}",
    "doubled": "{% set s = namespace(x='xx') %}{% for i in range(99) %}{% set s.x = s.x + s.x %}{% endfor %}",
    "doubled as text": "{% set s = namespace(x='xx') %}{% for i in range(30) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
    "doubled list": "{% set s = namespace(x=[1]) %}{% for i in range(99) %}{% set s.x = s.x + s.x %}{% endfor %}",
    "doubled in a block": "{% set s = namespace(x='xx') %}"
    "{% for i in range(30) %}{% set y %}{{ s.x }}{{ s.x }}{% endset %}{% set s.x = y %}{% endfor %}",
    "doubled in a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set s = namespace(x='xx') %}"
    "{% for i in range(30) %}{% set s.x = f(s.x) %}{% endfor %}",
    "doubled arguments": "{% macro f(i) %}{% if i > 60 %}{{ varargs }}{% else %}"
    "{{ f(i + 1, varargs, varargs) }}{% endif %}{% endmacro %}{{ f(0, 1) }}",
    "text of a named block": "{% if 0 %}{% block a %}{% for i in range(9000) %}xxxx{% endfor %}{% endblock %}{% endif %}"
    "{% set y = self.a() %}",
    "text of a block": "{% set y %}{% for i in range(9000) %}xxxx{% endfor %}{% endset %}",
    "text of a filtered block": "{% filter length %}{% for i in range(9000) %}xxxx{% endfor %}{% endfilter %}",
    "nested lists as text": nested() + "{{ s.x }}",
    "nested lists as text on the way": nested() + "{{ s.x | string | length }}",
    "nested lists joined to a text": nested() + "{% set y = s.x ~ '' %}",
    "nested lists as JSON": nested() + "{{ s.x | tojson | length }}",
    "nested lists, pretty": nested() + "{{ s.x | pprint | length }}",
    "nested lists escaped": nested() + "{{ s.x | e | length }}",
    "nested lists formatted": nested() + "{{ '%s' % s.x }}",
    "nested lists compared": nested() + nested(name="t") + "{{ s.x == t.x }}",
    "nested dictionaries": nested("{{1: {0}, 2: {0}}}") + "{{ s.x }}",
    "nested tuples": nested("({0}, {0})") + "{{ s.x }}",
    "nested dictionaries by a call": nested("dict(a={0}, b={0})") + "{{ s.x }}",
    "nested lists by a filter": nested("([{0}] * 2) | list") + "{{ s.x }}",
    "JSON with much space": "{{ [[1]] | tojson(indent=n) }}",
    "JSON with long separators": "{{ ([1] * 1000) | tojson(separators=(many, many)) | length }}",
    "written": "{% for i in range(20000) %}xx{% endfor %}",
    "words out of nothing": "{{ lipsum(n=10000) | length }}",
}


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE.keys())
def test_small_templates_do_not_make_large_texts(source: str) -> None:
    words = refusal(source, arguments={"n": 10**12, "many": "y" * 5000}, bounds=Bounds(characters=10_000))
    assert re.search(r"longer than \d+ characters|an? \w+ (is larger|has more) than|'lipsum' is undefined", words), words


@pytest.mark.parametrize(
    ("source", "length"),
    [
        ("{{ messages[0].content | replace('a', 'bc') | trim }}", 8000),
        ("{{ messages[0].content.replace('a', '') }}", 0),
        ("{{ messages[0].content.split('\n') | join('; ') }}", 4000),
        ("{{ '%s: %s' | format('user', messages[0].content) }}", 4006),
        ("{{ '{}: {}'.format('user', messages[0].content) }}", 4006),
        ("{{ messages | tojson }}", 4033),
        ("{{ messages | tojson(indent=2) }}", 4049),
        ("{{ messages[0].content | indent(4) }}", 4000),
        ("{{ messages }}", 4033),
        ("{{ (messages + messages)[1:] | map(attribute='content') | list | join }}", 4000),
        ("{{ [1, 2] | sum }}{{ [[1], [2]] | sum(start=[]) }}{{ [{'a': 1}] | sum(attribute='a') }}", 8),
        ("{{ {'b': [1], 'a': (2,)} | pprint }}", 21),
        ("{% for i in range(2000) %}{{ (messages + messages) | length }}{% endfor %}", 2000),
        ("{% for a, b in [[1, 2], [3, 4]] %}{{ a ~ b }}{% endfor %}", 4),
    ],
)
def test_what_templates_do_with_long_texts_is_within_bounds(source: str, length: int) -> None:
    assert len(render(source, {"role": "user", "content": "a" * 4000}, bounds=Bounds(characters=10_000))) == length


def test_bounds_are_those_of_one_rendering() -> None:
    made = templates("{{ 'x' * 9000 }}", SMALL)
    for _ in range(5):
        assert len(made.render(Conversation([HI]))) == 9000
