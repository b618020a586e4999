"""Starts of single sequences."""

from yocolm.engine.memory import Memory
from yocolm.engine.pages import PagePool, SlotPool
from yocolm.engine.request import Request
from yocolm.engine.sampling_params import SamplingParams


def test_what_could_start_once_can_start_again() -> None:
    """Only a start that was refused is remembered, not one that was granted."""
    memory = Memory(PagePool(5, 4), SlotPool(3))
    seq = Request("a", [1] * 10, SamplingParams(max_tokens=2)).sequences[0]
    for _ in range(3):
        assert memory.start(seq)
        memory.release(seq)
