"""The compiled library of this process: loaded once, or the reason why there is none."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from yocolm.ops.native.build import BuildError, build, supported

log = logging.getLogger("yocolm.native")
SWITCH = "YOCOLM_NATIVE"
OFF, ON = ("0", "off", "no", "false"), ("", "1", "on", "yes", "true", "auto")


class Native(NamedTuple):
    """The library, if there is one; its instruction set; which file it is, or why there is none."""

    handle: ctypes.CDLL | None
    isa: str | None
    reason: str


@lru_cache(maxsize=1)
def native() -> Native:
    """Load the library, compiling it first if need be. Never raises.

    The environment variable ``YOCOLM_NATIVE`` turns it off (0), or names an instruction set. Where
    it is off for any other reason, that is logged once as a warning.
    """
    wanted = os.environ.get(SWITCH, "").strip().lower()
    if wanted in OFF:
        return Native(None, None, f"{SWITCH}={wanted}")
    try:
        isa = _choose(wanted)
        path = build(isa)
        return Native(_load(path), isa, str(path))
    except (BuildError, OSError) as error:
        log.warning("native kernels are off: %s. PyTorch's operations are used, slower", error)
        return Native(None, None, str(error))


def _choose(wanted: str) -> str:
    found = supported()
    if not found:
        raise BuildError("none are written for this processor")
    if wanted in ON:
        return found[0]
    if wanted not in found:
        raise BuildError(f"{SWITCH}={wanted} is not 0, 1 nor one of {', '.join(found)}")
    return wanted


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
    """Whether native forms take ``x``: there are any, it is on the CPU, float32 or bfloat16, and
    there is nothing to trace."""
    return (
        x.is_cpu
        and x.dtype in (torch.bfloat16, torch.float32)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and native().handle is not None
    )
