"""Chat templates like those that popular models come with, and conversations to render."""

from __future__ import annotations

from typing import Any

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = messages|length - loop.index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content | default('') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > ns.last %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}{{- message.content or '' }}{%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Respond in the format {\\"name\\": function name, \\"parameters\\": dictionary}.\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

TURNS = """\
{%- macro argument(value) -%}
    {%- if value is string -%}
        <|"|>{{ value }}<|"|>
    {%- elif value is boolean -%}
        {{ 'true' if value else 'false' }}
    {%- elif value is mapping -%}
        { {%- for k, v in value | dictsort -%}
            {{ k }}:{{ argument(v) }}{{ ',' if not loop.last }}
        {%- endfor -%} }
    {%- elif value is sequence -%}
        [ {%- for v in value -%}{{ argument(v) }}{{ ',' if not loop.last }}{%- endfor -%} ]
    {%- else -%}
        {{ value }}
    {%- endif -%}
{%- endmacro -%}
{%- macro content_of(message) -%}
    {%- if message['content'] is string -%}
        {{- message['content'] | trim -}}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ image_token }}
            {%- elif item['type'] == 'text' -%}{{- item['text'] | trim -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- set loop_messages = messages -%}
{%- if enable_thinking or tools or messages[0]['role'] in ['system', 'developer'] -%}
    {{- '<|turn>system\\n' -}}
    {%- if enable_thinking is defined and enable_thinking -%}{{- '<|think|>\\n' -}}{%- endif -%}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}
        {{- content_of(messages[0]) -}}
        {%- set loop_messages = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] -%}
        {{- '<|tool>declaration:' ~ tool.function.name ~ argument(tool.function.parameters) -}}
        {{- '<tool|>' -}}
    {%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if message['role'] == 'user' and loop.previtem and loop.previtem.role == 'user' -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
    {%- if message.reasoning -%}
        {{- '<|channel>thought\\n' + message.reasoning + '<channel|>' -}}
    {%- endif -%}
    {{- content_of(message) -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '<|tool_call>call:' + call.function.name + argument(call.function.arguments) -}}
        {{- '<tool_call|>' -}}
    {%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""

PARTS_ONLY = """\
{% for message in messages %}
<{{ message.role }}>
{% for part in message.content %}
{% if part.type == 'text' %}{{ part.text }}{% endif %}
{% endfor %}
{% endfor %}
{{ eos_token }}"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "turns": TURNS, "parts": PARTS_ONLY}

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> in a town & 'its' surroundings, in °C",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["town"],
        },
    },
}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def called(**arguments: Any) -> dict[str, Any]:
    """An assistant's call of the weather function."""
    call = {"name": "get_weather", "arguments": arguments}
    return assistant(None, tool_calls=[{"id": "1", "type": "function", "function": call}])


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [user("Hello,  <b>world</b> & 日本 😀\n")],
    "system": [
        {"role": "system", "content": " Be brief. "},
        user("Hi"),
        assistant("Yo"),
        user("?"),
    ],
    "reasoning": [user("1+1?"), assistant("2", reasoning_content="easy"), user("3?")],
    "thinking": [user("1+1?"), assistant("2", reasoning="\neasy\n", name=None)],
    "tools": [
        user("Weather?"),
        called(town='Åre "x"', days=2, more={"deep": [1, True]}),
        {"role": "tool", "content": '{"c": -3}', "tool_call_id": "1"},
        assistant("Cold."),
        user("Thanks"),
    ],
}
