"""One step of training on one long sequence: peak memory and time over its length.

    python bench/train_length.py                                    # the bundled model's shape
    python bench/train_length.py random:1B --lengths 65536 131072   # on a GPU, if there is one

Each length runs in a process of its own. ``step`` is the memory beside weights, gradients and
optimiser state: it grows with the length, not with its square.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from yocolm.models.registry import build_model, load_config, resolve
from yocolm.models.spec import model_spec
from yocolm.train.context import with_context
from yocolm.train.objective import Objective
from yocolm.train.optim import build_optimizers
from yocolm.train.settings import OptimSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MIB = 1 << 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 32768, 65536])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--keep-activations", action="store_true", help="no checkpointing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--single", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """The second of two steps on one sequence, seeded weights: bytes and seconds."""
    [length] = arguments.lengths
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = with_context(load_config(resolve(arguments.model)), length, None)
    model = build_model(config, "cpu", torch.float32)
    model.init_weights(0)  # type: ignore[operator]
    model.to(device).gradient_checkpointing = not arguments.keep_activations  # type: ignore[assignment]
    objective = Objective(model, DTYPES[arguments.dtype], OptimSettings.retention_chunk_size)
    optimizers = build_optimizers(model, OptimSettings(steps=1))
    ids = torch.randint(config.vocab_size, (length + 1,), device=device)

    def step(tokens: int) -> float:
        began = time.perf_counter()
        (objective(ids[:tokens], ids[1 : tokens + 1], [tokens]) / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    step(64)  # leaves gradients and the optimisers' state behind
    before = peak(device)
    seconds = step(length)
    flops = model_spec(config).train_flops(length)
    return {
        "length": length,
        "before_bytes": before,
        "step_bytes": peak(device) - before,
        "seconds": seconds,
        "flops": flops,
    }


def peak(device: torch.device) -> int:
    """The most bytes so far: of tensors on a GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    arguments = parse_arguments()
    if arguments.single:
        print(json.dumps(measure(arguments)))
        return
    options = [arguments.model, "--dtype", arguments.dtype, "--single"]
    options += ["--keep-activations"] if arguments.keep_activations else []
    rows = []
    for length in arguments.lengths:
        command = [sys.executable, __file__, *options, "--lengths", str(length)]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append(json.loads(answer))
        row = rows[-1]
        print(
            f"{length:>8} tokens | {row['before_bytes'] / MIB:,.0f} MiB before the step, "
            f"{row['step_bytes'] / MIB:,.0f} MiB more in it "
            f"({row['step_bytes'] / length:,.0f} bytes a token) | {row['seconds']:.1f} s | "
            f"{row['flops'] / row['seconds'] / 1e9:,.0f} GFLOP/s",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
