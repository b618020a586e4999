"""A training that was cut off, anywhere, goes on as if it had not been."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from training import same, settings, state_of, trainer, values, write_config
from yocolm.cli import main
from yocolm.errors import CheckpointError, ConfigError, NumericsError
from yocolm.train import interrupt
from yocolm.train.checkpoint import (
    latest,
    read_values,
    training_tensors,
)
from yocolm.train.settings import parse_settings
from yocolm.train.trainer import Trainer

SOURCES = Path(__file__).parents[2] / "src"


class Killed(Exception):
    """Stands for the end of a process."""


def losses_of(one: Trainer, count: int) -> list[float]:
    return [one.train_step().loss for _ in range(count)]


def kill_after(one: Trainer, steps: int) -> None:
    """Run until ``steps`` steps are done, as a process that then dies without a word."""
    train_step = one.train_step

    def step() -> Any:
        if one.step == steps:
            raise Killed
        return train_step()

    one.train_step = step
    with pytest.raises(Killed):
        one.run()


@pytest.mark.parametrize(
    ("family", "optimizer", "dtype"),
    [
        ("yoco", "adamw", "float32"),
        ("yoco", "muon", "bfloat16"),
        ("yoco", "adamw", "bfloat16"),
        ("yoco-swa", "muon", "float32"),
        ("llama", "muon", "bfloat16"),
    ],
)
def test_a_resumed_run_repeats_an_uninterrupted_one(
    tmp_path: Path, family: str, optimizer: str, dtype: str
) -> None:
    options = {"optimizer": optimizer, "dtype": dtype, "accumulate": 2, "save_every": 3}
    whole = trainer(tmp_path, family, **options)
    expected = losses_of(whole, 6)
    kill_after(trainer(tmp_path, family, **options), 4)  # one step beyond the checkpoint
    resumed = trainer(tmp_path, family, **options)
    assert resumed.step == 3 and "resumed at step 3" in resumed.progress.out.getvalue()  # type: ignore[attr-defined]
    assert losses_of(resumed, 3) == expected[3:]
    assert same(state_of(resumed), state_of(whole))
    assert resumed.sampler.state_dict() == whole.sampler.state_dict()


def test_a_new_process_goes_on(tmp_path: Path) -> None:
    """Through the command line, to the exported weights."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    assert main(["train", str(write_config(tmp_path / "whole"))]) == 0
    config = write_config(tmp_path / "cut")
    kill_after(trainer(tmp_path / "cut", save_every=4), 5)
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCES),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    command = [sys.executable, "-m", "yocolm.cli", "train", str(config)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "resumed at step 4" in result.stderr
    weights = [tmp_path / name / "run/final/model.safetensors" for name in ("whole", "cut")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_finished_run_only_validates_and_exports_again(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    figures = first.run()
    again = trainer(tmp_path)
    assert again.step == 6 and again.run() == figures
    assert same(state_of(again), state_of(first))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_the_run_goes_on(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer(tmp_path)
    losses_of(whole, 6)
    cut = trainer(tmp_path, validate_every=3)
    loss_sum = cut.loss_sum

    def interrupted(*given: Any) -> torch.Tensor:
        if cut.step == 2:
            signal.raise_signal(number)
        return loss_sum(*given)

    monkeypatch.setattr(cut, "loss_sum", interrupted)
    usual = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    assert signal.getsignal(number) is usual
    out = cut.progress.out.getvalue()  # type: ignore[attr-defined]
    assert "stopping: finishing this step and saving" in out
    assert out.endswith("stopped at step 3; run the same again to go on\n")
    assert "validation" not in out and not (tmp_path / "run/final").exists()
    resumed = trainer(tmp_path)
    assert resumed.step == 3
    resumed.run()
    assert same(state_of(resumed), state_of(whole))


@pytest.mark.parametrize(
    ("second", "seconds", "steps"),
    [(signal.SIGINT, 2.0, 0), (signal.SIGINT, 0.01, 1), (signal.SIGTERM, 0.01, 1)]
    + [(signal.SIGTERM, 2.0, 1)],
)
def test_a_second_signal(
    tmp_path: Path,
    second: signal.Signals,
    seconds: float,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C again stops at once, but not the copies of a signal that a launcher passes on."""
    cut = trainer(tmp_path)
    loss_sum, now = cut.loss_sum, [0.0]

    def interrupted(*given: Any) -> torch.Tensor:
        monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
        signal.raise_signal(signal.SIGINT)
        now[0] = seconds
        signal.raise_signal(second)
        return loss_sum(*given)

    cut.loss_sum = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    assert cut.step == steps and (latest(tmp_path / "run") is not None) == bool(steps)


def test_ctrl_c_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_step = Trainer.train_step

    def step(self: Trainer) -> Any:
        signal.raise_signal(signal.SIGINT)
        return train_step(self)

    monkeypatch.setattr(Trainer, "train_step", step)
    assert main(["train", str(write_config(tmp_path))]) == 130
    assert "run the same again to go on" in capsys.readouterr().err
    assert step_of(tmp_path / "run") == 1


def step_of(folder: Path) -> int:
    """The step of the newest checkpoint."""
    path = latest(folder)
    assert path is not None
    return read_values(path)["step"]


def test_a_state_to_load_into_is_that_of_a_beginning(tmp_path: Path) -> None:
    """Asking for an optimiser's tensors before its first step changes nothing."""
    asked, not_asked = (trainer(tmp_path, optimizer="muon", accumulate=2) for _ in range(2))
    before = state_of(asked)
    tensors = training_tensors(asked.model, asked.optimizers)
    assert same(state_of(asked)[: len(before)], before)
    assert len(tensors) > 2 * len(before)
    states = [value for name, value in tensors.items() if name.startswith("optimizer.")]
    assert states and not any(value.any() for value in states)
    assert [one.train_step() for one in (asked,)] == [one.train_step() for one in (not_asked,)]
    assert same(state_of(asked), state_of(not_asked))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    trainer(folder, steps=2).run()
    return folder


def test_what_a_resumed_run_may_change(trained: Path) -> None:
    resumed = trainer(
        trained,
        steps=4,
        log_every=1,
        validate_every=1,
        validation_tokens=100,
        save_every=1000,
        keep=1,
        gradient_checkpointing=True,
    )
    assert resumed.step == 2


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", 2, "seed was 1, is 2"),
        ("train.batch_size", 4, "train.batch_size was 2, is 4"),
        ("train.accumulate", 2, "train.accumulate was 1, is 2"),
        ("train.learning_rate", 1e-3, "train.learning_rate was 0.003, is 0.001"),
        ("train.optimizer", "muon", "train.optimizer was 'adamw', is 'muon'"),
        ("train.dtype", "bfloat16", "train.dtype was 'float32', is 'bfloat16'"),
        ("train.warmup_steps", 1, "train.warmup_steps was 2, is 1"),
        ("train.retention_chunk_size", 8, "train.retention_chunk_size was 16, is 8"),
        ("data.sequence_length", 32, "data.sequence_length was 24, is 32"),
        ("data.sources.sea.weight", 2, "data.sources.sea.weight was 3.0, is 2.0"),
        ("data.sources.sea.files", ["{b}"], "data.sources.sea.files was 'text "),
        ("model.hidden_size", 64, "model.hidden_size was 32, is 64"),
        ("model.self_decoder_attn.num_heads", 1, "model.self_decoder_attn.num_heads was 2, is 1"),
        ("tokenizer.path", "{other}", "tokenizer was '"),
    ],
)
def test_what_it_may_not_change(trained: Path, path: str, value: Any, message: str) -> None:
    changed = values(trained, steps=2)
    *parents, last = path.split(".")
    target = changed
    for parent in parents:
        target = target[parent]
    places = {"{b}": str(trained / "b.txt"), "{other}": str(trained / "other.json")}
    if isinstance(value, list):
        value = [places[item] for item in value]
    target[last] = places.get(value, value) if isinstance(value, str) else value
    if path == "tokenizer.path":
        changed["tokenizer"]["vocab_size"] = 290
    with pytest.raises(ConfigError) as error:
        Trainer(parse_settings(changed))
    text = str(error.value)
    assert message in text
    assert text.startswith(f"the checkpoints in {trained / 'run'} are of a training with other")
    assert text.endswith("Set them back to go on with it, or give another output_dir")


def test_sources_may_not_come_or_go_or_change_places(trained: Path) -> None:
    base = values(trained, steps=2)
    swapped, fewer = (dict(base["data"]["sources"]) for _ in range(2))
    swapped["sea"] = swapped.pop("sea")
    del fewer["shore"]
    for sources, names in ((swapped, "'shore, sea'"), (fewer, "'sea'")):
        changed = {**base, "data": {**base["data"], "sources": sources}}
        with pytest.raises(ConfigError, match=f"data.sources was 'sea, shore', is {names}"):
            Trainer(parse_settings(changed))


def test_texts_may_move_but_not_change(tmp_path: Path) -> None:
    trainer(tmp_path, steps=2).run()
    moved = settings(tmp_path, steps=2)
    (tmp_path / "a.txt").rename(tmp_path / "moved.txt")
    moved.data.sources["sea"].files[:] = [str(tmp_path / "moved.txt")]
    assert Trainer(moved).step == 2
    with open(tmp_path / "moved.txt", "a") as file:
        file.write("One more line.\n")
    with pytest.raises(ConfigError, match="data.sources.sea.files was 'text"):
        Trainer(moved)


def test_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    one = trainer(tmp_path, save_every=1)
    one.train_step()
    before = state_of(one)
    with torch.no_grad():
        one.model.embed_tokens.weight.register_hook(lambda grad: grad * float("nan"))  # type: ignore[union-attr]
    with pytest.raises(NumericsError, match="the gradient norm is nan at step 2; lower train.lear"):
        one.run()
    assert same(state_of(one), before) and latest(tmp_path / "run") is None


def test_a_checkpoint_past_the_last_step_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, steps=4)
    assert main(["train", str(config)]) == 0
    exported = (tmp_path / "run/final/training.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main(["train", str(config), "train.steps=3"]) == 1
    error = capsys.readouterr().err
    assert "train.steps is 3, but" in error and "checkpoint of step 4" in error
    assert "set train.steps to 4 or more, or give another output_dir" in error
    assert (tmp_path / "run/final/training.json").stat().st_mtime_ns == exported


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        trainer(tmp_path)


def test_a_validation_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    broken = trainer(tmp_path)
    with torch.no_grad():
        next(broken.model.parameters()).fill_(float("nan"))
    with pytest.raises(NumericsError, match="validation loss is nan at step 0"):
        broken.validate(64)
