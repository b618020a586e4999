"""Runs a plan on the model: write, select, read, sample, commit."""

from __future__ import annotations

import time
from collections.abc import Sequence as Series
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from yocolm.engine.compiled import Halves
from yocolm.engine.drawing import Drawer, EntryOutput
from yocolm.engine.guided import MaskWorker
from yocolm.engine.inputs import Inputs, slot_of
from yocolm.engine.plan import Plan, Scheduled
from yocolm.engine.state import PagedState
from yocolm.models.base import Batch, CausalLM, Handles


@dataclass
class StepStats:
    """What the two halves of the model have been given so far, and the seconds they took.

    Seconds are the host's: on a GPU, whose kernels run behind it, most of them wait in ``sample``.
    """

    write_tokens: int = 0
    read_rows: int = 0
    read_calls: int = 0
    write_seconds: float = 0.0
    commit_seconds: float = 0.0
    read_seconds: float = 0.0
    sample_seconds: float = 0.0

    @property
    def phases(self) -> tuple[float, float, float, float]:
        """Seconds so far: self-prefill, kv-finalize, cross-decode, and sampling."""
        return self.write_seconds, self.commit_seconds, self.read_seconds, self.sample_seconds


class Runner:
    """Owns the model and its state."""

    def __init__(
        self,
        model: CausalLM,
        state: PagedState,
        vocab_size: int,
        num_slots: int,
        max_pages: int,
        device: torch.device | str = "cpu",
        fast_prefill: bool = True,
        compiled: Halves | None = None,
    ) -> None:
        self.model, self.state, self.device = model, state, device
        self.compiled = compiled
        self.fast_prefill = fast_prefill
        self.stats = StepStats()
        self.inputs = Inputs(num_slots, max_pages, device)
        self.drawer = Drawer(model, vocab_size, device)
        self._mask_worker = MaskWorker()

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[EntryOutput]:
        """Run one step. Results are in the order of ``plan.scheduled``."""
        self.state.discard()  # what an interrupted step may have left
        if self.compiled is not None:
            self.compiled.discard()
        self._copy(plan)
        if not plan.scheduled:
            return []
        order = _singles_by_slot(plan.scheduled)
        entries = [plan.scheduled[i] for i in order]
        masks = self._start_masks(entries)
        try:
            hidden = self._forward(self._prepare(entries))
            begin = time.perf_counter()
            outputs = self.drawer.draw(entries, hidden, self._masks(entries, masks))
            self.stats.sample_seconds += time.perf_counter() - begin
        finally:
            if masks is not None:
                wait([masks])  # whatever happens, nobody reads the guides any more
        placed = list(outputs)
        for output, i in zip(outputs, order, strict=True):
            placed[i] = output
        return placed

    def _start_masks(self, entries: list[Scheduled]) -> Future[np.ndarray] | None:
        """Have computed what each entry that draws by a grammar may draw, in their order."""
        guides = [e.seq.guide for e in entries if e.samples and e.seq.guide is not None]
        return self._mask_worker.start(guides) if guides else None

    def _masks(
        self, entries: list[Scheduled], masks: Future[np.ndarray] | None
    ) -> dict[int, np.ndarray]:
        """What ``_start_masks`` had computed, by entry."""
        if masks is None:
            return {}
        guided = [i for i, entry in enumerate(entries) if entry.samples and entry.seq.guide]
        return dict(zip(guided, masks.result(), strict=True))

    def _copy(self, plan: Plan) -> None:
        for kind in ("page", "slot"):
            copies = [copy for copy in plan.copies if copy.kind == kind]
            if copies:
                self.state.copy(kind, [c.src for c in copies], [c.dst for c in copies])

    def _prepare(self, entries: list[Scheduled]) -> Batch:
        fresh = [slot_of(entry.seq) for entry in entries if entry.start == 0]
        if fresh:
            self.state.clear_slots(fresh)
        return self.inputs.batch(entries)

    def _forward(self, batch: Batch) -> Tensor:
        """Both halves: every token writes, needed rows read. Returns hidden states [R, D]."""
        if not self.fast_prefill:
            every = torch.arange(len(batch.tokens), device=self.device)
            return self._halves(replace(batch, rows=every))[batch.rows]
        return self._halves(batch)

    def _halves(self, batch: Batch) -> Tensor:
        stats, begin = self.stats, time.perf_counter()
        stats.write_tokens += len(batch.tokens)
        x, kv = self._write(batch)
        written = time.perf_counter()
        hidden, rows = batch.select_rows(x)
        if len(hidden):
            stats.read_calls += 1
            stats.read_rows += len(hidden)
            hidden = self._read(hidden, kv, rows, batch)
        read = time.perf_counter()
        self.state.commit()
        if self.compiled is not None:
            self.compiled.commit()
        stats.write_seconds += written - begin
        stats.read_seconds += read - written
        stats.commit_seconds += time.perf_counter() - read
        return hidden

    def _write(self, batch: Batch) -> tuple[Tensor, Handles]:
        if self.compiled is not None and self.compiled.takes_write(batch):
            return self.compiled.write(batch)
        return self.model.write(self.model.embed(batch), batch, self.state)

    def _read(self, x: Tensor, kv: Handles, rows: Batch, written: Batch) -> Tensor:
        if self.compiled is not None and self.compiled.takes_read(len(x)):
            return self.compiled.read(x, kv, rows, written)
        return self.model.read(x, kv, rows)


def _singles_by_slot(entries: Series[Scheduled]) -> list[int]:
    """The order in which a batch has ``entries``: singles by slot, so that states lie side by side,
    then longer chunks."""
    keys = [(entry.num_tokens > 1, slot_of(entry.seq)) for entry in entries]
    return sorted(range(len(keys)), key=keys.__getitem__)
