"""Tiny trainings that tests share: a text, models of all families, and configurations."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from yocolm.train.settings import TrainSettings, parse_settings
from yocolm.train.trainer import Trainer

PARAGRAPH = (
    "The sea was calm and the little boat went slowly along the shore; the old man said nothing, "
    "and the boy, who was tired of asking, looked at the water and counted the waves.\n"
)
_GEMMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 2.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "yoco": {
        "model_type": "yoco",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_self_decoder_layers": 1,
        "tie_word_embeddings": True,
        "self_decoder_attn": {"type": "gated_retention", "num_heads": 2},
        "cross_decoder_attn": {"num_heads": 2, "num_kv_heads": 1},
    },
    "yoco-swa": {
        "model_type": "yoco",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_self_decoder_layers": 1,
        "tie_word_embeddings": False,
        "self_decoder_attn": {
            "type": "swa",
            "num_heads": 2,
            "num_v_heads": 1,
            "window_size": 8,
            "qkv_bias": True,
        },
        "cross_decoder_attn": {"num_heads": 2, "num_kv_heads": 1, "qk_norm": True},
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "gemma3n": {
        **_GEMMA,
        "model_type": "gemma3n_text",
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 4,
    },
    "gemma4": {
        **_GEMMA,
        "model_type": "gemma4_text",
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "num_key_value_heads": 1,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": False,
    },
    "gemma4-experts": {
        **_GEMMA,
        "model_type": "gemma4_text",
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}
GEMMA_MODELS = [name for name in MODELS if name.startswith("gemma")]


def write_texts(folder: Path) -> None:
    """A text of two documents to train on, and one to validate on."""
    rng = np.random.default_rng(0)
    words = PARAGRAPH.split()
    for name, count in (("a", 1500), ("b", 900), ("held_out", 120)):
        text = " ".join(words[i] for i in rng.integers(len(words), size=count))
        (folder / f"{name}.txt").write_text(f"{text}\n{PARAGRAPH}", encoding="utf-8")


def values(folder: Path, model: str = "yoco", **train: Any) -> dict[str, Any]:
    """A configuration, as a YAML file holds it, of a training in ``folder``."""
    return {
        "output_dir": str(folder / "run"),
        "seed": 1,
        "tokenizer": {"path": str(folder / "tokenizer.json"), "vocab_size": 300},
        "model": copy.deepcopy(MODELS[model]),
        "data": {
            "sequence_length": 24,
            "sources": {
                "sea": {"files": [str(folder / "a.txt")], "weight": 3},
                "shore": {"files": [str(folder / "b.txt")]},
            },
            "validation": [str(folder / "held_out.txt")],
        },
        "train": {
            "steps": 6,
            "batch_size": 2,
            "learning_rate": 3e-3,
            "warmup_steps": 2,
            "dtype": "float32",
            "device": "cpu",
            "retention_chunk_size": 16,
            **train,
        },
    }


def settings(folder: Path, model: str = "yoco", **train: Any) -> TrainSettings:
    """``values``, parsed. Writes the texts if the folder has none."""
    if not (folder / "a.txt").exists():
        write_texts(folder)
    return parse_settings(values(folder, model, **train))


def write_config(folder: Path, model: str = "yoco", **train: Any) -> Path:
    """``values`` in a YAML file, and its texts."""
    write_texts(folder)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values(folder, model, **train)), encoding="utf-8")
    return path


def trainer(folder: Path, model: str = "yoco", **train: Any) -> Trainer:
    """A trainer that prints into ``trainer.out``, a StringIO."""
    return Trainer(settings(folder, model, **train), out=io.StringIO())


def state_of(trained: Trainer) -> list[torch.Tensor]:
    """Copies of every parameter and of the optimisers' tensors, in a fixed order."""
    tensors = [parameter.detach() for parameter in trained.model.parameters()]
    for optimizer in trained.optimizers:
        for entry in optimizer.state_dict()["state"].values():
            tensors += [value for _, value in sorted(entry.items()) if torch.is_tensor(value)]
    return [tensor.clone() for tensor in tensors]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
