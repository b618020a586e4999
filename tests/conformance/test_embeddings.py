"""Hidden states as answers: those of the dense forward pass, whatever the chunks and neighbours."""

from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from spying import Spy
from tiny import (
    FAMILIES,
    assert_empty,
    assert_same,
    finish,
    fresh_model,
    greedy,
    make_engine,
    prompt_of,
    run,
    tiny_model,
)
from tolerances import CROSS_PATH
from yocolm.engine.engine import Engine
from yocolm.engine.llm import LLM
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.plan import Plan, StepResult
from yocolm.engine.sampling_params import PoolingParams
from yocolm.errors import RequestError
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState

LAST, MEAN = PoolingParams("LAST", normalize=False), PoolingParams("mean", normalize=False)
LENGTHS = (1, 3, 4, 9, 17)


@torch.no_grad()
def dense(name: str, prompt: list[int], params: PoolingParams) -> Tensor:
    model: Any = tiny_model(name)
    hidden = model(Batch.packed(torch.tensor(prompt), [len(prompt)]), DenseState()).double()
    vector = hidden[-1] if params.pooling_type == "LAST" else hidden.mean(0)
    return vector / vector.norm() if params.normalize else vector


def vector_of(output: RequestOutput) -> Tensor:
    assert output.finished and output.error is None and output.outputs == []
    assert output.embedding is not None
    return torch.tensor(output.embedding, dtype=torch.float64)


def assert_vector(output: RequestOutput, name: str, params: PoolingParams) -> None:
    wanted = dense(name, output.prompt_token_ids, params)
    assert (vector_of(output) - wanted).abs().max() <= CROSS_PATH["float32"]


def embed_all(engine: Engine, params: PoolingParams) -> dict[str, RequestOutput]:
    for length in LENGTHS:
        engine.add_request(str(length), prompt_of(length, length), params)
    return finish(engine)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("budget", [1, 4, 5, 64])
@pytest.mark.parametrize("params", [LAST, MEAN], ids=["last", "mean"])
def test_vectors_of_chunked_prompts(name: str, budget: int, params: PoolingParams) -> None:
    for output in embed_all(make_engine(name, budget=budget), params).values():
        assert_vector(output, name, params)


def test_vectors_of_length_one() -> None:
    for kind in ("LAST", "MEAN"):
        params = PoolingParams(kind)
        for output in embed_all(make_engine("retention", budget=5), params).values():
            assert_vector(output, "retention", params)
            assert vector_of(output).norm() == pytest.approx(1, abs=1e-6)


def test_rows_that_are_needed() -> None:
    """One of a prompt for its last token, all for the mean, each of them once."""
    for params, rows in ((LAST, len(LENGTHS)), (MEAN, sum(LENGTHS))):
        spy = Spy(fresh_model("retention"))
        engine = make_engine("retention", model=spy, budget=5)
        embed_all(engine, params)
        assert engine.runner.stats.read_rows == rows
        assert spy.logit_rows == []


def test_beside_requests_that_draw() -> None:
    def requests() -> dict[str, Any]:
        return {str(i): (prompt_of(7 + i, i), greedy(6)) for i in range(3)}

    alone = run(make_engine("llama", budget=7), requests())
    engine = make_engine("llama", budget=7)
    for i in range(3):
        engine.add_request(f"v{i}", prompt_of(9 + i, 50 + i), MEAN if i else LAST)
    beside = run(engine, requests())
    for request_id, output in alone.items():
        assert_same(beside[request_id], output)
    for i in range(3):
        assert_vector(beside[f"v{i}"], "llama", MEAN if i else LAST)


@pytest.mark.parametrize("applied", [False, True])
def test_a_step_that_is_cut_short_counts_no_row_twice(applied: bool) -> None:
    """Cut before the scheduler knows of its rows, and after that."""
    engine = make_engine("window", budget=4)
    engine.add_request("one", prompt_of(17), MEAN)
    engine.step()
    update = engine.scheduler.update

    def cut(plan: Plan, results: Sequence[StepResult], now: float = 0.0) -> NoReturn:
        if applied:
            update(plan, results, now)
        raise KeyboardInterrupt

    engine.scheduler.update = cut
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.scheduler.update = update
    engine.scheduler.max_num_batched_tokens = 3  # the chunks are not the same ones again
    assert_vector(finish(engine)["one"], "window", MEAN)


def test_preempted_prompts() -> None:
    engine = make_engine("retention", budget=4)
    engine.add_request("one", prompt_of(17), MEAN)
    engine.step()
    engine.step()
    engine.scheduler.preempt_all()
    output = finish(engine)["one"]
    assert_vector(output, "retention", MEAN)
    assert output.metrics is not None and output.metrics.num_preemptions == 1


def test_aborts_and_failures() -> None:
    engine = make_engine("retention", budget=4)
    engine.add_request("one", prompt_of(17), MEAN)
    engine.step()
    aborted = engine.abort("one")
    assert aborted is not None and aborted.finished and aborted.embedding is None
    assert_empty(engine)
    model = fresh_model("retention-grouped")
    with torch.no_grad():
        model.get_parameter("embed_tokens.weight")[60] = float("nan")
    engine = make_engine("retention-grouped", model=model)
    engine.add_request("bad", [1, 60, 2], MEAN)
    engine.add_request("good", [1, 3, 2], LAST)
    outputs = finish(engine)
    assert outputs["bad"].embedding is None
    assert "hidden states are not finite" in str(outputs["bad"].error)
    assert_vector(outputs["good"], "retention-grouped", LAST)


def test_prompts_as_long_as_the_context() -> None:
    engine = make_engine("retention", length=20)
    for prompt, message in (([], "no tokens"), (prompt_of(21), "exceeds"), ([999], "vocabulary")):
        with pytest.raises(RequestError, match=message):
            engine.add_request("bad", prompt, LAST)
    engine.add_request("one", prompt_of(20), MEAN)
    assert_vector(finish(engine)["one"], "retention", MEAN)


def test_parameters_that_cannot_be() -> None:
    for wrong in ("CLS", 5, None):
        with pytest.raises(RequestError, match="pooling_type=.* must be one of LAST, MEAN"):
            PoolingParams(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="normalize=1 must be True or False"):
        PoolingParams(normalize=1)  # pyright: ignore[reportArgumentType]


def test_embed() -> None:
    llm = LLM(kv_memory="64MB", max_num_batched_tokens=8)
    texts = ["It was a truth", "It was a truth", "Nothing else"]
    first, again, other = llm.embed(texts)
    assert first.outputs is not None and again.outputs is not None and other.outputs is not None
    assert len(first.outputs.embedding) == llm.engine.config.hidden_size
    assert first.outputs.embedding == pytest.approx(again.outputs.embedding, abs=1e-5)
    assert first.outputs.embedding != pytest.approx(other.outputs.embedding, abs=1e-2)
    assert first.finished and first.error is None
    (mean,) = llm.embed(texts[0], MEAN)
    assert mean.outputs is not None and mean.prompt_token_ids == first.prompt_token_ids
    with pytest.raises(RequestError, match="no tokens"):
        llm.embed(["a", ""])
    assert not llm.engine.has_unfinished_requests()
