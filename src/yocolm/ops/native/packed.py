"""Calls of native functions with all their arguments in one block of bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from struct import Struct

from yocolm.ops.native.library import native


def packed(name: str, slots: str) -> Callable[..., None]:
    """A function of the library that has a packed form (``packed.h``), to be called by position.

    ``slots`` has a letter for each argument: P for an address (0 for none), q for an integer or
    a bool, d for a number.
    """
    handle = native().handle
    assert handle is not None, "callers ask library.fits first"
    function, pack = handle[f"{name}_packed"], Struct(slots).pack
    function.argtypes, function.restype = (ctypes.c_char_p,), None
    return lambda *arguments: function(pack(*arguments))
