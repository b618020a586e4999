"""Packed sequences cut into equal blocks, so that ragged batches become plain batched tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

Plan = TypeVar("Plan")
Other = TypeVar("Other")


@dataclass(frozen=True)
class Blocks:
    """Packed sequences cut into blocks of ``size`` tokens that never cross a sequence.

    Blocks are numbered level by level: first the first block of every sequence (longest sequences
    first), then their second blocks, and so on. Level ``j`` therefore holds the sequences
    ``order[: level_sizes[j]]``, and a scan over levels works on contiguous slices.
    """

    size: int
    count: int
    num_tokens: int
    slot: Tensor  # [T] where each token lies in the [count * size] padded layout
    order: Tensor  # [S] sequences by descending number of blocks; empty sequences last
    inverse: Tensor  # [S] its inverse permutation
    level_starts: Tensor  # [levels] number of each level's first block
    level_sizes: tuple[int, ...]  # blocks in each level

    def number(self, seq: Tensor, rank: Tensor) -> Tensor:
        """Number of the ``rank``-th block of sequence ``seq``; both [P] int64."""
        return self.level_starts[rank] + self.inverse[seq]

    def spread(self, x: Tensor) -> Tensor:
        """Lay packed ``x`` [T, ...] out as [count, size, ...]; padding is zero."""
        rest = x.shape[1:]
        if self.count * self.size == self.num_tokens and len(self.level_sizes) == self.count:
            return x.view(self.count, self.size, *rest)  # one sequence, whole blocks: no copy
        padded = x.new_zeros(self.count * self.size, *rest)
        return padded.index_copy_(0, self.slot, x).view(self.count, self.size, *rest)

    def pack(self, x: Tensor) -> Tensor:
        """Inverse of ``spread``: [count, size, ...] to [T, ...]."""
        flat = x.reshape(self.count * self.size, *x.shape[2:])
        if self.count * self.size == self.num_tokens and len(self.level_sizes) == self.count:
            return flat
        return flat.index_select(0, self.slot)


def cut_blocks(lengths: list[int], size: int, device: torch.device | str = "cpu") -> Blocks:
    """Cut sequences of ``lengths`` tokens, packed in that order, into blocks of ``size`` tokens."""
    lens = torch.tensor(lengths, dtype=torch.int64)
    counts = (lens + size - 1) // size
    order = torch.argsort(counts, descending=True, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(lengths))
    level_sizes = torch.bincount(counts).flip(0).cumsum(0).flip(0)[1:]  # how many have so many
    level_start = level_sizes.cumsum(0) - level_sizes

    total = int(lens.sum())
    seq = torch.repeat_interleave(torch.arange(len(lengths)), lens)
    offset = torch.arange(total) - (lens.cumsum(0) - lens)[seq]
    block = level_start[offset // size] + inverse[seq] if total else offset
    return Blocks(
        size=size,
        count=int(level_sizes.sum()),
        num_tokens=total,
        slot=(block * size + offset % size).to(device),
        order=order.to(device),
        inverse=inverse.to(device),
        level_starts=level_start.to(device),
        level_sizes=tuple(level_sizes.tolist()),
    )


@dataclass(frozen=True)
class Classes(Generic[Plan]):
    """Packed sequences in classes of about one length, so that little is padded.

    Each has a plan, such as the ``Blocks`` of its sequences, and the ``rows`` of their tokens,
    int64. ``order`` [T] int64 is where a token lies once the classes are laid out one by one.
    """

    plans: list[Plan]
    rows: list[Tensor]
    order: Tensor

    def map(self, build: Callable[[Plan], Other]) -> Classes[Other]:
        """The same classes with other plans."""
        return Classes([build(plan) for plan in self.plans], self.rows, self.order)

    def apply(self, form: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """``form(plan, *tensors)`` of every class's part of the tensors [T, ...], put together.

        What is all one class is passed on as it is.
        """
        if len(self.plans) == 1:
            return form(self.plans[0], *tensors)
        parts = [
            form(plan, *(x.index_select(0, rows) for x in tensors))
            for plan, rows in zip(self.plans, self.rows, strict=True)
        ]
        return torch.cat(parts).index_select(0, self.order)


def by_length(lengths: list[int], size: int, device: torch.device | str) -> Classes[list[int]]:
    """Classes that can be cut into blocks of ``size`` (of the longest, if that is shorter) with
    less padding than there are tokens.

    The first holds the sequences above half of ``size``; within each of the others, all are above
    half of the longest. A class's plan is the lengths of its sequences; empty ones are in none.
    """
    lens = torch.tensor(lengths, dtype=torch.int64)
    seq = torch.repeat_interleave(torch.arange(len(lens)), lens)
    plans, rows = [], []
    left, limit = lens > 0, min(size, max(lengths, default=0))
    while limit:
        chosen = left & (lens * 2 > limit)
        if bool(chosen.any()):
            plans.append(lens[chosen].tolist())
            rows.append(torch.nonzero(chosen[seq]).squeeze(1))
        left = left & ~chosen
        limit = int((lens * left).max())
    order = torch.cat([seq[:0], *rows]).argsort()
    return Classes(plans, [some.to(device) for some in rows], order.to(device))
