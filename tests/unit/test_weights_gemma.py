"""Weights of Gemma 3n and Gemma 4: transformers' names, and what a file may have or lack."""

import warnings
from typing import Any

import pytest
import torch
import transformers

from yocolm.config import GemmaConfig, ModelConfig
from yocolm.models.layouts import weight_layout
from yocolm.models.presets import PRESETS, preset
from yocolm.models.registry import build_model

GEMMA = [name for name in PRESETS if name.startswith("gemma")]


def their_module(config: ModelConfig) -> Any:
    """transformers' model without memory."""
    fields = config.to_hf()
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto = transformers.AutoConfig.for_model(**fields)
        return transformers.AutoModelForCausalLM.from_config(auto)


@pytest.mark.parametrize("name", GEMMA)
def test_the_layout_is_that_of_both_modules(name: str) -> None:
    config = preset(name)
    assert isinstance(config, GemmaConfig)
    layout = weight_layout(config)
    parameters = dict(build_model(config, "meta", torch.float32).named_parameters())
    assert layout.keys() == parameters.keys()
    for key, parts in layout.items():
        assert sum(part.shape[0] for part in parts) == parameters[key].shape[0], key
        assert all(part.shape[1:] == parameters[key].shape[1:] for part in parts), key
    ours = {part.name: part.shape for parts in layout.values() for part in parts}
    theirs = {key: tuple(tensor.shape) for key, tensor in their_module(config).state_dict().items()}
    del theirs["lm_head.weight"]  # tied
    assert ours == theirs
