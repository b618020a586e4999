"""`yocolm eval harness`: tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from yocolm.engine.llm import LLM
from yocolm.eval.harness import TextModel, open_model
from yocolm.eval.harness_tasks import TaskOptions, evaluate

_ENGINE = ("max_num_batched_tokens", "kv_memory")


def run(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    if arguments.samples is not None:
        with arguments.samples.open("ab"):  # now, not after hours: it may not be possible
            pass
    with redirect_stdout(sys.stderr):  # libraries print; standard output is for results
        model = TextModel(
            _open(arguments), arguments.seed, _progress if sys.stderr.isatty() else None
        )
        found = evaluate(
            model,
            arguments.tasks,
            _options(arguments),
            include_path=arguments.include_path,
            name=arguments.model,
            notice=lambda line: print(line, file=sys.stderr, flush=True),
        )
    samples = found.pop("samples")
    report = {
        "model": arguments.model,
        "max_length": model.max_length,
        "fast_prefill": arguments.fast_prefill,
        "prompt_tokens": model.prompt_tokens,
        "cached_tokens": model.cached_tokens,
        "seconds": round(time.monotonic() - started, 2),
        **found,
    }
    print(json.dumps(report, indent=2, default=str) if arguments.json else _table(report))
    if arguments.samples is not None:
        _write_samples(arguments.samples, samples)
    return 0


def _open(arguments: argparse.Namespace) -> LLM:
    given = {name: getattr(arguments, name) for name in _ENGINE}
    return open_model(
        arguments.model,
        max_length=arguments.max_length,
        batch_size=arguments.batch_size,
        dtype=arguments.dtype,
        device=arguments.device,
        fast_prefill=arguments.fast_prefill,
        enable_prefix_caching=arguments.prefix_caching,
        **{name: value for name, value in given.items() if value is not None},
    )


def _options(arguments: argparse.Namespace) -> TaskOptions:
    return TaskOptions(
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        gen_kwargs=arguments.gen_kwargs,
        chat=arguments.apply_chat_template,
        system_instruction=arguments.system_instruction,
        fewshot_as_multiturn=arguments.fewshot_as_multiturn,
        use_cache=arguments.use_cache,
        seed=arguments.seed,
    )


def _progress(what: str, done: int, total: int) -> None:
    end = "\r" if done < total else "\r\033[K"
    print(f"{what} {done}/{total}", end=end, file=sys.stderr, flush=True)


def _write_samples(path: Path, samples: Mapping[str, list[Mapping[str, Any]]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for task, entries in samples.items():
            for entry in entries:
                line = json.dumps({"task": task, **entry}, default=str, ensure_ascii=False)
                file.write(line + "\n")


def _table(report: Mapping[str, Any]) -> str:
    lines = [
        f"model        {report['model']}",
        f"length       {report['max_length']:,} tokens",
        f"tokens       {report['prompt_tokens']:,}, {report['cached_tokens']:,} of them cached",
        f"seconds      {report['seconds']:.1f}",
        "",
        f"{'task':<24}{'n-shot':>7}{'documents':>11}  {'metric':<24}{'value':>10}{'stderr':>10}",
    ]
    for kind in ("results", "groups"):
        for task, metrics in report.get(kind, {}).items():
            lines += _rows(task, metrics, report)
    return "\n".join(lines)


def _rows(task: str, metrics: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str]:
    """A line for each metric; names are ``metric,filter``, and ``metric_stderr,filter``."""
    shots = report.get("n-shot", {}).get(task, "")
    count = metrics.get("sample_len", "")
    label = f"{task:<24}{shots:>7}{count:>11}"
    for key, value in metrics.items():
        name, comma, chosen = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        error = metrics.get(f"{name}_stderr,{chosen}")
        shown = name if chosen == "none" else f"{name} ({chosen})"
        yield f"{label}  {shown:<24}{_number(value):>10}{_number(error):>10}"
        label = " " * len(label)


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str("" if value is None else value)
