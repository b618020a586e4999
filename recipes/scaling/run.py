"""Scaling in miniature: YOCO-gRet, YOCO-SWA and a Transformer at three sizes, one budget of tokens.

    python recipes/scaling/run.py [--only SIZE] [--plot PNG]

trains what is not there yet under runs/scaling (texts as in recipes/austen), prints the table of
validation losses, and plots it. The three of one size have the same width, layers and heads, and
(by the width of the MLP) the same number of parameters within half a percent.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from yocolm.config import parse_config
from yocolm.models.spec import model_spec
from yocolm.train.settings import parse_settings
from yocolm.train.trainer import Trainer

RUNS = Path("runs/scaling")
SEQUENCE, BATCH, STEPS = 512, 8, 224
WINDOW = 128  # of YOCO-SWA
KINDS = ("yoco-gret", "yoco-swa", "transformer")


@dataclass(frozen=True)
class Size:
    """Width, layers (half of them in the self-decoder), heads of 64, and YOCO-gRet's MLP width."""

    name: str
    width: int
    layers: int
    heads: int
    mlp: int


SIZES = (Size("0.3M", 64, 6, 1, 192), Size("1M", 128, 6, 2, 320), Size("3M", 192, 8, 3, 512))
SEEDS = {"0.3M": (1, 2, 3), "1M": (1, 2, 3), "3M": (1,)}


def fields(kind: str, size: Size, mlp: int) -> dict[str, Any]:
    """The config.json of one model."""
    common = {
        "hidden_size": size.width,
        "intermediate_size": mlp,
        "num_hidden_layers": size.layers,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }
    if kind == "transformer":
        heads = {"num_attention_heads": size.heads, "num_key_value_heads": 1, "head_dim": 64}
        return {"model_type": "llama", "rms_norm_eps": 1e-6, **common, **heads}
    if kind == "yoco-gret":
        mixer: dict[str, Any] = {"type": "gated_retention", "num_heads": size.heads}
    else:
        mixer = {"type": "swa", "num_heads": size.heads, "num_v_heads": 1, "window_size": WINDOW}
    return {
        "model_type": "yoco",
        "norm_eps": 1e-6,
        "num_self_decoder_layers": size.layers // 2,
        "self_decoder_attn": mixer,
        "cross_decoder_attn": {"num_heads": size.heads, "num_kv_heads": 1},
        **common,
    }


def parameters(kind: str, size: Size, mlp: int) -> int:
    """Parameters beside the embeddings."""
    spec = model_spec(parse_config({**fields(kind, size, mlp), "vocab_size": 4096}))
    return spec.num_params - spec.embed_params


def fitting_mlp(kind: str, size: Size) -> int:
    """The MLP width, in steps of 8, that comes closest to YOCO-gRet's number of parameters."""
    goal = parameters("yoco-gret", size, size.mlp)
    widths = range(size.mlp // 2, size.mlp * 2, 8)
    return min(widths, key=lambda mlp: abs(parameters(kind, size, mlp) - goal))


def settings(kind: str, size: Size, seed: int) -> dict[str, Any]:
    """The training of one model, as in a YAML file."""
    return {
        "output_dir": str(RUNS / f"{kind}-{size.name}-{seed}"),
        "seed": seed,
        "model": fields(kind, size, fitting_mlp(kind, size)),
        "tokenizer": {"path": "runs/austen-tokenizer/tokenizer.json", "vocab_size": 4096},
        "data": {
            "sequence_length": SEQUENCE,
            "validation": ["texts/persuasion.txt"],
            "sources": {
                "austen": {"files": ["texts/austen/*.txt"], "weight": 0.6},
                "novels": {"files": ["texts/moby_dick.txt", "texts/tom_sawyer.txt"], "weight": 0.2},
                "brown": {"files": ["texts/brown.txt"], "weight": 0.2},
            },
        },
        "train": {
            "steps": STEPS,
            "batch_size": BATCH,
            "optimizer": "muon",
            "learning_rate": 2e-3,
            "matrix_learning_rate": 1e-2,
            "warmup_steps": 20,
            "final_ratio": 0.02,
            "validate_every": STEPS,
            "log_every": 32,
            "save_every": 56,
            "keep": 1,
        },
    }


def result(kind: str, size: Size, seed: int, train: bool) -> float | None:
    """The validation loss in nats a token, trained first if it is not there."""
    values = settings(kind, size, seed)
    record = Path(values["output_dir"]) / "final" / "training.json"
    if not record.exists():
        if not train:
            return None
        Trainer(parse_settings(values)).run()
    return json.loads(record.read_text())["validation"]["nll_per_token"]


def table(results: dict[tuple[str, str], list[float]]) -> str:
    """Markdown: a row a size, a column a kind; mean and spread where there are several seeds."""
    lines = ["| non-embedding | " + " | ".join(KINDS) + " |", "| --- " * (len(KINDS) + 1) + "|"]
    for size in SIZES:
        cells = []
        for kind in KINDS:
            losses = results.get((kind, size.name), [])
            spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
            cells.append(f"{mean(losses):.4f}{spread}" if losses else "-")
        count = parameters("yoco-gret", size, size.mlp)
        lines.append(f"| {count / 1e6:.2f}M | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: dict[tuple[str, str], list[float]], path: Path) -> None:
    """Validation loss over parameters; every seed is a point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.5))
    for kind in KINDS:
        points = [
            (parameters("yoco-gret", size, size.mlp), loss)
            for size in SIZES
            for loss in results.get((kind, size.name), [])
        ]
        means = [
            (parameters("yoco-gret", size, size.mlp), mean(results[kind, size.name]))
            for size in SIZES
            if results.get((kind, size.name))
        ]
        (line,) = axes.plot(*zip(*means, strict=True), label=kind)
        axes.plot(*zip(*points, strict=True), "o", color=line.get_color(), markersize=4)
    axes.set_xscale("log")
    counts = [parameters("yoco-gret", size, size.mlp) for size in SIZES]
    axes.set_xticks(counts, [f"{count / 1e6:.2f}M" for count in counts])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("parameters beside the embeddings")
    axes.set_ylabel(f"validation loss after {STEPS * BATCH * SEQUENCE:,} tokens")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[size.name for size in SIZES])
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    arguments = parser.parse_args()
    results: dict[tuple[str, str], list[float]] = {}
    for size in SIZES:
        train = not arguments.report and arguments.only in (None, size.name)
        for seed in SEEDS[size.name]:
            for kind in KINDS:
                loss = result(kind, size, seed, train)
                if loss is not None:
                    results.setdefault((kind, size.name), []).append(loss)
    print(table(results))
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
