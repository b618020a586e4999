"""Chat templates: what transformers renders, what is refused, and bounds on what they may do."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from chatting import CONVERSATIONS, PARTS_ONLY, TEMPLATES, TURNS, WEATHER, assistant, called, user
from scripted import tokenizer
from yocolm.chat import ChatTemplate, encode_chat, load_chat_template
from yocolm.errors import CheckpointError, RequestError
from yocolm.fields import write_json
from yocolm.template.sandbox import MAX_COUNT, MAX_OUTPUT
from yocolm.tokenizer import JsonTokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def reference(template: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().inner, chat_template=template, **TOKENS
    )


def ours(template: str) -> ChatTemplate:
    return ChatTemplate({"default": template}, TOKENS, "model/chat_template.jinja")


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ["chatml", "headers", "turns"])
def test_as_transformers_renders_it(
    name: str, conversation: str, with_tools: bool, kwargs: dict[str, Any]
) -> None:
    messages, tools = CONVERSATIONS[conversation], [WEATHER] if with_tools else None
    for prompted in (True, False):
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompted, **kwargs}
        wanted = reference(TEMPLATES[name]).apply_chat_template(messages, tokenize=False, **options)
        assert ours(TEMPLATES[name]).render(messages, **options) == wanted


@pytest.mark.parametrize("name", ["turns", "parts"])
def test_parts_of_text_as_transformers_renders_them(name: str) -> None:
    parts = [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]
    messages = [user(parts), assistant(parts)]
    wanted = reference(TEMPLATES[name]).apply_chat_template(messages, tokenize=False)
    assert ours(TEMPLATES[name]).render(messages, add_generation_prompt=False) == wanted


def test_content_in_the_form_that_the_template_reads() -> None:
    """Parts for a template that adds texts, text for one that loops over parts."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in ours(TEMPLATES["chatml"]).render([user(parts)])
    assert "one" in ours(PARTS_ONLY).render([user("one")])
    alias = "{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}"
    assert ours(alias + "{% endfor %}").render([user(parts)]) == "onetwo"
    lines = "{% for line in messages[0]['content'].split('\n') %}[{{ line }}]{% endfor %}"
    assert ours(lines).render([user("a\nb")]) == "[a][b]"


@pytest.mark.parametrize("name", ["chatml", "turns"])
@pytest.mark.parametrize("text", ["Sure: ", " Sure", "x\n"])
def test_an_open_end(name: str, text: str) -> None:
    for content in (text, [{"type": "text", "text": text}]):
        if name == "chatml" and not isinstance(content, str):
            continue  # transformers prints the list itself
        messages = [user("Go"), assistant(content)]
        wanted = reference(TEMPLATES[name]).apply_chat_template(
            messages, tokenize=False, continue_final_message=True
        )
        options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
        assert ours(TEMPLATES[name]).render(messages, **options) == wanted
        assert messages == [user("Go"), assistant(content)], "the caller's messages have changed"


def test_open_ends_that_cannot_be() -> None:
    def refused(template: str, message: dict[str, Any], match: str, prompted: bool = False) -> None:
        with pytest.raises(RequestError, match=match):
            ours(template).render(
                [message], continue_final_message=True, add_generation_prompt=prompted
            )

    refused("{{ messages[0].content }}", user("a"), "exclude each other", prompted=True)
    refused("{{ messages[0].role }}", user("a"), "drops or changes")
    refused("{{ messages[0].content }}", {"role": "user"}, "no text to go on with")


def test_arguments_of_calls_may_be_json_text() -> None:
    """So they are in OpenAI's API, while templates want the object."""
    text = json.dumps({"town": "Ulm"})
    wanted = ours(TURNS).render([user("?"), called(town="Ulm")])
    message = called(town="Ulm")
    message["tool_calls"][0]["function"]["arguments"] = text
    assert ours(TURNS).render([user("?"), message]) == wanted
    message["tool_calls"][0]["function"]["arguments"] = "{broken"
    assert "{broken" in ours(TURNS).render([user("?"), message])


@pytest.mark.parametrize(
    "kind", "image_url input_audio file video_url audio_url image audio video".split()
)
def test_only_text(kind: str) -> None:
    parts = [{"type": "text", "text": "See:"}, {"type": kind, kind: {"url": "data:"}}]
    with pytest.raises(
        RequestError, match=rf"messages\[1\].content\[1\] is of type '{kind}'; only"
    ):
        ours(TURNS).render([user("a"), user(parts)])


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "messages is empty"),
        ("hello", "messages is 'hello'; it must be a list"),
        (None, "messages is None"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([{"content": "x"}], r"messages\[0\].role is None"),
        ([{"role": 5, "content": "x"}], r"messages\[0\].role is 5"),
        ([user(5)], r"messages\[0\].content is 5"),
        ([user([{"type": "poem", "text": "x"}])], r"content\[0\] is {'type': 'poem'"),
        ([user([{"type": "text"}])], r"content\[0\] is {'type': 'text'}; only text"),
        ([user(["x"])], r"content\[0\] is 'x'"),
        ([{"role": "user", "content": "x", "extra": object()}], "holds <object"),
        ([{"role": "user", 5: "x"}], "must be text"),
        ([assistant("", tool_calls="x")], "tool_calls is 'x'; it must be a list"),
        ([assistant("", tool_calls=[{"function": {}}])], r"tool_calls\[0\] is"),
        ([user("a"), user("b")], "refuses the messages: Conversation roles must alternate"),
    ],
)
def test_bad_messages(messages: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        ours(TURNS).render(messages)


def test_bad_tools() -> None:
    template: Any = ours(TURNS)
    for tools, match in (([5], r"tools\[0\] is 5"), ("x", "tools is 'x'; it must be a list")):
        with pytest.raises(RequestError, match=match):
            template.render([user("a")], tools=tools)


def test_null_fields_are_left_out() -> None:
    template = ours("{{ messages[0] | tojson }}")
    assert template.render([{"role": "user", "content": "é", "name": None}]) == (
        '{"role": "user", "content": "é"}'
    )


def save(folder: Path, **config: Any) -> Path:
    write_json(folder / "tokenizer_config.json", config)
    return folder


def test_where_templates_come_from(tmp_path: Path) -> None:
    messages = [user("a")]
    save(tmp_path, chat_template="config {{ bos_token }}", bos_token={"content": "<s>"})
    assert load_chat_template(tmp_path).render(messages) == "config <s>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    save(tmp_path, chat_template=named)
    template = load_chat_template(tmp_path)
    assert template.render(messages) == "plain"
    assert template.render(messages, tools=[WEATHER]) == "tools"
    assert template.render(messages, tools=[WEATHER], chat_template="default") == "plain"
    assert template.render(messages, chat_template="{{ messages|length }}") == "1"
    (tmp_path / "chat_template.jinja").write_text("file {{ boi_token }}{{ pad_token }}")
    save(tmp_path, chat_template="config", extra_special_tokens={"boi_token": "<i>"}, pad_token=3)
    assert load_chat_template(tmp_path).render(messages) == "file <i>"
    (tmp_path / "chat_templates").mkdir()
    (tmp_path / "chat_templates" / "tool_use.jinja").write_text("tools file")
    assert load_chat_template(tmp_path).render(messages, tools=[WEATHER]) == "tools file"


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    write_json(tmp_path / "chat_template.json", {"chat_template": "processor"})
    assert load_chat_template(tmp_path).render([user("a")]) == "processor"


def test_no_template(tmp_path: Path) -> None:
    for template in (load_chat_template(tmp_path), load_chat_template(None)):
        with pytest.raises(RequestError, match="has neither chat_template.jinja nor a chat_templ"):
            template.render([user("a")])
        assert template.render([user("a")], chat_template="x") == "x"
    save(tmp_path, chat_template=[{"name": "rag", "template": "r"}])
    with pytest.raises(RequestError, match="no default chat template: .* has rag; name one"):
        load_chat_template(tmp_path).render([user("a")])


def test_damaged_templates(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    for text in ("a\n{% if %}", "{{ '" + "x", "{% break %}", "{% generation %}"):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=r"chat_template.jinja: .* is not valid: "):
            load_chat_template(tmp_path)
    path.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="chat_template.jinja is not UTF-8 at byte 0"):
        load_chat_template(tmp_path)
    path.unlink()
    for wrong in (5, ["x"], [{"name": "default"}], {"default": "x"}):
        save(tmp_path, chat_template=wrong)
        with pytest.raises(CheckpointError, match="tokenizer_config.json: chat_template must be"):
            load_chat_template(tmp_path)
    without: Any = ChatTemplate()
    for given in ("{% if %}", "", 5):
        with pytest.raises(RequestError, match="chat_template"):
            without.render([user("a")], chat_template=given)


@pytest.mark.parametrize(
    "program",
    [
        "{{ nothing.there }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace(a=1) %}{% set n.__class__ = 1 %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10**9 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        f"{{% for i in range({MAX_COUNT}) %}}{{% for i in range(9) %}}{{% endfor %}}{{% endfor %}}",
        f"{{% for i in range(100) %}}{{{{ 'x' * {MAX_OUTPUT // 99} }}}}{{% endfor %}}",
    ],
)
def test_programs_that_are_stopped(program: str) -> None:
    with pytest.raises(RequestError, match="the chat template of model/chat_template.jinja cannot"):
        ours(program).render([user("a")])


def test_the_first_token_is_not_doubled() -> None:
    """Neither that which the template writes, nor does one come where it writes none."""
    inner = tokenizers.Tokenizer.from_str(tokenizer().inner.to_str())
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 0)]
    )
    doubling = JsonTokenizer(inner, 0, (0,))
    assert doubling.encode("he") == [0, *encode_chat(doubling, "he")]
    assert encode_chat(doubling, "</s>he") == [0, *encode_chat(doubling, "he")]
    wanted = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="</s>", chat_template="{{ bos_token }}he"
    ).apply_chat_template([user("x")], return_dict=False)
    assert encode_chat(doubling, "</s>he") == wanted
