"""What a training run prints, and the curves it draws."""

from __future__ import annotations

import time
from typing import TextIO

import torch

from yocolm.config import ModelConfig
from yocolm.models.spec import model_spec
from yocolm.train.curves import Curves, open_curves
from yocolm.train.settings import TrainSettings

# Dense bfloat16 FLOP/s by data sheet, for part of a device's name; the first that fits counts.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


class Progress:
    """Means since the last line, a line every few steps, and curves if asked for.

    Args:
        s: a run of one stage.
        out: where lines go; None, as on ranks other than the first, prints and draws nothing.
    """

    def __init__(self, s: TrainSettings, out: TextIO | None) -> None:
        self.s, self.out = s, out
        self.steps = s.train.last_step
        self.tokens_per_step = s.train.batch_size * s.train.accumulate * s.data.sequence_length
        self._open_curves = open_curves(s) if out is not None else []
        self._curves: list[Curves] = []
        self._flops_per_token = 0.0
        self._peak: float | None = None  # FLOP/s of all devices together
        self._losses: list[float] = []
        self._seconds = 0.0  # in training steps alone, since the last line
        self._began, self._done = time.monotonic(), 0

    def measure(self, config: ModelConfig, device: torch.device, ranks: int = 1) -> None:
        """Tell the share of the devices' FLOP/s that is used (MFU), where their peak is known.

        It is ``train.peak_flops`` for each of the ``ranks`` devices, or that of a known GPU.
        """
        length = self.s.data.sequence_length
        flops = model_spec(config).train_flops(length, self.s.train.retention_chunk_size)
        self._flops_per_token = flops / length
        peak = self.s.train.peak_flops or _known_peak(device, self.s.train.dtype)
        self._peak = None if peak is None else peak * ranks

    def start(self, step: int) -> None:
        """Begin at ``step``; curves beyond it, of a run that was cut off, are dropped."""
        self._curves = [open_one(step) for open_one in self._open_curves]
        self._began, self._done = time.monotonic(), 0

    def close(self) -> None:
        for curves in self._curves:
            curves.close()

    def say(self, text: str) -> None:
        if self.out is not None:
            print(text, file=self.out, flush=True)

    def add(self, loss: float, seconds: float) -> None:
        """Count one step."""
        self._losses.append(loss)
        self._seconds += seconds
        self._done += 1

    def line(self, step: int, lr: float, norm: float) -> None:
        """Print the mean loss and rate of the steps since the last line."""
        loss = sum(self._losses) / len(self._losses)
        rate = self.tokens_per_step * len(self._losses) / max(self._seconds, 1e-9)
        figures = {"loss": loss, "lr": lr, "grad_norm": norm, "tokens_per_s": rate}
        speed = f"{rate:,.0f} tok/s"
        if self._peak is not None:
            figures["mfu"] = rate * self._flops_per_token / self._peak
            speed += f" | MFU {figures['mfu']:.1%}"
        elapsed = time.monotonic() - self._began
        left = elapsed / self._done * (self.steps - step)
        self.say(
            f"step {step:>6}/{self.steps} | loss {loss:.4f} | lr {lr:.2e} | grad {norm:.2f} | "
            f"{speed} | {clock(elapsed)}<{clock(left)}"
        )
        self.scalars("train", figures, step)
        self._losses, self._seconds = [], 0.0

    def validation(self, figures: dict[str, float], tokens: int, step: int) -> None:
        """Print and draw the figures of a validation on ``tokens`` tokens."""
        self.say(
            f"step {step:>6}/{self.steps} | validation loss {figures['nll_per_token']:.4f} | "
            f"{figures['bits_per_byte']:.4f} bits/byte | {tokens} tokens"
        )
        self.scalars("validation", figures, step)

    def scalars(self, group: str, figures: dict[str, float], step: int) -> None:
        for curves in self._curves:
            curves.add({f"{group}/{name}": value for name, value in figures.items()}, step)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as 0:01:07."""
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}"


def _known_peak(device: torch.device, dtype: str) -> float | None:
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
