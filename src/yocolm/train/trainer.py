"""The training loop: packed next-token training of any family, resumable bit for bit.

A process alone, or several that torchrun starts (``train/distributed.py``): each then takes its
share of the windows of a step, and loss, gradient norm and validation are those of all. A batch
follows from a seed and counters alone, whatever the number of ranks is.

A resumed run repeats an uninterrupted one bit for bit on the same machine, with the same number of
ranks and threads, where PyTorch's operators are deterministic: on CPUs they are, on GPUs some
gradients are not. With another number of ranks it goes on with the same windows, and rounds sums
differently.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor, nn

from yocolm.errors import ConfigError, NumericsError, writing
from yocolm.fields import write_json
from yocolm.models.registry import build_model, load_generation_config
from yocolm.models.weights import TRAINING_FILE, save_weights
from yocolm.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from yocolm.train.checkpoint import (
    drop_partial,
    latest,
    load_tensors,
    read_values,
    save_checkpoint,
    training_tensors,
)
from yocolm.train.data import build_data, cache_folder
from yocolm.train.data_cache import writing_cache
from yocolm.train.data_lock import has_locks
from yocolm.train.distill import training_loss
from yocolm.train.distributed import (
    Ranks,
    accumulating,
    current_ranks,
    distribute,
    micro_batches,
    release,
    strategy_of,
    whole,
)
from yocolm.train.fingerprint import check_fingerprint, fingerprint
from yocolm.train.interrupt import StopRequest
from yocolm.train.objective import Objective
from yocolm.train.optim import build_optimizers, learning_rate_factor, set_learning_rate
from yocolm.train.prepare import (
    inherited_files,
    prepare_device,
    prepare_folders,
    prepare_model,
    prepare_tokenizer,
)
from yocolm.train.progress import Progress
from yocolm.train.settings import TrainSettings

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
    error by default. Of several ranks (``ranks``: those of the process group) each makes one, and
    all call the same methods in the same order; the first prints.
    """

    def __init__(
        self, settings: TrainSettings, out: TextIO | None = None, ranks: Ranks | None = None
    ) -> None:
        self.s = settings
        self.ranks = current_ranks() if ranks is None else ranks
        with self.ranks.together():
            self.sizes = micro_batches(settings, self.ranks)
            self.strategy = strategy_of(settings, self.ranks)
            self.device = prepare_device(settings, self.ranks)
            prepare_folders(settings)
            out = (out or sys.stderr) if self.ranks.main else None
            self.progress = Progress(settings, out)
        self.folder = Path(settings.output_dir)
        self._load_data()
        with self.ranks.together():
            self.model, self.config = prepare_model(settings, self.tokenizer)
            self.inherited = inherited_files(settings)
            self.generation = (
                load_generation_config(str(settings.model)) if settings.continues else {}
            )
            loss = training_loss(settings, self.model, self.config, self.tokenizer, self.device)
        self.model.gradient_checkpointing = settings.train.gradient_checkpointing  # type: ignore[assignment]
        dtype, chunk_size = _DTYPES[settings.train.dtype], settings.train.retention_chunk_size
        self.objective = Objective(self.model, dtype, chunk_size, loss)
        self.shared = distribute(self.objective, settings, self.ranks, self.device)
        self.optimizers = build_optimizers(self.model, settings.train)
        self.progress.measure(self.config, self.device, self.ranks.size)
        self.step = 0
        self._stop = StopRequest(self.progress.say)
        self._stopping = False  # a rank was asked to, and all know
        self._said_nothing = False  # of windows of prompts alone
        self._resume()

    def run(self) -> dict[str, float]:
        """Train to the last step and export the model. Returns the last validation's figures.

        Ctrl-C ends it after the step in progress: a checkpoint is written, and KeyboardInterrupt
        raised.
        """
        self.progress.say(self._headline())
        with self.ranks.together():
            self.progress.start(self.step)
        self._stop, self._stopping = StopRequest(self.progress.say), False
        try:
            with self._stop:
                while self.step < self.s.train.last_step and not self._stopping:
                    self._advance()
                [asked] = self.ranks.sum([float(self._stop.requested)])
                self._stopping |= asked > 0
            if self._stopping:
                self.progress.say(f"stopped at step {self.step}; run the same again to go on")
                raise KeyboardInterrupt
            figures = self.validate(self.validation.num_targets)
            self.export(self.folder / "final", figures)
        finally:
            self.progress.close()
        return figures

    def _advance(self) -> None:
        """One step, and what is due after it."""
        o = self.s.train
        began = time.monotonic()
        figures = self.train_step()
        self.progress.add(figures.loss, time.monotonic() - began)
        last = self.step == o.last_step
        if self.step % o.log_every == 0 or last:
            self.progress.line(self.step, figures.lr, figures.norm)
        if self.step % o.validate_every == 0 and not last and not self._stopping:
            self.validate(o.validation_tokens)
        if self.step % o.save_every == 0 or last or self._stopping:
            self.save()

    def train_step(self) -> StepFigures:
        """One optimiser step, on ``batch_size * accumulate`` windows over all ranks.

        Raises NumericsError, leaving the parameters as they are, if the gradient is not finite. If
        a rank was asked to stop, all agree on that here.
        """
        o, ranks = self.s.train, self.ranks
        lr = set_learning_rate(self.optimizers, learning_rate_factor(self.step, o))
        drawn = [self.sampler.batch(n * ranks.size, ranks.rank, ranks.size) for n in self.sizes]
        [found] = ranks.sum([sum(int((part.targets >= 0).sum()) for part in drawn)])
        if not found:
            self._say_nothing_is_learnt()
        count = max(1.0, found)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, part in enumerate(drawn):
            with accumulating(self.shared, last=i == len(drawn) - 1):
                loss = self.loss_sum(*part)
                (loss / (count / ranks.size)).backward()  # gradients are averaged over ranks
            total += loss.detach()
        norm = float(whole(nn.utils.clip_grad_norm_(self.model.parameters(), o.grad_clip)))
        if not math.isfinite(norm):
            raise NumericsError(
                f"the gradient norm is {norm} at step {self.step + 1}; lower train.learning_rate "
                f"(or raise train.warmup_steps) and start anew in another output_dir"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        total_loss, asked = ranks.sum([float(total), float(self._stop.requested)])
        self._stopping = asked > 0
        return StepFigures(total_loss / count, norm, lr)

    def _say_nothing_is_learnt(self) -> None:
        if not self._said_nothing:
            self.progress.say(
                f"the windows of step {self.step + 1} hold prompts alone: nothing is learnt in "
                f"such steps (said once); data.sequence_length {self.s.data.sequence_length} may "
                "be shorter than the prompts"
            )
        self._said_nothing = True

    @torch.no_grad()
    def validate(self, max_tokens: int) -> dict[str, float]:
        """Loss on the validation text, in windows of ``sequence_length`` that each start cold.

        They begin with BOS if windows of the training do. Bits per byte take the ratio of tokens to
        bytes of all that is predicted in the text. Empty if the tokens are of prompts alone. Raises
        NumericsError if the loss is not finite.
        """
        ranks, text = self.ranks, self.validation
        total, predicted = torch.zeros((), dtype=torch.float64, device=self.device), 0
        size = self.s.train.batch_size
        batches = text.batches(max_tokens, size)
        for first in range(0, batches, ranks.size):
            mine = first + ranks.rank
            # Ranks share each forward pass: one that has nothing left repeats something.
            windows = text.batch(max_tokens, size, min(mine, batches - 1))
            loss = self.loss_sum(windows.inputs, windows.targets, windows.lengths, True)
            if mine < batches:
                total += loss
                predicted += int((windows.targets >= 0).sum())
        release(self.shared)
        total_loss, count = ranks.sum([float(total), float(predicted)])
        if not count:
            self.progress.say(
                f"not validated: {text.count(max_tokens)} tokens to validate on are prompts alone; "
                "raise train.validation_tokens"
            )
            return {}
        nll = total_loss / count
        if not math.isfinite(nll):
            raise NumericsError(
                f"the validation loss is {nll} at step {self.step}; lower train.learning_rate "
                "and start anew in another output_dir"
            )
        figures = {"nll_per_token": nll, "bits_per_byte": nll / math.log(2) * text.tokens_per_byte}
        self.progress.validation(figures, int(count), self.step)
        return figures

    def loss_sum(
        self,
        inputs: np.ndarray,
        targets: np.ndarray,
        lengths: list[int],
        validating: bool = False,
    ) -> Tensor:
        """Summed loss of packed windows: ids [T] int64 each, ``lengths`` sum to T.

        That of training, or if ``validating`` the cross-entropy.
        """
        tokens, following = (torch.tensor(ids, device=self.device) for ids in (inputs, targets))
        return self.shared(tokens, following, lengths, validating)

    def export(self, folder: Path, figures: dict[str, float]) -> None:
        """Write a Hugging Face folder: weights, config, tokenizer, the settings that made them.

        Of a model that was continued, its sampling defaults, special tokens and chat templates too.
        The first rank writes, and the others wait for it.
        """
        model = self._whole_model()
        remedy = "make room there and run the same again: no step of the training is lost"
        with self.ranks.together():
            if model is not None:
                with writing(f"the model to {folder}", remedy):
                    self._write(model, folder, figures)
                self.progress.say(f"wrote {folder}")

    def _write(self, model: nn.Module, folder: Path, figures: dict[str, float]) -> None:
        save_weights(model, folder, generation_config=self.generation)
        self.tokenizer.save(str(folder / TOKENIZER_FILE))
        record = {"settings": asdict(self.s), "steps": self.step, "validation": figures}
        write_json(folder / TRAINING_FILE, record)
        for name, content in self.inherited.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        if TOKENIZER_CONFIG_FILE not in self.inherited:
            write_json(folder / TOKENIZER_CONFIG_FILE, self._tokenizer_config())

    def _whole_model(self) -> nn.Module | None:
        """A copy of the model on the CPU, as it is exported; on the first rank alone."""
        copy = None
        if self.ranks.main:
            dtype = _DTYPES[self.s.export_dtype]
            copy = build_model(self.config, device="cpu", dtype=dtype)
        targets = {} if copy is None else dict(copy.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                value = whole(parameter)
                if copy is not None:
                    targets[name].copy_(value)
        return copy

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
        values = {
            "step": self.step,
            "fingerprint": self._fingerprint(),
            "device": self.device.type,
            "ranks": self._ranks_used(),
            "sampler": self.sampler.state_dict(),
        }
        tensors = training_tensors(self.model, self.optimizers)
        save_checkpoint(self.folder, tensors, values, self.s.train.keep, self.ranks)

    def _resume(self) -> None:
        with self.ranks.together():
            if self.ranks.main:
                drop_partial(self.folder)
        path = self.ranks.from_main(latest(self.folder) if self.ranks.main else None)
        if path is None:
            return
        with self.ranks.together():
            state = read_values(path)
            check_fingerprint(state["fingerprint"], self._fingerprint(), self.folder)
            if state["step"] > self.s.train.last_step:
                raise ConfigError(
                    f"train.steps is {self.s.train.steps}, but {self.folder} holds a checkpoint of "
                    f"step {state['step']}: set train.steps to {state['step']} or more, or give "
                    "another output_dir"
                )
        load_tensors(path, training_tensors(self.model, self.optimizers), self.ranks)
        self.sampler.load_state_dict(state["sampler"])
        self.step = state["step"]
        self.progress.say(f"resumed at step {self.step}")
        now = (self.device.type, self._ranks_used())
        for was, isnow in zip((state["device"], state["ranks"]), now, strict=True):
            if was != isnow:
                self.progress.say(f"so far on {was}, from here on {isnow}: not bit for bit")

    def _ranks_used(self) -> str:
        if self.strategy == "single":
            return "1 rank"
        size = self.s.parallel.shard_size
        return f"{self.ranks.size} ranks ({self.strategy}{f', {size} a copy' if size else ''})"

    def _fingerprint(self) -> dict[str, Any]:
        """As a checkpoint keeps it: plain values of JSON."""
        found = fingerprint(self.s, self.config, self.tokenizer, self.sampler)
        return json.loads(json.dumps(found))

    def _load_data(self) -> None:
        """The tokenizer, which the first rank makes, and the texts, which all make.

        Ranks share the files out among themselves by locks, which a rank that fails or dies lets
        go of; where the file system has none, the first rank tokenises alone.
        """
        self.tokenizer = self.ranks.main_first(lambda: prepare_tokenizer(self.s))
        cache, found = cache_folder(self.s), []
        with self.ranks.together(), writing_cache(cache):
            locks = has_locks(cache)
        [with_locks] = self.ranks.sum([float(locks)])
        if with_locks == self.ranks.size:
            with self.ranks.together():
                found.append(build_data(self.s, self.tokenizer, cache))
        else:
            found.append(self.ranks.main_first(lambda: build_data(self.s, self.tokenizer, cache)))
        [(self.sampler, self.validation)] = found

    def _headline(self) -> str:
        o = self.s.train
        parameters = sum(p.numel() for p in self.model.parameters())
        return (
            f"{self.config.model_type}, {parameters / 1e6:.2f}M parameters, {o.steps} steps of "
            f"{self.progress.tokens_per_step} tokens, {o.dtype}, {o.optimizer}, {self.device.type}"
            + (f", {self._ranks_used()}" if self.ranks.size > 1 else "")
        )
