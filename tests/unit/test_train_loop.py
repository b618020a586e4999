"""Training end to end on tiny models: gradients, validation, progress, export, starting points."""

import io
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training import MODELS, PARAGRAPH, settings, trainer, values, write_config, write_texts
from yocolm import LLM, SamplingParams
from yocolm.cli import main
from yocolm.errors import ConfigError, MissingDependencyError
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.models.registry import load_config, load_model, load_tokenizer
from yocolm.train.data import Shape
from yocolm.train.settings import parse_settings
from yocolm.train.tokenizer import train_tokenizer
from yocolm.train.trainer import Trainer


def said(one: Trainer) -> str:
    out = one.progress.out
    assert isinstance(out, io.StringIO)
    return out.getvalue()


@torch.no_grad()
def logits_of(model: torch.nn.Module, ids: list[int]) -> Tensor:
    hidden = model(Batch.packed(torch.tensor(ids), [len(ids)]), DenseState(chunk_size=16))
    return model.logits(hidden)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MODELS)
def test_gradient_checkpointing_changes_nothing(tmp_path: Path, family: str, dtype: str) -> None:
    one = trainer(tmp_path, family, dtype=dtype)
    for parameter in one.model.parameters():
        if not parameter.any():  # biases, and scales that start at 0: nothing behind them learns
            torch.nn.init.constant_(parameter, 0.1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(one.config.vocab_size, (51,), generator=generator).numpy()

    def gradients(checkpointing: bool) -> dict[str, Tensor | None]:
        one.model.gradient_checkpointing = checkpointing  # type: ignore[assignment]
        one.model.zero_grad()
        one.loss_sum(ids[:-1], ids[1:], [20, 1, 29]).backward()
        return {name: p.grad for name, p in one.model.named_parameters() if p.requires_grad}

    plain, recomputed = gradients(False), gradients(True)
    for name, grad in plain.items():
        other = recomputed[name]
        assert grad is not None and other is not None and torch.equal(grad, other), name
        assert grad.abs().sum() > 0, name


def test_gradient_checkpointing_is_a_setting(tmp_path: Path) -> None:
    for value in (True, False):
        assert trainer(tmp_path, gradient_checkpointing=value).model.gradient_checkpointing is value


@pytest.mark.parametrize("family", ["yoco", "llama"])
def test_sequences_of_a_batch_do_not_see_each_other(tmp_path: Path, family: str) -> None:
    one = trainer(tmp_path, family)
    inputs, targets, lengths = one.sampler.batch(3)
    pairs = zip(inputs.reshape(3, -1), targets.reshape(3, -1), strict=True)
    with torch.no_grad():
        together = one.loss_sum(inputs, targets, lengths)
        apart = sum(float(one.loss_sum(i, t, [24])) for i, t in pairs)
    assert float(together) == pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize("family", ["yoco", "llama"])
def test_micro_batches_add_up_to_a_batch(tmp_path: Path, family: str) -> None:
    """Two of two sequences are one of four: the same windows, up to rounding."""
    one, two = (trainer(tmp_path, family, batch_size=4 // n, accumulate=n) for n in (1, 2))
    a, b = one.train_step(), two.train_step()
    assert a.loss == pytest.approx(b.loss, rel=1e-5)
    assert a.norm == pytest.approx(b.norm, rel=1e-4)


def test_steps_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """PyTorch's loss on whole logits, its clipping and AdamW, written out."""
    options = {"steps": 5, "accumulate": 2, "grad_clip": 0.5, "weight_decay": 0.2}
    one, other = (trainer(tmp_path, "llama", **options) for _ in range(2))
    decayed = [p for p in other.model.parameters() if p.ndim == 2]
    rest = [p for p in other.model.parameters() if p.ndim != 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    cosine = [0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * i / 3)) for i in range(3)]
    for factor in (0.5, 1.0, *cosine):
        figures = one.train_step()
        inputs, targets = (torch.from_numpy(ids) for ids in other.sampler.batch(4)[:2])
        state = DenseState(chunk_size=16)
        hidden = other.model(Batch.packed(inputs, [24] * 4), state)
        logits = other.model.logits(hidden)  # type: ignore[operator]
        loss = torch.nn.functional.cross_entropy(logits, targets)
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = 3e-3 * factor
        adamw.step()
        assert figures.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert figures.norm == pytest.approx(float(norm), rel=1e-3) and float(norm) > 0.5
        assert figures.lr == pytest.approx(3e-3 * factor)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_loss_falls(tmp_path: Path) -> None:
    one = trainer(tmp_path, steps=40, batch_size=4, warmup_steps=4, learning_rate=1e-2)
    losses = [one.train_step().loss for _ in range(40)]
    assert losses[0] == pytest.approx(math.log(one.config.vocab_size), rel=0.15)
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]


@pytest.mark.parametrize("family", ["yoco", "llama"])
@pytest.mark.parametrize("max_tokens", [10, 48, 131, 10**9])
def test_validation_loss(tmp_path: Path, family: str, max_tokens: int) -> None:
    one = trainer(tmp_path, family)
    one.train_step()
    figures = one.validate(max_tokens)
    text = (tmp_path / "held_out.txt").read_bytes()
    ids = [0, *one.tokenizer.encode(text.decode()).ids]
    stop, total = min(len(ids) - 1, max_tokens), 0.0
    for start in range(0, stop, 24):
        window = ids[start : min(start + 24, stop) + 1]
        logprobs = logits_of(one.model, window[:-1]).double().log_softmax(-1)
        total -= float(logprobs.gather(1, torch.tensor(window[1:])[:, None]).sum())
    assert figures["nll_per_token"] == pytest.approx(total / stop, rel=1e-5)
    bits = total / stop / math.log(2) * (len(ids) - 1) / len(text)
    assert figures["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert f"| {stop} tokens" in said(one)


def test_a_validation_holds_one_batch_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, events = trainer(tmp_path), []
    read, loss_sum = Shape.windows, one.loss_sum

    def reading(*given: Any) -> Any:
        events.append("read")
        return read(*given)

    def scoring(*given: Any) -> Any:
        events.append("score")
        return loss_sum(*given)

    monkeypatch.setattr(Shape, "windows", reading)
    monkeypatch.setattr(one, "loss_sum", scoring)
    one.validate(one.validation.num_targets)
    assert len(events) > 4 and events == ["read", "score"] * (len(events) // 2)


def test_validation_bytes_of_records_are_those_of_their_texts(tmp_path: Path) -> None:
    s = settings(tmp_path)
    record = json.dumps({"id": 17, "text": PARAGRAPH, "source": "nowhere"})
    (tmp_path / "held_out.jsonl").write_text(record)
    s.data.validation[:] = [str(tmp_path / "held_out.jsonl")]
    assert Trainer(s).validation.num_bytes == len(PARAGRAPH)


@pytest.mark.parametrize(("name", "text"), [("empty.txt", ""), ("empty.jsonl", "\n")])
def test_empty_texts_are_errors(tmp_path: Path, name: str, text: str) -> None:
    s = settings(tmp_path)
    (tmp_path / name).write_text(text)
    s.data.validation[:] = [str(tmp_path / name)]
    with pytest.raises(ConfigError, match=f"data.validation is empty: .*{name}"):
        Trainer(s)
    s.data.sources["sea"].files[:] = [str(tmp_path / name)]
    with pytest.raises(ConfigError, match="source 'sea' has [01] tokens; sequence_length 24"):
        Trainer(s)


def test_progress_lines(tmp_path: Path) -> None:
    one = trainer(tmp_path, steps=5, log_every=2, validate_every=2, validation_tokens=30)
    steps, train_step = [], one.train_step

    def step() -> Any:
        steps.append(train_step())
        return steps[-1]

    one.train_step = step
    one.run()
    lines = said(one).splitlines()
    assert re.fullmatch(
        r"yoco, 0\.0\dM parameters, 5 steps of 48 tokens, float32, adamw, cpu", lines[0]
    )
    pattern = re.compile(
        r"step +(\d)/5 \| loss (\d\.\d{4}) \| lr \d\.\d\de-\d\d \| grad \d+\.\d\d \| "
        r"[\d,]+ tok/s \| 0:00:\d\d<0:00:\d\d"
    )
    found = [match.groups() for line in lines if (match := pattern.fullmatch(line))]
    means = [sum(s.loss for s in part) / len(part) for part in (steps[:2], steps[2:4], steps[4:])]
    assert [int(step) for step, _ in found] == [2, 4, 5]
    assert [float(loss) for _, loss in found] == pytest.approx(means, abs=1e-4)
    validations = [line for line in lines if "validation loss" in line]
    assert [line.split("/")[0] for line in validations] == [f"step      {n}" for n in (2, 4, 5)]
    assert "| 30 tokens" in validations[0] and "| 30 tokens" not in validations[-1]
    assert lines[-1] == f"wrote {tmp_path / 'run' / 'final'}"


def test_the_first_line_after_a_resumption_has_its_own_mean(tmp_path: Path) -> None:
    """Checkpoints need not fall on the steps that print."""
    one = trainer(tmp_path, steps=10, log_every=4)
    for _ in range(3):
        one.train_step()
    one.save()
    resumed = trainer(tmp_path, steps=10, log_every=4)
    resumed.run()
    loss = one.train_step().loss
    [line] = [line for line in said(resumed).splitlines() if line.startswith("step      4/10")]
    assert f"| loss {loss:.4f} |" in line


class FakeWriter:
    """Records what TensorBoard would draw."""

    made: list["FakeWriter"] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.closed = folder, purge_step, False
        self.scalars: list[tuple[str, float, int]] = []
        FakeWriter.made.append(self)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setattr(FakeWriter, "made", [])
    trainer(tmp_path, steps=1).run()
    assert FakeWriter.made == [], "only if asked for"
    one = trainer(tmp_path, steps=3, log_every=2, validate_every=2, tensorboard=True)
    figures = one.run()
    [writer] = FakeWriter.made
    assert writer.folder == str(tmp_path / "run" / "tensorboard") and writer.closed
    assert writer.purge_step == 2, "curves beyond the step that it resumed at are dropped"
    drawn = {(tag, step): value for tag, value, step in writer.scalars}
    steps = {step for tag, step in drawn if tag == "train/loss"}
    assert steps == {step for tag, step in drawn if tag == "validation/bits_per_byte"} == {2, 3}
    assert drawn["validation/bits_per_byte", 3] == figures["bits_per_byte"]
    assert {tag for tag, _ in drawn} == {
        *(f"train/{name}" for name in ("loss", "lr", "grad_norm", "tokens_per_s")),
        *(f"validation/{name}" for name in ("nll_per_token", "bits_per_byte")),
    }


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependencyError, match="pip install tensorboard"):
        trainer(tmp_path, tensorboard=True)


def test_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="train.device is 'cuda', but there is no CUDA device"):
        trainer(tmp_path, device="cuda")
    assert trainer(tmp_path, device="auto").device.type == "cpu"


@pytest.mark.parametrize("key", ["output_dir", "data.cache_dir"])
def test_folders_that_cannot_be_made_are_named(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").touch()
    config = values(tmp_path)
    section = config if key == "output_dir" else config["data"]
    section[key.split(".")[-1]] = str(tmp_path / "file" / "x")
    write_texts(tmp_path)
    with pytest.raises(ConfigError, match=f"{key} is .*file/x', which cannot be made: Not a dir"):
        Trainer(parse_settings(config))


def test_another_device_is_said(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    one.device = torch.device("cuda")
    one.save()
    assert "so far on cuda, from here on cpu: not bit for bit" in said(trainer(tmp_path))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", MODELS)
def test_training_on_a_gpu(tmp_path: Path, family: str) -> None:
    losses = {}
    for device in ("cpu", "cuda"):
        one = trainer(tmp_path, family, device=device, optimizer="muon")
        losses[device] = [one.train_step().loss for _ in range(3)]
        assert next(one.model.parameters()).device.type == device
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)


@pytest.mark.parametrize("family", MODELS)
def test_the_exported_model_is_the_trained_one(tmp_path: Path, family: str) -> None:
    one = trainer(tmp_path, family, steps=8, dtype="bfloat16")
    figures = one.run()
    final = tmp_path / "run" / "final"
    model, config = load_model(final, "auto")
    assert config == one.config and next(model.parameters()).dtype == torch.bfloat16
    ids = [0, *one.tokenizer.encode(PARAGRAPH).ids]
    trained = one.model.to(torch.bfloat16)
    assert torch.equal(logits_of(model, ids), logits_of(trained, ids))

    record = json.loads((final / "training.json").read_text())
    assert record["steps"] == 8 and record["validation"] == figures
    assert parse_settings(record["settings"]) == one.s, "with which it can be made again"
    llm = LLM(final)
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0)
    [answer] = llm.generate([PARAGRAPH[:24]], params)
    prompt = answer.prompt_token_ids
    assert prompt == one.tokenizer.encode(PARAGRAPH[:24]).ids
    expected = logits_of(trained, prompt).float().log_softmax(-1)
    assert answer.prompt_logprobs is not None
    for row, scored in enumerate(answer.prompt_logprobs[1:]):
        assert scored is not None
        token = prompt[row + 1]
        assert scored[token].logprob == pytest.approx(float(expected[row, token]), abs=0.02)
    assert set(llm.engine.eos_token_ids) == {0}


def test_float32_exports(tmp_path: Path) -> None:
    s = parse_settings({**values(tmp_path, steps=1), "export_dtype": "float32"})
    write_texts(tmp_path)
    one = Trainer(s, io.StringIO())
    one.run()
    model, _ = load_model(tmp_path / "run" / "final", "auto")
    for got, expected in zip(model.parameters(), one.model.parameters(), strict=True):
        assert torch.equal(got, expected)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    command = ["train", str(config), "train.steps=3", "train.log_every=1"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.err.count("| loss ") == 3 and captured.out == ""
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    assert main([*command, "train.batch_size=1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "train.batch_size was 2, is 1" in error
    assert error.count("\n") == 1


def continued(folder: Path, output: str, **changes: Any) -> Trainer:
    """Training on from the model that ``folder`` holds, into another folder."""
    result = {**values(folder, steps=2), "output_dir": str(folder / output), **changes}
    return Trainer(parse_settings(result), io.StringIO())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    trainer(folder, steps=2).run()
    return folder


def test_training_continues_from_a_folder(trained: Path) -> None:
    final = trained / "run" / "final"
    one = continued(trained, "on", model=str(final), tokenizer={})
    start, _ = load_model(final)
    for got, expected in zip(one.model.parameters(), start.parameters(), strict=True):
        assert torch.equal(got, expected) and got.dtype == torch.float32
    assert one.tokenizer.to_str() == Tokenizer.from_file(str(final / "tokenizer.json")).to_str()
    before = one.validate(10**9)["nll_per_token"]
    assert one.run()["nll_per_token"] != before
    assert load_config(trained / "on" / "final") == load_config(final)
    again = continued(trained, "on", model=str(final), tokenizer={})
    assert again.step == 2
    with pytest.raises(ConfigError, match="model was '.*final', is '.*elsewhere'"):
        (trained / "elsewhere").symlink_to(final)
        continued(trained, "on", model=str(trained / "elsewhere"), tokenizer={})


def test_a_longer_context_is_recorded(trained: Path) -> None:
    data = {**values(trained)["data"], "sequence_length": 40}
    one = continued(trained, "longer", model=str(trained / "run" / "final"), data=data)
    assert one.config.max_position_embeddings == 40
    one.run()
    assert load_config(trained / "longer" / "final").max_position_embeddings == 40


def test_a_model_keeps_its_tokenizer(trained: Path, tmp_path: Path) -> None:
    final = trained / "run" / "final"
    train_tokenizer(["quite another text " * 9], 300, tmp_path / "other.json")
    with pytest.raises(ConfigError, match="other.json has another vocabulary than .*final"):
        continued(trained, "a", model=str(final), tokenizer={"path": str(tmp_path / "other.json")})
    with pytest.raises(ConfigError, match="absent.json does not exist, and a new tokenizer would"):
        continued(trained, "b", model=str(final), tokenizer={"path": str(tmp_path / "absent.json")})
    assert not (tmp_path / "absent.json").exists()


def test_models_without_a_tokenizer_of_their_own(trained: Path, golden: Path) -> None:
    model = str(golden / "yoco-fla-gret-tiny")
    with pytest.raises(ConfigError, match="has no tokenizer.json; name the one"):
        continued(trained, "c", model=model, tokenizer={})
    vocab = load_config(model).vocab_size
    with pytest.raises(ConfigError, match=f"has {vocab} tokens, the tokenizer 300"):
        continued(trained, "d", model=model)


@pytest.mark.parametrize("name", ["yoco-fla-swa-tiny", "llama-tiny"])
def test_training_a_preset(trained: Path, golden: Path, name: str) -> None:
    """``random:`` takes the shape; vocabulary, context and end of text follow the data."""
    one = continued(trained, name, model=f"random:{golden / name}")
    shape = load_config(golden / name)
    assert one.config.hidden_size == shape.hidden_size
    assert (one.config.vocab_size, one.config.max_position_embeddings) == (300, 24)
    assert one.config.bos_token_id == one.config.eos_token_id == 0
    again = continued(trained, name, model=f"random:{golden / name}")
    pairs = zip(one.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    one.run()
    tokenizer = load_tokenizer(trained / name / "final")
    assert tokenizer is not None and tokenizer.eos_token_ids == (0,)
