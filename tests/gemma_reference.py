"""Tiny Gemma 3n and Gemma 4 models of transformers, random but with nothing idle, and their logits.

Checkpoints are built and saved in the test: the reference is the installed transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModel,
    Gemma3nConfig,
    Gemma3nForCausalLM,
    Gemma3nForConditionalGeneration,
    Gemma3nTextConfig,
    Gemma3nVisionConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    PreTrainedModel,
)

FROM_CONFIG = AutoModel.from_config
VOCAB = 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 5,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
TINY = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
IMAGES_4: dict[str, Any] = {
    **TINY,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 16,
    "patch_size": 2,
    "position_embedding_size": 16,
}
SOUNDS_4: dict[str, Any] = {
    **TINY,
    "output_proj_dims": 16,
    "subsampling_conv_channels": [4, 4],
}
SOUNDS_3N: dict[str, Any] = {
    "hidden_size": 16,
    "conf_num_attention_heads": 2,
    "conf_num_hidden_layers": 1,
    "input_feat_size": 8,
    "sscp_conv_channel_size": [4, 4],
}


def layer_types(letters: str) -> list[str]:
    """A letter for each layer: w(indow) or f(ull)."""
    kinds = {"w": "sliding_attention", "f": "full_attention"}
    return [kinds[letter] for letter in letters]


def gemma3n_config(letters: str, shared: int, **fields: Any) -> Gemma3nTextConfig:
    """Ids beyond the per-layer table occur; widths of the MLPs differ; two layers are sparse."""
    layers = len(letters)
    return Gemma3nTextConfig(
        **{
            **COMMON,
            "num_hidden_layers": layers,
            "layer_types": layer_types(letters),
            "num_kv_shared_layers": shared,
            "vocab_size_per_layer_input": VOCAB - 11,
            "intermediate_size": [64 if i % 2 else 48 for i in range(layers)],
            "activation_sparsity_pattern": [0.9, 0.5, *[0.0] * layers][:layers],
            "laurel_rank": 8,
            "final_logit_softcapping": 4.0,
            **fields,
        }
    )


def gemma4_config(letters: str, shared: int, **fields: Any) -> Gemma4TextConfig:
    """Full layers have heads of 16; the first 4 of these dimensions turn."""
    return Gemma4TextConfig(
        **{
            **COMMON,
            "num_hidden_layers": len(letters),
            "layer_types": layer_types(letters),
            "num_kv_shared_layers": shared,
            "intermediate_size": 48,
            "global_head_dim": 16,
            "final_logit_softcapping": 4.0,
            **fields,
        }
    )


def build(config: Any, seed: int = 0) -> PreTrainedModel:
    """The model of a text configuration, in float32, with random weights that leave nothing idle.

    Norms and scales are away from 1, biases from 0. Queries are small where real models' are: their
    norm's weight stands in for attention's scale.
    """
    family: Any = Gemma3nForCausalLM if isinstance(config, Gemma3nTextConfig) else Gemma4ForCausalLM
    model = family(config).eval()
    randomise(model, seed)
    return model


def build_multimodal(config: Any, seed: int = 0) -> PreTrainedModel:
    """The same text model inside one that also sees and hears (tokens 55 to 60 are for that)."""
    media: dict[str, Any] = {"image_token_id": 55, "audio_token_id": 56}
    if isinstance(config, Gemma3nTextConfig):
        whole = Gemma3nConfig(
            text_config=config.to_dict(),
            vision_config={"hidden_size": 16, "vocab_size": 2, "vocab_offset": 59},
            audio_config={**SOUNDS_3N, "vocab_size": 2, "vocab_offset": 57},
            **media,
        )
        with mock.patch.object(AutoModel, "from_config", _without_timm):
            model: Any = Gemma3nForConditionalGeneration(whole)
    else:
        whole = Gemma4Config(
            text_config=config.to_dict(),
            vision_config=IMAGES_4,
            audio_config=SOUNDS_4,
            video_token_id=57,
            **media,
        )
        model = Gemma4ForConditionalGeneration(whole)
    randomise(model.model.language_model, seed)
    return model.eval()


def _without_timm(config: Any) -> nn.Module:
    """Gemma 3n's vision tower belongs to another package: something stands in its place."""
    if isinstance(config, Gemma3nVisionConfig):
        return nn.Linear(2, 2)
    return FROM_CONFIG(config)


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Seeded weights for every parameter, and for the buffers that checkpoints hold."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters())
    tensors |= {name: b for name, b in model.named_buffers() if name.endswith("layer_scalar")}
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(".bias"):
            tensor.copy_(0.3 * noise)
        elif tensor.ndim == 1:  # norms, scales
            tensor.copy_(1 + 0.2 * noise)
            if "q_norm" in name:
                tensor.mul_(len(tensor) ** -0.5)
        else:
            tensor.copy_(noise / tensor.shape[-1] ** 0.5)


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits [T, V] of the full forward: without a cache, every row through every layer."""
    return _full_forward(model.eval(), tokens)


def train_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """``logits`` in training mode, where AltUp's coefficients are clipped; differentiable."""
    return _full_forward(model.train(), tokens)


def _full_forward(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    # Gemma 4's shared layers would otherwise be free to leave rows out.
    output = model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return output.logits[0]


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """``count`` likeliest tokens, each by a full forward of all that is before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def logits_in_float64(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """``logits`` in float64 throughout.

    transformers computes norms, softmax, RoPE and some constants in float32 whatever the dtype of
    the model; here all that is replaced by float64.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wide = type(model)(model.config).eval()  # its constants are made in the default dtype
        wide.load_state_dict(model.state_dict())
        with _no_float32(wide):
            return logits(wide, tokens)
    finally:
        torch.set_default_dtype(default)


@contextmanager
def _no_float32(model: PreTrainedModel) -> Iterator[None]:
    softmax = F.softmax

    def wide_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim)

    with (
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(F, "softmax", wide_softmax),
        mock.patch.object(_rotary(model), "forward", _rotation(model)),
        mock.patch("torch.distributions.Normal.icdf", _wide_icdf),
    ):
        yield


def _rotary(model: PreTrainedModel) -> nn.Module:
    return next(part for name, part in model.named_modules() if name.endswith("rotary_emb"))


def _rotation(model: PreTrainedModel) -> Any:
    """Cosines and sines in float64, by the definitions of default and proportional RoPE."""
    config: Any = model.config
    is_gemma4 = isinstance(config, Gemma4TextConfig)

    def forward(x: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        rope = config.rope_parameters[kind]
        size = (config.per_layer_config[kind] if is_gemma4 else config).head_dim
        pairs = torch.arange(size // 2, dtype=torch.float64)
        frequencies = rope["rope_theta"] ** (-2 * pairs / size)
        if rope["rope_type"] == "proportional":
            turning = int(rope.get("partial_rotary_factor", 1.0) * size // 2)
            frequencies[turning:] = 0
        frequencies /= rope.get("factor", 1.0)
        angles = torch.cat((frequencies, frequencies)) * positions[..., None].double()
        return angles.cos(), angles.sin()

    return forward


def _wide_icdf(_: Any, share: Tensor) -> Tensor:
    """The normal quantile; float32 stands for a number that was written with few digits."""
    share = torch.tensor(round(float(share), 6), dtype=torch.float64)
    return math.sqrt(2) * torch.erfinv(2 * share - 1)
