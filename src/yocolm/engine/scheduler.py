"""Continuous batching with fast prefill: who advances in a step, by how many tokens, which rows.

The rules, in the order in which ``schedule`` applies them:

1. First come, first served, but for priorities: a level is worth ``priority_aging`` seconds of
   arrival, so nothing starves. A sequence's place never changes, also when it is preempted.
2. Decodes first, one token each, oldest first, those that the policy picks. A decode that finds no
   free page preempts the newest running sequence, which may be itself.
3. Then prompts in the order of the policy, in chunks as large as it allows. A sequence is admitted
   when a slot and the pages of *all* its tokens are there, and takes them at once. So a prompt
   never runs out of pages half-way, and a preempted sequence does not start over in room too small
   for it. A chunk ends where a state is to be kept (``Sequence.stops``).
4. A preempted sequence keeps its output. Its state is written to the swap space and read back, or
   computed anew from the longest prefix that is still kept, whichever is cheaper (``Memory``);
   prompt rows already delivered are not scored again, tokens already drawn are not drawn again.

``add`` refuses a request that could outgrow the pool while alone in it, so the oldest sequence
always advances in the end, and everything ends. (vLLM instead has the pool hold ``max_model_len``
from the start; here a small pool serves short requests of a long-context model.)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Series
from operator import attrgetter

from yocolm.engine.integrity import check
from yocolm.engine.memory import Memory
from yocolm.engine.outputs import FinishReason
from yocolm.engine.pages import PagePool, SlotPool
from yocolm.engine.plan import Plan, Scheduled, StepResult, next_chunk
from yocolm.engine.policy import Fcfs, Policy
from yocolm.engine.request import Request, Sequence, Status
from yocolm.errors import ConfigError, RequestError

PRIORITY_AGING = 10.0  # seconds of arrival that a level of priority is worth
_by_order = attrgetter("order")


class Scheduler:
    """Owns the queue and decides each step; ``schedule``, run the plan, ``update``, and again.

    ``abort`` and ``finish`` may be called at any time, but not while a plan is being run. What a
    plan moves to or from the swap space goes on beside the steps: ``moved`` tells of its end.
    """

    def __init__(
        self,
        page_pool: PagePool,
        slot_pool: SlotPool,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        memory: Memory | None = None,
        policy: Policy | None = None,
        priority_aging: float = PRIORITY_AGING,
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
        self.memory = memory or Memory(page_pool, slot_pool)
        self.policy = policy or Fcfs()
        self.priority_aging = priority_aging
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.requests: dict[str, Request] = {}
        self.waiting: list[Sequence] = []  # both lists are in their order
        self.running: list[Sequence] = []
        self.num_added = 0
        self.num_steps = 0
        self.num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def awaits_moves(self) -> bool:
        """Whether somebody is on the way to or from the swap space."""
        return bool(self.memory.tickets)

    def arrives(self, seq: Sequence) -> bool:
        """Whether a waiting sequence is being read back: it has its memory already."""
        transfers = self.memory.transfers
        return transfers is not None and transfers.arrives(seq)

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue ``request``. Raises RequestError if it could never be served."""
        if request.request_id in self.requests:
            raise RequestError(f"request_id {request.request_id!r} is in use: choose another")
        self.check_servable(request)
        request.number = self.num_added
        request.due = request.arrival + request.priority * self.priority_aging
        self.num_added += 1
        self.requests[request.request_id] = request
        self.policy.added(request)
        for seq in request.sequences:
            insort(self.waiting, seq, key=_by_order)

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
        runs = seq.status is Status.RUNNING
        (self.running if runs else self.waiting).remove(seq)
        self.memory.finish(seq, keep=runs and reason in ("stop", "length"))
        seq.status = Status.FINISHED
        self.policy.ended(seq)
        if seq.request.finished:
            del self.requests[seq.request.request_id]

    def preempt_all(self) -> None:
        """Take the state of all that run: they compute it anew. For when it cannot be trusted."""
        for seq in list(self.running):
            self.memory.release(seq)
            self._wait_again(seq)
        self.memory.distrust()
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
        decodes = self._schedule_decodes(now)
        chunks = self._schedule_chunks(decodes, now)
        expects = self.running or self.awaits_moves or self.memory.copies.pending
        failed = [] if expects else self._give_up_first()
        scheduled = sorted(decodes + chunks, key=lambda entry: entry.num_tokens > 1)
        moves = self.memory.take_moves()
        return Plan(tuple(scheduled), self.memory.copies.issue(), tuple(failed), moves)

    def moved(self, ticket: int, error: str | None = None) -> None:
        """A move of an earlier plan has ended: its sequence goes on, or computes anew."""
        seq = self.memory.moved(ticket, error)
        if seq is not None:
            self._run(seq)

    def update(self, plan: Plan, results: Series[StepResult], now: float = 0.0) -> list[Sequence]:
        """Apply the results of ``plan.scheduled``, in the same order, at the time ``now``.

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
                changed += self._advance(entry, result, now)
        return changed

    def _schedule_decodes(self, now: float) -> list[Scheduled]:
        decodes: list[Scheduled] = []
        for seq in self.policy.decodes(self, now):
            if len(decodes) == self.max_num_batched_tokens:
                break
            while seq.status is Status.RUNNING and not self.memory.grow(seq):
                if not self._make_room():
                    break  # for this step
            else:
                if seq.status is Status.RUNNING:
                    decodes.append(next_chunk(seq, budget=1))
        return decodes

    def _make_room(self) -> bool:
        """Take the memory of the newest running sequence. False if there will be some later."""
        if self.memory.pages_leaving:
            return False
        seq = self.running[-1]
        leaves_later = self.memory.preempt(seq)
        self._wait_again(seq)
        return not leaves_later

    def _schedule_chunks(self, decodes: list[Scheduled], now: float) -> list[Scheduled]:
        chunks: list[Scheduled] = []
        budget = self.max_num_batched_tokens - len(decodes)
        for seq in self.policy.prompts(self, decodes, budget, now):
            if self.policy.tokens(seq) <= 0:
                if self.policy.keeps_turns:
                    break
                continue
            if seq.status is Status.WAITING and not self._admit(seq, now):
                if self.policy.keeps_turns:
                    break
                continue
            if seq.status is Status.RUNNING:  # or it is being read back
                chunks.append(next_chunk(seq, max(1, self.policy.tokens(seq))))
                self.policy.took(chunks[-1])
        return chunks

    def _advance(self, entry: Scheduled, result: StepResult, now: float) -> list[Sequence]:
        seq = entry.seq
        seq.num_computed = entry.stop
        self.memory.advanced(seq)
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
            if sample.first_token_at is None:
                sample.first_token_at = now
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

    def _admit(self, seq: Sequence, now: float) -> bool:
        """Start a waiting sequence if there is room for all its tokens, or have it read back."""
        if not self._has_free_place() or not self.memory.start(seq):
            return False
        if seq.request.first_scheduled is None:
            seq.request.first_scheduled = now
        if seq.ticket is None:
            self._run(seq)
        return True

    def _start_from(self, parent: Sequence, sibling: Sequence) -> None:
        """Start ``sibling`` on its parent's state. Without room it goes on waiting."""
        if self._has_free_place() and self.memory.start_from(parent, sibling):
            self._run(sibling)

    def _run(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        insort(self.running, seq, key=_by_order)
        seq.status = Status.RUNNING

    def _wait_again(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        seq.request.num_preemptions += 1
        self.running.remove(seq)
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=_by_order)

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

    def _has_free_place(self) -> bool:
        return len(self.running) + self.memory.num_arriving < self.max_num_seqs

    def check(self) -> None:
        """Assert that queues, owners and reference counts agree (for tests, after every step)."""
        check(self)
