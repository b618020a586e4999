"""Tensors in huge pages: apart from each other, aligned, and freed with the last that uses them."""

from __future__ import annotations

import pytest
import torch

from yocolm.ops.native import memory
from yocolm.ops.native.memory import empty_huge


def test_tensors_never_overlap(monkeypatch: pytest.MonkeyPatch):
    """Small ones are cut from slabs, going on in the next; large ones have their own."""
    monkeypatch.setattr(memory, "SLAB", memory.HUGE_PAGE)
    monkeypatch.setattr(memory, "_slabs", memory.Slabs())
    shapes = [(3, 5), (1,), (0, 4), (100, 1001), (301, 1000), (301, 1000), (2, 3 << 20), (7,)]
    tensors = [empty_huge(shape, torch.bfloat16) for shape in shapes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape and tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == number).all()


def test_memory_outlives_the_other_tensors_of_its_slab():
    kept = empty_huge((1000,), torch.float32).fill_(1)
    for _ in range(50):
        empty_huge((1 << 20,), torch.float32).fill_(2)
    assert (kept == 1).all()


def test_made_in_inference_mode_it_serves_outside_of_it():
    with torch.inference_mode():
        made = empty_huge((4,), torch.float32)
    assert not made.is_inference()
