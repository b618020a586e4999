"""Model configurations: frozen values, and their Hugging Face `config.json` form.

No torch here. `parse_config` reads the dictionary of a `config.json`, `to_hf` writes it back with
every key that the other implementations of the architecture expect. A field that would change the
computation and is not supported is refused by name; nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yocolm.configs.gemma import AttentionConfig, GemmaConfig, LayerType
from yocolm.configs.gemma3n import Gemma3nConfig
from yocolm.configs.gemma4 import ExpertsConfig, Gemma4Config
from yocolm.configs.llama import LlamaConfig
from yocolm.configs.rope import RopeConfig
from yocolm.configs.yoco import CrossConfig, RetentionConfig, WindowConfig, YocoConfig
from yocolm.errors import ConfigError

ModelConfig = YocoConfig | LlamaConfig | Gemma3nConfig | Gemma4Config

__all__ = [
    "AttentionConfig",
    "CrossConfig",
    "ExpertsConfig",
    "Gemma3nConfig",
    "Gemma4Config",
    "GemmaConfig",
    "LayerType",
    "LlamaConfig",
    "ModelConfig",
    "RetentionConfig",
    "RopeConfig",
    "WindowConfig",
    "YocoConfig",
    "parse_config",
]

_FAMILIES: dict[str, type[ModelConfig]] = {
    YocoConfig.model_type: YocoConfig,
    LlamaConfig.model_type: LlamaConfig,
    **dict.fromkeys(("gemma3n", "gemma3n_text"), Gemma3nConfig),
    **dict.fromkeys(
        ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), Gemma4Config
    ),
}


def parse_config(data: Mapping[str, Any]) -> ModelConfig:
    """Builds the configuration that a `config.json` dictionary describes.

    Raises ConfigError naming an unknown `model_type` together with the known ones.
    """
    name = data.get("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ConfigError(
            f"model_type {name!r} in config.json is not supported; known model types: {known}"
        )
    return family.from_hf(data)
