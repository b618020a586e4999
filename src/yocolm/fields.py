"""Reading the fields of a JSON configuration, and the checks that its values share.

Everything raises ConfigError naming the field, its value and what is allowed. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yocolm.errors import ConfigError

TokenIds = int | tuple[int, ...] | None

# Written by transformers into every config.json, or read by training code only.
HARMLESS = frozenset(
    """
    architectures auto_map transformers_version torch_dtype dtype use_cache return_dict
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
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{self._owner}: {name} is {value!r}; it must be a number")
        return float(value)

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
    return value


def parse_token_id(value: Any) -> int | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return None if value is None else parse_integer("a token id", value)


def parse_token_ids(value: Any) -> TokenIds:
    if isinstance(value, (list, tuple)):
        return tuple(parse_integer("eos_token_id", item) for item in value)
    return parse_token_id(value)


def split_heads(owner: str, hidden: int, heads: int) -> int:
    if heads < 1 or hidden % heads:
        raise ConfigError(f"{owner}: {heads} heads do not divide hidden_size {hidden}")
    return hidden // heads


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
