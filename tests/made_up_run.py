"""A serving run that never was, with everything in it that a report has to show."""

from __future__ import annotations

import math
import random
from typing import Any

from yocolm.bench.recording import Recording, RequestTimes
from yocolm.engine.cost import StepCost, StepLoad
from yocolm.engine.steps import PoolUsage, StepRecord


def made_up_step(draw: random.Random, at: float, share: float, predicts: bool = True) -> StepRecord:
    """A step at ``share`` of a run; some have chunks of prompts."""
    busy = int(2 + 12 * (0.5 - 0.5 * math.cos(2 * math.pi * share)) + draw.randrange(4))
    chunk = draw.choice([0, 0, 0, 0, 512, 1024])
    actual = StepCost(
        3e-3 + chunk * 6e-5 * draw.uniform(0.9, 1.2),
        2e-4,
        4e-3 * draw.uniform(0.9, 1.3),
        4e-4,
        3e-4,
    )
    off = draw.gauss(1.0, 0.06) if predicts else 0.0
    predicted = StepCost(*(off * getattr(actual, name) for name in actual.__dataclass_fields__))
    usage = PoolUsage(
        num_pages=1000,
        num_slots=32,
        pages_used=busy * 40,
        pages_kept=int(300 * share),
        slots_used=busy,
        slots_kept=int(12 * share),
        blocks_swapped=max(0, busy - 14) * 20,
        states_swapped=max(0, busy - 14),
    )
    load = StepLoad(tokens=chunk + busy, rows=busy, sequences=busy, chunks=int(chunk > 0))
    waiting = max(0, busy - 10)
    return StepRecord(at, actual.total * 1.02, load, actual, predicted, usage, busy, waiting)


def made_up_requests(
    draw: random.Random, count: int, seconds: float, predicts: bool = True
) -> list[RequestTimes]:
    requests = []
    for i in range(count):
        ttft = draw.lognormvariate(-2.2, 0.6)
        request = RequestTimes(
            arrival=seconds * i / count,
            prompt_tokens=draw.randrange(32, 4096),
            output_tokens=draw.randrange(2, 200),
            cached_tokens=draw.choice([0, 0, 64]),
            predicted_ttft=ttft * draw.gauss(1.02, 0.12) if predicts else None,
            ttft=ttft,
            ttft_target=0.3,
            tpot_target=0.03,
        )
        request.e2e = ttft + request.output_tokens * draw.lognormvariate(-4.2, 0.3)
        requests.append(request)
    return requests


def made_up_run(
    num_steps: int = 600,
    num_requests: int = 80,
    *,
    predicts: bool = True,
    windows: bool = True,
    sweep: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """As ``yocolm bench serving --json`` saves it."""
    draw = random.Random(seed)
    recording, at = Recording(), 0.0
    for i in range(num_steps):
        record = made_up_step(draw, at, i / num_steps, predicts)
        recording.step(record)
        at = record.at + record.seconds + draw.choice([0.0] * 80 + [0.3])
    recording.requests = made_up_requests(draw, num_requests, at, predicts)
    recording.gaps.extend(draw.lognormvariate(-4.6, 0.4) for _ in range(num_requests * 30))
    return {
        "model": "random:160M",
        "dtype": "bfloat16",
        "device": "cpu",
        "threads": 2,
        "version": "0.0",
        "begun": "2026-01-01 12:00:00 UTC",
        "trace": "made up",
        "cost_model": "a machine (measured)",
        "settings": {"policy": "traffic", "max_num_seqs": 32},
        "machine": {"cpu": "a CPU", "cores": 2, "python": "3.13"},
        "pools": {
            "page_size": 64,
            "page_bytes": 65536,
            "window_bytes": 2_000_000 * windows,
            "recurrent_bytes": 6_000_000,
        },
        **recording.to_json(),
        "sweep": made_up_sweep(draw) if sweep else [],
    }


def made_up_sweep(draw: random.Random) -> list[dict[str, Any]]:
    def times(base: float) -> list[float]:
        return [base * draw.uniform(0.9, 1.2) for _ in range(4)]

    return [
        {
            "concurrency": concurrency,
            "prompt": prompt,
            "sides": {
                side: {
                    "ttft": times(1e-4 * prompt * concurrency**0.7 * factor),
                    "tpot": times(4e-3 * concurrency**0.5 * (1 + prompt / 8192)),
                }
                for side, factor in (("on", 0.55), ("off", 1.0))
            },
        }
        for concurrency in (1, 4, 16)
        for prompt in (128, 512, 2048, 8192)
    ]
