"""`yocolm train`: hand a configuration and its overrides to the trainer."""

from __future__ import annotations

import argparse

from yocolm.train import trainer


def run(arguments: argparse.Namespace) -> int:
    trainer.main(str(arguments.config), arguments.overrides)
    return 0
