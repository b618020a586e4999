"""The policy by traffic where the rules meet: turns, bounds and paces of several at once."""

from __future__ import annotations

import pytest

from linear_world import BASE, World, tokens_of
from yocolm.engine.policy import LATE_TURN, MAX_SKIP, QUICK
from yocolm.engine.request import Status


@pytest.mark.parametrize("blocked", [False, True])
def test_the_turn_of_the_late_goes_to_who_can_use_it(blocked: bool) -> None:
    """One that waits, may not begin and has waited longest does not keep the turn from another."""
    world = World(budget=1003, ttft=None)
    others = [world.decoding(20_000, tpot=0.08, output=100_000) for _ in range(3)]
    guest = world.add(200_000, ttft=5.0, tpot=0.08)
    world.now += 50.0
    while guest.status is not Status.RUNNING:
        world.on_time(others, 0.5)
        world.step()
    first = world.add(20_000, ttft=5.0, tpot=0.08) if blocked else None
    if first is not None:
        first.request.due -= 1000.0
    turns = 0
    for _ in range(5 * (LATE_TURN + 1)):
        world.on_time(others, 5.0)
        world.add(1000, output=1, ttft=5.0, tpot=10.0)
        turns += tokens_of(world.step(), guest) > 0
    assert turns >= 5
    assert first is None or first.status is Status.WAITING


def test_a_late_prompt_without_time_lets_urgent_ones_pass() -> None:
    """Its decode has no time to give, but may lend some."""
    world = World(budget=2000, ttft=1.0)
    decode = world.decoding(64, tpot=0.05, output=100_000)
    late = world.add(100_000, tpot=10.0)
    world.now += 10.0
    for _ in range(MAX_SKIP):
        world.on_time([decode], 0.005)
        urgent = world.add(500, output=1, tpot=10.0)
        plan = world.step()
        assert tokens_of(plan, late) == 0 and tokens_of(plan, urgent) == 500


def test_chunks_that_have_time_do_not_add_up() -> None:
    """Without decodes the first of them goes, and the others wait until it is done."""
    world = World(ttft=0.2)
    for _ in range(40):
        world.add(3000, ttft=60.0)
    world.add(1, output=1)
    plan = world.step()
    assert len(plan.scheduled) == 2 and world.seconds(plan) <= QUICK * 0.2


def test_prompts_that_begin_together_keep_their_pace_together() -> None:
    world = World()
    world.add(1, output=1)
    world.step()
    seqs = [world.add(1000, ttft=60.0, tpot=0.014) for _ in range(4)]  # two fit into a second
    world.step()
    assert sum(seq.status is Status.RUNNING for seq in seqs) == 2
    world.step()
    assert sum(seq.status is Status.RUNNING for seq in seqs) == 2


def test_who_asks_for_what_cannot_be_cuts_nobody_to_pieces() -> None:
    """A target counts as no less than what the request takes alone."""
    world = World(budget=512)
    hopeless = world.add(4000, output=1, ttft=1e-6)
    assert tokens_of(world.step(), hopeless) == 512


def test_late_prompts_go_on_beside_many_decodes_and_short_requests() -> None:
    """A quarter of the shortest target is less than a step of decodes: it may be twice as long."""
    world = World(ttft=None)
    decodes = [world.decoding(64, tpot=1.0, output=10_000) for _ in range(30)]
    late = world.add(4000, ttft=1.0, tpot=1.0)
    world.now += 3.0
    for _ in range(60):
        world.add(1, output=1)
        world.on_time(decodes, 0.9)
        alone = BASE + sum(world.cost.decode_seconds(seq.num_tokens) for seq in decodes)
        plan = world.step()
        assert world.seconds(plan) <= 2 * alone or late.num_output
    assert late.num_output > 0


def test_a_dear_decode_does_not_wait_for_those_that_are_late_whatever_it_does() -> None:
    world = World()
    dear = world.decoding(60_000, tpot=10.0, output=10_000)
    hopeless = world.decoding(64, tpot=1e-4, output=10_000)
    for _ in range(2 * MAX_SKIP):
        world.on_time([hopeless], -1.0)
        world.on_time([dear], 0.0)
        assert tokens_of(world.step(), dear) == 1


def test_a_dear_decode_waits_for_those_that_can_catch_up() -> None:
    world = World()
    dear = world.decoding(60_000, tpot=10.0)
    behind = world.decoding(64, tpot=0.05)
    world.on_time([dear], 0.0)
    world.on_time([behind], -0.05)
    assert tokens_of(world.step(), dear) == 0


def test_a_prompt_that_is_nearly_done_counts_like_a_decode() -> None:
    world = World(budget=512)
    world.add(1, output=1)
    world.step()
    half = world.add(1000, ttft=60.0, tpot=0.0125)  # two of them ask for more than a second has
    assert tokens_of(world.step(), half) == 512
    other = world.add(1000, ttft=60.0, tpot=0.0125)
    assert tokens_of(world.step(), half) == 488
    assert other.status is Status.WAITING
