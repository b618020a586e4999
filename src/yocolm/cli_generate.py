"""`yocolm generate`: continue one prompt through the engine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from yocolm.engine.engine import Prompt
from yocolm.engine.llm import LLM
from yocolm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from yocolm.engine.sampling_params import SamplingParams
from yocolm.errors import CheckpointError, NumericsError, RequestError
from yocolm.models.registry import GENERATION_FILE, load_generation_config

# What a model's generation_config.json may set; options on the command line win.
_MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

_ENGINE = ("max_num_batched_tokens", "kv_memory", "fast_prefill", "per_layer_tables")


def run(arguments: argparse.Namespace) -> int:
    if arguments.stream and (arguments.json or (arguments.n or 1) > 1):
        raise RequestError("--stream prints one text as it is drawn: leave out --json and -n")
    if arguments.chat and arguments.prompt_ids is not None:
        raise RequestError("--chat takes a message's text: leave out --prompt-ids")
    if arguments.system is not None and not arguments.chat:
        raise RequestError("--system needs --chat: without it there are no messages")
    prompt: Prompt = _prompt(arguments)
    params = _sampling_params(arguments)
    settings = {
        name: getattr(arguments, name) for name in _ENGINE if getattr(arguments, name) is not None
    }
    settings["enforce_eager"] = arguments.eager
    llm = LLM(arguments.model, dtype=arguments.dtype, device=arguments.device, **settings)
    if arguments.chat:
        prompt = llm.chat_prompt(_messages(prompt, arguments.system))
        params = llm.chat_params(params)
    streams = _streams(arguments, params) and llm.get_tokenizer() is not None
    if streams:
        output = _stream(llm, prompt, params, arguments.echo)
    else:
        [output] = llm.generate([prompt], params)
    if output.error is not None:
        raise NumericsError(output.error)
    if arguments.json:
        print(json.dumps({"model": arguments.model, **_as_json(output)}, indent=2))
    else:
        _print_text(output, _prompt_text(llm, output) if arguments.echo else "", done=streams)
    return 0


def _streams(arguments: argparse.Namespace, params: SamplingParams) -> bool:
    if arguments.stream is None:
        return sys.stdout.isatty() and not arguments.json and params.n == 1
    return arguments.stream


def _prompt(arguments: argparse.Namespace) -> str | list[int]:
    """The prompt's text, or its token ids; of standard input one newline at the end is dropped."""
    if arguments.prompt_ids is not None:
        return arguments.prompt_ids
    if arguments.prompt is not None:
        return arguments.prompt
    try:
        if arguments.prompt_file is not None:
            return arguments.prompt_file.read_bytes().decode()
        if sys.stdin.isatty():
            raise RequestError(
                "no prompt: give a text, --prompt-file or --prompt-ids, or pipe one in"
            )
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt is not UTF-8 at byte {error.start}") from error


def _messages(text: Prompt, system: str | None) -> list[dict[str, Any]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The model's defaults, then every option of that name that was given."""
    options = {item.name: getattr(arguments, item.name, None) for item in fields(SamplingParams)}
    given = {name: value for name, value in options.items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**{**model_defaults(arguments.model, given), **given})


def model_defaults(model: str, given: Container[str]) -> dict[str, Any]:
    """Sampling parameters that generation_config.json sets, without those ``given``.

    Raises CheckpointError naming the file if one of them is out of range.
    """
    defaults = load_generation_config(model)
    values = {
        name: defaults[name]
        for name in _MODEL_DEFAULTS
        if defaults.get(name) is not None and name not in given
    }
    try:
        SamplingParams(**values)
    except RequestError as error:
        raise CheckpointError(
            f"{GENERATION_FILE} of model {model}: {error}; correct the file, or give the "
            "option of that name"
        ) from error
    return values


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams, echo: bool) -> RequestOutput:
    """Print text as it comes; returns the final output."""
    printed, output = 0, None
    for output in _steps(llm, prompt, params):
        if echo and printed == 0:
            sys.stdout.write(_prompt_text(llm, output))
            echo = False
        text = output.outputs[0].text if output.outputs else ""
        sys.stdout.write(text[printed:])
        sys.stdout.flush()
        printed = len(text)
    assert output is not None and output.finished
    print()
    return output


def _prompt_text(llm: LLM, output: RequestOutput) -> str:
    """What `--echo` prints: of a prompt that was given as ids, its text, or else those ids."""
    if output.prompt is not None:
        return output.prompt
    tokenizer = llm.get_tokenizer()
    if tokenizer is not None:
        return tokenizer.decode(output.prompt_token_ids)
    return _joined(output.prompt_token_ids)


def _steps(llm: LLM, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
    llm.engine.add_request("0", prompt, params)
    while llm.engine.has_unfinished_requests():
        yield from llm.engine.step()


def _as_json(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": _logprobs_as_json(output.prompt_logprobs),
        "outputs": [
            {
                "index": sample.index,
                "text": sample.text,
                "token_ids": list(sample.token_ids),
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "cumulative_logprob": sample.cumulative_logprob,
                "logprobs": _logprobs_as_json(sample.logprobs),
            }
            for sample in output.outputs
        ],
    }


def _logprobs_as_json(positions: Any) -> list[dict[str, Any] | None] | None:
    """Per position a mapping from token id (a string, as JSON wants) to logprob, rank and text."""
    if positions is None:
        return None
    return [
        None if entry is None else {str(token): asdict(value) for token, value in entry.items()}
        for entry in positions
    ]


def _print_text(output: RequestOutput, echo: str, done: bool) -> None:
    """Samples, each behind the text `echo`, then tables of the logprobs that were asked for.

    `done`: the samples are printed already.
    """
    if output.prompt_logprobs is not None:
        print(_logprob_table("prompt", output.prompt_token_ids, output.prompt_logprobs))
    for sample in output.outputs:
        if not done:
            if len(output.outputs) > 1:
                print(f"--- sample {sample.index} ({sample.finish_reason})")
            shown = _shown(sample)
            only_ids = bool(echo and shown) and not sample.text and output.prompt is None
            print(echo + "," * only_ids + shown)
        if sample.logprobs is not None:
            print(_logprob_table("output", sample.token_ids, sample.logprobs))


def _shown(sample: CompletionOutput) -> str:
    """The text; token ids where there is no tokenizer to make one."""
    if sample.text or not sample.token_ids:
        return sample.text
    return _joined(sample.token_ids)


def _joined(ids: Sequence[int]) -> str:
    return ",".join(str(token) for token in ids)


def _logprob_table(
    title: str, token_ids: list[int], positions: Sequence[dict[int, Logprob] | None]
) -> str:
    lines = [f"{title:>8}{'logprob':>10}{'rank':>7}  token (alternatives)"]
    for token, entry in zip(token_ids, positions, strict=True):
        if entry is None:
            lines.append(f"{token:>8}{'-':>10}{'-':>7}")
            continue
        own = entry[token]
        others = [
            f"{other.decoded_token!r} {other.logprob:.3f}"
            for other_id, other in entry.items()
            if other_id != token
        ]
        tail = f"  ({', '.join(others)})" if others else ""
        lines.append(
            f"{token:>8}{own.logprob:>10.4f}{own.rank or '-':>7}  {own.decoded_token!r}{tail}"
        )
    return "\n".join(lines)
