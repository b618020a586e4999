"""First come, first served, beside moves to and from the swap space."""

from __future__ import annotations

import pytest

from yocolm.engine.policy import Fcfs
from yocolm.engine.request import Request, Sequence
from yocolm.engine.sampling_params import SamplingParams


class Line:
    """As much of a scheduler as ``Fcfs`` asks for."""

    def __init__(self, waiting: list[Sequence], arriving: list[Sequence]) -> None:
        self.running: list[Sequence] = []
        self.waiting, self.arriving = waiting, arriving

    def arrives(self, seq: Sequence) -> bool:
        return seq in self.arriving


@pytest.mark.parametrize(("way", "found"), [("back", 1), ("out", None), (None, 0)])
def test_first_come_first_served_beside_moves(way: str | None, found: int | None) -> None:
    """Who is read back has its memory: the next one's turn. Who is written out comes back first."""
    params = SamplingParams(max_tokens=1)
    waiting = [Request(name, [1] * 10, params).sequences[0] for name in "ab"]
    waiting[0].ticket = None if way is None else 5
    line = Line(waiting, waiting[:1] if way == "back" else [])
    seq = next(Fcfs().prompts(line, [], 8, 0.0), None)  # type: ignore[arg-type]
    assert seq is (None if found is None else waiting[found])
