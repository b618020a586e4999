"""The two halves of a model over static buffers of bucketed sizes, compiled or captured.

``write`` is used for steps of one token a sequence, ``read`` for up to as many rows as there may be
sequences; larger steps run as they are. Sizes are rounded up to a bucket. Pads write to page 0 and
slot 0, which nobody reads, and what they compute is cut off.

Three backends run the same functions over the same buffers: "replay" calls them, so that every test
can use it; "inductor" compiles each bucket once; "graph" captures each as a CUDA graph.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from yocolm.engine.buffers import Buffers, bucket_sizes
from yocolm.engine.settings import Compile
from yocolm.engine.state import PagedState
from yocolm.engine.static_state import (
    Staged,
    StaticPages,
    StaticState,
    StaticWindow,
    Written,
    commit_windows,
)
from yocolm.errors import ConfigError
from yocolm.models.base import Batch, CausalLM, Handles
from yocolm.ops.native.build import BuildError, cache_folder, find_compiler

log = logging.getLogger("yocolm.compiled")
# One launch on CUDA for many small tensors.
_foreach_copy, _foreach_zero = torch.ops.aten._foreach_copy_, torch.ops.aten._foreach_zero_
Backend = Literal["replay", "inductor", "graph"]
MOST_COMPILATIONS = 64  # of one function: one for each bucket


class Halves:
    """Runs both halves of ``model`` by a backend.

    Args:
        max_seqs: the most sequences of a step, and the most rows of ``read``.
        max_pages: the most pages of a sequence; max_tokens: of a step.
    """

    def __init__(
        self,
        model: CausalLM,
        state: PagedState,
        backend: Backend,
        max_seqs: int,
        max_pages: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model, self.state, self.backend = model, state, backend
        self.max_seqs, self.device = max_seqs, torch.device(device)
        self.max_tokens = max(max_tokens, max_seqs)  # a bucket may be more than a step may be
        self.sizes = bucket_sizes(max_seqs)
        self.compilations = 0  # units made so far
        self._writing = Buffers.make(max_seqs, max(1, max_pages), device)
        self._reading = Buffers.make(max_seqs, max(1, max_pages), device)
        self._counting = torch.arange(max_seqs + 2, device=device)
        self._inputs: dict[str, Tensor] = {}  # by half and kind: [max_seqs, ...]
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}  # by store: what readers see staged
        self._handles: Handles = None  # what ``read`` is given, once it is known
        self._units: dict[tuple[str, int], Callable[[], Any]] = {}
        self._staged: tuple[int, list[Staged]] | None = None
        self._commits: dict[int, Callable[[], Any]] = {}
        self._pool: Any = None  # memory that all graphs share

    # What the runner calls

    def prepare(self) -> None:
        """Make the units of all sizes, unless they are made when they are first needed.

        Captures cost a tenth of a second, and memory that is better taken at once; compilations
        cost half a minute, which is better spent on sizes that occur.
        """
        self._start()
        if self.backend != "graph":
            return
        began, free = time.perf_counter(), torch.cuda.mem_get_info(self.device)[0]
        for size in reversed(self.sizes):
            self._unit("write", size)
            self._unit("read", size)
        used = free - torch.cuda.mem_get_info(self.device)[0]
        log.info(
            "captured %d graphs for up to %d sequences in %.1f s, %d MiB",
            len(self._units),
            self.max_seqs,
            time.perf_counter() - began,
            used >> 20,
        )

    def takes_write(self, batch: Batch) -> bool:
        """Whether each of the sequences has one token."""
        return len(batch.tokens) == len(batch.slots)

    def takes_read(self, rows: int) -> bool:
        return rows <= self.max_seqs

    def write(self, batch: Batch) -> tuple[Tensor, Handles]:
        """First half of a step of one token a sequence: hidden states [T, ...] and handles.

        Both are overwritten by the next call.
        """
        self._start()
        count = len(batch.tokens)
        size = self._size(count)
        unit = self._unit("write", size)
        self._fill_writing(batch, size)
        self._put("write", self.model.embed(batch), count)
        self._look_up("write", batch, count)
        hidden, staged = unit()
        self._staged = size, staged
        for store, k, v in staged:
            if store in self._windows:
                self._stage(store, k, v)
        return hidden[:count], self._handles

    def read(self, x: Tensor, kv: Handles, batch: Batch, written: Batch) -> Tensor:
        """Second half for rows ``x`` [R, ...] of ``batch``: final hidden states [R, D].

        ``kv`` may come from the model's own ``write``; ``written`` is the step's whole batch.
        """
        self._start()
        count = len(x)
        size = self._size(count)
        unit = self._unit("read", size)
        self._fill_reading(batch, written, size)
        if kv is not self._handles:
            for store, handle in self._window_leaves(kv):
                self._stage(store, handle.k, handle.v)
        self._put("read", x, count)
        self._look_up("read", batch, count)
        return unit()[:count]

    def commit(self) -> None:
        """Make current what ``write`` has staged. The last reader has run."""
        if self._staged is not None:
            size, staged = self._staged
            self._staged = None
            self._commit(size, staged)

    def discard(self) -> None:
        """Forget what is staged but not committed."""
        self._staged = None

    @torch.inference_mode()
    def poison(self) -> None:
        """Fill with NaN what the last step left in the buffers (for tests)."""
        for x in (*self._inputs.values(), *(x for pair in self._windows.values() for x in pair)):
            x.fill_(float("nan"))

    # Filling the buffers

    def _size(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _fill_writing(self, batch: Batch, size: int) -> None:
        to, count = self._writing, len(batch.tokens)
        width = batch.block_table.shape[1]
        _foreach_copy(
            [to.tokens[:count], to.positions[:count], to.slots[:count]],
            [batch.tokens, batch.positions, batch.slots],
        )
        to.block_table[:count, :width] = batch.block_table
        if count < size:
            pads = slice(count, size)
            _foreach_zero([to.tokens[pads], to.positions[pads], to.slots[pads]])
            to.block_table[pads, 0] = 0

    def _fill_reading(self, batch: Batch, written: Batch, size: int) -> None:
        to, rows, seqs = self._reading, len(batch.tokens), len(batch.slots)
        _foreach_copy(
            [to.tokens[:rows], to.positions[:rows], to.seq_ids[:rows], to.slots[:seqs],
             to.kv_lens[:seqs], to.cu_seqlens[: seqs + 1], to.written[: seqs + 1]],
            [batch.tokens, batch.positions, batch.seq_ids, batch.slots,
             batch.kv_lens, batch.cu_seqlens, written.cu_seqlens],
        )  # fmt: skip
        to.block_table[:seqs, : batch.block_table.shape[1]] = batch.block_table
        # Sequences without rows, and the last one, whose rows are the pads.
        _foreach_zero([to.tokens[rows:size], to.positions[rows:size], to.slots[seqs:]])
        to.seq_ids[rows:size] = self.max_seqs
        to.kv_lens[seqs:] = 1
        to.block_table[seqs:, 0] = 0
        to.cu_seqlens[seqs + 1 : -1] = rows
        to.cu_seqlens[-1] = size
        to.written[seqs + 1 :] = len(written.tokens)

    def _put(self, name: str, x: Tensor, count: int) -> None:
        if name not in self._inputs:
            self._inputs[name] = x.new_zeros(self.max_seqs, *x.shape[1:])
        self._inputs[name][:count] = x

    def _look_up(self, half: Literal["write", "read"], batch: Batch, count: int) -> None:
        """What the half needs of tables that may lie on the CPU: never within a capture."""
        found = self.model.look_up(batch, half)
        if found is not None:
            self._put(f"{half} tables", found, count)

    def _stage(self, store: int, k: Tensor, v: Tensor) -> None:
        for buffer, x in zip(self._windows[store], (k, v), strict=True):
            buffer[: len(x)] = x

    # The units: functions without arguments, over the buffers

    def _start(self) -> None:
        """Find out what ``write`` hands to ``read``, by a step of nothing but a pad."""
        if self._handles is not None:
            return
        pad = self._written(1)
        self._put("write", self.model.embed(pad), 1)
        self._look_up("write", pad, 1)
        hidden, kv, _ = self._write(1)
        self._handles = _map(kv, self._static_handle)
        self._put("read", hidden, 1)
        self._look_up("read", pad, 1)

    def _static_handle(self, handle: Any) -> StaticPages | StaticWindow:
        if not isinstance(handle, StaticWindow):
            return handle
        store = self._store(handle)
        to = self._reading
        k, v = (x.new_zeros(self.max_tokens, *x.shape[1:]) for x in (handle.k, handle.v))
        self._windows[store] = k, v
        written = Written(to.written, to.kv_lens, to.slots)
        return StaticWindow(*self.state.rings[store], *self._windows[store], written)

    def _window_leaves(self, kv: Handles) -> list[tuple[int, Any]]:
        leaves = list(kv.values()) if isinstance(kv, dict) else [kv]
        return [(self._store(leaf), leaf) for leaf in leaves if hasattr(leaf, "k_ring")]

    def _store(self, handle: Any) -> int:
        return next(i for i, (k, _) in enumerate(self.state.rings) if k is handle.k_ring)

    def _written(self, size: int) -> Batch:
        at = self._writing
        positions = at.positions[:size]
        return Batch(
            tokens=at.tokens[:size],
            positions=positions,
            seq_ids=self._counting[:size],
            cu_seqlens=self._counting[: size + 1],
            rows=self._counting[:size],
            slots=at.slots[:size],
            kv_lens=positions + 1,
            block_table=at.block_table[:size],
            looked_up=self._input("write tables", size),
        )

    def _input(self, name: str, size: int) -> Tensor | None:
        found = self._inputs.get(name)
        return None if found is None else found[:size]

    def _write(self, size: int) -> tuple[Tensor, Handles, list[Staged]]:
        state = StaticState(self.state)
        x, kv = self.model.write(self._inputs["write"][:size], self._written(size), state)
        return x, kv, state.staged

    def _read(self, size: int) -> Tensor:
        at = self._reading
        batch = Batch(
            tokens=at.tokens[:size],
            positions=at.positions[:size],
            seq_ids=at.seq_ids[:size],
            cu_seqlens=at.cu_seqlens,
            rows=self._counting[:size],
            slots=at.slots,
            kv_lens=at.kv_lens,
            block_table=at.block_table,
            looked_up=self._input("read tables", size),
        )
        return self.model.read(self._inputs["read"][:size], self._handles, batch)

    def _unit(self, name: str, size: int) -> Callable[[], Any]:
        unit = self._units.get((name, size))
        if unit is None:
            unit = self._units[name, size] = self._make(name, size)
            self.compilations += 1
        return unit

    def _make(self, name: str, size: int) -> Callable[[], Any]:
        def write() -> tuple[Tensor, list[Staged]]:
            x, _, staged = self._write(size)
            return x, staged

        def read() -> Tensor:
            return self._read(size)

        function: Callable[[], Any] = write if name == "write" else read
        if self.backend == "inductor":
            return _compiled(function, f"{name} for {size} sequences")
        if self.backend == "replay":
            return function
        if name == "read":
            return self._captured(function, self._reading)[0]
        captured, (_, staged) = self._captured(function, self._writing)
        commit = self._captured(lambda: self._commit_eagerly(size, staged), self._writing)[0]
        self._commits[size] = commit
        return captured

    def _commit(self, size: int, staged: list[Staged]) -> None:
        captured = self._commits.get(size)  # of what the captured ``write`` stages
        if captured is None:
            self._commit_eagerly(size, staged)
        else:
            captured()

    def _commit_eagerly(self, size: int, staged: list[Staged]) -> None:
        at = self._writing
        commit_windows(self.state, staged, at.positions[:size], at.slots[:size])

    def _captured(
        self, function: Callable[[], Any], inputs: Buffers
    ) -> tuple[Callable[[], Any], Any]:
        """``function`` as a CUDA graph, and where its results will lie.

        Raises RuntimeError if it does what cannot be captured.
        """
        inputs.clear()  # warm-ups write to scratch alone
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # caches fill, kernels are compiled
            function()
            function()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = function()

        def replay() -> Any:
            graph.replay()
            return result

        return replay, result


def _map(kv: Handles, function: Callable[[Any], Any]) -> Handles:
    return {k: function(h) for k, h in kv.items()} if isinstance(kv, dict) else function(kv)


def _compiled(function: Callable[[], Any], what: str) -> Callable[[], Any]:
    """``function`` compiled for the sizes that it has, at its first call."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    ready = False

    def call() -> Any:
        nonlocal ready
        if ready:
            return compiled()
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it would rather compile
            with torch._dynamo.config.patch(recompile_limit=MOST_COMPILATIONS):
                result = compiled()
        log.info("compiled %s in %.1f s", what, time.perf_counter() - began)
        ready = True
        return result

    return call


def compiled_halves(
    model: CausalLM,
    state: PagedState,
    wanted: Compile,
    *,
    max_seqs: int,
    max_pages: int,
    max_tokens: int,
    device: torch.device,
) -> Halves | None:
    """The halves as ``EngineSettings.compile`` wants them, or None to run the model as it is.

    Raises ConfigError for what this machine cannot do.
    """
    on_gpu = device.type == "cuda"
    if wanted == "eager" or (wanted == "auto" and not on_gpu):
        return None
    if wanted == "graph" and not on_gpu:
        raise ConfigError(
            f"compile='graph' captures CUDA graphs, and the model is on {device}: leave compile at "
            "'auto', or give device='cuda'"
        )
    if wanted == "inductor" and not on_gpu:
        try:
            find_compiler()
            cache_folder()
        except BuildError as error:
            raise ConfigError(f"compile='inductor' on a CPU: {error}") from error
    backend: Backend = "graph" if wanted == "auto" else wanted
    halves = Halves(model, state, backend, max_seqs, max_pages, max_tokens, device)
    try:
        with torch.inference_mode():
            halves.prepare()
    except RuntimeError as error:
        if wanted != "auto":
            raise ConfigError(f"compile={wanted!r} failed: {error}; use compile='eager'") from error
        log.warning("the model is not captured, and runs as it is: %s", error)
        return None
    return halves
