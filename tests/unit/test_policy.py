"""The policy by traffic, rule by rule, in the predicted time of ``linear_world``."""

from __future__ import annotations

import pytest

from linear_world import BASE, SCAN, TOKEN, World, tokens_of
from yocolm.engine import policy as policies
from yocolm.engine.policy import (
    CREDIT,
    CROWDED,
    LATE_TURN,
    LEAST_CHUNK,
    MAX_SKIP,
    PACE,
    QUICK,
    RECENT,
    USUAL_OUTPUT,
    _due,
    _latest,
)
from yocolm.engine.request import Sequence, Status

LONG = 60_000  # tokens of context: a scan of 60 ms


def test_targets_are_the_requests_the_servers_or_from_what_it_takes_alone() -> None:
    seq = World(ttft=None).add(90)
    assert seq.request.ttft_target == pytest.approx(5 * 0.019)
    assert seq.request.tpot_target == pytest.approx(2 * (0.0101 + 90e-6))
    world = World(ttft=1.5)
    world.policy.tpot_target = 0.25
    seq = world.add(90)
    assert (seq.request.ttft_target, seq.request.tpot_target) == (1.5, 0.25)
    seq = world.add(90, ttft=9.0, tpot=0.5)
    assert (seq.request.ttft_target, seq.request.tpot_target) == (9.0, 0.5)


# How long a step may be


def test_alone_a_prompt_takes_the_whole_budget() -> None:
    world = World(budget=512, ttft=None)
    seq = world.add(2000)
    assert tokens_of(world.step(), seq) == 512


def test_a_chunk_ends_before_the_next_token_is_due() -> None:
    """That of a prompt that has time; the pace of the decode is no bound here."""
    world = World()
    seq = world.decoding(64, tpot=1.0)
    world.on_time([seq], 0.1)
    calm = world.add(3000, ttft=60.0)
    plan = world.step()
    assert tokens_of(plan, calm) > 0
    assert 0.09 < world.seconds(plan) <= 0.1


@pytest.mark.parametrize("target", [0.5, 60.0])
def test_time_that_was_saved_is_for_urgent_prompts_only(target: float) -> None:
    world = World()
    seq = world.decoding(64, tpot=0.05)
    world.on_time([seq], 0.4)
    prompt = world.add(3000, ttft=target)
    plan = world.step()
    if target < 1:
        assert tokens_of(plan, prompt) == 3000
    else:
        assert tokens_of(plan, prompt) > 0
        assert 0.9 * PACE * 0.05 < world.seconds(plan) <= PACE * 0.05


def test_a_chunk_that_has_time_is_a_quarter_of_the_shortest_recent_target() -> None:
    world = World()
    world.add(1, output=1, ttft=0.2)
    world.step()
    calm = world.add(4000, ttft=60.0)
    plan = world.step()
    assert tokens_of(plan, calm) > 0
    assert 0.8 * QUICK * 0.2 < world.seconds(plan) <= QUICK * 0.2
    for _ in range(RECENT):
        world.add(1, output=1)
    plan = world.step()
    assert tokens_of(plan, calm) > 3000, "that target is no longer recent"


def spent(world: World, seq: Sequence, ahead: float) -> float:
    """Seconds of the step that an urgent prompt of 3 s takes beside the decode ``seq``."""
    world.on_time([seq], ahead)
    prompt = world.add(30_000, ttft=5.0)
    plan = world.step()
    assert tokens_of(plan, seq) == 1 and 0 < tokens_of(plan, prompt) < 30_000
    return world.seconds(plan)


def credit(seq: Sequence, left: float) -> float:
    """Seconds that a decode at 0.05 s a token can still save alone, with so many tokens to go."""
    return left * (PACE * 0.05 - BASE - TOKEN - SCAN * seq.num_tokens)


@pytest.mark.parametrize(
    ("output", "drawn", "left"),
    [
        (5, 1, 4),  # all that max_tokens leaves
        (1000, 1, USUAL_OUTPUT - 1),  # what answers usually have left
        (1000, 120, USUAL_OUTPUT / 4),  # a long one is not expected to end at once
        (130, 120, 10),
    ],
)
def test_urgent_prompts_may_spend_half_of_what_decodes_will_save(
    output: int, drawn: int, left: float
) -> None:
    world = World(budget=1 << 16)
    seq = world.decoding(64, tpot=0.05, output=output)
    while seq.num_output < drawn:
        world.step()
    hope = 0.03 + CREDIT * credit(seq, left)
    assert CREDIT == 0.5 and hope > 0.1, "well beyond 0.03 s, when the next token is due"
    assert 0.85 * hope < spent(world, seq, 0.03) <= hope


def test_answers_that_have_ended_tell_how_much_will_be_saved() -> None:
    """Their mean length, of those that came to an end of their own and have tokens."""
    world = World(budget=1 << 16)
    world.add(10, output=10)
    while world.scheduler.has_unfinished:
        world.step()
    mean = USUAL_OUTPUT + (10 - USUAL_OUTPUT) / RECENT
    assert world.policy._output == pytest.approx(mean)
    aborted = world.add(10, output=1000)
    world.step()
    assert aborted.num_output == 1
    world.scheduler.abort(aborted.request.request_id)
    world.add(10, output=0)
    world.step()
    assert not world.scheduler.has_unfinished
    assert world.policy._output == pytest.approx(mean)
    for _ in range(8 * RECENT):
        world.add(10, output=10)
        while world.scheduler.has_unfinished:
            world.step()
    assert world.policy._output == pytest.approx(10, abs=0.1)
    seq = world.decoding(64, tpot=0.05)
    hope = 0.03 + CREDIT * credit(seq, 9)
    assert 0.85 * hope < spent(world, seq, 0.03) <= 1.01 * hope


@pytest.mark.parametrize("ahead", [0.04, 0.5])
def test_those_that_are_late_spend_nothing(ahead: float) -> None:
    """Neither what a decode will save nor what it has saved."""
    world = World()
    seq = world.decoding(64, tpot=0.05)
    late = world.add(3000, ttft=30.0)
    world.now += 100.0
    world.on_time([seq], ahead)
    plan = world.step()
    most = min(ahead, PACE * 0.05)
    assert late in world.policy._late and tokens_of(plan, late) > 0
    assert 0.9 * most < world.seconds(plan) <= most


@pytest.mark.parametrize(("behind", "tokens"), [(0.06, 0), (0.08, 3000), (50.0, 3000)])
def test_prompts_wait_for_decodes_that_can_catch_up_only(behind: float, tokens: int) -> None:
    """Two tokens to go save 73 ms; how many tokens it is behind does not matter."""
    world = World()
    seq = world.decoding(64, tpot=0.05, output=3)
    assert 0.06 < credit(seq, 2) < 0.08
    calm = world.add(3000, ttft=60.0)
    world.on_time([seq], -behind)
    assert tokens_of(world.step(), calm) == tokens


def test_a_decode_that_is_five_tokens_behind_lends_what_is_beyond_that() -> None:
    world = World(budget=1 << 16)
    seq = world.decoding(64, tpot=0.05, output=41)
    behind = 5 * PACE * 0.05
    hope = CREDIT * credit(seq, 40) - behind
    assert hope > 0.4
    assert 0.85 * hope < spent(world, seq, -behind) <= hope


def test_chunks_of_several_prompts_share_the_time() -> None:
    world = World()
    seq = world.decoding(64, tpot=0.1)
    prompts = [world.add(300, ttft=60.0) for _ in range(3)]
    world.on_time([seq], 0.093)
    plan = world.step()
    assert world.seconds(plan) <= 0.093
    assert [tokens_of(plan, prompt) for prompt in prompts[:2]] == [300, 300]
    assert LEAST_CHUNK <= tokens_of(plan, prompts[2]) < 300


@pytest.mark.parametrize(("prompt", "room", "tokens"), [(500, 20, 0), (15, 20, 15), (500, 45, 45)])
def test_a_few_tokens_are_worth_a_place_only_if_they_end_the_prompt(
    prompt: int, room: int, tokens: int
) -> None:
    world = World()
    seq = world.decoding(64, tpot=1.0)
    calm = world.add(prompt, ttft=60.0)
    world.on_time([seq], BASE + TOKEN + SCAN * seq.num_tokens + TOKEN * (room + 0.5))
    assert tokens - 8 <= tokens_of(world.step(), calm) <= tokens


def test_prompts_are_left_out_a_bounded_number_of_times() -> None:
    world = World()
    seqs = [world.decoding(64, tpot=0.0112) for _ in range(3)]  # no time for anything else
    late = world.add(2000, tpot=1.0)
    world.now += 100.0  # it runs whatever that costs
    turns = []
    for i in range(4 * (MAX_SKIP + 1)):
        world.on_time(seqs, PACE * 0.0112)
        tokens = tokens_of(world.step(), late)
        if tokens:
            turns.append(i)
            assert tokens == LEAST_CHUNK
    assert turns == [MAX_SKIP + i * (MAX_SKIP + 1) for i in range(4)]


# Decodes that are left out


@pytest.mark.parametrize("ahead", [0.012, -50.0])
def test_a_dear_decode_is_left_out_a_bounded_number_of_times(ahead: float) -> None:
    world = World()
    dear = world.decoding(LONG, tpot=1.0)
    cheap = [world.decoding(64, tpot=0.012) for _ in range(4)]
    turns = []
    for i in range(3 * (MAX_SKIP + 1)):
        world.on_time(cheap, ahead)
        plan = world.step()
        assert all(tokens_of(plan, seq) == 1 for seq in cheap)
        if tokens_of(plan, dear):
            turns.append(i)
        assert dear.skipped <= MAX_SKIP
    gaps = [b - a for a, b in zip([-1, *turns], turns, strict=False)]
    assert len(gaps) >= 3 and max(gaps) <= MAX_SKIP + 1
    if ahead > 0:  # they would be late by it
        assert gaps == [MAX_SKIP + 1] * 3


def test_a_dear_decode_that_is_due_goes_if_nobody_is_late_by_it() -> None:
    world = World()
    dear = world.decoding(LONG, tpot=0.2)
    cheap = [world.decoding(64, tpot=1.0) for _ in range(4)]
    world.on_time([dear], 0.186)
    world.on_time(cheap, 0.93)
    world.add(5000, ttft=60.0)  # somebody waits: time is worth something
    turns = sum(tokens_of(world.step(), dear) for _ in range(10))
    assert 1 <= turns < 10
    late = world.now - (dear.first_token_at or 0.0) - dear.num_output * 0.2
    assert late < 0, "it keeps its own pace"
    assert all(seq.skipped == 0 for seq in cheap)


def test_a_dear_decode_that_is_not_due_leaves_time_to_those_who_wait() -> None:
    world = World()
    dear = world.decoding(LONG, tpot=10.0)
    cheap = [world.decoding(64, tpot=1.0) for _ in range(4)]
    world.on_time([dear, *cheap], 5.0)
    assert tokens_of(world.step(), dear) == 1, "nobody waits"
    world.on_time([dear, *cheap], 5.0)
    world.add(5000, ttft=60.0)
    assert tokens_of(world.step(), dear) == 0


def test_a_quarter_of_a_step_is_dear() -> None:
    for context, tokens in ((5000, 0), (2000, 1)):  # 5 or 2 ms of scan beside 10 ms
        world = World()
        seq = world.decoding(context, tpot=1.0)
        cheap = [world.decoding(64, tpot=0.012) for _ in range(4)]
        world.on_time([seq], 0.5)
        world.on_time(cheap, 0.0115)
        assert tokens_of(world.step(), seq) == tokens


def test_who_is_left_out_can_still_be_in_time_in_the_next_step() -> None:
    world = World()
    dear = world.decoding(LONG, tpot=1.0)
    cheap = [world.decoding(64, tpot=1.0) for _ in range(4)]
    calm = world.add(5000, ttft=60.0)
    world.on_time([dear], 0.3)
    world.on_time(cheap, 5.0)
    plan = world.step()
    assert tokens_of(plan, dear) == 0 and tokens_of(plan, calm) > 0
    assert 0.18 < world.seconds(plan) < 0.3 - (BASE + SCAN * LONG)


def test_alike_decodes_all_go() -> None:
    world = World()
    seqs = [world.decoding(LONG, tpot=10.0) for _ in range(3)]
    world.add(5000, ttft=60.0)
    world.on_time(seqs, 5.0)
    plan = world.step()
    assert all(tokens_of(plan, seq) == 1 for seq in seqs)


# The order of prompts


def test_prompts_go_by_when_they_are_due() -> None:
    world = World(budget=256)
    second = world.add(256, ttft=0.9)
    first = world.add(256, ttft=0.5)
    plan = world.step()
    assert tokens_of(plan, first) == 256 and tokens_of(plan, second) == 0


def test_of_a_long_queue_the_first_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "LOOKED_AT", 2)
    world = World(budget=256)
    seqs = [world.add(256, ttft=ttft) for ttft in (0.9, 0.7, 0.5)]
    plan = world.step()
    assert [tokens_of(plan, seq) for seq in seqs] == [0, 256, 0]


def test_the_fewest_are_late() -> None:
    """The longest of those before a deadline that is missed goes behind."""
    world = World()
    requests = [world.add(n, ttft=t) for n, t in ((10, 1.0), (10, 2.0), (10, 2.5), (10, 4.0))]
    work = [0.9, 1.5, 0.8, 0.9]
    assert _latest(requests, work, world.now) == {1}
    assert _latest(requests, [0.9, 0.9, 0.6, 1.0], world.now) == set()
    assert _latest(requests, [5.0, 0.1, 0.1, 0.1], world.now) == {0}


def test_who_is_late_goes_behind_but_has_a_turn() -> None:
    world = World(budget=1000)
    hopeless = world.add(100_000, ttft=0.5)
    turns = []
    for i in range(3 * (LATE_TURN + 1)):
        world.add(1000, output=1, ttft=5.0)
        if tokens_of(world.step(), hopeless):
            turns.append(i)
    assert turns == [LATE_TURN + i * (LATE_TURN + 1) for i in range(3)]


def test_who_is_late_goes_first_where_there_is_time_to_spare() -> None:
    """A second, less what is reserved for those who may still come."""
    for tokens, first in ((5000, True), (8000, False)):  # 0.5 s, 0.8 s
        world = World(budget=500)
        late = world.add(tokens, ttft=0.0001 * tokens - 0.1)
        in_time = world.add(1000, ttft=1.0)
        plan = world.step()
        assert (tokens_of(plan, late) > 0) is first, tokens
        assert (tokens_of(plan, in_time) > 0) is not first


@pytest.mark.parametrize(
    ("tpot", "ttft", "is_late"),
    [
        (0.08, 2.0, True),  # a tenth of the time is left
        (0.08, 5.0, False),  # but what decodes have saved is spent at full speed
        (10.0, 2.0, False),
    ],
)
def test_who_will_be_late_is_told_from_the_time_that_decodes_leave(
    tpot: float, ttft: float, is_late: bool
) -> None:
    world = World(ttft=100.0)
    others = [world.decoding(20_000, tpot=tpot) for _ in range(3)]
    seq = world.add(10_000, ttft=ttft)  # a second of work
    world.on_time(others, 0.5)
    world.step()
    assert (seq in world.policy._late) is is_late


def test_who_was_preempted_is_due_with_its_next_token() -> None:
    seq = World().add(10, ttft=7.0, tpot=1.0)
    assert _due(seq) == 107.0
    seq.first_token_at, seq.output_token_ids = 103.0, [1, 2, 3]
    assert _due(seq) == pytest.approx(103.0 + 3 * PACE)


def test_of_the_late_who_waited_long_for_little_goes_first() -> None:
    world = World(budget=64)
    large = world.add(50_000, ttft=1.0)
    world.now += 5.0
    small = world.add(64, ttft=1.0)
    world.now += 4.0
    plan = world.step()
    assert tokens_of(plan, small) == 64 and tokens_of(plan, large) == 0


# Who begins


def crowd(count: int, ttft: float, context: int = 20_000) -> Sequence:
    """A prompt that has asked to begin beside so many decodes, all at a long context."""
    world = World(ttft=100.0)
    others = [world.decoding(context, tpot=0.08) for _ in range(count)]
    seq = world.add(context, ttft=ttft, tpot=0.08)
    world.on_time(others, 0.5)
    world.step()
    return seq


def asked(count: int, context: int = 20_000) -> float:
    """Seconds of a second that so many of them ask for."""
    return (count * (2 * TOKEN + SCAN * context) + BASE) / (PACE * 0.08)


def test_a_prompt_waits_until_all_can_keep_their_pace() -> None:
    assert asked(3) < 1 < asked(4)
    for count, status in ((2, Status.RUNNING), (3, Status.WAITING)):
        calm = crowd(count, ttft=600.0)
        assert calm.status is status, count
    assert asked(4, 17_000) > 1 > asked(4, 17_000) - BASE / (PACE * 0.08)
    calm = crowd(3, ttft=600.0, context=17_000)
    assert calm.status is Status.WAITING, "with the weights it is more than a second"


def test_who_cannot_wait_may_crowd_the_others_a_little() -> None:
    assert asked(4) < CROWDED < asked(5)
    for count, status in ((3, Status.RUNNING), (4, Status.WAITING)):
        urgent = crowd(count, ttft=25.0)  # of 2 s of work
        assert urgent.status is status, count


@pytest.mark.parametrize("tpot", [0.01, 0.001])
def test_of_the_late_one_at_a_time_runs_whatever_it_costs_others(tpot: float) -> None:
    """There is time for the prompts of all of them, but not for their pace."""
    world = World()
    decode = world.decoding(64, tpot=1.0)
    late = [world.add(100, output=5, tpot=tpot) for _ in range(3)]
    world.now += 100.0
    for _ in range(3 * 5):
        world.on_time([decode, *(seq for seq in late if seq.decoding)], 0.5)
        world.step()
        assert sum(seq.status is Status.RUNNING for seq in late) <= 1
    assert all(seq.finished for seq in late)


def test_whoever_asks_for_what_cannot_be_is_served_in_the_end() -> None:
    world = World(budget=512, ttft=None)
    targets = (1e-6, 0.02, 0.3, 5.0)
    seqs = [
        world.add(97 * i % 3000 + 1, 3 + i % 11, targets[i % 4], targets[i // 4 % 4])
        for i in range(24)
    ]
    for _ in range(20_000):
        world.step()
        if not world.scheduler.has_unfinished:
            break
    assert [seq.finish_reason for seq in seqs] == ["length"] * 24
