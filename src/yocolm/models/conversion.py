"""A Transformer's weights as the first weights of a YOCO of as many layers.

The layers below ``self_layers`` become the self-decoder, the others the cross-decoder, whose
shared keys and values come from one layer of the Transformer (or from the mean of several). What
both architectures compute alike is taken over as it is:

* Embeddings are divided by the factor that YOCO multiplies them with; a tied head has it in the
  last norm instead.
* RoPE in halves becomes RoPE in neighbouring pairs by an order of the rows of queries and keys.
* A window layer is a Transformer's layer, as long as the window holds the whole text. Then the
  whole self-decoder equals the Transformer's lower layers, and so does the first cross-decoder
  layer if it is the one that gives keys and values.

All else is a beginning for training: attention that sees less than it did, upper layers whose
keys and values were another layer's, and gated retention, which is no softmax attention: it takes
over queries, keys, values and output, and gets random gates and decays.
"""

from __future__ import annotations

import math
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from yocolm.config import (
    CrossConfig,
    LlamaConfig,
    RetentionConfig,
    RopeConfig,
    WindowConfig,
    YocoConfig,
)
from yocolm.errors import CheckpointError, ConfigError, writing
from yocolm.models.authors import Conversion
from yocolm.models.layouts import weight_layout
from yocolm.models.registry import (
    CONFIG_FILE,
    GENERATION_FILE,
    ModelSource,
    load_config,
    load_generation_config,
    parse_dtype,
    resolve,
)
from yocolm.models.tensor_files import (
    INDEX_FILE,
    REMEDY,
    Piece,
    TensorFiles,
    open_folder,
    write_tensors,
)
from yocolm.models.weights import (
    DEFAULT_SHARD_BYTES,
    TRAINING_FILE,
    check_tensors,
    drop_text_files,
    write_configs,
)
from yocolm.tokenizer import TOKENIZER_FILE

MIXERS = ("gated_retention", "swa")
MEAN = "mean"
GATE = 0.1  # of the usual spread of random weights
_NOT_TEXT = (CONFIG_FILE, GENERATION_FILE, INDEX_FILE, TRAINING_FILE)  # of the Transformer alone

Get = Callable[[], Tensor]


@dataclass(frozen=True)
class YocoShape:
    """What a conversion may choose.

    Args:
        mixer: of the self-decoder, one of MIXERS.
        window: tokens that a layer of mixer "swa" sees.
        self_layers: layers of the self-decoder; None: half of them, rounded down.
        kv_layer: the layer whose keys and values are shared, counted from 0; MEAN: the mean of
            those of the cross-decoder; None: the first of the cross-decoder.
        seed: of the weights that no layer of the Transformer has.
    """

    mixer: str = "gated_retention"
    window: int = 1024
    self_layers: int | None = None
    kv_layer: int | str | None = None
    seed: int = 0


def yoco_config(source: LlamaConfig, shape: YocoShape) -> YocoConfig:
    """The YOCO that takes over most of a Transformer.

    Raises ConfigError for a shape that the Transformer's layers do not allow, and for biases and
    head sizes that a YOCO cannot have.
    """
    layers = source.num_layers
    below = layers // 2 if shape.self_layers is None else shape.self_layers
    _check_shape(source, shape.mixer, below)
    heads, theta, bias = source.num_heads, source.rope.theta, source.attention_bias
    pairs = RopeConfig(theta, interleaved=True, inclusive=False)
    mixer: RetentionConfig | WindowConfig = RetentionConfig(heads, source.head_dim, pairs)
    if shape.mixer == "swa":
        mixer = WindowConfig(
            heads, source.num_kv_heads, source.head_dim, shape.window, source.rope, bias
        )
    return YocoConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_layers=layers,
        num_self_layers=below,
        mixer=mixer,
        cross=CrossConfig(heads, source.num_kv_heads, source.head_dim, pairs, bias),
        norm_eps=source.norm_eps,
        tie_word_embeddings=source.tie_word_embeddings,
        max_position_embeddings=source.max_position_embeddings,
        initializer_range=source.initializer_range,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )


def _check_shape(source: LlamaConfig, mixer: str, below: int) -> None:
    """Refuse what is no YOCO, with ``below`` layers in its self-decoder."""
    if mixer not in MIXERS:
        raise ConfigError(f"mixer {mixer!r} is not known; one of {', '.join(MIXERS)}")
    layers = source.num_layers
    if not 1 <= below < layers:
        raise ConfigError(
            f"{below} of {layers} layers for the self-decoder leave one of the decoders without "
            f"a layer; give from 1 to {layers - 1} as self layers"
            if layers > 1
            else "a Transformer of one layer cannot be converted: a YOCO has at least two"
        )
    if source.mlp_bias:
        raise ConfigError("mlp_bias is true; a YOCO has no biases in its MLPs")
    if source.attention_bias and mixer == "gated_retention":
        raise ConfigError(
            "attention_bias is true, and gated retention has no biases; convert with mixer swa"
        )
    if source.num_heads * source.head_dim != source.hidden_size:
        raise ConfigError(
            f"{source.num_heads} heads of {source.head_dim} do not make hidden_size "
            f"{source.hidden_size}; a YOCO's heads share out the hidden size"
        )


def convert_to_yoco(
    src: str | Path,
    dst: str | Path,
    shape: YocoShape | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Conversion:
    """Writes a YOCO that begins as the Transformer ``src``, tensor by tensor, with its tokenizer.

    Args:
        src: a Llama-style model: a folder or a Hugging Face id.
        dtype: of the written weights; None: the one that ``src`` was saved in.

    Raises ConfigError as `yoco_config` does, and for a ``src`` of another architecture;
    CheckpointError for weights that are missing or do not fit, and where none can be written.
    """
    shape = YocoShape() if shape is None else shape
    source = resolve(src)
    llama, folder = _trained_llama(source)
    config = yoco_config(llama, shape)
    layers = _kv_layers(config, shape.kv_layer)
    target = Path(dst)
    if target.exists() and (not target.is_dir() or target.samefile(folder)):
        what = "the source itself" if target.is_dir() else "a file"
        raise CheckpointError(f"{target} is {what}; give another folder to write")
    weights = _Transformer(folder, llama)
    dtype = parse_dtype("auto" if dtype is None else dtype, source)
    pieces = _pieces(config, dict(_tensors(config, weights, layers, shape.seed)), dtype)
    generation = load_generation_config(source)
    with writing(f"a model to {target}", REMEDY):
        target.mkdir(parents=True, exist_ok=True)
        write_tensors(target, pieces, max_shard_bytes)
        write_configs(target, config, dtype, generation)
        _copy_text_files(folder, target)
    missing = None if (target / TOKENIZER_FILE).exists() else f"{folder} has no {TOKENIZER_FILE}"
    return Conversion(config, len(pieces), missing)


def _trained_llama(source: ModelSource) -> tuple[LlamaConfig, Path]:
    """The configuration of a Transformer, and the folder that has its weights."""
    config = load_config(source)
    if not isinstance(config, LlamaConfig):
        raise ConfigError(
            f"{source.name} is of type {config.model_type}; only a Transformer of type llama "
            "becomes a YOCO"
        )
    if source.folder is None:
        raise ConfigError(
            f"{source.name} has no weights to convert; give the folder of a trained model"
        )
    return config, source.folder


def _pieces(config: YocoConfig, getters: dict[str, Get], dtype: torch.dtype) -> list[Piece]:
    """What is written, in the order of the layout."""
    parts = [part for parts in weight_layout(config).values() for part in parts]
    assert {part.name for part in parts} == getters.keys()
    pieces: list[Piece] = []
    for part in parts:
        size = math.prod(part.shape) * dtype.itemsize
        pieces.append((part.name, size, partial(_cast, getters[part.name], dtype)))
    return pieces


def _kv_layers(config: YocoConfig, chosen: int | str | None) -> list[int]:
    """The layers whose keys and values are averaged into the shared ones: mostly a single one."""
    if chosen is None:
        return [config.num_self_layers]
    if chosen == MEAN:
        return list(range(config.num_self_layers, config.num_layers))
    if isinstance(chosen, str) or not 0 <= chosen < config.num_layers:
        raise ConfigError(
            f"kv layer {chosen} does not exist; give one from 0 to {config.num_layers - 1}, "
            f"or {MEAN!r}"
        )
    return [chosen]


class _Transformer:
    """The tensors of a Llama-style folder, in float32, one at a time."""

    def __init__(self, folder: Path, config: LlamaConfig) -> None:
        self.files: TensorFiles = open_folder(folder)
        self.folder, self.config = folder, config
        shapes = {name: stored.shape for name, stored in self.files.tensors.items()}
        check_tensors(config, shapes, str(folder))
        parts = [part.name for parts in weight_layout(config).values() for part in parts]
        self.files.check_floats(parts, str(folder))
        self._refuse_output_biases()

    def get(self, name: str) -> Tensor:
        stored = self.files.tensors[name]
        tensor = torch.empty(stored.shape, dtype=torch.float32)
        self.files.copy(name, tensor)
        return tensor

    def in_pairs(self, name: str) -> Tensor:
        """Rows of queries or keys, reordered so that neighbours turn together, not halves."""
        rows, size = self.get(name), self.config.head_dim
        split = rows.unflatten(0, (-1, 2, size // 2))  # head, half, pair
        return split.transpose(1, 2).flatten(0, 2)

    def for_each_head(self, rows: Tensor) -> Tensor:
        """Rows of keys or values, repeated for every query head that reads them."""
        size, group = self.config.head_dim, self.config.num_heads // self.config.num_kv_heads
        return rows.unflatten(0, (-1, size)).repeat_interleave(group, 0).flatten(0, 1)

    def _refuse_output_biases(self) -> None:
        for layer in range(self.config.num_layers if self.config.attention_bias else 0):
            name = f"model.layers.{layer}.self_attn.o_proj.bias"
            if self.get(name).any():
                raise ConfigError(
                    f"{self.folder}: {name} is not zero; a YOCO has no such bias, so this model "
                    "cannot be converted"
                )


def _tensors(
    config: YocoConfig, source: _Transformer, kv_layers: list[int], seed: int
) -> Iterator[tuple[str, Get]]:
    """How to get every tensor of the YOCO, by its name in the file."""
    scale, tied = config.embed_scale, config.tie_word_embeddings
    get = source.get
    yield "model.embeddings.weight", lambda: get("model.embed_tokens.weight") / scale
    yield "model.norm.weight", lambda: get("model.norm.weight") * (scale if tied else 1.0)
    if not tied:
        yield "lm_head.weight", partial(get, "lm_head.weight")
    for layer in range(config.num_layers):
        below = layer < config.num_self_layers
        kind, index = ("self", layer) if below else ("cross", layer - config.num_self_layers)
        ours, theirs = f"model.{kind}_layers.{index}", f"model.layers.{layer}"
        yield f"{ours}.attn_norm.weight", partial(get, f"{theirs}.input_layernorm.weight")
        yield f"{ours}.mlp_norm.weight", partial(get, f"{theirs}.post_attention_layernorm.weight")
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"{ours}.mlp.{name}.weight", partial(get, f"{theirs}.mlp.{name}.weight")
        ours, theirs = f"{ours}.attn", f"{theirs}.self_attn"
        yield f"{ours}.o_proj.weight", partial(get, f"{theirs}.o_proj.weight")
        if not below:
            for kind in _kinds(config.cross.qkv_bias):
                yield f"{ours}.q_proj.{kind}", partial(source.in_pairs, f"{theirs}.q_proj.{kind}")
        elif isinstance(config.mixer, WindowConfig):
            for kind in _kinds(config.mixer.qkv_bias):
                for name in (f"q_proj.{kind}", f"k_proj.{kind}", f"v_proj.{kind}"):
                    yield f"{ours}.{name}", partial(get, f"{theirs}.{name}")
        else:
            yield from _retention(ours, theirs, config, source, seed)
    yield from _shared_kv(config, source, kv_layers)


def _retention(
    ours: str, theirs: str, config: YocoConfig, source: _Transformer, seed: int
) -> Iterator[tuple[str, Get]]:
    """Queries, keys and values as they were, a head each; gates and decays at random.

    Gates are small: at first the mixer adds little, which harms less than what it would add.
    """
    size, heads, std = config.hidden_size, config.mixer.num_heads, config.initializer_range
    yield f"{ours}.q_proj.weight", lambda: source.in_pairs(f"{theirs}.q_proj.weight")
    yield (
        f"{ours}.k_proj.weight",
        lambda: source.for_each_head(source.in_pairs(f"{theirs}.k_proj.weight")),
    )
    yield (
        f"{ours}.v_proj.weight",
        lambda: source.for_each_head(source.get(f"{theirs}.v_proj.weight")),
    )
    for name, rows, spread in (("g_proj", size, std * GATE), ("gk_proj", heads, std)):
        yield f"{ours}.{name}.weight", partial(_random, f"{ours}.{name}", rows, size, spread, seed)


def _shared_kv(
    config: YocoConfig, source: _Transformer, layers: list[int]
) -> Iterator[tuple[str, Get]]:
    """Keys and values of one layer with its norm; of several the mean, with norms folded in."""
    builder, single = "model.shared_kv_builder", len(layers) == 1

    def norm(layer: int) -> Tensor:
        return source.get(f"model.layers.{layer}.input_layernorm.weight")

    def mean(kind: str, what: str) -> Tensor:
        get = source.in_pairs if kind == "k_proj" else source.get
        total = torch.zeros(())
        for layer in layers:
            rows = get(f"model.layers.{layer}.self_attn.{kind}.{what}")
            total = total + (rows if single or what == "bias" else rows * norm(layer))
        return total / len(layers)

    yield (
        f"{builder}.kv_norm.weight",
        lambda: norm(layers[0]) if single else torch.ones(config.hidden_size),
    )
    for kind in ("k_proj", "v_proj"):
        for what in _kinds(config.cross.qkv_bias):
            yield f"{builder}.{kind}.{what}", partial(mean, kind, what)


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _random(name: str, rows: int, columns: int, std: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.empty(rows, columns).normal_(0.0, std, generator=generator)


def _cast(get: Get, dtype: torch.dtype) -> Tensor:
    return get().to(dtype).contiguous()


def _copy_text_files(source: Path, target: Path) -> None:
    """Tokenizer, special tokens, chat templates: all JSON and Jinja files but the model's own."""
    drop_text_files(target)
    for pattern in ("*.json", "*.jinja", "*/*.jinja"):
        for path in source.glob(pattern):
            copy = target / path.relative_to(source)
            if path.name not in _NOT_TEXT:
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
