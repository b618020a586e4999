"""GGUF files of Llama-style models: weights, quantised ones too, tokenizer, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from yocolm import cli_convert
from yocolm.cli import build_parser
from yocolm.config import LlamaConfig, YocoConfig
from yocolm.errors import CheckpointError, ConfigError
from yocolm.models.gguf import convert_gguf
from yocolm.models.registry import load_model, load_tokenizer

HEADS, KV_HEADS, SIZE, WIDTH, LAYERS = 4, 2, 64, 96, 2
BYTES = [chr(c) for c in range(ord("!"), ord("~") + 1)]
TOKENS = ["<|start|>", "<|end|>", *BYTES, "th", "the"]
Q8 = ("ffn_down",)  # kinds of tensors to be written in 8 bits

gguf: Any = pytest.importorskip("gguf")
pytest.importorskip("accelerate")


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order of the file format, neighbours in pairs."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def tensors() -> dict[str, Tensor]:
    """Random weights by their names in the file, as a Hugging Face folder orders their rows."""
    generator = torch.Generator().manual_seed(0)
    kv = SIZE // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(TOKENS), SIZE),
        "output_norm": (SIZE,),
    }
    for layer in range(LAYERS):
        parts = {
            "attn_norm": (SIZE,),
            "ffn_norm": (SIZE,),
            "attn_q": (SIZE, SIZE),
            "attn_k": (kv, SIZE),
            "attn_v": (kv, SIZE),
            "attn_output": (SIZE, SIZE),
            "ffn_gate": (WIDTH, SIZE),
            "ffn_up": (WIDTH, SIZE),
            "ffn_down": (SIZE, WIDTH),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(path: Path, architecture: str = "llama") -> dict[str, Tensor]:
    """A model of two layers; returns its weights as they can be read back."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(77)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    special, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([special, special, *[normal] * (len(TOKENS) - 2)])
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    kept = tensors()
    for name, tensor in kept.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-1])
        rows = tensor if heads is None else interleaved(tensor, heads)
        if not name.endswith(Q8):
            writer.add_tensor(f"{name}.weight", rows.numpy())
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        packed = gguf.quants.quantize(rows.numpy(), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        kept[name] = torch.from_numpy(gguf.quants.dequantize(packed, kind))
        assert not torch.equal(kept[name], tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def test_weights_configuration_and_tokenizer(tmp_path: Path) -> None:
    kept = write(tmp_path / "tiny.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "chat_template.jinja").write_text("of another model")
    result = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    model, config = load_model(tmp_path / "out", "auto")
    assert isinstance(config, LlamaConfig) and result.config == config
    assert (config.num_layers, config.num_kv_heads, config.rope.theta) == (LAYERS, 2, 5000.0)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (77, True)
    assert result.num_tensors == len(kept)
    weights = dict(model.named_parameters())
    for layer in range(LAYERS):
        ours, theirs = f"layers.{layer}", f"blk.{layer}"
        qkv = torch.cat([kept[f"{theirs}.attn_{name}"] for name in "qkv"])
        gate_up = torch.cat([kept[f"{theirs}.ffn_{name}"] for name in ("gate", "up")])
        assert torch.equal(weights[f"{ours}.attn.qkv.weight"], qkv)
        assert torch.equal(weights[f"{ours}.mlp.gate_up.weight"], gate_up)
        assert torch.equal(weights[f"{ours}.attn.o.weight"], kept[f"{theirs}.attn_output"])
        assert torch.equal(weights[f"{ours}.mlp.down.weight"], kept[f"{theirs}.ffn_down"])
        assert torch.equal(weights[f"{ours}.attn_norm.weight"], kept[f"{theirs}.attn_norm"])
    assert torch.equal(weights["embed_tokens.weight"], kept["token_embd"])
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer is not None
    assert tokenizer.encode("the") == [len(TOKENS) - 1] and tokenizer.eos_token_ids == (1,)


def test_the_command_makes_a_yoco_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = write(tmp_path / "tiny.GGUF")
    options = ["--to", "yoco", "--mixer", "swa", "--window", "16", "--dtype", "bfloat16"]
    arguments = ["convert", str(tmp_path / "tiny.GGUF"), str(tmp_path / "new" / "yoco"), *options]
    assert cli_convert.run(build_parser().parse_args(arguments)) == 0
    assert "wrote" in capsys.readouterr().out
    model, config = load_model(tmp_path / "new" / "yoco", "auto")
    assert isinstance(config, YocoConfig) and config.num_self_layers == 1
    assert next(model.parameters()).dtype == torch.bfloat16
    rounded_once = (kept["token_embd"] / config.embed_scale).bfloat16()
    assert torch.equal(dict(model.named_parameters())["embed_tokens.weight"], rounded_once)
    assert load_tokenizer(tmp_path / "new" / "yoco") is not None
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["yoco"]


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none.gguf does not exist"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "text.gguf").write_text("GGML of old")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "out")
    (tmp_path / "torn.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(CheckpointError, match="torn.gguf"):
        convert_gguf(tmp_path / "torn.gguf", tmp_path / "out")
    write(tmp_path / "other.gguf", "qwen2")
    with pytest.raises(ConfigError, match="of type qwen2"):
        convert_gguf(tmp_path / "other.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
