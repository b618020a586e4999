"""`yocolm info`: what a model costs, beside a Transformer of the same layout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

from yocolm.config import GemmaConfig, LlamaConfig, ModelConfig, RetentionConfig, YocoConfig
from yocolm.errors import ConfigError
from yocolm.models.presets import llama_twin
from yocolm.models.registry import load_config
from yocolm.models.spec import DEFAULT_PAGE_SIZE, ModelSpec, model_spec
from yocolm.ops.native.report import report

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Workload:
    """`batch` running sequences of `context` tokens each, values of `dtype_bytes`."""

    context: int
    batch: int
    dtype_bytes: int


def run(arguments: argparse.Namespace) -> int:
    if arguments.ops:
        return _operations(arguments.json)
    if arguments.model is None:
        raise ConfigError("info needs a MODEL, or --ops for the operations of this machine")
    config = load_config(arguments.model)
    context = arguments.context or config.max_position_embeddings
    work = Workload(context, arguments.batch, _DTYPE_BYTES[arguments.kv_dtype])
    name = arguments.model
    columns = {name if len(name) < 20 else "..." + name[-16:]: describe(config, work)}
    if isinstance(config, YocoConfig):
        columns["Transformer twin"] = describe(llama_twin(config), work)
    if arguments.json:
        model, *twin = columns.values()
        result = {
            "model": arguments.model,
            "context": context,
            "batch": work.batch,
            "kv_dtype": arguments.kv_dtype,
            "page_size": DEFAULT_PAGE_SIZE,
            **model,
            "transformer": twin[0] if twin else None,
        }
        print(json.dumps(result, indent=2))
    else:
        print(_table(columns, work, arguments.kv_dtype))
    return 0


def _operations(as_json: bool) -> int:
    """Which form every operation takes on this machine, and why."""
    found = report()
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    available = ", ".join(found["available"]) or "none"
    library = found["library"] or f"off: {found['off_because']}"
    rows = {
        "instruction set": f"{found['instruction_set'] or 'none'} (this CPU has: {available})",
        "native kernels": library,
        "threads": str(found["threads"]),
        "": "",
        "on the CPU, without gradients": "float32   bfloat16  float64",
    }
    for name, forms in found["operations"].items():
        rows[name] = "".join(f"{form:<10}" for form in forms.values())
    print("\n".join(f"{name:<42}{value}".rstrip() for name, value in rows.items()))
    return 0


def describe(config: ModelConfig, work: Workload) -> dict[str, dict[str, object]]:
    """Everything that is printed, as nested dictionaries of plain values."""
    spec = model_spec(config)
    return {
        "architecture": _architecture(config),
        "parameters": {
            "total": spec.num_params,
            "embeddings": spec.embed_params,
            "per_layer_table": spec.table_params,
            "first_half": spec.write_params,
            "second_half": spec.read_params,
            "output_head": 0 if spec.tied else spec.head_params,
        },
        "flops": {
            "first_half_per_token": spec.write_flops_per_token
            + spec.write_attention_flops(work.context),
            "second_half_per_row": spec.read_flops_per_row
            + spec.read_attention_flops(work.context),
            "logits_per_row": spec.logits_flops_per_row,
            "prefill": work.batch * spec.prefill_flops(work.context),
            "decode_step": work.batch * spec.decode_flops(work.context),
            "skipped_share": spec.skipped_share(work.context),
        },
        "memory": _memory(spec, work),
    }


def _architecture(config: ModelConfig) -> dict[str, object]:
    common = {
        "type": config.model_type,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "tied_embeddings": config.tie_word_embeddings,
    }
    if isinstance(config, LlamaConfig):
        heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
        return {**common, **heads, "head_dim": config.head_dim}
    if isinstance(config, GemmaConfig):
        return {**common, **_gemma_layers(config)}
    retention = isinstance(config.mixer, RetentionConfig)
    return {
        **common,
        "self_decoder": "gated retention" if retention else "sliding window",
        "self_decoder_layers": config.num_self_layers,
        "cross_decoder_layers": config.num_cross_layers,
        "heads": config.cross.num_heads,
        "kv_heads": config.cross.num_kv_heads,
        "head_dim": config.cross.head_dim,
    }


def _gemma_layers(config: GemmaConfig) -> dict[str, object]:
    full, sliding = config.full, config.sliding
    return {
        "layers_with_own_kv": config.num_writers,
        "layers_that_share_kv": config.num_kv_shared_layers,
        "full_layers": config.layer_types.count("full_attention"),
        "window": sliding.window,
        "heads": full.num_heads,
        "kv_heads": f"{full.num_kv_heads} full, {sliding.num_kv_heads} window",
        "head_dim": f"{full.head_dim} full, {sliding.head_dim} window",
    }


def _memory(spec: ModelSpec, work: Workload) -> dict[str, object]:
    """Bytes of weights and of each kind of state, over the whole batch."""
    size = work.dtype_bytes
    pages = spec.num_pages(work.context, DEFAULT_PAGE_SIZE)
    window = sum(store.bytes_per_slot(size) for store in spec.window_stores)
    recurrent = sum(store.bytes_per_slot(size) for store in spec.recurrent_stores)
    return {
        "weights": spec.weight_bytes(size),
        "per_layer_table": spec.table_params * size,
        "global_kv": work.batch * pages * spec.page_bytes(DEFAULT_PAGE_SIZE, size),
        "window_kv": work.batch * window,
        "recurrent": work.batch * recurrent,
        "state": work.batch * spec.bytes(work.context, DEFAULT_PAGE_SIZE, size),
        "unshared": work.batch * spec.unshared_bytes(work.context, DEFAULT_PAGE_SIZE, size),
    }


_ROWS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "parameters",
        (
            ("total", "total"),
            ("embeddings", "embeddings"),
            ("per-layer table (looked up)", "per_layer_table"),
            ("first half (every token)", "first_half"),
            ("second half (needed rows)", "second_half"),
            ("output head", "output_head"),
        ),
    ),
    (
        "flops",
        (
            ("first half, last token", "first_half_per_token"),
            ("second half, last row", "second_half_per_row"),
            ("logits, each row", "logits_per_row"),
            ("prefill", "prefill"),
            ("decode step", "decode_step"),
            ("saved by fast prefill", "skipped_share"),
        ),
    ),
    (
        "memory",
        (
            ("weights", "weights"),
            ("of which mapped, not loaded", "per_layer_table"),
            ("global KV", "global_kv"),
            ("window KV", "window_kv"),
            ("recurrent state (float32)", "recurrent"),
            ("all state", "state"),
            ("all state, without sharing", "unshared"),
        ),
    ),
)


def _table(columns: dict[str, dict[str, dict[str, object]]], work: Workload, dtype: str) -> str:
    titles = {
        "parameters": "parameters",
        "flops": f"FLOPs at {work.context:,} tokens, batch {work.batch}",
        "memory": f"memory in {dtype}, {work.batch} x {work.context:,} tokens",
    }
    lines = [_line("", list(columns))]
    lines += [
        _line(
            name.replace("_", " "),
            [str(part["architecture"].get(name, "-")) for part in columns.values()],
        )
        for name in next(iter(columns.values()))["architecture"]
    ]
    for section, rows in _ROWS:
        show = _bytes if section == "memory" else _count
        lines += ["", titles[section]]
        lines += [
            _values(label, [part[section][key] for part in columns.values()], show)
            for label, key in rows
        ]
    return "\n".join(line.rstrip() for line in lines)


def _values(label: str, values: list[object], show: Callable[[int], str]) -> str:
    """A row of numbers; with two columns also how many times the first the second is."""
    if all(isinstance(value, float) for value in values):
        return _line("  " + label, [f"{value:.1%}" for value in values])
    numbers = [value for value in values if isinstance(value, int)]
    cells = [show(number) for number in numbers]
    if len(numbers) == 2 and all(numbers):
        cells.append(f"x {numbers[1] / numbers[0]:.3g}")
    return _line("  " + label, cells)


def _line(label: str, cells: list[str]) -> str:
    return (
        f"{label:<30}"
        + "".join(f"{cell:>20}" for cell in cells[:2])
        + "".join(f"{cell:>10}" for cell in cells[2:])
    )


def _scaled(value: int, units: tuple[str, ...]) -> str:
    """Three significant digits with a decimal unit."""
    if value < 1000:
        return f"{value}{units[0]}"
    power = 0
    scaled = float(value)
    while scaled >= 999.5 and power < len(units) - 1:
        scaled, power = scaled / 1000, power + 1
    return f"{scaled:.3g}{units[power]}"


def _count(value: int) -> str:
    return _scaled(value, ("", " K", " M", " G", " T", " P", " E"))


def _bytes(value: int) -> str:
    return _scaled(value, (" B", " KB", " MB", " GB", " TB", " PB"))
