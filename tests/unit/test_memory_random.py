"""Random schedules with all that memory can do: kept prefixes, swapping, priorities, policies.

The fake model of tests/random_schedules.py runs them: its state is the tokens themselves, so a hit
on a foreign prefix, a stale copy or a page handed out too early shows up as foreign tokens.
More, and others: YOCOLM_TEST_OPERATIONS and YOCOLM_TEST_SEED.
"""

import os
import random
from collections import Counter, deque
from dataclasses import dataclass, field

from random_schedules import EOS, STOP, FakeRunner, Scenario
from yocolm.engine.cost import CostModel, StepLoad
from yocolm.engine.memory import Memory
from yocolm.engine.pages import PagePool, SlotPool
from yocolm.engine.plan import Plan, Scheduled, StepResult
from yocolm.engine.policy import Fcfs, Traffic
from yocolm.engine.prefix import PrefixCache
from yocolm.engine.request import Request
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.scheduler import Scheduler
from yocolm.engine.swap_space import Move, SwapSpace
from yocolm.engine.transfers import Transfers
from yocolm.errors import RequestError

SEED = int(os.environ.get("YOCOLM_TEST_SEED", "0"))
OPERATIONS = int(os.environ.get("YOCOLM_TEST_OPERATIONS", "12000"))


class Whim(CostModel):
    """Costs at random: every choice that hangs on them is made both ways."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def prefill_seconds(self, start: int, stop: int) -> float:
        return (stop - start) * self.rng.random()

    def swap_seconds(self, num_bytes: float) -> float:
        return self.rng.random()

    def decode_seconds(self, context: int) -> float:
        return self.rng.random() * context

    def solo_ttft(self, num_prompt: int, budget: int = 0) -> float:
        return num_prompt * self.rng.random()

    def solo_tpot(self, context: int) -> float:
        return self.rng.random()

    def add(
        self, load: StepLoad, start: int, num_tokens: int, num_rows: int, draws: int = 0
    ) -> None:
        load.tokens += num_tokens
        load.sequences += 1

    def seconds(self, load: StepLoad) -> float:
        return load.tokens * self.rng.random()


@dataclass
class SwappingRunner(FakeRunner):
    """A fake model with a swap space whose moves end some time later, or fail."""

    rng: random.Random = field(default_factory=random.Random)
    failing: float = 0.0
    stateless: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.under_way: deque[Move] = deque()
        self.blocks: dict[int, list[int | None]] = {}
        self.places: dict[int, list[int]] = {}
        self.writes: Counter[int] = Counter()

    def check_plan(self, plan: Plan) -> None:
        scheduler = self.scheduler
        assert plan.num_tokens <= scheduler.max_num_batched_tokens
        assert len({entry.seq.order for entry in plan.scheduled}) == len(plan.scheduled)
        written = [(copy.kind, copy.dst) for copy in plan.copies]
        assert len(set(written)) == len(written), "two copies to one place"
        assert not set(written) & {(copy.kind, copy.src) for copy in plan.copies}
        for entry in plan.scheduled:
            assert entry.num_tokens >= 1 and entry.start == entry.seq.num_computed
            assert entry.rows == self.wanted_rows(entry)

    def begin(self, plan: Plan) -> None:
        for move in plan.moves:
            self.events["out" if move.out else "back"] += 1
            self.under_way.append(move)

    def poll(self) -> None:
        """Some of the moves end now."""
        while self.under_way and self.rng.random() < 0.5:
            self.end(self.under_way.popleft())

    def end(self, move: Move) -> None:
        error = "broken" if self.rng.random() < self.failing else None
        if error is not None:
            self.events["failed move"] += 1
            for page, _ in () if move.out else move.pages:
                self.pages[page] = [-1] * len(self.pages[page])  # nothing of use
        elif move.out:
            for page, block in move.pages:
                self.blocks[block] = list(self.pages[page])
            if move.state is not None:
                self.places[move.state[1]] = list(self.slots[move.state[0]])
        else:
            for page, block in move.pages:
                self.pages[page] = list(self.blocks[block])
            if move.state is not None:
                self.slots[move.state[0]] = list(self.places[move.state[1]])
        self.scheduler.moved(move.ticket, error)

    def count_events(self, entry: Scheduled) -> None:
        if entry.seq.num_cached == entry.start > 0 and not entry.seq.num_output:
            self.events["hit"] += 1

    def check_kept(self) -> None:
        """What is kept is what it says: pages hold the tokens on the way to them."""
        cache = self.scheduler.memory.cache
        assert cache is not None
        pending = {copy.dst for _, copy, _ in self.scheduler.memory.copies._pending}
        for slot, checkpoint in cache._checkpoints.items():
            path: list[int] = []
            node = checkpoint.node
            while node.parent is not None:
                path = [t for t in self.pages[node.page] if t is not None] + path
                node = node.parent
            if slot not in pending:
                tokens = self.slots[slot]
                assert len(tokens) == checkpoint.num_tokens, "a state of another length"
                assert tokens[: len(path)] == path, "a state of other tokens"


class MemoryScenario(Scenario):
    """As its parent, with shared prompts, replies that are continued, and all of memory's means."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        page_size = rng.randint(1, 5)
        self.room = rng.randint(6, 60)
        pages = PagePool(2 + self.room // page_size, page_size)
        self.seqs = rng.randint(1, 6)
        slots = SlotPool(self.seqs + 1 + rng.choice([0, 0, 1, 3, 9]))
        cost = Whim(rng)
        cache = PrefixCache(
            pages,
            slots,
            stateful=True,
            page_bytes=page_size,
            slot_bytes=2,
            seconds=cost.prefill_seconds,
        )
        space = SwapSpace(rng.choice([0, 3, 10, 99]), rng.choice([1, 2, 9]))
        transfers = Transfers(space, page_size, page_size, 2) if rng.random() < 0.9 else None
        self.scheduler = Scheduler(
            pages,
            slots,
            rng.choice([1, 2, 3, 4, 6, 10, 64]),
            self.seqs,
            rng.choice([24, 60]),
            Memory(pages, slots, cache, transfers, cost, spacing=rng.choice([3, 8, 1000])),
            rng.choice([Fcfs, lambda: Traffic(cost)])(),
        )
        self.runner: SwappingRunner = SwappingRunner(
            self.scheduler, rng=rng, failing=rng.choice([0.0, 0.0, 0.2])
        )
        self.requests: list[Request] = []
        self.interrupted: set[tuple[float, int, int]] = set()
        self.trouble = rng.choice([0.0, 0.05, 0.3])
        self.now = 0.0
        self.prompts: list[list[int]] = [[1000 + i for i in range(self.room)]]

    def step(self) -> None:
        self.now += self.rng.random()
        self.runner.poll()
        self.scheduler.check()
        plan = self.scheduler.schedule(self.now)
        self.runner.begin(plan)
        if self.rng.random() < self.trouble / 10:
            return self.fail(plan)
        results = [self.maybe_spoil(entry, result) for entry, result in self.run_plan(plan)]
        self.maybe_abort()
        changed = self.scheduler.update(plan, results, self.now)
        self.runner.check_kept()
        for seq in changed:
            if not seq.finished and self.rng.random() < self.trouble / 5:
                self.scheduler.finish(seq, "stop", "a stop string")
                self.interrupted.add(seq.order)
        self.scheduler.check()

    def fail(self, plan: Plan) -> None:
        """The step raises before anything is copied: those in it fail, others compute anew."""
        self.runner.events["failed step"] += 1
        self.scheduler.preempt_all()
        for entry in plan.scheduled:
            for seq in entry.seq.request.sequences:
                if not seq.finished:
                    self.interrupted.add(seq.order)
        results = [StepResult(error="out of memory")] * len(plan.scheduled)
        self.scheduler.update(plan, results, self.now)
        self.scheduler.check()

    def add_request(self) -> None:
        rng, number = self.rng, len(self.requests)
        base = rng.choice(self.prompts)
        done = [s for r in self.requests for s in r.sequences if s.finished and s.num_output]
        if done and rng.random() < 0.4:
            base = rng.choice(done).token_ids
        prompt = base[: rng.randint(1, len(base))]
        prompt = prompt + [5_000 + rng.randint(0, 3) for _ in range(rng.choice([0, 0, 1, 3, 7]))]
        self.prompts.append(prompt)
        scoring = rng.random() < 0.3
        rest = max(self.room - len(prompt), 1)
        max_tokens = rng.choice([0 if scoring else 1, 1, 2, rest // 2 + 1, rest])
        params = SamplingParams(
            n=1 if max_tokens == 0 else rng.choice([1, 1, 1, 2, 3]),
            seed=rng.randint(0, 2),
            max_tokens=max_tokens,
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice([None, [STOP]]),
            prompt_logprobs=rng.randint(0, 2) if scoring else None,
            prompt_logprobs_start=rng.randint(0, len(prompt)) if scoring else 0,
        )
        request = Request(str(number), prompt, params, self.now, frozenset({EOS}))
        request.priority = rng.choice([0, 0, 0, -2, 3])
        try:
            self.scheduler.add(request)
        except RequestError:
            return
        self.requests.append(request)

    def check_end(self) -> None:
        while self.scheduler.awaits_moves:
            self.runner.poll()
        self.scheduler.check()
        super().check_end()
        self.scheduler.memory.distrust()
        self.scheduler.memory.copies.issue()
        pages, slots = self.scheduler.page_pool, self.scheduler.slot_pool
        assert pages.num_free == pages.capacity and slots.num_free == slots.capacity


def test_random_schedules_equal_solo_runs_and_leave_nothing() -> None:
    events: Counter[str] = Counter()
    done, seed = 0, SEED
    while done < OPERATIONS:
        scenario = MemoryScenario(seed)
        try:
            scenario.run()
        except AssertionError as error:
            raise AssertionError(f"scenario {seed}: {error}") from error
        done += scenario.scheduler.num_steps + len(scenario.requests)
        events += scenario.runner.events
        events["preempted"] += scenario.scheduler.num_preemptions
        events["swapped"] += scenario.scheduler.memory.num_swaps
        cache = scenario.scheduler.memory.cache
        assert cache is not None
        events["evicted state"] += cache.stats.evicted_states
        events["evicted page"] += cache.stats.evicted_pages
        seed += 1
    wanted = "hit out back preempted swapped evicted state evicted page failed move failed step"
    for name in ("hit", "out", "back", "preempted", "swapped", "evicted state", "evicted page"):
        assert events[name] > 15, (name, events)
    assert events["failed move"] and events["failed step"], wanted
