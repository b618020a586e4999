"""Random requests, arrivals, aborts, budgets and tiny pools: every request ends as it does alone.

Between steps everything that nobody owns is filled with NaN, so that a stale page or slot shows.
"""

import random
from collections import Counter
from typing import Any

import pytest

from blocks import shrink_blocks
from tiny import (
    FAMILIES,
    GROWING,
    VOCAB,
    assert_dense,
    assert_empty,
    assert_same,
    make_engine,
    poison,
    run_one,
    watch_plans,
)
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.sampling_params import SamplingParams
from yocolm.errors import RequestError

EOS = 3
MAX_STEPS = 1500
SCENARIOS = 12  # for each family


def random_params(rng: random.Random, prompt_length: int, room: int) -> SamplingParams:
    """Any mixture of what a request can ask for; outputs up to half the room of all requests."""
    scoring = rng.random() < 0.5
    max_tokens = rng.choice([0 if scoring else 1, room // 4, room // 2, room // 2])
    plain = rng.random() < 0.4
    return SamplingParams(
        n=1 if max_tokens == 0 else rng.choice([1, 1, 1, 2, 4]),
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_p=1.0 if plain else rng.uniform(0.5, 1),
        top_k=0 if plain else rng.randint(0, 30),
        min_p=0.0 if plain else rng.choice([0.0, 0.05]),
        presence_penalty=0.0 if plain else rng.uniform(-0.5, 1.5),
        frequency_penalty=0.0 if plain else rng.uniform(-0.5, 1.5),
        repetition_penalty=1.0 if plain else rng.choice([1.0, 1.3]),
        logit_bias={} if plain else {rng.randrange(VOCAB): rng.uniform(-5, 5), EOS: 2.0},
        seed=rng.randrange(2**63),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, max_tokens // 2, max_tokens]),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=rng.choice([None, [rng.randrange(VOCAB) for _ in range(3)]]),
        logprobs=rng.choice([None, 0, 2]),
        prompt_logprobs=rng.randint(0, 2) if scoring else None,
        prompt_logprobs_start=rng.randint(0, prompt_length) if scoring else 0,
    )


class Scenario:
    """One engine and its requests; everything follows from the seed."""

    def __init__(self, seed: int, name: str) -> None:
        self.rng = random.Random(f"{name} {seed}")
        self.name, self.dtype = name, "float32" if seed % 2 else "float64"
        page_size = self.rng.choice([1, 2, 3, 4, 8])
        keeps = seed % 3 > 0  # prefixes, and what is preempted
        self.room = self.rng.randint(10, 32)  # tokens that the pages hold, about
        self.limits: dict[str, Any] = {"length": self.rng.choice([24, 200]), "eos": (EOS,)}
        self.engine = make_engine(
            name,
            self.dtype,
            pages=1 + self.room // page_size,
            page_size=page_size,
            seqs=self.rng.choice([1, 3, 4, 6]),
            budget=self.rng.choice([1, 2, 3, 5, 8, 40]),
            caching=keeps,
            checkpoints=self.rng.choice([0, 2, 9]),
            swap=self.rng.choice([0, "4MB"]) if keeps else 0,
            checkpoint_spacing=page_size * self.rng.choice([1, 3, 1000]),
            policy=self.rng.choice(["fcfs", "traffic"]) if keeps else "fcfs",
            **self.limits,
        )
        if keeps and self.rng.random() < 0.7:
            self.engine.cost.swap_seconds = lambda num_bytes: 0.0
        self.prompts: list[list[int]] = []
        self.plans = watch_plans(self.engine)
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.outputs: dict[str, RequestOutput] = {}

    def run(self) -> Counter[str]:
        to_add, steps = self.rng.randint(3, 6), 0
        while to_add or self.engine.has_unfinished_requests():
            while to_add and self.rng.random() < 0.4:
                self.add()
                to_add -= 1
            if self.rng.random() < 0.03:
                self.abort()
            poison(self.engine)
            for output in self.engine.step():
                self.keep(output)
            self.engine.check()
            self.prompts += [
                out.prompt_token_ids + s.token_ids
                for out in self.outputs.values()
                for s in out.outputs
                if out.finished
            ][-2:] * (self.rng.random() < 0.1)
            steps += 1
            assert steps < MAX_STEPS, "no end"
        assert_empty(self.engine)
        self.compare()
        return self.events()

    def add(self) -> None:
        request_id = str(len(self.requests))
        prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, self.room // 3))]
        if self.prompts and self.rng.random() < 0.6:  # as an earlier one begins, or all of it
            earlier = self.rng.choice(self.prompts)
            prompt = (earlier[: self.rng.randint(1, len(earlier))] + prompt)[: self.room // 3]
        self.prompts.append(prompt)
        params = random_params(self.rng, len(prompt), self.room)
        try:
            self.engine.add_request(request_id, prompt, params)
        except RequestError as error:
            assert "KV pages" in str(error) or "max_model_len" in str(error)
        else:
            self.requests[request_id] = prompt, params

    def abort(self) -> None:
        unfinished = list(self.engine.scheduler.requests)
        if unfinished:
            output = self.engine.abort(self.rng.choice(unfinished))
            assert output is not None and self.engine.abort(output.request_id) is None
            assert any(sample.finish_reason == "abort" for sample in output.outputs)
            self.keep(output)
            self.engine.check()

    def keep(self, output: RequestOutput) -> None:
        """Outputs only ever grow, and nothing follows the finished one."""
        before = self.outputs.get(output.request_id)
        if before is not None:
            assert not before.finished
            for old, new in zip(before.outputs, output.outputs, strict=False):
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
        self.outputs[output.request_id] = output

    def compare(self) -> None:
        assert set(self.outputs) == set(self.requests)
        for request_id, (prompt, params) in self.requests.items():
            output = self.outputs[request_id]
            assert output.finished
            alone = run_one(make_engine(self.name, self.dtype, **self.limits), prompt, params)
            assert_dense(alone, self.name, self.dtype, is_greedy=False)
            if any(sample.finish_reason == "abort" for sample in output.outputs):
                for ours, theirs in zip(output.outputs, alone.outputs, strict=False):
                    assert theirs.token_ids[: len(ours.token_ids)] == ours.token_ids
            else:
                assert_same(output, alone, self.dtype)

    def events(self) -> Counter[str]:
        ends = [s.finish_reason for output in self.outputs.values() for s in output.outputs]
        return Counter(
            {
                "preempted": self.engine.scheduler.num_preemptions,
                "swapped": self.engine.scheduler.memory.num_swaps,
                "hit": sum(out.num_cached_tokens > 0 for out in self.outputs.values()),
                "copied": sum(len(plan.copies) for plan in self.plans),
                "mixed": sum(0 < p.num_single < len(p.scheduled) for p in self.plans),
                "chunked": sum(e.stop < e.seq.num_tokens for p in self.plans for e in p.scheduled),
                **Counter(map(str, ends)),
            }
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_requests_in_random_schedules_equal_solo_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: Counter[str] = Counter()
    for seed in range(SCENARIOS):
        with monkeypatch.context() as patch:
            if seed % 4 > 1:
                shrink_blocks(patch)
            try:
                events += Scenario(seed, name).run()
            except AssertionError as error:
                raise AssertionError(f"scenario {seed}: {error}") from error
    # They would prove little if these did not happen.
    wanted = ["copied", "mixed", "chunked", "stop", "length", "abort"]
    grown = ["preempted", "hit"] * (name in GROWING)
    for event in wanted + grown:
        assert events[event] > 0, (name, events)
