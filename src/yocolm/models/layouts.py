"""Which tensors of a Hugging Face checkpoint make up which parameter of a family. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from yocolm.config import (
    Gemma3nConfig,
    Gemma4Config,
    GemmaConfig,
    LlamaConfig,
    ModelConfig,
    RetentionConfig,
    YocoConfig,
)

HEAD = "lm_head.weight"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A tensor of the file: its name and the shape that the configuration demands.

    A file may leave it out if `absent` says with what to fill it then.
    """

    name: str
    shape: Shape
    absent: float | None = None


Entry = tuple[str, tuple[Part, ...]]


def weight_layout(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """Parameter name -> parts in the file, with their shapes, in order along dimension 0."""
    layout = dict(_LAYOUTS[type(config)](config))
    size = (config.vocab_size, config.hidden_size)
    layout["norm.weight"] = (Part("model.norm.weight", (config.hidden_size,)),)
    if not config.tie_word_embeddings:
        layout[HEAD] = (Part(HEAD, size),)
    return layout


def redundant_names(config: ModelConfig) -> set[str]:
    """Tensors that a file may hold though the model has no use for them.

    A tied output head, and keys and values of layers that read those of others.
    """
    names = {HEAD} if config.tie_word_embeddings else set()
    if isinstance(config, GemmaConfig):
        kinds = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")
        kinds = (*kinds, "k_norm.weight", "v_norm.weight")
        layers = range(config.num_writers, config.num_layers)
        names |= {f"model.layers.{i}.self_attn.{kind}" for i in layers for kind in kinds}
    return names


def _linear(name: str, sources: dict[str, int], inputs: int, bias: bool = False) -> Iterator[Entry]:
    """Entries of a linear layer that stacks `sources` (file prefix -> output features)."""
    weights = tuple(Part(f"{source}.weight", (rows, inputs)) for source, rows in sources.items())
    yield f"{name}.weight", weights
    if bias:
        biases = tuple(Part(f"{source}.bias", (rows,)) for source, rows in sources.items())
        yield f"{name}.bias", biases


def _weight(name: str, source: str, *shape: int) -> Entry:
    return f"{name}.weight", (Part(f"{source}.weight", shape),)


def _mlp(name: str, source: str, size: int, width: int, bias: bool = False) -> Iterator[Entry]:
    gate_up = {f"{source}.gate_proj": width, f"{source}.up_proj": width}
    yield from _linear(f"{name}.gate_up", gate_up, size, bias)
    yield from _linear(f"{name}.down", {f"{source}.down_proj": size}, width, bias)


def _yoco_layout(config: YocoConfig) -> Iterator[Entry]:
    size, cross = config.hidden_size, config.cross
    kv_size = cross.num_kv_heads * cross.head_dim
    yield _weight("embed_tokens", "model.embeddings", config.vocab_size, size)
    for index in range(config.num_self_layers):
        ours, theirs = f"self_layers.{index}", f"model.self_layers.{index}"
        yield from _yoco_layer(ours, theirs, config)
        yield from _self_attention(f"{ours}.attn", f"{theirs}.attn", config)
    builder = "model.shared_kv_builder"
    yield _weight("global_kv.norm", f"{builder}.kv_norm", size)
    kv = {f"{builder}.k_proj": kv_size, f"{builder}.v_proj": kv_size}
    yield from _linear("global_kv.kv", kv, size, cross.qkv_bias)
    for index in range(config.num_cross_layers):
        ours, theirs = f"cross_layers.{index}", f"model.cross_layers.{index}"
        yield from _yoco_layer(ours, theirs, config)
        q = {f"{theirs}.attn.q_proj": size}
        yield from _linear(f"{ours}.attn.q", q, size, cross.qkv_bias)
        yield from _linear(f"{ours}.attn.o", {f"{theirs}.attn.o_proj": size}, size)
        if cross.qk_norm:
            yield _weight(f"{ours}.attn.q_norm", f"{theirs}.attn.q_norm", cross.head_dim)


def _yoco_layer(ours: str, theirs: str, config: YocoConfig) -> Iterator[Entry]:
    for norm in ("attn_norm", "mlp_norm"):
        yield _weight(f"{ours}.{norm}", f"{theirs}.{norm}", config.hidden_size)
    yield from _mlp(f"{ours}.mlp", f"{theirs}.mlp", config.hidden_size, config.intermediate_size)


def _self_attention(ours: str, theirs: str, config: YocoConfig) -> Iterator[Entry]:
    size, mixer = config.hidden_size, config.mixer
    if isinstance(mixer, RetentionConfig):
        stacked = {f"{theirs}.{letter}_proj": size for letter in "qkvg"}
        yield from _linear(f"{ours}.qkvg", stacked, size)
        yield from _linear(f"{ours}.gk", {f"{theirs}.gk_proj": mixer.num_heads}, size)
    else:
        kv_size = mixer.num_kv_heads * mixer.head_dim
        stacked = {f"{theirs}.q_proj": size}
        stacked |= {f"{theirs}.k_proj": kv_size, f"{theirs}.v_proj": kv_size}
        yield from _linear(f"{ours}.qkv", stacked, size, mixer.qkv_bias)
    yield from _linear(f"{ours}.o", {f"{theirs}.o_proj": size}, size)


def _llama_layout(config: LlamaConfig) -> Iterator[Entry]:
    size, bias = config.hidden_size, config.attention_bias
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield _weight("embed_tokens", "model.embed_tokens", config.vocab_size, size)
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        attn = f"{theirs}.self_attn"
        yield _weight(f"{ours}.attn_norm", f"{theirs}.input_layernorm", size)
        yield _weight(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", size)
        stacked = {f"{attn}.q_proj": q_size, f"{attn}.k_proj": kv_size, f"{attn}.v_proj": kv_size}
        yield from _linear(f"{ours}.attn.qkv", stacked, size, bias)
        yield from _linear(f"{ours}.attn.o", {f"{attn}.o_proj": size}, q_size, bias)
        yield from _mlp(
            f"{ours}.mlp", f"{theirs}.mlp", size, config.intermediate_size, config.mlp_bias
        )


def _gemma_layout(config: GemmaConfig) -> Iterator[Entry]:
    size, width = config.hidden_size, config.num_layers * config.per_layer_size
    yield _weight("embed_tokens", "model.embed_tokens", config.vocab_size, size)
    if config.per_layer_size:
        yield _weight(
            "per_layer.table", "model.embed_tokens_per_layer", config.per_layer_vocab_size, width
        )
        source = {"model.per_layer_model_projection": width}
        yield from _linear("per_layer.projection", source, size)
        norm = "model.per_layer_projection_norm"
        yield _weight("per_layer.norm", norm, config.per_layer_size)
    for layer in range(config.num_layers):
        yield from _gemma_layer(config, layer)


def _gemma_layer(config: GemmaConfig, layer: int) -> Iterator[Entry]:
    """What layers of both families have."""
    ours, theirs, size = f"layers.{layer}", f"model.layers.{layer}", config.hidden_size
    for name, source in (
        ("attn_norm", "input_layernorm"),
        ("post_attn_norm", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("post_mlp_norm", "post_feedforward_layernorm"),
    ):
        yield _weight(f"{ours}.{name}", f"{theirs}.{source}", size)
    yield from _gemma_attention(f"{ours}.attn", f"{theirs}.self_attn", config, layer)
    yield from _mlp(f"{ours}.mlp", f"{theirs}.mlp", size, config.mlp_width(layer))
    if own := config.per_layer_size:
        yield from _linear(f"{ours}.per_layer_gate", {f"{theirs}.per_layer_input_gate": own}, size)
        yield from _linear(f"{ours}.per_layer_up", {f"{theirs}.per_layer_projection": size}, own)
        yield _weight(f"{ours}.per_layer_norm", f"{theirs}.post_per_layer_input_norm", size)


def _gemma_attention(ours: str, theirs: str, config: GemmaConfig, layer: int) -> Iterator[Entry]:
    heads, size, bias = config.attention(layer), config.hidden_size, config.attention_bias
    q_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    stacked = {f"{theirs}.q_proj": q_size}
    yield _weight(f"{ours}.q_norm", f"{theirs}.q_norm", heads.head_dim)
    if layer < config.num_writers:
        stacked[f"{theirs}.k_proj"] = kv_size
        if not heads.k_is_v:
            stacked[f"{theirs}.v_proj"] = kv_size
        yield _weight(f"{ours}.k_norm", f"{theirs}.k_norm", heads.head_dim)
    name = "qkv" if layer < config.num_writers else "q"
    yield from _linear(f"{ours}.{name}", stacked, size, bias)
    yield from _linear(f"{ours}.o", {f"{theirs}.o_proj": size}, q_size, bias)


def _gemma4_layout(config: Gemma4Config) -> Iterator[Entry]:
    yield from _gemma_layout(config)
    size = config.hidden_size
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield f"{ours}.scale", (Part(f"{theirs}.layer_scalar", (1,), absent=1.0),)
        if (experts := config.experts) is None:
            continue
        count, width = experts.num_experts, experts.intermediate_size
        yield f"{ours}.router.scale", (Part(f"{theirs}.router.scale", (size,)),)
        scales = Part(f"{theirs}.router.per_expert_scale", (count,))
        yield f"{ours}.router.expert_scale", (scales,)
        yield from _linear(f"{ours}.router.proj", {f"{theirs}.router.proj": count}, size)
        gate_up = Part(f"{theirs}.experts.gate_up_proj", (count, 2 * width, size))
        yield f"{ours}.experts.gate_up", (gate_up,)
        yield f"{ours}.experts.down", (Part(f"{theirs}.experts.down_proj", (count, size, width)),)
        for name, source in (
            ("post_dense_norm", "post_feedforward_layernorm_1"),
            ("experts_norm", "pre_feedforward_layernorm_2"),
            ("post_experts_norm", "post_feedforward_layernorm_2"),
        ):
            yield _weight(f"{ours}.{name}", f"{theirs}.{source}", size)


def _gemma3n_layout(config: Gemma3nConfig) -> Iterator[Entry]:
    yield from _gemma_layout(config)
    size, streams = config.hidden_size, config.altup_num_inputs
    for name, source in (
        ("altup_in", "model.altup_projections"),
        ("altup_out", "model.altup_unembed_projections"),
    ):
        yield from _linear(name, {f"{source}.{i}": size for i in range(streams - 1)}, size)
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.altup", f"model.layers.{layer}.altup"
        yield from _linear(f"{ours}.correction", {f"{theirs}.correction_coefs": streams}, streams)
        coefficients = {f"{theirs}.prediction_coefs": streams**2}
        yield from _linear(f"{ours}.prediction", coefficients, streams)
        yield from _linear(f"{ours}.router", {f"{theirs}.modality_router": streams}, size)
        yield _weight(f"{ours}.router_norm", f"{theirs}.router_norm", size)
        yield f"{ours}.output_scale", (Part(f"{theirs}.correct_output_scale", (size,)),)
        ours, theirs = f"layers.{layer}.laurel", f"model.layers.{layer}.laurel"
        yield from _linear(f"{ours}.left", {f"{theirs}.linear_left": config.laurel_rank}, size)
        yield from _linear(f"{ours}.right", {f"{theirs}.linear_right": size}, config.laurel_rank)
        yield _weight(f"{ours}.norm", f"{theirs}.post_laurel_norm", size)


_LAYOUTS: dict[type, Callable[[Any], Iterator[Entry]]] = {
    YocoConfig: _yoco_layout,
    LlamaConfig: _llama_layout,
    Gemma3nConfig: _gemma3n_layout,
    Gemma4Config: _gemma4_layout,
}
