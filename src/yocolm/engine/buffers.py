"""Index tensors of a step at addresses that do not change, and the sizes that they come in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``."""
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*sizes, most]


@dataclass(frozen=True)
class Buffers:
    """Index tensors of one half, int64; what is not of a step is of pads.

    tokens, positions, seq_ids: [most]; of pads 0, and the last sequence.
    slots, kv_lens: [sequences + 1], block_table: [sequences + 1, pages]; the last is the pads'.
    cu_seqlens, written: [sequences + 2], offsets of sequences' rows and of their tokens.
    """

    tokens: Tensor
    positions: Tensor
    seq_ids: Tensor
    slots: Tensor
    kv_lens: Tensor
    block_table: Tensor
    cu_seqlens: Tensor
    written: Tensor

    @classmethod
    def make(cls, most: int, max_pages: int, device: torch.device | str) -> Buffers:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        made = cls(
            tokens=zeros(most),
            positions=zeros(most),
            seq_ids=zeros(most),
            slots=zeros(most + 1),
            kv_lens=zeros(most + 1),
            block_table=zeros(most + 1, max_pages),
            cu_seqlens=zeros(most + 2),
            written=zeros(most + 2),
        )
        made.clear()
        return made

    def clear(self) -> None:
        """Make everything pads."""
        for x in (self.tokens, self.positions, self.slots, self.cu_seqlens, self.written):
            x.zero_()
        self.seq_ids.fill_(len(self.slots) - 1)
        self.kv_lens.fill_(1)
        self.block_table[:, 0] = 0
