"""Random schedules against a model whose state is the tokens (tests/random_schedules.py)."""

from collections import Counter

import pytest

from random_schedules import Scenario


@pytest.mark.parametrize("batch", range(10))
def test_random_schedules_equal_solo_runs(batch: int) -> None:
    for seed in range(100 * batch, 100 * (batch + 1)):
        try:
            Scenario(seed).run()
        except AssertionError as error:
            raise AssertionError(f"scenario {seed}: {error}") from error


def test_random_schedules_reach_the_rare_events() -> None:
    """The scenarios would prove little if these did not happen."""
    events: Counter[str] = Counter()
    for seed in range(200):
        scenario = Scenario(seed)
        scenario.run()
        events += scenario.runner.events
        events["preemption"] += scenario.scheduler.num_preemptions
    rare = {"copy from one that ended", "resumed half scored"}
    frequent = {"preemption", "mixed", "fork continues", "fork without room", "resumed with output"}
    assert all(events[name] > 0 for name in rare), events
    assert all(events[name] > 50 for name in frequent), events
