"""What gpu_check.py measures: prefill, decode steps, bandwidth, memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from yocolm.config import Gemma3nConfig, Gemma4Config, ModelConfig, YocoConfig
from yocolm.engine.engine import Engine
from yocolm.engine.sampling_params import SamplingParams
from yocolm.engine.settings import Compile, EngineSettings
from yocolm.engine.static_state import StaticPages
from yocolm.models.base import Batch, CausalLM
from yocolm.models.presets import preset
from yocolm.models.registry import build_model
from yocolm.models.spec import model_spec

SPEED = ("3B", "gemma-4-E2B")
MILLION = 1 << 20


@dataclass(frozen=True)
class Row:
    """One line of the table; ``value`` is a number of ``unit``, None if it was skipped."""

    name: str
    value: float | None
    unit: str
    passed: bool = True
    note: str = ""


class Budget:
    """Seconds that are left of those that the whole script may take."""

    def __init__(self, seconds: float) -> None:
        self.until = time.perf_counter() + seconds

    def fits(self, seconds: float) -> bool:
        return time.perf_counter() + seconds < self.until


def clock(device: torch.device) -> float:
    """Seconds, once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def tiny(config: ModelConfig) -> ModelConfig:
    """The preset's family and mixers at a size that float32 on a CPU runs at once."""
    if isinstance(config, YocoConfig):
        return replace(config, num_layers=4, num_self_layers=2, vocab_size=512)
    if isinstance(config, Gemma3nConfig | Gemma4Config):
        return small_gemma(config)
    return replace(config, num_layers=3, vocab_size=512)


def small_gemma(config: Gemma3nConfig | Gemma4Config) -> ModelConfig:
    fields: dict[str, Any] = {
        "vocab_size": 512,
        "per_layer_vocab_size": 512,
        "hidden_size": 128,
        "layer_types": ("sliding_attention", "full_attention") * 3,
        "num_kv_shared_layers": 2,
        "sliding": replace(config.sliding, window=32),
    }
    if isinstance(config, Gemma3nConfig):
        return replace(
            config, mlp_widths=(256,) * 6, activation_sparsity=(0.5,) + (0.0,) * 5, **fields
        )
    return replace(config, mlp_size=256, **fields)


def backends(device: torch.device) -> tuple[Compile, Compile]:
    """Without and with static buffers; on a CPU these are replayed."""
    return "eager", "graph" if device.type == "cuda" else "replay"


def decode_batch(lengths: list[int], pages: int, device: torch.device) -> Batch:
    """One row at the end of each sequence, whose pages are ``pages`` a sequence, in turns."""
    count = len(lengths)
    each = torch.arange(count, device=device)
    positions = torch.tensor(lengths, device=device) - 1
    return Batch(
        tokens=each,
        positions=positions,
        seq_ids=each,
        cu_seqlens=torch.arange(count + 1, device=device),
        rows=each,
        slots=each + 1,
        kv_lens=positions + 1,
        block_table=1 + each[:, None] + count * torch.arange(pages, device=device)[None],
    )


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Random weights, on the model's own device: seconds for billions."""
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "scale")):
            parameter.fill_(1.0)
        else:
            generator = torch.Generator(parameter.device).manual_seed(len(name))
            parameter.normal_(0.0, 0.02, generator=generator)


def run(engine: Engine) -> dict[str, Any]:
    """Step until all requests are done; final outputs by id."""
    done = {}
    while engine.has_unfinished_requests():
        done.update((output.request_id, output) for output in engine.step() if output.finished)
    engine.check()
    return done


def engine_of(
    model: nn.Module, config: ModelConfig, length: int, seqs: int = 1, **settings: Any
) -> Engine:
    """An engine with room for ``seqs`` sequences of ``length`` tokens, and no more."""
    width = next(model.parameters()).element_size()
    spec, page = model_spec(config), EngineSettings.page_size
    pages = seqs * -(-length // page) + 2
    memory = (seqs + 2) * spec.slot_bytes(width) + pages * spec.page_bytes(page, width) + 1
    config = replace(config, max_position_embeddings=max(length, config.max_position_embeddings))
    made = EngineSettings(max_num_seqs=seqs, max_model_len=length, kv_memory=memory, **settings)
    return Engine(cast(CausalLM, model), config, settings=made)


def time_tokens(
    engine: Engine, device: torch.device, length: int, steps: int, seqs: int = 1
) -> tuple:
    """Seconds to the first token of the last of ``seqs`` prompts, and of a step after that."""
    generator = torch.Generator().manual_seed(length)
    params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
    for i in range(seqs):
        ids = torch.randint(0, engine.config.vocab_size, (length,), generator=generator).tolist()
        engine.add_request(f"{i} of {length}", ids, params)
    began = clock(device)
    while engine.scheduler.waiting or any(not s.decoding for s in engine.scheduler.running):
        engine.step()
    middle, before = clock(device), engine.scheduler.num_steps
    run(engine)
    taken = max(1, engine.scheduler.num_steps - before)
    return middle - began, (clock(device) - middle) / taken


def measure_prefill(
    device: torch.device, name: str, config: ModelConfig, lengths: list[int], budget: Budget
) -> Iterator[Row]:
    """Time to first token with fast prefill on and off; decode steps with and without graphs."""
    dtype = torch.bfloat16
    model = build_model(config, device, dtype)
    fill(model)
    eager, captured = backends(device)
    expected = 1.0
    for length in lengths:
        if not budget.fits(3 * expected):
            yield Row(f"{name}, {length} tokens", None, "s", note="skipped: no time left")
            continue
        on, off, steps = 0.0, 0.0, {}
        for fast in (True, False):
            engine = engine_of(model, config, length + 40, fast_prefill=fast, compile=eager,
                               max_num_batched_tokens=8192)  # fmt: skip
            if length == lengths[0]:
                time_tokens(engine, device, length, 2)  # kernels are loaded
            seconds, steps["uncaptured"] = time_tokens(engine, device, length, 16)
            on, off = (seconds, off) if fast else (on, seconds)
        engine = engine_of(model, config, length + 40, compile=captured)
        _, steps["captured"] = time_tokens(engine, device, length, 32)
        del engine
        free_memory()
        expected = 2.5 * (on + off)
        saved, skipped = 1 - on / off, skipped_share(config, length)
        note = f"saves {saved:.0%}, FLOPs {skipped:.0%}"
        yield Row(f"{name}, {length} tokens, TTFT", on, "s", note=note)
        yield Row(f"{name}, {length} tokens, TTFT, fast prefill off", off, "s")
        for how, seconds in steps.items():
            yield Row(f"{name}, {length} tokens, decode step {how}", seconds * 1e3, "ms")


def skipped_share(config: ModelConfig, length: int) -> float:
    spec = model_spec(config)
    every = spec.write_flops(0, length) + spec.read_flops(range(1, length + 1))
    return 1 - spec.prefill_flops(length) / every


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_batch(
    device: torch.device, name: str, config: ModelConfig, length: int, seqs: int
) -> Iterator[Row]:
    """Decode steps of many sequences, with and without graphs."""
    model = build_model(config, device, torch.bfloat16)
    fill(model)
    for how, compile in zip(("uncaptured", "captured"), backends(device), strict=True):
        engine = engine_of(model, config, length + 40, seqs, compile=compile)
        _, step = time_tokens(engine, device, length, 24, seqs)
        yield Row(f"{name}, {seqs} x {length}, decode step {how}", step * 1e3, "ms")
        del engine
        free_memory()


def repeated(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of one call, the median of some."""
    for _ in range(3):
        work()
    times = []
    for _ in range(7):
        began = clock(device)
        for _ in range(5):
            work()
        times.append((clock(device) - began) / 5)
    return sorted(times)[3]


@torch.inference_mode()
def copy_rate(device: torch.device, size: int) -> float:
    """Bytes read and written a second by a copy of ``size`` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / repeated(device, lambda: target.copy_(source))


@torch.inference_mode()
def scan_rate(device: torch.device, tokens: int, heads: int, groups: int, dim: int) -> float:
    """Bytes of keys and values read a second by one row's attention to ``tokens`` tokens."""
    pages = tokens // 32
    k, v = (torch.randn(pages + 1, groups, 32, dim, device=device).to(torch.bfloat16) for _ in "kv")
    batch, handle = decode_batch([tokens], pages, device), StaticPages(k, v)
    q = torch.randn(1, heads, dim, device=device).to(torch.bfloat16)
    return 4 * tokens * groups * dim / repeated(device, lambda: handle.attend(q, batch))


def measure_scan(
    device: torch.device, tokens: int, layouts: list[tuple[int, int, int]]
) -> Iterator[Row]:
    """Bandwidth of one row's attention over a long KV, beside that of a copy."""
    copied = copy_rate(device, tokens * 4096)
    yield Row("copy", copied / 1e9, "GB/s")
    for heads, groups, dim in layouts:
        rate = scan_rate(device, tokens, heads, groups, dim)
        name = f"scan of {tokens} tokens, {heads}/{groups} x {dim}"
        yield Row(name, rate / 1e9, "GB/s", note=f"{rate / copied:.0%} of the copy")
        free_memory()


def measure_memory(
    device: torch.device,
    name: str,
    config: ModelConfig,
    tokens: int,
    budget: Budget,
    expected: float,
) -> Iterator[Row]:
    """State of one very long sequence, by the formula and as it is allocated; and its prefill."""
    model = build_model(config, device, torch.bfloat16)
    fill(model)
    formula = model_spec(config).bytes(tokens, EngineSettings.page_size, 2)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    engine = engine_of(model, config, tokens + 8, compile="eager", max_num_batched_tokens=8192)
    yield Row(f"{name}, state of {tokens} tokens by the formula", formula / 2**30, "GiB")
    if on_gpu:
        taken = (torch.cuda.memory_allocated(device) - before) / 2**30
        yield Row(
            f"{name}, pools of {tokens} tokens", taken, "GiB", taken < 1.2 * formula / 2**30 + 1
        )
    if not budget.fits(expected):
        yield Row(f"{name}, {tokens} tokens, TTFT", None, "s", note="skipped: no time left")
        return
    seconds, step = time_tokens(engine, device, tokens, 4)
    yield Row(f"{name}, {tokens} tokens, TTFT", seconds, "s")
    yield Row(f"{name}, {tokens} tokens, decode step", step * 1e3, "ms")
    if on_gpu:
        yield Row(f"{name}, peak", torch.cuda.max_memory_allocated(device) / 2**30, "GiB")


def speed(device: torch.device, lengths: list[int], small: bool, budget: Budget) -> Iterator[Row]:
    configs = {name: preset(name) for name in SPEED}
    for name, config in configs.items():
        if small:
            configs[name] = tiny(config)
        elif isinstance(config, Gemma3nConfig | Gemma4Config):
            # Its tables are only looked up: fewer rows change no time.
            configs[name] = replace(config, vocab_size=32_768, per_layer_vocab_size=32_768)
    layouts = [(4, 2, 16)] if small else [(24, 8, 128), (8, 1, 256), (8, 1, 512), (32, 8, 128)]
    yield from measure_scan(device, 512 if small else 131_072, layouts)
    slowest = 0.0
    for name, config in configs.items():
        for row in measure_prefill(device, name, config, lengths, budget):
            if name == SPEED[0] and row.name.endswith("TTFT"):
                slowest = row.value or slowest
            yield row
        free_memory()
    for name, config in configs.items():
        if budget.fits(20):
            yield from measure_batch(
                device, name, config, min(1024, lengths[-1]), 4 if small else 32
            )
            free_memory()
        else:
            yield Row(f"{name}, many sequences", None, "ms", note="skipped: no time left")
    longest = 2048 if small else MILLION
    expected = 1.5 * slowest * longest / lengths[-1]
    yield from measure_memory(device, SPEED[0], configs[SPEED[0]], longest, budget, expected)
