"""Checkpoints survive conversion and saving: same tensors, same logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from references import ALL, AUTHORS, DATA, NATIVE, expected, logits_of
from yocolm.models.authors import authors_name, convert, load_state
from yocolm.models.registry import load_config, load_model
from yocolm.models.tensor_files import INDEX_FILE
from yocolm.models.weights import save_weights


@pytest.mark.parametrize("name", AUTHORS)
def test_conversion_keeps_every_tensor_and_the_logits(name: str, tmp_path: Path) -> None:
    result = convert(DATA / name, tmp_path)
    original = load_state(DATA / name / "checkpoint.pth")
    converted = load_file(tmp_path / "model.safetensors")
    assert result.num_tensors == len(original)
    assert {authors_name(key) for key in converted} == original.keys()
    for key, tensor in converted.items():
        assert tensor.dtype == original[authors_name(key)].dtype
        assert torch.equal(tensor, original[authors_name(key)])
    assert load_config(tmp_path) == load_config(DATA / name) == result.config
    tokens = expected(name).token_ids
    model, converted_model = load_model(DATA / name)[0], load_model(tmp_path)[0]
    assert torch.equal(logits_of(model, tokens), logits_of(converted_model, tokens))


@pytest.mark.parametrize("name", AUTHORS)
def test_conversion_can_cast_and_shard(name: str, tmp_path: Path) -> None:
    convert(DATA / name, tmp_path, dtype=torch.bfloat16, max_shard_bytes=100_000)
    assert (tmp_path / INDEX_FILE).exists()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    model, _ = load_model(tmp_path, dtype="auto")
    direct, _ = load_model(DATA / name, dtype="bfloat16")
    for ours, theirs in zip(model.parameters(), direct.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NATIVE)
def test_saving_gives_the_same_file_back(name: str, tmp_path: Path) -> None:
    model, config = load_model(DATA / name)
    save_weights(model, tmp_path)
    original, saved = (
        load_file(DATA / name / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert original.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[key]) for key, tensor in original.items())
    assert load_config(tmp_path) == config


@pytest.mark.parametrize("name", ALL)
def test_sharded_and_whole_files_load_alike(name: str, tmp_path: Path) -> None:
    model, _ = load_model(DATA / name)
    save_weights(model, tmp_path, max_shard_bytes=60_000)
    shards = list(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 3
    loaded, _ = load_model(tmp_path)
    for ours, theirs in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NATIVE)
def test_the_written_configuration_has_every_field_of_the_original(
    name: str, tmp_path: Path
) -> None:
    model, _ = load_model(DATA / name)
    save_weights(model, tmp_path)
    original = json.loads((DATA / name / "config.json").read_text())
    written = json.loads((tmp_path / "config.json").read_text())
    # transformers' own version, and a leftover of tensor-parallel training.
    assert original.keys() - written.keys() <= {"transformers_version", "pretraining_tp"}
    # These choose kernels, not results.
    ours = {key for key in written if key.startswith("fuse_")} | {"rope_theta"}
    assert {k: written[k] for k in original.keys() & written.keys() - ours} == {
        k: original[k] for k in original.keys() & written.keys() - ours
    }
