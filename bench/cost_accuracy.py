"""How well steps and first tokens are predicted, on the real engine and a mixed trace.

    python bench/cost_accuracy.py random:160M --dtype bfloat16 --seconds 25
    python bench/cost_accuracy.py bundled --loads 0.7,0.9 --json accuracy.json

The model is calibrated; then requests of mixed lengths all come at once, which tells the capacity
in requests a second; then they arrive at random at each of ``--loads`` of it. Predictions are made
as in service: of a step before it runs, of a first token when its request comes. What is learned
in the first fifth is not judged.

Beside them stands what a repeat of the same run would have predicted: its steps, with all requests
added at the same steps, so that plans are the same (steps that differ are left out, and counted);
and its first tokens, with all requests arriving at the same times. No prediction of a machine that
others use can be much better than that.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from yocolm.config import ModelConfig
from yocolm.engine.engine import Engine
from yocolm.engine.request import Request
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.settings import EngineSettings
from yocolm.engine.steps import StepRecord
from yocolm.errors import YocolmError
from yocolm.models.base import CausalLM
from yocolm.models.registry import load_model

PHASES = ("self_prefill", "kv_finalize", "cross_decode", "sample", "overhead")
WARM_UP = 0.2  # of a run
LEAST = 2e-5  # seconds of a phase, below which its error is of no interest
LONG = 0.03  # share of prompts that are long
Lengths = list[tuple[int, int]]  # of prompt and reply


@dataclass
class Run:
    """What happened: every step, and of every request the step at which it was added and the
    predicted and actual seconds to its first token."""

    steps: list[StepRecord] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    actual: list[float] = field(default_factory=list)
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("model", help="as for yocolm serve")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--loads", default="0.7,0.9", help="shares of the capacity")
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals, each run")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for every single pair")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        loads = [float(text) for text in options.loads.split(",")]
        result = measure(options, loads)
    except (YocolmError, ValueError) as error:
        parser.error(str(error))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file)


def measure(options: argparse.Namespace, loads: list[float]) -> dict[str, Any]:
    """All runs; prints as it goes."""
    module, config = load_model(options.model, options.dtype, "cpu", packed=True)
    bench = Bench(module, config, options.max_num_seqs)
    print(f"calibrated in {bench.calibrate():.1f} s", flush=True)
    source = random.Random(options.seed)
    capacity = bench.capacity(source, options.seconds)
    print(f"capacity {capacity:.2f} requests a second", flush=True)
    results: dict[str, Any] = {"model": options.model, "capacity": capacity, "loads": {}}
    for load in loads:
        rate, lengths, times, now = load * capacity, [], [], 0.0
        while now < options.seconds:
            lengths.append(bench.lengths(source))
            times.append(now)
            now += source.expovariate(rate)
        run = bench.timed(lengths, times)
        again = bench.timed(lengths, times)
        same = bench.stepped(lengths, run.added)
        results["loads"][load] = judge(run, again, same)
        show(load, results["loads"][load], len(lengths), run.seconds)
    return results


class Bench:
    """One engine, and requests for it."""

    def __init__(self, module: torch.nn.Module, config: ModelConfig, seqs: int) -> None:
        self.limit = min(config.max_position_embeddings, 16_384)
        settings = EngineSettings(
            max_num_seqs=seqs, max_model_len=self.limit, kv_memory="1GiB", policy="fcfs"
        )
        self.engine = Engine(cast(CausalLM, module), config, settings=settings)
        self.vocab = min(config.vocab_size, 50_000)
        self._count = 0

    def calibrate(self) -> float:
        """Seconds that it took."""
        begin = time.perf_counter()
        self.engine.calibrate(refresh=True)
        return time.perf_counter() - begin

    def lengths(self, source: random.Random) -> tuple[int, int]:
        """Of a prompt, mostly of some hundred tokens, and of its reply."""
        most = self.limit - 128
        median = min(256, most // 4) * (16 if source.random() < LONG else 1)
        return min(max(8, int(median * source.lognormvariate(0, 0.8))), most), source.randint(
            16, 96
        )

    def capacity(self, source: random.Random, seconds: float) -> float:
        """Requests a second when there are always some waiting: twice, the second counts."""
        rate = 1.0
        for wanted in (seconds / 8, seconds / 2):
            count = max(8, round(rate * wanted))
            lengths = [self.lengths(source) for _ in range(count)]
            rate = count / self.timed(lengths, [0.0] * count).seconds
        return rate

    def timed(self, lengths: Lengths, times: list[float]) -> Run:
        """Requests arrive at those seconds."""
        begin = time.monotonic()

        def due(count: int, _: int) -> bool:
            return begin + times[count] <= time.monotonic()

        def wait(count: int) -> None:
            time.sleep(max(0.0, begin + times[count] - time.monotonic()))

        return self._run(lengths, due, wait, lambda count: begin + times[count])

    def stepped(self, lengths: Lengths, steps: list[int]) -> Run:
        """Requests are added before those steps."""
        return self._run(lengths, lambda i, step: steps[i] <= step, lambda _: None, None)

    def _run(
        self,
        lengths: Lengths,
        due: Callable[[int, int], bool],
        wait: Callable[[int], None],
        arrival: Callable[[int], float] | None,
    ) -> Run:
        engine, run, live = self.engine, Run(), {}
        engine.watch.observer, engine.watch.learns = run.steps.append, True
        requests: list[Request] = []
        prompts = [self._prompt(length) for length, _ in lengths]
        begin = time.monotonic()
        while len(requests) < len(lengths) or live:
            while len(requests) < len(lengths) and due(len(requests), len(run.steps)):
                i = len(requests)
                at = None if arrival is None else arrival(i)
                request = self._add(prompts[i], lengths[i][1], at)
                run.added.append(len(run.steps))
                assert request.predicted_ttft is not None
                run.predicted.append(request.predicted_ttft)
                requests.append(request)
                live[request.request_id] = request
            if not live:
                wait(len(requests))
                continue
            for output in engine.step():
                if output.finished:
                    del live[output.request_id]
        run.seconds = time.monotonic() - begin
        engine.watch.observer = None
        for request in requests:
            assert request.first_token is not None, request.error
            run.actual.append(request.first_token - request.arrival)
        return run

    def _prompt(self, length: int) -> list[int]:
        """Tokens that no other has, so that nothing is found in the prefix cache."""
        self._count += 1
        source = random.Random(self._count)
        return [source.randrange(self.vocab) for _ in range(length)]

    def _add(self, prompt: list[int], num_output: int, arrival: float | None) -> Request:
        self._count += 1
        params = SamplingParams(max_tokens=num_output, ignore_eos=True, detokenize=False)
        name = str(self._count)
        self.engine.add_request(name, prompt, params, arrival_time=arrival)
        return self.engine.scheduler.requests[name]


def judge(run: Run, again: Run, same: Run) -> dict[str, Any]:
    """Pairs of predicted and actual seconds behind the warm-up, and of repeat and actual."""
    steps = run.steps[int(WARM_UP * len(run.steps)) :]
    first = int(WARM_UP * len(run.actual))
    kinds = {
        "all": steps,
        "decodes": [step for step in steps if not step.load.chunks],
        "with chunks": [step for step in steps if step.load.chunks],
    }
    pairs = zip(run.steps, same.steps, strict=False)
    alike = [(b.seconds, a.seconds) for a, b in pairs if a.load == b.load]
    return {
        "steps": {
            kind: [(step.predicted.total, step.seconds) for step in chosen]
            for kind, chosen in kinds.items()
        },
        "phases": {
            phase: [
                (getattr(step.predicted, phase), getattr(step.actual, phase))
                for step in steps
                if getattr(step.actual, phase) > LEAST
            ]
            for phase in PHASES
        },
        "repeated steps": alike[int(WARM_UP * len(alike)) :],
        "num_steps": len(run.steps),
        "ttft": list(zip(run.predicted, run.actual, strict=True))[first:],
        "repeated ttft": list(zip(again.actual, run.actual, strict=True))[first:],
        "ttft of repeat": list(zip(again.predicted, again.actual, strict=True))[first:],
    }


def show(load: float, result: dict[str, Any], count: int, seconds: float) -> None:
    """A table of error distributions."""
    print(f"\nload {load:.2f}: {count} requests, {result['num_steps']} steps in {seconds:.1f} s")
    print(f"{'':28}{'n':>6}{'mean ms':>9}{'MAPE %':>8}{'p50':>7}{'p90':>7}{'p99':>8}{'bias %':>8}")
    for kind, pairs in result["steps"].items():
        line(f"step, {kind}", pairs)
    line("step, by a repeat", result["repeated steps"])
    for phase, pairs in result["phases"].items():
        line(f"  {phase}", pairs)
    line("TTFT", result["ttft"])
    line("TTFT in the repeat", result["ttft of repeat"])
    line("TTFT, by a repeat", result["repeated ttft"])
    print(flush=True)


def line(name: str, pairs: Iterable[tuple[float, float]]) -> None:
    """Errors as shares of what was; the bias is that of the sums."""
    pairs = [(predicted, actual) for predicted, actual in pairs if actual > 0]
    if not pairs:
        return
    errors = sorted(abs(predicted / actual - 1) for predicted, actual in pairs)
    sums = [sum(values) for values in zip(*pairs, strict=True)]
    quantiles = [errors[min(len(errors) - 1, int(q * len(errors)))] for q in (0.5, 0.9, 0.99)]
    print(
        f"{name:28}{len(pairs):6}{1e3 * sums[1] / len(pairs):9.2f}"
        f"{100 * sum(errors) / len(errors):8.1f}"
        + "".join(f"{100 * q:{width}.1f}" for q, width in zip(quantiles, (7, 7, 8), strict=True))
        + f"{100 * (sums[0] / sums[1] - 1):+8.1f}"
    )


if __name__ == "__main__":
    main()
