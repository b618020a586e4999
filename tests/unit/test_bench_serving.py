"""`yocolm bench serving`: the replay of a trace on a tiny model, and the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiny import VOCAB, assert_empty, make_engine
from yocolm import cli
from yocolm.bench.recording import Recording, RequestTimes, error, latency
from yocolm.bench.serving import Prompts, Replay, Sweep, observed
from yocolm.engine.engine import Engine
from yocolm.engine.steps import StepRecord
from yocolm.engine.trace import Trace, TraceRequest
from yocolm.errors import ConfigError, RequestError

NAME = "retention"


class Spy:
    """What was sent to an engine, and how many requests it had at most."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.events: list[tuple[str, str]] = []
        self.most = 0
        enqueue, step = engine.enqueue, engine.step

        def send(request_id: str, ids: list[int], *rest: Any, **wishes: Any) -> None:
            enqueue(request_id, ids, *rest, **wishes)
            self.sent[request_id] = list(ids)
            self.events.append(("sent", request_id))
            self.most = max(self.most, len(engine.scheduler.requests))

        def stepped() -> Any:
            outputs = step()
            for output in outputs:
                for sample in output.outputs:
                    self.answers.setdefault(output.request_id, []).extend(sample.token_ids)
                if output.finished:
                    self.events.append(("ended", output.request_id))
            return outputs

        monkeypatch.setattr(engine, "enqueue", send)
        monkeypatch.setattr(engine, "step", stepped)


def replay(trace: Trace, **options: Any) -> Recording:
    return Replay(make_engine(NAME), trace, **options).run()


def test_every_request_is_served_and_every_token_timed() -> None:
    trace = [TraceRequest(0.002 * i, 3 + 5 * i, 1 + i) for i in range(9)]
    recording = replay(trace)
    assert [r.prompt_tokens for r in recording.requests] == [t.prompt_tokens for t in trace]
    assert [r.output_tokens for r in recording.requests] == [t.output_tokens for t in trace]
    assert [r.arrival for r in recording.requests] == [t.arrival for t in trace]
    for request in recording.requests:
        assert request.error is None and request.ttft is not None and request.e2e is not None
        assert 0 < request.ttft <= request.e2e
        assert (request.tpot is None) == (request.output_tokens == 1)
    assert len(recording.gaps) == sum(t.output_tokens - 1 for t in trace)
    steps = recording.to_json()["steps"]
    assert recording.num_steps == len(steps["at"]) > 8
    assert sum(steps["rows"]) == sum(t.output_tokens for t in trace)
    assert sum(steps["tokens"]) >= sum(t.prompt_tokens + t.output_tokens - 1 for t in trace)
    assert max(steps["pages_used"]) > 0 and max(steps["slots_used"]) > 1


def test_a_turn_goes_on_behind_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(NAME)
    spy = Spy(engine, monkeypatch)
    trace = [
        TraceRequest(0.0, 10, 4, session="a"),
        TraceRequest(0.0, 20, 3, session="a"),
        TraceRequest(0.0, 7, 2),
        TraceRequest(0.0, 40, 2, session="a", shared_prefix=12),
    ]
    recording = Replay(engine, trace).run()
    assert [len(spy.sent[str(i)]) for i in range(4)] == [10, 20, 7, 40]
    first = spy.sent["0"] + spy.answers["0"]
    assert spy.sent["1"][:14] == first
    assert spy.sent["3"][:12] == spy.sent["1"][:12]
    assert spy.sent["3"][12:20] != spy.sent["1"][12:]
    order = [event for event in spy.events if event[1] in "013"]
    assert order == [(what, i) for i in "013" for what in ("sent", "ended")]
    assert [r.arrival > 0 for r in sorted(recording.requests, key=lambda r: r.prompt_tokens)] == [
        False,  # 7 and 10 tokens: when they were due
        False,
        True,  # the turns: when the one before had ended
        True,
    ]
    assert_empty(engine)


def test_prompts_differ_by_seed_and_avoid_what_stands_for_media() -> None:
    trace = [TraceRequest(0.0, 200, 1)] * 2
    media = [3, 5]
    made = [Prompts(trace, VOCAB, media, seed).prompt(i) for seed in (0, 0, 1) for i in (0, 1)]
    assert made[:2] == made[2:4] and made[0] != made[1] and made[0] != made[4]
    assert all(0 <= token < VOCAB and token not in media for ids in made for token in ids)


@pytest.mark.parametrize("limit", [1, 3])
def test_concurrency_is_bounded(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(NAME)
    spy = Spy(engine, monkeypatch)
    trace = [TraceRequest(0.0, 5, 3)] * 8
    recording = Replay(engine, trace, max_concurrency=limit).run()
    assert spy.most == limit
    assert [r.arrival == 0 for r in recording.requests].count(True) == limit
    assert all(r.output_tokens == 3 for r in recording.requests)


def test_a_refused_request_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(NAME)
    enqueue = engine.enqueue

    def refuses(request_id: str, *rest: Any, **wishes: Any) -> None:
        if request_id == "1":
            raise RequestError("not this one")
        enqueue(request_id, *rest, **wishes)

    monkeypatch.setattr(engine, "enqueue", refuses)
    trace = [TraceRequest(0.001 * i, 5, 2, session="s") for i in range(3)]
    recording = Replay(engine, trace).run()
    assert [r.error for r in recording.requests] == [None, "not this one", None]
    summary = recording.summary()
    assert (summary["completed"], summary["failed"]) == (2, 1)


def test_an_interrupt_keeps_what_came_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(NAME)
    step, count = engine.step, 0

    def interrupted() -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    run = Replay(engine, [TraceRequest(0.0, 5, 1), TraceRequest(0.0, 5, 50)])
    recording = run.run()
    assert run.interrupted and recording.num_steps == 3
    assert [r.error for r in recording.requests] == [None, "interrupted"]
    assert_empty(engine)


def test_what_cannot_fit_is_said_before_anything_runs() -> None:
    engine = make_engine(NAME)
    limit = engine.max_model_len
    message = rf"longest request, 2 of the trace, has {limit} \+ 1 tokens, above max_model_len="
    with pytest.raises(ConfigError, match=message):
        Replay(engine, [TraceRequest(0, 1, 1), TraceRequest(0, limit, 1)])
    with pytest.raises(ConfigError, match="above the 20 tokens that the KV pages hold"):
        Replay(make_engine(NAME, pages=5), [TraceRequest(0, 20, 1)])
    with pytest.raises(ConfigError, match="no requests"):
        Replay(engine, [])
    assert Sweep((1,), None, 16, 1).fitting(600) == (128, 512)
    with pytest.raises(ConfigError, match="600 prompt tokens and 16 more exceed the model's 600"):
        Sweep((1,), (8, 600), 16, 1).fitting(600)


def test_an_engine_is_left_as_it_was() -> None:
    engine, seen = make_engine(NAME), []
    before = engine.watch.observer, engine.watch.learns
    with observed(engine, seen.append):
        engine.add_request("a", [1, 2, 3])
        engine.step()
    engine.step()
    [record] = seen
    assert isinstance(record, StepRecord) and record.load.tokens == 3
    assert (engine.watch.observer, engine.watch.learns) == before


def test_targets_are_the_requests_then_the_engines_then_multiples_of_a_run_alone() -> None:
    engine = make_engine(NAME)
    trace = [TraceRequest(0.0, 30, 6, ttft_target=9.0), TraceRequest(0.0, 20, 4)]
    assert [r.tpot_target for r in Replay(engine, trace).run().requests] == [None, None]
    solo = engine.cost.copy()
    first, second = Replay(engine, trace, solo=solo).run().requests
    assert first.ttft_target == 9.0
    assert second.ttft_target == pytest.approx(5 * solo.solo_ttft(20))
    assert first.tpot_target == pytest.approx(2 * solo.solo_tpot(33))
    engine.settings = replace(engine.settings, tpot_target=0.5)
    second = Replay(engine, trace, solo=solo).run().requests[1]
    assert second.tpot_target == 0.5 and second.meets is not None


def test_percentiles_errors_and_targets() -> None:
    found = latency([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found == {"count": 5, "mean": 3, "p50": 3, "p90": 4.6, "p99": 4.96, "max": 5}
    assert latency([]) is None and error([]) is None
    off = error([(1.1, 1.0), (0.8, 1.0)])
    assert off is not None
    assert off["mape"] == pytest.approx(0.15) and off["bias"] == pytest.approx(-0.05)

    def met(**fields: Any) -> bool | None:
        return RequestTimes(0.0, 1, 3, ttft=1.0, e2e=2.0, **fields).meets

    assert met() is None
    assert met(ttft_target=1.0) and met(tpot_target=0.5) and met(ttft_target=2, tpot_target=0.5)
    assert not met(ttft_target=0.9) and not met(ttft_target=2, tpot_target=0.4)
    assert not met(ttft_target=2, error="failed")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt_tokens,output_tokens\n0,20,4\n0.01,9,3\n")
    page, saved = tmp_path / "page.html", tmp_path / "run.json"
    options = ["--trace", str(trace), "--html", str(page), "--json", str(saved), "--threads", "1"]
    options.append("--no-calibrate")
    sweep = ["--sweep-concurrency", "1,2", "--sweep-prompt-lengths", "8,16", "--sweep-decode", "2"]
    sweep += ["--sweep-repeats", "1"]
    assert cli.main(["bench", "serving", "bundled", *options, *sweep]) == 0
    result = json.loads(saved.read_text())
    assert result["requests"]["output_tokens"] == [4, 3]
    assert "2 of 2 requests" in capsys.readouterr().out
    cells = [(cell["concurrency"], cell["prompt"]) for cell in result["sweep"]]
    assert cells == [(1, 8), (1, 16), (2, 8), (2, 16)]
    for cell in result["sweep"]:
        for times in cell["sides"].values():
            assert len(times["ttft"]) == len(times["tpot"]) == 2 * cell["concurrency"]
    text = page.read_text()
    assert "2 requests in" in text and "trace.csv" in text
    again = tmp_path / "again.html"
    command = ["bench", "serving", "bundled", "--from-json", str(saved), "--html", str(again)]
    assert cli.main(command) == 0
    assert again.read_text() == text


def test_errors_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    page = str(tmp_path / "page.html")
    assert cli.main(["bench", "serving", "x", "--from-json", str(bad), "--html", page]) == 1
    assert "holds no run" in capsys.readouterr().err
    assert cli.main(["bench", "serving", "bundled", "--html", str(tmp_path / "no" / "page")]) == 1
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "serving", "bundled", "--request-rate", "0"])
