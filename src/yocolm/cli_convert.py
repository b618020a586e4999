"""`yocolm convert`: from the paper authors' checkpoint format to the native one."""

from __future__ import annotations

import argparse

from yocolm.models.authors import convert
from yocolm.models.registry import DTYPES


def run(arguments: argparse.Namespace) -> int:
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    result = convert(arguments.source, arguments.destination, dtype)
    print(f"wrote {result.num_tensors} tensors to {arguments.destination}")
    if result.missing_tokenizer is not None:
        print(f"without a tokenizer: {result.missing_tokenizer}")
    return 0
