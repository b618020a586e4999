"""What the server reads of the engine's numbers, from another thread than the engine's.

Everything here is a number that may be a step old, or a list that is copied whole (which no other
thread interrupts); nothing waits for a step and nothing is changed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from yocolm.engine.cost import StepCost, StepLoad
from yocolm.engine.engine import Engine
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


class EngineView:
    """Reads one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        state = engine.runner.state
        tensors = {
            "global_kv": [t for pair in state.pages for t in pair],
            "window": [t for pair in state.rings for t in pair],
            "recurrent": list(state.recurrent),
        }
        self._each = {kind: sum(map(_bytes_each, tensors[kind])) for kind in KINDS}
        self._seen = self._totals()

    @property
    def policy(self) -> str:
        return "fcfs"

    @property
    def num_running(self) -> int:
        return len(self._engine.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._engine.scheduler.waiting)

    @property
    def num_swapped(self) -> int:
        return 0

    def usage(self) -> PoolUsage:
        """Pages and slots by whom they are held."""
        pages, slots = self._engine.scheduler.page_pool, self._engine.scheduler.slot_pool
        return PoolUsage(
            num_pages=pages.capacity,
            num_slots=slots.capacity,
            pages_used=pages.capacity - pages.num_free,
            pages_kept=0,
            slots_used=slots.capacity - slots.num_free,
            slots_kept=0,
        )

    def pool(self, kind: str, usage: PoolUsage | None = None) -> PoolBytes:
        """The bytes of one of KINDS, of which models without such a state have none."""
        usage, each = usage or self.usage(), self._each[kind]
        if kind == "global_kv":
            counts = usage.pages_used, usage.pages_kept, usage.num_pages
        else:
            counts = usage.slots_used, usage.slots_kept, usage.num_slots
        used, kept, capacity = (each * count for count in counts)
        return PoolBytes(kind, used, kept, capacity)

    def swap(self, usage: PoolUsage) -> dict[str, int]:
        """Bytes outside the pools, of sequences that were swapped out, and room for them."""
        return {"used": 0, "capacity": 0}

    def predicted_ttft(self, request_id: str) -> float | None:
        """Seconds from the arrival of a request to its first token, as the engine expects it."""
        return None

    # Steps

    def step(self, at: float, seconds: float) -> StepRecord:
        """The step that has just been run, from what has changed since the one before."""
        before, self._seen = self._seen, self._totals()
        tokens, rows, write, commit, read, sample = (
            new - old for new, old in zip(self._seen, before, strict=True)
        )
        phases = StepCost(write, commit, read, sample)
        overhead = max(0.0, seconds - phases.total)
        actual = StepCost(write, commit, read, sample, overhead)
        load = StepLoad(tokens=int(tokens), rows=int(rows), draws=int(rows))
        usage, counts = self.usage(), (self.num_running, self.num_waiting)
        return StepRecord(at, seconds, load, actual, StepCost(), usage, *counts)

    def _totals(self) -> tuple[float, ...]:
        stats = self._engine.runner.stats
        return (
            *(stats.write_tokens, stats.read_rows, stats.write_seconds, stats.commit_seconds),
            *(stats.read_seconds, stats.sample_seconds),
        )

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
    first = request.first_token
    return {
        "id": request.request_id,
        "sample": seq.index if request.params.n > 1 else None,
        "state": _state(seq),
        "priority": 0,
        "prompt_tokens": request.num_prompt,
        "cached_tokens": 0,
        "computed_tokens": seq.num_computed,
        "total_tokens": seq.num_tokens,
        "output_tokens": seq.num_output,
        "age": round(now - request.arrival, 3),
        "ttft": None if first is None else round(first - request.arrival, 4),
        "predicted_ttft": None,
        "preemptions": request.num_preemptions,
    }


def _state(seq: Sequence) -> str:
    if seq.status is Status.RUNNING:
        return "decode" if seq.num_output and seq.num_computed >= seq.num_tokens - 1 else "prefill"
    return "waiting" if seq.status is Status.WAITING else "finished"


def _bytes_each(tensor: torch.Tensor) -> int:
    """Bytes of one page or slot of a pool."""
    return tensor[0].numel() * tensor.element_size()
