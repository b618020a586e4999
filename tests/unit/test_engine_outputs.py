"""What a step delivers: everything so far, what is new, or the final output alone; and when."""

import random
from typing import Any

import pytest

from scripted import scripted_engine, spell
from tiny import assert_same, finish, greedy, joined, make_engine, prompt_of, run_one, samples
from yocolm.engine.drawing import EntryOutput
from yocolm.engine.engine import Engine
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.plan import Plan
from yocolm.engine.sampling_params import RequestOutputKind, SamplingParams
from yocolm.errors import RequestError

NAME = "retention"
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def drive(engine: Engine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine.check()
    return outputs


@pytest.mark.parametrize("limits", [{}, {"budget": 5}, {"pages": 9, "budget": 7}, {"seqs": 2}])
def test_deltas_add_up(limits: dict[str, Any]) -> None:
    """Also over chunks, forks, preemptions and samples that wait for a slot."""

    def requests(kind: RequestOutputKind) -> dict[str, SamplingParams]:
        return {
            "greedy": greedy(9, output_kind=kind),
            "samples": samples(3, 7, output_kind=kind),
            "plain": SamplingParams(max_tokens=5, seed=3, output_kind=kind),
        }

    wanted: dict[str, RequestOutput] = {}
    for kind in RequestOutputKind:
        engine = make_engine(NAME, **limits)
        for i, (request_id, params) in enumerate(requests(kind).items()):
            engine.add_request(request_id, prompt_of(6 + 3 * i, i), params)
        outputs = drive(engine)
        for request_id in requests(kind):
            mine = [output for output in outputs if output.request_id == request_id]
            if kind is RequestOutputKind.CUMULATIVE:
                wanted[request_id] = mine[-1]
                continue
            assert (len(mine) == 1) is (kind is FINAL)
            got = joined(mine) if kind is DELTA else mine[0]
            assert_same(got, wanted[request_id])
            for sample, other in zip(got.outputs, wanted[request_id].outputs, strict=True):
                assert sample.cumulative_logprob == other.cumulative_logprob


def test_a_delta_holds_what_is_new() -> None:
    engine = make_engine(NAME)
    engine.add_request("one", prompt_of(6), greedy(4, output_kind=DELTA))
    outputs = drive(engine)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1] * 4
    assert [len(output.outputs[0].logprobs or []) for output in outputs] == [1] * 4
    assert len({id(output.prompt_token_ids) for output in outputs}) == 1, "the prompt was copied"


def test_a_delta_holds_the_samples_that_went_on() -> None:
    engine = make_engine(NAME, eos=range(20))
    engine.add_request("one", prompt_of(6), samples(2, 30, seed=1, output_kind=DELTA))
    outputs = drive(engine)
    lengths = [sum(s.index == i for o in outputs for s in o.outputs) for i in (0, 1)]
    final = joined(outputs)
    assert lengths == [len(sample.token_ids) for sample in final.outputs]
    assert lengths[0] != lengths[1]


def test_texts_of_deltas() -> None:
    """Byte for byte the whole text, over characters of several tokens and stop strings."""
    rng = random.Random(1)
    letters = "aab é😀"
    for _ in range(25):
        text = "".join(rng.choices(letters, k=rng.randint(1, 14)))
        tokens = spell(text) + spell("😀")[: rng.choice([0, 0, 2])]
        stops = ["".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(3)]
        fields: dict[str, Any] = {
            "stop": stops[: rng.randint(0, 3)],
            "max_tokens": len(tokens),
            "min_tokens": rng.choice([0, rng.randint(0, len(tokens))]),
            "include_stop_str_in_output": rng.random() < 0.5,
        }
        found: dict[RequestOutputKind, RequestOutput] = {}
        for kind in (FINAL, DELTA):
            engine = scripted_engine(tokens)
            engine.add_request("one", "hello", SamplingParams(**fields, output_kind=kind))
            found[kind] = joined(drive(engine))
        assert_same(found[DELTA], found[FINAL])


def test_what_an_abort_gives_back() -> None:
    """Of deltas what was not delivered: here the characters that a stop string had held back."""
    for kind, text, count in ((DELTA, "o wor", 0), (FINAL, "hello wor", 9)):
        engine = scripted_engine(spell("hello wor"))
        params = SamplingParams(stop=[" world"], max_tokens=50, output_kind=kind)
        engine.add_request("one", "he", params)
        shown = "".join(o.outputs[0].text for _ in range(9) for o in engine.step())
        assert shown == ("hell" if kind is DELTA else "")
        aborted = engine.abort("one")
        assert aborted is not None and aborted.finished
        assert aborted.outputs[0].text == text and len(aborted.outputs[0].token_ids) == count
        assert aborted.outputs[0].finish_reason == "abort"
        assert engine.abort("one") is None and engine.step() == []


def test_a_long_stream_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are joined from new pieces only."""
    tokens = spell("ab") * 100
    engine = scripted_engine(tokens)
    engine.add_request(
        "one", "he", SamplingParams(stop="zz", max_tokens=len(tokens), output_kind=DELTA)
    )
    answer = engine._answers["one"]
    longest = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            longest = max(longest, len(output.outputs[0].text))
        text = answer._sample(0).text
        assert text is not None and sum(map(len, [*text._shown, text._hidden, text._recent])) < 8
    assert longest <= 2


def test_the_kind_is_checked() -> None:
    wrong: Any = "delta"
    with pytest.raises(RequestError, match="output_kind='delta' must be a RequestOutputKind"):
        SamplingParams(output_kind=wrong)


def times(output: RequestOutput) -> list[float]:
    assert output.metrics is not None
    found = output.metrics
    stamps = [found.arrival_time, found.first_scheduled_time, found.first_token_time]
    return [stamp for stamp in (*stamps, found.finished_time) if stamp is not None]


def test_times_of_a_request() -> None:
    engine = make_engine(NAME, budget=5)
    engine.add_request("one", prompt_of(12), greedy(3, output_kind=DELTA))
    outputs = drive(engine)
    assert [len(times(output)) for output in outputs] == [3, 3, 4]
    assert times(outputs[-1]) == sorted(times(outputs[-1]))
    assert len({times(output)[2] for output in outputs}) == 1
    engine.add_request("two", prompt_of(12), greedy(3), arrival_time=1.5)
    assert times(finish(engine)["two"])[0] == 1.5
    engine.add_request("waiting", prompt_of(3), greedy(3))
    aborted = engine.abort("waiting")
    assert aborted is not None and aborted.metrics is not None
    assert aborted.metrics.first_scheduled_time is aborted.metrics.first_token_time is None
    assert aborted.metrics.finished_time is not None


def test_preemptions_are_counted() -> None:
    engine = make_engine(NAME, pages=9, budget=7)
    for i in range(3):
        engine.add_request(str(i), prompt_of(8 + i, i), greedy(10))
    outputs = finish(engine).values()
    counts = [o.metrics.num_preemptions for o in outputs if o.metrics is not None]
    assert sum(counts) == engine.scheduler.num_preemptions > 0
    alone = run_one(engine, prompt_of(5), greedy(2))
    assert alone.metrics is not None and alone.metrics.num_preemptions == 0


def test_failures_are_delivered_whatever_the_kind() -> None:
    def failing(plan: Plan) -> list[EntryOutput]:
        raise RuntimeError("out of order")

    for kind in RequestOutputKind:
        engine = make_engine(NAME)
        engine.add_request("one", prompt_of(5), greedy(4, output_kind=kind))
        engine.step()
        engine.runner.run = failing
        (output,) = engine.step()
        assert output.finished and output.error is not None and "out of order" in output.error
        assert output.outputs[0].finish_reason == "error"
        assert len(output.outputs[0].token_ids) == (0 if kind is DELTA else 1)
