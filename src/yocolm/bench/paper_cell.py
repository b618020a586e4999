"""A process of `yocolm bench paper`: one model of random weights, measured once.

    python -m yocolm.bench.paper_cell < request.json

The request is a JSON object with `do` ("calibrate", "time" or "memory"), the model's `config`, and
the workload; the answer is the last line of standard output. A process of its own for each, so that
what one leaves behind is not another's memory.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from yocolm.bench.offline import run_once
from yocolm.config import ModelConfig, YocoConfig, parse_config
from yocolm.engine.engine import Engine
from yocolm.engine.settings import EngineSettings
from yocolm.errors import YocolmError
from yocolm.models.base import CausalLM
from yocolm.models.layers import pack_weights
from yocolm.models.presets import llama_twin, preset
from yocolm.models.registry import DTYPES, build_model
from yocolm.models.spec import DEFAULT_PAGE_SIZE, model_spec

PAGE = mmap.PAGESIZE
WARM_UP = 64  # tokens of a prompt that is not counted
_SMALLEST = "160M"


def main() -> None:
    request = json.loads(sys.stdin.read())
    measure = {"calibrate": calibrate, "time": measure_time, "memory": measure_memory}
    torch.set_num_threads(request["threads"])
    try:
        answer = measure[request["do"]](request)
    except (YocolmError, OSError, RuntimeError) as error:  # of memory, or of a system without /proc
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    print(json.dumps(answer), flush=True)


def calibrate(request: dict[str, Any]) -> dict[str, Any]:
    """What this machine takes for the model, remembered or measured: a hardware file's text."""
    model, config = _model(request)
    engine = Engine(model, config, settings=EngineSettings(prefix_caching=False, swap_space=0))
    engine.calibrate()
    return {"hardware": engine.cost.hardware.to_json()}


def measure_time(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds until all prompts have a token, and until the end, after a pass that is not counted;
    and the peak of the whole process."""
    model, config = _model(request)
    engine, batch, prompt = _engine(model, config, request), request["batch"], request["prompt"]
    _run(engine, _prompts(config, 1, min(WARM_UP, prompt)), 2)
    _reset_peak(model)
    first, whole = _run(engine, _prompts(config, batch, prompt), request["generate"])
    return {"prefill": first, "whole": whole, "process_peak": _peak(model)}


def measure_memory(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes of weights, KV, constant-size state and activations.

    The caller has malloc give freed memory back at once (MALLOC_MMAP_THRESHOLD_), so that
    activations are what tensors hold, not what the allocator keeps for later.
    """
    _warm_up(request)
    empty = _held(request["device"])
    model, config = _model(request)
    weights = _held(request["device"]) - empty
    engine = _engine(model, config, request)
    state = engine.runner.state
    pages = [pool for pair in state.pages for pool in pair]
    slots = [*(pool for pair in state.rings for pool in pair), *state.recurrent]
    begin = _held(request["device"]) - _resident(pages) - _resident(slots)
    _reset_peak(model)
    _run(engine, _prompts(config, request["batch"], request["prompt"]), 2)
    peak, kv, constant = _peak(model), _resident(pages), _resident(slots)
    return {
        "weights": weights,
        "kv": kv,
        "state": constant,
        "activations": peak - begin - kv - constant,
    }


def _model(request: dict[str, Any]) -> tuple[CausalLM, ModelConfig]:
    config = parse_config(request["config"])
    return _built(config, request["device"], DTYPES[request["dtype"]]), config


def _built(config: ModelConfig, device: str, dtype: torch.dtype) -> CausalLM:
    model = build_model(config, device, dtype)
    init = model.init_weights
    assert callable(init)
    init(0)
    pack_weights(model)
    return cast(CausalLM, model.eval())


def _engine(model: CausalLM, config: ModelConfig, request: dict[str, Any]) -> Engine:
    """With memory for the batch, and nothing else."""
    spec, batch = model_spec(config), request["batch"]
    size = next(iter(model.parameters())).element_size()
    length = request["prompt"] + request["generate"]
    scratch = spec.page_bytes(DEFAULT_PAGE_SIZE, size) + spec.slot_bytes(size)
    settings = EngineSettings(
        max_num_seqs=batch,
        max_model_len=length,
        max_num_batched_tokens=request["chunk"],
        kv_memory=batch * spec.bytes(length, DEFAULT_PAGE_SIZE, size) + scratch,
        prefix_caching=False,
        swap_space=0,
    )
    return Engine(model, config, settings=settings)


def _warm_up(request: dict[str, Any]) -> None:
    """Load what a model needs of libraries before memory is looked at."""
    config = preset(_SMALLEST)
    assert isinstance(config, YocoConfig)
    mixer = replace(config.mixer, num_heads=2, head_dim=32)
    cross = replace(config.cross, num_heads=2, num_kv_heads=1, head_dim=32)
    tiny = replace(
        config,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_layers=2,
        num_self_layers=1,
        mixer=mixer,
        cross=cross,
    )
    for one in (tiny, llama_twin(tiny)):
        model = _built(one, request["device"], DTYPES[request["dtype"]])
        engine = _engine(model, one, {"batch": 1, "prompt": 128, "generate": 2, "chunk": 64})
        _run(engine, _prompts(one, 1, 128), 2)


def _prompts(config: ModelConfig, batch: int, length: int) -> list[list[int]]:
    draw = random.Random(length * 1009 + batch)
    return [[draw.randrange(config.vocab_size) for _ in range(length)] for _ in range(batch)]


def _run(engine: Engine, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """Seconds until all prompts have a token, and until all have ``new_tokens``."""
    begin = time.perf_counter()
    first, each = run_once(engine, prompts, new_tokens)
    assert each is not None
    return first, time.perf_counter() - begin


def _held(device: str) -> int:
    """Bytes that this process holds now."""
    if device != "cpu":
        return torch.cuda.memory_allocated()
    _trim()
    return _status("VmRSS")


def _reset_peak(model: CausalLM) -> None:
    if next(iter(model.parameters())).is_cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        _trim()
        Path("/proc/self/clear_refs").write_text("5")


def _peak(model: CausalLM) -> int:
    """The most bytes that this process has held since the last reset."""
    if next(iter(model.parameters())).is_cuda:
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")


def _trim() -> None:
    """Have malloc give back what is free in its heap, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident(tensors: Iterable[Tensor]) -> int:
    """Bytes of ``tensors`` that are in memory: pages that were never touched are not."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for tensor in tensors:
        if tensor.is_cuda:
            total += tensor.nbytes
            continue
        start = tensor.data_ptr() // PAGE * PAGE
        size = tensor.data_ptr() + tensor.nbytes - start
        states = (ctypes.c_ubyte * -(-size // PAGE))()
        if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), states):
            raise OSError(ctypes.get_errno(), "mincore failed")
        total += min(PAGE * sum(state & 1 for state in states), tensor.nbytes)
    return total


if __name__ == "__main__":
    main()
