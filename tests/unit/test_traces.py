"""Traces: what is read, what is refused, which tokens requests share, what scaling keeps."""

import json
from pathlib import Path

import numpy as np
import pytest

from yocolm.bench.traces import (
    MIXES,
    agent,
    at_rate,
    mix,
    poisson,
    read_agent_cases,
    recorded_sessions,
    scaled,
)
from yocolm.engine.trace import Tokens, TraceRequest, read_trace, write_trace
from yocolm.errors import ConfigError

# The first lines of splitwise_conv.csv in PyPI's vidur 0.0.26 (MIT, (c) 2025 Project Vajra).
SPLITWISE = """arrived_at,num_prefill_tokens,num_decode_tokens
0.0,374,44
4.314579,396,109
4.541877,879,55
"""


def save(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_published_column_names_are_understood(tmp_path: Path) -> None:
    assert read_trace(save(tmp_path, SPLITWISE)) == [
        TraceRequest(0.0, 374, 44),
        TraceRequest(4.314579, 396, 109),
        TraceRequest(4.541877, 879, 55),
    ]


def test_columns_may_stand_in_any_order_without_names_only_in_one(tmp_path: Path) -> None:
    named = "output_tokens,extra,prompt_tokens,arrival\n2,x,3,1.5\n"
    assert read_trace(save(tmp_path, named)) == [TraceRequest(1.5, 3, 2)]
    assert read_trace(save(tmp_path, "2.5,4,5\n1.5,3,2\n")) == [
        TraceRequest(1.5, 3, 2),
        TraceRequest(2.5, 4, 5),
    ]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    trace = [
        TraceRequest(0.25, 7, 1),
        TraceRequest(1.0, 8, 2, session="a, b", shared_prefix=0, priority=-3),
        TraceRequest(1.0, 9, 3, session="c", ttft_target=0.5, tpot_target=0.1),
    ]
    write_trace(tmp_path / "trace.csv", trace)
    assert read_trace(tmp_path / "trace.csv") == trace


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("arrival,prompt_tokens,output_tokens\n", "no requests"),
        ("arrival,prompt_tokens\n1,2\n", "output_tokens is missing"),
        ("arrival,prompt_tokens,output_tokens\n1,2,many\n", "line 2: output_tokens='many'"),
        ("arrival,prompt_tokens,output_tokens\n1,0,2\n", "prompt_tokens=0 must be from 1"),
        ("arrival,prompt_tokens,output_tokens\n1,2.5,2\n", "prompt_tokens='2.5'"),
        ("arrival,prompt_tokens,output_tokens\nnan,2,2\n", "arrival='nan'"),
        ("arrival,prompt_tokens,output_tokens\n-1,2,2\n", "arrival=-1 must"),
        ("1,2\n", "is missing"),
        ("arrival,prompt_tokens,output_tokens\n1,2\n", "output_tokens='' is not"),
    ],
)
def test_bad_traces_are_refused_with_place_and_remedy(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_trace(save(tmp_path, text))


def test_turns_continue_their_session_and_nothing_else_is_shared() -> None:
    trace = [
        TraceRequest(0, 10, 5, session="a"),
        TraceRequest(1, 20, 5, session="a"),
        TraceRequest(2, 20, 5, session="b"),
        TraceRequest(3, 20, 5),
        TraceRequest(4, 20, 5),
    ]
    tokens = Tokens(trace)
    spans = [tokens.span(i, 0, r.prompt_tokens + r.output_tokens) for i, r in enumerate(trace)]
    assert np.array_equal(spans[1][:15], spans[0])
    others = [set(span.tolist()) for span in spans[1:]]
    assert sum(map(len, others)) == len(set.union(*others))


def test_a_shared_prefix_ends_where_it_says() -> None:
    trace = [
        TraceRequest(0, 10, 2, session="a"),
        TraceRequest(1, 10, 2, session="a", shared_prefix=4),
        TraceRequest(2, 10, 2, shared_prefix=3),
        TraceRequest(3, 10, 2, shared_prefix=3),
    ]
    tokens = Tokens(trace)
    first, branch, common, again = (tokens.span(i, 0, 12) for i in range(4))
    assert (first == branch).tolist() == [True] * 4 + [False] * 8
    assert (common == again).tolist() == [True] * 3 + [False] * 9
    assert np.array_equal(tokens.prompt(1), branch[:10])
    assert np.array_equal(tokens.span(1, 2, 6), branch[2:6])
    assert np.array_equal(tokens.span(1, 6, 9), branch[6:9])


def test_token_ids_for_a_model_are_in_its_vocabulary_and_differ_between_lines() -> None:
    tokens = Tokens([TraceRequest(0, 500, 1), TraceRequest(0, 500, 1)], vocab_size=50, first=3)
    one, two = tokens.prompt(0), tokens.prompt(1)
    assert set(one) == set(range(3, 50)) == set(two)
    assert 0 < (one == two).sum() < 50
    with pytest.raises(ConfigError, match="first=50"):
        Tokens([], vocab_size=50, first=50)


def test_scaling_keeps_order_and_proportions() -> None:
    trace = [TraceRequest(5.0 + 2 * i, 100, 9, shared_prefix=50) for i in range(11)]
    small = scaled(trace, lengths=0.1, rate=5.0, limit=6)
    assert [r.arrival for r in small] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert {(r.prompt_tokens, r.output_tokens, r.shared_prefix) for r in small} == {(10, 1, 5)}
    assert {r.shared_prefix for r in scaled([TraceRequest(0, 9, 9, shared_prefix=0)], 0.5)} == {0}
    assert at_rate(trace[:1], 3.0)[0].arrival == 0.0
    for bad in (0.0, -1.0):
        with pytest.raises(ConfigError):
            at_rate(trace, bad)
        with pytest.raises(ConfigError):
            scaled(trace, lengths=bad)


def test_poisson_arrivals_are_one_a_second_and_follow_the_seed() -> None:
    trace = [TraceRequest(0.0, 1, 1)] * 4000
    drawn = poisson(trace, seed=1)
    gaps = np.diff([r.arrival for r in drawn])
    assert gaps.mean() == pytest.approx(1.0, abs=0.05)
    assert gaps.std() == pytest.approx(1.0, abs=0.08)
    assert drawn == poisson(trace, seed=1) != poisson(trace, seed=2)


@pytest.mark.parametrize("name", MIXES)
def test_mixes_are_repeatable_and_arrive_at_one_a_second(name: str) -> None:
    trace = MIXES[name](3)
    assert trace == MIXES[name](3) != MIXES[name](4)
    arrivals = [r.arrival for r in trace]
    assert arrivals == sorted(arrivals)
    assert len(trace) / arrivals[-1] == pytest.approx(1.0, rel=0.25)


def test_the_long_ones_are_as_many_in_every_seed() -> None:
    for seed in range(5):
        prompts = [r.prompt_tokens for r in MIXES["long-short"](seed)]
        long = [n for n in prompts if n != 512]
        assert len(long) == len(prompts) // 20
        assert min(long) >= 32_768 and max(long) <= 131_072


def test_the_turns_of_a_session_continue_each_other() -> None:
    trace = agent(seed=0, given_scale=0.25, max_turns=5, count=60)
    assert len(trace) == 60
    ends: dict[str | None, int] = {}
    continued = 0
    for request in trace:
        before = ends.get(request.session, 0)
        assert request.prompt_tokens > before
        continued += before > 0
        ends[request.session] = request.prompt_tokens + request.output_tokens
    assert continued > 20


def test_a_file_is_a_mix_of_its_windows(tmp_path: Path) -> None:
    path = save(tmp_path, "".join(f"{i * i},{100 + i},{i + 1}\n" for i in range(10)))
    first, second = mix(str(path), 0, count=4), mix(str(path), 1, count=4)
    assert [r.prompt_tokens for r in first] == [100, 101, 102, 103]
    assert [r.prompt_tokens for r in second] == [104, 105, 106, 107]
    # As recorded: 9, 11, 13 seconds apart, but for the rate.
    assert [r.arrival for r in second] == pytest.approx([0, 3 * 9 / 33, 3 * 20 / 33, 3])
    assert [r.prompt_tokens for r in mix(str(path), 3, count=4, lengths=0.5)] == [52, 53, 54, 54]
    assert len(mix(str(path), 5)) == 10
    assert mix("uniform", 2, count=7) == MIXES["uniform"](2)[:7]
    with pytest.raises(ConfigError, match="none.csv' is neither one of long-short, agent"):
        mix(str(tmp_path / "none.csv"), 0)


def test_recorded_conversations_come_along() -> None:
    sessions = recorded_sessions()
    assert len(sessions) == 48
    longest = max(sum(map(sum, session.turns)) for session in sessions)
    assert 100_000 < longest < 140_000


def test_agent_cases_are_read_as_turns(tmp_path: Path) -> None:
    def message(role: str, size: int) -> dict[str, str]:
        return {"role": role, "content": "x" * size}

    messages = [message("user", 40), message("assistant", 6), message("user", 4)]
    case = {"id": "one", "messages": [*messages, message("user", 4)], "reference_response": "yes"}
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [case]}))
    (session,) = read_agent_cases(path)
    assert (session.name, session.turns) == ("one", ((10, 2), (2, 1)))
    path.write_text('{"other": 1}')
    with pytest.raises(ConfigError, match="multi_turn_cases"):
        read_agent_cases(path)


def test_lengths_that_are_too_large_are_refused_before_a_prompt_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scale lengths by less"):
        scaled([TraceRequest(0.0, 100, 10)], 1e30)
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt_tokens,output_tokens\n0,2147483648,10\n")
    with pytest.raises(ConfigError, match="prompt_tokens=2147483648 must be from 1 to"):
        read_trace(path)
