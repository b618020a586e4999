"""What steps take: told to the cost model and to an observer, and used to predict."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

from yocolm.engine.cost import CostModel, StepCost, StepLoad
from yocolm.engine.forecast import Forecaster
from yocolm.engine.plan import Plan
from yocolm.engine.request import Request, Sequence
from yocolm.engine.runner import StepStats
from yocolm.engine.scheduler import Scheduler
from yocolm.engine.steps import Observer, StepRecord

log = logging.getLogger("yocolm.engine")
LEARN_EVERY = 4  # decode steps: they are many, and alike
# What first tokens have come later than was predicted, as a logarithm, is predicted of the next
# ones: how fast it follows, what a single request may say, and how far it may go.
FOLLOW, STRANGE, FARTHEST = 0.1, 0.3, 0.5


class Watch:
    """Looks on while the engine steps. Free of cost while nobody observes and nothing is learnt.

    observer: is told of every step, in the thread that runs it.
    learns: whether the cost model is refined by every step, and requests are predicted.
    """

    def __init__(self, scheduler: Scheduler, stats: StepStats, cost: CostModel) -> None:
        self._scheduler, self._stats, self._cost = scheduler, stats, cost
        self.observer: Observer | None = None
        self.learns = False
        self._forecaster = Forecaster(scheduler, cost)
        self._lateness = 0.0
        self._load: StepLoad | None = None
        self._at, self._decodes = 0.0, 0
        self._before = (0.0, 0.0, 0.0, 0.0)

    @property
    def _looks(self) -> bool:
        return self.learns or self.observer is not None

    def begin(self, plan: Plan, at: float) -> None:
        """A step has been planned, which began at the time ``at``."""
        self._load = self._cost.load(plan) if self._looks else None
        self._at, self._before = at, self._stats.phases

    def end(self, changed: Iterable[Sequence]) -> None:
        """The step is over; ``changed`` have drawn a token or ended."""
        load = self._load
        if load is None:
            return
        self._load = None
        if self.learns:
            for seq in changed:
                if seq.finished:
                    self._forecaster.ended(seq)
                    self._compare(seq)
        seconds = time.monotonic() - self._at
        before, after = self._before, self._stats.phases
        write, commit, read, sample = (b - a for a, b in zip(before, after, strict=True))
        rest = max(0.0, seconds - write - commit - read - sample)
        actual = StepCost(write, commit, read, sample, rest)
        predicted = None if self.observer is None else self._cost.predict(load)
        if self.learns and self._teaches(load):
            self._cost.observe(load, actual)
        if self.observer is not None and predicted is not None:
            self.observer(self._record(load, seconds, actual, predicted))

    def _teaches(self, load: StepLoad) -> bool:
        """Whether to learn from a step: of those that only decode, from one in four."""
        self._decodes = 0 if load.chunks else self._decodes + 1
        return load.tokens > 0 and self._decodes % LEARN_EVERY == 0

    def _record(
        self, load: StepLoad, seconds: float, actual: StepCost, predicted: StepCost
    ) -> StepRecord:
        scheduler = self._scheduler
        return StepRecord(
            at=self._at,
            seconds=seconds,
            load=load,
            actual=actual,
            predicted=predicted,
            usage=scheduler.memory.usage(),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
        )

    def _compare(self, seq: Sequence) -> None:
        """Learn from the first token of a request that has ended."""
        request = seq.request
        if seq.index or not request.predicted_ttft or request.first_token is None:
            return
        error = math.log(max(request.first_token - request.arrival, 1e-6) / request.predicted_ttft)
        error = min(max(error, -STRANGE), STRANGE)
        self._lateness = min(max(self._lateness + FOLLOW * error, -FARTHEST), FARTHEST)

    def predict_ttft(self, request: Request, now: float) -> float | None:
        """Seconds from the arrival of a request, just added, to its first token; None unless the
        watch learns."""
        if not self.learns:
            return None
        try:
            return self._forecaster.arrived(request, now) * math.exp(self._lateness)
        except Exception:  # it is queued: nobody must lose an answer for want of a prediction
            log.exception("no prediction for request %s", request.request_id)
            return None
