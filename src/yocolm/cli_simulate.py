"""`yocolm simulate`: a trace through the engine's scheduler and pools, without a model."""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import fields
from pathlib import Path

from yocolm.bench.recording import RequestTimes
from yocolm.bench.simulated import Setup, simulate, summary, summary_table
from yocolm.bench.traces import scaled
from yocolm.config import ModelConfig, parse_config
from yocolm.engine.hardware import Hardware
from yocolm.engine.settings import EngineSettings
from yocolm.engine.trace import read_trace
from yocolm.errors import ConfigError
from yocolm.fields import read_json
from yocolm.models.presets import PRESETS, preset
from yocolm.models.spec import model_spec

_SETTINGS = (
    *("policy", "ttft_target", "tpot_target", "max_num_batched_tokens", "max_num_seqs"),
    *("max_model_len", "kv_memory", "page_size", "mean_tokens", "swap_space"),
    *("prefix_caching", "fast_prefill"),
)
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def run(arguments: argparse.Namespace) -> int:
    if arguments.requests is not None and not arguments.requests.absolute().parent.is_dir():
        raise ConfigError(f"the folder of {arguments.requests} does not exist; create it")
    config = model_config(arguments.model)
    size = _DTYPE_BYTES[arguments.dtype]
    hardware = Hardware.load(arguments.hardware, model_spec(config), size)
    given = {name: getattr(arguments, name) for name in _SETTINGS}
    settings = EngineSettings(**{k: v for k, v in given.items() if v is not None})
    trace = scaled(
        read_trace(arguments.trace),
        arguments.length_scale,
        arguments.request_rate,
        arguments.num_prompts,
    )
    simulated = simulate(Setup(config, hardware, settings, size), trace)
    found = {"model": arguments.model, **summary(simulated)}
    print(json.dumps(found, indent=2) if arguments.json else summary_table(found))
    if arguments.requests is not None:
        write_requests(arguments.requests, simulated.requests)
    return 0


def model_config(name: str) -> ModelConfig:
    """The configuration of a preset (with or without ``random:``) or in a folder, without torch.

    Raises ConfigError.
    """
    bare = name.removeprefix("random:")
    if bare.lower() in map(str.lower, PRESETS):
        return preset(bare)
    path = BUNDLED if name == "bundled" else Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"model {name!r} is neither a preset ({', '.join(PRESETS)}) nor a folder with a "
            "config.json"
        )
    return parse_config(read_json(path))


BUNDLED = Path(__file__).with_name("bundled")


def write_requests(path: Path, requests: list[RequestTimes]) -> None:
    """A line for every request, in the order of the trace; times in seconds."""
    names = [field.name for field in fields(RequestTimes)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "tpot", "meets"])
        for request in requests:
            writer.writerow(getattr(request, name) for name in (*names, "tpot", "meets"))
