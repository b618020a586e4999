"""What is told of every step: to the report of a benchmark, the live page and the cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from yocolm.engine.cost import StepCost, StepLoad


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """How much of each pool is taken: of ``num_pages`` pages and ``num_slots`` slots.

    pages_used, slots_used: by sequences; pages_kept, slots_kept: by the prefix cache alone;
    blocks_swapped, states_swapped: outside, in the swap space.
    """

    num_pages: int
    num_slots: int
    pages_used: int
    pages_kept: int
    slots_used: int
    slots_kept: int
    blocks_swapped: int = 0
    states_swapped: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. ``at``: when it began, on the engine's clock; ``seconds``: all of it, scheduling
    and answers included; ``actual``: seconds by phase, ``predicted``: what was expected of them."""

    at: float
    seconds: float
    load: StepLoad
    actual: StepCost
    predicted: StepCost
    usage: PoolUsage
    running: int
    waiting: int

    @property
    def skipped_rows(self) -> int:
        """Tokens that the second half never saw."""
        return self.load.tokens - self.load.rows


Observer = Callable[[StepRecord], None]
