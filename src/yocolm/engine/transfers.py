"""Preempted sequences on their way to the swap space and back.

A full page never changes, so its copy in the swap space is made once and serves each time that its
sequence comes back. What has been read back does not go to the prefix cache before the sequence
ends: its pages must stay its own to be the very bits that were written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from yocolm.engine.request import Sequence
from yocolm.engine.swap_space import Move, SwapSpace


@dataclass
class Swapped:
    """What the swap space holds of a sequence.

    ``full``: blocks of its first pages, for good. ``tail`` (the block of a page that was not full)
    and ``place`` (of its state) are of the ``num_computed`` tokens that it had when it was taken
    out; without a place it is not out.
    """

    full: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    place: int | None = None
    num_computed: int = 0


@dataclass
class Transfer:
    """A move that has begun. It owns ``pages`` and ``slot`` until it ends; ``seq`` is None when
    the sequence has ended before."""

    out: bool
    seq: Sequence | None
    swapped: Swapped
    pages: list[int]
    slot: int


class Transfers:
    """Decides what is written where; ``moves`` are to be carried out, and reported to ``ended``.

    Args:
        page_size: tokens; page_bytes, slot_bytes: of a page in all stores, and of a slot.
    """

    def __init__(self, space: SwapSpace, page_size: int, page_bytes: int, slot_bytes: int) -> None:
        self.space = space
        self._page_size, self._page_bytes, self._slot_bytes = page_size, page_bytes, slot_bytes
        self._swapped: dict[Sequence, Swapped] = {}
        self.running: dict[int, Transfer] = {}
        self._moves: list[Move] = []
        self._tickets = count()
        self.pages_leaving = 0  # that will be free when they are written

    @property
    def num_arriving(self) -> int:
        """Sequences that hold a slot but do not run yet."""
        return sum(not transfer.out for transfer in self.running.values())

    @property
    def space_used(self) -> tuple[int, int]:
        """Blocks and places in use."""
        space = self.space
        return space.num_blocks - space.num_free_blocks, space.num_places - space.num_free_places

    def arrives(self, seq: Sequence) -> bool:
        """Whether ``seq`` is being read back."""
        return seq.ticket is not None and not self.running[seq.ticket].out

    def take_moves(self) -> tuple[Move, ...]:
        moves, self._moves = tuple(self._moves), []
        return moves

    def bytes_moved(self, seq: Sequence) -> int:
        """Bytes to be written now and to be read later if ``seq`` is taken out."""
        pages = -(-seq.num_computed // self._page_size)
        known = len(self._swapped[seq].full) if seq in self._swapped else 0
        return (2 * pages - known) * self._page_bytes + 2 * self._slot_bytes

    def take_out(self, seq: Sequence) -> bool:
        """Have ``seq`` written out with all that it holds; False if there is no room for it."""
        swapped = self._swapped.get(seq) or Swapped()
        known, full = len(swapped.full), seq.num_computed // self._page_size
        used = -(-seq.num_computed // self._page_size)
        blocks = self.space.alloc_blocks(used - known)
        place = None if blocks is None else self.space.alloc_place()
        if blocks is None or place is None:
            self.space.free_blocks(blocks or [])
            return False
        assert seq.slot is not None
        written = tuple(zip(seq.pages[known:used], blocks, strict=True))
        swapped.full += blocks[: full - known]
        swapped.tail, swapped.place = blocks[full - known :], place
        swapped.num_computed = seq.num_computed
        self._swapped[seq] = swapped
        self._begin(Transfer(True, seq, swapped, seq.pages, seq.slot), written, (seq.slot, place))
        self.pages_leaving += len(seq.pages)
        seq.pages, seq.slot = [], None
        seq.forget_memory()
        seq.is_swapped = True
        return True

    def bring_in(self, seq: Sequence, pages: list[int], slot: int) -> None:
        """Have ``seq`` read back into ``pages``, enough for all its tokens, and ``slot``."""
        swapped = self._swapped[seq]
        assert swapped.place is not None
        blocks = swapped.full + swapped.tail
        read = tuple(zip(pages[: len(blocks)], blocks, strict=True))
        self._begin(Transfer(False, seq, swapped, pages, slot), read, (slot, swapped.place))

    def _begin(
        self, transfer: Transfer, pages: tuple[tuple[int, int], ...], state: tuple[int, int]
    ) -> None:
        ticket = next(self._tickets)
        self.running[ticket] = transfer
        self._moves.append(Move(ticket, transfer.out, pages, state))
        assert transfer.seq is not None
        transfer.seq.ticket = ticket

    def ended(self, ticket: int, error: str | None) -> tuple[Sequence | None, list[int], list[int]]:
        """A move has ended, maybe with an ``error``.

        Returns the sequence that is back by it, if any, and the pages and slots that are free.
        A sequence whose content is lost by an error will compute it anew.
        """
        transfer = self.running.pop(ticket)
        seq, swapped = transfer.seq, transfer.swapped
        if transfer.out:
            self.pages_leaving -= len(transfer.pages)
        if seq is None:
            self._free(swapped)
        else:
            seq.ticket = None
            if error is not None:
                self.forget(seq)
            elif not transfer.out:
                seq.pages, seq.slot = transfer.pages, transfer.slot
                seq.num_computed = swapped.num_computed
                seq.is_swapped = False
                self._free_tail(swapped)
                return seq, [], []
        return None, transfer.pages, [transfer.slot]

    def forget(self, seq: Sequence) -> None:
        """Give back what the swap space holds of ``seq``, or will hold when a move has ended."""
        swapped = self._swapped.pop(seq, None)
        seq.is_swapped = False
        if seq.ticket is not None:
            self.running[seq.ticket].seq = None
            seq.ticket = None
        elif swapped is not None:
            self._free(swapped)

    def _free(self, swapped: Swapped) -> None:
        self._free_tail(swapped)
        self.space.free_blocks(swapped.full)
        swapped.full = []

    def _free_tail(self, swapped: Swapped) -> None:
        self.space.free_blocks(swapped.tail)
        if swapped.place is not None:
            self.space.free_place(swapped.place)
        swapped.tail, swapped.place = [], None

    def check(self) -> None:
        """Assert that every block and place in use is somebody's."""
        self.space.check()
        leaving = [transfer for transfer in self.running.values() if transfer.out]
        assert self.pages_leaving == sum(len(transfer.pages) for transfer in leaving)
        held = {id(swapped): swapped for swapped in self._swapped.values()}
        held |= {id(t.swapped): t.swapped for t in self.running.values()}
        blocks = [block for swapped in held.values() for block in swapped.full + swapped.tail]
        places = [swapped.place for swapped in held.values() if swapped.place is not None]
        assert len(set(blocks)) == len(blocks) and len(set(places)) == len(places), "shared"
        assert (len(blocks), len(places)) == self.space_used, "swap space is miscounted"
