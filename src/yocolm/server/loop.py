"""The engine in a thread of its own, and the mailboxes through which the event loop hears of it.

A step never waits for a client: it appends its outputs and goes on. The event loop never waits for
a step: what it wants is queued and taken up before the next one. A thread is enough (a process of
its own was measured and gained nothing: docs/server.md).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from yocolm.engine.engine import STEP_FAILED, Engine
from yocolm.engine.outputs import RequestOutput
from yocolm.errors import RequestError
from yocolm.server.errors import ApiError, failed, unavailable
from yocolm.server.metrics import ReadCounter
from yocolm.server.outputs import Output, Parts
from yocolm.server.telemetry import Telemetry, about

log = logging.getLogger("yocolm.server")


@dataclass(frozen=True)
class Urgency:
    """When a request is to be served; targets are in seconds, None where it is the server's."""

    priority: int = 0
    ttft_target: float | None = None
    tpot_target: float | None = None


@dataclass
class Job:
    """One request of the engine: a prompt of an HTTP request, validated."""

    request_id: str
    ids: list[int]
    params: Any
    text: str | None = None
    samples: int = 1
    arrival: float = field(default_factory=time.monotonic)
    urgency: Urgency = Urgency()
    predicted_ttft: float | None = None  # seconds from its arrival, told by the engine
    begun: bool = False
    num_cached: int = 0  # prompt tokens that the prefix cache had
    first_token: float | None = None
    last_token: float | None = None
    num_output: int = 0
    finish_reason: str | None = None


@dataclass(frozen=True)
class Queued:
    """The engine has taken a request, and expects its first token ``predicted_ttft`` seconds after
    its arrival (None: it does not know)."""

    request_id: str
    predicted_ttft: float | None


class Mailbox:
    """Outputs of the jobs of one HTTP request. Lives on the event loop.

    What its reader has not taken yet is merged, so that a slow one costs no more memory than the
    answer itself and delays nobody.
    """

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.unfinished = {job.request_id for job in jobs}
        self.failure: Exception | None = None
        self._unqueued = set(self.unfinished)
        self._parts: dict[str, Parts] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._wants_all = False

    def queued(self, request_id: str) -> None:
        """The engine has taken a job."""
        self._unqueued.discard(request_id)
        if not self._unqueued:
            self._wake()

    async def all_queued(self) -> None:
        """Wait until the engine has taken all jobs. Raises ApiError if it has refused one."""
        while self._unqueued and self.failure is None and self._failed() is None:
            await self._wait()
        if self.failure is not None:
            raise self.failure
        error = self._failed()
        if error is not None:
            raise failed(error)

    def push(self, output: Output) -> None:
        parts = self._parts.get(output.request_id)
        if parts is None:
            parts = self._parts[output.request_id] = Parts()
        parts.add(output)
        if output.finished:
            self.unfinished.discard(output.request_id)
        if not (self._wants_all and self.unfinished) or output.error is not None:
            self._wake()

    @property
    def done(self) -> bool:
        """Whether nothing is left to take, and nothing comes any more."""
        return not self.unfinished and not self._parts and self.failure is None

    def fail(self, error: Exception) -> None:
        """End it: the reader gets ``error`` instead of what is still to come."""
        self.failure = self.failure or error
        self._wake()

    async def take(self) -> dict[str, Output]:
        """What is new, merged, by request id; waits until there is something.

        Raises ApiError or ClientGone when the request was given up.
        """
        while not self._parts and self.failure is None:
            await self._wait()
        if self.failure is not None:
            raise self.failure
        taken, self._parts = self._parts, {}
        return {request_id: parts.merged() for request_id, parts in taken.items()}

    async def take_all(self) -> list[Output]:
        """The whole outputs of all jobs, in their order. Raises ApiError if one fails."""
        self._wants_all = True
        while self.unfinished and self.failure is None and not self._failed():
            await self._wait()
        if self.failure is not None:
            raise self.failure
        error = self._failed()
        if error is not None:
            raise failed(error)
        return [self._parts[job.request_id].merged() for job in self.jobs]

    def _failed(self) -> str | None:
        errors = (parts.error for parts in self._parts.values())
        return next((error for error in errors if error is not None), None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _failure(job: Job, error: str) -> RequestOutput:
    """The output of a job that the engine would not take."""
    return RequestOutput(job.request_id, job.text, job.ids, None, [], True, error=error)


class EngineLoop:
    """Runs ``engine`` in a thread. All methods but those with ``_thread`` are the event loop's.

    Args:
        capacity: samples that may be in the engine, running and waiting.

    ``on_death`` is called on the event loop when the engine cannot go on.
    """

    def __init__(self, engine: Engine, telemetry: Telemetry, capacity: int) -> None:
        self.engine, self.telemetry, self.capacity = engine, telemetry, capacity
        self.death: str | None = None
        self.draining = False
        self.on_death: Callable[[], None] = lambda: None
        self._boxes: dict[str, tuple[Mailbox, Job]] = {}
        self._load = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._commands: deque[Callable[[], None]] = deque()
        self._awake = threading.Condition()
        self._stopping = False
        self._outbox: deque[tuple[float, Sequence[Output | Queued]]] = deque()
        self._signalled = False
        self.step_seconds = self.step_cpu_seconds = 0.0
        register = telemetry.registry.register
        register("step_seconds_total", "in steps", ReadCounter(lambda: self.step_seconds))
        register(
            "step_cpu_seconds_total",
            "of the processor in steps, in the engine's own thread",
            ReadCounter(lambda: self.step_cpu_seconds),
        )
        self._thread = threading.Thread(target=self._thread_main, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # Life

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.death is None and self._thread.is_alive()

    @property
    def ready(self) -> bool:
        return self.alive and not self.draining

    async def stop(self) -> None:
        """End the thread after its current step; whoever still waits is told."""
        self.give_up(unavailable("the server is shutting down"))
        self._stopping = True
        self._call(lambda: None)
        await asyncio.to_thread(self._thread.join, 30)
        if not self._thread.is_alive():
            self.engine.close()

    async def drained(self, timeout: float) -> bool:
        """Refuse new requests and wait until the running ones are done; False after ``timeout``."""
        self.draining = True
        if self._idle.is_set():
            return True  # also where there is no time to wait
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    def give_up(self, error: ApiError) -> None:
        """End all requests with ``error``."""
        for box, _ in list(self._boxes.values()):
            box.fail(error)
            self.close(box)

    # Requests

    def check_open(self, samples: int = 1) -> None:
        """Raise the ApiError (400, 429, 503) with which ``open`` would refuse so many samples.

        Cheap: routes ask before they tokenise, so that a full server does not work for nothing.
        """
        if self.death is not None:
            raise unavailable(f"the engine has stopped: {self.death}")
        if self.draining:
            raise unavailable("the server is shutting down: it takes no new requests")
        if samples > self.capacity:
            raise ApiError(
                f"the request asks for {samples} samples (prompts x n); this server holds at most "
                f"{self.capacity} at a time: ask for fewer",
                param="n",
            )
        if self._load + samples > self.capacity:
            self.telemetry.refused.add()
            raise ApiError(
                f"the queue is full ({self._load} of {self.capacity} samples): try again later",
                429,
                code="queue_full",
                retry_after=1,
            )

    def open(self, jobs: list[Job]) -> Mailbox:
        """Queue the jobs of one HTTP request. Raises ApiError (400, 429, 503) if it cannot."""
        wanted = sum(job.samples for job in jobs)
        self.check_open(wanted)
        box = Mailbox(jobs)
        for job in jobs:
            self._boxes[job.request_id] = box, job
        self._load += wanted
        self._idle.clear()
        self._call(lambda: self._thread_add(jobs))
        return box

    def close(self, box: Mailbox) -> None:
        """Forget a mailbox; what is unfinished of its jobs is aborted before the next step."""
        for job in self._drop(box):
            self.telemetry.finished(job, "abort", time.monotonic())

    def _drop(self, box: Mailbox) -> list[Job]:
        """Forget and abort the jobs of a mailbox that are unfinished; returns them."""
        left = [job for job in box.jobs if job.request_id in self._boxes]
        for job in left:
            self._forget(job)
        if left and self.death is None:
            self._call(lambda: self._thread_abort([job.request_id for job in left]))
        return left

    def _forget(self, job: Job) -> None:
        if self._boxes.pop(job.request_id, None) is not None:
            self._load -= job.samples
            if not self._boxes:
                self._idle.set()

    def _call(self, command: Callable[[], None]) -> None:
        with self._awake:
            self._commands.append(command)
            self._awake.notify()

    # From the thread to the event loop

    def _deliver(self) -> None:
        self._signalled = False
        while self._outbox:
            now, outputs = self._outbox.popleft()
            for output in outputs:
                found = self._boxes.get(output.request_id)
                if found is None:
                    continue  # closed meanwhile
                box, job = found
                if isinstance(output, Queued):
                    job.predicted_ttft = output.predicted_ttft
                    box.queued(job.request_id)
                    continue
                try:
                    self._deliver_one(box, job, output, now)
                except Exception:  # the others, already out of the outbox, still get theirs
                    log.exception("an output could not be delivered")
                    box.fail(failed("an unexpected error; see the server's log"))
                    self._drop(box)

    def _deliver_one(self, box: Mailbox, job: Job, output: Output, now: float) -> None:
        self.telemetry.output(job, output, now)
        box.push(output)
        if not output.finished:
            return
        self._forget(job)
        reason = "error" if output.error is not None else job.finish_reason
        self.telemetry.finished(job, reason or "stop", now, output.metrics)
        if output.error is not None:
            log.error("request failed", extra=about(job, error=output.error))

    def _die(self, reason: str) -> None:
        if self.death is None:
            self.death = reason
            self.give_up(failed(f"the engine has stopped: {reason}"))
            self.on_death()

    # The thread

    def _thread_main(self) -> None:
        try:
            while self._thread_take_commands():
                begin, cpu = time.perf_counter(), time.thread_time()
                outputs: list[Output] = list(self.engine.step())
                self.step_cpu_seconds += time.thread_time() - cpu
                self.step_seconds += time.perf_counter() - begin
                self._thread_send(outputs)
                if any((o.error or "").startswith(STEP_FAILED) for o in outputs):
                    self._thread_probe()
        except BaseException as error:  # whatever it is, everybody who waits has to be told
            log.exception("the engine has stopped")
            self._thread_notify(self._die, f"{type(error).__name__}: {error}")

    def _thread_take_commands(self) -> bool:
        """Do what was asked for; waits while there is no work. False when it is over."""
        while True:
            if self._commands:
                while self._commands:
                    self._commands.popleft()()
                self.telemetry.view.refresh()
            if self._stopping:
                return False
            if self.engine.has_unfinished_requests():
                return True
            with self._awake:
                if not self._commands:
                    self._awake.wait()

    def _thread_add(self, jobs: list[Job]) -> None:
        self._thread_send([self._thread_add_one(job) for job in jobs])

    def _thread_add_one(self, job: Job) -> Output | Queued:
        try:
            predicted = self.engine.enqueue(
                job.request_id,
                job.ids,
                job.params,
                job.text,
                job.arrival,
                job.urgency.priority,
                job.urgency.ttft_target,
                job.urgency.tpot_target,
            )
            return Queued(job.request_id, predicted)
        except RequestError as error:
            return _failure(job, str(error))
        except Exception as error:  # of a library that a grammar needs, say
            log.exception("request %s could not be queued", job.request_id)
            return _failure(job, f"the engine could not take it: {error}")

    def _thread_abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)

    def _thread_send(self, outputs: Sequence[Output | Queued]) -> None:
        """One wake-up of the event loop for a step, none while the last one is still to come."""
        if not outputs:
            return
        self._outbox.append((time.monotonic(), outputs))
        if not self._signalled:
            self._signalled = True
            self._thread_notify(self._deliver)

    def _thread_probe(self) -> None:
        """A step has failed: raises if the device does not work any more."""
        probe = torch.zeros(2, device=self.engine.runner.device)
        assert float((probe + 1).sum()) == 2.0, "the device computes nonsense"

    def _thread_notify(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the event loop is closed: nobody listens
