"""The training loop: packed next-token training of any family, resumable bit for bit."""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from yocolm.config import ModelConfig, parse_config
from yocolm.errors import ConfigError, MissingDependencyError, NumericsError
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.models.registry import build_model, load_model
from yocolm.models.weights import save_weights
from yocolm.train.checkpoint import load_latest, save_checkpoint
from yocolm.train.data import build_sampler, expand, read_documents, tokenize
from yocolm.train.loss import cross_entropy_sum
from yocolm.train.optim import build_optimizers, learning_rate_factor, set_learning_rate
from yocolm.train.settings import TrainSettings, load_settings
from yocolm.train.tokenizer import END_OF_TEXT, train_tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ScalarWriter(Protocol):
    """What the loop needs of TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


def prepare_tokenizer(s: TrainSettings) -> Tokenizer:
    """Load the tokenizer the settings name, or train it on their sources and write it there."""
    path = Path(s.tokenizer.path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    names = s.tokenizer.train_on or list(s.data.sources)
    texts = (
        document
        for name in names
        for file in expand(s.data.sources[name].files, f"data.sources.{name}")
        for document in read_documents(file, s.data.text_field)
    )
    return train_tokenizer(texts, s.tokenizer.vocab_size, path)


def prepare_model(s: TrainSettings, tokenizer: Tokenizer) -> tuple[nn.Module, ModelConfig]:
    """Build the model in float32: from a checkpoint, a preset, or fields with seeded weights."""
    if isinstance(s.model, str):
        model, config = load_model(s.model, dtype=torch.float32, device="cpu", seed=s.seed)
    else:
        end = tokenizer.token_to_id(END_OF_TEXT)
        fields = {
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": s.data.sequence_length,
            "bos_token_id": end,
            "eos_token_id": end,
            **s.model,
        }
        config = parse_config(fields)
        model = build_model(config, device="cpu", dtype=torch.float32)
        init = model.init_weights
        assert callable(init)
        init(s.seed)
    if config.vocab_size < tokenizer.get_vocab_size():
        raise ConfigError(
            f"the model's vocabulary has {config.vocab_size} tokens, "
            f"the tokenizer {tokenizer.get_vocab_size()}"
        )
    return model, config


class Trainer:
    """One run: model, optimisers, data and their progress."""

    def __init__(self, settings: TrainSettings, out: TextIO = sys.stderr) -> None:
        self.s, self.out = settings, out
        self.folder = Path(settings.output_dir)
        self.tokenizer = prepare_tokenizer(settings)
        self.model, self.config = prepare_model(settings, self.tokenizer)
        self.model.gradient_checkpointing = settings.train.gradient_checkpointing  # type: ignore[assignment]
        self.optimizers = build_optimizers(self.model, settings.train)
        cache = self.folder / "cache"
        self.sampler = build_sampler(settings.data, self.tokenizer, cache, settings.seed)
        files = expand(settings.data.validation, "data.validation")
        self.validation = tokenize(files, self.tokenizer, settings.data.text_field, cache)
        self.validation_bytes = sum(file.stat().st_size for file in files)
        self.step = 0
        self.writer = self._tensorboard()
        self._resume()

    def run(self) -> dict[str, float]:
        """Train to the last step and export the model. Returns the last validation's figures."""
        o = self.s.train
        self._say(self._headline())
        began, first = time.monotonic(), self.step
        tokens, loss_sum, mark = 0, 0.0, time.monotonic()
        while self.step < o.steps:
            factor = learning_rate_factor(self.step, o)
            lr = set_learning_rate(self.optimizers, factor)
            loss, norm = self.train_step()
            self.step += 1
            loss_sum += loss
            tokens += o.batch_size * o.accumulate * self.s.data.sequence_length
            if self.step % o.log_every == 0 or self.step == o.steps:
                now = time.monotonic()
                mean = loss_sum / ((self.step - 1) % o.log_every + 1)
                self._log(mean, lr, norm, tokens / (now - mark), now - began, first)
                tokens, loss_sum, mark = 0, 0.0, now
            if self.step % o.validate_every == 0 and self.step < o.steps:
                self.validate(o.validation_tokens)
            if self.step % o.save_every == 0 or self.step == o.steps:
                self._save()
        figures = self.validate(len(self.validation))
        self.export(self.folder / "final", figures)
        return figures

    def train_step(self) -> tuple[float, float]:
        """One optimiser step. Returns mean loss in nats a token, gradient norm before clipping."""
        o = self.s.train
        total = 0.0
        count = o.batch_size * o.accumulate * self.s.data.sequence_length
        for _ in range(o.accumulate):
            inputs, targets = self.sampler.batch(o.batch_size)
            loss = self._loss_sum(inputs, targets)
            (loss / count).backward()
            total += float(loss.detach())
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), o.grad_clip))
        if not math.isfinite(norm):
            raise NumericsError(
                f"the gradient norm is {norm} at step {self.step}; lower the learning rate"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total / count, norm

    @torch.no_grad()
    def validate(self, max_tokens: int) -> dict[str, float]:
        """Loss on the validation text, in windows of ``sequence_length`` that each start cold."""
        length, o = self.s.data.sequence_length, self.s.train
        stop = min(len(self.validation) - 1, max_tokens)
        total = 0.0
        for start in range(0, stop, length * o.batch_size):
            end = min(start + length * o.batch_size, stop)
            ids = np.asarray(self.validation[start : end + 1], dtype=np.int64)
            whole, rest = divmod(end - start, length)
            lengths = [length] * whole + ([rest] if rest else [])
            total += float(self._loss_packed(ids[:-1], ids[1:], lengths))
        nll = total / stop
        tokens_per_byte = (len(self.validation) - 1) / self.validation_bytes
        figures = {"nll_per_token": nll, "bits_per_byte": nll / math.log(2) * tokens_per_byte}
        self._say(
            f"step {self.step:>6}/{o.steps} | validation loss {nll:.4f} | "
            f"{figures['bits_per_byte']:.4f} bits/byte | {stop} tokens"
        )
        for name, value in figures.items():
            self._scalar(f"validation/{name}", value)
        return figures

    def export(self, folder: Path, figures: dict[str, float]) -> None:
        """Write a Hugging Face folder: weights, config, tokenizer, the settings that made them."""
        save_weights(copy.deepcopy(self.model).to(_DTYPES[self.s.export_dtype]), folder)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        end = END_OF_TEXT if self.tokenizer.token_to_id(END_OF_TEXT) is not None else None
        tokenizer_config = {"bos_token": end, "eos_token": end, "add_bos_token": False}
        record = {"settings": asdict(self.s), "steps": self.step, "validation": figures}
        for name, value in (("tokenizer_config", tokenizer_config), ("training", record)):
            text = json.dumps(value, indent=2) + "\n"
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
        self._say(f"wrote {folder}")

    def _loss_sum(self, inputs: np.ndarray, targets: np.ndarray) -> Tensor:
        size, length = inputs.shape
        return self._loss_packed(inputs.reshape(-1), targets.reshape(-1), [length] * size)

    def _loss_packed(self, inputs: np.ndarray, targets: np.ndarray, lengths: list[int]) -> Tensor:
        dtype = _DTYPES[self.s.train.dtype]
        batch = Batch.packed(torch.from_numpy(inputs.copy()), lengths)
        state = DenseState(chunk_size=self.s.train.retention_chunk_size)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            hidden = self.model(batch, state)
        head = getattr(self.model, "lm_head", None) or getattr(self.model, "embed_tokens")  # noqa: B009
        return cross_entropy_sum(hidden.to(dtype), head.weight, torch.from_numpy(targets.copy()))

    def _save(self) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "sampler": self.sampler.state_dict(),
        }
        save_checkpoint(self.folder, self.step, state, self.s.train.keep)

    def _resume(self) -> None:
        state = load_latest(self.folder)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.sampler.load_state_dict(state["sampler"])
        self.step = state["step"]
        self._say(f"resumed at step {self.step}")

    def _headline(self) -> str:
        o = self.s.train
        parameters = sum(p.numel() for p in self.model.parameters())
        per_step = o.batch_size * o.accumulate * self.s.data.sequence_length
        return (
            f"{self.config.model_type}, {parameters / 1e6:.2f}M parameters, "
            f"{o.steps} steps of {per_step} tokens, {o.dtype}, {o.optimizer}"
        )

    def _log(
        self, loss: float, lr: float, norm: float, rate: float, elapsed: float, first: int
    ) -> None:
        steps = self.s.train.steps
        left = elapsed / max(1, self.step - first) * (steps - self.step)
        self._say(
            f"step {self.step:>6}/{steps} | loss {loss:.4f} | lr {lr:.2e} | grad {norm:.2f} | "
            f"{rate:,.0f} tok/s | {_clock(elapsed)}<{_clock(left)}"
        )
        for name, value in {
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens_per_s": rate,
        }.items():
            self._scalar(f"train/{name}", value)

    def _scalar(self, tag: str, value: float) -> None:
        if self.writer is not None:
            self.writer.add_scalar(tag, value, self.step)

    def _tensorboard(self) -> ScalarWriter | None:
        if not self.s.train.tensorboard:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingDependencyError(
                "train.tensorboard is true, but TensorBoard is not installed; "
                "run: pip install tensorboard"
            ) from None
        return SummaryWriter(str(self.folder / "tensorboard"))

    def _say(self, text: str) -> None:
        print(text, file=self.out, flush=True)


def _clock(seconds: float) -> str:
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}"


def main(config_path: str, overrides: list[str] | None = None) -> dict[str, float]:
    """Train from a YAML file; see ``train/settings.py`` for its keys."""
    return Trainer(load_settings(config_path, overrides)).run()
