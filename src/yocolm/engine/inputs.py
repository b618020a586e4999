"""A step's entries become a ``Batch``: the only place where Python lists become tensors.

Everything is put together in numpy, whose small operations cost a fifth of torch's, and taken to
the device at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Series

import numpy as np
import torch
from torch import Tensor

from yocolm.engine.plan import Scheduled
from yocolm.engine.request import Sequence
from yocolm.models.base import Batch

Ints = np.ndarray  # int64


class Inputs:
    """Builds batches. Keeps the block table of all slots, to which a step adds its new pages.

    Args:
        num_slots: places of sequences, scratch included.
        max_pages: the most pages of a sequence.
    """

    def __init__(self, num_slots: int, max_pages: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._table = np.zeros((num_slots, max_pages), np.int64)
        self._tabled: dict[int, tuple[Sequence, int, int]] = {}  # slot -> owner, version, pages
        self._counting = np.arange(num_slots + 1)
        counting = torch.from_numpy(self._counting).to(self.device)
        self._counted = [counting[:count] for count in range(num_slots + 2)]
        self._cut: tuple[list[int], int, Tensor] | None = None  # the last step's part of the table

    def batch(self, entries: Series[Scheduled]) -> Batch:
        """The entries' tokens, one sequence after another."""
        slots = [slot_of(entry.seq) for entry in entries]
        table = self._tables(entries, slots)
        if all([entry.num_tokens == 1 and entry.rows == (0,) for entry in entries]):
            return self._decodes(entries, slots, table)
        starts = np.array([entry.start for entry in entries])
        counts = np.array([entry.num_tokens for entry in entries])
        ends = counts.cumsum()
        begins = ends - counts
        seq_ids = np.repeat(self._counting[: len(entries)], counts)
        row_counts = np.array([len(entry.rows) for entry in entries])
        rows = np.fromiter((row for entry in entries for row in entry.rows), np.int64)
        tokens = np.concatenate([entry.seq.array(entry.start, entry.stop) for entry in entries])
        return Batch(
            tokens=self._take(tokens),
            positions=self._take(np.repeat(starts - begins, counts) + np.arange(len(seq_ids))),
            seq_ids=self._take(seq_ids),
            cu_seqlens=self._take(np.append(0, ends)),
            rows=self._take(rows + np.repeat(begins, row_counts)),
            slots=self._take(np.array(slots)),
            kv_lens=self._take(starts + counts),
            block_table=table,
        )

    def _decodes(self, entries: Series[Scheduled], slots: list[int], table: Tensor) -> Batch:
        """One token of each sequence, and its row: most of what differs travels as one."""
        starts = [entry.start for entry in entries]
        each = torch.tensor(
            [
                [entry.seq.token(entry.start) for entry in entries],
                starts,
                [start + 1 for start in starts],
                slots,
            ],
            device=self.device,
        )
        tokens, positions, kv_lens, on_device = each.unbind()
        counting = self._counted[len(entries)]
        return Batch(
            tokens=tokens,
            positions=positions,
            seq_ids=counting,
            cu_seqlens=self._counted[len(entries) + 1],
            rows=counting,
            slots=on_device,
            kv_lens=kv_lens,
            block_table=table,
        )

    def _tables(self, entries: Series[Scheduled], slots: list[int]) -> Tensor:
        """Page numbers of every sequence, [S, most pages]; only new pages are written."""
        longest, changed, tabled = 0, False, self._tabled
        for entry in entries:
            seq = entry.seq
            slot, count = slot_of(seq), len(seq.pages)
            if count > longest:
                longest = count
            owner, version, known = tabled.get(slot, (None, 0, 0))
            first = known if owner is seq and version == seq.page_version else 0
            if first < count:
                self._table[slot, first:count] = seq.pages[first:]
                tabled[slot] = seq, seq.page_version, count
                changed = True
        if changed or self._cut is None or self._cut[:2] != (slots, longest):
            self._cut = slots, longest, self._take(self._table[slots, :longest])
        return self._cut[2]

    def _take(self, values: Ints) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


def slot_of(seq: Sequence) -> int:
    """The slot of a sequence that runs."""
    assert seq.slot is not None
    return seq.slot
