"""The parts of an engine, made for one model on one device."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch

from yocolm.engine.compiled import compiled_halves
from yocolm.engine.cost import CostModel
from yocolm.engine.runner import Runner
from yocolm.engine.scheduler import Scheduler
from yocolm.engine.settings import EngineSettings, PoolSizes, available_memory, size_pools
from yocolm.engine.setup import make_scheduler
from yocolm.engine.state import PagedState
from yocolm.engine.swapper import Swapper, swap_space
from yocolm.errors import ConfigError
from yocolm.models.base import CausalLM
from yocolm.models.spec import ModelSpec


class Parts(NamedTuple):
    """Who decides, who computes, and who moves what was preempted."""

    scheduler: Scheduler
    runner: Runner
    swapper: Swapper


def assemble(
    model: CausalLM,
    spec: ModelSpec,
    vocab_size: int,
    settings: EngineSettings,
    max_model_len: int,
    cost: CostModel,
) -> Parts:
    """Pools as large as ``settings`` and the device's free memory say, and all that uses them.

    Raises ConfigError where they do not fit.
    """
    weight: torch.Tensor = next(iter(model.parameters()))
    device, size = weight.device, weight.element_size()
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else available_memory()
    sizes = size_pools(settings, spec, size, max_model_len, free)
    state = _make_state(spec, settings, sizes, weight)
    page_bytes, slot_bytes = spec.page_bytes(settings.page_size, size), spec.slot_bytes(size)
    held = sizes.num_pages * page_bytes + sizes.num_slots * slot_bytes
    space = swap_space(settings, page_bytes, slot_bytes, held, sizes.num_seqs, not on_gpu)
    max_pages = min(ceil(max_model_len / settings.page_size), sizes.num_pages)
    halves = compiled_halves(
        model,
        state,
        settings.compile,
        max_seqs=sizes.num_seqs,
        max_pages=max_pages,
        max_tokens=settings.max_num_batched_tokens,
        device=device,
    )
    fast = settings.fast_prefill
    runner = Runner(model, state, vocab_size, sizes.num_slots, max_pages, device, fast, halves)
    return Parts(
        make_scheduler(settings, spec, size, sizes, max_model_len, cost, space),
        runner,
        Swapper(state, settings, space),
    )


def _make_state(
    spec: ModelSpec, settings: EngineSettings, sizes: PoolSizes, weight: torch.Tensor
) -> PagedState:
    try:
        return PagedState(
            spec,
            sizes.num_pages,
            settings.page_size,
            sizes.num_slots,
            weight.dtype,
            weight.device,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"no memory for {sizes.num_pages} pages and {sizes.num_slots} slots: {error}; "
            "lower kv_memory or max_num_seqs"
        ) from error
