"""What the server counts and times, under vLLM's names where the meaning is the same."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from yocolm.engine.engine import Engine
from yocolm.engine.outputs import RequestMetrics, RequestOutput
from yocolm.server import metrics
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
_MODEL_PASS = "seconds of the host in each phase of the steps"


class Telemetry:
    """Metrics of one server. All methods but ``stepped`` are called on the event loop."""

    def __init__(self, engine: Engine, model_name: str, log_requests: bool = False) -> None:
        self._engine, self._log_requests = engine, log_requests
        self.registry = registry = Registry({"model_name": model_name})
        histogram, counter = registry.histogram, registry.counter
        self._to_first = histogram(
            "time_to_first_token_seconds", "arrival to first token", metrics.SECONDS_TO_FIRST
        )
        self._between = histogram(
            "inter_token_latency_seconds",
            "between the tokens of a request",
            metrics.SECONDS_PER_TOKEN,
        )
        of_request = metrics.SECONDS_OF_REQUEST
        self._whole = histogram("e2e_request_latency_seconds", "arrival to end", of_request)
        self._queued = histogram("request_queue_time_seconds", "arrival to first step", of_request)
        self._prefill = histogram(
            "request_prefill_time_seconds", "first step to first token", of_request
        )
        self._decode = histogram(
            "request_decode_time_seconds", "first token to last token", of_request
        )
        self._prompt_sizes = histogram("request_prompt_tokens", "of a request", metrics.TOKENS)
        self._output_sizes = histogram("request_generation_tokens", "of a request", metrics.TOKENS)
        self._samples = histogram("request_params_n", "n of a request", metrics.COUNTS)
        self._prompt_tokens = counter(
            "prompt_tokens_total", "of requests that have begun to answer"
        )
        self._output_tokens = counter("generation_tokens_total", "drawn")
        self.refused = counter("requests_refused_total", "because the queue was full")
        for reason in ("stop", "length", "abort", "error"):
            counter("request_success_total", "requests by how they ended", finished_reason=reason)
        self._step_tokens = histogram(
            "step_write_tokens", "tokens of a step through the first half", metrics.STEP_TOKENS
        )
        self._step_rows = histogram(
            "step_read_rows", "rows of a step through the second half", metrics.STEP_TOKENS
        )
        self._seen = (0, 0)
        _register_engine(registry, engine)

    def stepped(self) -> None:
        """A step has been run. Called in the engine's thread."""
        stats, (tokens, rows) = self._engine.runner.stats, self._seen
        self._seen = stats.write_tokens, stats.read_rows
        self._step_tokens.observe(self._seen[0] - tokens)
        self._step_rows.observe(self._seen[1] - rows)

    def output(self, job: Job, output: RequestOutput, now: float) -> None:
        """Something new of a job, at ``now``."""
        new = sum(len(sample.token_ids) for sample in output.outputs)
        for sample in output.outputs:
            job.finish_reason = sample.finish_reason or job.finish_reason
        served = output.finished and output.error is None  # embeddings, say, draw nothing
        if job.first_token is None and (new or served):
            self._prompt_tokens.add(len(job.ids))
        if not new:
            return
        if job.first_token is None:
            job.first_token = now
            self._to_first.observe(now - job.arrival)
        elif job.last_token is not None:
            self._between.observe(now - job.last_token)
        job.last_token = now
        job.num_output += new
        self._output_tokens.add(new)

    def finished(
        self, job: Job, reason: str, now: float, times: RequestMetrics | None = None
    ) -> None:
        """The end of a job. ``times`` are the engine's RequestMetrics, if it has told them."""
        self.registry.labelled("request_success_total", finished_reason=reason).add()
        self._whole.observe(now - job.arrival)
        self._prompt_sizes.observe(len(job.ids))
        self._output_sizes.observe(job.num_output)
        self._samples.observe(job.samples)
        if job.first_token is not None and job.last_token is not None:
            self._decode.observe(job.last_token - job.first_token)
        begun = None if times is None else times.first_scheduled_time
        if begun is not None:
            self._queued.observe(max(0.0, begun - job.arrival))
            if job.first_token is not None:
                self._prefill.observe(max(0.0, job.first_token - begun))
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
    return fields


def _register_engine(registry: Registry, engine: Engine) -> None:
    """Numbers that the engine keeps: read when they are shown, from another thread."""
    scheduler, stats, state = engine.scheduler, engine.runner.stats, engine.runner.state
    pages, slots = scheduler.page_pool, scheduler.slot_pool
    register = registry.register
    register(
        "num_requests_running",
        "sequences that hold state",
        Gauge(lambda: len(scheduler.running)),
    )
    register(
        "num_requests_waiting",
        "sequences that wait for room",
        Gauge(lambda: len(scheduler.waiting)),
    )
    register("num_preemptions_total", "so far", ReadCounter(lambda: scheduler.num_preemptions))
    register(
        "kv_cache_usage_perc",
        "pages of the global KV in use, 1 is all",
        Gauge(lambda: 1 - pages.num_free / max(1, pages.capacity)),
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
    kinds = {
        "global_kv": ([t for pair in state.pages for t in pair], pages),
        "window": ([t for pair in state.rings for t in pair], slots),
        "recurrent": (list(state.recurrent), slots),
    }
    for kind, (tensors, owners) in kinds.items():
        each = sum(_bytes_each(tensor) for tensor in tensors)
        register(
            "pool_bytes",
            "bytes of each kind of state in use",
            Gauge(lambda e=each, o=owners: e * (o.capacity - o.num_free)),
            pool=kind,
        )
        register(
            "pool_capacity_bytes",
            "bytes of each kind of state that there are",
            Gauge(lambda e=each, o=owners: e * o.capacity),
            pool=kind,
        )


def _bytes_each(tensor: torch.Tensor) -> int:
    """Bytes of one page or slot of a pool."""
    return tensor[0].numel() * tensor.element_size()
