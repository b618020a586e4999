"""Continuous batching with fast prefill: who advances in a step, by how many tokens, which rows.

The rules, in the order in which ``schedule`` applies them:

1. First come, first served. A sequence's place never changes, also when it is preempted.
2. Decodes first, one token each, oldest first. A decode that finds no free page preempts the
   newest running sequence, which may be itself.
3. Then prompts, in chunks as large as the budget allows. A sequence is admitted when a slot and
   the pages of *all* its tokens are free, and takes them at once. So a prompt never runs out of
   pages half-way, a preempted sequence does not start over in room too small for it, and at most
   one sequence is half computed between steps.
4. A preempted sequence keeps its output and recomputes prompt and output; prompt rows already
   delivered are not scored again, tokens already drawn are not drawn again.

``add`` refuses a request that could outgrow the pool while alone in it, so the oldest sequence
always advances in the end, and everything ends. (vLLM instead has the pool hold ``max_model_len``
from the start; here a small pool serves short requests of a long-context model.)
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence as Series
from operator import attrgetter

from yocolm.engine.outputs import FinishReason
from yocolm.engine.pages import Copy, PagePool, PendingCopies, SlotPool
from yocolm.engine.plan import Plan, Scheduled, StepResult, next_chunk
from yocolm.engine.request import Request, Sequence, Status
from yocolm.errors import ConfigError, RequestError

_by_order = attrgetter("order")


class Scheduler:
    """Owns the queue and decides each step; ``schedule``, run the plan, ``update``, and again.

    ``abort`` and ``finish`` may be called at any time, but not while a plan is being run.
    """

    def __init__(
        self,
        page_pool: PagePool,
        slot_pool: SlotPool,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        limits = {
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
        }
        for name, value in limits.items():
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        self.page_pool = page_pool
        self.slot_pool = slot_pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.requests: dict[str, Request] = {}
        self.waiting: list[Sequence] = []  # both lists are in order of arrival
        self.running: list[Sequence] = []
        self.num_added = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self._copies = PendingCopies(page_pool, slot_pool)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue ``request``. Raises RequestError if it could never be served."""
        if request.request_id in self.requests:
            raise RequestError(f"request_id {request.request_id!r} is in use: choose another")
        self.check_servable(request)
        request.number = self.num_added
        self.num_added += 1
        self.requests[request.request_id] = request
        self.waiting.extend(request.sequences)

    def check_servable(self, request: Request) -> None:
        """Raise RequestError if ``request`` could never be served. Changes nothing."""
        length, params = request.num_prompt, request.params
        if length == 0:
            raise RequestError("the prompt has no tokens: give at least one")
        if length + (params.max_tokens != 0) > self.max_model_len:
            what = "exceeds" if length > self.max_model_len else "leaves no room for output within"
            raise RequestError(
                f"a prompt of {length} tokens {what} max_model_len={self.max_model_len}: shorten it"
            )
        if params.prompt_logprobs_start > length:
            raise RequestError(
                f"prompt_logprobs_start={params.prompt_logprobs_start} is past the end of "
                f"a prompt of {length} tokens: lower it"
            )
        room = self.page_pool.capacity * self.page_pool.page_size
        if request.max_computed(self.max_model_len) > room:
            raise RequestError(
                f"a prompt of {length} tokens with max_tokens={params.max_tokens} may grow beyond "
                f"the {room} tokens that the KV pages hold: lower max_tokens or raise kv_memory"
            )

    def abort(self, request_id: str) -> list[Sequence]:
        """End what is unfinished of a request and return it; nothing if it is done or unknown."""
        request = self.requests.get(request_id)
        return [] if request is None else self._finish_all(request, "abort")

    def fail(self, request: Request, error: str) -> list[Sequence]:
        """End what is unfinished of ``request`` because of ``error``, and return it."""
        request.error = error
        return self._finish_all(request, "error")

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End ``seq`` and free what it holds.

        For one that has ended, only replace the reasons: the text of the token that reached
        ``max_tokens`` may hold a stop string, which goes first.
        """
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.finished:
            return
        queue = self.running if seq.status is Status.RUNNING else self.waiting
        queue.remove(seq)
        self._release(seq)
        seq.status = Status.FINISHED
        if seq.request.finished:
            del self.requests[seq.request.request_id]

    def preempt_all(self) -> None:
        """Take the state of all that run: they compute it anew. For when it cannot be trusted."""
        for seq in list(self.running):
            self._preempt(seq)
        for seq in self.waiting:
            seq.restart_guide()

    def _finish_all(self, request: Request, reason: FinishReason) -> list[Sequence]:
        unfinished = [seq for seq in request.sequences if not seq.finished]
        for seq in unfinished:
            self.finish(seq, reason)
        return unfinished

    # A step: schedule, and update with its results

    def schedule(self, now: float) -> Plan:
        """Decide the next step, at the time ``now``. An empty plan still goes to ``update``."""
        self.num_steps += 1
        decodes = self._schedule_decodes()
        chunks = self._schedule_chunks(self.max_num_batched_tokens - len(decodes), now)
        failed = [] if self.running else self._give_up_first()
        scheduled = sorted(decodes + chunks, key=lambda entry: entry.num_tokens > 1)
        return Plan(tuple(scheduled), self._copies.issue(), tuple(failed))

    def update(self, plan: Plan, results: Series[StepResult]) -> list[Sequence]:
        """Apply the results of ``plan.scheduled``, in the same order.

        Returns the sequences that failed, then those that drew a token or ended, siblings in
        order of their index; one that ended has given back its slot and pages.
        """
        changed = list(plan.failed)
        outcomes = list(zip(plan.scheduled, results, strict=True))
        for entry, result in outcomes:
            if result.error is not None:
                changed += self.fail(entry.seq.request, result.error)
        for entry, result in outcomes:
            if not entry.seq.finished:  # neither failed nor aborted since it was scheduled
                changed += self._advance(entry, result)
        return changed

    def _schedule_decodes(self) -> list[Scheduled]:
        decodes: list[Scheduled] = []
        index = 0
        while index < len(self.running) and len(decodes) < self.max_num_batched_tokens:
            seq = self.running[index]
            if not seq.decoding:
                index += 1
            elif self._take_page_if_needed(seq):
                decodes.append(next_chunk(seq, budget=1))
                index += 1
            else:
                self._preempt(self.running[-1])
        return decodes

    def _schedule_chunks(self, budget: int, now: float) -> list[Scheduled]:
        chunks: list[Scheduled] = []
        half_computed = [seq for seq in self.running if not seq.decoding]
        while budget > 0:
            seq = half_computed.pop(0) if half_computed else self._admit_first(now)
            if seq is None:
                break
            chunks.append(next_chunk(seq, budget))
            budget -= chunks[-1].num_tokens
        return chunks

    def _advance(self, entry: Scheduled, result: StepResult) -> list[Sequence]:
        seq = entry.seq
        seq.num_computed = entry.stop
        seq.scored_until = max(seq.scored_until, min(entry.stop, seq.request.scored_rows.stop))
        if entry.stop < seq.num_tokens:
            return []
        if not entry.samples:
            self.finish(seq, "length")
            return [seq]
        siblings = seq.request.fork()
        for sibling in siblings:
            insort(self.waiting, sibling, key=_by_order)
        samples = [seq, *siblings]
        draws = zip(result.token_ids, result.logprobs, strict=True)
        for sample, (token_id, logprob) in zip(samples, draws, strict=True):
            sample.append(token_id, logprob)
        errors = [sample.guide.error for sample in samples if sample.guide is not None]
        if any(errors):
            return self.fail(seq.request, next(filter(None, errors)))
        for sample in (*siblings, seq):  # seq last: siblings start from what it holds
            ending = sample.ending(self.max_model_len)
            if ending is not None:
                self.finish(sample, *ending)
            elif sample is not seq:
                self._start_from(seq, sample)
        return samples

    # Slots and pages

    def _admit_first(self, now: float) -> Sequence | None:
        """Start the first waiting sequence if there is room for all its tokens."""
        if not self.waiting or not self._has_free_slot():
            return None
        seq = self.waiting[0]
        pages = self.page_pool.alloc(self.page_pool.pages_for(seq.num_tokens))
        if pages is None:
            return None
        if seq.request.first_scheduled is None:
            seq.request.first_scheduled = now
        self._start(seq, pages, num_computed=0)
        return seq

    def _start_from(self, parent: Sequence, sibling: Sequence) -> None:
        """Start ``sibling`` on its parent's state. Without room it goes on waiting: to recompute.

        Full pages are shared; what either of them will write to, the tail page and the slot, is
        copied before the next step.
        """
        full, tail = self._split_tail(parent)
        copied = self.page_pool.alloc(len(tail)) if self._has_free_slot() else None
        if copied is None:
            return
        self.page_pool.fork(full)
        self._start(sibling, full + copied, parent.num_computed)
        assert parent.slot is not None and sibling.slot is not None
        self._copies.add(sibling, Copy("slot", parent.slot, sibling.slot))
        for src, dst in zip(tail, copied, strict=True):
            self._copies.add(sibling, Copy("page", src, dst))

    def _start(self, seq: Sequence, pages: list[int], num_computed: int) -> None:
        slot = self.slot_pool.alloc(1)
        assert slot is not None
        self.waiting.remove(seq)
        insort(self.running, seq, key=_by_order)
        seq.status = Status.RUNNING
        seq.slot, seq.pages, seq.num_computed = slot[0], pages, num_computed

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        seq.request.num_preemptions += 1
        self.running.remove(seq)
        self._release(seq)
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=_by_order)

    def _release(self, seq: Sequence) -> None:
        """Give back all that ``seq`` holds, and forget the copies meant for it."""
        self._copies.drop(seq)
        self.page_pool.free(seq.pages)
        if seq.slot is not None:
            self.slot_pool.free([seq.slot])
        seq.slot, seq.pages, seq.num_computed = None, [], 0

    def _give_up_first(self) -> list[Sequence]:
        """Fail the first waiting request, which found no room though nothing runs.

        ``add`` makes sure that the pools are large enough, so somebody else holds them.
        """
        if not self.waiting:
            return []
        seq = self.waiting[0]
        return self.fail(
            seq.request,
            f"{seq.num_tokens} tokens need {self.page_pool.pages_for(seq.num_tokens)} pages and "
            f"a slot; {self.page_pool.num_free} pages and {self.slot_pool.num_free} slots are "
            "free though nothing runs: raise kv_memory",
        )

    def _has_free_slot(self) -> bool:
        return len(self.running) < self.max_num_seqs and self.slot_pool.num_free > 0

    def _take_page_if_needed(self, seq: Sequence) -> bool:
        """Make room for the next token of ``seq``; False if it needs a page and none is free."""
        missing = self.page_pool.pages_for(seq.num_tokens) - len(seq.pages)
        if missing <= 0:
            return True
        pages = self.page_pool.alloc(missing)
        if pages is None:
            return False
        seq.pages += pages
        return True

    def _split_tail(self, seq: Sequence) -> tuple[list[int], list[int]]:
        """The pages of ``seq`` that are full, and the one (or none) that is written to next."""
        num_full = seq.num_computed // self.page_pool.page_size
        return seq.pages[:num_full], seq.pages[num_full:]

    # Integrity

    def check(self) -> None:
        """Assert that queues, owners and reference counts agree (for tests, after every step)."""
        self.page_pool.check()
        self.slot_pool.check()
        self._check_queues()
        self._check_references()
        for seq in self.running:
            held = len(seq.pages)
            assert held * self.page_pool.page_size >= seq.num_computed, f"{seq} lacks pages"
            assert held <= self.page_pool.pages_for(seq.num_tokens), f"{seq} has surplus pages"
        if not self.requests:
            assert self.page_pool.num_free == self.page_pool.capacity, "pages leaked"
            assert self.slot_pool.num_free == self.slot_pool.capacity, "slots leaked"

    def _check_queues(self) -> None:
        for queue, status in ((self.waiting, Status.WAITING), (self.running, Status.RUNNING)):
            orders = [seq.order for seq in queue]
            assert orders == sorted(set(orders)), f"{status} is out of order"
            assert all(seq.status is status for seq in queue), f"{status} has a wrong status"
        assert not any(seq.pages or seq.slot or seq.num_computed for seq in self.waiting)
        assert len(self.running) <= self.max_num_seqs
        assert sum(not seq.decoding for seq in self.running) <= 1, "two prompts are half computed"
        queued = {seq.order for seq in self.waiting + self.running}
        unfinished = [s for r in self.requests.values() for s in r.sequences if not s.finished]
        assert queued == {seq.order for seq in unfinished}, "a sequence is lost"

    def _check_references(self) -> None:
        pages = Counter(page for seq in self.running for page in seq.pages)
        slots = Counter(seq.slot for seq in self.running)
        assert all(count == 1 for count in slots.values()), "a slot has two owners"
        for seq in self.running:
            written_next = self._split_tail(seq)[1]
            owners = [pages[page] for page in written_next]
            assert set(owners) <= {1}, f"{seq} would write to a shared page"
        copied = self._copies.sources()
        for pool, held, kind in ((self.page_pool, pages, "page"), (self.slot_pool, slots, "slot")):
            for number in range(pool.size):
                expected = held[number] + copied[kind, number]
                assert pool.references(number) == expected, f"{kind} {number} is miscounted"
