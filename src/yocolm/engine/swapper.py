"""The engine's side of swapping: starts moves, hears of their end, and survives what goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from yocolm.engine.settings import SWAP_SPACE, EngineSettings, available_memory, parse_bytes
from yocolm.engine.state import PagedState
from yocolm.engine.swap import SwapStore
from yocolm.engine.swap_file import swap_room
from yocolm.engine.swap_space import Move, SwapSpace
from yocolm.errors import ConfigError

log = logging.getLogger("yocolm.engine")
LOST = "the step that was to start it was interrupted"


class Swapper:
    """Carries out the moves of plans.

    The store is made for the first move: most engines never swap. But at once where its size was
    asked for, so that an error is told, and on a GPU, where pinning memory takes seconds.
    """

    def __init__(self, state: PagedState, settings: EngineSettings, space: SwapSpace) -> None:
        self.space = space
        self._state = state
        self._store: SwapStore | None = None
        self._started: set[int] = set()
        self._refused: list[tuple[int, str | None]] = []
        self._on_cpu = torch.device(state.device).type == "cpu"
        asked = settings.swap_space is not None or not self._on_cpu
        if asked and space.num_blocks + space.num_places:
            try:
                self._store = self._make()
            except ConfigError as error:
                if settings.swap_space is not None:
                    raise
                log.warning("no memory is pinned for preempted requests: %s", error)

    def _make(self) -> SwapStore:
        kind = "file" if self._on_cpu else "memory"
        return SwapStore(self._state, self.space.num_blocks, self.space.num_places, kind)

    def start(self, moves: Iterable[Move]) -> None:
        for move in moves:
            try:
                if self._store is None:
                    self._store = self._make()
            except (ConfigError, OSError, RuntimeError) as error:  # no file, memory or thread
                log.warning("preempted requests will be computed anew: %s", error)
                self._refused.append((move.ticket, str(error)))
                continue
            self._started.add(move.ticket)
            self._store.start(move)

    def poll(self, running: Iterable[int]) -> list[tuple[int, str | None]]:
        """Moves that have ended. ``running``: all tickets that somebody waits for."""
        ended, self._refused = self._refused, []
        if self._store is not None:
            ended += self._store.poll()
        self._started.difference_update([ticket for ticket, _ in ended])
        known = self._started | {ticket for ticket, _ in ended}
        return ended + [(ticket, LOST) for ticket in running if ticket not in known]

    def wait(self, timeout: float) -> None:
        if self._store is not None and not self._refused:
            self._store.wait(timeout)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def swap_space(
    settings: EngineSettings,
    page_bytes: int,
    slot_bytes: int,
    state_bytes: int,
    max_seqs: int,
    on_cpu: bool,
) -> SwapSpace:
    """The room that ``settings`` give. ``state_bytes``: of all pages and slots."""
    asked = parse_bytes(settings.swap_space, "swap_space", zero=True)
    if asked is None:
        most = min(SWAP_SPACE, 2 * state_bytes)
        asked = swap_room(most) if on_cpu else min(most, available_memory() // 4)
        if asked < page_bytes + slot_bytes:
            asked = 0
    return SwapSpace.sized(asked, page_bytes, slot_bytes, 4 * max_seqs)
