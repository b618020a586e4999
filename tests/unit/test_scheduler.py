"""Chunks, rows, preemption and forks, rule by rule.

Ends, aborts and refusals are in test_scheduler_ends.py, random schedules in
test_scheduler_random.py.
"""

import pytest

from scheduling import EOS, TOKEN, finish_all, make_request, make_scheduler, step, summary
from yocolm.engine.pages import Copy
from yocolm.engine.plan import StepResult, rows_needed
from yocolm.engine.request import Request, Status
from yocolm.engine.scheduler import Scheduler


class TestRowsNeeded:
    @pytest.mark.parametrize(
        ("chunk", "num_prompt", "scored_until", "samples", "rows"),
        [
            ((0, 4), 10, 9, False, ()),  # a chunk in the middle: none
            ((8, 10), 10, 9, True, (1,)),  # the last chunk: its last
            ((0, 1), 1, 0, True, (0,)),  # a prompt of one token has nothing to score
            ((0, 4), 10, 0, False, (0, 1, 2, 3)),  # scoring: row 3 scores a token of the next chunk
            ((8, 10), 10, 8, True, (0, 1)),  # the last prompt row samples and scores nothing
            ((8, 10), 10, 8, False, (0,)),  # scoring only: the last row is of no use
            ((0, 4), 10, 2, False, (2, 3)),  # start in the chunk
            ((0, 4), 10, 6, False, ()),  # start behind the chunk
            ((0, 6), 4, 3, True, (5,)),  # prompt and output recomputed
            ((0, 10), 10, 5, True, (5, 6, 7, 8, 9)),  # recomputed when half scored
            ((12, 13), 10, 9, True, (0,)),  # a decode
        ],
    )
    def test_rows(
        self,
        chunk: tuple[int, int],
        num_prompt: int,
        scored_until: int,
        samples: bool,
        rows: tuple[int, ...],
    ) -> None:
        assert rows_needed(*chunk, scored_until, num_prompt - 1, samples) == rows


class TestChunks:
    def test_prompt_is_cut_by_the_budget_and_only_its_end_has_a_row(self) -> None:
        scheduler = make_scheduler(budget=4)
        scheduler.add(make_request("a", 10, max_tokens=2))
        assert summary(step(scheduler)) == [("a", 0, 4, ())]
        assert summary(step(scheduler)) == [("a", 4, 4, ())]
        assert summary(step(scheduler)) == [("a", 8, 2, (1,))]
        assert summary(step(scheduler)) == [("a", 10, 1, (0,))]
        assert not scheduler.has_unfinished
        assert scheduler.num_steps == 4

    def test_decodes_come_first_then_chunks_in_order_of_arrival(self) -> None:
        scheduler = make_scheduler(budget=8)
        scheduler.add(make_request("a", 3))
        step(scheduler)
        scheduler.add(make_request("b", 5))
        scheduler.add(make_request("c", 5))
        assert summary(step(scheduler)) == [("a", 3, 1, (0,)), ("b", 0, 5, (4,)), ("c", 0, 2, ())]
        plan = step(scheduler)
        assert summary(plan) == [("a", 4, 1, (0,)), ("b", 5, 1, (0,)), ("c", 2, 3, (2,))]
        assert (plan.num_single, plan.num_tokens, plan.num_rows) == (2, 5, 3)

    def test_chunk_of_one_token_stands_with_the_decodes(self) -> None:
        scheduler = make_scheduler(budget=4)
        scheduler.add(make_request("a", 3))
        scheduler.add(make_request("b", 2))
        plan = step(scheduler)
        assert summary(plan) == [("b", 0, 1, ()), ("a", 0, 3, (2,))]
        assert plan.num_single == 1

    def test_more_decodes_than_budget(self) -> None:
        scheduler = make_scheduler(budget=2)
        for name in "abc":
            scheduler.add(make_request(name, 1, max_tokens=3))
        assert summary(step(scheduler)) == [("a", 0, 1, (0,)), ("b", 0, 1, (0,))]
        assert summary(step(scheduler)) == [("a", 1, 1, (0,)), ("b", 1, 1, (0,))]
        finish_all(scheduler)

    def test_nobody_overtakes_a_request_that_waits_for_pages(self) -> None:
        scheduler = make_scheduler(pages=4)
        scheduler.add(make_request("a", 8, max_tokens=2))
        scheduler.add(make_request("large", 12, max_tokens=1))
        scheduler.add(make_request("small", 1, max_tokens=1))
        assert summary(step(scheduler)) == [("a", 0, 8, (7,))]
        assert summary(step(scheduler)) == [("a", 8, 1, (0,))]
        assert [name for name, *_ in summary(step(scheduler))] == ["small", "large"]

    def test_admission_is_limited_by_slots(self) -> None:
        scheduler = make_scheduler(slots=2)
        for name in "abc":
            scheduler.add(make_request(name, 2, max_tokens=2))
        assert [name for name, *_ in summary(step(scheduler))] == ["a", "b"]
        assert [name for name, *_ in summary(step(scheduler))] == ["a", "b"]
        assert [name for name, *_ in summary(step(scheduler))] == ["c"]


class TestPromptLogprobs:
    def test_rows_follow_the_chunks_and_name_their_targets(self) -> None:
        scheduler = make_scheduler(budget=4)
        scheduler.add(make_request("a", 6, prompt_logprobs=0))
        first, last = step(scheduler), step(scheduler)
        assert summary(first) == [("a", 0, 4, (0, 1, 2, 3))]
        assert first.scheduled[0].targets == [101, 102, 103, 104]
        assert summary(last) == [("a", 4, 2, (0, 1))]
        assert last.scheduled[0].targets == [105]

    def test_only_the_asking_request_pays(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_request("a", 4))
        scheduler.add(make_request("b", 4, prompt_logprobs=1))
        plan = step(scheduler)
        assert summary(plan) == [("a", 0, 4, (3,)), ("b", 0, 4, (0, 1, 2, 3))]
        assert [entry.num_scored for entry in plan.scheduled] == [0, 3]

    @pytest.mark.parametrize(
        ("start", "rows"), [(0, (0, 1, 2)), (1, (0, 1, 2)), (2, (1, 2)), (3, (2,)), (4, ())]
    )
    def test_start(self, start: int, rows: tuple[int, ...]) -> None:
        scheduler = make_scheduler()
        params = {"prompt_logprobs": 0, "prompt_logprobs_start": start, "max_tokens": 0}
        scheduler.add(make_request("a", 4, **params))
        assert summary(step(scheduler)) == [("a", 0, 4, rows)]

    def test_scoring_only_draws_nothing(self) -> None:
        scheduler = make_scheduler(budget=3)
        request = make_request("a", 4, prompt_logprobs=0, max_tokens=0)
        scheduler.add(request)
        step(scheduler)
        plan = scheduler.schedule(now=0.0)
        assert summary(plan) == [("a", 3, 1, ())]
        assert scheduler.update(plan, [StepResult()]) == request.sequences
        assert request.sequences[0].finish_reason == "length"
        assert request.sequences[0].output_token_ids == []
        scheduler.check()

    def test_rows_delivered_before_a_preemption_are_not_scored_again(self) -> None:
        scheduler = make_scheduler(pages=5, page_size=2, budget=3)
        scheduler.add(make_request("old", 3, max_tokens=4))
        step(scheduler)
        scheduler.add(make_request("new", 6, prompt_logprobs=0, max_tokens=1))
        assert summary(step(scheduler)) == [("old", 3, 1, (0,)), ("new", 0, 2, (0, 1))]
        assert summary(step(scheduler)) == [("old", 4, 1, (0,))]  # on a page of the new one
        assert scheduler.num_preemptions == 1
        assert summary(step(scheduler)) == [("old", 5, 1, (0,))]
        assert summary(step(scheduler)) == [("new", 0, 3, (2,))]
        assert summary(step(scheduler)) == [("new", 3, 3, (0, 1, 2))]
        assert not scheduler.has_unfinished


class TestPreemption:
    def test_newest_goes_and_is_the_first_to_return_with_its_output(self) -> None:
        scheduler = make_scheduler(pages=4, page_size=2)
        old, new, later = (make_request(name, 3, max_tokens=4) for name in ("old", "new", "later"))
        for request in (old, new, later):
            scheduler.add(request)
        step(scheduler)
        step(scheduler)
        assert scheduler.page_pool.num_free == 0
        assert summary(step(scheduler)) == [("old", 4, 1, (0,))]
        (seq,) = new.sequences
        assert (seq.status, seq.slot, seq.pages, seq.num_computed) == (Status.WAITING, None, [], 0)
        assert seq.output_token_ids == [TOKEN, TOKEN]
        assert scheduler.waiting == [seq, *later.sequences]
        assert summary(step(scheduler)) == [("old", 5, 1, (0,))]
        assert old.finished
        plan = step(scheduler)  # prompt and output again, then the third token: one draw
        assert summary(plan) == [("new", 0, 5, (4,))]
        assert plan.scheduled[0].token_ids == [100, 101, 102, TOKEN, TOKEN]
        assert plan.scheduled[0].samples_n == 1
        assert seq.output_token_ids == [TOKEN] * 3
        finish_all(scheduler)

    def test_the_newest_may_be_the_one_that_needs_the_page(self) -> None:
        scheduler = make_scheduler(pages=3, page_size=2)
        scheduler.add(make_request("old", 2, max_tokens=3))
        scheduler.add(make_request("new", 2, max_tokens=3))
        step(scheduler)
        assert summary(step(scheduler)) == [("old", 2, 1, (0,))]
        assert [seq.request.request_id for seq in scheduler.waiting] == ["new"]
        finish_all(scheduler)

    def test_preempted_sequence_waits_until_all_its_tokens_fit(self) -> None:
        """With room for a chunk only it would be recomputed, and preempted, again and again."""
        scheduler = make_scheduler(pages=8, page_size=1, budget=2)
        scheduler.add(make_request("old", 3, max_tokens=6))
        step(scheduler)
        step(scheduler)
        scheduler.add(make_request("new", 4, max_tokens=4))
        finish_all(scheduler)
        assert scheduler.num_preemptions == 1

    def test_two_prompts_that_fill_the_pool_together(self) -> None:
        scheduler = make_scheduler(pages=4, budget=5)
        scheduler.add(make_request("a", 12, max_tokens=1))
        scheduler.add(make_request("b", 12, max_tokens=1))
        names = [name for _ in range(6) for name, *_ in summary(step(scheduler))]
        assert names == ["a"] * 3 + ["b"] * 3
        assert not scheduler.has_unfinished and scheduler.num_preemptions == 0

    def test_pages_held_by_others_are_an_error_not_a_loop(self) -> None:
        scheduler = make_scheduler(pages=4)
        scheduler.page_pool.alloc(2)
        request = make_request("a", 12, max_tokens=1)
        scheduler.add(request)
        scheduler.add(make_request("b", 4, max_tokens=1))
        plan = scheduler.schedule(now=0.0)
        assert plan.scheduled == () and plan.failed == tuple(request.sequences)
        assert scheduler.update(plan, []) == request.sequences
        assert request.sequences[0].finish_reason == "error"
        assert request.error is not None and "need 3 pages" in request.error
        assert summary(scheduler.schedule(now=0.0)) == [("b", 0, 4, (3,))]

    def test_lone_decode_without_a_page_is_an_error_not_a_loop(self) -> None:
        scheduler = make_scheduler(pages=2)
        request = make_request("a", 4, max_tokens=4)
        scheduler.add(request)
        step(scheduler)
        scheduler.page_pool.alloc(1)
        plan = scheduler.schedule(now=0.0)
        assert plan.scheduled == () and plan.failed == tuple(request.sequences)
        assert not scheduler.has_unfinished


class TestForks:
    def fork(self, scheduler: Scheduler, num_prompt: int, **params: object) -> Request:
        request = make_request("a", num_prompt, **params)
        scheduler.add(request)
        plan = step(scheduler)
        assert plan.scheduled[0].samples_n == request.params.n and plan.num_rows == 1
        return request

    def test_full_pages_are_shared_and_tail_and_slot_copied(self) -> None:
        scheduler = make_scheduler()
        request = self.fork(scheduler, 10, n=3)
        assert [seq.pages for seq in request.sequences] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
        assert [seq.slot for seq in request.sequences] == [1, 2, 3]
        assert [seq.num_computed for seq in request.sequences] == [10, 10, 10]
        plan = step(scheduler)
        assert plan.copies == (
            Copy("slot", 1, 2),
            Copy("page", 3, 4),
            Copy("slot", 1, 3),
            Copy("page", 3, 5),
        )
        assert summary(plan) == [("a", 10, 1, (0,))] * 3
        assert [entry.seq for entry in plan.scheduled] == request.sequences
        assert step(scheduler).copies == ()
        finish_all(scheduler)

    def test_prompt_that_ends_with_a_page_has_no_tail(self) -> None:
        scheduler = make_scheduler()
        request = self.fork(scheduler, 8, n=2)
        assert [seq.pages for seq in request.sequences] == [[1, 2], [1, 2]]
        assert step(scheduler).copies == (Copy("slot", 1, 2),)
        assert [seq.pages for seq in request.sequences] == [[1, 2, 3], [1, 2, 4]]

    def test_prompt_is_scored_once(self) -> None:
        scheduler = make_scheduler(slots=1)
        request = make_request("a", 4, n=2, prompt_logprobs=0, max_tokens=2)
        scheduler.add(request)
        assert summary(step(scheduler)) == [("a", 0, 4, (0, 1, 2, 3))]
        assert summary(step(scheduler)) == [("a", 4, 1, (0,))]
        assert summary(step(scheduler)) == [("a", 0, 5, (4,))]  # the sibling recomputes: one row
        assert request.finished

    def test_sibling_without_room_waits_in_front(self) -> None:
        scheduler = make_scheduler(slots=2)
        first = make_request("a", 6, n=4, max_tokens=3)
        scheduler.add(first)
        scheduler.add(make_request("b", 2, max_tokens=1))
        scheduler.add(make_request("c", 2, max_tokens=1))
        step(scheduler)  # "b" ends at once, after the fork of "a" found both slots taken
        assert [seq.status for seq in first.sequences] == [Status.RUNNING] + [Status.WAITING] * 3
        assert scheduler.waiting[:3] == first.sequences[1:]
        plan = step(scheduler)
        assert [(e.seq.index, e.start, e.num_tokens) for e in plan.scheduled] == [
            (0, 6, 1),
            (1, 0, 7),
        ]
        finish_all(scheduler)
        assert [seq.output_token_ids for seq in first.sequences] == [[TOKEN] * 3] * 4

    def test_first_tokens_that_end_their_samples_take_nothing(self) -> None:
        scheduler = make_scheduler()
        request = make_request("a", 6, n=3)
        scheduler.add(request)
        plan = scheduler.schedule(now=0.0)
        changed = scheduler.update(plan, [StepResult([TOKEN, EOS, TOKEN], [0.0] * 3)])
        assert changed == request.sequences
        assert [seq.finish_reason for seq in changed] == [None, "stop", None]
        assert [seq.slot for seq in changed] == [1, None, 2]
        assert scheduler.schedule(now=0.0).copies == (Copy("slot", 1, 2), Copy("page", 2, 3))

    def test_all_samples_end_at_their_first_token(self) -> None:
        scheduler = make_scheduler()
        request = self.fork(scheduler, 6, n=3, max_tokens=1)
        assert [seq.finish_reason for seq in request.sequences] == ["length"] * 3
        assert not scheduler.has_unfinished

    def test_parent_that_ends_leaves_its_state_until_it_is_copied(self) -> None:
        scheduler = make_scheduler(pages=4, slots=3)
        request = make_request("a", 6, n=2, max_tokens=8)
        scheduler.add(request)
        plan = scheduler.schedule(now=0.0)
        scheduler.update(plan, [StepResult([EOS, TOKEN], [0.0, 0.0])])
        scheduler.check()
        parent, sibling = request.sequences
        assert parent.finished and sibling.pages == [1, 3] and sibling.slot == 2
        scheduler.add(make_request("b", 8, max_tokens=1))
        plan = step(scheduler)
        assert plan.copies == (Copy("slot", 1, 2), Copy("page", 2, 3))
        assert summary(plan) == [("a", 6, 1, (0,))]  # page 2 is not given to "b" in this step,
        plan = step(scheduler)
        assert summary(plan) == [("a", 7, 1, (0,)), ("b", 0, 8, (7,))]  # but it is in the next

    def test_copies_for_a_sibling_that_ends_are_dropped(self) -> None:
        scheduler = make_scheduler()
        request = self.fork(scheduler, 6, n=3)
        scheduler.finish(request.sequences[1], "stop", "a string")
        scheduler.check()
        scheduler.add(make_request("b", 4))
        plan = step(scheduler)
        assert plan.copies == (Copy("slot", 1, 3), Copy("page", 2, 4))
        assert plan.scheduled[-1].seq.pages == [3] and plan.scheduled[-1].seq.slot == 2

    def test_copies_for_a_preempted_sibling_are_dropped(self) -> None:
        scheduler = make_scheduler(pages=4, page_size=2)
        scheduler.add(make_request("old", 2, max_tokens=3))
        scheduler.add(make_request("a", 3, n=2, max_tokens=2))
        step(scheduler)
        assert scheduler.page_pool.num_free == 0
        plan = step(scheduler)  # the old one needs a page: the sibling's tail
        assert plan.copies == () and scheduler.num_preemptions == 1
        assert [(e.seq.request.request_id, e.seq.index) for e in plan.scheduled] == [
            ("old", 0),
            ("a", 0),
        ]
        finish_all(scheduler)


def test_scheduler_takes_the_time_as_an_argument() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 2)
    scheduler.add(request)
    scheduler.schedule(now=12.5)
    assert request.first_scheduled == 12.5
