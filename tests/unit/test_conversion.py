"""A Transformer as the beginning of a YOCO: what stays exact, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tiny import tiny_model
from yocolm.config import LlamaConfig, RetentionConfig, RopeConfig, WindowConfig, YocoConfig
from yocolm.errors import CheckpointError, ConfigError
from yocolm.models.base import Batch
from yocolm.models.conversion import YocoShape, convert_to_yoco, yoco_config
from yocolm.models.dense import DenseState
from yocolm.models.registry import build_model, load_model
from yocolm.models.weights import save_weights

LENGTHS = [23, 9, 1]
HALVES = RopeConfig(700.0, interleaved=False, inclusive=False)


def llama(layers: int = 4, **more: Any) -> LlamaConfig:
    fields: dict[str, Any] = {"tie_word_embeddings": True, "num_kv_heads": 2, "head_dim": 6} | more
    return LlamaConfig(
        vocab_size=61,
        hidden_size=24,  # whose root is no power of two
        intermediate_size=40,
        num_layers=layers,
        num_heads=4,
        rope=HALVES,
        bos_token_id=1,
        eos_token_id=(2, 3),
        **fields,
    )


def save(folder: Path, config: LlamaConfig, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A Transformer with weights that leave nothing idle; without biases of its outputs."""
    model = build_model(config, "cpu", torch.float64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("o.bias"):
                parameter.zero_()
            else:
                parameter.copy_(noise * (parameter.shape[-1] ** -0.5))
    # What is read are floats of 32 bits.
    model.to(torch.float32).to(dtype)
    save_weights(model, folder)
    return model.double()


def states(model: nn.Module) -> tuple[list[Tensor], Tensor]:
    """Hidden states behind every layer, the last one's but for a Transformer, and logits."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(61, (sum(LENGTHS),), generator=generator)
    seen: list[Tensor] = []
    layers = [
        part for name, part in model.named_modules() if name.count(".") == 1 and "layers" in name
    ]
    handles = [layer.register_forward_hook(lambda m, a, out: seen.append(out)) for layer in layers]
    with torch.no_grad():
        logits = model.logits(model(Batch.packed(tokens, LENGTHS), DenseState(8)))  # type: ignore[operator]
    for handle in handles:
        handle.remove()
    return seen, logits


def convert(folder: Path, shape: YocoShape, config: LlamaConfig) -> tuple[nn.Module, nn.Module]:
    teacher = save(folder / "llama", config)
    convert_to_yoco(folder / "llama", folder / "yoco", shape, torch.float32)
    return teacher, load_model(folder / "yoco", torch.float64)[0]


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 1e-5 * b.norm())


CONFIGS = {
    "grouped": llama(),
    "untied": llama(tie_word_embeddings=False, num_kv_heads=4),
    "biased": llama(attention_bias=True, num_kv_heads=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_windows_that_hold_everything_are_exact(name: str, tmp_path: Path) -> None:
    """The whole self-decoder, and the cross-decoder's first layer with its own keys and values."""
    teacher, yoco = convert(tmp_path, YocoShape("swa", window=23), CONFIGS[name])
    (theirs, _), (ours, _) = states(teacher), states(yoco)
    for layer in range(3):
        assert close(ours[layer], theirs[layer]), layer
    assert not torch.allclose(ours[3], ours[2])


@pytest.mark.parametrize("name", CONFIGS)
def test_one_cross_decoder_layer_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    shape = YocoShape("swa", window=23, self_layers=3)
    teacher, yoco = convert(tmp_path, shape, CONFIGS[name])
    assert close(states(yoco)[1], states(teacher)[1])


def test_smaller_windows_are_not_the_same(tmp_path: Path) -> None:
    teacher, yoco = convert(tmp_path, YocoShape("swa", 22, self_layers=3), CONFIGS["grouped"])
    theirs, ours = states(teacher)[1], states(yoco)[1]
    assert close(ours[:22], theirs[:22]) and close(ours[23:], theirs[23:])
    assert not close(ours[22], theirs[22])


@pytest.mark.parametrize("chosen", [None, 0, 2, 3, "mean"])
def test_the_layer_that_gives_keys_and_values(chosen: Any, tmp_path: Path) -> None:
    """Its norm, keys and values read the hidden states at the boundary."""
    config = CONFIGS["biased"]
    teacher, yoco = convert(tmp_path, YocoShape("swa", 23, kv_layer=chosen), config)
    x = torch.randn(5, 24, dtype=torch.float64)

    def kv(layer: int) -> Tensor:
        block: Any = teacher.layers[layer]  # type: ignore[index]
        return block.attn.qkv(block.attn_norm(x))[:, 24:]

    layers = {None: [2], "mean": [2, 3]}.get(chosen, [chosen])
    with torch.no_grad():
        k, v = torch.stack([kv(layer) for layer in layers]).mean(0).split(6, dim=1)
        shared: Any = yoco.global_kv
        found_k, found_v = shared.kv(shared.norm(x)).split(6, dim=1)
    assert close(found_v, v)
    pairs = torch.stack((k[:, :3], k[:, 3:]), dim=-1).flatten(1)  # halves, as neighbours
    assert close(found_k, pairs)


def test_gated_retention_takes_over_queries_keys_and_values(tmp_path: Path) -> None:
    teacher, yoco = convert(tmp_path, YocoShape(), CONFIGS["grouped"])
    first: Any = teacher.layers[0].attn.qkv.weight  # type: ignore[index, union-attr]
    mixer: Any = yoco.self_layers[0].attn  # type: ignore[index, union-attr]
    q, k, v, gate = mixer.qkvg.weight.view(4, 4, 6, 24)
    their_q, their_k, their_v = (part.view(-1, 6, 24) for part in first.split((24, 12, 12)))
    order = torch.tensor([0, 3, 1, 4, 2, 5])
    heads = torch.tensor([0, 0, 1, 1])  # two query heads read one of keys and values
    assert close(q, their_q[:, order]) and close(k, their_k[heads][:, order])
    assert close(v, their_v[heads]) and close(mixer.o.weight, teacher.layers[0].attn.o.weight)  # type: ignore[index, union-attr, arg-type]
    assert 0 < gate.std() < 0.1 * q.std()  # so that the mixer begins quietly
    assert mixer.gk.weight.std() > 0


def test_the_seed_decides_gates_and_decays(tmp_path: Path) -> None:
    save(tmp_path / "llama", CONFIGS["grouped"], torch.float32)
    found = []
    for seed in (0, 0, 1):
        convert_to_yoco(tmp_path / "llama", tmp_path / "out", YocoShape(seed=seed))
        found.append(load_file(tmp_path / "out" / "model.safetensors"))
    a, b, c = found
    assert all(torch.equal(a[name], b[name]) for name in a)
    changed = {name for name in a if not torch.equal(a[name], c[name])}
    assert changed == {
        f"model.self_layers.{i}.attn.{n}_proj.weight" for i in (0, 1) for n in ("g", "gk")
    }


def test_configuration() -> None:
    config = yoco_config(CONFIGS["biased"], YocoShape("swa", window=7, self_layers=1))
    pairs = RopeConfig(700.0, interleaved=True, inclusive=False)
    assert config.mixer == WindowConfig(4, 1, 6, 7, HALVES, qkv_bias=True)
    assert (config.num_self_layers, config.num_cross_layers) == (1, 3)
    assert (config.cross.rope, config.cross.num_kv_heads, config.cross.qkv_bias) == (pairs, 1, True)
    assert (config.bos_token_id, config.eos_token_id) == (1, (2, 3))
    assert yoco_config(llama(5), YocoShape()).mixer == RetentionConfig(4, 6, pairs)
    assert yoco_config(llama(5), YocoShape()).num_self_layers == 2
    assert YocoConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        (llama(), YocoShape(self_layers=4), "from 1 to 3"),
        (llama(1), YocoShape(), "at least two"),
        (llama(), YocoShape("linear"), "gated_retention, swa"),
        (llama(mlp_bias=True), YocoShape(), "mlp_bias"),
        (llama(attention_bias=True), YocoShape(), "mixer swa"),
        (llama(head_dim=8), YocoShape(), "4 heads of 8 do not make hidden_size 24"),
        (llama(), YocoShape(kv_layer=4), "from 0 to 3, or 'mean'"),
        (llama(), YocoShape(kv_layer="median"), "kv layer median"),
    ],
)
def test_what_cannot_be(
    config: LlamaConfig, shape: YocoShape, message: str, tmp_path: Path
) -> None:
    save(tmp_path / "llama", config, torch.float32)
    with pytest.raises(ConfigError, match=message):
        convert_to_yoco(tmp_path / "llama", tmp_path / "yoco", shape)
    assert not (tmp_path / "yoco").exists()


def test_biases_of_outputs_are_refused(tmp_path: Path) -> None:
    save(tmp_path, CONFIGS["biased"], torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.self_attn.o_proj.bias"][5] = 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="layers.2.self_attn.o_proj.bias is not zero"):
        convert_to_yoco(tmp_path, tmp_path / "yoco", YocoShape("swa"))


def test_sources_that_are_no_transformer(tmp_path: Path) -> None:
    save_weights(tiny_model("retention"), tmp_path / "yoco")
    with pytest.raises(ConfigError, match="of type yoco"):
        convert_to_yoco(tmp_path / "yoco", tmp_path / "out")
    with pytest.raises(ConfigError, match="no weights"):
        convert_to_yoco("random:llama-160M", tmp_path / "out")
    save(tmp_path / "llama", CONFIGS["grouped"], torch.float32)
    with pytest.raises(CheckpointError, match="the source itself"):
        convert_to_yoco(tmp_path / "llama", tmp_path / "yoco" / ".." / "llama")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        convert_to_yoco(tmp_path / "llama", tmp_path / "file")
    (tmp_path / "llama" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model.safetensors"):
        convert_to_yoco(tmp_path / "llama", tmp_path / "out")


def test_nothing_is_left_of_the_model_that_a_folder_held(tmp_path: Path) -> None:
    """Its tokenizer and templates would be taken for those of the new weights."""
    save(tmp_path / "llama", CONFIGS["grouped"], torch.bfloat16)
    target = tmp_path / "yoco"
    (target / "additional_chat_templates").mkdir(parents=True)
    stale = {
        "tokenizer.json": "another",
        "tokenizer_config.json": '{"add_bos_token": true}',
        "special_tokens_map.json": "{}",
        "chat_template.jinja": "another",
        "additional_chat_templates/tool.jinja": "another",
        "training.json": "{}",
        "generation_config.json": '{"temperature": 0.1}',
    }
    for name, text in stale.items():
        (target / name).write_text(text)
    (target / "notes.txt").write_text("kept")
    assert convert_to_yoco(tmp_path / "llama", target).missing_tokenizer is not None
    left = sorted(path.name for path in target.rglob("*") if path.is_file())
    assert left == ["config.json", "generation_config.json", "model.safetensors", "notes.txt"]
    assert "temperature" not in json.loads((target / "generation_config.json").read_text())
    (tmp_path / "llama" / "tokenizer.json").write_text("new")
    (target / "tokenizer.json").write_text("another")
    assert convert_to_yoco(tmp_path / "llama", target).missing_tokenizer is None
    assert (target / "tokenizer.json").read_text() == "new"


def test_tokenizer_templates_and_defaults_come_along(tmp_path: Path) -> None:
    save(tmp_path / "llama", CONFIGS["grouped"], torch.bfloat16)
    written = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"add_bos_token": true}',
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tool.jinja": "tools",
        "training.json": '{"steps": 3}',
    }
    (tmp_path / "llama" / "additional_chat_templates").mkdir()
    for name, text in written.items():
        (tmp_path / "llama" / name).write_text(text)
    defaults = {"temperature": 0.6, "eos_token_id": [2, 3], "bos_token_id": 1}
    (tmp_path / "llama" / "generation_config.json").write_text(json.dumps(defaults))
    result = convert_to_yoco(tmp_path / "llama", tmp_path / "yoco", max_shard_bytes=5000)
    assert result.missing_tokenizer is None
    del written["training.json"]  # tells of another model
    for name, text in written.items():
        assert (tmp_path / "yoco" / name).read_text() == text
    assert not (tmp_path / "yoco" / "training.json").exists()
    assert json.loads((tmp_path / "yoco" / "generation_config.json").read_text()) == defaults
    fields = json.loads((tmp_path / "yoco" / "config.json").read_text())
    assert (fields["model_type"], fields["dtype"]) == ("yoco", "bfloat16")
    assert len(list((tmp_path / "yoco").glob("model-*-of-*.safetensors"))) > 1
    load_model(tmp_path / "yoco")
