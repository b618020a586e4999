"""Shared by all tests: seeds, threads, and the folders that tests read."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

# A shell's background jobs ignore it, their children too, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "OMP_NUM_THREADS" not in os.environ:
    # More threads than this only add noise and waiting to tensors as small as the tests'.
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of the golden checkpoints."""
    return Path(__file__).parent / "golden" / "data"
