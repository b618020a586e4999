"""Ctrl-C at any moment leaves queues, pools and answers whole."""

import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from tiny import assert_dense, finish, greedy, make_engine, prompt_of, run_one
from yocolm.engine.engine import Engine
from yocolm.engine.interrupts import Held


@contextmanager
def interrupted_at_line(count: int) -> Iterator[None]:
    """Send SIGINT when the ``count``-th line of the engine's own modules is about to run."""
    left = [count]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "yocolm/engine" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def busy_engine(policy: str) -> Engine:
    engine = make_engine(
        "retention", pages=10, seqs=4, budget=7, caching=True, checkpoints=4, policy=policy
    )
    for i in range(3):
        engine.add_request(str(i), prompt_of(8 + i, seed=i), greedy(9, prompt_logprobs=None))
    return engine


@pytest.mark.parametrize("policy", ["fcfs", "traffic"])
def test_a_step_that_is_interrupted_anywhere(policy: str) -> None:
    source = random.Random(7)
    for _ in range(60):
        engine = busy_engine(policy)
        for _ in range(source.randint(0, 12)):
            engine.step()
        with pytest.raises(KeyboardInterrupt), interrupted_at_line(source.randint(1, 700)):
            while True:
                engine.step()
        engine.check()
        for output in finish(engine).values():
            assert_dense(output, "retention")
            for sample in output.outputs:
                assert sample.logprobs is not None and len(sample.logprobs) == 9
        assert_dense(run_one(engine, prompt_of(9), greedy(3)), "retention")


def test_adding_and_aborting_are_whole() -> None:
    for count in range(1, 400, 7):
        engine = busy_engine("traffic")
        engine.step()
        with pytest.raises(KeyboardInterrupt), interrupted_at_line(count):
            while True:
                engine.add_request("new", prompt_of(9), greedy(3))
                engine.abort("new")
        engine.abort("new")
        engine.check()
        assert set(finish(engine)) == {"0", "1", "2"}


class TestHeld:
    def test_it_waits_for_the_end(self) -> None:
        done = False
        with pytest.raises(KeyboardInterrupt), Held() as held:
            signal.raise_signal(signal.SIGINT)
            assert held.noted
            done = True
        assert done
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def test_released_inside(self) -> None:
        with pytest.raises(KeyboardInterrupt), Held() as held, held.released():
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it goes at once")
        with pytest.raises(KeyboardInterrupt), Held() as held:
            signal.raise_signal(signal.SIGINT)
            with held.released():
                pytest.fail("what was noted goes first")

    def test_another_error_goes_first_and_the_handler_is_back(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(ValueError, match="mine"), Held():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("mine")
        assert signal.getsignal(signal.SIGINT) is before

    def test_inside_another_and_in_other_threads_it_does_nothing(self) -> None:
        seen: list[bool] = []

        def use() -> None:
            with Held() as held:
                seen.append(held._handler is None)

        with Held():
            use()
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert seen == [True, True]
