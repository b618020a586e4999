"""The training loop: packed next-token training of any family, resumable bit for bit.

One process on one device. Nothing here is global: model, data and device belong to a ``Trainer``,
and a batch follows from a seed and counters alone, so torchrun would need four changes and no
others: the process group, with the local rank's device, in ``prepare.prepare_device``; every rank
taking its share of the windows that ``Sampler.batch`` counts through; gradients (and the loss that
is printed) averaged over ranks before the clipping in ``train_step``; checkpoints, exports and
lines written by rank 0 only.

A resumed run repeats an uninterrupted one bit for bit on the same machine, with the same number of
threads, where PyTorch's operators are deterministic: on CPUs they are, on GPUs some gradients
are not.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor, nn

from yocolm.errors import ConfigError, NumericsError
from yocolm.fields import write_json
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.models.registry import load_generation_config
from yocolm.models.weights import save_weights
from yocolm.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from yocolm.train.checkpoint import load_latest, save_checkpoint
from yocolm.train.data import build_sampler, count_bytes, expand, tokenize
from yocolm.train.fingerprint import check_fingerprint, fingerprint
from yocolm.train.interrupt import StopRequest
from yocolm.train.loss import cross_entropy_sum
from yocolm.train.optim import build_optimizers, learning_rate_factor, set_learning_rate
from yocolm.train.prepare import (
    inherited_files,
    prepare_device,
    prepare_model,
    prepare_tokenizer,
)
from yocolm.train.progress import Progress
from yocolm.train.settings import TrainSettings, load_settings

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class StepFigures(NamedTuple):
    """Mean loss in nats a token, gradient norm before clipping, and learning rate of one step."""

    loss: float
    norm: float
    lr: float


class Trainer:
    """One run: model, optimisers, data and their progress.

    Takes up the newest checkpoint in ``settings.output_dir``. Raises ConfigError if it is of a
    training with other settings, or past the last step. Prints to ``out``, which is standard
    error by default.
    """

    def __init__(self, settings: TrainSettings, out: TextIO | None = None) -> None:
        self.s = settings
        self.progress = Progress(settings, sys.stderr if out is None else out)
        self.folder = Path(settings.output_dir)
        self.device = prepare_device(settings)
        self.tokenizer = prepare_tokenizer(settings)
        self.model, self.config = prepare_model(settings, self.tokenizer)
        self.inherited = inherited_files(settings)
        self.generation = load_generation_config(str(settings.model)) if settings.continues else {}
        self.model.to(self.device)
        self.model.gradient_checkpointing = settings.train.gradient_checkpointing  # type: ignore[assignment]
        self.optimizers = build_optimizers(self.model, settings.train)
        self.sampler = build_sampler(settings, self.tokenizer, self.folder / "cache")
        self._load_validation()
        self.step = 0
        self._resume()

    def run(self) -> dict[str, float]:
        """Train to the last step and export the model. Returns the last validation's figures.

        Ctrl-C ends it after the step in progress: a checkpoint is written, and KeyboardInterrupt
        raised.
        """
        self.progress.say(self._headline())
        self.progress.start(self.step)
        try:
            with StopRequest(self.progress.say) as stop:
                while self.step < self.s.train.last_step and not stop.requested:
                    self._advance(stop)
            if stop.requested:
                self.progress.say(f"stopped at step {self.step}; run the same again to go on")
                raise KeyboardInterrupt
            figures = self.validate(len(self.validation))
            self.export(self.folder / "final", figures)
        finally:
            self.progress.close()
        return figures

    def _advance(self, stop: StopRequest) -> None:
        """One step, and what is due after it."""
        o = self.s.train
        began = time.monotonic()
        figures = self.train_step()
        self.progress.add(figures.loss, time.monotonic() - began)
        last = self.step == o.last_step
        if self.step % o.log_every == 0 or last:
            self.progress.line(self.step, figures.lr, figures.norm)
        if self.step % o.validate_every == 0 and not last and not stop.requested:
            self.validate(o.validation_tokens)
        if self.step % o.save_every == 0 or last or stop.requested:
            self.save()

    def train_step(self) -> StepFigures:
        """One optimiser step, on ``accumulate`` micro-batches.

        Raises NumericsError, leaving the parameters as they are, if the gradient is not finite.
        """
        o = self.s.train
        lr = set_learning_rate(self.optimizers, learning_rate_factor(self.step, o))
        total = 0.0
        count = o.batch_size * o.accumulate * self.s.data.sequence_length
        for _ in range(o.accumulate):
            inputs, targets = self.sampler.batch(o.batch_size)
            lengths = [inputs.shape[1]] * len(inputs)
            loss = self.loss_sum(inputs.reshape(-1), targets.reshape(-1), lengths)
            (loss / count).backward()
            total += float(loss.detach())
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), o.grad_clip))
        if not math.isfinite(norm):
            raise NumericsError(
                f"the gradient norm is {norm} at step {self.step + 1}; lower train.learning_rate "
                f"(or raise train.warmup_steps) and start anew in another output_dir"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return StepFigures(total / count, norm, lr)

    @torch.no_grad()
    def validate(self, max_tokens: int) -> dict[str, float]:
        """Loss on the validation text, in windows of ``sequence_length`` that each start cold.

        They begin with BOS if windows of the training do. Bits per byte take the whole text's ratio
        of tokens to bytes. Raises NumericsError if the loss is not finite.
        """
        length = self.s.data.sequence_length
        stop = min(len(self.validation) - 1, max_tokens)
        total = 0.0
        for start in range(0, stop, length * self.s.train.batch_size):
            end = min(start + length * self.s.train.batch_size, stop)
            ids = np.array(self.validation[start : end + 1], dtype=np.int64)
            whole, rest = divmod(end - start, length)
            lengths = [length] * whole + ([rest] if rest else [])
            inputs, targets = ids[:-1].copy(), ids[1:]
            if self.sampler.bos is not None:
                inputs[::length] = self.sampler.bos
            total += float(self.loss_sum(inputs, targets, lengths))
        nll = total / stop
        if not math.isfinite(nll):
            raise NumericsError(
                f"the validation loss is {nll} at step {self.step}; lower train.learning_rate "
                "and start anew in another output_dir"
            )
        tokens_per_byte = (len(self.validation) - 1) / self.validation_bytes
        figures = {"nll_per_token": nll, "bits_per_byte": nll / math.log(2) * tokens_per_byte}
        self.progress.validation(figures, stop, self.step)
        return figures

    def loss_sum(self, inputs: np.ndarray, targets: np.ndarray, lengths: list[int]) -> Tensor:
        """Summed cross-entropy of packed windows: ids [T] int64 each, ``lengths`` sum to T."""
        dtype = _DTYPES[self.s.train.dtype]
        tokens, following = (torch.tensor(ids, device=self.device) for ids in (inputs, targets))
        batch = Batch.packed(tokens, lengths)
        state = DenseState(chunk_size=self.s.train.retention_chunk_size)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
            hidden = self.model(batch, state)
        head = getattr(self.model, "lm_head", None) or getattr(self.model, "embed_tokens")  # noqa: B009
        softcap = self.config.final_softcap
        return cross_entropy_sum(hidden.to(dtype), head.weight, following, softcap)

    def export(self, folder: Path, figures: dict[str, float]) -> None:
        """Write a Hugging Face folder: weights, config, tokenizer, the settings that made them.

        Of a model that was continued, its sampling defaults, special tokens and chat templates too.
        """
        model = copy.deepcopy(self.model).to(_DTYPES[self.s.export_dtype])
        save_weights(model, folder, generation_config=self.generation)
        self.tokenizer.save(str(folder / TOKENIZER_FILE))
        record = {"settings": asdict(self.s), "steps": self.step, "validation": figures}
        write_json(folder / "training.json", record)
        for name, content in self.inherited.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        if TOKENIZER_CONFIG_FILE not in self.inherited:
            write_json(folder / TOKENIZER_CONFIG_FILE, self._tokenizer_config())
        self.progress.say(f"wrote {folder}")

    def _tokenizer_config(self) -> dict[str, object]:
        ids = {"bos_token": self.config.bos_token_id, "eos_token": self.config.eos_token_id}
        tokens = {
            name: self.tokenizer.id_to_token(value[0] if isinstance(value, tuple) else value)
            for name, value in ids.items()
            if value is not None
        }
        return {**tokens, "add_bos_token": self.sampler.bos is not None}

    def save(self) -> None:
        """Write a checkpoint of this step."""
        state = {
            "step": self.step,
            "fingerprint": self._fingerprint(),
            "device": self.device.type,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "sampler": self.sampler.state_dict(),
        }
        save_checkpoint(self.folder, self.step, state, self.s.train.keep)

    def _resume(self) -> None:
        state = load_latest(self.folder)
        if state is None:
            return
        check_fingerprint(state["fingerprint"], self._fingerprint(), self.folder)
        if state["step"] > self.s.train.last_step:
            raise ConfigError(
                f"train.steps is {self.s.train.steps}, but {self.folder} holds a checkpoint of "
                f"step {state['step']}: set train.steps to {state['step']} or more, or give "
                "another output_dir"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.sampler.load_state_dict(state["sampler"])
        self.step = state["step"]
        self.progress.say(f"resumed at step {self.step}")
        if state["device"] != self.device.type:
            self.progress.say(
                f"so far on {state['device']}, from here on {self.device.type}: not bit for bit"
            )

    def _fingerprint(self) -> dict[str, object]:
        return fingerprint(self.s, self.config, self.tokenizer, self.sampler)

    def _load_validation(self) -> None:
        data = self.s.data
        files = expand(data.validation, "data.validation")
        cache, separator = self.folder / "cache", self.s.tokenizer.separator
        self.validation = tokenize(files, self.tokenizer, data.text_field, cache, separator)
        self.validation_bytes = count_bytes(files, data.text_field)
        if self.validation_bytes == 0:
            raise ConfigError(f"data.validation is empty: {', '.join(map(str, files))}")

    def _headline(self) -> str:
        o = self.s.train
        parameters = sum(p.numel() for p in self.model.parameters())
        return (
            f"{self.config.model_type}, {parameters / 1e6:.2f}M parameters, {o.steps} steps of "
            f"{self.progress.tokens_per_step} tokens, {o.dtype}, {o.optimizer}, {self.device.type}"
        )


def main(config_path: str, overrides: list[str] | None = None) -> dict[str, float]:
    """Train from a YAML file; see ``train/settings.py`` for its keys."""
    return Trainer(load_settings(config_path, overrides)).run()
