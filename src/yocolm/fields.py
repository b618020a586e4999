"""JSON files of a model folder, the reading of their fields, and checks that values share.

Fields raise ConfigError naming the field, its value and what is allowed. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from yocolm.errors import CheckpointError, ConfigError

TokenIds = int | tuple[int, ...] | None

# Far above every model there is: a typing error must not fill the memory with layers.
_LIMITS = {
    "num_hidden_layers": 10_000,
    "num_self_decoder_layers": 10_000,
    "vocab_size": 10_000_000,
    "max_position_embeddings": 2**31 - 1,
    "window_size": 2**31 - 1,
    "sliding_window": 2**31 - 1,
    "vocab_size_per_layer_input": 10_000_000,
    "altup_num_inputs": 1000,
    "num_experts": 100_000,
}
_LIMITS |= dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 1_000_000)
_HEADS = ("num_heads", "num_v_heads", "num_kv_heads", "num_attention_heads", "num_key_value_heads")
_LIMITS |= dict.fromkeys(_HEADS, 1_000_000)
_WIDTHS = ("hidden_size_per_layer_input", "moe_intermediate_size", "laurel_rank", "global_head_dim")
_LIMITS |= dict.fromkeys((*_WIDTHS, "num_global_key_value_heads"), 1_000_000)

# Written by transformers into every config.json, or read by training code only.
HARMLESS = frozenset(
    """
    architectures auto_map transformers_version torch_dtype dtype use_cache cache_implementation
    return_dict
    output_attentions output_hidden_states attn_implementation tokenizer_class name_or_path
    problem_type id2label label2id task_specific_params finetuning_task decoder_start_token_id
    sep_token_id chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention
    tie_encoder_decoder pruned_heads torchscript use_bfloat16 tf_legacy_loss prefix
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    attention_dropout pretraining_tp is_llama_config use_parallel_residual gradient_checkpointing
    """.split()
)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError if it is absent or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(data).__name__}")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes an indented JSON object, ending in a newline."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


class Fields:
    """Takes fields out of a dictionary and, at the end, refuses those nobody asked for."""

    def __init__(self, owner: str, data: Mapping[str, Any]) -> None:
        self._owner = owner
        self._data = dict(data)
        self._taken: set[str] = {"model_type"}

    def take(self, name: str, default: Any) -> Any:
        self._taken.add(name)
        return self._data.get(name, default)

    def skip(self, *names: str) -> None:
        self._taken.update(names)

    def integer(self, name: str, default: int) -> int:
        return parse_integer(name, self._or_default(name, default))

    def number(self, name: str, default: float) -> float:
        value = self._or_default(name, default)
        return parse_number(f"{self._owner}: {name}", value)

    def heads(self, name: str, default: int, hidden: int) -> tuple[int, int]:
        """Number of heads and the width of each, which together make `hidden`."""
        heads = self.integer(name, default)
        if heads < 1 or hidden % heads:
            raise ConfigError(
                f"{self._owner}: {heads} heads do not divide hidden_size {hidden}"
                + self.missing(name, default)
            )
        return heads, hidden // heads

    def missing(self, name: str, default: object) -> str:
        """For the end of a message: that a value was not given but is the format's default."""
        if self._data.get(name) is not None:
            return ""
        return f"; {name} is not given, and {default} is the format's default: give {name}"

    def boolean(self, name: str, default: bool) -> bool:
        value = self._or_default(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self._owner}: {name} is {value!r}; it must be true or false")
        return value

    def expect(self, name: str, default: str, allowed: tuple[str, ...]) -> None:
        value = self.take(name, default)
        if value not in allowed:
            raise ConfigError(
                f"{self._owner}: {name} {value!r} is not supported; allowed: {', '.join(allowed)}"
            )

    def refuse_set(self, name: str, why: str) -> None:
        value = self.take(name, None)
        if value is not None:
            raise ConfigError(f"{self._owner}: {name} is {value!r}; {why}; only null is accepted")

    def _or_default(self, name: str, default: Any) -> Any:
        """Files spell a field that is not set as null."""
        value = self.take(name, None)
        return default if value is None else value

    def finish(self) -> None:
        unknown = {
            name: value
            for name, value in self._data.items()
            if name not in self._taken and name not in HARMLESS and not name.startswith("_")
        }
        # A feature that is switched off computes what we compute without it.
        active = sorted(name for name, value in unknown.items() if value not in (None, False, {}))
        if active:
            raise ConfigError(
                f"{self._owner}: unknown field {', '.join(active)} in the configuration could "
                "change what the model computes; remove it if it is only a note"
            )


def parse_mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; it must be a dictionary")
    return value


def parse_integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number")
    limit = _LIMITS.get(name)
    if limit is not None and value > limit:
        shown = value if value < 10**30 else "above 10^30"
        raise ConfigError(f"{name} is {shown}; it must be at most {limit}")
    return value


def parse_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} is {value!r}; it must be a number")
    if not abs(value) < 1e300:
        shown = value if isinstance(value, float) else "a number of more than 300 digits"
        raise ConfigError(f"{name} is {shown}; it must be finite and below 1e300")
    return float(value)


def parse_token_id(name: str, value: Any) -> int | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return None if value is None else parse_integer(name, value)


def parse_token_ids(name: str, value: Any) -> TokenIds:
    if isinstance(value, (list, tuple)):
        return tuple(parse_integer(name, item) for item in value)
    return parse_token_id(name, value)


def parse_halves(fields: Fields) -> tuple[int, int]:
    """Layers of a YOCO model in all, and those of its self-decoder; both halves need one."""
    layers = fields.integer("num_hidden_layers", 21)
    own = fields.integer("num_self_decoder_layers", 10)
    if layers >= 1 and not 1 <= own < layers:
        raise ConfigError(
            f"num_self_decoder_layers is {own} of {layers} layers; both decoders need at least one "
            f"layer{fields.missing('num_self_decoder_layers', 10)}"
            f"{fields.missing('num_hidden_layers', 21)}"
        )
    return layers, own


def refuse_mixer(fields: Fields, kind: object) -> NoReturn:
    raise ConfigError(
        f"self_decoder_attn type {kind!r} is not supported; known types: gated_retention, swa"
        + fields.missing("type", kind)
        + ", for example self_decoder_attn: {type: gated_retention, num_heads: 4}"
    )


def check_positive(owner: str, **values: int) -> None:
    for name, value in values.items():
        if parse_integer(name, value) < 1:
            raise ConfigError(f"{owner}: {name} is {value}; it must be at least 1")


def check_even(owner: str, head_dim: int) -> None:
    if head_dim % 2:
        raise ConfigError(f"{owner}: head_dim is {head_dim}; RoPE needs an even one")


def check_grouped(owner: str, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ConfigError(f"{owner}: {kv_heads} KV heads do not divide {heads} query heads")


def check_trunk(config: Any) -> None:
    """What every family's configuration has: sizes of at least 1 and a norm's epsilon."""
    check_positive(
        config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        max_position_embeddings=config.max_position_embeddings,
    )
    if not config.norm_eps >= 0:
        raise ConfigError(f"norm_eps is {config.norm_eps}; it must not be negative")


def ids_to_json(ids: TokenIds) -> int | list[int] | None:
    return list(ids) if isinstance(ids, tuple) else ids


def parse_rope_theta(fields: Fields) -> float:
    """RoPE's base in either spelling of transformers; a scaling of RoPE is refused by name."""
    theta = fields.take("rope_theta", None)
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.take(name, None)
        if rope is None:
            continue
        inner = Fields(name, parse_mapping(name, rope))
        kind = inner.take("rope_type", inner.take("type", "default"))
        if kind != "default":
            raise ConfigError(
                f"llama: {name} of type {kind!r} is not supported; only 'default' (no scaling) is"
            )
        theta = inner.take("rope_theta", theta)
        inner.finish()
    return parse_number("llama: rope_theta", 10000.0 if theta is None else theta)


def default_width(size: Any, ratio: Any, hidden: int) -> int:
    if size is not None:
        return parse_integer("intermediate_size", size)
    ratio = 4 if ratio is None else ratio
    if not 0 < parse_number("hidden_ratio", ratio) <= 10_000:
        raise ConfigError(f"hidden_ratio is {ratio}; it must be above 0 and at most 10000")
    # Rounded up to a multiple of 256, as the reference implementation does.
    return 256 * math.ceil(int(hidden * ratio * 2 / 3) / 256)
