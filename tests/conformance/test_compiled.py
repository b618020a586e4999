"""Both halves over static buffers: the same answers as without, and pads that do no harm."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from blocks import shrink_blocks
from tiny import (
    CASES,
    FAMILIES,
    assert_dense,
    assert_same,
    finish,
    greedy,
    make_engine,
    poison,
    prompt_of,
    run,
    run_one,
    samples,
)
from yocolm.configs.gemma4 import ExpertsConfig
from yocolm.engine.buffers import bucket_sizes
from yocolm.engine.compiled import Halves
from yocolm.engine.engine import Engine
from yocolm.engine.settings import EngineSettings
from yocolm.errors import ConfigError
from yocolm.models.base import Batch
from yocolm.models.gemma4 import Experts
from yocolm.ops.native.build import BuildError, find_compiler


def halves(engine: Engine) -> Halves:
    compiled = engine.runner.compiled
    assert compiled is not None
    return compiled


def sizes_run(engine: Engine) -> set[tuple[str, int]]:
    return set(halves(engine)._units)


def pools(engine: Engine) -> list[Tensor]:
    state = engine.runner.state
    return [*(x for pair in (*state.pages, *state.rings) for x in pair), *state.recurrent]


def test_buckets_end_at_the_largest_size() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(11) == [1, 2, 4, 8, 11]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_family_answers_as_without(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are cut into chunks while others decode; sizes change as requests come and end."""
    shrink_blocks(monkeypatch)
    engine = make_engine(name, dtype, compile="replay", budget=9)
    requests = {str(i): (prompt_of(2 + 4 * i, i), greedy(9 + i)) for i in range(5)}
    requests["scored"] = (prompt_of(23, 9), greedy(3, prompt_logprobs=0))
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    done = {}
    while engine.has_unfinished_requests():
        poison(engine)  # scratch, free pages and slots, and what lies in the buffers
        done.update((out.request_id, out) for out in engine.step() if out.finished)
        engine.check()
    for output in done.values():
        assert_dense(output, name, dtype)
    assert {("write", 1), ("write", 4), ("read", 1), ("read", 4)} <= sizes_run(engine)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("name", ["retention", "gemma4", "gemma3n-windows"])
def test_at_every_edge_of_a_bucket(name: str, count: int) -> None:
    engine = make_engine(name, "float64", compile="replay")
    poison(engine)
    params = greedy(8, prompt_logprobs=None)
    requests = {str(i): (prompt_of(3 + i, i), params) for i in range(count)}
    for output in run(engine, requests).values():
        assert_dense(output, name, "float64")
    size = next(size for size in bucket_sizes(8) if size >= count)
    assert sizes_run(engine) == {("write", size), ("read", size)}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_pads_touch_nothing_but_scratch(name: str) -> None:
    engine = make_engine(name, "float64", compile="replay")
    params = greedy(20, logprobs=None, prompt_logprobs=None)
    for i in range(5):  # of which the first two end early
        engine.add_request(str(i), prompt_of(6 + i, i), greedy(2) if i < 2 else params)
    while len(engine.scheduler.running) != 3 or engine.scheduler.waiting:
        engine.step()
    before = [pool.clone() for pool in pools(engine)]
    for _ in range(3):
        engine.step()  # three sequences in a bucket of four
    running = engine.scheduler.running
    slots, pages = {0, *(seq.slot for seq in running)}, {0, *(p for s in running for p in s.pages)}
    state = engine.runner.state
    page_pools = {id(x) for pair in state.pages for x in pair}
    for pool, old in zip(pools(engine), before, strict=True):
        owned = pages if id(pool) in page_pools else slots
        others = [number for number in range(len(pool)) if number not in owned]
        assert torch.equal(pool[others].nan_to_num(7.5), old[others].nan_to_num(7.5))
        assert not torch.equal(pool[list(owned)].nan_to_num(7.5), old[list(owned)].nan_to_num(7.5))
    finish(engine)


@pytest.mark.parametrize("name", ["retention", "window-grouped", "gemma4-full-last", "gemma3n"])
def test_preempted_forked_and_reused(name: str) -> None:
    """Few pages, so that sequences lose their state and resume; slots go from one to the next."""
    compiled = make_engine(name, "float64", compile="replay", pages=14, seqs=4, budget=16)
    eager = make_engine(name, "float64", compile="eager", pages=14, seqs=4, budget=16)
    assert eager.runner.compiled is None
    requests = {str(i): (prompt_of(9 + i, i), greedy(12)) for i in range(5)}
    requests["fork"] = (prompt_of(7, 40), samples(3, 9))
    got, wanted = run(compiled, requests), run(eager, requests)
    assert compiled.scheduler.num_preemptions > 0
    for request_id, output in got.items():
        assert_same(output, wanted[request_id], "float64")


@pytest.mark.parametrize("name", ["retention", "gemma4", "gemma3n"])
def test_outputs_outlive_the_next_size(name: str) -> None:
    """What ``write`` returned is what ``read`` gets, though sizes alternate and buffers are
    poisoned in between."""
    engine = make_engine(name, "float64", compile="replay")
    for i in range(5):
        engine.add_request(str(i), prompt_of(5, i), greedy(3 + i % 2 * 9))
    done = {}
    while engine.has_unfinished_requests():
        if len(engine.scheduler.running) in (2, 5):  # a newcomer changes the size back and forth
            engine.add_request(f"new {engine.scheduler.num_steps}", prompt_of(1, 7), greedy(1))
        poison(engine)
        done.update((out.request_id, out) for out in engine.step() if out.finished)
    for output in done.values():
        assert_dense(output, name, "float64")


@pytest.mark.parametrize("count", [1, 2, 9])
def test_experts_of_fixed_shapes(count: int) -> None:
    """With few tokens by their own matrices, with more by all: as when grouped by expert."""
    experts = Experts(12, ExpertsConfig(num_experts=5, top_k=2, intermediate_size=7)).double()
    for seed, parameter in enumerate(experts.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    x = torch.randn(count, 12, dtype=torch.float64)
    weights, chosen = torch.rand(count, 5, dtype=torch.float64).topk(2)
    assert torch.allclose(experts.at_once(x, chosen, weights), experts(x, chosen, weights))


@pytest.mark.parametrize("name", ["window", "gemma4"])
def test_a_bucket_larger_than_a_step(name: str) -> None:
    """Three tokens a step go into a bucket of four."""
    engine = make_engine(name, "float64", compile="replay", budget=3)
    for output in run(engine, {str(i): (prompt_of(5, i), greedy(5)) for i in range(4)}).values():
        assert_dense(output, name, "float64")


def test_rows_of_every_token() -> None:
    """With fast prefill off, decode steps still go through both halves, and answer the same."""
    name = "gemma4"
    engine = make_engine(name, "float64", compile="replay", fast_prefill=False, budget=7)
    for output in run(engine, {str(i): (prompt_of(11, i), greedy(5)) for i in range(3)}).values():
        assert_dense(output, name, "float64")


def test_a_step_that_raises_leaves_nothing_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "gemma4"
    engine = make_engine(name, "float64", compile="replay")
    engine.add_request("0", prompt_of(9), greedy(6))
    for _ in range(3):
        engine.step()
    read = halves(engine).read

    def failing(*_: object) -> Tensor:
        monkeypatch.setattr(halves(engine), "read", read)
        raise KeyboardInterrupt

    monkeypatch.setattr(halves(engine), "read", failing)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.abort("0")
    engine.add_request("1", prompt_of(14, 3), greedy(6))  # in the slot that was to be written
    assert_dense(finish(engine)["1"], name, "float64")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compile='fast' must be one of auto, eager"):
        EngineSettings(compile="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"compile='graph' captures CUDA graphs, and the model"):
        make_engine("retention", compile="graph")
    assert make_engine("retention").runner.compiled is None  # auto, on a CPU


def test_inductor_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"compile='inductor' on a CPU: .*no-such-compiler"):
        make_engine("retention", compile="inductor")


@pytest.fixture
def compiler() -> Iterator[None]:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's compiler about itself
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retention", "gemma4-full-last"])
@pytest.mark.usefixtures("compiler")
def test_each_size_is_compiled_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    engine = make_engine(name, "float32", compile="inductor")
    requests = {str(i): (prompt_of(3 + 7 * i, i), greedy(5)) for i in range(2)}
    for _ in range(2):  # the second time, everything is there
        for output in run(engine, requests).values():
            assert_dense(output, name, "float32")
    assert sizes_run(engine) == {("write", 2), ("read", 2)}
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_no_pool_is_cloned() -> None:
    """What a compiled half allocates has nothing of the size of a pool."""
    from torch._inductor.utils import run_and_get_code

    engine = make_engine("window", "float32", compile="inductor", pages=150)
    run_one(engine, prompt_of(3), greedy(1))
    compiled = halves(engine)
    batch = Batch.packed(torch.zeros(2, dtype=torch.int64), [1, 1])
    batch.block_table.resize_(2, 1).zero_()
    batch.slots.zero_()
    with torch.inference_mode():
        _, codes = run_and_get_code(compiled.write, batch)
    assert any("append_pages" in code for code in codes)
    for pool in pools(engine):
        shape = ", ".join(map(str, pool.shape))
        assert not any(f"empty_strided_cpu(({shape})" in code for code in codes)
