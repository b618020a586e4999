"""Times steps of a model, on the engine's own runner and state, before anything is served."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from yocolm.engine.plan import Plan, Scheduled
from yocolm.engine.request import Request, Sequence
from yocolm.engine.runner import Runner
from yocolm.engine.sampling_params import SamplingParams

ROUNDS = 7  # at most


@dataclass(frozen=True)
class Pools:
    """What calibration may use: pages and slots, scratch included, and the most tokens of a step
    and of a sequence."""

    num_pages: int
    num_slots: int
    page_size: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def room(self) -> int:
        """The longest context that there are pages for."""
        return min((self.num_pages - 1) * self.page_size, self.max_model_len)


@dataclass(frozen=True)
class Timing:
    """Seconds of a step: the first half, the second, what draws, and outside of these."""

    write: float
    read: float = 0.0
    sample: float = 0.0
    outside: float = 0.0


@dataclass
class Job:
    """Something to time, with the seconds that it is expected to take, and what it took."""

    once: Callable[[], Timing]
    expected: float
    taken: list[Timing] = field(default_factory=list)
    seconds: float = 0.0


class Meter:
    """Runs steps of sequences that hold the first slots and pages."""

    def __init__(self, runner: Runner, pools: Pools) -> None:
        self.runner, self.pools = runner, pools
        self.device = torch.device(runner.device)

    def measure(self, jobs: Mapping[Any, Job], limit: float) -> dict[Any, Timing]:
        """The usual timing of all that fits in ``limit`` seconds, at least of the first job.

        All are timed in turn, again and again: what else happens on the machine then changes all
        of them a little, and not one of them a lot. The first round finds nothing prepared and
        counts only where there is no second.
        """
        end = time.perf_counter() + limit
        slower = 0.0  # than expected, as the last one was
        for _ in range(ROUNDS):
            for job in jobs.values():
                begin = time.perf_counter()
                expected = job.seconds or job.expected * slower
                if expected > (end - begin) / 2 and slower:  # the first is timed whatever it takes
                    continue
                job.taken.append(job.once())
                job.seconds = time.perf_counter() - begin
                slower = job.seconds / job.expected
        return {key: usual(job.taken[1:] or job.taken) for key, job in jobs.items() if job.taken}

    def decodes(self, count: int, context: int) -> list[Scheduled]:
        """The last tokens of ``count`` sequences of ``context`` tokens."""
        return [self._entry(i, context - 1, 1, (0,), 1) for i in range(count)]

    def chunk(self, start: int, tokens: int, rows: int) -> list[Scheduled]:
        """A chunk of which the last ``rows`` are needed, and nothing is drawn."""
        needed = tuple(range(tokens - rows, tokens))
        return [self._entry(0, start, tokens, needed, 0)]

    def _entry(
        self, place: int, start: int, tokens: int, rows: tuple[int, ...], draws: int
    ) -> Scheduled:
        each = -(-(start + tokens) // self.pools.page_size)
        params = SamplingParams(seed=place, max_tokens=1)
        request = Request(f"calibration-{place}", [0] * (start + tokens), params)
        request.number = place
        seq = Sequence(request, 0, 0)
        seq.slot, seq.num_computed = 1 + place, start
        seq.pages = list(range(1 + place * each, 1 + (place + 1) * each))
        return Scheduled(seq, start, tokens, rows, draws)

    def step(self, entries: list[Scheduled]) -> Timing:
        """A whole step of the runner."""
        plan, stats = Plan(tuple(entries), ()), self.runner.stats
        self._fill(entries)
        before = replace(stats)
        begin = self._now()
        self.runner.run(plan)
        whole = self._now() - begin
        write = stats.write_seconds - before.write_seconds
        commit = stats.commit_seconds - before.commit_seconds
        read = stats.read_seconds - before.read_seconds
        sample = stats.sample_seconds - before.sample_seconds
        return Timing(write, read, sample, whole - write - commit - read - sample)

    @torch.inference_mode()
    def halves(self, entries: list[Scheduled]) -> Timing:
        """The model's halves alone, for chunks of which any rows are needed."""
        model, state = self.runner.model, self.runner.state
        self._fill(entries)
        batch = self.runner.inputs.batch(entries)
        begin = self._now()
        x, kv = model.write(model.embed(batch), batch, state)
        written = self._now()
        x, rows = batch.select_rows(x)
        if len(x):
            model.read(x, kv, rows)
        read = self._now()
        state.discard()
        return Timing(written - begin, read - written)

    @torch.inference_mode()
    def call(self, function: Callable[[], object]) -> Timing:
        """Any call."""
        begin = self._now()
        function()
        return Timing(self._now() - begin)

    def _fill(self, entries: list[Scheduled]) -> None:
        """Make zeros of the state that ``entries`` will find, whatever lay there."""
        state = self.runner.state
        state.clear_slots([seq.slot for seq in (e.seq for e in entries) if seq.slot is not None])
        pages = [page for entry in entries for page in entry.seq.pages]
        for k, v in state.pages:
            k[pages] = 0
            v[pages] = 0

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def usual(timings: list[Timing]) -> Timing:
    """Of each part the lower quartile: what else the machine does only ever adds."""

    def quartile(values: Iterable[float]) -> float:
        return sorted(values)[len(timings) // 4]

    return Timing(
        quartile(t.write for t in timings),
        quartile(t.read for t in timings),
        quartile(t.sample for t in timings),
        quartile(t.outside for t in timings),
    )
