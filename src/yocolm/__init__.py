"""yocolm: train, load and run decoder-decoder (YOCO) language models.

Its names are imported on first use, so that `import yocolm` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yocolm.engine.guided import GuidedParams
    from yocolm.engine.llm import LLM
    from yocolm.engine.sampling_params import PoolingParams, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "GuidedParams", "PoolingParams", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "yocolm.engine.llm",
    "GuidedParams": "yocolm.engine.guided",
    "PoolingParams": "yocolm.engine.sampling_params",
    "SamplingParams": "yocolm.engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'yocolm' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
