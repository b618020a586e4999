"""Reading and writing weights: what is named when files and configuration do not agree."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from references import ALL, DATA, NATIVE
from yocolm.errors import CheckpointError
from yocolm.models.layouts import weight_layout
from yocolm.models.registry import build_model, load_config, load_model
from yocolm.models.spec import model_spec
from yocolm.models.tensor_files import INDEX_FILE, SINGLE_FILE, write_tensors
from yocolm.models.weights import fill_weights, load_weights, save_weights

GRET = DATA / "yoco-fla-gret-tiny"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a native checkpoint, to be damaged."""
    shutil.copytree(GRET, tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def set_field(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("name", ALL)
def test_the_map_names_every_parameter_once(name: str) -> None:
    config = load_config(DATA / name)
    parameters = dict(build_model(config, "meta", torch.float32).named_parameters())
    layout = weight_layout(config)
    assert layout.keys() == parameters.keys()
    for key, parts in layout.items():
        assert sum(part.shape[0] for part in parts) == parameters[key].shape[0]
        assert all(part.shape[1:] == parameters[key].shape[1:] for part in parts)
    sources = [part.name for parts in layout.values() for part in parts]
    assert len(set(sources)) == len(sources)
    if name in NATIVE:
        assert set(sources) <= load_file(DATA / name / SINGLE_FILE).keys()


def test_missing_tensors_are_named(folder: Path) -> None:
    rewrite(folder, lambda t: [t.pop("model.norm.weight"), t.pop("lm_head.weight")])
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head.weight, model.norm.wei"):
        load_model(folder)


def test_surplus_tensors_are_named(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.extra.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match="surplus tensors: model.extra.weight"):
        load_model(folder)


def test_known_buffers_are_no_surplus(folder: Path) -> None:
    key = "model.self_layers.0.attn.rotary.inv_freq"
    rewrite(folder, lambda t: t.update({key: torch.ones(16)}))
    load_model(folder)


def test_wrong_shapes_are_named_with_both_shapes(folder: Path) -> None:
    key = "model.shared_kv_builder.k_proj.weight"
    rewrite(folder, lambda t: t.update({key: torch.ones(16, 64)}))
    with pytest.raises(CheckpointError, match=rf"{key} has shape \[16, 64\].* needs \[32, 64\]"):
        load_model(folder)


def test_parts_that_only_fit_together_are_wrong(folder: Path) -> None:
    """k and v of 16 + 48 rows fill the 64 of the stacked matrix, and are wrong all the same."""
    prefix = "model.shared_kv_builder"
    rewrite(
        folder,
        lambda t: t.update(
            {
                f"{prefix}.k_proj.weight": torch.ones(16, 64),
                f"{prefix}.v_proj.weight": torch.ones(48, 64),
            }
        ),
    )
    with pytest.raises(CheckpointError, match="k_proj.*v_proj"):
        load_model(folder)


def test_a_vocabulary_that_disagrees_is_named_with_the_remedy(folder: Path) -> None:
    set_field(folder, vocab_size=260)
    with pytest.raises(
        CheckpointError, match=r"embeddings.weight has shape \[264, 64\].*is vocab_size 264"
    ):
        load_model(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    key = "model.norm.weight"
    rewrite(folder, lambda t: t.update({key: torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match="model.norm.weight is I8"):
        load_model(folder)


@pytest.mark.parametrize("redundant", [False, True])
def test_tied_embeddings_with_or_without_a_head_in_the_file(folder: Path, redundant: bool) -> None:
    set_field(folder, tie_word_embeddings=True)
    if not redundant:
        rewrite(folder, lambda t: t.pop("lm_head.weight"))
    model, config = load_model(folder)
    assert config.tie_word_embeddings
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_untied_without_a_head_is_an_error(folder: Path) -> None:
    rewrite(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        load_model(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_weights(load_model(GRET)[0], tmp_path, max_shard_bytes=200_000)
    shard = sorted(tmp_path.glob("model-*-of-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"missing shard {shard.name}"):
        load_model(tmp_path)


def test_a_tensor_that_only_the_index_has_is_named(tmp_path: Path) -> None:
    save_weights(load_model(GRET)[0], tmp_path, max_shard_bytes=200_000)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"]["ghost.weight"] = next(iter(index["weight_map"].values()))
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="ghost.weight"):
        load_model(tmp_path)


def test_saving_again_leaves_no_file_of_the_first_save(tmp_path: Path) -> None:
    model, _ = load_model(GRET)
    save_weights(model, tmp_path, max_shard_bytes=200_000)
    with torch.no_grad():
        model.get_parameter("norm.weight").add_(1)
    save_weights(model, tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == [SINGLE_FILE]
    assert torch.equal(
        load_model(tmp_path)[0].get_parameter("norm.weight"), model.get_parameter("norm.weight")
    )


def test_no_weights_at_all(tmp_path: Path) -> None:
    shutil.copy(GRET / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        load_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pytorch_model.bin is pickled"):
        load_model(tmp_path)


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / SINGLE_FILE).write_bytes(b"not a header")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_model(folder)
    for text in ("{", "[" * 100_000):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match="not valid JSON"):
            load_model(folder)


def test_dtypes_are_cast_while_loading(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({key: value.half() for key, value in t.items()}))
    model, _ = load_model(folder, dtype="bfloat16")
    original = load_file(folder / SINGLE_FILE)["model.norm.weight"]
    assert torch.equal(model.get_parameter("norm.weight"), original.bfloat16())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_model_of_another_dtype_is_refused() -> None:
    config = load_config(GRET)
    model = build_model(config, "cpu", torch.float32)
    with pytest.raises(CheckpointError, match="torch.float32.*expected torch.bfloat16"):
        load_weights(model, GRET, config, torch.bfloat16, "cpu")


def test_a_model_of_another_layout_is_refused() -> None:
    config = load_config(GRET)
    model = build_model(config, "cpu", torch.float32)
    other = replace(config, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        load_weights(model, GRET, other, torch.float32, "cpu")


def test_extra_generation_fields_are_kept(tmp_path: Path) -> None:
    save_weights(load_model(GRET)[0], tmp_path, generation_config={"temperature": 0.7})
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.7}


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), limit=st.integers(40, 300))
def test_shards_hold_everything_and_keep_the_limit(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int
) -> None:
    target = tmp_path_factory.mktemp("shards")
    tensors = {f"t{i:02d}": torch.rand(size) for i, size in enumerate(sizes)}
    write_tensors(target, [(name, t.nbytes, lambda t=t: t) for name, t in tensors.items()], limit)
    read: dict[str, Tensor] = {}
    for path in target.glob("*.safetensors"):
        held = load_file(path)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= limit
        read |= held
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("mixer", ["gated_retention", "swa"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_option_survives_saving(tmp_path: Path, mixer: str, tied: bool) -> None:
    """Biases in both halves, query norms, grouped heads, an uneven split."""
    fields = {
        "model_type": "yoco",
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_self_decoder_layers": 1,
        "intermediate_size": 24,
        "tie_word_embeddings": tied,
        "self_decoder_attn": {
            "type": mixer,
            "num_heads": 4,
            "num_v_heads": 2,
            "window_size": 9,
            "qkv_bias": True,
        },
        "cross_decoder_attn": {
            "num_heads": 8,
            "num_kv_heads": 2,
            "qkv_bias": True,
            "qk_norm": True,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model, config = load_model(f"random:{tmp_path}")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    save_weights(model, tmp_path)
    saved = load_file(tmp_path / SINGLE_FILE)
    assert ("lm_head.weight" in saved) != tied
    assert saved["model.cross_layers.2.attn.q_norm.weight"].shape == (4,)
    assert saved["model.shared_kv_builder.v_proj.bias"].shape == (8,)
    assert ("model.self_layers.0.attn.k_proj.bias" in saved) == (mixer == "swa")
    loaded, again = load_model(tmp_path)
    assert again == config
    assert model_spec(config).num_params == sum(p.numel() for p in loaded.parameters())
    for ours, theirs in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_tensors_go_straight_into_the_parameters() -> None:
    """Each is read once, and into memory that the model has already: there is no second copy."""
    config, tensors = load_config(GRET), load_file(GRET / SINGLE_FILE)
    model = build_model(config, "cpu", torch.float32)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    reads: list[str] = []

    def copy(name: str, target: Tensor) -> None:
        reads.append(name)
        target.copy_(tensors[name])

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    fill_weights(model, config, shapes, copy, "here")
    assert sorted(reads) == sorted(tensors)
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
