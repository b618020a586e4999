"""`yocolm bench offline`: this engine, with fast prefill on and off in turn."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from yocolm.bench.memory import PeakMemory
from yocolm.bench.report import gigabytes, milliseconds, ratio, spread, table
from yocolm.config import ModelConfig
from yocolm.engine.engine import Engine
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.settings import EngineSettings
from yocolm.errors import ConfigError
from yocolm.models.base import CausalLM
from yocolm.models.registry import load_model
from yocolm.models.spec import model_spec

Prompts = list[list[int]]
Times = dict[str, list[float]]


def measure_offline(
    model: str,
    dtype: str,
    *,
    threads: int,
    prompt_lengths: Iterable[int],
    batches: Iterable[int],
    decode: int,
    repeats: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Seconds to the first token of all prompts and per token after it, and peak memory.

    One model serves two engines, fast prefill ``on`` and ``off``. Raises YocolmError if the model
    cannot be loaded or a workload does not fit.
    """
    lengths, sizes = list(prompt_lengths), list(batches)
    module, config = load_model(model, dtype, "cpu", packed=True, show_progress=True)
    limit = config.max_position_embeddings
    if max(lengths) + decode > limit:
        raise ConfigError(
            f"{max(lengths)} prompt tokens and {decode} more exceed the model's {limit}; lower "
            "--prompt-lengths or --decode"
        )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engines = {
            side: _engine(module, config, side == "on", max(sizes), max(lengths) + decode)
            for side in ("on", "off")
        }
        rows = []
        for batch in sizes:
            for length in lengths:
                say(f"{length} tokens, batch {batch}")
                rows.append(_cell(engines, config, length, batch, decode, repeats))
    finally:
        torch.set_num_threads(before)
    return {"model": model, "threads": threads, "decode": decode, "rows": rows}


def _engine(
    module: torch.nn.Module, config: ModelConfig, fast: bool, batch: int, length: int
) -> Engine:
    settings = EngineSettings(max_num_seqs=batch, max_model_len=length, fast_prefill=fast)
    return Engine(cast(CausalLM, module), config, settings=settings)


def _cell(
    engines: dict[str, Engine],
    config: ModelConfig,
    length: int,
    batch: int,
    decode: int,
    repeats: int,
) -> dict[str, Any]:
    prompts = _prompts(length, batch, config.vocab_size)
    sides: dict[str, Any] = {}
    for side, engine in engines.items():  # not counted: the first pass also meets new shapes
        with PeakMemory(os.getpid()) as peak:
            run_once(engine, prompts, min(decode, 2))
        sides[side] = {"ttft": [], "tpot": [], "throughput": [], "memory": peak.bytes}
    for _ in range(repeats):
        for side, engine in engines.items():
            first, each = run_once(engine, prompts, decode)
            sides[side]["ttft"].append(first)
            if each is not None:
                sides[side]["tpot"].append(each)
            total = first + (each or 0.0) * (decode - 1)
            sides[side]["throughput"].append(batch * (length + decode) / total)
    return {
        "prompt": length,
        "batch": batch,
        "sides": sides,
        "saved": 1 - ratio(sides["on"]["ttft"], sides["off"]["ttft"]),
        "predicted": model_spec(config).skipped_share(length),
    }


def run_once(engine: Engine, prompts: Prompts, new_tokens: int) -> tuple[float, float | None]:
    """Seconds until all prompts have a token, and per step after that (None with one token)."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    begin = time.perf_counter()
    for i, ids in enumerate(prompts):
        engine.add_request(str(i), ids, params)
    waiting, first = {str(i) for i in range(len(prompts))}, begin
    while engine.has_unfinished_requests():
        started = {o.request_id for o in engine.step() if o.outputs[0].token_ids}
        if waiting and not (waiting := waiting - started):
            first = time.perf_counter()
    each = (time.perf_counter() - first) / (new_tokens - 1) if new_tokens > 1 else None
    return first - begin, each


def _prompts(length: int, batch: int, vocab: int) -> Prompts:
    draw = random.Random(length * 1009 + batch)
    return [[draw.randrange(vocab) for _ in range(length)] for _ in range(batch)]


def offline_table(result: dict[str, Any]) -> str:
    """Two lines a workload, fast prefill on and off; what it saves stands beside the FLOPs'."""
    head = ["tokens x batch", "fast", "TTFT ms (range)", "TPOT ms (range)", "tokens/s"]
    head += ["1-on/off", "predicted", "anonymous GB", "file-backed GB"]
    lines = []
    for row in result["rows"]:
        for side, found in row["sides"].items():
            memory, on = found["memory"], side == "on"
            lines.append(
                [
                    f"{row['prompt']} x {row['batch']}",
                    side,
                    milliseconds(found["ttft"]),
                    milliseconds(found["tpot"]),
                    f"{spread(found['throughput'])['median']:.0f}",
                    f"{row['saved']:.3f}" if on else "",
                    f"{row['predicted']:.3f}" if on else "",
                    gigabytes(memory.get("anonymous")),
                    gigabytes(memory.get("file")),
                ]
            )
    return table(head, lines)
