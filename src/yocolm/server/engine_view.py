"""What the server reads of the engine's numbers, from another thread than the engine's.

Everything here is a number that may be a step old, or a list that is copied whole (which no other
thread interrupts); nothing waits for a step and nothing is changed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from yocolm.engine.engine import Engine
from yocolm.engine.prefix import PrefixStats
from yocolm.engine.request import Sequence, Status
from yocolm.engine.steps import PoolUsage, StepRecord

KINDS = ("global_kv", "window", "recurrent")


@dataclass(frozen=True)
class PoolBytes:
    """Bytes of one kind of state: of sequences, kept by the prefix cache alone, and in all."""

    kind: str
    used: int
    kept: int
    capacity: int


@dataclass(frozen=True)
class Held:
    """What is in the engine: sequences, and what they and the prefix cache hold."""

    running: int
    waiting: int  # those that were swapped out included
    usage: PoolUsage

    @property
    def swapped(self) -> int:
        return self.usage.states_swapped


class EngineView:
    """Reads one engine. ``held`` is as the engine's thread last told it, whole."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        state = engine.runner.state
        tensors = {
            "global_kv": [t for pair in state.pages for t in pair],
            "window": [t for pair in state.rings for t in pair],
            "recurrent": list(state.recurrent),
        }
        self._each = {kind: sum(map(_bytes_each, tensors[kind])) for kind in KINDS}
        self.refresh()

    def refresh(self) -> None:
        """Requests have come or gone without a step. Called in the engine's thread."""
        scheduler = self._engine.scheduler
        usage = scheduler.memory.usage()
        self.held = Held(len(scheduler.running), len(scheduler.waiting), usage)

    def stepped(self, record: StepRecord) -> None:
        """A step has been run. Called in the engine's thread."""
        self.held = Held(record.running, record.waiting, record.usage)

    @property
    def num_running(self) -> int:
        """As it is now, in the middle of a step as well."""
        return len(self._engine.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._engine.scheduler.waiting)

    @property
    def policy(self) -> str:
        return self._engine.settings.policy

    def pool(self, kind: str) -> PoolBytes:
        """The bytes of one of KINDS, of which models without such a state have none."""
        usage, each = self.held.usage, self._each[kind]
        if kind == "global_kv":
            counts = usage.pages_used, usage.pages_kept, usage.num_pages
        else:
            counts = usage.slots_used, usage.slots_kept, usage.num_slots
        used, kept, capacity = (each * count for count in counts)
        return PoolBytes(kind, used, kept, capacity)

    def swap(self) -> tuple[int, int]:
        """Bytes outside the pools, of sequences that were swapped out, and room for them."""
        transfers, usage = self._engine.scheduler.memory.transfers, self.held.usage
        if transfers is None:
            return 0, 0
        page = self._each["global_kv"]
        slot = self._each["window"] + self._each["recurrent"]
        space = transfers.space
        used = page * usage.blocks_swapped + slot * usage.states_swapped
        return used, page * space.num_blocks + slot * space.num_places

    def prefix_stats(self) -> PrefixStats:
        """Totals of the prefix cache; of an engine without one, zeros."""
        cache = self._engine.scheduler.memory.cache
        return PrefixStats() if cache is None else cache.stats

    def preemptions(self) -> dict[str, int]:
        """How often sequences had to go so far, by what became of their state."""
        scheduler = self._engine.scheduler
        swaps = scheduler.memory.num_swaps
        return {"swap": swaps, "recompute": max(0, scheduler.num_preemptions - swaps)}

    # Requests

    def requests(self, limit: int) -> list[dict[str, Any]]:
        """Up to ``limit`` sequences: those that run, then those that wait, in their order.

        Lengths and times only, never a token: who may look need not be who has asked.
        """
        scheduler = self._engine.scheduler
        now = time.monotonic()
        listed = list(scheduler.running[:limit])
        listed += list(scheduler.waiting[: limit - len(listed)])
        return [_row(seq, now) for seq in listed]


def _row(seq: Sequence, now: float) -> dict[str, Any]:
    request = seq.request
    first, predicted = request.first_token, request.predicted_ttft
    return {
        "id": request.request_id,
        "sample": seq.index if request.params.n > 1 else None,
        "state": _state(seq),
        "priority": request.priority,
        "prompt_tokens": request.num_prompt,
        "cached_tokens": seq.num_cached,
        "computed_tokens": seq.num_computed,
        "total_tokens": seq.num_tokens,
        "output_tokens": seq.num_output,
        "age": round(now - request.arrival, 3),
        "ttft": None if first is None else round(first - request.arrival, 4),
        "predicted_ttft": None if predicted is None else round(predicted, 4),
        "preemptions": request.num_preemptions,
    }


def _state(seq: Sequence) -> str:
    if seq.status is Status.RUNNING:
        return "decode" if seq.num_output and seq.num_computed >= seq.num_tokens - 1 else "prefill"
    if seq.status is Status.FINISHED:
        return "finished"
    return "swapped" if seq.is_swapped else "waiting"


def _bytes_each(tensor: torch.Tensor) -> int:
    """Bytes of one page or slot of a pool."""
    return tensor[0].numel() * tensor.element_size()
