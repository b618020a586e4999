"""Training Gemma: in bfloat16, with its soft cap, its tables, its BOS and its chat template."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import processors
from torch import Tensor, nn

from training import GEMMA_MODELS, MODELS, settings, trainer, values, write_texts
from yocolm.config import Gemma3nConfig, Gemma4Config, GemmaConfig, parse_config
from yocolm.models.base import Batch
from yocolm.models.dense import DenseState
from yocolm.models.gemma3n import AltUp
from yocolm.models.gemma4 import Router
from yocolm.models.layers import RMSNorm
from yocolm.models.registry import load_generation_config, load_tokenizer
from yocolm.ops.altup import correct, merge, spread
from yocolm.tokenizer import read_tokenizer
from yocolm.train.data_cache import TokenCache
from yocolm.train.data_files import SourceFiles
from yocolm.train.settings import parse_settings
from yocolm.train.tokenizer import train_tokenizer
from yocolm.train.trainer import Trainer


@pytest.fixture(scope="module", params=GEMMA_MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of one family whose tokenizer adds BOS, as a folder of the hub has it."""
    path = tmp_path_factory.mktemp(request.param)
    write_texts(path)
    texts = [(path / "a.txt").read_text()]
    tokenizer = train_tokenizer(texts, 300, path / "tokenizer.json", separator="<pad>")
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    bos, eos = (tokenizer.get_vocab()[name] for name in ("<bos>", "<eos>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    one = gemma(path, "made", model={**MODELS[request.param], "bos_token_id": bos})
    final = path / "made" / "final"
    one.run()
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True, "from": "the hub"}
    (final / "tokenizer_config.json").write_text(json.dumps(config))
    (final / "chat_template.jinja").write_text("{{ messages }}")
    (final / "chat_templates").mkdir()
    (final / "chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    ids = {"bos_token_id": bos, "eos_token_id": [eos, 1], "top_k": 64}
    (final / "generation_config.json").write_text(json.dumps(ids))
    return path


def gemma(folder: Path, output: str, **changes: Any) -> Trainer:
    """A training in bfloat16, the default, from the texts and the tokenizer in ``folder``."""
    given = values(folder, steps=8, learning_rate=1e-2)
    del given["train"]["dtype"]
    given["tokenizer"]["separator"] = "<eos>"
    given |= {"output_dir": str(folder / output), **changes}
    return Trainer(parse_settings(given), io.StringIO())


def continued(folder: Path, output: str, **changes: Any) -> Trainer:
    return gemma(folder, output, model=str(folder / "made" / "final"), **changes)


def test_fine_tuning_in_bfloat16(folder: Path) -> None:
    """The loss falls; the residual path and the scores of routers stay float32."""
    one = continued(folder, "tuned")
    assert one.s.train.dtype == "bfloat16"
    kinds: dict[str, set[torch.dtype]] = {"layer": set(), "router": set()}

    def note(kind: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            kinds[kind].add((output[0] if isinstance(output, tuple) else output).dtype)

        return hook

    layers = one.model.get_submodule("layers")
    for layer in layers.children():
        layer.register_forward_hook(note("layer"))
    for part in one.model.modules():
        if isinstance(part, Router):
            part.proj.register_forward_hook(note("router"))
    before = one.validate(10**9)["nll_per_token"]
    losses = [one.train_step().loss for _ in range(8)]
    assert all(0 < loss < 20 for loss in losses)
    assert one.validate(10**9)["nll_per_token"] < before - 0.05
    assert kinds["layer"] == {torch.float32}
    has_router = isinstance(one.config, Gemma4Config) and one.config.experts is not None
    assert kinds["router"] == ({torch.float32} if has_router else set())


def test_streams_do_not_see_autocast() -> None:
    """They are Gemma 3n's residual path: the same numbers with autocast as without."""
    torch.manual_seed(0)
    config = parse_config({**MODELS["gemma3n"], "vocab_size": 40})
    assert isinstance(config, Gemma3nConfig)
    altup = AltUp(config)
    for parameter in altup.parameters():
        nn.init.normal_(parameter)
    norm = RMSNorm(32, 1e-6)
    nn.init.normal_(norm.weight)
    x, h = torch.randn(5, 32, 4), torch.randn(5, 32)
    y, own, others = (torch.randn(5, size).bfloat16() for size in (32, 32, 96))

    def run(enabled: bool, *branches: Tensor) -> list[Tensor]:
        y, own, others = branches
        with torch.autocast("cpu", torch.bfloat16, enabled):
            expected = altup.predict(x, norm)
            made = altup.correction_of(h, y, norm, expected)
            moved = correct(x, expected.mixing, made.error, made.gains, own, norm.weight, 1e-6)
            spread_out = spread(h, others)
            return [*expected, *made, moved, spread_out, merge(x, others.view(3, 5, 32))]

    # What branches give is rounded, and so is its norm; nothing behind that is.
    plain = run(False, *(b.float() for b in (y, own, others)))
    for under, exact in zip(run(True, y, own, others), plain, strict=True):
        assert under.dtype == torch.float32
        torch.testing.assert_close(under, exact, rtol=0.02, atol=0.02)
    for under, exact in zip(run(True, y, own, others), run(False, y, own, others), strict=True):
        assert torch.equal(under, exact)


def test_gradients_in_bfloat16_are_those_in_float32(folder: Path) -> None:
    """The streams of a whole stack, too, which rounding to bfloat16 would spoil layer by layer."""
    gradients = []
    for dtype in ("float32", "bfloat16"):
        train = {**values(folder)["train"], "dtype": dtype}
        one = continued(folder, f"in-{dtype}", train=train)
        one.loss_sum(*one.sampler.batch(2)).backward()
        gradients.append({name: p.grad for name, p in one.model.named_parameters()})
    for name, wide in gradients[0].items():
        narrow = gradients[1][name]
        if wide is None or narrow is None:
            assert wide is narrow is None and name.endswith(".scale"), name
        elif not name.startswith("layers.") or ".experts." not in name:
            assert float((narrow - wide).norm()) <= 0.1 * float(wide.norm()), name


def test_windows_and_documents_begin_with_bos(folder: Path) -> None:
    one = continued(folder, "windows")
    bos, eos = (one.tokenizer.token_to_id(name) for name in ("<bos>", "<eos>"))
    text = one.validation.tokens
    assert text.read(0, 2).tolist() == [eos, bos]
    inputs, targets = (ids.reshape(5, 24) for ids in one.sampler.batch(5)[:2])
    assert (inputs[:, 0] == bos).all() and (inputs[:, 1:] == targets[:, :-1]).all()
    assert (targets[:, 0] != bos).any()

    ids, total = text.read(0, len(text)).tolist(), 0.0
    for start in range(0, len(ids) - 1, 24):
        window = [bos, *ids[start + 1 : start + 25]]
        total += float(one.loss_sum(*_shifted(window), [len(window) - 1]).detach())
    loss_sum, starts = one.loss_sum, []

    def noted(inputs: Any, targets: Any, lengths: list[int], validating: bool = False) -> Tensor:
        starts.extend(inputs[::24].tolist())
        first = inputs[1:24]
        assert (first == targets[: len(first)]).all()
        return loss_sum(inputs, targets, lengths, validating)

    one.loss_sum = noted
    figures = one.validate(10**9)
    assert figures["nll_per_token"] == pytest.approx(total / (len(ids) - 1), rel=1e-3)
    assert set(starts) == {bos} and len(starts) == -(-(len(ids) - 1) // 24)
    assert one._fingerprint()["tokenizer.bos"] == bos


def _shifted(window: list[int]) -> tuple[Any, Any]:
    ids = torch.tensor(window).numpy()
    return ids[:-1], ids[1:]


def test_a_separator_that_is_bos_comes_once(folder: Path) -> None:
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    bos = tokenizer.token_to_id("<bos>")
    files = SourceFiles("sea", [folder / "a.txt", folder / "b.txt"], 1.0, ("text",))
    [cached] = TokenCache(folder / "once", tokenizer, "<bos>").load([files])
    ids = cached.training.read(0, len(cached.training)).tolist()
    assert ids[0] == bos and ids[1] != bos and ids.count(bos) == 2


def test_an_export_keeps_what_belongs_to_the_tokenizer(folder: Path) -> None:
    source, final = folder / "made" / "final", folder / "kept" / "final"
    one = continued(folder, "kept", tokenizer={"separator": "<eos>"})
    one.run()
    templates = ("chat_template.jinja", "chat_templates/tool_use.jinja")
    for name in ("tokenizer_config.json", *templates):
        assert (final / name).read_bytes() == (source / name).read_bytes()
    assert load_generation_config(final) == load_generation_config(source)
    tokenizer = load_tokenizer(final)
    assert tokenizer is not None
    bos = one.tokenizer.token_to_id("<bos>")
    assert tokenizer.bos_token_id == bos and tokenizer.encode("sea")[0] == bos


def test_a_new_model_says_whether_its_tokenizer_adds_bos(folder: Path, tmp_path: Path) -> None:
    write_texts(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    one = gemma(tmp_path, "new", model=MODELS["llama"])
    one.export(tmp_path / "new", {})
    assert json.loads((tmp_path / "new/tokenizer_config.json").read_text()) == {
        "bos_token": "<eos>",
        "eos_token": "<eos>",
        "add_bos_token": True,
    }


@pytest.mark.parametrize("family", MODELS)
def test_the_loss_is_that_of_the_logits(tmp_path: Path, family: str) -> None:
    """In value and gradients, with logits that a soft cap changes a lot."""
    one = trainer(tmp_path, family)
    with torch.no_grad():
        head = "embed_tokens" if one.config.tie_word_embeddings else "lm_head"
        one.model.get_parameter(f"{head}.weight").mul_(20)
    inputs, targets = (torch.from_numpy(ids) for ids in one.sampler.batch(2)[:2])

    def gradients(loss: Tensor) -> list[Tensor]:
        wanted = [p for p in one.model.parameters() if p.requires_grad]
        return list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))

    hidden = one.model(Batch.packed(inputs, [24, 24]), DenseState(chunk_size=16))
    logits = one.model.logits(hidden)  # type: ignore[operator]
    cap = one.config.final_softcap
    assert bool(cap) == family.startswith("gemma")
    uncapped = F.linear(hidden, one.model.get_parameter(f"{head}.weight"))
    assert bool((uncapped - logits).abs().max() > 0.5) == bool(cap), "the cap has work to do"
    expected = F.cross_entropy(logits, targets, reduction="sum")
    loss = one.loss_sum(inputs.numpy(), targets.numpy(), [24, 24])
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for got, wanted in zip(gradients(loss), gradients(expected), strict=True):
        assert float((got - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-6


@pytest.mark.parametrize("name", GEMMA_MODELS)
def test_a_new_vocabulary_has_tables_of_its_size(tmp_path: Path, name: str) -> None:
    """By its fields or from the shape of another model, whose media tokens mean nothing here."""
    fields = MODELS[name]
    shape = {**fields, "vocab_size": 5000, "vocab_size_per_layer_input": 4000}
    shape |= {"image_token_id": 17, "audio_token_id": 4999}
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    for model in (fields, f"random:{tmp_path / 'shape.json'}"):
        s = settings(tmp_path)
        object.__setattr__(s, "model", model)
        one = Trainer(s, io.StringIO())
        assert isinstance(one.config, GemmaConfig)
        assert one.config.vocab_size == one.config.per_layer_vocab_size == 300
        assert one.config.media_token_ids == () and one.config.pad_token_id is None
        if one.config.per_layer_size:
            assert len(one.model.get_parameter("per_layer.table.weight")) == 300
    one = trainer_of({**fields, "vocab_size_per_layer_input": 280}, tmp_path)
    assert isinstance(one.config, GemmaConfig) and one.config.per_layer_vocab_size == 280


def trainer_of(fields: dict[str, Any], folder: Path) -> Trainer:
    return Trainer(parse_settings({**values(folder), "model": fields}), io.StringIO())
