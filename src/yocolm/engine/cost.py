"""What a step costs, predicted from its plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepLoad:
    """What a step does, summed over its entries.

    tokens, rows: through the first and the second half; sequences; chunks: entries of several
    tokens; draws: tokens drawn.
    write_flops, read_flops: token mixing (attention, retention) of entries of several tokens.
    kv_bytes_write, kv_bytes_read: global KV that entries of one token scan, in layers of either
    half; window_bytes, state_bytes: of windows scanned, and of recurrent states read and written.
    append_bytes: of the global KV that is written.
    """

    tokens: int = 0
    rows: int = 0
    sequences: int = 0
    chunks: int = 0
    draws: int = 0
    write_flops: float = 0.0
    read_flops: float = 0.0
    kv_bytes_write: float = 0.0
    kv_bytes_read: float = 0.0
    window_bytes: float = 0.0
    state_bytes: float = 0.0
    append_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step by phase. ``overhead`` is what is outside the model and the draws."""

    self_prefill: float = 0.0
    kv_finalize: float = 0.0
    cross_decode: float = 0.0
    sample: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.self_prefill + self.kv_finalize + self.cross_decode + self.sample + self.overhead
        )
