"""Weights of Gemma 3n and Gemma 4: transformers' names, and what a file may have or lack."""

import io
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from gemma_reference import VOCAB, build, gemma3n_config, gemma4_config, logits, randomise
from references import logits_of, worst
from tolerances import GOLDEN_FLOAT32
from yocolm.config import GemmaConfig, ModelConfig
from yocolm.errors import CheckpointError, ConfigError
from yocolm.models.gemma import PerLayerInputs
from yocolm.models.layouts import redundant_names, weight_layout
from yocolm.models.loading_line import LoadingLine
from yocolm.models.presets import PRESETS, preset
from yocolm.models.registry import build_model, load_config, load_model, parse_dtype
from yocolm.models.tensor_files import SINGLE_FILE
from yocolm.models.weights import load_weights, save_weights

GEMMA = [name for name in PRESETS if name.startswith("gemma")]
CONFIGS = {
    "gemma3n": gemma3n_config("wfwwf", 2, attention_bias=True, num_key_value_heads=2),
    "gemma3n-untied": gemma3n_config("wfwf", 1, tie_word_embeddings=False),
    "gemma4": gemma4_config("wwfwwf", 3, use_double_wide_mlp=True, attention_bias=True),
    "gemma4-experts": gemma4_config(
        "wfwf",
        0,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=8,
        tie_word_embeddings=False,
    ),
}
# A file's name for `model.NAME` and for `lm_head.NAME`, as generations of transformers wrote them.
STYLES = [
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
    ("model.", "lm_head."),
]
PROMPT = torch.arange(1, 30) * 7 % 50


def their_module(config: ModelConfig) -> Any:
    """transformers' model without memory."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto = transformers.AutoConfig.for_model(**config.to_hf())
        return transformers.AutoModelForCausalLM.from_config(auto)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny random checkpoints, as transformers writes them; not to be changed."""

    def folder(name: str) -> Path:
        path = tmp_path_factory.getbasetemp() / f"saved-{name}"
        if not path.exists():
            build(CONFIGS[name]).save_pretrained(path)
        return path

    return folder


def copy(source: Path, target: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A checkpoint with other tensors; `change` returns them, or changes those it is given."""
    target.mkdir()
    tensors = load_file(source / SINGLE_FILE)
    other = change(tensors)
    save_file(other if isinstance(other, dict) else tensors, target / SINGLE_FILE)
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


def renamed(tensors: dict[str, Tensor], style: tuple[str, str]) -> dict[str, Tensor]:
    decoder, head = style
    return {
        head + name[8:] if name.startswith("lm_head.") else decoder + name[6:]: tensor
        for name, tensor in tensors.items()
    }


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GEMMA)
def test_the_layout_is_that_of_both_modules(name: str) -> None:
    config = preset(name)
    assert isinstance(config, GemmaConfig)
    layout = weight_layout(config)
    parameters = dict(build_model(config, "meta", torch.float32).named_parameters())
    assert layout.keys() == parameters.keys()
    for key, parts in layout.items():
        assert sum(part.shape[0] for part in parts) == parameters[key].shape[0], key
        assert all(part.shape[1:] == parameters[key].shape[1:] for part in parts), key
    ours = {part.name: part.shape for parts in layout.values() for part in parts}
    theirs = {key: tuple(tensor.shape) for key, tensor in their_module(config).state_dict().items()}
    del theirs["lm_head.weight"]  # tied
    assert ours == theirs


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", CONFIGS)
def test_text_from_a_multimodal_checkpoint(
    saved: Callable[[str], Path], tmp_path: Path, name: str, style: tuple[str, str]
) -> None:
    others = ["vision_tower.a.weight", "audio_tower.b", "embed_vision.c", "embed_audio.d"]
    others += ["multi_modal_projector.e", "vision_embedder.f"]
    prefix = "model." if style[0].startswith("model.") else ""

    def wrap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return renamed(tensors, style) | {prefix + other: torch.ones(3) for other in others}

    folder = copy(saved(name), tmp_path / "model", wrap)
    fields = json.loads((folder / "config.json").read_text())
    tied = fields.get("tie_word_embeddings")
    outer = {"model_type": fields["model_type"].removesuffix("_text"), "dtype": "bfloat16"}
    outer |= {"text_config": fields, "vision_config": {"hidden_size": 8}, "image_token_id": 3}
    (folder / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": tied}))
    ours, theirs = load_model(folder)[0], load_model(saved(name))[0]
    assert torch.equal(logits_of(ours, PROMPT), logits_of(theirs, PROMPT))
    config = load_config(folder)
    assert isinstance(config, GemmaConfig) and ("image", 3) in config.media_token_ids
    assert parse_dtype("auto", folder) == torch.bfloat16


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_decoder_saved_by_itself(name: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    def bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    folder = copy(saved(name), tmp_path / "bare", bare)
    for ours, theirs in zip(
        *(logits_of(load_model(f)[0], PROMPT) for f in (folder, saved(name))), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_real_multimodal_checkpoint_of_gemma_4(tmp_path: Path) -> None:
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    tower |= {"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 8}
    tower |= {"patch_size": 2}
    config = transformers.Gemma4Config(
        text_config=CONFIGS["gemma4"].to_dict(),
        vision_config={"model_type": "gemma4_vision", **tower},
        audio_config=None,
    )
    theirs = transformers.Gemma4ForConditionalGeneration(config).eval()
    randomise(theirs, 1)
    theirs.save_pretrained(tmp_path)
    assert any("vision_tower" in name for name in load_file(tmp_path / SINGLE_FILE))
    ours, _ = load_model(tmp_path)
    expected = logits(theirs, PROMPT.tolist())
    assert worst(logits_of(ours, PROMPT), expected) < GOLDEN_FLOAT32


def test_a_tensor_in_two_spellings_is_an_error(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    def twice(tensors: dict[str, Tensor]) -> None:
        tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"].clone()

    folder = copy(saved("gemma4"), tmp_path / "model", twice)
    with pytest.raises(CheckpointError, match="model.norm.weight are the same part"):
        load_model(folder)


@pytest.mark.parametrize("style", STYLES)
def test_errors_spell_names_as_the_checkpoint_does(
    saved: Callable[[str], Path], tmp_path: Path, style: tuple[str, str]
) -> None:
    decoder, head = style

    def damage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["model.layers.1.self_attn.k_proj.weight"], tensors["lm_head.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(3, 2)
        tensors["model.layers.0.mlp.extra"] = torch.ones(1)
        tensors["model.layers.9.self_attn.k_proj.weight"] = torch.ones(1)
        return renamed(tensors, style)

    folder = copy(saved("gemma3n-untied"), tmp_path / "model", damage)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    for part in (
        rf"missing tensors: .*{decoder}layers.1.self_attn.k_proj.weight",
        rf"missing tensors: .*{head}weight",
        rf"surplus tensors: {decoder}layers.0.mlp.extra, {decoder}layers.9.self_attn.k_proj.weight",
        rf"wrong shapes: {decoder}layers.0.mlp.up_proj.weight has shape \[3, 2\]",
    ):
        assert re.search(part, str(caught.value)), part


# --- what a file may have or lack -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_shared_layers_with_redundant_keys_and_values(
    saved: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    config = load_config(saved(name))
    redundant = redundant_names(config)
    layers = {int(key.split(".")[2]) for key in redundant if "layers" in key}
    assert layers == set(range(config.num_layers)[-CONFIGS[name].num_kv_shared_layers :])
    plain = load_file(saved(name) / SINGLE_FILE)
    assert not redundant & plain.keys()
    folder = copy(
        saved(name),
        tmp_path / "model",
        lambda t: t.update({key: torch.full((2, 2), torch.nan) for key in redundant}),
    )
    ours, theirs = load_model(folder)[0], load_model(saved(name))[0]
    assert torch.equal(logits_of(ours, PROMPT), logits_of(theirs, PROMPT))


@pytest.mark.parametrize("kind", ["k_proj.weight", "v_proj.weight", "k_norm.weight", "k_proj.bias"])
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_writer_needs_its_keys_and_values(
    saved: Callable[[str], Path], tmp_path: Path, name: str, kind: str
) -> None:
    config = load_config(saved(name))
    assert isinstance(config, GemmaConfig)
    key = f"model.layers.{config.num_writers - 1}.self_attn.{kind}"
    folder = copy(saved(name), tmp_path / "model", lambda t: t.pop(key))
    with pytest.raises(CheckpointError, match=f"missing tensors: {re.escape(key)}"):
        load_model(folder)


def test_values_that_are_keys_need_no_projection_of_their_own(
    saved: Callable[[str], Path],
) -> None:
    names = load_file(saved("gemma4-experts") / SINGLE_FILE).keys()
    assert "model.layers.1.self_attn.k_proj.weight" in names
    assert "model.layers.1.self_attn.v_proj.weight" not in names


def test_layer_scalars_that_are_absent_are_one(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    def drop(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in tensors.items() if "layer_scalar" not in key}

    def ones(tensors: dict[str, Tensor]) -> None:
        tensors |= {key: torch.ones(1) for key in tensors if "layer_scalar" in key}

    absent = copy(saved("gemma4"), tmp_path / "absent", drop)
    written = copy(saved("gemma4"), tmp_path / "written", ones)
    expected = logits_of(load_model(written)[0], PROMPT)
    assert torch.equal(logits_of(load_model(absent)[0], PROMPT), expected)
    assert worst(expected, logits_of(load_model(saved("gemma4"))[0], PROMPT)) > 0.01


def test_a_padded_vocabulary_is_named(saved: Callable[[str], Path], tmp_path: Path) -> None:
    def pad(tensors: dict[str, Tensor]) -> None:
        key = "model.embed_tokens.weight"
        tensors[key] = torch.cat((tensors[key], torch.zeros(3, 32)))

    folder = copy(saved("gemma4"), tmp_path / "model", pad)
    with pytest.raises(CheckpointError, match=rf"is vocab_size {VOCAB + 3}\?"):
        load_model(folder)


# --- tables in their file -------------------------------------------------------------------------


def table_of(model: torch.nn.Module) -> Tensor:
    inputs = model.per_layer
    assert isinstance(inputs, PerLayerInputs)
    return inputs.table.weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_mapped_and_resident_tables_compute_the_same(
    saved: Callable[[str], Path], name: str, dtype: str
) -> None:
    mapped, _ = load_model(saved(name), dtype)
    resident, _ = load_model(saved(name), dtype, per_layer_tables="resident")
    assert table_of(mapped).dtype == torch.float32 and not table_of(mapped).requires_grad
    assert table_of(resident).dtype == parse_dtype(dtype, "bundled")
    assert table_of(resident).requires_grad
    assert torch.equal(logits_of(mapped, PROMPT), logits_of(resident, PROMPT))


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_model_can_be_saved_over_the_file_that_its_table_is_in(
    saved: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    folder = copy(saved(name), tmp_path / "model", lambda _: None)
    model, _ = load_model(folder, "bfloat16")
    before = logits_of(model, PROMPT)
    save_weights(model, folder)
    assert {t.dtype for t in load_file(folder / SINGLE_FILE).values()} == {torch.bfloat16}
    assert torch.equal(logits_of(model, PROMPT), before)
    assert torch.equal(logits_of(load_model(folder, "bfloat16")[0], PROMPT), before)


def test_only_tables_may_be_without_memory(saved: Callable[[str], Path]) -> None:
    config = load_config(saved("gemma4"))
    model = build_model(config, "cpu", torch.float32, allocate_tables=False)
    assert [n for n, p in model.named_parameters() if p.is_meta] == ["per_layer.table.weight"]
    model.get_submodule("norm").to("meta")
    with pytest.raises(CheckpointError, match="norm.weight is torch.float32 on meta"):
        load_weights(model, saved("gemma4"), config, torch.float32, "cpu")


def test_an_unknown_kind_of_table(saved: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="per_layer_tables='disk' must be one of mapped, resid"):
        load_model(saved("gemma4"), per_layer_tables="disk")


def test_a_table_of_integers_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    key = "model.embed_tokens_per_layer.weight"
    folder = copy(saved("gemma4"), tmp_path / "model", lambda t: t.update({key: t[key].int()}))
    with pytest.raises(CheckpointError, match=f"{key} is I32; weights must be floating"):
        load_model(folder)


# --- back to transformers -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_what_is_saved(
    saved: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    ours, _ = load_model(saved(name))
    save_weights(ours, tmp_path, max_shard_bytes=20_000)
    assert not (tmp_path / SINGLE_FILE).exists()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(theirs) is type(build(CONFIGS[name]))
    theirs.config._attn_implementation = "eager"
    expected = logits(theirs.eval(), PROMPT.tolist())
    assert worst(logits_of(ours, PROMPT), expected) < GOLDEN_FLOAT32
    assert torch.equal(logits_of(load_model(tmp_path)[0], PROMPT), logits_of(ours, PROMPT))


# --- progress -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_progress_counts_the_bytes_that_are_read(saved: Callable[[str], Path], name: str) -> None:
    config, calls = load_config(saved(name)), []
    model = build_model(config, "cpu", torch.float32, allocate_tables=False)
    load_weights(model, saved(name), config, torch.float32, "cpu", lambda *done: calls.append(done))
    table = table_of(model)
    expected = sum(p.nbytes for p in model.parameters() if p is not table)
    assert calls[-1] == (expected, expected)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_loading_line_is_erased_and_for_terminals_only() -> None:
    out, file = Terminal(), io.StringIO()
    for stream in (out, file, None):
        with LoadingLine("some/model", stream) as line:
            line(0, 3_000_000_000)
            line(1_500_000_000, 3_000_000_000)
            line(1_500_000_001, 3_000_000_000)
    shown = out.getvalue().split("\r")
    assert shown[1:3] == ["loading some/model: 0 % of 3.0 GB", "loading some/model: 50 % of 3.0 GB"]
    assert shown[3].strip() == "" and len(shown[3]) >= len(shown[2]) and shown[4:] == [""]
    assert file.getvalue() == ""
