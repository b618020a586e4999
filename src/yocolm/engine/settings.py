"""How large an engine is, and what it refuses. No torch here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

from yocolm.errors import ConfigError, RequestError, YocolmError
from yocolm.models.spec import DEFAULT_PAGE_SIZE, ModelSpec

Compile = Literal["auto", "eager", "replay", "inductor", "graph"]
PolicyName = Literal["fcfs", "traffic"]
MAX_PRIORITY = 2**31
MAX_SECONDS = 1e6  # of a target
MAX_COUNT = 2**40
MAX_BYTES = 2**60
SWAP_SPACE = 4 * 2**30  # bytes, unless set; no more than twice the state
KEPT_STATES = 4  # states that are kept, for each sequence, unless set and as far as memory goes
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
    prefix_caching: keep what was computed, for prompts that begin alike.
    num_checkpoints: constant-size states that are kept beside those of running sequences; None: a
        quarter of what their slots leave, at most 4 for each.
    checkpoint_spacing: tokens between states kept within a long prompt.
    mean_tokens: what a request is expected to hold, prompt and output; None expects nothing. It
        divides the memory between slots and pages.
    swap_space: bytes, or text, outside of the state for preempted sequences: a file without a name
        on the CPU, pinned memory on CUDA; 0: none, they are computed anew; None: 4 GiB at most.
    policy: "fcfs" (first come, first served, a budget of tokens) or "traffic" (by predicted cost).
    ttft_target, tpot_target: seconds, of requests that give none, for the policy "traffic"; None: 5
        and 2 times what the request takes alone.
    priority_aging: seconds of arrival that one level of priority is worth.
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
    prefix_caching: bool = True
    num_checkpoints: int | None = None
    checkpoint_spacing: int = 8192
    mean_tokens: int | None = None
    swap_space: int | str | None = None
    policy: PolicyName = "fcfs"
    ttft_target: float | None = None
    tpot_target: float | None = None
    priority_aging: float = 10.0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("prompt_logprobs", ("exact", "reject")),
            ("compile", get_args(Compile)),
            ("policy", get_args(PolicyName)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name}={value!r} must be one of {', '.join(allowed)}")
        for name in ("fast_prefill", "prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        for name in _COUNTS:
            value, least = getattr(self, name), int(name != "num_checkpoints")
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name}={value!r} must be an integer")
            if value < least:
                raise ConfigError(f"{name}={value} must be at least {least}")
            if value > MAX_COUNT:
                raise ConfigError(f"{name} must be at most {MAX_COUNT}")
        for name in ("ttft_target", "tpot_target", "priority_aging"):
            check_seconds(name, getattr(self, name), zero=name == "priority_aging")


_COUNTS = (
    *("max_num_batched_tokens", "max_num_seqs", "max_model_len", "page_size"),
    *("num_checkpoints", "checkpoint_spacing", "mean_tokens"),
)
_OPTIONAL = ("max_num_seqs", "max_model_len", "num_checkpoints", "mean_tokens")


def check_seconds(
    name: str, value: object, zero: bool = False, error: type[YocolmError] = ConfigError
) -> None:
    """Raise ``error`` unless ``value`` is None or seconds above 0 (or ``zero``), 1e6 at most."""
    if value is None and not zero:
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        fits = False
    else:
        fits = (value > 0 or (zero and value == 0)) and value <= MAX_SECONDS
    if not fits:
        least = "from 0" if zero else "above 0"
        raise error(f"{name}={value!r} must be a number of seconds {least} to {MAX_SECONDS:g}")


def check_urgency(
    priority: int, ttft_target: float | None = None, tpot_target: float | None = None
) -> None:
    """Raise RequestError unless they are an integer and numbers of seconds (or None)."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"priority={priority!r} must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    check_seconds("ttft_target", ttft_target, error=RequestError)
    check_seconds("tpot_target", tpot_target, error=RequestError)


@dataclass(frozen=True)
class PoolSizes:
    """Numbers of pages and slots, the scratch ones included; ``num_seqs`` of the slots are for
    running sequences, the rest for states that are kept."""

    num_pages: int
    num_slots: int
    num_seqs: int

    @property
    def max_num_seqs(self) -> int:
        return self.num_seqs


def size_pools(
    settings: EngineSettings,
    spec: ModelSpec,
    dtype_bytes: int,
    max_model_len: int,
    free_memory: int,
) -> PoolSizes:
    """Divide the memory: a slot for every sequence, some for kept states, the rest in pages, no
    more than can be used.

    Without ``kv_memory`` a quarter of ``free_memory``, the device's free bytes, is divided.
    Raises ConfigError if not even one sequence of one page fits.
    """
    budget = parse_bytes(settings.kv_memory)
    if budget is None:
        budget = free_memory // 4
    slot_bytes = spec.slot_bytes(dtype_bytes)
    page_bytes = spec.page_bytes(settings.page_size, dtype_bytes)
    mean = 0  # bytes of the pages that a request is expected to hold
    if settings.mean_tokens is not None:
        mean = page_bytes * spec.num_pages(settings.mean_tokens, settings.page_size)
    seqs = settings.max_num_seqs or _num_seqs(budget, slot_bytes, mean)
    left = budget - (seqs + 1) * slot_bytes
    kept = _num_kept(settings, left - max(2 * page_bytes, seqs * mean), slot_bytes, seqs)
    left -= kept * slot_bytes
    longest = ceil(max_model_len / settings.page_size)
    useful = (seqs + (max(kept, seqs) if settings.prefix_caching else 0)) * longest
    if page_bytes == 0 and left >= 0:  # nothing grows: pages are numbers only
        return PoolSizes(useful + 1, seqs + kept + 1, seqs)
    pages = left // page_bytes - 1 if page_bytes else 0
    if pages < 1:
        least = (seqs + (settings.num_checkpoints or 0) + 1) * slot_bytes + 2 * page_bytes
        raise ConfigError(_too_small(settings, budget, least, seqs))
    return PoolSizes(min(pages, useful) + 1, seqs + kept + 1, seqs)


def _too_small(settings: EngineSettings, budget: int, least: int, seqs: int) -> str:
    lower = ["max_num_seqs"] * (seqs > 1)
    lower += ["num_checkpoints"] * (settings.num_checkpoints is not None)
    return (
        f"kv_memory={budget} bytes hold no page beside the state of {seqs} "
        f"sequence{'s' * (seqs > 1)}; give at least {least} bytes, or lower "
        f"{' or '.join([*lower, 'page_size'])}"
    )


def _num_seqs(budget: int, slot_bytes: int, mean: int) -> int:
    """As many as the memory holds with ``mean`` bytes of pages each and a state kept of each; if
    that is not known, as many as take half of it with their slots."""
    each = 2 * slot_bytes + mean
    return max(1, min(MAX_NUM_SEQS, budget // each if each else MAX_NUM_SEQS))


def _num_kept(settings: EngineSettings, left: int, slot_bytes: int, seqs: int) -> int:
    """Slots for states that are kept, of ``left`` bytes."""
    if not settings.prefix_caching or not slot_bytes:
        return 0
    if settings.num_checkpoints is not None:
        return settings.num_checkpoints
    return max(0, min(KEPT_STATES * seqs, left // 4 // slot_bytes))


def parse_bytes(
    amount: int | str | None, name: str = "kv_memory", zero: bool = False
) -> int | None:
    """A number of bytes, or text with a unit: "500MB", "2GiB", "1.5g"; ``zero`` may be 0.

    Raises ConfigError that calls it ``name``.
    """
    if amount is None or (isinstance(amount, int) and not isinstance(amount, bool)):
        if amount is not None and amount <= 0 and not (zero and amount == 0):
            least = "at least" if zero else "above"
            raise ConfigError(f"{name}={amount} must be {least} 0 bytes")
        if amount is not None and amount > MAX_BYTES:
            raise ConfigError(f"{name} must be at most {MAX_BYTES} bytes")
        return amount
    match = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    if match is None:
        raise ConfigError(f"{name}={amount!r} is no amount of bytes; write 500MB or 2GiB, say")
    number = min(float(match.group(1)) * _UNITS[match.group(2).lower()], 2.0 * MAX_BYTES)
    return parse_bytes(int(number), name, zero)


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
