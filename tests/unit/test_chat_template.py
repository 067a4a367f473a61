"""Chat templates: what they are given, what they refuse, and that none of them can hang or take all memory."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.errors import InvalidRequest, ModelError
from service.text.chat_templates import ChatTemplates, Conversation
from service.text.template_sandbox import Bounds, TemplateSandbox

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
    ],
)
def test_endless_templates_end(source: str) -> None:
    refusal(source, bounds=SMALL)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * n }}",
        "{{ n * 'x' }}",
        "{{ [1] * n }}",
        "{{ 10 ** n }}",
        "{{ 9 ** 60 }}",
        "{{ 'x' | center(n) }}",
        "{{ 'x\ny' | indent(n) }}",
        "{{ 'x'.zfill(n) }}",
        "{{ 'x'.ljust(n) }}",
        "{{ [1] | batch(n, 0) | list | length }}",
        "{{ [1] | slice(n) | list | length }}",
        "{{ '%*d' | format(n, 1) }}",
        "{% set s = namespace(x='xx') %}{% for i in range(99) %}{% set s.x = s.x + s.x %}{% endfor %}",
        "{% for i in range(20000) %}xx{% endfor %}",
    ],
)
def test_small_templates_do_not_make_large_texts(source: str) -> None:
    refusal(source, arguments={"n": 10**12}, bounds=SMALL)


def test_bounds_are_those_of_one_rendering() -> None:
    made = templates("{{ 'x' * 9000 }}", SMALL)
    for _ in range(5):
        assert len(made.render(Conversation([HI]))) == 9000
