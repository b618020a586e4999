"""How sequences end: stops, errors, aborts at every phase; what is refused; what check() sees."""

import pytest

from scheduling import EOS, TOKEN, finish_all, make_request, make_scheduler, results_for, step
from yocolm.engine.plan import StepResult
from yocolm.engine.request import Request
from yocolm.engine.scheduler import Scheduler
from yocolm.errors import ConfigError, RequestError


class TestEnds:
    def ending(
        self, token: int, length: int = 200, **params: object
    ) -> tuple[str | None, int | str | None]:
        """The finish and stop reasons of a sequence of two prompt tokens that draws ``token``."""
        scheduler = make_scheduler(length=length)
        request = make_request("a", 2, **params)
        scheduler.add(request)
        step(scheduler, token)
        return request.sequences[0].finish_reason, request.sequences[0].stop_reason

    def test_reasons(self) -> None:
        assert self.ending(TOKEN) == (None, None)
        assert self.ending(EOS) == ("stop", None)
        assert self.ending(EOS, max_tokens=1) == ("stop", None)
        assert self.ending(EOS, ignore_eos=True) == (None, None)
        assert self.ending(EOS, ignore_eos=True, stop_token_ids=[EOS]) == ("stop", EOS)
        assert self.ending(TOKEN, stop_token_ids=[TOKEN]) == ("stop", TOKEN)
        assert self.ending(TOKEN, max_tokens=1) == ("length", None)
        assert self.ending(TOKEN, length=3) == ("length", None)
        assert self.ending(TOKEN, length=4, max_tokens=None) == (None, None)

    def test_min_tokens(self) -> None:
        assert self.ending(EOS, min_tokens=2) == (None, None)
        assert self.ending(TOKEN, min_tokens=2, stop_token_ids=[TOKEN]) == (None, None)
        assert self.ending(EOS, min_tokens=1) == ("stop", None)

    def test_stop_string_ends_a_running_sequence(self) -> None:
        scheduler = make_scheduler()
        request = make_request("a", 2)
        scheduler.add(request)
        step(scheduler)
        scheduler.finish(request.sequences[0], "stop", "END")
        scheduler.check()
        assert not scheduler.has_unfinished
        assert request.sequences[0].stop_reason == "END"

    def test_stop_string_in_the_last_token_goes_before_its_length(self) -> None:
        scheduler = make_scheduler()
        request = make_request("a", 2, max_tokens=1)
        scheduler.add(request)
        step(scheduler)
        scheduler.finish(request.sequences[0], "stop", "END")
        assert request.sequences[0].finish_reason == "stop"
        scheduler.check()

    def test_cumulative_logprob(self) -> None:
        scheduler = make_scheduler()
        request = make_request("a", 2, max_tokens=3)
        scheduler.add(request)
        finish_all(scheduler)
        assert request.sequences[0].cumulative_logprob == -1.5

    def test_error_ends_all_samples_of_one_request_only(self) -> None:
        scheduler = make_scheduler()
        bad, good = make_request("bad", 3, n=3), make_request("good", 3)
        scheduler.add(bad)
        scheduler.add(good)
        step(scheduler)
        plan = scheduler.schedule(now=0.0)
        results = results_for(plan)
        results[1] = StepResult(error="logits are not finite")
        changed = scheduler.update(plan, results)
        scheduler.check()
        assert changed == bad.sequences + good.sequences
        assert [seq.finish_reason for seq in changed] == ["error"] * 3 + [None]
        assert [seq.num_output for seq in changed] == [1, 1, 1, 2]
        assert bad.error == "logits are not finite" and good.error is None


class TestAbort:
    def test_waiting(self) -> None:
        scheduler = make_scheduler()
        request = make_request("a", 4)
        scheduler.add(request)
        assert scheduler.abort("a") == request.sequences
        assert request.sequences[0].finish_reason == "abort"
        assert scheduler.schedule(now=0.0).scheduled == ()
        scheduler.check()

    def test_between_chunks(self) -> None:
        scheduler = make_scheduler(budget=3)
        scheduler.add(make_request("a", 8))
        step(scheduler)
        scheduler.abort("a")
        scheduler.check()
        assert scheduler.page_pool.num_free == scheduler.page_pool.capacity

    def test_decoding(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_request("a", 8))
        step(scheduler)
        step(scheduler)
        scheduler.abort("a")
        scheduler.check()
        assert not scheduler.has_unfinished

    def test_preempted(self) -> None:
        scheduler = make_scheduler(pages=3, page_size=2)
        scheduler.add(make_request("old", 2, max_tokens=3))
        scheduler.add(make_request("new", 2, max_tokens=3))
        step(scheduler)
        step(scheduler)
        assert scheduler.num_preemptions == 1
        (seq,) = scheduler.abort("new")
        assert seq.output_token_ids == [TOKEN]
        finish_all(scheduler)

    def test_between_forks(self) -> None:
        scheduler = make_scheduler(slots=2)
        request = make_request("a", 6, n=4)
        scheduler.add(request)
        step(scheduler)  # two run, one of them with copies pending, and two wait
        assert scheduler.abort("a") == request.sequences
        scheduler.check()
        plan = scheduler.schedule(now=0.0)
        assert plan.scheduled == () and plan.copies == ()

    def test_while_its_step_runs(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_request("a", 4, n=2))
        scheduler.add(make_request("b", 4))
        plan = scheduler.schedule(now=0.0)
        scheduler.abort("a")
        scheduler.add(make_request("a", 4))  # the name is free again
        changed = scheduler.update(plan, results_for(plan))
        assert [seq.request.request_id for seq in changed] == ["b"]
        scheduler.check()
        finish_all(scheduler)

    def test_unknown_or_done(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_request("a", 4, max_tokens=1))
        step(scheduler)
        assert scheduler.abort("a") == [] and scheduler.abort("nobody") == []


class TestRefusals:
    def refuse(self, scheduler: Scheduler, request: Request, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            scheduler.add(request)
        scheduler.check()

    def test_prompt(self) -> None:
        scheduler = make_scheduler(length=10)
        self.refuse(scheduler, make_request("a", 0), "no tokens")
        self.refuse(scheduler, make_request("a", 10), "10 tokens leaves no room.*max_model_len=10")
        start = make_request("a", 4, prompt_logprobs=0, prompt_logprobs_start=5)
        self.refuse(scheduler, start, "prompt_logprobs_start=5 is past the end")
        scheduler.add(make_request("a", 9))
        scheduler.add(make_request("scored", 10, max_tokens=0, prompt_logprobs=0))
        self.refuse(scheduler, make_request("a", 2), "'a' is in use")
        finish_all(scheduler)

    def test_what_could_outgrow_the_pool(self) -> None:
        scheduler = make_scheduler(pages=3, page_size=4)
        self.refuse(scheduler, make_request("a", 6, max_tokens=8), "beyond the 12 tokens")
        self.refuse(scheduler, make_request("a", 6, max_tokens=None), "lower max_tokens")
        self.refuse(scheduler, make_request("a", 13, max_tokens=1), "raise kv_memory")
        scheduler.add(make_request("a", 6, max_tokens=7))  # the last token is never computed
        finish_all(scheduler)

    def test_context_limits_what_a_request_can_grow_to(self) -> None:
        scheduler = make_scheduler(pages=3, page_size=4, length=13)
        scheduler.add(make_request("a", 6, max_tokens=None))
        finish_all(scheduler)

    def test_limits(self) -> None:
        with pytest.raises(ConfigError, match="max_num_batched_tokens=0"):
            make_scheduler(budget=0)


class TestCheck:
    def test_sees_a_leaked_page(self) -> None:
        scheduler = make_scheduler()
        scheduler.page_pool.alloc(1)
        with pytest.raises(AssertionError, match="page 1 is miscounted"):
            scheduler.check()

    def test_sees_a_tail_page_with_two_owners(self) -> None:
        scheduler = make_scheduler()
        for name in "ab":
            scheduler.add(make_request(name, 2))
        step(scheduler)
        first, second = scheduler.running
        scheduler.page_pool.free(second.pages)
        second.pages = list(first.pages)
        scheduler.page_pool.fork(second.pages)
        with pytest.raises(AssertionError, match="would write to a shared page"):
            scheduler.check()
