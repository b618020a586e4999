"""What a training run prints, and the curves it draws."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

from yocolm.errors import MissingDependencyError
from yocolm.train.settings import TrainSettings


class ScalarWriter(Protocol):
    """What a run needs of TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...

    def close(self) -> None: ...


class Progress:
    """Means since the last line, a line every few steps, and TensorBoard scalars if asked for."""

    def __init__(self, s: TrainSettings, out: TextIO) -> None:
        self.out = out
        self.steps = s.train.last_step
        self.tokens_per_step = s.train.batch_size * s.train.accumulate * s.data.sequence_length
        self.folder = Path(s.output_dir) / "tensorboard"
        self._open_writer = _summary_writer() if s.train.tensorboard else None
        self.writer: ScalarWriter | None = None
        self._losses: list[float] = []
        self._seconds = 0.0  # in training steps alone, since the last line
        self._began, self._done = time.monotonic(), 0

    def start(self, step: int) -> None:
        """Begin at ``step``; curves beyond it, of a run that was cut off, are dropped."""
        if self._open_writer is not None:
            self.writer = self._open_writer(str(self.folder), purge_step=step + 1)
        self._began, self._done = time.monotonic(), 0

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def say(self, text: str) -> None:
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
        elapsed = time.monotonic() - self._began
        left = elapsed / self._done * (self.steps - step)
        self.say(
            f"step {step:>6}/{self.steps} | loss {loss:.4f} | lr {lr:.2e} | grad {norm:.2f} | "
            f"{rate:,.0f} tok/s | {clock(elapsed)}<{clock(left)}"
        )
        figures = {"loss": loss, "lr": lr, "grad_norm": norm, "tokens_per_s": rate}
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
        if self.writer is not None:
            for name, value in figures.items():
                self.writer.add_scalar(f"{group}/{name}", value, step)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as 0:01:07."""
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}"


def _summary_writer() -> Callable[..., ScalarWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingDependencyError(
            "train.tensorboard is true, but TensorBoard is not installed; "
            "run: pip install tensorboard"
        ) from None
    return SummaryWriter
