"""Which form every operation takes on this machine, and why."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch

from yocolm.ops.native.build import supported
from yocolm.ops.native.library import native

NATIVE, TORCH = "native", "torch"


class Operation(NamedTuple):
    """An operation, and the functions of the library that its native form calls."""

    name: str
    functions: tuple[str, ...]


ALTUP = ("predict", "join", "correction", "correct", "spread", "merge")
OPERATIONS = (
    Operation("linear, packed weights, any rows", ("yo_pack", "yo_packed_linear")),
    Operation("linear, plain weights, 1-16 rows", ("yo_linear_rows",)),
    Operation("gated units (GELU, SiLU, sparse)", ("yo_gated", "yo_sparse_gelu")),
    Operation("attention over pages and windows", ("yo_attend",)),
    Operation("key and value writes, norm and RoPE in", ("yo_write_heads", "yo_commit_window")),
    Operation("RoPE and norms of heads", ("yo_finish_heads", "yo_rotation")),
    Operation("retention, one token", ("yo_retention_step",)),
    Operation("retention, chunkwise", ("yo_retention_chunks",)),
    Operation("RMS norm, sums, gated norm", ("yo_rms_norm", "yo_add_norm", "yo_gated_norm")),
    Operation("inputs of each layer", ("yo_mix_inputs",)),
    Operation("AltUp, LAuReL", tuple(f"yo_altup_{part}" for part in ALTUP)),
    Operation("soft cap, greatest logit, draws", ("yo_soft_cap", "yo_finite_argmax", "yo_sample")),
)


class Report(TypedDict):
    """What ``yocolm info --ops`` shows."""

    instruction_set: str | None
    available: list[str]
    library: str | None
    off_because: str | None
    threads: int
    operations: dict[str, dict[str, str]]


def report() -> Report:
    """Instruction set, library or the reason for none, threads, and each operation's form."""
    found = native()
    return {
        "instruction_set": found.isa,
        "available": supported(),
        "library": None if found.handle is None else found.reason,
        "off_because": found.reason if found.handle is None else None,
        "threads": torch.get_num_threads(),
        "operations": {operation.name: _forms(operation) for operation in OPERATIONS},
    }


def _forms(operation: Operation) -> dict[str, str]:
    handle = native().handle
    have = handle is not None and all(hasattr(handle, name) for name in operation.functions)
    form = NATIVE if have else TORCH
    return {"float32": form, "bfloat16": form, "float64": TORCH}
