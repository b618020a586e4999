"""The studies of `yocolm bench paper`: pairs, machines, and processes that measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from yocolm.bench.paper import SIDES, Side, Study, run_study
from yocolm.config import LlamaConfig, ModelConfig, YocoConfig
from yocolm.engine.hardware import Hardware
from yocolm.engine.settings import available_memory
from yocolm.errors import ConfigError
from yocolm.models.presets import PRESETS, llama_twin, preset
from yocolm.models.registry import load_config

HERE = "here"
SHARE_OF_FREE = 0.8  # of the memory that is free, what a measurement may take
LEAST_TIMEOUT, SLOWER = 120.0, 20.0  # seconds, and times the budget, until a process is given up
AT_ONCE = "131072"  # bytes from which on malloc asks the system each time and gives back at once
Configs = dict[Side, YocoConfig | LlamaConfig]


@dataclass(frozen=True)
class Options:
    """What the command was given; see `yocolm bench paper --help`."""

    pair: str
    hardware: str
    lengths: tuple[int, ...]
    check: str | None
    check_lengths: tuple[int, ...]
    dtype: str
    batch: int
    chunk: int
    generate: int
    budget: float
    repeats: int
    threads: int


def pair_configs(name: str) -> Configs:
    """A YOCO preset, or a model's folder, and its Transformer twin.

    Raises ConfigError if it is no YOCO.
    """
    known = name.lower() in {one.lower() for one in PRESETS}
    config: ModelConfig = preset(name) if known else load_config(name)
    if not isinstance(config, YocoConfig):
        raise ConfigError(
            f"pair {name!r} is a {config.model_type}, which has no Transformer twin; give a YOCO: "
            "a size such as 3B, 'bundled', or a folder"
        )
    return {"yoco": config, "transformer": llama_twin(config)}


def run_paper(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """The study of the pair, and where that is of another machine, the check of a pair on this.

    Raises ConfigError for pairs, lengths and machines that are not known.
    """
    configs = pair_configs(options.pair)
    check = None if options.check is None else pair_configs(options.check)
    here = options.hardware == HERE
    loaded = None if here else Hardware.load(options.hardware)
    studies = []
    if loaded is None:
        studies.append(_on_this_machine(options, options.pair, configs, options.lengths, say))
    else:
        study = _study(options, options.pair, configs, options.lengths)
        studies.append(run_study(replace(study, hardware={side: loaded for side in SIDES})))
        if check is not None and options.check is not None:
            found = _on_this_machine(options, options.check, check, options.check_lengths, say)
            studies.append(found)
    return {"studies": studies, "threads": options.threads}


def _study(options: Options, pair: str, configs: Configs, lengths: tuple[int, ...]) -> Study:
    return Study(
        pair,
        configs,
        {},
        lengths,
        options.dtype,
        options.batch,
        options.chunk,
        options.generate,
        repeats=options.repeats,
    )


def _on_this_machine(
    options: Options,
    pair: str,
    configs: Configs,
    lengths: tuple[int, ...],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measured as far as memory and the budget go, and predicted from what it was calibrated."""
    process = _Process(options, configs)
    free = int(SHARE_OF_FREE * process.free_memory())
    study = _study(options, pair, configs, lengths)
    hardware: dict[Side, Hardware] = {}
    for side in SIDES:
        if max(2 * study.weights(side), 1 << 30) > free:
            say(f"{side}: too large to calibrate with here; general figures are used")
            hardware[side] = Hardware.generic(process.device)
            continue
        say(f"calibrating with {side}")
        found = process.ask("calibrate", side, 0, 0)
        if "error" in found:
            raise ConfigError(f"this machine cannot be measured with {side}: {found['error']}")
        hardware[side] = Hardware.from_json(found["hardware"])
    study = replace(
        study,
        hardware={
            side: replace(one, memory_bytes=process.total_memory())
            for side, one in hardware.items()
        },
        budget=options.budget,
        free_memory=free,
        threads=options.threads if process.device == "cpu" else 0,
        note=f"Measured, by {options.threads} thread{'s' * (options.threads > 1)}, where predicted "
        f"to take at most {options.budget:g} s",
    )
    return run_study(study, process.ask, say)


class _Process:
    """Measures in processes of their own."""

    def __init__(self, options: Options, configs: Configs) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._configs, self._options = configs, options

    def ask(self, do: str, side: Side, prompt: int, generate: int) -> dict[str, Any]:
        """The answer of a process, or {"error": why there is none}."""
        options = self._options
        request = {
            "do": do,
            "config": self._configs[side].to_hf(),
            "device": self.device,
            "dtype": options.dtype,
            "prompt": prompt,
            "generate": generate,
            "chunk": options.chunk,
            "batch": options.batch,
            "threads": options.threads,
        }
        settings = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        if do == "memory":
            settings["MALLOC_MMAP_THRESHOLD_"] = AT_ONCE
        limit = max(LEAST_TIMEOUT, SLOWER * options.budget)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "yocolm.bench.paper_cell"],
                input=json.dumps(request),
                capture_output=True,
                text=True,
                env=settings,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {limit:g} s, 20 times --budget"}
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            return {"error": f"the process ended with status {done.returncode}: {last[:400]}"}
        return json.loads(done.stdout.splitlines()[-1])

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info()[0] if self.device == "cuda" else available_memory()

    def total_memory(self) -> int:
        if self.device == "cuda":
            return torch.cuda.mem_get_info()[1]
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
