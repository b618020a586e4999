"""A scheduler with its pools, cache and policy, from settings: for the engine and the simulator."""

from __future__ import annotations

from yocolm.engine.cost import CostModel
from yocolm.engine.memory import Memory
from yocolm.engine.pages import PagePool, SlotPool
from yocolm.engine.policy import Fcfs, Policy, Traffic
from yocolm.engine.prefix import PrefixCache
from yocolm.engine.scheduler import Scheduler
from yocolm.engine.settings import EngineSettings, PoolSizes
from yocolm.engine.swap_space import SwapSpace
from yocolm.engine.transfers import Transfers
from yocolm.models.spec import ModelSpec


def make_scheduler(
    settings: EngineSettings,
    spec: ModelSpec,
    dtype_bytes: int,
    sizes: PoolSizes,
    max_model_len: int,
    cost: CostModel,
    space: SwapSpace | None = None,
) -> Scheduler:
    """The scheduler of an engine with these settings. No torch.

    Args:
        dtype_bytes: of a weight, and of a key or value.
        space: where preempted sequences may be written to, if anywhere.
    """
    pages, slots = PagePool(sizes.num_pages, settings.page_size), SlotPool(sizes.num_slots)
    page_bytes = spec.page_bytes(settings.page_size, dtype_bytes)
    slot_bytes = spec.slot_bytes(dtype_bytes)
    cache = None
    if settings.prefix_caching:
        cache = PrefixCache(
            pages,
            slots,
            stateful=slot_bytes > 0,
            page_bytes=page_bytes,
            slot_bytes=slot_bytes,
            seconds=cost.prefill_seconds,
        )
    transfers = None
    if space is not None and space.num_places:
        transfers = Transfers(space, settings.page_size, page_bytes, slot_bytes)
    return Scheduler(
        pages,
        slots,
        settings.max_num_batched_tokens,
        sizes.num_seqs,
        max_model_len,
        Memory(pages, slots, cache, transfers, cost, settings.checkpoint_spacing),
        _policy(settings, cost),
        settings.priority_aging,
    )


def _policy(settings: EngineSettings, cost: CostModel) -> Policy:
    if settings.policy == "traffic":
        return Traffic(cost, settings.ttft_target, settings.tpot_target)
    return Fcfs()
