"""One long prompt through a model: that it completes, its peak memory, and what a token costs late.

    python bench/long_context.py --length 1M --threads 2 novel.txt ...

reads the texts over and over up to the length, with one needle in their middle and the question for
it at the end. Prints the time to the first token, the answer, the time of a token of prefill around
64K and over the last 16K, and peak memory beside what models/spec.py says.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import torch

from yocolm.bench.memory import PeakMemory, memory_now
from yocolm.cli_arguments import size
from yocolm.engine.llm import LLM
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.steps import StepRecord

NEEDLE = " The special magic number for Lisbon is 7362915."
CUE = " What is the special magic number for Lisbon? The special magic number for Lisbon is"
ANSWER = "7362915"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--length", type=size, default=1_048_576, help="such as 256K or 1M")
    parser.add_argument("--depth", type=float, default=0.5, help="of the needle, 0 to 1")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(measure(arguments), indent=2))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures; bytes, seconds and microseconds a token."""
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=arguments.length + 16,
        max_num_seqs=1,
        enable_prefix_caching=False,
        max_num_batched_tokens=arguments.chunk,
        kv_memory=_state_bytes(arguments),
    )
    prompt = _prompt(llm, arguments)
    one = SamplingParams(temperature=0, max_tokens=1)
    llm.generate([{"prompt_token_ids": prompt[: 2 * arguments.chunk]}], one)
    warm = memory_now(os.getpid())["anonymous"]  # libraries, weights, a chunk's activations
    steps: list[StepRecord] = []
    with PeakMemory(os.getpid(), interval=0.2) as peak:
        llm.engine.watch.observer = steps.append
        began = time.monotonic()
        [result] = llm.generate(
            [{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=12)
        )
        seconds = time.monotonic() - began
    text = result.outputs[0].text
    return {
        "tokens": len(prompt),
        "answer": text,
        "right": text.strip().startswith(ANSWER),
        "seconds": round(seconds, 2),
        "prefill_us_per_token": _rates(steps, arguments.length),
        "bytes": _memory(arguments, warm, peak.bytes["anonymous"]),
    }


def _prompt(llm: LLM, arguments: argparse.Namespace) -> list[int]:
    tokenizer = llm.get_tokenizer()
    needle, cue = (tokenizer.encode(text, add_special_tokens=False) for text in (NEEDLE, CUE))
    texts = [
        tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
        for path in arguments.texts
    ]
    room = arguments.length - len(needle) - len(cue)
    hay = list(islice(chain.from_iterable(cycle(texts)), room))
    cut = int(arguments.depth * room)
    return [*hay[:cut], *needle, *hay[cut:], *cue]


def _state_bytes(arguments: argparse.Namespace) -> int:
    """Of one sequence of that length: its pages and slot, with scratch ones beside them."""
    spec, width = _spec(arguments)
    return spec.bytes(arguments.length + 4096, 64, width) + 4 * spec.slot_bytes(width) + (1 << 20)


def _spec(arguments: argparse.Namespace) -> tuple[Any, int]:
    from yocolm.models.registry import load_config
    from yocolm.models.spec import model_spec

    config = load_config(arguments.model)
    return model_spec(config), 2 if arguments.dtype == "bfloat16" else 4


def _rates(steps: list[StepRecord], length: int) -> dict[str, float]:
    """Microseconds a token of prefill steps: of 16K about 64K, and of the last 16K."""
    spans = {"around_64K": (57_344, 73_728), "last_16K": (length - 16_384, length)}
    found, done = {name: [0, 0.0] for name in spans}, 0
    for step in steps:
        done += step.load.tokens
        for name, (start, stop) in spans.items():
            # The last step reads the whole KV for its row: that is the first token, not prefill.
            if start < done <= stop and step.load.rows == 0:
                found[name][0] += step.load.tokens
                found[name][1] += step.seconds
    return {name: 1e6 * spent / tokens for name, (tokens, spent) in found.items() if tokens}


def _memory(arguments: argparse.Namespace, warm: int, peak: int) -> dict[str, int]:
    """Anonymous bytes: of the process once warm, what this length adds by formula, the peak."""
    spec, width = _spec(arguments)
    pages = spec.num_pages(arguments.length, 64) - spec.num_pages(2 * arguments.chunk, 64)
    added = pages * spec.page_bytes(64, width)
    return {
        "weights": spec.weight_bytes(width),
        "state": spec.slot_bytes(width),
        "warm": warm,
        "global_kv": added,
        "formula": warm + added,
        "peak": peak,
    }


if __name__ == "__main__":
    main()
