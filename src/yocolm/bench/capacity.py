"""What one GPU holds and serves of a model and of its Transformer twin, simulated.

    python -m yocolm.bench.capacity                     # YOCO-3B on h100 and h200, as in the docs

For every context: how many requests fit in memory beside the weights, how long one takes alone,
how many tokens a second all that fit decode together, and how many requests a second are completed
when all are there at once, each a fresh prompt of that length and some new tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from yocolm.bench.simulated import Setup, simulate
from yocolm.config import YocoConfig
from yocolm.engine.cost import StepLoad
from yocolm.engine.hardware import Hardware
from yocolm.engine.settings import EngineSettings
from yocolm.engine.trace import TraceRequest
from yocolm.errors import ConfigError
from yocolm.eval.charts import length_text
from yocolm.models.presets import llama_twin, preset

CONTEXTS = (8 * 1024, 128 * 1024, 1024 * 1024)
OUTPUT = 256  # new tokens of each request
MAX_SEQS = 256  # sequences at once, where more would fit
FEW, MANY = 4, 512  # requests that are simulated


@dataclass(frozen=True)
class Capacity:
    """At one context. Bytes a request; seconds to the first token and a token, alone; held: how
    many requests fit; decode_rate: tokens a second of up to MAX_SEQS of them; serve_rate: requests
    completed a second. Rates are 0 where not one fits."""

    context: int
    request_bytes: int
    held: int
    ttft: float
    tpot: float
    decode_rate: float
    serve_rate: float


def capacity(setup: Setup, context: int) -> Capacity:
    """Of prompts that leave room for ``OUTPUT`` new tokens within ``context``."""
    spec, size, cost = setup.spec, setup.dtype_bytes, setup.cost()
    page_size = setup.settings.page_size
    each = spec.bytes(context, page_size, size)
    held = setup.kv_memory() // each
    prompt = context - OUTPUT
    seqs = min(held, MAX_SEQS)
    decode = serve = 0.0
    if held:
        load = StepLoad()
        for _ in range(seqs):
            cost.add(load, context - 1, 1, 1, 1)
        decode = seqs / cost.seconds(load)
        settings = EngineSettings(
            max_num_seqs=seqs, max_num_batched_tokens=2048, prefix_caching=False, swap_space=0
        )
        count = max(FEW, min(2 * seqs, MANY))
        trace = [TraceRequest(0.0, prompt, OUTPUT) for _ in range(count)]
        run = simulate(Setup(setup.config, setup.hardware, settings, size), trace)
        serve = sum(r.e2e is not None for r in run.requests) / run.seconds
    ttft = cost.solo_ttft(prompt)
    return Capacity(context, each, held, ttft, cost.solo_tpot(context), decode, serve)


def markdown(names: Sequence[str], contexts: Sequence[int], model: str) -> str:
    """The table, a line for every machine and context; ours, the twin's, and how many times."""
    config = preset(model)
    if not isinstance(config, YocoConfig):
        raise ConfigError(f"model {model!r} has no Transformer twin; give a size such as 3B")
    twin = llama_twin(config)
    lines = [
        "| | bytes a request | held | TTFT alone, s | TPOT alone, ms | tokens/s decoded | "
        "requests/s served |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        hardware = Hardware.load(name)
        for context in contexts:
            ours, theirs = (
                capacity(Setup(one, hardware, EngineSettings()), context) for one in (config, twin)
            )
            lines.append(
                f"| {name}, {length_text(context)} | " + " | ".join(_cells(ours, theirs)) + " |"
            )
    return "\n".join(lines)


def _cells(ours: Capacity, theirs: Capacity) -> list[str]:
    def beside(one: float, other: float, gain: float, factor: float = 1.0) -> str:
        times = f" ({gain:.3g}x)" if 0 < gain < inf else ""
        return f"{_short(one * factor)} / {_short(other * factor)}{times}"

    def over(one: float, other: float) -> float:
        return one / other if other else inf

    return [
        beside(
            ours.request_bytes,
            theirs.request_bytes,
            over(theirs.request_bytes, ours.request_bytes),
            1e-6,
        )
        + " MB",
        beside(ours.held, theirs.held, over(ours.held, theirs.held)),
        beside(ours.ttft, theirs.ttft, over(theirs.ttft, ours.ttft)),
        beside(ours.tpot, theirs.tpot, over(theirs.tpot, ours.tpot), 1e3),
        beside(ours.decode_rate, theirs.decode_rate, over(ours.decode_rate, theirs.decode_rate)),
        beside(ours.serve_rate, theirs.serve_rate, over(ours.serve_rate, theirs.serve_rate)),
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def main(argv: Sequence[str] | None = None) -> int:
    about = __doc__ or ""
    parser = argparse.ArgumentParser(
        prog="python -m yocolm.bench.capacity", description=about.splitlines()[0]
    )
    parser.add_argument("--model", default="3B", help="a preset that has a twin")
    parser.add_argument("--hardware", nargs="+", default=["h100", "h200"], help="names or files")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, help="tokens")
    options = parser.parse_args(argv)
    print(markdown(options.hardware, options.contexts, options.model))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
