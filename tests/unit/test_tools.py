"""Tool calls: found in every form, whatever the splits of a stream; all else remains content."""

import json
import random
from typing import Any

import pytest

from chatting import CHATML, HEADERS, TURNS, WEATHER
from yocolm.chat import ChatTemplate
from yocolm.engine.guided import GuideFactory
from yocolm.errors import ConfigError, RequestError
from yocolm.models.registry import load_tokenizer
from yocolm.server.tools import (
    TOOL_PARSERS,
    ToolParser,
    guided_for_tool_choice,
    make_tool_parser,
)

NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
PLAIN = ChatTemplate({"default": "{{ messages }}"})
Found = tuple[str, list[tuple[str, Any]]]


def parser(name: str, **more: Any) -> ToolParser:
    return make_tool_parser(name, PLAIN, TOOLS, **more)


def parse(one: ToolParser, *pieces: str) -> Found:
    """Content and calls of a text pushed in pieces."""
    deltas = [*(one.push(piece) for piece in pieces), one.finish()]
    calls = [call for delta in deltas for call in delta.calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    ids = [call.id for call in calls]
    assert len(set(ids)) == len(ids) and all(i is not None and i.startswith("call_") for i in ids)
    content = "".join(delta.content for delta in deltas)
    return content, [(str(call.name), json.loads(call.arguments)) for call in calls]


def split_everywhere(name: str, text: str, **more: Any) -> Found:
    """The result, which is the same for every split into two, for single characters and others."""
    whole = parse(parser(name, **more), text)
    for cut in range(len(text) + 1):
        assert parse(parser(name, **more), text[:cut], text[cut:]) == whole, cut
    assert parse(parser(name, **more), *text) == whole
    rng = random.Random(0)
    for _ in range(10):
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(parser(name, **more), *pieces) == whole
    return whole


ULM = ("get_weather", {"town": "Ulm"})
NESTED = (
    "get_weather",
    {"town": 'Å "x" </b>\n', "days": 2, "more": {"deep": [1, True, None, -2.5]}},
)
NESTED_JSON = json.dumps({"name": NESTED[0], "arguments": NESTED[1]})
NESTED_BRACES = (
    'call:get_weather{town:<|"|>Å "x" </b>\n<|"|>,days:2,more:{deep:[1,true,null,-2.5]}}'
)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Ulm"}}\n'
         "</tool_call>", "", [ULM]),
        ("hermes", f'I look. \n\n<tool_call>{NESTED_JSON}</tool_call>\n<tool_call>{{"name":"now"}}'
         "</tool_call>\n", "I look.", [NESTED, ("now", {})]),
        ("hermes", f"<tool_call>{NESTED_JSON}", "", [NESTED]),  # the end mark is a stop token
        ("hermes", '<tool_call>{"name":"now"}</tool_call> and <b>more </b> ', "and <b>more </b> ",
         [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [("now", {})]),
        ("json", '{"name": "get_weather", "parameters": {"town": "Ulm"}}', "", [ULM]),
        ("json", f' [{NESTED_JSON}, {{"name": "now"}}]\n', "", [NESTED, ("now", {})]),
        ("json", f'{NESTED_JSON}; {{"name": "now"}} done', "done", [NESTED, ("now", {})]),
        ("json", '{"type": "function", "function": {"name": "now", "arguments": {}}}', "",
         [("now", {})]),
        ("pythonic", '[get_weather(town="Ulm"), now()]', "", [ULM, ("now", {})]),
        ("pythonic", "[get_weather('Ulm', 3)]", "", [("get_weather", {"town": "Ulm", "days": 3})]),
        ("pythonic", 'Well:\n```tool_code\nget_weather(town="Ulm")\nnow()\n```', "Well:",
         [ULM, ("now", {})]),
        ("pythonic", '```tool_code\nprint(api.get_weather(town="Ulm", days=-1, on=true))\n```\nOk.',
         "Ok.", [("get_weather", {"town": "Ulm", "days": -1, "on": True})]),
        ("pythonic", '```json\n{"name": "now", "parameters": {}}\n```', "", [("now", {})]),
        ("gemma4", "<|tool_call>" + NESTED_BRACES + "<tool_call|>", "", [NESTED]),
        ("gemma4", "So: <|tool_call>call:now{}<tool_call|><|tool_call>call:get_weather{town:Ulm}"
         "<tool_call|>", "So:", [("now", {}), ULM]),
        ("gemma4", '<|tool_call>call:get_weather{ "town": "U\\"lm", <|"|>a:b<|"|>: [ ] }',
         "", [("get_weather", {"town": 'U"lm', "a:b": []})]),
        ("functiongemma", "<start_function_call>call:get_weather{town:<escape>Ulm<escape>}"
         "<end_function_call>", "", [ULM]),
        ("auto", f"Text. <tool_call>{NESTED_JSON}</tool_call>", "Text.", [NESTED]),
        ("auto", '[get_weather(town="Ulm")]', "", [ULM]),
    ],
)  # fmt: skip
def test_calls(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert split_everywhere(name, text) == (content, calls)


NO_CALLS = [
    "Hello, world.\n\n",
    "  a < b, <tool, <tool_cal",
    "<tool_call>{broken</tool_call> and on",
    "<tool_call>",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "now", "arguments": "[1]"}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": {"town": NaN}}</tool_call>',
    '<tool_call>{"name": "now"} {"name": "now"}</tool_call>',
    "<tool_call>[]</tool_call>",
    "<tool_call>5</tool_call>",
    '{"name": "Ulm", "population": 5}\n',
    '{"name": 5}',
    "{" * 80,
    "[1] is a footnote, [2] too",
    "[I don't know] ...",
    "[]",
    '{"open": "',
    "```json\n{}\n```",
    "```tool_code\nx = 1\n```",
    "```tool_code\nget_weather(town=x)\n```",
    "```tool_code\nget_weather(**{})\n```",
    "```tool_code\nnow(1)\n```",
    "```tool_code\nget_weather({1, 2})\n```",
    "```tool_code\n```",
    "```python\nnow()\n```",
    "[now(), 5]",
    "```tool_code\n" + "(" * 300 + ")" * 300 + "\n```",
    "<|tool_call>now{}<tool_call|>",
    "<|tool_call>call:now{<tool_call|>",
    "<|tool_call>call:now{}}<tool_call|>",
    "<|tool_call>call:get_weather{town}<tool_call|>",
    "<|tool_call>call:get_weather{town:}<tool_call|>",
    "<|tool_call>call:get_weather{:1}<tool_call|>",
    '<|tool_call>call:get_weather{town:<|"|>Ulm}<tool_call|>',
    "<|tool_call>call:get_weather{town:" + "[" * 80 + "<tool_call|>",
    "<|tool_call>call:unknown{}<tool_call|>",
]


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize("text", NO_CALLS)
def test_all_else_is_content_byte_for_byte(name: str, text: str) -> None:
    assert split_everywhere(name, text) == (text, [])


def test_content_before_a_broken_call_stays_whole() -> None:
    text = 'A \n<tool_call>{x</tool_call> \n<tool_call>{"name":"now"}</tool_call>'
    assert split_everywhere("hermes", text) == ("A \n<tool_call>{x</tool_call>", [("now", {})])


def test_content_streams_at_once() -> None:
    one = parser("auto")
    assert [one.push(piece).content for piece in ("Hel", "lo wor", "ld. ", "<b>")] == [
        "Hel",
        "lo wor",
        "ld.",
        " <b>",
    ]
    assert one.push("<tool_call").content == "" and one.push("s are").content == "<tool_calls are"


def test_long_texts_take_time_in_proportion() -> None:
    """A call of a hundred thousand characters, one at a time."""
    arguments = {"town": "x" * 100_000}
    for text in (
        "<tool_call>"
        + json.dumps({"name": "get_weather", "arguments": arguments})
        + "</tool_call>",
        json.dumps({"name": "get_weather", "arguments": arguments}),
    ):
        assert parse(parser("auto"), *text) == ("", [("get_weather", arguments)])


def test_arguments_that_are_nested_too_deeply() -> None:
    call = json.dumps({"name": "now", "arguments": "[" * 100_000})
    text = f"<tool_call>{call}</tool_call>"
    assert parse(parser("hermes"), text) == (text, [])
    assert parse(parser("auto"), text) == (text, [])


def test_one_call_only() -> None:
    text = '[{"name": "now"}, {"name": "get_weather"}]'
    assert split_everywhere("json", text, parallel=False) == ("", [("now", {})])
    assert parse(parser("hermes", parallel=False), '<tool_call>{"name":"now"}</tool_call>' * 3) == (
        "",
        [("now", {})],
    )


def test_the_template_tells_the_form() -> None:
    def auto(text: str) -> ToolParser:
        return make_tool_parser("auto", ChatTemplate({"default": text}), TOOLS)

    gemma = auto(TURNS)
    assert gemma.needs_special_tokens
    assert parse(gemma, "<|tool_call>call:now{}<tool_call|>") == ("", [("now", {})])
    hermes = auto(CHATML)
    assert not hermes.needs_special_tokens
    assert parse(hermes, '{"name": "now"}') == ('{"name": "now"}', [])
    assert parse(auto(HEADERS), '{"name": "now"}') == ("", [("now", {})])


def test_no_tools_no_calls() -> None:
    text = '<tool_call>{"name": "now"}</tool_call>'
    assert split_everywhere("hermes", text, tool_choice="none") == (text, [])
    assert parse(make_tool_parser("auto", PLAIN, []), text) == (text, [])


def test_unknown_parsers() -> None:
    with pytest.raises(ConfigError, match="parser 'xml' is unknown; give one of auto, hermes"):
        parser("xml")


@pytest.mark.parametrize(
    "tool",
    [
        5,
        {},
        {"function": {}},
        {"function": {"name": 5}},
        {"function": {"name": "f", "parameters": 5}},
    ],
)
def test_bad_tools(tool: Any) -> None:
    with pytest.raises(RequestError, match=r"tools\[0\]"):
        make_tool_parser("auto", PLAIN, [tool])
    with pytest.raises(RequestError, match=r"tools\[0\]"):
        guided_for_tool_choice([tool], "required")


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_choices_that_leave_it_to_the_model(choice: str | None) -> None:
    assert guided_for_tool_choice(TOOLS, choice) is None


@pytest.mark.parametrize(
    "choice",
    ["always", {"type": "function"}, {"type": "tool", "function": {"name": "now"}},
     {"type": "function", "function": {"name": "unknown"}}, 5],
)  # fmt: skip
def test_bad_choices(choice: Any) -> None:
    with pytest.raises(RequestError, match="tool_choice="):
        guided_for_tool_choice(TOOLS, choice)
    with pytest.raises(RequestError, match="with tools"):
        guided_for_tool_choice([], "required")


def accepts(form: Any, text: str) -> bool:
    """Whether the grammar accepts a text, and as a whole."""
    tokenizer = load_tokenizer("bundled")
    assert tokenizer is not None
    guide = GuideFactory(tokenizer, tokenizer.vocab_size, (0,)).start(form)
    for token in tokenizer.encode(text, add_special_tokens=False):
        guide.advance(token)
        if guide.error is not None:
            return False
    return guide.matcher.is_accepting()


def test_grammars_of_choices() -> None:
    now = {"type": "function", "function": {"name": "now"}}
    weather = {"type": "function", "function": {"name": "get_weather"}}
    one, two = (
        '{"name": "now", "arguments": {}}',
        '{"name": "get_weather", "arguments": {"town": "U"}}',
    )
    required = guided_for_tool_choice(TOOLS, "required")
    for text, good in (
        (f"[{one}]", True),
        (f"[{one}, {two}]", True),
        ("[]", False),
        (one, False),
        ('[{"name": "get_weather", "arguments": {}}]', False),  # without the town
        ('[{"name": "now", "arguments": {"a": 1}}]', False),
        ("Hello", False),
    ):
        assert accepts(required, text) is good, text
        if good:
            forced = parser("gemma4", tool_choice="required")
            assert not forced.needs_special_tokens and len(parse(forced, text)[1]) == text.count(
                "name"
            )
    single = guided_for_tool_choice(TOOLS, "required", parallel=False)
    assert accepts(single, f"[{two}]") and not accepts(single, f"[{one}, {two}]")
    named = guided_for_tool_choice(TOOLS, weather)
    assert accepts(named, two) and not accepts(named, one)
    assert parse(parser("auto", tool_choice=weather), two) == ("", [("get_weather", {"town": "U"})])
    assert accepts(guided_for_tool_choice(TOOLS, now), one)


def test_definitions_of_several_tools_do_not_meet() -> None:
    """Schemas made from classes refer to definitions, from the root of their own schema."""

    def tool(name: str, kind: str, place: str) -> dict[str, Any]:
        inner = {
            "type": "object",
            "properties": {"x": {"$ref": f"#/{place}/Item"}},
            "required": ["x"],
        }
        schema = {**inner, place: {"Item": {"type": kind}}, "additionalProperties": False}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    tools = [tool("f", "integer", "$defs"), tool("g", "boolean", "definitions")]
    required = guided_for_tool_choice(tools, "required")
    assert accepts(required, '[{"name": "f", "arguments": {"x": 5}}]')
    assert accepts(required, '[{"name": "g", "arguments": {"x": true}}]')
    assert not accepts(required, '[{"name": "f", "arguments": {"x": true}}]')
    assert not accepts(required, '[{"name": "g", "arguments": {"x": 5}}]')
    named = guided_for_tool_choice(tools, {"type": "function", "function": {"name": "g"}})
    assert accepts(named, '{"name": "g", "arguments": {"x": true}}')
