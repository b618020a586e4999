"""What the engine and the trainer know of a model family: a batch, a state, and four methods.

A model declares its state. From the last write of state on everything is a reader, and readers run
only on the rows that somebody needs. Shape letters: T tokens, S sequences, R rows, D hidden size,
H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from yocolm.ops.heads import KeyForm

AS_IS = KeyForm()
Plan = TypeVar("Plan")
Half = Literal["write", "read"]
Handles = Any  # what the second half reads: a KV handle, or one for each type of layer


@dataclass(frozen=True)
class Batch:
    """One step's work, passed explicitly. Per-token fields follow the rows once they are selected.

    tokens, positions, seq_ids: [T] int64. ``positions`` count within the sequence.
    cu_seqlens: [S + 1] int64, where each sequence's tokens start.
    rows: [R] int64, ascending: the tokens whose output somebody needs.
    slots: [S] int64, places in the constant-size pools.
    kv_lens: [S] int64, tokens of each sequence in the global KV once this step is written.
    block_table: [S, pages] int64.
    looked_up: [T, ...] what ``look_up`` found for the half that this batch is for; None leaves the
        lookup to the half.
    """

    tokens: Tensor
    positions: Tensor
    seq_ids: Tensor
    cu_seqlens: Tensor
    rows: Tensor
    slots: Tensor
    kv_lens: Tensor
    block_table: Tensor
    looked_up: Tensor | None = None
    _memo: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def packed(
        cls,
        tokens: Tensor,
        lengths: Sequence[int],
        rows: Tensor | None = None,
    ) -> Batch:
        """Whole sequences of ``lengths`` tokens from position 0, back to back in ``tokens`` [T]."""
        lens = torch.tensor(lengths, dtype=torch.int64)
        if int(lens.sum()) != tokens.shape[0]:
            raise ValueError(
                f"lengths sum to {int(lens.sum())}, but there are {len(tokens)} tokens"
            )
        device = tokens.device
        cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0)))
        seq_ids = torch.repeat_interleave(torch.arange(len(lens)), lens)
        positions = torch.arange(len(tokens)) - cu_seqlens[seq_ids]
        return cls(
            tokens=tokens.long(),
            positions=positions.to(device),
            seq_ids=seq_ids.to(device),
            cu_seqlens=cu_seqlens.to(device),
            rows=torch.arange(len(tokens), device=device) if rows is None else rows,
            slots=torch.arange(len(lens), device=device),
            kv_lens=lens.to(device),
            block_table=torch.empty(len(lens), 0, dtype=torch.int64, device=device),
        )

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens (after a selection: rows) of each sequence, on the host."""
        return self.cu_seqlens.diff().tolist()

    def memo(self, key: Any, build: Callable[[], Plan]) -> Plan:
        """Work out an index plan once a batch: layers ask for the same one again and again."""
        if key not in self._memo:
            self._memo[key] = build()
        return self._memo[key]

    def select_rows(self, x: Tensor) -> tuple[Tensor, Batch]:
        """Keep the needed rows of ``x`` [T, D, ...] and of every per-token field.

        ``cu_seqlens`` becomes row offsets; sequences without rows stay, empty. With all rows
        needed, the very same tensors come back.
        """
        if len(self.rows) == len(self.tokens):
            return x, self
        seq_ids = self.seq_ids[self.rows]
        selected = replace(
            self,
            tokens=self.tokens[self.rows],
            positions=self.positions[self.rows],
            seq_ids=seq_ids,
            cu_seqlens=torch.searchsorted(self.rows, self.cu_seqlens),
            rows=torch.arange(len(self.rows), device=self.rows.device),
            looked_up=None,
        )
        return x.index_select(0, self.rows), selected


class KV(Protocol):
    """A handle on written keys and values. Readers call ``attend``; nobody can write through it."""

    def attend(
        self, q: Tensor, batch: Batch, scale: float | None = None, softcap: float = 0.0
    ) -> Tensor:
        """Attention of ``q`` [R, H, K] for the batch's rows. Returns [R, H, V] in q's dtype."""
        ...


class State(Protocol):
    """All that a forward pass remembers; ``store`` numbers those of one kind in layer order."""

    def append_global(
        self, store: int, k: Tensor, v: Tensor, batch: Batch, form: KeyForm = AS_IS
    ) -> KV:
        """Write a step's k, v [T, kv heads, head size] to a growing store; return its handle.

        ``form`` says what is still to be done to them: norms and rotation.
        """
        ...

    def append_window(
        self, store: int, k: Tensor, v: Tensor, batch: Batch, window: int, form: KeyForm = AS_IS
    ) -> KV:
        """Stage a step's k, v; the handle sees each row's last ``window`` tokens, it included."""
        ...

    def retain(
        self, store: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, batch: Batch
    ) -> Tensor:
        """Run gated retention from the stored state on, and store the state it ends in."""
        ...

    def commit(self, accepted: Tensor | None = None) -> None:
        """Make staged changes current; called when the last reader has run.

        ``accepted`` [S] int64: how many tokens of each sequence of the step count, the first ones;
        without it all of them. The others might as well not have been in the step.
        """
        ...


class CausalLM(Protocol):
    """All the engine knows of a family."""

    def embed(self, batch: Batch) -> Tensor:
        """Embeddings of the batch's tokens, [T, D]."""
        ...

    def look_up(self, batch: Batch, half: Half) -> Tensor | None:
        """What a half takes from tables that may lie on the CPU, [T, ...]; None if it takes none.

        A half looks it up itself, unless it finds it in ``batch.looked_up``: within a compiled or
        captured half nothing can be looked up.
        """
        ...

    def write(self, x: Tensor, batch: Batch, state: State) -> tuple[Tensor, Handles]:
        """First half, for every token: returns [T, D, ...] and the handles that ``read`` takes."""
        ...

    def read(self, x: Tensor, kv: Handles, batch: Batch) -> Tensor:
        """Second half, for needed rows only: final hidden states [R, D]. Never entered at R = 0."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] to [R, V]; call it in blocks of rows, never for a whole long prompt."""
        ...

    def parameters(self) -> Any:
        """The module's parameters, as in ``torch.nn.Module``."""
        ...
