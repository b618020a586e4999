"""Prometheus' text form, and the numbers that a server shows in it."""

import re
from typing import Any

from scripted import say, scripted_engine
from serving import service_of, talk
from yocolm.server.metrics import Counter, Gauge, Registry


def numbers(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


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
    found = numbers(text)

    def one(name: str, **labels: str) -> float:
        inner = ",".join(f'{k}="{v}"' for k, v in {"model_name": "tiny", **labels}.items())
        return found[f"yocolm:{name}{{{inner}}}"]

    assert one("prompt_tokens_total") == 40 and one("generation_tokens_total") == 6
    assert one("request_success_total", finished_reason="length") == 2
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert one(f"{name}_count") == 2 and one(f"{name}_sum") > 0
    assert one("inter_token_latency_seconds_count") == 4
    assert one("request_queue_time_seconds_count") == 2
    assert one("write_tokens_total") == 44 and one("read_rows_total") == 6
    assert one("skipped_rows_total") == 38
    assert one("step_write_tokens_sum") == 44 and one("step_read_rows_sum") == 6
    assert one("step_read_rows_count") == one("engine_steps_total") == 6
    assert one("num_requests_running") == one("num_requests_waiting") == 0
    for pool in ("global_kv", "window", "recurrent"):
        assert one("pool_bytes", pool=pool) == 0
    assert one("pool_capacity_bytes", pool="global_kv") > 0
    for phase in ("self_prefill", "kv_finalize", "cross_decode", "sample"):
        assert one("phase_seconds_total", phase=phase) > 0
    assert one("kv_cache_usage_perc") == 0 and one("num_preemptions_total") == 0
