"""Seeded random checkpoints for the benchmarks, as Hugging Face folders in bfloat16.

    python bench/make_checkpoints.py OUT A B C 160M llama-160M

A is Gemma 4 in E2B's layout at half its width (0.5B), B a small Gemma 4 (78M), C a Gemma 3n of 30
layers; C256 is C with the per-layer width that llama.cpp insists on. Any other name is a preset,
such as 160M and its Transformer twin llama-160M. Gemma folders carry a made-up tokenizer of the
kind that vLLM and llama.cpp's converter accept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from torch import nn

from yocolm.config import GemmaConfig, ModelConfig, parse_config
from yocolm.errors import YocolmError
from yocolm.fields import write_json
from yocolm.models.presets import preset
from yocolm.models.registry import build_model
from yocolm.models.weights import save_weights

VOCAB = 8192
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")  # as Gemma's tokenizer has them
WINDOW, FULL = "sliding_attention", "full_attention"
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": 30.0,
}
GEMMA_4: dict[str, Any] = {**COMMON, "model_type": "gemma4_text", "use_double_wide_mlp": True}
GEMMA_3N: dict[str, Any] = {
    **COMMON,
    "model_type": "gemma3n_text",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 30,
    "num_kv_shared_layers": 10,
    "layer_types": ([WINDOW] * 4 + [FULL]) * 6,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    "head_dim": 128,
    "laurel_rank": 32,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "A": {
        **GEMMA_4,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 35,
        "num_kv_shared_layers": 20,
        "layer_types": ([WINDOW] * 4 + [FULL]) * 7,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 128,
    },
    "B": {
        **GEMMA_4,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_kv_shared_layers": 6,
        "layer_types": ([WINDOW] * 2 + [FULL]) * 4,
        "head_dim": 128,
        "global_head_dim": 256,
        "hidden_size_per_layer_input": 64,
    },
    "C": {**GEMMA_3N, "hidden_size_per_layer_input": 64},
    "C256": {**GEMMA_3N, "hidden_size_per_layer_input": 256},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder; each name gets its own")
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help=f"{', '.join(CHECKPOINTS)}, or a preset"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        for name in arguments.names:
            print(make(name, arguments.out / name, arguments.seed), flush=True)
    except (YocolmError, OSError) as error:
        print("error:", error, file=sys.stderr)
        return 1
    return 0


def make(name: str, folder: Path, seed: int = 0) -> str:
    """Write one checkpoint; returns a line about it."""
    fields = CHECKPOINTS.get(name)
    config: ModelConfig = preset(name) if fields is None else parse_config(fields)
    model = build_model(config, "cpu", torch.bfloat16)
    cast(Any, model).init_weights(seed)
    _soften_attention(model)
    save_weights(model, folder, config)
    if isinstance(config, GemmaConfig) and config.vocab_size == VOCAB:
        _save_tokenizer(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{folder}: {count / 1e6:.0f}M parameters"


@torch.no_grad()
def _soften_attention(model: nn.Module) -> None:
    """Gemma's attention has no scale but the norm of its queries, which is small in real models.

    At 1 each row would look at one token alone, and roundings would decide which.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.fill_(parameter.shape[0] ** -0.5)


def _save_tokenizer(folder: Path) -> None:
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "GemmaTokenizerFast",
            **{f"{name.strip('<>')}_token": name for name in SPECIAL},
            "add_bos_token": True,
            "add_eos_token": False,
        },
    )


def _tokenizer() -> Tokenizer:
    """BPE with byte fallback: special tokens, bytes, letters, and combinations of letters."""
    merges: list[tuple[str, str]] = []
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += [chr(code) for code in range(33, 127)]
    for left, right in _pairs(tokens[-94:]):
        if len(tokens) == VOCAB:
            break
        merges.append((left, right))
        tokens.append(left + right)
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer


def _pairs(characters: list[str]) -> Iterator[tuple[str, str]]:
    """Two characters, then three."""
    for left in ["▁", *characters]:
        yield from ((left, right) for right in characters)
    for left in characters:
        yield from (("▁" + left, right) for right in characters)


if __name__ == "__main__":
    sys.exit(main())
