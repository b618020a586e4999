"""Prometheus' text form, and the numbers that a server shows in it."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from scripted import say, scripted_engine
from serving import service_of, talk
from yocolm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from yocolm.server.loop import Job
from yocolm.server.metrics import Counter, Gauge, Registry
from yocolm.server.telemetry import Telemetry


def numbers(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def reader(text: str) -> Callable[..., float]:
    """Gives the number of a name and labels."""
    found = numbers(text)

    def one(name: str, **labels: str) -> float:
        inner = ",".join(f'{k}="{v}"' for k, v in {"model_name": "tiny", **labels}.items())
        return found[f"yocolm:{name}{{{inner}}}"]

    return one


def test_the_text_form() -> None:
    registry = Registry({"model_name": 'a"b\\c\n'})
    registry.counter("hits_total", "how often").add(2)
    registry.register("load", "now", Gauge(lambda: 0.5), kind="x")
    histogram = registry.histogram("wait_seconds", "until", (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 3.0):
        histogram.observe(value)
    label = 'model_name="a\\"b\\\\c\\n"'
    assert registry.render() == (
        "# HELP yocolm:hits_total how often\n# TYPE yocolm:hits_total counter\n"
        f"yocolm:hits_total{{{label}}} 2\n"
        "# HELP yocolm:load now\n# TYPE yocolm:load gauge\n"
        f'yocolm:load{{{label},kind="x"}} 0.5\n'
        "# HELP yocolm:wait_seconds until\n# TYPE yocolm:wait_seconds histogram\n"
        f'yocolm:wait_seconds_bucket{{{label},le="0.1"}} 2\n'
        f'yocolm:wait_seconds_bucket{{{label},le="1.0"}} 3\n'
        f'yocolm:wait_seconds_bucket{{{label},le="+Inf"}} 4\n'
        f"yocolm:wait_seconds_sum{{{label}}} 3.6499999999999999\n"
        f"yocolm:wait_seconds_count{{{label}}} 4\n"
    )


def test_labelled_counters_are_made_once() -> None:
    registry = Registry({})
    registry.counter("ends_total", "by reason", reason="stop")
    for reason in ("stop", "new", "new"):
        registry.labelled("ends_total", reason=reason).add()
    counter = registry.labelled("ends_total", reason="new")
    assert isinstance(counter, Counter) and counter.value == 2
    assert registry.render().count("# TYPE") == 1


def test_what_a_server_counts() -> None:
    service = service_of(scripted_engine(say("he", "ll", "o", "o", "o", "o")))
    body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 3, "temperature": 0}

    async def work(client: Any) -> str:
        for more in ({}, {"stream": True}):
            await client.post("/v1/completions", json={**body, **more})
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return answer.text

    text = talk(service, work)
    assert len(re.findall(r"^# TYPE (\S+)", text, re.M)) == len(
        set(re.findall(r"^# TYPE (\S+)", text, re.M))
    )
    one = reader(text)
    assert one("prompt_tokens_total") == 40 and one("generation_tokens_total") == 6
    assert one("request_success_total", finished_reason="length") == 2
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert one(f"{name}_count") == 2 and one(f"{name}_sum") > 0
    assert one("inter_token_latency_seconds_count") == 4
    assert one("request_queue_time_seconds_count") == 2
    # Of the second prompt, 16 of 20 tokens are known; the first one is cut there, for them.
    assert one("prefix_cache_queries_total") == 40 and one("prefix_cache_hits_total") == 16
    assert one("write_tokens_total") == 28 and one("read_rows_total") == 6
    assert one("skipped_rows_total") == 22
    assert one("step_write_tokens_sum") == 28 and one("step_read_rows_sum") == 6
    assert one("step_read_rows_count") == one("engine_steps_total") == 7
    assert one("num_requests_running") == one("num_requests_waiting") == 0
    for pool in ("global_kv", "window", "recurrent"):
        assert one("pool_bytes", pool=pool) == 0
    for pool in ("global_kv", "recurrent"):
        capacity = one("pool_capacity_bytes", pool=pool)
        assert 0 < one("pool_kept_bytes", pool=pool) < capacity
    assert one("num_requests_swapped") == one("swap_bytes") == 0
    for kind in ("swap", "recompute"):
        assert one("preemptions_by_kind_total", kind=kind) == 0
    assert one("pool_capacity_bytes", pool="global_kv") > 0
    for phase in ("self_prefill", "kv_finalize", "cross_decode", "sample"):
        assert one("phase_seconds_total", phase=phase) > 0
    assert one("kv_cache_usage_perc") == 0 and one("num_preemptions_total") == 0


def test_the_times_of_a_request() -> None:
    """By a clock that shows 10 when it arrives, 13 when it is first scheduled, and so on."""
    telemetry = Telemetry(scripted_engine([]), "tiny")
    job = Job("a", [5] * 4, None, arrival=10.0)
    for now, tokens in ((18.0, [1]), (20.5, [2]), (21.0, [3, 4])):
        reason = "length" if now == 21.0 else None
        sample = CompletionOutput(0, "", tokens, finish_reason=reason)
        finished = reason is not None
        telemetry.output(job, RequestOutput("a", None, job.ids, None, [sample], finished), now)
    assert job.finish_reason == "length"
    telemetry.finished(job, "length", 21.0, RequestMetrics(10.0, first_scheduled_time=13.0))
    one = reader(telemetry.registry.render())
    seconds = {
        "time_to_first_token_seconds": (8.0, 1),
        "inter_token_latency_seconds": (3.0, 2),
        "e2e_request_latency_seconds": (11.0, 1),
        "request_queue_time_seconds": (3.0, 1),
        "request_prefill_time_seconds": (5.0, 1),
        "request_decode_time_seconds": (3.0, 1),
    }
    for name, expected in seconds.items():
        assert (one(f"{name}_sum"), one(f"{name}_count")) == pytest.approx(expected), name
    assert one("request_generation_tokens_sum") == one("generation_tokens_total") == 4
    assert one("request_prompt_tokens_sum") == one("prompt_tokens_total") == 4


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/embeddings", {"input": [5] * 20}, "stop"),
        (
            "/v1/completions",
            {"prompt": [5] * 20, "max_tokens": 0, "echo": True, "logprobs": 1},
            "length",
        ),
    ],
)
def test_requests_that_draw_nothing(path: str, body: dict[str, Any], reason: str) -> None:
    async def work(client: Any) -> str:
        answer = await client.post(path, json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        return (await client.get("/metrics")).text

    one = reader(talk(service_of(scripted_engine(say("o") * 5)), work))
    assert one("prompt_tokens_total") == one("request_prompt_tokens_sum") == 20
    assert one("generation_tokens_total") == one("time_to_first_token_seconds_count") == 0
    assert one("request_queue_time_seconds_count") == 1
    ends = [one("request_success_total", finished_reason=r) for r in ("stop", "length")]
    assert ends == ([1, 0] if reason == "stop" else [0, 1])


def test_state_in_use() -> None:
    """What one request in the middle of its answer holds: pages, and one slot."""
    engine = scripted_engine(say("o") * 10)
    telemetry = Telemetry(engine, "tiny")
    engine.add_request("a", [5] * 20)
    engine.step()
    one = reader(telemetry.registry.render())
    pages, slots = engine.scheduler.page_pool, engine.scheduler.slot_pool
    used = -(-20 // pages.page_size) / pages.capacity
    assert one("kv_cache_usage_perc") == pytest.approx(used) and used > 0
    for pool, share in (("global_kv", used), ("recurrent", 1 / slots.capacity)):
        capacity = one("pool_capacity_bytes", pool=pool)
        assert one("pool_bytes", pool=pool) == pytest.approx(share * capacity) and capacity > 0
    assert one("num_requests_running") == 1 and one("num_requests_waiting") == 0
    engine.abort("a")
