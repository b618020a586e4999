"""What a step costs, predicted from its plan.

A step is summed up as a ``StepLoad``; its seconds are then sums of what the machine needs for
weights, contexts, states and arithmetic (``engine/hardware.py``), by phase. No torch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from yocolm.engine.cost_parts import FARTHEST, Mixing, Table, model_tables
from yocolm.engine.hardware import Hardware, fingerprint
from yocolm.models.spec import ModelSpec

if TYPE_CHECKING:
    from yocolm.engine.plan import Plan

DECODES = 8  # decodes of a step, to say what one of several costs
BUDGET = 2048  # tokens of a whole chunk
COMMIT = 3e5  # bytes that take as long as moving single tokens into a ring
SWAP_START = 1e-3  # seconds until a swap has begun

# Online refinement: how far a step moves what is known, and how far that may go.
FAST, SLOW = 0.3, 0.05
SETTLE, LEAK = 16, 0.15  # every so many steps, so much of what is so now becomes what is known
MANY_STEPS = 1000  # after which what was learned is worth keeping
HISTORY = 3  # the median of so many steps: one that was interrupted changes nothing
STRANGE = 0.7  # log ratio beyond which a single step says no more
STRONGEST = math.log(4.0)
MEMORY, COMPUTE, HOST = range(3)
# What is learned slowly beside the tables: seconds a byte, a FLOP, a draw; factors of overheads and
# of what comes behind a chunk, which leaves less of the weights in the caches
KV, STATE, ATTENTION, FINALIZE, DRAW, OVERHEAD, COLD = range(7)


@dataclass(slots=True)
class StepLoad:
    """What a step does, summed over its entries.

    tokens, rows: through the first and the second half; sequences; chunks: entries of several
    tokens; draws: tokens drawn; logits: rows whose logits are computed.
    write_flops, read_flops: token mixing (attention, retention) of entries of several tokens.
    kv_bytes_write, kv_bytes_read: global KV that single tokens scan, in layers of either half;
    window_bytes, state_bytes: of windows scanned, and of recurrent states read and written.
    append_bytes: of the global KV that is written.
    """

    tokens: int = 0
    rows: int = 0
    sequences: int = 0
    chunks: int = 0
    draws: int = 0
    write_flops: float = 0.0
    read_flops: float = 0.0
    kv_bytes_write: float = 0.0
    kv_bytes_read: float = 0.0
    window_bytes: float = 0.0
    state_bytes: float = 0.0
    append_bytes: float = 0.0
    logits: int = 0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step by phase. ``overhead`` is what is outside the model and the draws."""

    self_prefill: float = 0.0
    kv_finalize: float = 0.0
    cross_decode: float = 0.0
    sample: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.self_prefill + self.kv_finalize + self.cross_decode + self.sample + self.overhead
        )


class CostModel:
    """Predicts steps of one model on one machine, and learns from what they took.

    Args:
        spec, dtype_bytes: the model, and bytes of a weight.
        hardware: measured with this model, or only in general.
        fast_prefill: whether the second half sees needed rows only.
    """

    def __init__(
        self, spec: ModelSpec, dtype_bytes: int, hardware: Hardware, fast_prefill: bool = True
    ) -> None:
        self.spec, self.dtype_bytes = spec, dtype_bytes
        self.fast_prefill = fast_prefill
        self._append = sum(store.bytes_per_token(dtype_bytes) for store in spec.stores)
        self._kv_write, self._kv_read = spec.scan_bytes(dtype_bytes)
        windows = spec.window_scans(dtype_bytes)
        self._windows = tuple((w, write + read) for w, write, read in windows)
        scanned = sum(w * (write + read) for w, write, read in windows)
        self._window_write = sum(w * write for w, write, _ in windows) / max(scanned, 1)
        recurrent = sum(store.bytes_per_slot(dtype_bytes) for store in spec.recurrent_stores)
        self._state = 2.0 * recurrent
        self._slot = float(spec.slot_bytes(dtype_bytes))
        self._commit = COMMIT * len(spec.window_stores)
        self._writers = Mixing(spec.write_mixers)
        self._readers = Mixing(spec.read_mixers)
        self.adopt(hardware)

    def adopt(self, hardware: Hardware) -> None:
        """Know ``hardware`` from now on, and nothing of what was learned."""
        spec, size = self.spec, self.dtype_bytes
        self.hardware = hardware
        self.corrections = [0.0, 0.0, 0.0]  # logarithms, of the last steps: memory, compute, host
        self._observed = 0
        self._recent: tuple[list[float], ...] = ([], [], [])
        write, read, logits = model_tables(spec, size, hardware)
        self._write, self._read, self._logits = Table(write), Table(read), Table(logits)
        draw = hardware.draw_seconds + spec.vocab_size / hardware.draw_elements
        self._slow = [
            1 / hardware.kv_bandwidth,
            1 / hardware.state_bandwidth,
            1 / hardware.attention_rate,
            1 / hardware.state_bandwidth,
            draw,
            1.0,
            1.0,
        ]
        self._slowest = tuple(self._slow)
        self._mixing = len(spec.write_mixers) * hardware.mixing_seconds

    # Loads

    def add(
        self, load: StepLoad, start: int, num_tokens: int, num_rows: int, draws: int = 0
    ) -> None:
        """Add an entry: tokens at ``start`` and behind, of which the last rows are needed."""
        stop = start + num_tokens
        load.tokens += num_tokens
        load.sequences += 1
        load.append_bytes += num_tokens * self._append
        load.state_bytes += self._state
        load.logits += num_rows + draws - 1 if draws > 1 else num_rows
        load.draws += draws
        if not self.fast_prefill:
            num_rows = num_tokens
        load.rows += num_rows
        if num_tokens == 1:
            load.kv_bytes_write += stop * self._kv_write
            for window, size in self._windows:
                load.window_bytes += size * (stop if stop < window else window)
        else:
            load.chunks += 1
            load.write_flops += self._writers.flops(start, stop)
        if num_rows == 1:
            load.kv_bytes_read += stop * self._kv_read
        elif num_rows:
            load.read_flops += self._readers.flops(stop - num_rows, stop)

    def add_decodes(self, load: StepLoad, count: int, context: float) -> None:
        """Add so many decodes, each at the mean context of all of them."""
        load.tokens += count
        load.rows += count
        load.sequences += count
        load.draws += count
        load.logits += count
        load.append_bytes += count * self._append
        load.state_bytes += count * self._state
        load.kv_bytes_write += count * context * self._kv_write
        load.kv_bytes_read += count * context * self._kv_read
        for window, size in self._windows:
            load.window_bytes += count * size * min(context, window)

    def add_chunks(
        self, load: StepLoad, count: int, tokens: int, flops: float, num_draws: int
    ) -> None:
        """Add so many entries of several tokens, which together have ``tokens`` and ``flops`` of
        token mixing; at the end of some of them a token is drawn."""
        load.tokens += tokens
        load.rows += num_draws if self.fast_prefill else tokens
        load.sequences += count
        load.chunks += count
        load.draws += num_draws
        load.logits += num_draws
        load.append_bytes += tokens * self._append
        load.state_bytes += count * self._state
        load.write_flops += flops
        if self.fast_prefill:
            load.kv_bytes_read += num_draws * tokens / count * self._kv_read
        else:
            load.read_flops += count * self._readers.flops(0, tokens // count)

    def mixing_flops(self, start: int, stop: int) -> float:
        """What ``write_flops`` of a load are for the tokens ``start .. stop - 1``."""
        return self._writers.flops(start, stop)

    def load(self, plan: Plan) -> StepLoad:
        """The whole of a plan."""
        load = StepLoad()
        for entry in plan.scheduled:
            self.add(load, entry.start, entry.num_tokens, len(entry.rows), entry.samples_n)
            if entry.pools:
                load.logits -= len(entry.rows)
        return load

    # Predictions

    def predict(self, load: StepLoad) -> StepCost:
        """Seconds by phase, as the machine is now."""
        if not load.tokens:
            return StepCost(overhead=self._overhead(load) * math.exp(self.corrections[HOST]))
        memory, compute, host = map(math.exp, self.corrections)
        wm, wc, f, rm, rc, lm, lc, d, o = self._parts(load)
        return StepCost(
            memory * wm + compute * wc,
            memory * f,
            memory * rm + compute * rc,
            memory * lm + compute * lc + host * d,
            host * o,
        )

    def seconds(self, load: StepLoad) -> float:
        """All of them together."""
        return self._total(load, self.corrections)

    def steady_seconds(self, load: StepLoad) -> float:
        """The same as the machine is in the long run."""
        return self._total(load, (0.0, 0.0, 0.0))

    def _total(self, load: StepLoad, corrections: Iterable[float]) -> float:
        memory, compute, host = map(math.exp, corrections)
        if not load.tokens:
            return host * self._overhead(load)
        wm, wc, f, rm, rc, lm, lc, d, o = self._parts(load)
        return memory * (wm + f + rm + lm) + compute * (wc + rc + lc) + host * (d + o)

    def _overhead(self, load: StepLoad) -> float:
        hardware = self.hardware
        seconds = hardware.step_seconds + hardware.sequence_seconds * load.sequences
        if load.chunks:
            inside = load.tokens - load.sequences + load.chunks
            seconds += hardware.chunk_seconds * load.chunks + hardware.token_seconds * inside
        return self._slow[OVERHEAD] * seconds

    def _parts(self, load: StepLoad) -> tuple[float, ...]:
        """Of a step with tokens: by memory and compute the first half, what is finalized, both of
        the second half, of the logits; the draws; outside the model."""
        kv, state, attention, finalize, draw, _, cold = self._slow
        window = load.window_bytes * kv
        wm, wc = self._write.at(load.tokens)
        wm += load.kv_bytes_write * kv + load.state_bytes * state + window * self._window_write
        wc += load.write_flops * attention + load.chunks * self._mixing
        f = (load.chunks * self._slot + self._commit) * finalize
        rm = rc = lm = lc = 0.0
        if load.rows:
            rm, rc = self._read.at(load.rows)
            rm += load.kv_bytes_read * kv + window * (1 - self._window_write)
            rc += load.read_flops * attention
        if load.logits:
            lm, lc = self._logits.at(load.logits)
        d = load.draws * draw
        if load.chunks:
            rm, lm, d = rm * cold, lm * cold, d * cold
        return wm, wc, f, rm, rc, lm, lc, d, self._overhead(load)

    def prefill_seconds(self, start: int, stop: int) -> float:
        """To compute the tokens ``start .. stop - 1`` in whole chunks, without any row of them.

        As in the long run, so that values of different times compare. Ascends with ``stop``.
        """
        count = stop - start
        if count <= 0:
            return 0.0
        whole, rest = divmod(count, BUDGET)
        hardware, table = self.hardware, self._write
        seconds = self._slow[ATTENTION] * self._writers.flops(start, stop)
        seconds += whole * sum(table.at(BUDGET))
        if rest:
            seconds += sum(table.at(rest))
        each = hardware.step_seconds + hardware.sequence_seconds + hardware.chunk_seconds
        each = each * self._slow[OVERHEAD] + self._state * self._slow[STATE] + self._mixing
        seconds += count * hardware.token_seconds * self._slow[OVERHEAD]
        return seconds + (whole + (rest > 0)) * each

    def decode_seconds(self, context: int) -> float:
        """What one more decode at ``context`` tokens adds to a step that has several."""
        load = StepLoad(tokens=DECODES, rows=DECODES, logits=DECODES)
        before = self.seconds(load)
        self.add(load, context - 1, 1, 1, 1)
        return self.seconds(load) - before

    def solo_ttft(self, num_prompt: int, budget: int = BUDGET) -> float:
        """Seconds until the first token of a prompt that is alone on the machine, in the long
        run, in chunks of ``budget`` tokens."""
        seconds, start = 0.0, 0
        while start < num_prompt:
            count = min(budget, num_prompt - start)
            load, last = StepLoad(), start + count == num_prompt
            self.add(load, start, count, int(last), int(last))
            seconds += self.steady_seconds(load)
            start += count
        return seconds

    def solo_tpot(self, context: int) -> float:
        """Seconds of a step with one decode at ``context`` tokens, in the long run."""
        load = StepLoad()
        self.add(load, context - 1, 1, 1, 1)
        return self.steady_seconds(load)

    def swap_seconds(self, num_bytes: float) -> float:
        """To move preempted state out, or back in."""
        return SWAP_START + num_bytes / self.hardware.swap_bandwidth

    # Learning

    def observe(self, load: StepLoad, actual: StepCost) -> None:
        """Learn from a step: at once how fast the machine is now, slowly what each part takes."""
        if not load.tokens:
            return
        wm, wc, f, rm, rc, lm, lc, d, o = parts = self._parts(load)
        if not all(math.isfinite(value) for value in (*parts, actual.total)):
            return
        memory, compute, host = map(math.exp, self.corrections)
        phases = (
            (actual.self_prefill, memory * wm, compute * wc, 0.0),
            (actual.kv_finalize, memory * f, 0.0, 0.0),
            (actual.cross_decode, memory * rm, compute * rc, 0.0),
            (actual.sample, memory * lm, compute * lc, host * d),
            (actual.overhead, 0.0, 0.0, host * o),
        )
        if self.hardware.device == "cuda":  # the host's clock tells no phases apart, but the whole
            sums = [sum(phase[i] for phase in phases) for i in range(4)]
            errors = [_log_ratio(sums[0], sum(sums[1:]))] * 5
        else:
            errors = [_log_ratio(took, sum(expected)) for took, *expected in phases]
        self._correct(phases, errors)
        self._refine(load, parts, errors)
        self._observed += 1
        if self._observed % SETTLE == 0:
            self._settle()

    def _correct(self, phases: tuple[tuple[float, ...], ...], errors: list[float]) -> None:
        """Move the fast factors to the median of what the last steps say of each."""
        whole = sum(sum(phase[1:]) for phase in phases)
        for kind in (MEMORY, COMPUTE, HOST):
            weight = sum(phase[1 + kind] for phase in phases)
            known = self.corrections[kind]
            if weight < 0.2 * whole:  # this step says little of it
                continue
            error = sum(phase[1 + kind] * e for phase, e in zip(phases, errors, strict=True))
            recent = self._recent[kind]
            recent.append(known + error / weight)
            del recent[:-HISTORY]
            known += FAST * (sorted(recent)[len(recent) // 2] - known)
            self.corrections[kind] = min(max(known, -STRONGEST), STRONGEST)

    def _refine(self, load: StepLoad, parts: tuple[float, ...], errors: list[float]) -> None:
        """Move tables and rates a little, each by its share of a phase."""
        wm, wc, _, rm, rc, lm, lc, d, _ = parts
        kv, state, attention = self._slow[: ATTENTION + 1]
        write, finalize, read, sample, overhead = (SLOW * error for error in errors)
        window = load.window_bytes * kv
        self._change(KV, write, load.kv_bytes_write * kv + window * self._window_write, wm + wc)
        self._change(STATE, write, load.state_bytes * state, wm + wc)
        self._change(ATTENTION, write, load.write_flops * attention, wm + wc)
        self._write.scale(load.tokens, write)
        self._change(FINALIZE, finalize, 1.0, 1.0)
        if load.rows:
            scanned = load.kv_bytes_read * kv + window * (1 - self._window_write)
            self._change(KV, read, scanned, rm + rc)
            self._change(ATTENTION, read, load.read_flops * attention, rm + rc)
            self._read.scale(load.rows, read)
        if load.logits:
            self._change(DRAW, sample, d, lm + lc + d)
            self._logits.scale(load.logits, sample)
        self._change(OVERHEAD, overhead, 1.0, 1.0)
        if load.chunks and load.rows:
            whole = rm + rc + lm + lc + d
            self._change(COLD, read * (rm + rc) + sample * (lm + lc + d), rm + lm + d, whole**2)
            self._slow[COLD] = max(self._slow[COLD], 1.0)  # more work never takes less

    def _settle(self) -> None:
        """Let what has been so for long become what is known; predictions stay as they are."""
        memory, compute, host = (math.exp(LEAK * known) for known in self.corrections)
        self.corrections = [known * (1 - LEAK) for known in self.corrections]
        for table in (self._write, self._read, self._logits):
            table.multiply(memory, compute)
        factors = (memory, memory, compute, memory, host, host, 1.0)
        self._slow = [
            min(max(value * factor, first / FARTHEST), first * FARTHEST)
            for value, factor, first in zip(self._slow, factors, self._slowest, strict=True)
        ]

    def _change(self, what: int, change: float, part: float, whole: float) -> None:
        if whole > 0:
            first = self._slowest[what]
            value = self._slow[what] * math.exp(change * part / whole)
            self._slow[what] = min(max(value, first / FARTHEST), first * FARTHEST)

    def refined(self) -> Hardware:
        """The machine as it is known by now, in the long run; tables are this model's."""
        slow, hardware = self._slow, self.hardware
        drawn = slow[DRAW] / self._slowest[DRAW]
        return replace(
            hardware,
            kv_bandwidth=1 / slow[KV],
            state_bandwidth=1 / slow[STATE],
            attention_rate=1 / slow[ATTENTION],
            draw_seconds=hardware.draw_seconds * drawn,
            draw_elements=hardware.draw_elements / drawn,
            step_seconds=hardware.step_seconds * slow[OVERHEAD],
            sequence_seconds=hardware.sequence_seconds * slow[OVERHEAD],
            chunk_seconds=hardware.chunk_seconds * slow[OVERHEAD],
            model=fingerprint(self.spec, self.dtype_bytes),
            write_table=self._write.curve,
            read_table=self._read.curve,
            logits_table=self._logits.curve,
        )

    @property
    def has_learned(self) -> bool:
        """Whether what was measured with this model has since been refined by many steps."""
        measured = self.hardware.holds_for(self.spec, self.dtype_bytes)
        return measured and self._observed >= MANY_STEPS

    def copy(self) -> CostModel:
        """One that knows the same, and learns apart."""
        return copy.deepcopy(self)


def _log_ratio(actual: float, expected: float) -> float:
    """Of a phase; 0 if there was nothing to compare, and no more than ``STRANGE`` either way."""
    if actual <= 0 or expected <= 0:
        return 0.0
    return min(max(math.log(actual / expected), -STRANGE), STRANGE)
