"""Generation arguments of tasks (`generation_kwargs`) as sampling parameters. No torch here."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from yocolm.engine.sampling_params import SamplingParams
from yocolm.errors import RequestError

MAX_GEN_TOKS = 256  # unless a task says so
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_MINIMA = ("min_tokens", "min_new_tokens")
_SAME = (
    *("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("ignore_eos", "skip_special_tokens", "stop_token_ids"),
)
_OTHERS = ("until", "stop", "do_sample", "temperature", "seed", "num_beams")


def generation_params(
    arguments: Mapping[str, Any],
    *,
    max_length: int,
    eos: str,
    seed: int,
    context: str,
    repeat: int,
) -> SamplingParams:
    """Sampling parameters for a task's arguments, by lm-evaluation-harness's rules.

    Greedy unless ``do_sample``, or a temperature above 0 where that is not said. The text ends
    before the first string of ``until``, or where the model ends it; the end of text spelled out
    (``eos``) counts as well. The seed depends on ``seed``, ``context`` and ``repeat``, how often
    the same context was asked before.

    Raises RequestError for arguments that are unknown or out of range, and where their
    ``max_gen_toks`` leave no room for a prompt within ``max_length`` tokens.
    """
    _check_known(arguments)
    options = {name: arguments[name] for name in _SAME if arguments.get(name) is not None}
    minimum = next((arguments[n] for n in _MINIMA if arguments.get(n) is not None), 0)
    return SamplingParams(
        max_tokens=_max_tokens(arguments, max_length),
        min_tokens=minimum,
        temperature=_temperature(arguments),
        stop=_stops(arguments, eos),
        seed=_seed(arguments.get("seed", seed), context, repeat),
        **options,
    )


def _check_known(arguments: Mapping[str, Any]) -> None:
    known = (*_LENGTHS, *_MINIMA, *_SAME, *_OTHERS)
    for name in arguments:
        if name not in known:
            raise RequestError(
                f"generation argument {name!r} is unknown; known: {', '.join(known)}"
            )
    if arguments.get("num_beams", 1) != 1:
        raise RequestError(
            f"num_beams={arguments['num_beams']!r}: beam search is not supported; leave it at 1"
        )


def _seed(base: Any, context: str, repeat: int) -> int:
    if isinstance(base, bool) or not isinstance(base, int) or base < 0:
        raise RequestError(f"seed={base!r} must be a whole number")
    return zlib.crc32(f"{base} {repeat} {context}".encode("utf-8", "surrogatepass"))


def _max_tokens(arguments: Mapping[str, Any], max_length: int) -> int:
    name = next((name for name in _LENGTHS if arguments.get(name) is not None), None)
    if name is None:
        return MAX_GEN_TOKS if MAX_GEN_TOKS < max_length else max(1, max_length // 2)
    try:
        value = int(arguments[name])
    except (TypeError, ValueError):
        raise RequestError(f"{name}={arguments[name]!r} must be a whole number") from None
    if not 1 <= value < max_length:
        raise RequestError(
            f"{name}={value} must be from 1 to {max_length - 1}: the model takes {max_length} "
            "tokens, and one at least is for the prompt; set max_gen_toks among the generation "
            "arguments, or raise the maximal length"
        )
    return value


def _temperature(arguments: Mapping[str, Any]) -> float:
    """0 is greedy."""
    samples, temperature = arguments.get("do_sample"), arguments.get("temperature")
    if samples is False or (samples is None and temperature is None):
        return 0.0
    return 1.0 if temperature is None else temperature


def _stops(arguments: Mapping[str, Any], eos: str) -> list[str]:
    stops: list[str] = []
    for name in ("until", "stop"):
        value = arguments.get(name)
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list | tuple | None) or not all(
            isinstance(one, str) for one in given or ()
        ):
            raise RequestError(f"{name}={value!r} must be a text or a list of texts")
        stops += given or ()
    return list(dict.fromkeys(stop for stop in [*stops, eos] if stop))
