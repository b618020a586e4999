"""The compiled library of this process: loaded once, or the reason why there is none."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yocolm.ops.native.build import BuildError, build, supported

SWITCH = "YOCOLM_NATIVE"
OFF = ("0", "off", "no", "false")


class Native(NamedTuple):
    """The library, if there is one, and a line that says which, or why not."""

    handle: ctypes.CDLL | None
    isa: str | None
    reason: str


@lru_cache(maxsize=1)
def native() -> Native:
    """Load the library, compiling it first if need be. Never raises.

    The environment variable ``YOCOLM_NATIVE`` turns it off (0), or names an instruction set.
    """
    wanted = os.environ.get(SWITCH, "").strip().lower()
    if wanted in OFF:
        return Native(None, None, f"off: {SWITCH}={wanted}")
    found = supported()
    if wanted and wanted not in found:
        return Native(
            None, None, f"off: {SWITCH}={wanted} is not one of {', '.join(found)} of this machine"
        )
    if not found:
        return Native(None, None, "off: no kernels for this machine's instruction set")
    isa = wanted or found[0]
    try:
        path = build(isa)
        return Native(_load(path), isa, f"{isa}, {path}")
    except (BuildError, OSError) as error:
        return Native(None, None, f"off: {error}")


def _load(path: Path) -> ctypes.CDLL:
    """OpenMP's functions are torch's own, so that there is one pool of threads."""
    folder = Path(torch.__file__).parent / "lib"
    runtimes = [str(p) for name in ("libgomp*", "libomp*", "libiomp5*") for p in folder.glob(name)]
    for runtime in runtimes or ["libgomp.so.1"]:
        ctypes.CDLL(runtime, ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def function(name: str, *argtypes: Any) -> Any:
    """A function of the library with its argument types, or None where there is no library."""
    handle = native().handle
    if handle is None:
        return None
    found = getattr(handle, name)
    found.argtypes, found.restype = argtypes, None
    return found


def fits(x: Tensor) -> bool:
    """Whether native forms take ``x``: on the CPU, float32 or bfloat16, and nothing to trace."""
    return (
        x.is_cpu
        and x.dtype in (torch.bfloat16, torch.float32)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )
