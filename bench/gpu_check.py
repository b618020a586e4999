"""Checks a device against the CPU and prints a table: agreement first, then speed.

    python bench/gpu_check.py            # on a machine with a GPU, under 10 minutes
    python bench/gpu_check.py --device cpu --preset 160M --prompt 512 --steps 4

Needs nothing but the package. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace

import torch

from yocolm.config import ModelConfig, YocoConfig
from yocolm.engine.engine import Engine, require_device
from yocolm.engine.request import Sequence
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.settings import EngineSettings
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.models.presets import preset
from yocolm.models.registry import build_model
from yocolm.ops.attention import attention_reference, causal_attention, window_attention
from yocolm.ops.retention import gated_retention, retention_recurrent

TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 6e-2}  # TF32 and split sums differ from the CPU


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    value: str
    passed: bool = True


def difference(device: torch.device, found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).abs().max() / expected.abs().max())


def check_ops(device: torch.device) -> list[Row]:
    """Fast forms on the device against the references on the CPU, forward and gradients."""
    generator = torch.Generator().manual_seed(0)
    lengths, heads, dim = [300, 1, 77], 4, 64
    total = sum(lengths)
    q, k, v = (torch.randn(total, heads, dim, generator=generator) for _ in range(3))
    decay = torch.nn.functional.logsigmoid(torch.randn(total, heads, generator=generator)) / 16
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
        for name, output in found.items():
            gap = difference(device, output, references[name])
            rows.append(Row(f"{name}, {dtype}", f"{gap:.1e}", gap < TOLERANCES[dtype]))
    return rows


def tiny(config: ModelConfig) -> ModelConfig:
    """The preset's family and mixers at a size that float32 on a CPU runs at once."""
    if isinstance(config, YocoConfig):
        return replace(config, num_layers=4, num_self_layers=2, vocab_size=512)
    return replace(config, num_layers=3, vocab_size=512)


def check_paths(device: torch.device, config: ModelConfig) -> list[Row]:
    """Dense on the CPU against dense and engine (chunked, then decoding) on the device."""
    config = tiny(config)
    cpu = build_model(config, "cpu", torch.float32)
    cpu.init_weights(0)  # type: ignore[operator]
    model = build_model(config, device, torch.float32)
    model.load_state_dict(cpu.state_dict())
    ids = torch.randint(0, config.vocab_size, (200,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = cpu.logits(cpu(Batch.packed(ids, [200]), DenseState()))  # type: ignore[operator]
        dense = model.logits(model(Batch.packed(ids.to(device), [200]), DenseState()))  # type: ignore[operator]
    gap = difference(device, dense, expected)
    rows = [Row(f"{config.model_type} dense", f"{gap:.1e}", gap < TOLERANCES[torch.float32])]
    settings = EngineSettings(max_num_batched_tokens=64, max_num_seqs=4, kv_memory="64MiB")
    engine = Engine(model, config, settings=settings)  # type: ignore[arg-type]
    engine.add_request("0", ids.tolist(), SamplingParams(max_tokens=0, prompt_logprobs=0))
    scores = run(engine)["0"].prompt_logprobs
    assert scores is not None
    found = torch.tensor([next(iter(s.values())).logprob for s in scores[1:] if s is not None])
    wanted = expected.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    gap = difference(device, found, wanted)
    rows.append(Row(f"{config.model_type} engine", f"{gap:.1e}", gap < TOLERANCES[torch.float32]))
    return rows


def run(engine: Engine) -> dict:
    """Step until all requests are done; final outputs by id."""
    done = {}
    while engine.has_unfinished_requests():
        done.update((output.request_id, output) for output in engine.step() if output.finished)
    engine.check()
    return done


def measure(
    device: torch.device, name: str, config: ModelConfig, prompt: int, steps: int
) -> list[Row]:
    """Prefill and decode speed in bfloat16, for one sequence and for 32."""
    model = build_model(config, device, torch.bfloat16)
    model.init_weights(0)  # type: ignore[operator]
    rows = []
    for sequences in (1, 32):
        settings = EngineSettings(
            max_num_seqs=sequences, max_model_len=prompt + steps + 1, kv_memory="8GiB"
        )
        engine = Engine(model, config, settings=settings)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(2)
        params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
        for i in range(sequences):
            ids = torch.randint(0, config.vocab_size, (prompt,), generator=generator).tolist()
            engine.add_request(str(i), ids, params)
        began = clock(device)
        while any(
            not seq.decoding for seq in (*engine.scheduler.waiting, *engine.scheduler.running)
        ):
            engine.step()
        middle = clock(device)
        before = engine.scheduler.num_steps
        run(engine)
        ended, taken = clock(device), engine.scheduler.num_steps - before
        prefill = sequences * prompt / (middle - began)
        rows.append(Row(f"{name} prefill {sequences} x {prompt}", f"{prefill:,.0f} tok/s"))
        tpot = (ended - middle) / max(1, taken) * 1e3
        rows.append(Row(f"{name} decode, {sequences} sequences", f"{tpot:.2f} ms/step"))
    return rows


def unfinished(engine: Engine) -> list[Sequence]:
    """Sequences that wait or run."""
    return [*engine.scheduler.waiting, *engine.scheduler.running]


def clock(device: torch.device) -> float:
    """Seconds, once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--preset", default="400M", help="size whose speed is measured")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64, help="decode steps measured")
    arguments = parser.parse_args()
    device = require_device(arguments.device)
    print(f"torch {torch.__version__}, device {device}")
    rows = check_ops(device)
    for family in (arguments.preset, f"llama-{arguments.preset}"):
        rows += check_paths(device, preset(family))
    for family in (arguments.preset, f"llama-{arguments.preset}"):
        rows += measure(device, family, preset(family), arguments.prompt, arguments.steps)
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.name:<{width}}  {row.value:>14}  {'ok' if row.passed else 'FAILED'}")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
