"""`yocolm bench`: operations, this engine, and this engine beside others."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from yocolm.bench.offline import measure_offline, offline_table
from yocolm.bench.op_cases import all_cases
from yocolm.bench.ops import measure_ops, ops_table
from yocolm.bench.paper_page import html_report, plot
from yocolm.bench.paper_report import text_report
from yocolm.bench.paper_run import HERE, Options, run_paper
from yocolm.bench.peers import PeerSpec, Workload, measure_peers, peer_spec, peers_table
from yocolm.bench.report import machine, plot_peers, pyplot, save_json
from yocolm.bench.serving import Sweep, measure_serving
from yocolm.bench.serving_report import report, report_of, serving_table
from yocolm.bench.traces import MIXES, scaled
from yocolm.engine.settings import EngineSettings
from yocolm.engine.trace import Trace, read_trace
from yocolm.errors import ConfigError
from yocolm.models.registry import load_config

VLLM_MODES = {  # name: (fast prefill, eager)
    "fast": (True, False),
    "off": (False, False),
    "eager": (True, True),
    "eager-off": (False, True),
}


CHECK_PAIR, CHECK_LENGTHS = "160M", tuple(size * 1024 for size in (2, 4, 8, 16, 32))
MIX_PROMPTS = 100  # requests of a mix, unless set
_SERVING = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_memory", "page_size")
_SERVING += ("mean_tokens", "swap_space", "policy", "ttft_target", "tpot_target")
_SERVING += ("prefix_caching", "fast_prefill")


def run(arguments: argparse.Namespace) -> int:
    return {
        "ops": _ops,
        "offline": _offline,
        "paper": _paper,
        "peers": _peers,
        "serving": _serving,
    }[arguments.kind](arguments)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _finish(result: dict[str, Any], text: str, path: Path | None) -> None:
    result["machine"] = machine()
    print(text)
    if path is not None:
        save_json(path, result)


def _check_output(path: Path | None) -> None:
    """Before hours of measuring, not after."""
    if path is not None and path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"the folder of {path} does not exist; create it, or name another file")


def _ops(arguments: argparse.Namespace) -> int:
    _check_output(arguments.json)
    result = measure_ops(all_cases(), arguments.threads, arguments.repeats, arguments.only, _say)
    _finish(result, ops_table(result), arguments.json)
    return 1 if any(row.get("error") for row in result["rows"]) else 0


def _offline(arguments: argparse.Namespace) -> int:
    _check_output(arguments.json)
    result = measure_offline(
        arguments.model,
        arguments.dtype,
        threads=arguments.threads,
        prompt_lengths=arguments.prompt_lengths,
        batches=arguments.batch,
        decode=arguments.decode,
        repeats=arguments.repeats,
        say=_say,
    )
    _finish(result, offline_table(result), arguments.json)
    return 0


def _serving(arguments: argparse.Namespace) -> int:
    _check_output(arguments.html)
    _check_output(arguments.json)
    if arguments.from_json is not None:
        arguments.html.write_text(report_of(arguments.from_json), encoding="utf-8")
        _say(f"wrote {arguments.html}")
        return 0
    trace, name = _trace(arguments)
    settings = {key: getattr(arguments, key) for key in _SERVING}
    result = measure_serving(
        arguments.model,
        arguments.dtype,
        arguments.device,
        trace,
        name,
        settings=EngineSettings(**{k: v for k, v in settings.items() if v is not None}),
        calibrate=arguments.calibrate,
        threads=arguments.threads,
        max_concurrency=arguments.max_concurrency,
        seed=arguments.seed,
        sweep=None
        if arguments.no_sweep
        else Sweep(
            tuple(arguments.sweep_concurrency),
            arguments.sweep_prompt_lengths and tuple(arguments.sweep_prompt_lengths),
            arguments.sweep_decode,
            arguments.sweep_repeats,
        ),
        say=_say,
    )
    _finish(result, serving_table(result), arguments.json)
    arguments.html.write_text(report(result), encoding="utf-8")
    _say(f"wrote {arguments.html}")
    return 130 if result["interrupted"] else 1 if result["summary"]["failed"] else 0


def _trace(arguments: argparse.Namespace) -> tuple[Trace, str]:
    """The requests, and what is said of them."""
    if arguments.trace is not None:
        trace, name = read_trace(arguments.trace), arguments.trace.name
    else:
        trace, name = MIXES[arguments.mix](arguments.seed), f"the mix {arguments.mix}"
        if arguments.num_prompts is None:
            trace = trace[:MIX_PROMPTS]
    trace = scaled(trace, arguments.length_scale, arguments.request_rate, arguments.num_prompts)
    if arguments.length_scale != 1:
        name += f", lengths x {arguments.length_scale:g}"
    if arguments.request_rate is not None:
        name += f", {arguments.request_rate:g} requests/s"
    return trace, name


def _paper(arguments: argparse.Namespace) -> int:
    for path in (arguments.json, arguments.html, arguments.plot):
        _check_output(path)
    if arguments.plot is not None:
        pyplot()
    asked = arguments.check or arguments.check_pair or arguments.check_lengths
    if asked and (arguments.hardware == HERE or arguments.check is False):
        without = "--no-check" if arguments.check is False else f"--hardware {HERE}"
        raise ConfigError(
            f"with {without} no pair is measured to check predictions: leave out --check, "
            "--check-pair and --check-lengths"
        )
    options = Options(
        pair=arguments.pair,
        hardware=arguments.hardware,
        lengths=tuple(arguments.lengths),
        check=None if arguments.check is False else arguments.check_pair or CHECK_PAIR,
        check_lengths=tuple(arguments.check_lengths or CHECK_LENGTHS),
        dtype=arguments.dtype,
        batch=arguments.batch,
        chunk=arguments.max_num_batched_tokens,
        generate=arguments.generate,
        budget=arguments.budget,
        repeats=arguments.repeats,
        threads=arguments.threads,
    )
    result = run_paper(options, _say)
    _finish(result, text_report(result), arguments.json)
    if arguments.html is not None:
        arguments.html.write_text(html_report(result), encoding="utf-8")
        _say(f"wrote {arguments.html}")
    if arguments.plot is not None:
        plot(result, arguments.plot)
    failed = any(
        cell["errors"]
        for study in result["studies"]
        for row in study["rows"]
        for cell in row["models"].values()
    )
    return 1 if failed else 0


def _peers(arguments: argparse.Namespace) -> int:
    _check_output(arguments.json)
    _check_output(arguments.plot)
    if arguments.plot is not None:
        pyplot()
    work = Workload(
        tuple(arguments.prompt_lengths),
        tuple(arguments.batch),
        arguments.decode,
        arguments.repeats,
        arguments.threads,
        arguments.dtype,
        arguments.timeout,
    )
    checkpoint = str(arguments.checkpoint)
    vocab = load_config(checkpoint).vocab_size
    result = measure_peers(_specs(arguments), checkpoint, vocab, work, _say)
    result["workload"] = json.loads(json.dumps(work.__dict__))
    _finish(result, peers_table(result), arguments.json)
    if arguments.plot is not None:
        plot_peers(result, arguments.plot)
    return 0 if any("error" not in about for about in result["peers"].values()) else 1


def _specs(arguments: argparse.Namespace) -> list[PeerSpec]:
    """The peers that were named, ours first."""
    specs = [peer_spec("yocolm", arguments.ours or sys.executable, "yocolm")]
    if arguments.transformers:
        specs.append(peer_spec("transformers", arguments.transformers, "transformers"))
    for mode in arguments.vllm_modes if arguments.vllm else ():
        if mode not in VLLM_MODES:
            raise ConfigError(f"--vllm-modes has {mode!r}; allowed: {', '.join(VLLM_MODES)}")
        fast, eager = VLLM_MODES[mode]
        specs.append(
            peer_spec(f"vllm {mode}", arguments.vllm, "vllm", fast_prefill=fast, eager=eager)
        )
    if (arguments.llama_cpp is None) != (arguments.gguf is None):
        raise ConfigError("--llama-cpp and --gguf need each other: give both or neither")
    if arguments.llama_cpp is not None:
        options = {"binaries": str(arguments.llama_cpp), "gguf": str(arguments.gguf)}
        specs.append(peer_spec("llama.cpp", sys.executable, "llama_cpp", **options))
    return specs
