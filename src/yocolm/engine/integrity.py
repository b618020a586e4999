"""What must hold between steps: queues, owners and reference counts agree."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from yocolm.engine.prefix import PrefixCache
from yocolm.engine.request import Status

if TYPE_CHECKING:
    from yocolm.engine.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Assert all of it (for tests, after every step)."""
    memory = scheduler.memory
    memory.page_pool.check()
    memory.slot_pool.check()
    if memory.cache is not None:
        memory.cache.check()
    if memory.transfers is not None:
        memory.transfers.check()
    _check_queues(scheduler)
    _check_references(scheduler)
    size = memory.page_pool.page_size
    for seq in scheduler.running:
        held = len(seq.pages)
        assert held * size >= seq.num_computed, f"{seq} lacks pages"
        assert held <= memory.page_pool.pages_for(seq.num_tokens), f"{seq} has surplus pages"
        assert seq.num_shared <= seq.num_computed // size, f"{seq} shares a page that is not full"
    if not scheduler.requests and not scheduler.awaits_moves:
        _check_idle(scheduler)


def _check_queues(scheduler: Scheduler) -> None:
    queues = ((scheduler.waiting, Status.WAITING), (scheduler.running, Status.RUNNING))
    for queue, status in queues:
        orders = [seq.order for seq in queue]
        assert orders == sorted(set(orders)), f"{status} is out of order"
        assert all(seq.status is status for seq in queue), f"{status} has a wrong status"
    assert not any(seq.pages or seq.slot or seq.num_computed for seq in scheduler.waiting)
    assert not any(seq.ticket is not None or seq.is_swapped for seq in scheduler.running)
    assert len(scheduler.running) + scheduler.memory.num_arriving <= scheduler.max_num_seqs
    queued = {seq.order for seq in scheduler.waiting + scheduler.running}
    unfinished = [
        seq
        for request in scheduler.requests.values()
        for seq in request.sequences
        if not seq.finished
    ]
    assert queued == {seq.order for seq in unfinished}, "a sequence is lost"


def _check_references(scheduler: Scheduler) -> None:
    """Every reference has an owner: a sequence, a copy to be made, a transfer, or the cache."""
    memory = scheduler.memory
    pages = Counter(page for seq in scheduler.running for page in seq.pages)
    slots = Counter(seq.slot for seq in scheduler.running)
    assert all(count == 1 for count in slots.values()), "a slot has two owners"
    kept_pages, kept_slots = Counter[int](), Counter[int]()
    if memory.cache is not None:
        kept_pages, kept_slots = _kept(memory.cache)
    for seq in scheduler.running:
        written_next = seq.pages[seq.num_computed // memory.page_pool.page_size :]
        owners = [pages[page] + kept_pages[page] for page in written_next]
        assert set(owners) <= {1}, f"{seq} would write to a shared page"
    if memory.transfers is not None:
        for transfer in memory.transfers.running.values():
            pages.update(transfer.pages)
            slots.update([transfer.slot])
    copied = memory.copies.references()
    pools = (
        (memory.page_pool, pages + kept_pages, "page"),
        (memory.slot_pool, slots + kept_slots, "slot"),
    )
    for pool, held, kind in pools:
        for number in range(pool.size):
            expected = held[number] + copied[kind, number]
            assert pool.references(number) == expected, f"{kind} {number} is miscounted"


def _kept(cache: PrefixCache) -> tuple[Counter[int], Counter[int]]:
    """How many references the cache has to which pages and slots."""
    pages = Counter(node.page for node in cache._nodes if node is not None)
    pages.update(cache._tails)
    return pages, Counter(cache._checkpoints.keys())


def _check_idle(scheduler: Scheduler) -> None:
    """Nobody is left: all that is not free is kept."""
    usage = scheduler.memory.usage()
    copied = len(scheduler.memory.copies.references())
    assert usage.pages_used <= copied, "pages leaked"
    assert usage.slots_used <= copied, "slots leaked"
    assert usage.blocks_swapped == usage.states_swapped == 0, "swap space leaked"
