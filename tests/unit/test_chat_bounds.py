"""Chat templates in their sandbox: bounds on what they may make, and what they may do as ever."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from chatting import TEMPLATES, WEATHER, assistant, user
from scripted import tokenizer
from yocolm.chat import ChatTemplate
from yocolm.errors import CheckpointError, RequestError


def ours(template: str) -> ChatTemplate:
    return ChatTemplate({"default": template}, {}, "model/chat_template.jinja")


ONCE_MORE = "{% for i in range(60) %}{% set n.s = @ %}{% endfor %}"
LOOPS = "{% set l = range(1000) | list %}{% for a in l %}{% for b in l %}{% for c in l"


@pytest.mark.parametrize(
    "program",
    [
        *(
            "{% set n = namespace(s='x') %}" + ONCE_MORE.replace("@", twice) + use
            for twice, use in (
                ("n.s + n.s", ""),
                ("n.s ~ n.s", ""),
                ("[n.s, n.s]", "{{ n.s }}"),
                ("[n.s, n.s]", "{{ n.s | tojson }}"),
                ("[n.s, n.s]", "{{ n.s ~ 'x' }}"),
                ("[n.s, n.s]", "{{ '%s' % n.s }}"),
                ("{'a': n.s, 'b': n.s}", "{{ '{}'.format(n.s) }}"),
                ("{'a': n.s, 'b': n.s}", "{{ [n.s] | join }}"),
                ("{'a': n.s, 'b': n.s}", "{{ raise_exception(n.s) }}"),
                ("(n.s, n.s)", "{{ {n.s: 1} }}"),
                ("n.s | replace('x', 'xx')", ""),
                ("n.s.replace('x', 'xx')", ""),
                ("[n.s, n.s] | join", ""),
                ("''.join([n.s, n.s])", ""),
                ("'%s%s' % (n.s, n.s)", ""),
                ("'{0}{0}'.format(n.s)", ""),
                ("(n.s | length + 1) ** 9", ""),
            )
        ),
        "{% set n = namespace(s=[1]) %}" + ONCE_MORE.replace("@", "n.s + n.s"),
        "{% set n = namespace(s=9) %}" + ONCE_MORE.replace("@", "n.s * n.s"),
        "{{ [1] | slice(10**9) | list | length }}",
        "{{ [1] | batch(10**9, 'x') | list | length }}",
        "{{ ('a\n' * 100000) | indent(100000) }}",
        "{{ ('a\n' * 100000) | indent('x' * 100000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1.5 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '{:{w}d}'.format(1, w=10**9) }}",
        "{{ '{a:1000000000d}'.format_map({'a': 1}) }}",
        "{{ 'a' | center(3000000000) }}",
        "{{ 'a' | center(300000000) | length }}",
        "{{ ['a'] | map('center', 300000000) | list }}",
        "{% filter center(300000000) %}a{% endfilter %}",
        *(f"{{{{ 'a'.{name}(300000000) }}}}" for name in ("center", "ljust", "rjust", "zfill")),
        "{{ 'a'['ljust'](300000000) }}",
        "{{ '\t'.expandtabs(300000000) }}",
        "{{ 'a'.encode().ljust(300000000) }}",
        "{{ (1).to_bytes(10**9) }}",
        "{{ [0] | tojson(indent=10**9) }}",
        "{{ 5 | round(-10**9) }}",
        "{{ ('f' * 100000) | int(base=16) }}",
        "{{ ('a ' * 4000000).split() | length }}",
        "{{ ('a\n' * 4000000).splitlines() | length }}",
        "{{ ('a' * 4000000) | list | length }}",
        "{{ [[1]] | sum(start=[]) }}",
        "{{ strftime_now('%Y' * 100000) }}",
        "{{ lipsum(n=100000) }}",
        LOOPS + " %}{% endfor %}{% endfor %}{% endfor %}",
        LOOPS + " if false %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f() %}{% endmacro %}{% for i in range(900000) %}{{ f() }}{% endfor %}",
        "{% set s = 'a' * 9000000 %}{% for i in range(99) %}{% if s == s %}{% endif %}{% endfor %}",
        "{% set s = 'a' * 9000000 %}{% for i in range(99) %}{% if s ~ 1 in s %}{% endif %}"
        "{% endfor %}",
        "{% set s = 'a' * 9000000 %}{{ s.rfind('b' + 'a' * 5000000) }}",
        "{% set s = 'a' * 9000000 %}{{ s | trim('b' * 5000000) }}",
        "{% set s = 'a' * 9000000 %}{% set x %}{% for i in range(99) %}{{ s }}{% endfor %}"
        "{% endset %}",
    ],
)
def test_programs_that_would_fill_the_memory(program: str) -> None:
    with pytest.raises(RequestError, match="the chat template of model/chat_template.jinja"):
        ours(program).render([user("a")])


# ruff: noqa: E501
ORDINARY = r"""
{{ [3, 1, 2] | sort | join(', ') }}|{{ {'b': 1, 'a': [2, none]} | dictsort }}|{{ (1, 'x') }}
{{ '%s has %5.1f%% of %d' | format('x', 2.5, 3) }}|{{ '%(a)s' % {'a': 'b'} }}|{{ '%s' % [1] }}
{{ '{} {!r:>5}'.format('a', 'b') }}|{{ '{a} {c[0]}'.format(a={}, c=[1]) }}|{{ '{x}'.format_map({'x': 1}) }}
{{ 'a' | center(5) }}|{{ 'a\nb' | indent(2) }}|{{ 'a\n\nb' | indent('> ', true, true) }}
{{ [1, 2, 3] | batch(2, 'x') | list }}|{{ [1, 2, 3] | slice(2) | list }}|{{ 'aXbX' | replace('X', '-', 1) }}
{{ 'a b'.split() }}|{{ 'a,b,c'.split(',', 1) }}|{{ 'a,b,c'.rsplit(',', maxsplit=1) }}|{{ 'a\nb'.splitlines() }}
{{ 'x'.ljust(3) }}|{{ '\ta'.expandtabs(2) }}|{{ '-'.join(['a', 'b']) }}|{{ 'aXb'.partition('X') }}|{{ 'ab'.title() }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}|{{ 1 < 2 < 3 }}|{{ 3 > 2 == 2 }}
{{ messages | rejectattr('role', 'in', ['user']) | list | length }}|{{ messages | groupby('role') }}|{{ 'a' in 'abc' }}
{% for k, v in {'a': 1}.items() %}{{ k ~ v ~ none ~ [v] }}{{ loop.last }}{{ loop.length }}{% endfor %}
{% for x in [[1], [[3], [4]]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}{% endfor %}
{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller else '' }}{% endmacro %}{{ m(1) }}{% call m(3) %}c{% endcall %}
{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}{{ x }}{% else %}none{% endfor %}{% filter upper %}f{{ 1 }}{% endfilter %}
{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{% set b %}x{{ 1 }}{% endset %}{{ b * 2 }}{{ [1] * 2 + [3] }}
{{ nothing }}|{{ nothing is defined }}|{{ nothing | default('d') }}|{{ none }}|{{ true }}|{{ 7 // 2 }}|{{ 7 / 2 }}|{{ -7 % 3 }}|{{ 2 ** 5 }}
{{ [1, 2, 3][::-1] }}|{{ 'abc'[1:] }}|{{ messages[-1].content }}|{{ [1, 2] | sum }}|{{ [1, 1] | unique | list }}|{{ '7' | int + 1 }}
{{ {'a': [1, {'b': 'é'}]} | tojson }}|{{ [1, {'b': 2}] | tojson(indent=2) }}|{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}
{{ '<a>' | safe }}|{{ '<a>' | escape }}|{{ 'x' | string }}|{{ 3.7 | round | int }}|{{ 'abc' | first }}{{ 'abc' | last }}|{{ [3, 1] | min }}
{{ cycler('a', 'b').next() }}|{{ range(3) | list }}|{{ dict(a=1) }}|{{ [[1, 2], [3]] | map('length') | list }}|{{ 'a b' | wordcount }}
{{ 'ab' | reverse }}|{{ [1, 2] | reverse | list }}|{{ 'abcdef' | truncate(4, true, '') }}|{{ [] | max }}|{{ {'a': 1} | items | list }}
{%- for m in messages -%}{%- if loop.first %} f {% elif loop.previtem.role != m['role'] -%} n {%- endif -%}{%- endfor %}
""".strip().split("\n")


@pytest.mark.parametrize("program", ORDINARY)
def test_ordinary_programs_render_as_in_transformers(program: str) -> None:
    messages = [user("a"), assistant("b")]
    reference: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().inner, chat_template=program
    )
    wanted = reference.apply_chat_template(messages, tokenize=False)
    assert ours(program).render(messages, add_generation_prompt=False) == wanted


def test_long_conversations_are_not_stopped() -> None:
    """A million tokens' worth of text, and thousands of messages."""
    long = [user("word " * 800_000), assistant("line\n" * 200_000)]
    many = [one for _ in range(2_000) for one in (user("Go on"), assistant("So it is"))]
    for name in ("chatml", "headers", "turns"):
        for messages in (long, many):
            text = ours(TEMPLATES[name]).render(messages, tools=[WEATHER])
            assert len(text) > sum(len(one["content"]) - 1 for one in messages)


@pytest.mark.parametrize(
    ("program", "match"),
    [
        ("{{ 'a' | pprint }}", "No filter named 'pprint'.* in line 1"),
        ("{{ " + "9" * 5000 + " }}", "is not valid: "),
        ("{{ " + "(" * 5000 + " }}", "is not valid: "),
    ],
)
def test_programs_that_are_none(program: str, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        ours(program)
