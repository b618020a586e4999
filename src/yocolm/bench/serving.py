"""`yocolm bench serving`: a trace replayed in real time on an engine in this process, and a sweep.

Requests are token ids and their answers are not turned into text: what is measured is the engine.
They are added between steps, as the server adds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch

from yocolm import __version__
from yocolm.bench.recording import Recording, RequestTimes, pool_sizes
from yocolm.config import ModelConfig
from yocolm.engine.cost import CostModel
from yocolm.engine.engine import Engine, require_device
from yocolm.engine.outputs import RequestOutput
from yocolm.engine.policy import TPOT_FACTOR, TTFT_FACTOR
from yocolm.engine.sampling_params import RequestOutputKind, SamplingParams
from yocolm.engine.settings import EngineSettings
from yocolm.engine.steps import Observer
from yocolm.engine.trace import Tokens, Trace, TraceRequest
from yocolm.errors import ConfigError, RequestError
from yocolm.models.base import CausalLM
from yocolm.models.registry import load_model

Say = Callable[[str], None]
SWEEP_LENGTHS = (128, 512, 2048)
NEWS = 5.0  # seconds between two lines about a run that goes on


class Prompts:
    """The prompts of a trace, as ids that a model accepts: the same whenever it is replayed.

    ``seed`` makes replays of one trace differ. A turn of a session goes on behind what the engine
    has really answered to the turn before.
    """

    def __init__(self, trace: Trace, vocab_size: int, media: Iterable[int], seed: int) -> None:
        self._trace, self._tokens, self._seed = trace, Tokens(trace, vocab_size), seed
        self._vocab, self._media = vocab_size, sorted(set(media))
        self._usable = next(i for i in range(vocab_size) if i not in self._media)
        self._left: dict[str, list[int]] = {}

    def prompt(self, index: int) -> list[int]:
        """The token ids of request ``index``."""
        request = self._trace[index]
        known: list[int] = []
        if request.session is not None:
            known = self._left.get(request.session, [])[
                : min(request.shared, request.prompt_tokens)
            ]
        fresh = self._tokens.span(index, len(known), request.prompt_tokens)
        fresh = (fresh + self._seed) % self._vocab
        fresh[np.isin(fresh, self._media)] = self._usable
        return known + fresh.tolist()

    def keep(self, session: str, tokens: list[int]) -> None:
        """What the next turn of ``session`` goes on behind: prompt and answer of this one."""
        self._left[session] = tokens


@dataclass
class _Live:
    """A request on its way."""

    request: TraceRequest
    times: RequestTimes
    prompt: list[int]
    due: float
    last: float | None = None  # when its last token came
    output: list[int] = field(default_factory=list)


class Replay:
    """One run of a trace.

    max_concurrency: requests that are in the engine at once; others are sent, and counted as
        arrived, when one of these has ended.
    solo: what requests take alone; targets that nobody gives are multiples of it, if it is there.
    """

    def __init__(
        self,
        engine: Engine,
        trace: Trace,
        *,
        seed: int = 0,
        max_concurrency: int | None = None,
        solo: CostModel | None = None,
        say: Say = lambda _: None,
    ) -> None:
        check_lengths(engine, trace)
        self._engine, self._say, self._solo = engine, say, solo
        self._limit = max_concurrency or len(trace)
        media = (token for _, token in engine.config.media_token_ids)
        self._prompts = Prompts(trace, engine.config.vocab_size, media, seed)
        order = sorted(range(len(trace)), key=lambda index: trace[index].arrival)
        self._trace = trace
        self._waiting = order[::-1]  # places in the trace, the next one last
        self._held: dict[str, list[int]] = {}  # further turns of live sessions
        self._live: dict[str, _Live] = {}
        self._ended: dict[str, float] = {}  # when the last turn of a session did
        self._room_since = 0.0  # when the number of live ones fell below the limit
        self.recording = Recording()
        self.interrupted = False

    def run(self) -> Recording:
        """Until all have ended. An interrupt (Ctrl-C) ends it too: what came so far is kept."""
        begin = self.recording.begin = time.monotonic()
        told, total = begin, len(self._waiting)
        with observed(self._engine, self.recording.step):
            try:
                while self._waiting or self._live:
                    self._send(begin)
                    self._advance(begin)
                    if (now := time.monotonic()) - told >= NEWS:
                        told, done = now, total - len(self._waiting) - len(self._live)
                        self._say(
                            f"{now - begin:.0f} s: {done} of {total} requests have ended, "
                            f"{len(self._live)} are on their way"
                        )
            except KeyboardInterrupt:
                self.interrupted = True
                self._give_up()
        self.recording.requests.sort(key=lambda request: request.arrival)
        return self.recording

    def _send(self, begin: float) -> None:
        """Add what is due and has room."""
        now = time.monotonic() - begin
        while self._waiting and len(self._live) < self._limit:
            request = self._trace[self._waiting[-1]]
            if request.arrival > now:
                return
            index = self._waiting.pop()
            if request.session is not None and request.session in self._held:
                self._held[request.session].append(index)
            else:
                ended = self._ended.get(request.session or "", 0.0)
                self._add(index, max(request.arrival, self._room_since, ended), begin)

    def _add(self, index: int, due: float, begin: float) -> bool:
        """Whether the engine has taken it."""
        request, prompt = self._trace[index], self._prompts.prompt(index)
        times = RequestTimes(
            due,
            len(prompt),
            ttft_target=request.ttft_target or self._engine.settings.ttft_target,
            tpot_target=request.tpot_target or self._engine.settings.tpot_target,
        )
        if self._solo is not None:
            context = request.prompt_tokens + request.output_tokens // 2
            times.ttft_target = times.ttft_target or TTFT_FACTOR * self._solo.solo_ttft(len(prompt))
            times.tpot_target = times.tpot_target or TPOT_FACTOR * self._solo.solo_tpot(context)
        self.recording.requests.append(times)
        params = SamplingParams(
            temperature=0,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        urgency = request.priority, request.ttft_target, request.tpot_target
        try:
            self._engine.enqueue(str(index), prompt, params, None, begin + due, *urgency)
        except RequestError as error:
            times.error = str(error)
            return False
        self._live[str(index)] = _Live(request, times, prompt, due)
        if request.session is not None:
            self._held.setdefault(request.session, [])
        return True

    def _advance(self, begin: float) -> None:
        """One step, or a nap until the next request is due."""
        if self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.monotonic() - begin
            for output in outputs:
                self._note(output, now, begin)
        elif self._waiting:
            due = self._trace[self._waiting[-1]].arrival - (time.monotonic() - begin)
            time.sleep(max(due, 0.0))

    def _note(self, output: RequestOutput, now: float, begin: float) -> None:
        live = self._live[output.request_id]
        for sample in output.outputs:
            if not sample.token_ids:
                continue
            live.output += sample.token_ids
            if live.last is None:
                live.times.ttft = now - live.due
            else:
                self.recording.gaps.append(now - live.last)
            live.last = now
        if output.finished:
            self._end(live, output, now, begin)

    def _end(self, live: _Live, output: RequestOutput, now: float, begin: float) -> None:
        del self._live[output.request_id]
        times = live.times
        times.e2e, times.error = now - live.due, output.error
        times.output_tokens, times.cached_tokens = len(live.output), output.num_cached_tokens
        if output.metrics is not None:
            times.preemptions = output.metrics.num_preemptions
            times.predicted_ttft = output.metrics.predicted_ttft
        if len(self._live) == self._limit - 1:
            self._room_since = now
        session = live.request.session
        if session is not None:
            self._prompts.keep(session, live.prompt + live.output)
            self._ended[session] = now
            self._go_on(session, now, begin)

    def _go_on(self, session: str, now: float, begin: float) -> None:
        """Add the next turn that was due before this one had ended."""
        held = self._held[session]
        while held:
            if self._add(held.pop(0), now, begin):
                return
        del self._held[session]

    def _give_up(self) -> None:
        for request_id, live in self._live.items():
            self._engine.abort(request_id)
            live.times.error = "interrupted"
            live.times.output_tokens = len(live.output)
        self._live.clear()
        self._waiting.clear()


def check_lengths(engine: Engine, trace: Trace) -> None:
    """Raise ConfigError, before anything runs, if the engine could never serve one of them."""
    if not trace:
        raise ConfigError("the trace has no requests: give at least one")
    scheduler = engine.scheduler
    room = scheduler.page_pool.capacity * scheduler.page_pool.page_size
    longest = engine.max_model_len
    limits = (
        (longest, f"max_model_len={longest}"),
        (room, f"the {room} tokens that the KV pages hold"),
    )
    number, request = max(
        enumerate(trace, 1), key=lambda each: each[1].prompt_tokens + each[1].output_tokens
    )
    length = request.prompt_tokens + request.output_tokens
    for limit, what in limits:
        if length > limit:
            raise ConfigError(
                f"the longest request, {number} of the trace, has {request.prompt_tokens} + "
                f"{request.output_tokens} tokens, above {what}: lower --length-scale, "
                "or raise --max-model-len or --kv-memory"
            )


@contextmanager
def observed(engine: Engine, observer: Observer) -> Iterator[None]:
    """While its block runs, ``observer`` is told of every step, and first tokens are predicted."""
    watch = engine.watch
    before = watch.observer, watch.learns
    watch.observer, watch.learns = observer, True
    try:
        yield
    finally:
        watch.observer, watch.learns = before


@dataclass(frozen=True)
class Sweep:
    """Which cells to measure. ``lengths``: of prompts; None is what fits of SWEEP_LENGTHS."""

    concurrencies: tuple[int, ...]
    lengths: tuple[int, ...] | None
    decode: int
    repeats: int

    def fitting(self, limit: int) -> tuple[int, ...]:
        """The lengths, if ``limit`` tokens hold them and what is drawn; else ConfigError."""
        if self.lengths is None:
            return tuple(n for n in SWEEP_LENGTHS if n + self.decode <= limit)
        if max(self.lengths) + self.decode > limit:
            raise ConfigError(
                f"{max(self.lengths)} prompt tokens and {self.decode} more exceed the model's "
                f"{limit}; lower --sweep-prompt-lengths or --sweep-decode"
            )
        return self.lengths


def measure_serving(
    model: str,
    dtype: str,
    device: str,
    trace: Trace,
    trace_name: str,
    *,
    settings: EngineSettings,
    calibrate: bool,
    threads: int,
    max_concurrency: int | None,
    seed: int,
    sweep: Sweep | None,
    say: Say,
) -> dict[str, Any]:
    """Replay ``trace``, then measure the ``sweep``; what ``serving_report.report`` shows.

    ``calibrate``: have the cost model know this machine, which takes seconds the first time.
    Raises YocolmError if the model cannot be loaded or a request does not fit.
    """
    place = require_device(device)
    module, config = load_model(model, dtype, place, packed=True, show_progress=True)
    limit = settings.max_model_len or config.max_position_embeddings
    lengths = sweep.fitting(limit) if sweep else ()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine = Engine(cast(CausalLM, module), config, settings=settings)
        try:
            if calibrate:
                say("calibrating the cost model")
                engine.calibrate()
            result = _about(engine, model, str(place), threads, trace_name)
            result |= _replayed(engine, trace, seed, max_concurrency, say)
        finally:
            engine.close()
        del engine  # and its pools
        if sweep is not None and lengths and not result["interrupted"]:
            result["sweep"] = _sweep(module, config, settings, sweep, lengths, say)
    finally:
        torch.set_num_threads(before)
    return result


def _replayed(
    engine: Engine, trace: Trace, seed: int, max_concurrency: int | None, say: Say
) -> dict[str, Any]:
    solo = engine.cost.copy()
    run = Replay(engine, trace, seed=seed, max_concurrency=max_concurrency, solo=solo, say=say)
    recording = run.run()
    return {**recording.to_json(), "interrupted": run.interrupted, "sweep": []}


def _about(
    engine: Engine, model: str, device: str, threads: int, trace_name: str
) -> dict[str, Any]:
    weight = next(iter(engine.runner.model.parameters()))
    settings = asdict(engine.settings)
    settings["max_num_seqs"] = engine.scheduler.max_num_seqs
    settings["max_model_len"] = engine.max_model_len
    return {
        "model": model,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": device,
        "threads": threads,
        "version": __version__,
        "begun": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "trace": trace_name,
        "settings": settings,
        "cost_model": f"{engine.cost.hardware.name} ({engine.cost.hardware.source})",
        "pools": pool_sizes(engine.spec, engine.settings.page_size, weight.element_size()),
    }


def _sweep(
    module: torch.nn.Module,
    config: ModelConfig,
    settings: EngineSettings,
    sweep: Sweep,
    lengths: tuple[int, ...],
    say: Say,
) -> list[dict[str, Any]]:
    """Seconds to the first token and per token, fast prefill on and off in turn, for each
    concurrency with each prompt length: one value a request, of twice as many as may be at once."""
    small = replace(
        settings,
        max_num_seqs=max(sweep.concurrencies),
        max_model_len=max(lengths) + sweep.decode,
    )
    engines: dict[str, Engine] = {}
    cells = []
    try:
        for side in ("on", "off"):
            fast = replace(small, fast_prefill=side == "on")
            engines[side] = Engine(cast(CausalLM, module), config, settings=fast)
        for concurrency in sweep.concurrencies:
            for length in lengths:
                say(f"sweep: {concurrency} at once, prompts of {length}")
                sides = _cell(engines, concurrency, length, sweep)
                cells.append({"concurrency": concurrency, "prompt": length, "sides": sides})
    except KeyboardInterrupt:
        say("interrupted: the sweep ends here")
    finally:
        for engine in engines.values():
            engine.close()
    return cells


def _cell(
    engines: dict[str, Engine], concurrency: int, length: int, sweep: Sweep
) -> dict[str, dict[str, list[float]]]:
    sides: dict[str, dict[str, list[float]]] = {side: {"ttft": [], "tpot": []} for side in engines}
    for repeat in range(sweep.repeats + 1):  # the first is not counted: it only meets new shapes
        for side, engine in engines.items():
            trace = [TraceRequest(0.0, length, sweep.decode)] * (2 * concurrency if repeat else 1)
            seed = repeat + 1009 * length + 31 * concurrency
            run = Replay(engine, trace, seed=seed, max_concurrency=concurrency)
            recording = run.run()
            if run.interrupted:
                raise KeyboardInterrupt
            for request in recording.requests if repeat else ():
                for name, found in sides[side].items():
                    value = getattr(request, name)
                    if value is not None:
                        found.append(value)
    return sides
