"""What conversion and distillation keep of a Transformer: a table of losses, in minutes.

Run in the root of the repository, with the texts and the Transformer of recipes/austen:

    python recipes/convert/study.py [KEY=VALUE ...]

Every YOCO sees the same few windows of text in the same order. Keys are those of distill.yaml.
"""

from __future__ import annotations

import io
import json
import math
import sys
import time
from pathlib import Path

import torch

from yocolm.models.conversion import YocoShape, convert_to_yoco
from yocolm.models.registry import load_config, load_model
from yocolm.models.weights import save_weights
from yocolm.train.settings import TrainSettings, load_settings
from yocolm.train.trainer import Trainer

CONFIG = Path(__file__).with_name("distill.yaml")
SHAPES = {
    "window of 128": YocoShape("swa", window=128),
    "gated retention": YocoShape("gated_retention"),
}
TEXT = ["distill=null"]
TEACHER = ["distill.weight=1.0"]
HIDDEN = [*TEACHER, "distill.hidden_weight=1.0"]


def main(overrides: list[str]) -> None:
    settings = load_settings(CONFIG, overrides)
    assert settings.distill is not None
    teacher, folder = settings.distill.teacher, Path(settings.output_dir).parent
    rows: dict[str, dict[str, float]] = {}

    def note(row: str, column: str, model: str | Path, changes: list[str], train: bool) -> None:
        rows.setdefault(row, {})[column] = measure(str(model), [*overrides, *changes], train)
        print(f"{row}, {column}: {rows[row][column]:.4f}", file=sys.stderr, flush=True)

    note("the Transformer", "as it is", teacher, TEXT, False)
    note("the Transformer", "on the text", teacher, TEXT, True)
    for name, shape in SHAPES.items():
        start = folder / name.replace(" ", "-")
        convert_to_yoco(teacher, start, shape, torch.float32)
        note(name, "as it is", start, TEXT, False)
        note(name, "on the text", start, TEXT, True)
        note(name, "by the teacher", start, TEACHER, True)
        if shape.mixer == "gated_retention":
            note(name, "and its hidden states", start, HIDDEN, True)
    start = random_start(folder / "gated-retention", folder / "random")
    note("at random", "on the text", start, TEXT, True)
    (folder / "study.json").write_text(json.dumps(rows, indent=2) + "\n")
    print(table(rows))


def measure(model: str, overrides: list[str], train: bool) -> float:
    """Loss in nats a token on the first tokens of the validation text, as it is or after training.

    Nothing is saved: a run of minutes is repeated, not resumed.
    """
    settings: TrainSettings = load_settings(CONFIG, [*overrides, f"model={model}"])
    trainer = Trainer(settings, out=io.StringIO())
    assert trainer.step == 0, f"{settings.output_dir} holds a training; give another output_dir"
    if train:
        assert settings.train.steps is not None
        for _ in range(settings.train.steps):
            trainer.train_step()
    return trainer.validate(settings.train.validation_tokens)["nll_per_token"]


def random_start(like: Path, folder: Path) -> Path:
    """The same YOCO with nothing taken over but its shape and its tokenizer."""
    model, _ = load_model(f"random:{like}", seed=1)
    save_weights(model, folder, load_config(like))
    (folder / "tokenizer.json").write_bytes((like / "tokenizer.json").read_bytes())
    return folder


def table(rows: dict[str, dict[str, float]]) -> str:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [["", *columns]]
    for name, row in rows.items():
        lines.append([name, *(f"{row.get(column, math.nan):.3f}" for column in columns)])
    text = [" | ".join(line).replace("nan", "") for line in lines]
    return "\n".join(
        [f"| {text[0]} |", f"|{'---|' * (1 + len(columns))}"] + [f"| {t} |" for t in text[1:]]
    )


if __name__ == "__main__":
    began = time.monotonic()
    main(sys.argv[1:])
    used = time.process_time() / 60
    print(
        f"{(time.monotonic() - began) / 60:.0f} minutes, {used:.1f} of computing", file=sys.stderr
    )
