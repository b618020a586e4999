"""Tensor operations, reference and fast forms side by side. They import torch, nothing of yocolm."""
