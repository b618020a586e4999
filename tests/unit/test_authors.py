"""The authors' form: fields and tensors named in errors, and no code run from a checkpoint."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from references import AUTHORS, DATA
from yocolm.config import RetentionConfig, RopeConfig, WindowConfig, YocoConfig
from yocolm.errors import CheckpointError, ConfigError
from yocolm.models.authors import authors_name, convert, load_state, parse_params
from yocolm.models.layouts import weight_layout
from yocolm.models.registry import load_config, load_model, load_tokenizer

PARAMS = json.loads((DATA / "yoco-gret-tiny" / "params.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of an authors' checkpoint, to be damaged."""
    shutil.copytree(DATA / "yoco-gret-tiny", tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state: dict[str, Any] = dict(load_state(folder / "checkpoint.pth"))
    state = {name: tensor.clone() for name, tensor in state.items()}
    change(state)
    torch.save(state, folder / "checkpoint.pth")


def test_retention_facts() -> None:
    config = parse_params(PARAMS)
    rope = RopeConfig(10000.0, interleaved=True, inclusive=True)
    assert config.mixer == RetentionConfig(2, 32, rope, 16.0)
    assert (config.num_self_layers, config.num_cross_layers) == (2, 2)
    assert (config.cross.num_kv_heads, config.norm_eps) == (2, 1e-5)
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (0, 1, 2)


def test_window_facts() -> None:
    config = load_config(DATA / "yoco-swa-tiny")
    assert isinstance(config, YocoConfig)
    rope = RopeConfig(10000.0, interleaved=True, inclusive=True)
    assert config == parse_params(PARAMS | {"n_self_heads": 4, "sliding_window": 64})
    assert config.mixer == WindowConfig(4, 4, 16, 64, rope)


@pytest.mark.parametrize("window", [None, False])
def test_no_window_is_retention(window: Any) -> None:
    assert parse_params(PARAMS | {"sliding_window": window}) == parse_params(PARAMS)


def test_optional_and_runtime_fields() -> None:
    minimal = {name: value for name, value in PARAMS.items() if name not in ("rope_theta",)}
    runtime = {"max_batch_size": 4, "model_parallel_size": 1, "load_checkpoint": True}
    assert parse_params(minimal | runtime) == parse_params(PARAMS)
    assert parse_params(PARAMS | {"max_seq_len": 4096}).max_position_embeddings == 4096
    assert parse_params(PARAMS | {"max_seq_len": -1}) == parse_params(PARAMS)
    assert parse_params(PARAMS | {"n_attn_kv_heads": None}).cross.num_kv_heads == 4
    assert parse_params(PARAMS | {"n_layers": 5}) == parse_params(PARAMS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gate_logit_normalizer": 8}, "unknown field gate_logit_normalizer.*known fields: dim"),
        ({"n_self_heads": 5}, "n_self_heads 5 does not divide dim 64"),
        ({"n_attn_kv_heads": 3}, "3 KV heads do not divide 4"),
        ({"n_layers": 1}, "num_hidden_layers is 0"),
    ],
)
def test_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_params(PARAMS | change)


def test_missing_fields_are_named() -> None:
    with pytest.raises(ConfigError, match="lacks dim, hidden_dim"):
        parse_params({k: v for k, v in PARAMS.items() if k not in ("dim", "hidden_dim")})


@pytest.mark.parametrize("name", AUTHORS)
def test_names_map_one_to_one(name: str) -> None:
    state = load_state(DATA / name / "checkpoint.pth")
    layout = weight_layout(load_config(DATA / name))
    names = [authors_name(part.name) for parts in layout.values() for part in parts]
    assert sorted(names) == sorted(state)


@pytest.mark.parametrize("use", [load_model, lambda folder: convert(folder, folder / "out")])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s.pop("layer_norm.weight"), "missing tensors: layer_norm.weight"),
        (lambda s: s.pop("output_projection.weight"), "missing tensors: output_projection.weight"),
        (lambda s: s.update({"odd.weight": torch.ones(2)}), "surplus tensors: odd.weight"),
        (
            lambda s: s.update({"cross_decoder.k_proj.weight": torch.ones(16, 64)}),
            r"cross_decoder.k_proj.weight has shape \[16, 64\].*needs \[32, 64\]",
        ),
        (lambda s: s.update({"step": 3}), "step is not a tensor"),
        (
            lambda s: s.update({"layer_norm.weight": torch.ones(64, dtype=torch.int32)}),
            "layer_norm",
        ),
    ],
)
def test_bad_tensors_are_named_as_the_authors_name_them(
    folder: Path, use: Callable[[Path], object], change: Callable[[dict], object], named: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=named):
        use(folder)


class _Malicious:
    """Unpickling this would create a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch, before it refuses
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_code_in_a_checkpoint_is_refused_and_not_run(folder: Path, form: str) -> None:
    target = folder / "was-run"
    state = {"layer_norm.weight": torch.ones(64), "x": _Malicious(target)}
    path = folder / "checkpoint.pth"
    if form == "pickle":
        path.write_bytes(pickle.dumps(_Malicious(target)))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip")
    for use in (load_state, lambda _: load_model(folder), lambda _: convert(folder, folder / "o")):
        with pytest.raises(CheckpointError, match="refused|not a readable checkpoint"):
            use(path)
    assert not target.exists()


def test_damaged_absent_or_strange_files(folder: Path) -> None:
    path = folder / "checkpoint.pth"
    for content in (path.read_bytes()[:1000], b"", b"hello\n", b"no checkpoint at all " * 99):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a readable checkpoint|refused"):
            load_model(folder)
    torch.save(torch.ones(3), path)
    with pytest.raises(CheckpointError, match="holds a Tensor, not a state dict"):
        load_model(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model(folder)


def test_files_older_than_the_zip_format(folder: Path) -> None:
    path = folder / "checkpoint.pth"
    state = load_state(path)
    torch.save({k: v.clone() for k, v in state.items()}, path, _use_new_zipfile_serialization=False)
    old, new = load_model(folder)[0], load_model(DATA / "yoco-gret-tiny")[0]
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters(), strict=True))


def test_shared_embeddings_are_noticed(folder: Path, tmp_path: Path) -> None:
    def share(state: dict[str, Tensor]) -> None:
        state["output_projection.weight"] = state["embed_tokens.weight"]

    rewrite(folder, share)
    assert load_config(folder).tie_word_embeddings
    convert(folder, tmp_path / "native")
    ours, theirs = load_model(tmp_path / "native"), load_model(folder)
    assert ours[1] == theirs[1]
    for a, b in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_vocabulary_that_is_not_theirs_has_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(DATA / "yoco-gret-tiny") is None
    result = convert(DATA / "yoco-gret-tiny", tmp_path)
    assert result.missing_tokenizer is not None and "264" in result.missing_tokenizer
    assert load_tokenizer(tmp_path) is None


def test_convert_wants_an_authors_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no params.json"):
        convert(DATA / "llama-tiny", tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dim", "64"),
        ("n_layers", 2.5),
        ("n_attn_heads", None),
        ("rope_theta", "x"),
        ("norm_eps", []),
    ],
)
def test_params_that_are_no_numbers_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*number|{name} is .*at least"):
        parse_params(PARAMS | {name: value})


def test_params_of_absurd_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers is 1000000000; .* at most 10000"):
        parse_params(PARAMS | {"n_layers": 10**9})


def test_a_source_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nope does not exist"):
        convert(tmp_path / "nope", tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is not a folder"):
        convert(tmp_path / "file", tmp_path / "out")
    assert not (tmp_path / "out").exists()
