"""`yocolm eval nll`: loss by position in long texts."""

from __future__ import annotations

import argparse

from yocolm.cli_eval import counter, show
from yocolm.eval.nll import nll


def run(arguments: argparse.Namespace) -> int:
    report = nll(
        arguments.model,
        arguments.paths,
        length=arguments.length,
        chunk=arguments.chunk,
        share=arguments.share,
        globs=arguments.glob,
        shuffle=arguments.shuffle,
        header=arguments.header,
        seed=arguments.seed,
        dtype=arguments.dtype,
        device=arguments.device,
        progress=counter("tokens"),
    )
    return show(report, arguments)
