"""Measures what steps of a model take on this machine, at a few sizes, and remembers it.

What is timed are the halves of the model itself, as the engine's runner calls them, on its own
state before anything is served: pages and slots that nobody owns yet.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from yocolm.engine.cost import CostModel, StepLoad
from yocolm.engine.cost_parts import Mixing, model_tables
from yocolm.engine.hardware import (
    CALIBRATED,
    Curve,
    Hardware,
    fingerprint,
    read_calibration,
    save,
)
from yocolm.engine.meter import Job, Meter, Pools, Timing
from yocolm.engine.plan import Plan, Scheduled
from yocolm.engine.runner import Runner
from yocolm.models.spec import ModelSpec
from yocolm.ops.native.build import BuildError, cache_folder
from yocolm.ops.native.library import native

Timings = Mapping[tuple[str, int], Timing]
Run = Callable[[list[Scheduled]], Timing]
log = logging.getLogger("yocolm.engine")

LIMIT = 4.0  # seconds for everything; what does not fit is extrapolated
DECODES = (1, 2, 4, 8, 16, 32, 64)  # sequences
CHUNKS = (16, 32, 64, 128, 256, 512, 1024)  # tokens
SCORED = 256  # rows of one chunk
NEAR, FAR = 64, 8192  # contexts of decodes
SCAN_BYTES = 64 << 20  # of KV at the far context, at most
SCHEDULING = (6e-5, 4e-6)  # seconds a step, and for each sequence, outside the runner
COMPUTE = 512  # tokens from which on arithmetic takes longer than weights on any machine
LARGE = 64 << 20  # bytes of weights beyond which they come from memory, not from a cache
FACTOR = 4.0  # how far a rate is from the generic one at most, unless its measurement was disturbed


def calibrated(
    runner: Runner,
    spec: ModelSpec,
    pools: Pools,
    *,
    refresh: bool = False,
    folder: Path | None = None,
) -> Hardware:
    """What this machine takes for the model in ``runner``: remembered, or measured in some seconds.

    Nothing may run, and nothing of the state be in use. ``folder``: where it is remembered; the
    user's cache if None, and if there is none of these, nowhere. Never raises for a file that is
    damaged or of another model, nor where nothing can be written. Pools that are too small to
    measure in give generic figures, which are not kept.
    """
    path = calibration_path(runner, spec, folder)
    dtype_bytes = _weight(runner).element_size()
    if path is not None and not refresh:
        known = read_calibration(path)
        if known is not None and known.holds_for(spec, dtype_bytes):
            return known
    generic = Hardware.generic(_weight(runner).device.type)
    if min(pools.num_pages, pools.num_slots) < 2 or pools.room < NEAR:
        return generic
    hardware = _Calibration(runner, spec, pools, generic).result()
    remember(hardware, path)
    return hardware


def remember(hardware: Hardware, path: Path | None) -> None:
    """Keep a calibration, or one refined since; where that fails, a line of the log says so."""
    if path is None:
        return
    try:
        save(hardware, path)
    except OSError as error:
        log.warning("the calibration is not kept: %s; set YOCOLM_CACHE to a folder", error)


def calibration_path(runner: Runner, spec: ModelSpec, folder: Path | None = None) -> Path | None:
    """The file for this machine, model, dtype, number of threads and kind of kernels."""
    weight, kernels = _weight(runner), native()
    if folder is None:
        try:
            folder = cache_folder()
        except BuildError:
            return None
    parts = (
        platform.machine(),
        _processor(weight.device),
        None if kernels.handle is None else Path(kernels.reason).name,  # changes with the sources
        torch.__version__,
        torch.get_num_threads(),
        weight.dtype,
        runner.compiled is not None,
        fingerprint(spec, weight.element_size()),
    )
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:16]
    return folder / f"{CALIBRATED}{digest}.json"


def _weight(runner: Runner) -> Tensor:
    return next(iter(runner.model.parameters()))


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


class _Calibration:
    """Which sizes are measured, and what follows from them."""

    def __init__(self, runner: Runner, spec: ModelSpec, pools: Pools, generic: Hardware) -> None:
        self.spec, self.generic, self.runner = spec, generic, runner
        self.weight = _weight(runner)
        self.size = self.weight.element_size()
        self.meter = Meter(runner, pools)
        most = (pools.num_pages - 1) // -(-NEAR // pools.page_size)
        most = min(most, pools.num_slots - 1, pools.max_num_batched_tokens)
        self.decodes = [count for count in DECODES if count <= most]
        longest = min(pools.room, pools.max_num_batched_tokens)
        self.chunks = [count for count in CHUNKS if count <= longest]
        kept = sum(store.bytes_per_token(self.size) for store in spec.stores)
        far = min(FAR, pools.room, SCAN_BYTES // kept) if kept else 0
        self.far = far if far >= 8 * NEAR else 0
        windows = spec.window_scans(self.size)
        write, read = spec.scan_bytes(self.size)
        self.near_write = write * NEAR + sum(min(NEAR, w) * one for w, one, _ in windows)
        self.near_read = read * NEAR + sum(min(NEAR, w) * one for w, _, one in windows)
        self.state = 2 * sum(store.bytes_per_slot(self.size) for store in spec.recurrent_stores)
        self.writers, self.readers = Mixing(spec.write_mixers), Mixing(spec.read_mixers)

    def result(self) -> Hardware:
        """What matters for every decode is measured first."""
        spec, timings = self.spec, self.meter.measure(self._jobs(), LIMIT)
        steps = {n: timings["step", n] for n in self.decodes if ("step", n) in timings}
        logits = {n: timings["logits", n].write for n in steps if ("logits", n) in timings}
        chunks = {n: timings["chunk", n].write for n in self.chunks if ("chunk", n) in timings}
        hardware = self._scans(steps[1], timings.get(("far", 1)))
        hardware = self._attention(hardware, timings)
        hardware, head = self._outside(hardware, steps, logits)
        hardware, write = self._write_table(hardware, steps, chunks)
        read = self._read_table(hardware, steps, timings.get(("scored", 0)))
        hardware = self._weights(hardware, write, head)
        whole = model_tables(spec, self.size, replace(hardware, model=""))
        write, read, head = map(_continued, (write, read, head), whole)
        return replace(
            hardware,
            name=f"{hardware.device}-{torch.get_num_threads()}-threads",
            source="measured",
            note=f"calibrated with a model of {spec.num_params:,} parameters, {self.weight.dtype}",
            model=fingerprint(spec, self.size),
            write_table=write,
            read_table=read,
            logits_table=head,
        )

    def _jobs(self) -> dict[tuple[str, int], Job]:
        """All that there is to time, by kind and size."""
        meter, cost = self.meter, CostModel(self.spec, self.size, self.generic)
        jobs: dict[tuple[str, int], Job] = {}

        def add(kind: str, n: int, entries: list[Scheduled], run: Run) -> None:
            expected = cost.seconds(cost.load(Plan(tuple(entries), ())))
            jobs[kind, n] = Job(lambda: run(entries), expected)

        for n in self.decodes:
            add("step", n, meter.decodes(n, NEAR), meter.step)
        if self.far:
            add("far", 1, meter.decodes(1, self.far), meter.step)
        for n, call in self._logits():
            load = StepLoad(logits=n)
            expected = cost.predict(replace(load, tokens=1)).sample
            jobs["logits", n] = Job(lambda call=call: meter.call(call), expected)
        for n in self.chunks:
            add("chunk", n, meter.chunk(0, n, 0), meter.halves)
        if SCORED in self.chunks:
            add("scored", 0, meter.chunk(0, SCORED, SCORED), meter.halves)
            if self.far >= 2 * SCORED:
                start = self.far - SCORED
                add("scored", start, meter.chunk(start, SCORED, SCORED), meter.halves)
        return jobs

    def _logits(self) -> Iterator[tuple[int, Callable[[], object]]]:
        width = self.spec.head_params // self.spec.vocab_size
        hidden = self.weight.new_zeros(self.decodes[-1], width)
        model = self.runner.model
        for n in self.decodes:
            yield n, lambda n=n: model.logits(hidden[:n])

    def _scans(self, near: Timing, far: Timing | None) -> Hardware:
        """The rate of scans, from decodes at two contexts."""
        if far is None:
            return self.generic
        more = (self.far - NEAR) * sum(self.spec.scan_bytes(self.size))
        for window, write, read in self.spec.window_scans(self.size):
            more += (min(self.far, window) - min(NEAR, window)) * (write + read)
        seconds = far.write + far.read - near.write - near.read
        return self._with_rates(self.generic, kv_bandwidth=(more, seconds))

    def _attention(self, hardware: Hardware, timings: Timings) -> Hardware:
        """The rate of attention, from a chunk at two contexts of which all rows are read."""
        start = self.far - SCORED
        near, far = timings.get(("scored", 0)), timings.get(("scored", start))
        if near is None or far is None:
            return hardware
        flops = sum(
            mixing.flops(start, start + SCORED) - mixing.flops(0, SCORED)
            for mixing in (self.writers, self.readers)
        )
        taken = far.write + far.read - near.write - near.read
        return self._with_rates(hardware, attention_rate=(flops, taken))

    def _outside(
        self, hardware: Hardware, steps: Mapping[int, Timing], logits: Mapping[int, float]
    ) -> tuple[Hardware, Curve]:
        """Draws, and what is outside the model: what a step takes and what each sequence adds."""
        generic = self.generic
        fixed, each = _line({n: step.sample - logits[n] for n, step in steps.items()})
        known = generic.draw_seconds + self.spec.vocab_size / generic.draw_elements
        drawn = max(each / known, 1 / FACTOR)
        table = tuple((n, seconds + fixed) for n, seconds in logits.items())
        step, sequence = _line({n: one.outside for n, one in steps.items()})
        step, sequence = step + SCHEDULING[0], sequence + SCHEDULING[1]
        host = (step + sequence) / (generic.step_seconds + generic.sequence_seconds)
        hardware = replace(
            hardware,
            draw_seconds=generic.draw_seconds * drawn,
            draw_elements=generic.draw_elements / drawn,
            step_seconds=step,
            sequence_seconds=sequence,
            chunk_seconds=generic.chunk_seconds * host,
            token_seconds=generic.token_seconds * host,
            layer_seconds=generic.layer_seconds * host,
        )
        return hardware, table

    def _write_table(
        self, hardware: Hardware, steps: Mapping[int, Timing], chunks: Mapping[int, float]
    ) -> tuple[Hardware, Curve]:
        """From decodes; beyond these from chunks, of which the fixed part is what they take more
        where there are both."""
        state = self.state / hardware.state_bandwidth
        each = state + self.near_write / hardware.kv_bandwidth
        table = {n: _rest(step.write, n * each) for n, step in steps.items()}
        rest = {
            n: _rest(seconds, self.writers.flops(0, n) / hardware.attention_rate + state)
            for n, seconds in chunks.items()
        }
        more = [max(rest[n] - table[n], 0.0) for n in rest if n in table]
        fixed = median(more) if more else 0.0
        table |= {n: _rest(seconds, fixed) for n, seconds in rest.items() if n > max(table)}
        mixing = fixed / max(len(self.spec.write_mixers), 1)
        return replace(hardware, mixing_seconds=mixing), tuple(sorted(table.items()))

    def _read_table(
        self, hardware: Hardware, steps: Mapping[int, Timing], scored: Timing | None
    ) -> Curve:
        each = self.near_read / hardware.kv_bandwidth
        table = {n: _rest(step.read, n * each) for n, step in steps.items()}
        if scored is not None:
            mixing = self.readers.flops(0, SCORED) / hardware.attention_rate
            table[SCORED] = _rest(scored.read, mixing)
        return tuple(table.items())

    def _weights(self, hardware: Hardware, table: Curve, logits: Curve) -> Hardware:
        """Rates of linears, for other models, unless this one's weights stay in the caches."""
        spec = self.spec
        if spec.write_params * self.size < LARGE:
            return hardware
        layers = len(spec.write_mixers) * hardware.layer_seconds
        linears = [(n, _rest(seconds, layers)) for n, seconds in table]
        flops = spec.write_flops_per_token * self.size / 2  # as of bfloat16
        moved = min(spec.write_params, spec.write_flops_per_token / 2) * self.size
        bandwidth = moved / linears[0][1]
        hardware = replace(
            hardware,
            weight_bandwidth=bandwidth,
            state_bandwidth=hardware.state_bandwidth * bandwidth / self.generic.weight_bandwidth,
            matrix_rates=tuple((n, n * flops / seconds) for n, seconds in linears),
            logits_factor=1.0,
        )
        usual = dict(model_tables(spec, self.size, hardware)[2])
        factors = [seconds / usual[n] for n, seconds in logits]
        return replace(hardware, logits_factor=max(1.0, median(factors)))

    def _with_rates(self, hardware: Hardware, **rates: tuple[float, float]) -> Hardware:
        """With rates of so much in so many seconds; what is far from the usual was disturbed."""
        for name, (amount, seconds) in rates.items():
            usual = getattr(self.generic, name)
            rate = amount / seconds if seconds > 0 and amount > 0 else usual
            if not usual / FACTOR <= rate <= usual * FACTOR:
                rate = usual
            hardware = replace(hardware, **{name: rate})
        return hardware


def _rest(seconds: float, part: float) -> float:
    """What remains of a time without a part of it that was estimated."""
    return max(seconds - part, seconds / 4)


def _continued(table: Curve, derived: Curve) -> Curve:
    """A table that ends where weights are still waited for goes on as rates say."""
    last, seconds = table[-1]
    if last >= COMPUTE:
        return table
    scale = seconds / dict(derived)[last]
    return table + tuple((n, scale * value) for n, value in derived if n > last)


def _line(points: Mapping[int, float]) -> tuple[float, float]:
    """Fixed seconds and seconds each, neither below 0, through the first point and the last."""
    first, last = min(points), max(points)
    if first == last:
        return max(points[first], 0.0), 0.0
    each = max((points[last] - points[first]) / (last - first), 0.0)
    return max(points[first] - first * each, 0.0), each
