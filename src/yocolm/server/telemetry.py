"""What the server counts and times, under vLLM's names where the meaning is the same."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from yocolm.engine.engine import Engine
from yocolm.engine.outputs import RequestMetrics, RequestOutput
from yocolm.engine.steps import StepRecord
from yocolm.server import metrics
from yocolm.server.engine_view import KINDS, EngineView
from yocolm.server.history import History
from yocolm.server.metrics import Gauge, ReadCounter, Registry

if TYPE_CHECKING:
    from yocolm.server.loop import Job

log = logging.getLogger("yocolm.server")
_PHASES = {
    "self_prefill": "write_seconds",  # the self-decoder and the projection of the global KV
    "kv_finalize": "commit_seconds",  # what a step has written becomes current
    "cross_decode": "read_seconds",  # the cross-decoder, for the rows that are needed
    "sample": "sample_seconds",  # logits, logprobs and draws
}
_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("arrival to first token", metrics.SECONDS_TO_FIRST),
    "inter_token_latency_seconds": ("between the tokens of a request", metrics.SECONDS_PER_TOKEN),
    "e2e_request_latency_seconds": ("arrival to end", metrics.SECONDS_OF_REQUEST),
    "request_queue_time_seconds": ("arrival to first step", metrics.SECONDS_OF_REQUEST),
    "request_prefill_time_seconds": ("first step to first token", metrics.SECONDS_OF_REQUEST),
    "request_decode_time_seconds": ("first token to last token", metrics.SECONDS_OF_REQUEST),
    "request_prompt_tokens": ("of a request", metrics.TOKENS),
    "request_generation_tokens": ("of a request", metrics.TOKENS),
    "request_params_n": ("n of a request", metrics.COUNTS),
    "step_write_tokens": ("tokens of a step through the first half", metrics.STEP_TOKENS),
    "step_read_rows": ("rows of a step through the second half", metrics.STEP_TOKENS),
    "predicted_time_to_first_token_seconds": (
        "as predicted on arrival, of the requests that have begun to answer",
        metrics.SECONDS_TO_FIRST,
    ),
    "time_to_first_token_prediction_error": (
        "|predicted - actual| / actual of the time to first token",
        metrics.RATIOS,
    ),
}
_SHOWN_TTFTS = 200  # of the last requests, beside what was predicted of them
_MODEL_PASS = "seconds of the host in each phase of the steps"


class Telemetry:
    """Metrics of one server. All methods but ``stepped`` are called on the event loop."""

    def __init__(self, engine: Engine, model_name: str, log_requests: bool = False) -> None:
        self._engine, self._log_requests = engine, log_requests
        self.view, self.history = EngineView(engine), History()
        self.registry = registry = Registry({"model_name": model_name})
        self._histograms = {
            name: registry.histogram(name, meaning, bounds)
            for name, (meaning, bounds) in _HISTOGRAMS.items()
        }
        counter = registry.counter
        self._prompt_tokens = counter(
            "prompt_tokens_total", "of requests that have begun to answer"
        )
        self._output_tokens = counter("generation_tokens_total", "drawn")
        self.refused = counter("requests_refused_total", "because the queue was full")
        for reason in ("stop", "length", "abort", "error"):
            counter("request_success_total", "requests by how they ended", finished_reason=reason)
        # Of the last requests: when their first token came, on the clock of time.monotonic, and
        # after how many seconds it was predicted to come, and came.
        self.first_tokens: deque[tuple[float, float | None, float]] = deque(maxlen=_SHOWN_TTFTS)
        self._seen = (0, 0)
        _register_engine(registry, engine, self.view)
        _register_memory(registry, self.view)
        _register_pools(registry, self.view)
        engine.watch.observer = self.stepped
        engine.watch.learns = True  # so that it predicts

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def stepped(self, record: StepRecord) -> None:
        """A step has been run. Called in the engine's thread."""
        self.view.stepped(record)
        self.history.add(record)
        stats, (tokens, rows) = self._engine.runner.stats, self._seen
        self._seen = stats.write_tokens, stats.read_rows
        self._observe("step_write_tokens", self._seen[0] - tokens)
        self._observe("step_read_rows", self._seen[1] - rows)

    def output(self, job: Job, output: RequestOutput, now: float) -> None:
        """Something new of a job, at ``now``."""
        new = sum(len(sample.token_ids) for sample in output.outputs)
        for sample in output.outputs:
            job.finish_reason = sample.finish_reason or job.finish_reason
        served = output.finished and output.error is None  # embeddings, say, draw nothing
        if not job.begun and (new or served):
            job.begun, job.num_cached = True, output.num_cached_tokens
            self._prompt_tokens.add(len(job.ids))
        if not new:
            return
        if job.first_token is None:
            job.first_token = now
            self._first_token(job, now - job.arrival)
        elif job.last_token is not None:
            self._observe("inter_token_latency_seconds", now - job.last_token)
        job.last_token = now
        job.num_output += new
        self._output_tokens.add(new)

    def _first_token(self, job: Job, seconds: float) -> None:
        self._observe("time_to_first_token_seconds", seconds)
        predicted = job.predicted_ttft
        if predicted is not None:
            self._observe("predicted_time_to_first_token_seconds", predicted)
            self._observe(
                "time_to_first_token_prediction_error",
                abs(predicted - seconds) / max(seconds, 1e-6),
            )
        self.first_tokens.append((job.arrival + seconds, predicted, seconds))

    def finished(
        self, job: Job, reason: str, now: float, times: RequestMetrics | None = None
    ) -> None:
        """The end of a job. ``times`` are the engine's RequestMetrics, if it has told them."""
        self.registry.labelled("request_success_total", finished_reason=reason).add()
        self._observe("e2e_request_latency_seconds", now - job.arrival)
        self._observe("request_prompt_tokens", len(job.ids))
        self._observe("request_generation_tokens", job.num_output)
        self._observe("request_params_n", job.samples)
        if job.first_token is not None and job.last_token is not None:
            self._observe("request_decode_time_seconds", job.last_token - job.first_token)
        begun = None if times is None else times.first_scheduled_time
        if begun is not None:
            self._observe("request_queue_time_seconds", max(0.0, begun - job.arrival))
            if job.first_token is not None:
                self._observe("request_prefill_time_seconds", max(0.0, job.first_token - begun))
        if self._log_requests:
            log.info("request finished", extra=about(job, reason=reason, now=now))


def about(job: Job, now: float | None = None, **more: Any) -> dict[str, Any]:
    """Fields of a log line about a job."""
    fields = {"request_id": job.request_id, "prompt_tokens": len(job.ids), **more}
    fields["output_tokens"] = job.num_output
    if now is not None:
        fields["seconds"] = round(now - job.arrival, 4)
    if job.first_token is not None:
        fields["first_token_seconds"] = round(job.first_token - job.arrival, 4)
    if job.predicted_ttft is not None:
        fields["predicted_first_token_seconds"] = round(job.predicted_ttft, 4)
    return fields


def _register_engine(registry: Registry, engine: Engine, view: EngineView) -> None:
    """Numbers that the engine keeps: read when they are shown, from another thread."""
    scheduler, stats = engine.scheduler, engine.runner.stats
    register = registry.register
    register(
        "num_requests_running",
        "sequences that hold state",
        Gauge(lambda: view.held.running),
    )
    register(
        "num_requests_waiting",
        "sequences that wait for room, those that were swapped out included",
        Gauge(lambda: view.held.waiting),
    )
    register(
        "num_requests_swapped",
        "sequences whose state is in the swap space",
        Gauge(lambda: view.held.swapped),
    )
    register("engine_steps_total", "so far", ReadCounter(lambda: scheduler.num_steps))
    register(
        "write_tokens_total",
        "tokens through the first half of the model",
        ReadCounter(lambda: stats.write_tokens),
    )
    register(
        "read_rows_total",
        "rows through the second half",
        ReadCounter(lambda: stats.read_rows),
    )
    register(
        "skipped_rows_total",
        "tokens that the second half never saw: nobody needed their output",
        ReadCounter(lambda: stats.write_tokens - stats.read_rows),
    )
    for phase, name in _PHASES.items():
        register(
            "phase_seconds_total",
            _MODEL_PASS,
            ReadCounter(lambda name=name: getattr(stats, name)),
            phase=phase,
        )


def _register_memory(registry: Registry, view: EngineView) -> None:
    """What became of state that was wanted again: by prompts, and by who had to make room."""
    register = registry.register
    register(
        "num_preemptions_total",
        "sequences that had to make room",
        ReadCounter(lambda: sum(view.preemptions().values())),
    )
    for kind in ("swap", "recompute"):
        register(
            "preemptions_by_kind_total",
            "the same by what becomes of their state: kept in the swap space, or computed anew",
            ReadCounter(lambda k=kind: view.preemptions()[k]),
            kind=kind,
        )
    swap = {"swap_bytes": "in use in the swap space", "swap_capacity_bytes": "of the swap space"}
    for index, (name, meaning) in enumerate(swap.items()):
        register(name, f"bytes {meaning}", Gauge(lambda i=index: view.swap()[i]))
    totals = {
        "prefix_cache_queries_total": ("tokens looked up in the prefix cache", "query_tokens"),
        "prefix_cache_hits_total": ("tokens found there, and not computed", "hit_tokens"),
        "prefix_cache_evicted_pages_total": ("pages it had to give back", "evicted_pages"),
        "prefix_cache_evicted_states_total": ("states it had to give back", "evicted_states"),
    }
    for name, (meaning, part) in totals.items():
        register(name, meaning, ReadCounter(lambda p=part: getattr(view.prefix_stats(), p)))


def _register_pools(registry: Registry, view: EngineView) -> None:
    """The kinds of state: what sequences hold, what is kept for later ones, what there is."""

    def share() -> float:
        usage = view.held.usage
        return usage.pages_used / max(1, usage.num_pages)

    registry.register(
        "kv_cache_usage_perc",
        "pages of the global KV that sequences hold, 1 is all",
        Gauge(share),
    )
    amounts = {
        "pool_bytes": ("bytes of each kind of state that sequences hold", "used"),
        "pool_kept_bytes": ("bytes of each kind of state that only the prefix cache holds", "kept"),
        "pool_capacity_bytes": ("bytes of each kind of state that there are", "capacity"),
    }
    for name, (meaning, amount) in amounts.items():
        for kind in KINDS:
            registry.register(
                name,
                meaning,
                Gauge(lambda k=kind, a=amount: getattr(view.pool(k), a)),
                pool=kind,
            )
