"""Tensor operations, reference and fast forms side by side. They import torch, not yocolm."""
