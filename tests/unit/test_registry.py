"""What a model may be called, and what is said of names that lead nowhere."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

import yocolm
from references import ALL, DATA, expected, logits_of
from yocolm.config import LlamaConfig, YocoConfig
from yocolm.errors import CheckpointError, ConfigError, MissingDependencyError
from yocolm.models import registry
from yocolm.models.registry import (
    build_model,
    eos_token_ids,
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    parse_dtype,
    resolve,
)

TINY = {
    "model_type": "yoco",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_self_decoder_layers": 2,
    "intermediate_size": 48,
    "self_decoder_attn": {"type": "gated_retention", "num_heads": 2},
    "cross_decoder_attn": {"num_heads": 4, "num_kv_heads": 2},
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.mark.parametrize("name", ALL)
def test_folders_of_both_forms(name: str) -> None:
    source = resolve(DATA / name)
    assert source.kind == ("authors" if (DATA / name / "params.json").exists() else "native")
    assert load_config(source) == load_config(str(DATA / name))


def test_random_presets_in_any_case() -> None:
    assert isinstance(load_config("random:160m"), YocoConfig)
    assert isinstance(load_config("random:LLAMA-160M"), LlamaConfig)
    assert load_tokenizer("random:160M") is None
    assert load_generation_config("random:160M") == {}
    with pytest.raises(ConfigError, match="unknown preset '161M'; known presets: 160M, "):
        resolve("random:161M")


def test_random_weights_follow_the_seed(config_file: Path) -> None:
    tokens = torch.arange(20)
    first, config = load_model(f"random:{config_file}", seed=3)
    again, _ = load_model(f"random:{config_file.parent}", seed=3)
    other, _ = load_model(f"random:{config_file}", seed=4)
    assert config == load_config(config_file.parent)
    assert torch.equal(logits_of(first, tokens), logits_of(again, tokens))
    assert not torch.equal(logits_of(first, tokens), logits_of(other, tokens))
    assert bool(logits_of(first, tokens).isfinite().all())


def test_modules_hold_nothing_but_parameters(config_file: Path) -> None:
    """What `build_model` leaves uninitialised is exactly what weights or a seed then fill."""
    model = build_model(load_config(config_file.parent), "cpu", torch.bfloat16)
    assert list(model.buffers()) == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_models_come_in_evaluation_mode(config_file: Path) -> None:
    assert not load_model(f"random:{config_file}")[0].training


def test_bundled_is_a_folder_of_the_package(tmp_path: Path, monkeypatch: Any) -> None:
    assert registry.BUNDLED == Path(str(yocolm.__file__)).parent / "bundled"
    monkeypatch.setattr(registry, "BUNDLED", DATA / "llama-tiny")
    assert resolve("bundled").folder == DATA / "llama-tiny"


@pytest.mark.parametrize("name", ["nosuch", "./no/such", "/no/such/folder", "a/b/c", "~x/y z"])
def test_names_that_lead_nowhere(name: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a Hugging Face id.*160M"):
        resolve(name)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither config.json nor params.json"):
        resolve(tmp_path)


def test_hub_ids_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

    def fail(*_: object, **__: object) -> str:
        raise hub.errors.LocalEntryNotFoundError("no network")

    with pytest.raises(CheckpointError, match="foo/a--b.*could not be fetched"):
        resolve("foo/a--b")  # refused by the client itself: no such name can exist
    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="someone/model.*no network.*pass the folder"):
        resolve("someone/model")


def test_hub_ids_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    asked: list[list[str]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(DATA / name.split("/")[1])

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve("someone/llama-tiny").kind == "native"
    assert {"*.json", "*.jinja", "*.safetensors"} <= set(asked[0])
    assert not any("checkpoint.pth" in patterns for patterns in asked)  # nothing pickled is fetched
    assert resolve("someone/yoco-gret-tiny").kind == "authors"
    assert "checkpoint.pth" in asked[-1]


def test_hub_ids_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match="pip install huggingface_hub"):
        resolve("someone/model")


def test_dtypes() -> None:
    folder = DATA / "llama-tiny"
    assert parse_dtype("auto", folder) == torch.float32
    assert parse_dtype("bf16", folder) == parse_dtype("bfloat16", folder) == torch.bfloat16
    assert parse_dtype(torch.float64, folder) == torch.float64
    assert parse_dtype("auto", "random:160M") == torch.float32
    for wrong in ("int4", torch.int8):
        with pytest.raises(
            ConfigError, match="int[48] is not supported; allowed: .*bfloat16|'int4'"
        ):
            parse_dtype(wrong, folder)


def test_end_of_text_ids_come_from_everywhere() -> None:
    config, generation = (
        load_config(DATA / "llama-tiny"),
        load_generation_config(DATA / "llama-tiny"),
    )
    assert eos_token_ids(config, generation, None) == (2, 3)
    assert eos_token_ids(config, {}, None) == (2, 3)
    assert eos_token_ids(config, {"eos_token_id": 9}, None) == (9,)
    assert eos_token_ids(config, {"eos_token_id": None}, None) == ()


def test_a_tokenizer_with_more_tokens_than_embeddings(tmp_path: Path) -> None:
    shutil.copytree(DATA / "llama-tiny", tmp_path / "model")
    vocab = {f"w{index}": index for index in range(265)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    inner.save(str(tmp_path / "model" / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="265 tokens, the model only 264"):
        load_tokenizer(tmp_path / "model")


def test_loading_needs_no_expected_outputs_beside_it(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copy(DATA / "llama-tiny" / file, tmp_path)
    tokens = expected("llama-tiny").token_ids[:9]
    ours, theirs = load_model(tmp_path)[0], load_model(DATA / "llama-tiny")[0]
    assert torch.equal(logits_of(ours, tokens), logits_of(theirs, tokens))


def test_public_names_are_lazy() -> None:
    assert yocolm.__version__
    assert yocolm.SamplingParams(n=2).n == 2
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(yocolm, "non" + "sense")
    assert "LLM" in yocolm.__all__


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name(name: str) -> None:
    with pytest.raises(CheckpointError, match="model is empty: give a folder"):
        resolve(name)


def test_an_empty_preset(monkeypatch: pytest.MonkeyPatch, config_file: Path) -> None:
    monkeypatch.chdir(config_file.parent)  # nor is it the folder that the command runs in
    with pytest.raises(ConfigError, match="unknown preset ''; known presets: 160M, "):
        resolve("random:")


def test_errors_of_a_configuration_name_its_file(config_file: Path) -> None:
    config_file.write_text(json.dumps({**TINY, "eos_token_id": "x"}))
    for name in (str(config_file.parent), f"random:{config_file}"):
        with pytest.raises(ConfigError, match=r"config\.json: eos_token_id is 'x'"):
            load_config(name)


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", ["x", True, 1.5, [2, "x"], [2, False], {}])
def test_token_ids_of_generation_config(config_file: Path, name: str, value: object) -> None:
    path = config_file.parent / "generation_config.json"
    path.write_text(json.dumps({name: value}))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} is "):
        load_generation_config(config_file.parent)
    path.write_text(json.dumps({name: [2, 3], "temperature": 0.5}))
    assert load_generation_config(config_file.parent)[name] == [2, 3]


def test_stop_strings_of_generation_config(config_file: Path) -> None:
    path = config_file.parent / "generation_config.json"
    for value, wanted in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([], [])):
        path.write_text(json.dumps({"stop_strings": value}))
        assert load_generation_config(config_file.parent)["stop_strings"] == wanted
    for value in ("", [""], 5, [5], {"a": 1}):
        path.write_text(json.dumps({"stop_strings": value}))
        with pytest.raises(CheckpointError, match=r"generation_config\.json: stop_strings is "):
            load_generation_config(config_file.parent)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_saved_dtype(config_file: Path, field: str) -> None:
    wanted = {
        "bfloat16": torch.bfloat16,
        "torch.float64": torch.float64,
        "float16": torch.float32,  # of which we have no kernels: computed in float32
        None: torch.float32,
    }
    for name, dtype in wanted.items():
        config_file.write_text(json.dumps({**TINY, field: name}))
        assert parse_dtype("auto", config_file.parent) == dtype
    for wrong in ("floaty", "", 5, "nn", ["float32"]):
        config_file.write_text(json.dumps({**TINY, field: wrong}))
        with pytest.raises(ConfigError, match=rf"config\.json: {field} is .*; allowed: float32"):
            parse_dtype("auto", config_file.parent)
