"""The engine's thread: who is told what when clients go, steps fail, queues are full, it ends."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import torch

from scripted import say, scripted_engine
from serving import client_of, error_of, events, part, service_of, talk
from yocolm.engine.answers import Answer
from yocolm.server import loop
from yocolm.server.errors import ApiError
from yocolm.server.loop import Job, Mailbox
from yocolm.server.service import Service

PATH = "/v1/completions"
ENDLESS = say("o") * 100_000


def body(max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "he", "max_tokens": max_tokens, "temperature": 0, **more}


@contextlib.contextmanager
def paused(service: Service) -> Iterator[asyncio.Event]:
    """Steps wait until the event is set, once a request is in the engine."""
    step, gate = service.engine.step, asyncio.Event()
    ready = threading.Event()

    def wait() -> Any:
        ready.wait()
        return step()

    service.engine.step = wait
    original = gate.set

    def set_both() -> None:
        ready.set()
        original()

    gate.set = set_both
    try:
        yield gate
    finally:
        ready.set()


async def until(event: Any) -> None:
    for _ in range(2000):
        if event():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it did not happen")


def test_a_full_queue_is_told_at_once() -> None:
    service = service_of(scripted_engine(ENDLESS), max_queue=2)
    assert service.loop.capacity == 10

    async def work(client: httpx.AsyncClient) -> None:
        with paused(service) as gate:
            tasks = [asyncio.create_task(client.post(PATH, json=body())) for _ in range(9)]
            await until(lambda: service.loop._load == 9)
            refused = await client.post(PATH, json=body(n=2))
            error = error_of(refused, 429)
            assert error["code"] == "queue_full" and refused.headers["retry-after"] == "1"
            tasks.append(asyncio.create_task(client.post(PATH, json=body())))
            await until(lambda: service.loop._load == 10)
            error_of(await client.post(PATH, json=body()), 429)
            with pytest.raises(ApiError) as full:
                service.loop.check_open()
            assert full.value.status == 429 and service.telemetry.refused.value == 3
            gate.set()
            answers = await asyncio.gather(*tasks)
        assert {answer.status_code for answer in answers} == {200}
        service.loop.check_open()
        assert (await client.post(PATH, json=body(n=2))).status_code == 200
        assert error_of(await client.post(PATH, json=body(n=11)))["param"] == "n"

    talk(service, work)


def message_of(failure: httpx.Response) -> str:
    """The message of an error: of a stream that has begun before it was known, the last event."""
    if failure.status_code == 200:
        return events(failure)[-1]["error"]["message"]
    return error_of(failure, 500)["message"]


def test_a_step_that_fails_ends_its_requests_only() -> None:
    service = service_of(scripted_engine(ENDLESS))
    run, failing = service.engine.runner.run, [True]

    def fail_once(plan: Any) -> Any:
        if failing.pop() if failing else False:
            raise RuntimeError("out of memory, say")
        return run(plan)

    service.engine.runner.run = fail_once

    async def work(client: httpx.AsyncClient) -> None:
        error = error_of(await client.post(PATH, json=body()), 500)
        assert "the step failed: out of memory, say" in error["message"]
        assert (await client.post(PATH, json=body())).status_code == 200
        failing.append(True)
        assert "out of memory" in message_of(await client.post(PATH, json=body(stream=True)))
        assert (await client.get("/health")).status_code == 200

    talk(service, work)


def test_a_failure_in_the_middle_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(scripted_engine(ENDLESS))
    run, steps = service.engine.runner.run, []
    take, both, taken = Mailbox.take, threading.Event(), []

    async def watched(box: Mailbox) -> Any:
        news = await take(box)
        taken.extend(token for output in news.values() for token in output.outputs[0].token_ids)
        if len(taken) == 2:
            both.set()
        return news

    monkeypatch.setattr(Mailbox, "take", watched)

    def fail_third(plan: Any) -> Any:
        steps.append(plan)
        if len(steps) == 3:
            assert both.wait(30)  # the reader has taken two tokens
            raise RuntimeError("broken")
        return run(plan)

    service.engine.runner.run = fail_third

    async def work(client: httpx.AsyncClient) -> None:
        chunks = events(await client.post(PATH, json=body(9, stream=True)))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "oo"
        assert "broken" in chunks[-1]["error"]["message"]

    talk(service, work)


@pytest.mark.parametrize("place", ["extend", "keep_prompt_scores", "output"])
@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_that_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch, place: str, streams: bool
) -> None:
    """It fails alone; the engine and the other requests go on."""
    service = service_of(scripted_engine(ENDLESS))
    original = getattr(Answer, place)

    def fail_long(self: Answer, *arguments: Any) -> Any:
        if self.request.params.n == 2:
            raise KeyError("no such token")
        return original(self, *arguments)

    monkeypatch.setattr(Answer, place, fail_long)
    bad = body(n=2, prompt="hello he", prompt_logprobs=1, stream=streams)

    async def work(client: httpx.AsyncClient) -> None:
        with paused(service) as gate:
            requests = (bad, body(), body(prompt_logprobs=0))
            tasks = [asyncio.create_task(client.post(PATH, json=fields)) for fields in requests]
            await until(lambda: service.loop._load == 4)
            gate.set()
            failure, *others = await asyncio.gather(*tasks)
        assert "the answer failed: 'no such token'" in message_of(failure)
        assert [answer.json()["choices"][0]["text"] for answer in others] == ["oooo"] * 2
        assert (await client.get("/health")).status_code == 200

    talk(service, work)


def test_an_output_that_cannot_be_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(scripted_engine(ENDLESS))
    output = service.telemetry.output

    def fail_long(job: Job, *arguments: Any) -> None:
        if job.samples == 2:
            raise KeyError("a bug")
        output(job, *arguments)

    monkeypatch.setattr(service.telemetry, "output", fail_long)

    async def work(client: httpx.AsyncClient) -> None:
        with paused(service) as gate:
            tasks = [asyncio.create_task(client.post(PATH, json=body(n=n))) for n in (1, 2, 1)]
            await until(lambda: service.loop._load == 4)
            gate.set()
            answers = await asyncio.gather(*tasks)
        assert [answer.status_code for answer in answers] == [200, 500, 200]
        assert service.loop._load == 0

    talk(service, work)


def test_a_request_that_the_engine_chokes_on() -> None:
    service = service_of(scripted_engine(ENDLESS))
    enqueue: Any = service.engine.enqueue

    def fail_long(request_id: str, ids: Any, params: Any, *arguments: Any, **named: Any) -> None:
        if params.n == 2:
            raise OSError("no room")
        enqueue(request_id, ids, params, *arguments, **named)

    service.engine.enqueue = fail_long

    async def work(client: httpx.AsyncClient) -> None:
        error = error_of(await client.post(PATH, json=body(n=2)), 500)
        assert "could not take it: no room" in error["message"]
        assert (await client.post(PATH, json=body())).status_code == 200

    talk(service, work)


def test_logits_that_are_not_finite() -> None:
    service = service_of(scripted_engine(ENDLESS))
    model: Any = service.engine.runner.model
    clean, calls = model.after["logits"], []

    def spoil(logits: torch.Tensor) -> torch.Tensor:
        calls.append(len(logits))
        ahead = clean(logits)
        if len(calls) == 2:
            ahead[0] = float("nan")
        return ahead

    model.after["logits"] = spoil

    async def work(client: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(*(client.post(PATH, json=body()) for _ in range(3)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200, 200, 500]
        failed = next(answer for answer in answers if answer.status_code == 500)
        assert "not finite" in error_of(failed, 500)["message"]

    talk(service, work)


def test_an_engine_that_cannot_go_on() -> None:
    service = service_of(scripted_engine(ENDLESS))
    told: list[str | None] = []
    service.loop.on_death = lambda: told.append(service.loop.death)

    async def work(client: httpx.AsyncClient) -> None:
        with paused(service) as gate:
            stream = asyncio.create_task(client.post(PATH, json=body(stream=True)))
            whole = asyncio.create_task(client.post(PATH, json=body()))
            await until(lambda: service.loop._load == 2)

            def die() -> Any:
                raise AssertionError("pages leaked")

            service.engine.scheduler.schedule = lambda now: die()
            gate.set()
            streamed, answer = await asyncio.gather(stream, whole)
            assert "pages leaked" in error_of(answer, 500)["message"]
            assert "pages leaked" in message_of(streamed)
        refused = await client.post(PATH, json=body())
        assert "pages leaked" in error_of(refused, 503)["message"]
        for path in ("/health", "/ready"):
            error_of(await client.get(path), 503)
        assert (await client.get("/metrics")).status_code == 200

    talk(service, work)
    assert told == ["AssertionError: pages leaked"]


def test_a_device_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(scripted_engine(ENDLESS))

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("device lost")

    service.engine.runner.run = broken
    monkeypatch.setattr(loop.torch, "zeros", broken)

    async def work(client: httpx.AsyncClient) -> None:
        error_of(await client.post(PATH, json=body()), 500)
        await until(lambda: service.loop.death is not None)
        error_of(await client.get("/health"), 503)

    talk(service, work)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes(streams: bool) -> None:
    """Its request is aborted, which ``client_of`` checks on the pools; the others go on."""
    service = service_of(scripted_engine(ENDLESS))

    async def work(client: httpx.AsyncClient) -> None:
        with paused(service) as gate:
            gone = asyncio.Event()
            other = asyncio.create_task(client.post(PATH, json=body()))
            raw = asyncio.create_task(send_raw(client, body(250, stream=streams), gone))
            await until(lambda: service.loop._load == 2)
            gone.set()
            await until(lambda: service.loop._load == 1)
            gate.set()
            assert (await other).status_code == 200
            await raw
        await until(lambda: not service.engine.has_unfinished_requests())
        ends = service.telemetry.registry.labelled("request_success_total", finished_reason="abort")
        assert ends.value == 1

    talk(service, work)


async def send_raw(client: httpx.AsyncClient, fields: Any, gone: asyncio.Event) -> None:
    """A request whose client goes when the event is set."""
    transport: Any = client._transport
    sent = [json.dumps(fields).encode()]

    async def receive() -> dict[str, Any]:
        if sent:
            return {"type": "http.request", "body": sent.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert message.get("status", 200) in (200, 499)

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("test", 80), "root_path": ""}
    await transport.app(scope, receive, send)


def test_a_request_that_takes_too_long() -> None:
    service = service_of(scripted_engine(ENDLESS), request_timeout=0.05)

    async def work(client: httpx.AsyncClient) -> None:
        with paused(service) as gate:
            error = error_of(await client.post(PATH, json=body()), 504)
            assert error["code"] == "timeout" and "0.05 s" in error["message"]
            gate.set()

    talk(service, work)


def test_draining() -> None:
    service = service_of(scripted_engine(ENDLESS))

    async def work(client: httpx.AsyncClient) -> None:
        with paused(service) as gate:
            running = asyncio.create_task(client.post(PATH, json=body()))
            await until(lambda: service.loop._load == 1)
            assert not await service.loop.drained(0.01)
            refused = await client.post(PATH, json=body())
            assert "shutting down" in error_of(refused, 503)["message"]
            assert int(refused.headers["retry-after"]) > 0
            error_of(await client.get("/ready"), 503)
            assert (await client.get("/health")).status_code == 200
            gate.set()
            assert await service.loop.drained(30)
            assert (await running).status_code == 200
            assert await service.loop.drained(0)

    talk(service, work)


def test_who_still_waits_when_it_stops() -> None:
    service = service_of(scripted_engine(ENDLESS))

    async def main() -> httpx.Response:
        async with client_of(service) as client:
            with paused(service) as gate:
                task = asyncio.create_task(client.post(PATH, json=body(200)))
                await until(lambda: service.loop._load == 1)
                gate.set()
                await service.loop.stop()
                return await task

    assert "shutting down" in error_of(asyncio.run(main()), 503)["message"]


def test_a_step_wakes_the_event_loop_once() -> None:
    """Steps that come before it has looked add nothing to its work."""
    service = service_of(scripted_engine([]))
    looks: list[Any] = []

    async def main() -> None:
        service.loop._loop = asyncio.get_running_loop()
        service.loop._thread_notify = lambda function, *_: looks.append(function)
        for number in range(3):
            service.loop._thread_send([part("x", number)])
        assert len(looks) == 1
        looks.pop()()
        assert not service.loop._outbox
        service.loop._thread_send([part("x", 3)])
        assert len(looks) == 1
        service.loop._thread_send([])
        assert len(service.loop._outbox) == 1

    asyncio.run(main())
