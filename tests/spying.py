"""A model seen from outside: what each of its halves is given, and a place to interfere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from yocolm.engine.engine import Engine
from yocolm.models.base import KV, Batch, CausalLM, Half, State


class Spy:
    """The model that it wraps, with a record of its calls.

    ``before`` maps a method's name to what is called before each of its calls, and ``after`` to
    what may replace its result.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = cast(CausalLM, model)
        self.writes: list[Batch] = []
        self.reads: list[Batch] = []
        self.logit_rows: list[int] = []
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[Tensor], Tensor]] = {}

    def parameters(self) -> object:
        return self.model.parameters()

    def embed(self, batch: Batch) -> Tensor:
        self._begin("embed")
        return self._end("embed", self.model.embed(batch))

    def look_up(self, batch: Batch, half: Half) -> Tensor | None:
        return self.model.look_up(batch, half)

    def write(self, x: Tensor, batch: Batch, state: State) -> tuple[Tensor, KV]:
        self.writes.append(batch)
        self._begin("write")
        x, kv = self.model.write(x, batch, state)
        return self._end("write", x), kv

    def read(self, x: Tensor, kv: KV, batch: Batch) -> Tensor:
        assert len(x) > 0, "the second half is entered without rows"
        self.reads.append(batch)
        self._begin("read")
        return self._end("read", self.model.read(x, kv, batch))

    def logits(self, hidden: Tensor) -> Tensor:
        self.logit_rows.append(len(hidden))
        self._begin("logits")
        return self._end("logits", self.model.logits(hidden))

    def _begin(self, method: str) -> None:
        self.before.get(method, lambda: None)()

    def _end(self, method: str, result: Tensor) -> Tensor:
        return self.after.get(method, lambda x: x)(result)


class Traffic:
    """Which positions of which request were written, and read as rows, how often."""

    def __init__(self, engine: Engine, spy: Spy) -> None:
        self.written: Counter[tuple[str, int]] = Counter()
        self.read: Counter[tuple[str, int]] = Counter()
        self._engine = engine
        spy.before["write"] = lambda: self._count(self.written, spy.writes[-1])
        spy.before["read"] = lambda: self._count(self.read, spy.reads[-1])

    def _count(self, counter: Counter[tuple[str, int]], batch: Batch) -> None:
        owners = {seq.slot: seq.request.request_id for seq in self._engine.scheduler.running}
        slots = batch.slots[batch.seq_ids].tolist()
        counter.update(
            (owners[slot], position)
            for slot, position in zip(slots, batch.positions.tolist(), strict=True)
        )
