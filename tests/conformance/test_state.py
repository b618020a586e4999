"""Pools: readers do not write them, nobody sees what is not his, and they are as large as said."""

import hashlib

import pytest
import torch
from torch import Tensor

from spying import Spy
from tiny import (
    DTYPES,
    FAMILIES,
    GROWING,
    LENGTH,
    assert_dense,
    assert_same,
    finish,
    greedy,
    make_engine,
    poison,
    prompt_of,
    run,
    samples,
    tiny_model,
)
from yocolm.engine.engine import Engine
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.state import PagedState

EVERY = pytest.mark.parametrize("name", FAMILIES)
REQUESTS = {
    "plain": (prompt_of(12, 1), greedy(12)),
    "forked": (prompt_of(9, 2), samples(3)),
    "long": (prompt_of(31, 3), greedy(3)),
    "short": (prompt_of(1, 4), greedy(7)),
}


def slot_pools(state: PagedState) -> list[Tensor]:
    return [*(pool for pair in state.rings for pool in pair), *state.recurrent]


def page_pools(state: PagedState) -> list[Tensor]:
    return [pool for pair in state.pages for pool in pair]


def checksum(pools: list[Tensor]) -> str:
    """Of the bytes, so that NaN equals NaN."""
    digest = hashlib.sha256()
    for pool in pools:
        digest.update(pool.view(torch.uint8).numpy().data)
    return digest.hexdigest()


@EVERY
def test_readers_write_nothing(name: str) -> None:
    spy = Spy(tiny_model(name))
    engine = make_engine(name, model=spy, pages=17, budget=9)
    sums: list[str] = []

    def look() -> None:
        state = engine.runner.state
        sums.append(checksum(page_pools(state) + slot_pools(state)))

    def look_again(x: Tensor) -> Tensor:
        before = sums[-1]
        look()
        assert sums[-1] == before, "a reader has written"
        return x

    spy.before["read"], spy.after["read"] = look, look_again
    run(engine, REQUESTS)
    assert len(set(sums)) > 10


@pytest.mark.parametrize("name", ["window", "window-grouped"])
def test_rings_move_on_when_the_last_reader_has_run(name: str) -> None:
    """Layers of the second half may need the keys that a ring is about to drop."""
    spy = Spy(tiny_model(name))
    engine = make_engine(name, model=spy, budget=4)
    sums: list[str] = []

    def look() -> None:
        sums.append(checksum(slot_pools(engine.runner.state)))

    spy.before["write"], spy.before["logits"] = look, look
    spy.after["write"] = spy.after["read"] = lambda x: (look(), x)[1]
    engine.add_request("one", prompt_of(7), greedy(1, prompt_logprobs=None))
    engine.step()
    first, sums[:] = list(sums), []
    engine.step()
    assert first[0] == first[1] != sums[0] == sums[1] == sums[2] != sums[3]


@EVERY
@pytest.mark.parametrize("limits", [{}, {"pages": 16, "budget": 5}, {"page_size": 64}])
def test_what_nobody_owns_is_not_seen(name: str, limits: dict[str, int]) -> None:
    """Scratch, free pages and free slots hold NaN from the start and between all steps."""
    wanted = run(make_engine(name, "float64"), REQUESTS)
    engine = make_engine(name, "float64", **limits)  # pyright: ignore[reportArgumentType]
    outputs: dict[str, RequestOutput] = {}
    for request_id, (prompt, params) in REQUESTS.items():
        engine.add_request(request_id, prompt, params)
    while engine.has_unfinished_requests():
        poison(engine)
        outputs.update((out.request_id, out) for out in engine.step() if out.finished)
        engine.check()
    for request_id, output in outputs.items():
        assert_same(output, wanted[request_id], "float64")
        assert_dense(output, name, "float64", is_greedy=False)


@EVERY
def test_state_of_others_stays_as_it_is(name: str) -> None:
    """A step changes the pages and slots of the sequences that it runs, and no others."""
    engine = make_engine(name, budget=2, seqs=4)
    for i in range(4):
        engine.add_request(str(i), prompt_of(3, i), greedy(6))
    for _ in range(4):  # then two requests fill the budget with their decodes
        engine.step()
    poison(engine)
    state, running = engine.runner.state, engine.scheduler.running
    slots = {seq.slot for seq in running}
    pages = {page for seq in running for page in seq.pages}
    assert len(running) >= 2
    others_slots = sorted(set(range(engine.scheduler.slot_pool.size)) - slots)
    others_pages = sorted(set(range(engine.scheduler.page_pool.size)) - pages)

    def others() -> str:
        pools = [pool[others_pages] for pool in page_pools(state)]
        return checksum(pools + [pool[others_slots] for pool in slot_pools(state)])

    before, held = others(), [list(seq.pages) for seq in running]
    engine.step()
    assert [list(seq.pages) for seq in running] == held, "no new page was needed"
    assert others() == before
    finish(engine)


def footprint(engine: Engine) -> int:
    """Bytes that the only running request holds, from the sizes of the tensors."""
    (seq,) = engine.scheduler.running
    state = engine.runner.state
    page = sum(pool[0].nbytes for pool in page_pools(state))
    slot = sum(pool[0].nbytes for pool in slot_pools(state))
    return len(seq.pages) * page + (seq.slot is not None) * slot


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [4, 64])
def test_footprint_is_what_the_specification_says(name: str, dtype: str, page_size: int) -> None:
    """12 tokens of prompt and all lengths after it."""
    engine = make_engine(name, dtype, page_size=page_size)
    engine.add_request("one", prompt_of(12), greedy(10))
    width = DTYPES[dtype].itemsize
    for length in range(12, 21):
        engine.step()
        assert footprint(engine) == engine.spec.bytes(length, page_size, width)
    assert engine.spec.bytes(12, 64, width) == engine.spec.page_bytes(
        64, width
    ) + engine.spec.slot_bytes(width)
    finish(engine)


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
def test_pools_stay_within_the_memory_given(name: str, dtype: str) -> None:
    engine = make_engine(name, dtype, pages=7, page_size=16, seqs=3)
    state, settings = engine.runner.state, engine.settings
    total = sum(pool.nbytes for pool in page_pools(state) + slot_pools(state))
    assert total == settings.kv_memory
    assert engine.scheduler.slot_pool.capacity == 3
    # Pages that cost nothing are as many as can be used.
    pages = 7 if name in GROWING else 3 * LENGTH // 16
    assert engine.scheduler.page_pool.capacity == pages
