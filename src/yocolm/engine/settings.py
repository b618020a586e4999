"""How large an engine is, and what it refuses. No torch here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

from yocolm.errors import ConfigError
from yocolm.models.spec import DEFAULT_PAGE_SIZE, ModelSpec

Compile = Literal["auto", "eager", "replay", "inductor", "graph"]
MAX_NUM_SEQS = 64  # unless set; fewer if their constant-size state would take half the memory
_UNITS = {"": 1} | {
    letter + binary: (1024 if binary else 1000) ** power
    for power, letter in enumerate("kmgt", 1)
    for binary in ("", "i")
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class EngineSettings:
    """Limits of an engine; None is chosen from the model and the machine.

    max_num_batched_tokens: tokens a step, prefill chunks and decodes together.
    max_num_seqs: sequences that hold state at once.
    max_model_len: prompt and output of one sequence; the model's own limit if None.
    kv_memory: bytes for all state (global KV, windows, recurrent), or text such as "2GiB".
    page_size: tokens a page of global KV.
    prompt_logprobs: "exact", or "reject" to refuse requests that ask for them, so that every
        prefill is the fast one.
    fast_prefill: False sends every token through the second half, needed or not, to measure what
        is saved.
    compile: how the model's halves run in steps of one token a sequence, and for few rows: "eager"
        as they are, "inductor" compiled by PyTorch, once for each size that occurs, "graph" as
        captured CUDA graphs; "auto" is "graph" on CUDA and "eager" elsewhere, where the kernels
        of its own are faster than what PyTorch compiles. "replay" is "graph" without a capture,
        for tests.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    kv_memory: int | str | None = None
    page_size: int = DEFAULT_PAGE_SIZE
    prompt_logprobs: Literal["exact", "reject"] = "exact"
    fast_prefill: bool = True
    compile: Compile = "auto"

    def __post_init__(self) -> None:
        if self.prompt_logprobs not in ("exact", "reject"):
            raise ConfigError(
                f"prompt_logprobs={self.prompt_logprobs!r} must be 'exact' or 'reject'"
            )
        if self.compile not in get_args(Compile):
            raise ConfigError(
                f"compile={self.compile!r} must be one of {', '.join(get_args(Compile))}"
            )
        if not isinstance(self.fast_prefill, bool):
            raise ConfigError(f"fast_prefill={self.fast_prefill!r} must be True or False")
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "page_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"{name}={value!r} must be an integer")
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")


@dataclass(frozen=True)
class PoolSizes:
    """Numbers of pages and slots, the scratch ones included."""

    num_pages: int
    num_slots: int

    @property
    def max_num_seqs(self) -> int:
        return self.num_slots - 1


def size_pools(
    settings: EngineSettings,
    spec: ModelSpec,
    dtype_bytes: int,
    max_model_len: int,
    free_memory: int,
) -> PoolSizes:
    """Divide the memory: a slot for every sequence, the rest in pages, no more than can be used.

    Without ``kv_memory`` a quarter of ``free_memory``, the device's free bytes, is divided.
    Raises ConfigError if not even one sequence of one page fits.
    """
    budget = parse_bytes(settings.kv_memory)
    if budget is None:
        budget = free_memory // 4
    slot_bytes = spec.slot_bytes(dtype_bytes)
    page_bytes = spec.page_bytes(settings.page_size, dtype_bytes)
    seqs = settings.max_num_seqs
    if seqs is None:
        seqs = MAX_NUM_SEQS if slot_bytes == 0 else min(MAX_NUM_SEQS, budget // 2 // slot_bytes)
        seqs = max(1, seqs)
    left = budget - (seqs + 1) * slot_bytes
    useful = seqs * ceil(max_model_len / settings.page_size)
    if page_bytes == 0 and left >= 0:  # nothing grows: pages are numbers only
        return PoolSizes(useful + 1, seqs + 1)
    pages = left // page_bytes - 1 if page_bytes else 0
    if pages < 1:
        least = (seqs + 1) * slot_bytes + 2 * page_bytes
        raise ConfigError(
            f"kv_memory={budget} bytes hold no page beside the state of {seqs} "
            f"sequence{'s' * (seqs > 1)}; give at least {least} bytes"
            + (", or lower max_num_seqs" if seqs > 1 else "")
        )
    return PoolSizes(min(pages, useful) + 1, seqs + 1)


def parse_bytes(amount: int | str | None) -> int | None:
    """A number of bytes, or text with a unit: "500MB", "2GiB", "1.5g". Raises ConfigError."""
    if amount is None or (isinstance(amount, int) and not isinstance(amount, bool)):
        if amount is not None and amount <= 0:
            raise ConfigError(f"kv_memory={amount} must be above 0 bytes")
        return amount
    match = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    if match is None:
        raise ConfigError(f"kv_memory={amount!r} is no amount of bytes; write 500MB or 2GiB, say")
    return parse_bytes(int(float(match.group(1)) * _UNITS[match.group(2).lower()]))


def available_memory() -> int:
    """Bytes of memory that are free, or 4 GiB where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return 4 * 2**30
