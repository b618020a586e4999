"""The data of the live page: made from numbers, at most a few times a second, for all who look."""

from __future__ import annotations

import json
import time
from typing import Any

from yocolm import __version__
from yocolm.server.engine_view import KINDS
from yocolm.server.history import COLUMNS, SECONDS
from yocolm.server.loop import EngineLoop
from yocolm.server.settings import ServerSettings
from yocolm.server.telemetry import Telemetry

FRESH = 0.4  # seconds for which what has been made is given out again
RECENT = 60  # seconds of history for a page that has older ones: a long step changes a few
MAX_ROWS = 64  # requests that are listed
MOST_ANSWERS = 25.0  # a second; more viewers are told to look less often
PACES = (1.0, 30.0)  # seconds between two looks of a page, the least and the most


class Live:
    """Answers ``/live.json``. Lives on the event loop."""

    def __init__(
        self,
        loop: EngineLoop,
        telemetry: Telemetry,
        settings: ServerSettings,
        model_names: tuple[str, ...],
    ) -> None:
        self._view, self._history = telemetry.view, telemetry.history
        self._loop, self._telemetry, self._settings = loop, telemetry, settings
        self._names = model_names
        self._begin = time.monotonic()
        self._made: dict[int, tuple[float, bytes]] = {}
        self._pace, self._asked, self._asked_since = PACES[0], 0, self._begin

    def data(self, since: float | None = None) -> bytes:
        """JSON of what is now, and of every second after ``since`` (it may hold earlier ones)."""
        now = time.monotonic()
        self._count(now)
        seconds = SECONDS if since is None or since < now - RECENT + 2 else RECENT
        found = self._made.get(seconds)
        if found is None or now - found[0] >= FRESH:
            made = json.dumps(self._snapshot(now, seconds), separators=(",", ":")).encode()
            found = self._made[seconds] = now, made
        return found[1]

    def _count(self, now: float) -> None:
        """How often pages are to look: so that all together ask MOST_ANSWERS times a second."""
        self._asked += 1
        past = now - self._asked_since
        if past >= 5.0:
            viewers = self._asked / past * self._pace
            self._pace = min(PACES[1], max(PACES[0], viewers / MOST_ANSWERS))
            self._asked, self._asked_since = 0, now

    def _snapshot(self, now: float, seconds: int) -> dict[str, Any]:
        view, held = self._view, self._view.held
        usage, (swapped, swap_room) = held.usage, view.swap()
        engine, loop = self._loop.engine, self._loop
        stats = engine.runner.stats
        requests = view.requests(MAX_ROWS)
        pools = [vars(view.pool(kind)) for kind in KINDS]
        prefix = view.prefix_stats()
        return {
            "now": round(now, 3),
            "pace": round(self._pace, 1),
            "models": self._names,
            "version": __version__,
            "state": _state(loop),
            "uptime": round(now - self._begin, 1),
            "max_model_len": engine.max_model_len,
            "policy": view.policy,
            "pools": pools,
            "pages": [usage.pages_used, usage.pages_kept, usage.num_pages],
            "slots": [usage.slots_used, usage.slots_kept, usage.num_slots],
            "swap": {"used": swapped, "capacity": swap_room},
            "queue": {
                "running": view.num_running,
                "waiting": max(0, view.num_waiting - held.swapped),
                "swapped": held.swapped,
                "max_running": engine.scheduler.max_num_seqs,
                "max_waiting": self._settings.max_queue,
            },
            "totals": {
                "tokens": stats.write_tokens,
                "rows": stats.read_rows,
                "steps": engine.scheduler.num_steps,
                "preemptions": view.preemptions(),
                "queried": prefix.query_tokens,
                "cached": prefix.hit_tokens,
            },
            "ttft": [list(map(_short, times)) for times in self._telemetry.first_tokens],
            "requests": requests,
            "columns": COLUMNS,
            "history": [_rounded(row) for row in self._history.rows(now, seconds)],
        }


def _state(loop: EngineLoop) -> str:
    if not loop.alive:
        return "stopped"
    return "draining" if loop.draining else "serving"


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _rounded(row: list[float]) -> list[float]:
    """Fewer digits, and no point behind whole numbers: most of the text is this."""
    return [int(value) if value == int(value) else round(value, 4) for value in row]
