"""Kernels for CUDA in Triton. They take tensors only, so that steps can be captured as graphs.

Triton comes with PyTorch's builds for CUDA; the modules that import it are loaded when a tensor is
there for them.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("triton") is not None


def fits(x: Tensor) -> bool:
    """Whether the kernels of this package take ``x``: on CUDA, in a dtype that they know."""
    return x.is_cuda and x.element_size() <= 4 and _installed()


@cache
def kernels(name: str) -> Any:
    """The module ``name`` of this package."""
    return import_module(f"{__name__}.{name}")
