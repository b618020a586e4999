"""`yocolm train`: hand a configuration and its overrides to the trainer."""

from __future__ import annotations

import argparse

from yocolm.train.settings import load_settings
from yocolm.train.stages import train


def run(arguments: argparse.Namespace) -> int:
    train(load_settings(arguments.config, arguments.overrides))
    return 0
