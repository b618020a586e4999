"""The live page: who may see what, what it is told, and what that costs."""

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import pytest

from scripted import say, scripted_engine
from serving import client_of, error_of, service_of, talk
from yocolm.engine.sampling_params import SamplingParams
from yocolm.server import live, page
from yocolm.server.service import Service

PATH = "/v1/completions"
ENDLESS = say("o") * 100_000
STATIC = {name: file.content.decode() for name, file in page._FILES.items()}


def body(max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "he", "max_tokens": max_tokens, "temperature": 0, **more}


@contextlib.contextmanager
def steps(service: Service, count: int) -> Iterator[threading.Event]:
    """The engine makes so many steps, and no more until the event is set."""
    step, go, left = service.engine.step, threading.Event(), [None] * count

    def limited() -> Any:
        if left:
            left.pop()
        else:
            go.wait(60)
        return step()

    service.engine.step = limited
    try:
        yield go
    finally:
        go.set()


async def data_when(client: httpx.AsyncClient, true: Any) -> dict[str, Any]:
    """What the page is told, once it is as it should be."""
    told: dict[str, Any] = {}
    for _ in range(200):
        told = (await client.get("/live.json")).json()
        if true(told):
            return told
        await asyncio.sleep(0.02)
    pytest.fail(f"it never was: {told}")


def drawn(told: dict[str, Any]) -> list[int]:
    """Tokens of each request so far."""
    return [one["output_tokens"] for one in told["requests"]]


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FRESH", 0.0)


# The page


def test_the_page_needs_no_key_but_its_data_does() -> None:
    service = service_of(scripted_engine([]), api_key=["key"])

    async def work(client: httpx.AsyncClient) -> None:
        for path in ("/", *page.ASSETS):
            assert (await client.get(path)).status_code == 200, path
            assert (await client.head(path)).status_code == 200, path
        error_of(await client.get("/live.json"), 401)
        error_of(await client.get("/live.json?key=key"), 401)
        answer = await client.get("/live.json", headers={"authorization": "Bearer key"})
        assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
        error_of(await client.get("/live/../live.json"), 401)
        error_of(await client.get("/live/other.js"), 401)

    talk(service, work)


def test_what_a_browser_may_do_with_the_page() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        for path in ("/", *page.ASSETS):
            answer = await client.get(path)
            rules = dict(
                rule.strip().split(" ", 1)
                for rule in answer.headers["content-security-policy"].split(";")
            )
            assert rules.pop("default-src") == "'none'"
            assert rules.pop("frame-ancestors") == "'none'"
            assert set(rules.values()) == {"'self'", "'none'"}, "nothing inline, no other host"
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert again.status_code == 304 and not again.content
        assert (await client.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        script = await client.get("/live/app.js")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        operations = (await client.get("/openapi.json")).json()["paths"]
        assert "/live.json" in operations and "/" not in operations

    talk(service_of(scripted_engine([])), work)


@pytest.mark.parametrize("name", STATIC)
def test_the_files_name_no_other_host_and_run_nothing_inline(name: str) -> None:
    text = STATIC[name].replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|//\w+\.\w|@import|url\(", text)
    assert not re.search(r"\beval\b|new Function|innerHTML|outerHTML|document\.write", text)
    if name.endswith(".html"):
        assert not re.search(r"<style|\son\w+=|\sstyle=|javascript:", text)
        assert not re.search(r"<script(?![^>]*src=)", text)


def test_all_that_the_page_loads_is_there() -> None:
    loaded = set(re.findall(r"\{\{base\}\}(live/[\w.]+)", STATIC["index.html"]))
    for name, text in STATIC.items():
        if name.endswith(".js"):
            loaded |= {f"live/{file}" for file in re.findall(r'from "\./([\w.]+)"', text)}
    assert loaded == {path.lstrip("/") for path in page.ASSETS}
    ids = set(re.findall(r'\bid="([\w-]+)"', STATIC["index.html"]))
    scripts = "".join(text for name, text in STATIC.items() if name.endswith(".js"))
    assert set(re.findall(r'byId\("([\w-]+)"\)', scripts)) <= ids


@pytest.mark.parametrize("root", ["", "/llm", '/a"><b'])
def test_the_page_behind_a_proxy(root: str) -> None:
    """Its files are found whether it is asked for with a slash at its end or not."""

    async def work(client: httpx.AsyncClient) -> str:
        return (await client.get(f"{root}/")).text

    text = talk(service_of(scripted_engine([]), root_path=root), work)
    base = {"": "", "/llm": "/llm/", '/a"><b': "/a&quot;&gt;&lt;b/"}[root]
    assert f'src="{base}live/app.js"' in text and "{{" not in text


# Its data


def test_what_the_page_is_told_of_requests() -> None:
    """Numbers and ids; nothing of what anybody has written, or was answered."""
    service = service_of(scripted_engine(ENDLESS), max_num_seqs=None)
    secret = "hello world"
    asked = body(200, prompt=[secret] * 9, priority=3, ttft_target=1.5)

    async def work(client: httpx.AsyncClient) -> None:
        with steps(service, 3) as go:
            tasks = [asyncio.create_task(client.post(PATH, json=asked))]
            told = await data_when(client, lambda told: drawn(told) == [3] * 8 + [0])
            requests = told["requests"]
            assert [one["state"] for one in requests] == ["decode"] * 8 + ["waiting"]
            first = requests[0]
            assert first["priority"] == 3 and first["sample"] is None
            assert first["output_tokens"] == 3 and first["ttft"] > 0 and first["age"] > 0
            assert first["total_tokens"] == first["prompt_tokens"] + 3
            assert first["computed_tokens"] == first["total_tokens"] - 1
            assert requests[-1]["ttft"] is None and requests[-1]["output_tokens"] == 0
            assert told["queue"] == {
                **{"running": 8, "waiting": 1, "swapped": 0},
                **{"max_running": 8, "max_waiting": 1000},
            }
            assert secret not in json.dumps(told) and "ooo" not in json.dumps(told)
            values = {type(value) for one in requests for value in one.values()}
            assert values <= {int, float, str, type(None)}
            go.set()
            await asyncio.gather(*tasks)
        told = await data_when(client, lambda told: not told["requests"])
        assert told["queue"]["running"] == told["queue"]["waiting"] == 0
        assert len(told["ttft"]) == 9 and all(actual > 0 for _, _, actual in told["ttft"])

    talk(service, work)


def test_what_the_page_is_told_of_memory() -> None:
    service = service_of(scripted_engine(ENDLESS))

    async def work(client: httpx.AsyncClient) -> None:
        with steps(service, 2) as go:
            task = asyncio.create_task(client.post(PATH, json=body(9, prompt=[5] * 20)))
            told = await data_when(client, lambda told: told["slots"][0] and drawn(told) == [1])
            pools = {pool["kind"]: pool for pool in told["pools"]}
            slots = service.engine.scheduler.slot_pool.capacity
            assert told["slots"][0] == 1 and told["slots"][2] == slots
            recurrent = pools["recurrent"]
            assert recurrent["used"] * slots == recurrent["capacity"] > 0
            assert pools["global_kv"]["used"] > 0 and pools["window"]["capacity"] == 0
            assert told["totals"]["tokens"] >= 20 and told["totals"]["rows"] < 20
            go.set()
            await task
        told = await data_when(client, lambda told: not told["requests"])
        assert all(pool["used"] == 0 for pool in told["pools"])
        assert told["pages"][1] > 0, "kept for who begins alike"

    talk(service, work)


def test_what_is_told_of_those_who_had_to_make_room() -> None:
    """Swapped sequences are told apart from those that wait, on the page and in the metrics."""
    service = service_of(scripted_engine(ENDLESS))
    engine, view = service.engine, service.telemetry.view
    for name in "ab":
        engine.enqueue(name, [5] * 20, SamplingParams(max_tokens=9), arrival_time=1.0)
    engine.scheduler.requests["b"].sequences[0].is_swapped = True
    engine.scheduler.num_preemptions, engine.scheduler.memory.num_swaps = 5, 3
    usage = replace(view.held.usage, blocks_swapped=2, states_swapped=1)
    view.held = replace(view.held, running=0, waiting=2, usage=usage)
    told = json.loads(service.live.data())
    assert [one["state"] for one in told["requests"]] == ["waiting", "swapped"]
    assert told["queue"]["waiting"] == told["queue"]["swapped"] == 1
    assert told["totals"]["preemptions"] == {"swap": 3, "recompute": 2}
    page_bytes, slot_bytes = (
        sum(pool["capacity"] // held[2] for pool in told["pools"] if (pool["kind"] in kinds))
        for held, kinds in (
            (told["pages"], ["global_kv"]),
            (told["slots"], ["window", "recurrent"]),
        )
    )
    assert told["swap"]["used"] == 2 * page_bytes + slot_bytes <= told["swap"]["capacity"]
    text = service.telemetry.registry.render()
    for line in (
        'num_preemptions_total{model_name="tiny"} 5',
        'preemptions_by_kind_total{model_name="tiny",kind="swap"} 3',
        'preemptions_by_kind_total{model_name="tiny",kind="recompute"} 2',
        'num_requests_swapped{model_name="tiny"} 1',
        f'swap_bytes{{model_name="tiny"}} {told["swap"]["used"]}',
    ):
        assert f"yocolm:{line}\n" in text, line


def test_the_history_goes_on_from_where_a_page_has_it() -> None:
    async def work(client: httpx.AsyncClient) -> None:
        whole = (await client.get("/live.json")).json()
        assert len(whole["history"]) == live.SECONDS - 1
        assert all(len(row) == len(whole["columns"]) for row in whole["history"])
        news = (await client.get(f"/live.json?since={whole['now']}")).json()
        assert len(news["history"]) == live.RECENT
        old = (await client.get(f"/live.json?since={whole['now'] - 100}")).json()
        assert len(old["history"]) == live.SECONDS - 1
        for wrong in ("x", "nan", "inf", ""):
            error = error_of(await client.get(f"/live.json?since={wrong}"))
            assert error["param"] == "since" and repr(wrong) in error["message"]

    talk(service_of(scripted_engine([])), work)


def test_many_viewers_share_what_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(scripted_engine([]))
    clock, made = [1000.0], []
    monkeypatch.setattr(live, "FRESH", 0.4)
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    requests = service.telemetry.view.requests
    monkeypatch.setattr(
        service.telemetry.view, "requests", lambda limit: made.append(limit) or requests(limit)
    )

    async def main() -> None:
        async with client_of(service):
            first = service.live.data()
            assert all(service.live.data() is first for _ in range(50)) and len(made) == 1
            clock[0] += 0.5
            assert service.live.data() is not first and len(made) == 2

    asyncio.run(main())


def test_many_viewers_are_told_to_look_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and back again when they have gone."""
    service = service_of(scripted_engine([]))
    clock = [1000.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    service.live._asked_since = clock[0]

    def pace(viewers: int) -> float:
        """After they have looked as often as they were told for a while."""
        for _ in range(20):
            told = json.loads(service.live.data())["pace"]
            for _ in range(round(viewers * 6 / told)):
                service.live._count(clock[0])
            clock[0] += 6
        return json.loads(service.live.data())["pace"]

    assert pace(3) == 1.0
    assert pace(250) == pytest.approx(250 / live.MOST_ANSWERS, rel=0.1)
    assert pace(100_000) == live.PACES[1]
    assert pace(3) == 1.0


# What is predicted


def test_a_stream_begins_before_its_first_token_with_what_is_predicted() -> None:
    service = service_of(scripted_engine(ENDLESS))
    enqueue = service.engine.enqueue
    service.engine.enqueue = lambda *given, **named: enqueue(*given, **named) and None or 0.1234

    async def work(client: httpx.AsyncClient) -> None:
        with steps(service, 0) as go:
            sent: list[dict[str, Any]] = []
            task = asyncio.create_task(raw(client, body(stream=True), sent))
            for _ in range(500):
                if sent:
                    break
                await asyncio.sleep(0.01)
            [start] = sent
            headers = {name.decode(): value.decode() for name, value in start["headers"]}
            assert start["status"] == 200 and headers["x-predicted-ttft-ms"] == "123.4"
            go.set()
            await task
        answer = await client.post(PATH, json=body())
        assert answer.headers["x-predicted-ttft-ms"] == "123.4"
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "he"}], "max_tokens": 2}
        for more in ({}, {"stream": True}):
            answer = await client.post("/v1/chat/completions", json={**chat, **more})
            assert answer.headers["x-predicted-ttft-ms"] == "123.4"
        told = (await client.get("/live.json")).json()["ttft"]
        assert [predicted for _, predicted, _ in told] == [0.1234] * 4
        text = (await client.get("/metrics")).text
        predicted = "predicted_time_to_first_token_seconds"
        others = "time_to_first_token_seconds", "time_to_first_token_prediction_error"
        for name in (predicted, *others):
            assert re.search(rf"^yocolm:{name}_count{{.*}} 4$", text, re.M), name
        [total] = re.findall(rf"^yocolm:{predicted}_sum{{.*}} (\S+)$", text, re.M)
        assert float(total) == pytest.approx(4 * 0.1234)

    talk(service, work)


async def raw(client: httpx.AsyncClient, fields: Any, sent: list[dict[str, Any]]) -> None:
    """A request whose answer is seen as it comes."""
    transport: Any = client._transport
    parts = [json.dumps(fields).encode()]

    async def receive() -> dict[str, Any]:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("test", 80), "root_path": ""}
    await transport.app(scope, receive, send)


def test_nothing_is_told_where_nothing_is_predicted() -> None:
    service = service_of(scripted_engine(ENDLESS))
    enqueue = service.engine.enqueue
    service.engine.enqueue = lambda *given, **named: enqueue(*given, **named) and None

    async def work(client: httpx.AsyncClient) -> None:
        for more in ({}, {"stream": True}):
            answer = await client.post(PATH, json=body(**more))
            assert answer.status_code == 200 and "x-predicted-ttft-ms" not in answer.headers
        told = (await client.get("/live.json")).json()["ttft"]
        assert [predicted for _, predicted, _ in told] == [None, None]

    talk(service, work)


def test_how_urgent_it_is_reaches_the_engine() -> None:
    service = service_of(scripted_engine(ENDLESS))
    seen: list[tuple[Any, ...]] = []
    add = service.engine.scheduler.add

    def watched(request: Any) -> None:
        seen.append((request.priority, request.ttft_target, request.tpot_target))
        add(request)

    service.engine.scheduler.add = watched
    urgent = {"priority": -2, "ttft_target": 1, "tpot_target": 0.05}

    async def work(client: httpx.AsyncClient) -> None:
        assert (await client.post(PATH, json=body(**urgent))).status_code == 200
        assert (await client.post(PATH, json=body())).status_code == 200
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "he"}], "max_tokens": 2}
        answer = await client.post("/v1/chat/completions", json={**chat, **urgent})
        assert answer.status_code == 200
        scored = {"model": "tiny", "input": "he", "priority": 7}
        assert (await client.post("/v1/embeddings", json=scored)).status_code == 200

    talk(service, work)
    assert seen == [(-2, 1.0, 0.05), (0, None, None), (-2, 1.0, 0.05), (7, None, None)]


def test_what_the_prefix_cache_knew_is_told() -> None:
    """In whole answers and streams, chats too, and in the metrics."""
    service = service_of(scripted_engine(ENDLESS))
    options = {"stream": True, "stream_options": {"include_usage": True}}

    async def work(client: httpx.AsyncClient) -> str:
        asked = body(prompt=[5] * 20)
        cached = []
        for more in ({}, {}, options):
            answer = await client.post(PATH, json={**asked, **more})
            [found] = re.findall(r'"cached_tokens":(\d+)', answer.text)
            cached.append(int(found))
        assert cached == [0, 16, 16]
        return (await client.get("/metrics")).text

    text = talk(service, work)
    assert re.search(r"^yocolm:prefix_cache_queries_total{.*} 60$", text, re.M)
    assert re.search(r"^yocolm:prefix_cache_hits_total{.*} 32$", text, re.M)
