"""What the second half is given: the rows that somebody needs, once, and nothing else."""

from collections import Counter
from collections.abc import Callable

import pytest
from torch import Tensor, nn

from spying import Spy, Traffic
from tiny import (
    FAMILIES,
    GEMMA_FAMILIES,
    GROWING,
    assert_dense,
    fresh_model,
    greedy,
    make_engine,
    prompt_of,
    run,
    run_one,
    samples,
    tiny_model,
)
from yocolm.config import GemmaConfig
from yocolm.engine.sampling_params import SamplingParams

EVERY = pytest.mark.parametrize("name", FAMILIES)
PLAIN = {"prompt_logprobs": None, "logprobs": None}


def positions(request_id: str, *spans: range) -> Counter[tuple[str, int]]:
    return Counter((request_id, position) for span in spans for position in span)


@EVERY
def test_only_the_final_chunk_has_a_row(name: str) -> None:
    spy = Spy(tiny_model(name))
    engine = make_engine(name, model=spy, budget=7)
    engine.add_request("one", prompt_of(30), greedy(3, **PLAIN))
    for _ in range(4):
        engine.step()
    assert (len(spy.writes), spy.reads, spy.logit_rows) == (4, [], [])
    assert engine.runner.stats.read_calls == engine.runner.stats.read_rows == 0
    engine.step()
    assert [batch.tokens.tolist() for batch in spy.reads] == [prompt_of(30)[-1:]]
    engine.step()
    engine.step()
    assert not engine.has_unfinished_requests()
    assert [len(batch.tokens) for batch in spy.writes] == [7, 7, 7, 7, 2, 1, 1]
    assert spy.logit_rows == [1, 1, 1]
    stats = engine.runner.stats
    assert (stats.write_tokens, stats.read_rows, stats.read_calls) == (32, 3, 3)


@EVERY
@pytest.mark.parametrize("budget", [3, 64])
def test_a_scoring_request_pays_for_its_own_rows_only(name: str, budget: int) -> None:
    spy = Spy(tiny_model(name))
    engine = make_engine(name, model=spy, budget=budget)
    traffic = Traffic(engine, spy)
    requests = {
        "before": (prompt_of(11, 1), greedy(4, **PLAIN)),
        "scored": (prompt_of(12, 2), greedy(2)),
        "tail": (prompt_of(14, 3), greedy(1, prompt_logprobs=0, prompt_logprobs_start=9)),
        "only scored": (prompt_of(5, 4), greedy(0, prompt_logprobs=0)),
        "after": (prompt_of(9, 5), greedy(3, **PLAIN)),
    }
    outputs = run(engine, requests)
    for request_id in ("scored", "tail", "only scored"):
        assert_dense(outputs[request_id], name)
    assert traffic.read == (
        positions("before", range(10, 14))
        + positions("scored", range(0, 13))
        + positions("tail", range(8, 14))
        + positions("only scored", range(0, 4))
        + positions("after", range(8, 11))
    )
    assert engine.runner.stats.read_rows == traffic.read.total()
    assert engine.runner.stats.write_tokens == traffic.written.total() == 57
    assert set(traffic.written.values()) == {1}


@EVERY
def test_every_field_follows_the_rows(name: str) -> None:
    """Uneven requests, some of them without rows in the step."""
    spy = Spy(tiny_model(name))
    engine = make_engine(name, model=spy, budget=16)
    requests = {str(i): (prompt_of(3 + 4 * i, i), greedy(5, **PLAIN)) for i in range(4)}
    run(engine, requests | {"scored": (prompt_of(9, 9), greedy(2))})
    selected = 0
    for batch in spy.reads:
        lengths = {len(batch.tokens), len(batch.positions), len(batch.seq_ids), len(batch.rows)}
        assert lengths == {int(batch.cu_seqlens[-1])}
        sequences = {len(batch.slots), len(batch.kv_lens), len(batch.block_table)}
        assert sequences == {len(batch.cu_seqlens) - 1}
        owner = batch.seq_ids.tolist()
        assert owner == sorted(owner)
        assert batch.cu_seqlens.diff().tolist() == [
            owner.count(sequence) for sequence in range(len(batch.slots))
        ]
        assert (batch.positions < batch.kv_lens[batch.seq_ids]).all()
        selected += 0 in batch.cu_seqlens.diff()
    assert selected > 0, "no step had a sequence without rows"


@pytest.mark.parametrize("name", GROWING)
def test_rows_are_not_scored_again_after_a_preemption(name: str) -> None:
    spy = Spy(tiny_model(name))
    engine = make_engine(name, model=spy, pages=9, budget=7)
    traffic = Traffic(engine, spy)
    requests = {str(i): (prompt_of(8 + i, i), greedy(10)) for i in range(3)}
    outputs = run(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    assert engine.runner.stats.write_tokens > sum(8 + i + 9 for i in range(3)), "none recomputed"
    for request_id, output in outputs.items():
        assert_dense(output, name)
        prompt_length = len(output.prompt_token_ids)
        # Each row draws a token or scores one; the prompt's last row draws the first token.
        assert {p: n for (i, p), n in traffic.read.items() if i == request_id} == dict.fromkeys(
            range(prompt_length + 9), 1
        )


def test_half_scored_prompts_go_on_where_they_were() -> None:
    """Preempted in the middle of its prompt, a scoring request scores the rest only."""
    spy = Spy(tiny_model("retention"))
    engine = make_engine("retention", model=spy, pages=7, budget=4)
    traffic = Traffic(engine, spy)
    engine.add_request("old", prompt_of(7, 1), greedy(12, **PLAIN))
    engine.step()
    engine.step()
    engine.add_request("scored", prompt_of(18, 2), greedy(2))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((out.request_id, out) for out in engine.step() if out.finished)
        engine.check()
    assert engine.scheduler.num_preemptions == 1
    again = [p for (i, p), n in traffic.written.items() if i == "scored" and n > 1]
    assert 0 < len(again) < 18, "preempted in the middle of the prompt"
    assert {n for (i, _), n in traffic.read.items() if i == "scored"} == {1}
    assert_dense(outputs["scored"], "retention")


@EVERY
def test_the_prompt_of_several_samples_is_computed_once(name: str) -> None:
    spy = Spy(tiny_model(name))
    engine = make_engine(name, model=spy, budget=8)
    traffic = Traffic(engine, spy)
    output = run_one(engine, prompt_of(13), samples(3, max_tokens=5))
    assert_dense(output, name, is_greedy=False)
    decoded = Counter({("one", position): 3 for position in range(13, 17)})
    assert traffic.written == positions("one", range(13)) + decoded
    assert traffic.read == positions("one", range(13)) + decoded


def test_one_token_to_score_is_nothing_to_read() -> None:
    spy = Spy(tiny_model("window"))
    engine = make_engine("window", model=spy)
    params = SamplingParams(max_tokens=0, prompt_logprobs=3)
    output = run_one(engine, [5], params)
    assert output.prompt_logprobs == [None] and output.outputs[0].finish_reason == "length"
    assert spy.reads == [] and spy.logit_rows == []


@pytest.mark.parametrize("name", GEMMA_FAMILIES)
def test_layers_compute_queries_of_tokens_below_the_last_write_and_of_rows_from_it_on(
    name: str,
) -> None:
    """The last layer that owns keys and values attends, as the readers do, for rows alone."""
    config, model = FAMILIES[name], fresh_model(name)
    assert isinstance(config, GemmaConfig)
    attended: Counter[int] = Counter()

    def count(layer: int) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor]) -> None:
            attended[layer] += len(inputs[0])

        return hook

    for layer in range(config.num_layers):
        model.get_submodule(f"layers.{layer}.attn.o").register_forward_pre_hook(count(layer))
    engine = make_engine(name, model=model, budget=7)
    plain = {"plain": (prompt_of(20), greedy(3, **PLAIN)), "scored": (prompt_of(9), greedy(2))}
    run(engine, plain)
    tokens, rows, first = 20 + 2 + 9 + 1, 3 + 9 + 1, config.num_writers - 1
    layers = range(config.num_layers)
    assert attended == {layer: tokens if layer < first else rows for layer in layers}


@EVERY
@pytest.mark.parametrize("fast", [True, False])
def test_every_row_can_be_sent_through_for_measurement(name: str, fast: bool) -> None:
    engine = make_engine(name, budget=7, fast_prefill=fast)
    requests = {"plain": (prompt_of(20), greedy(3, **PLAIN)), "scored": (prompt_of(9), greedy(2))}
    outputs = run(engine, requests)
    tokens, rows = 20 + 2 + 9 + 1, 3 + 9 + 1
    assert engine.runner.stats.write_tokens == tokens
    assert engine.runner.stats.read_rows == (rows if fast else tokens)
    for output in outputs.values():
        assert_dense(output, name)


def test_logits_never_exist_for_a_whole_prompt() -> None:
    spy = Spy(tiny_model("llama"))
    engine = make_engine("llama", model=spy)
    engine.runner.drawer.logit_rows = 5
    assert_dense(run_one(engine, prompt_of(33), greedy(2)), "llama")
    assert max(spy.logit_rows) == 5 and sum(spy.logit_rows) == 34
