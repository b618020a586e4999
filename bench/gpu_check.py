"""Checks a device against the CPU and prints a table: agreement first, then speed.

    python bench/gpu_check.py                  # on a machine with a GPU: under 8 minutes
    python bench/gpu_check.py --device cpu --small --lengths 64,128 --budget 60

Needs nothing but the package. What no longer fits into the time budget is skipped, and said to be.
Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import cast

import torch
from gpu_speed import Budget, Row, backends, decode_batch, fill, run, speed, tiny
from torch import Tensor, nn

from yocolm.config import ModelConfig
from yocolm.engine.engine import Engine, require_device
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.settings import EngineSettings
from yocolm.engine.static_state import StaticPages, StaticWindow, Written, step_retention
from yocolm.models.base import Batch, CausalLM
from yocolm.models.dense import DenseState
from yocolm.models.presets import preset
from yocolm.models.registry import build_model
from yocolm.models.spec import model_spec
from yocolm.ops.attention import attention_reference, causal_attention, window_attention
from yocolm.ops.retention import gated_retention, retention_recurrent, retention_step

TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 6e-2}  # TF32 and split sums differ from the CPU
FAMILIES = ("160M", "llama-160M", "gemma-4-E2B", "gemma-3n-E2B")


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).abs().max() / expected.abs().max())


def agreement(name: str, dtype: torch.dtype, found: Tensor, expected: Tensor) -> Row:
    gap = difference(found, expected)
    return Row(f"{name}, {str(dtype)[6:]}", gap, "of the largest", gap < TOLERANCES[dtype])


def check_ops(device: torch.device) -> list[Row]:
    """Fast forms on the device against the references on the CPU."""
    generator = torch.Generator().manual_seed(0)
    lengths, heads, dim = [300, 1, 77], 4, 64
    total = sum(lengths)
    q, k, v = (torch.randn(total, heads, dim, generator=generator) for _ in range(3))
    decay = nn.functional.logsigmoid(torch.randn(total, heads, generator=generator)) / 16
    batch = Batch.packed(torch.zeros(total, dtype=torch.int64), lengths)
    where = (batch.seq_ids, batch.positions)
    references = {
        "gated retention": retention_recurrent(q, k, v, decay, lengths)[0],
        "causal attention": attention_reference(q, k, v, where, where),
        "window attention": attention_reference(q, k, v, where, where, window=64),
    }
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        qd, kd, vd = (x.to(device, dtype) for x in (q, k, v))
        found = {
            "gated retention": gated_retention(qd, kd, vd, decay.to(device), lengths)[0],
            "causal attention": causal_attention(qd, kd, vd, lengths),
            "window attention": window_attention(qd, kd, vd, lengths, 64),
        }
        rows += [agreement(name, dtype, x, references[name]) for name, x in found.items()]
    return rows


@torch.inference_mode()
def check_kernels(device: torch.device, dtype: torch.dtype) -> list[Row]:
    """What decode steps on state do, by the operations that halves are captured with."""
    generator = torch.Generator().manual_seed(0)
    lengths, size, window, dim = [1, 700, 333], 32, 100, 128

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    batch = decode_batch(lengths, 22, device)
    k, v, q = normal(80, 2, size, dim), normal(80, 2, size, dim), normal(3, 8, dim)
    found = StaticPages(k, v).attend(q, batch)
    wanted = torch.empty_like(found, dtype=torch.float32, device="cpu")
    for i, length in enumerate(lengths):
        keys, values = (x[batch.block_table[i]].transpose(1, 2).flatten(0, 1) for x in (k, v))
        wanted[i] = last_row(q[i], keys[:length], values[:length])
    rows = [agreement("paged decode attention", dtype, found, wanted)]

    k_ring, v_ring = normal(4, 2, window, dim), normal(4, 2, window, dim)
    written = Written(batch.cu_seqlens, batch.kv_lens, batch.slots)
    handle = StaticWindow(k_ring, v_ring, normal(3, 2, dim), normal(3, 2, dim), written)
    found = handle.attend(q, batch)
    for i, length in enumerate(lengths):
        low = max(0, length - window)
        places = torch.arange(low, length - 1, device=device) % window
        keys, values = (
            torch.cat((ring[i + 1][:, places].transpose(0, 1), x[i : i + 1]))
            for ring, x in ((handle.k_ring, handle.k), (handle.v_ring, handle.v))
        )
        wanted[i] = last_row(q[i], keys, values)
    rows.append(agreement("window decode attention", dtype, found, wanted))

    pool = torch.randn(4, 8, dim, dim, generator=generator).to(device)
    decay = -torch.rand(3, 8, generator=generator).to(device)
    q, k, v = (normal(3, 8, dim) for _ in range(3))
    state = pool[batch.slots].cpu()
    wanted = retention_step(q.float().cpu(), k.float().cpu(), v.float().cpu(), decay.cpu(), state)
    found = step_retention(pool, q, k, v, decay, batch.slots)
    rows.append(agreement("retention step", dtype, found, wanted))
    rows.append(agreement("retention state", dtype, pool[batch.slots], state))
    return rows


def last_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    where = torch.zeros(len(k), dtype=torch.int64), torch.arange(len(k))
    one = where[0][:1], where[1][-1:]
    return attention_reference(q[None].float().cpu(), k.float().cpu(), v.float().cpu(), one, where)[
        0
    ]


def check_paths(device: torch.device, name: str, config: ModelConfig) -> list[Row]:
    """Dense on the CPU against engines on the device: chunked, then decoding, uncaptured and
    captured."""
    cpu = build_model(config, "cpu", torch.float32)
    fill(cpu)
    model = build_model(config, device, torch.float32)
    model.load_state_dict(cpu.state_dict())
    rows = []
    ids = torch.randint(0, config.vocab_size, (200,), generator=torch.Generator().manual_seed(1))
    for compile in backends(device):
        settings = EngineSettings(
            max_num_batched_tokens=64, max_num_seqs=4, kv_memory="64MiB", compile=compile
        )
        engine = Engine(cast(CausalLM, model), config, settings=settings)
        params = SamplingParams(temperature=0, max_tokens=9, logprobs=0, prompt_logprobs=0)
        for i, length in enumerate((200, 77, 5)):
            engine.add_request(str(i), ids[:length].tolist(), params)
        for output in run(engine).values():
            assert output.error is None, output.error
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            scores = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            found = torch.tensor([next(iter(score.values())).logprob for score in scores])
            with torch.inference_mode():
                batch = Batch.packed(torch.tensor(tokens), [len(tokens)])
                logits = cpu.logits(cpu(batch, DenseState()))  # type: ignore[operator]
            wanted = logits.log_softmax(-1)[:-1].gather(1, batch.tokens[1:, None])[:, 0]
            title = f"{name}, {compile}, {len(output.prompt_token_ids)} tokens"
            rows.append(agreement(title, torch.float32, found, wanted))
    return rows


def check_memory(device: torch.device, name: str, config: ModelConfig) -> list[Row]:
    """Sequences that are swapped out and back, and prompts that hit the prefix cache, against an
    engine with room for all and no cache."""
    model = build_model(config, device, torch.float32)
    fill(model)
    ids = torch.randint(0, config.vocab_size, (150,), generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=0, ignore_eos=True)
    spec = model_spec(config)
    few = 12 * spec.page_bytes(16, 4) + 13 * spec.slot_bytes(4)
    plain = EngineSettings(max_num_seqs=4, page_size=16, kv_memory="64MiB", prefix_caching=False)
    tight = replace(
        plain, kv_memory=few, prefix_caching=True, num_checkpoints=8, swap_space="64MiB"
    )
    found: list[list[float]] = []
    for settings in (plain, tight):
        engine = Engine(cast(CausalLM, model), config, settings=settings)
        engine.cost.swap_seconds = lambda num_bytes: 0.0  # whatever it costs here
        scores: list[float] = []
        for lengths in ((100, 70, 50), (50,), (50,)):
            for i, length in enumerate(lengths):
                engine.add_request(str(i), ids[i : i + length].tolist(), params)
            for _, output in sorted(run(engine).items()):
                assert output.error is None, output.error
                chosen = output.outputs[0].logprobs
                scores += [next(iter(score.values())).logprob for score in chosen]
        found.append(scores)
        memory = engine.scheduler.memory
        engine.close()
    hits = 0 if memory.cache is None else memory.cache.stats.hits
    return [
        agreement(f"{name}, swapped and kept", torch.float32, *map(torch.tensor, reversed(found))),
        Row(f"{name}, sequences swapped out", memory.num_swaps, "", memory.num_swaps > 0),
        Row(f"{name}, prompts that began in the cache", hits, "", hits > 0),
    ]


def check(device: torch.device) -> Iterator[Row]:
    yield from check_ops(device)
    for dtype in (torch.float32, torch.bfloat16):
        yield from check_kernels(device, dtype)
    for name in FAMILIES:
        yield from check_paths(device, name, tiny(preset(name)))
        yield from check_memory(device, name, tiny(preset(name)))


def as_line(row: Row, width: int) -> str:
    value = (
        "-" if row.value is None else f"{row.value:.3g}" if row.value < 1e3 else f"{row.value:,.0f}"
    )
    return (
        f"{row.name:<{width}}  {value:>9} {row.unit:<14} {'' if row.passed else 'FAILED'}{row.note}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="models that a CPU runs in seconds")
    parser.add_argument("--lengths", default="2048,8192,32768,131072", help="tokens of prompts")
    parser.add_argument("--budget", type=float, default=420, help="seconds")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    arguments = parser.parse_args()
    device, budget = require_device(arguments.device), Budget(arguments.budget)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {gpu}", flush=True)
    rows: list[Row] = []
    for part in (check(device), speed(device, lengths, arguments.small, budget)):
        for row in part:
            rows.append(row)
            print(as_line(row, 62), flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"device": gpu, "rows": [asdict(row) for row in rows]}, file, indent=1)
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
