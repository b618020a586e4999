"""Parameters and FLOPs of the parts that networks are made of; `spec.py` adds them up. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Parameters of a part of the network: in matrices (each used once a token) and beside them."""

    matrix: int = 0
    other: int = 0

    def __add__(self, more: Block) -> Block:
        return Block(self.matrix + more.matrix, self.other + more.other)

    def __mul__(self, times: int) -> Block:
        return Block(self.matrix * times, self.other * times)

    @property
    def params(self) -> int:
        return self.matrix + self.other

    @property
    def flops(self) -> int:
        return 2 * self.matrix


def linear(inputs: int, outputs: int, bias: bool = False) -> Block:
    return Block(inputs * outputs, outputs if bias else 0)


def norm(size: int) -> Block:
    return Block(other=size)


def product(multiplications: int) -> Block:
    """A further product with a matrix that is counted elsewhere."""
    return Block(multiplications, -multiplications)


def mlp(size: int, width: int, bias: bool = False) -> Block:
    """Norm, gate, up and down projection."""
    return norm(size) + linear(size, 2 * width, bias) + linear(width, size, bias)


def altup(size: int, streams: int) -> Block:
    """Router (used twice), coefficients of prediction and correction.

    Mixing the streams by these is a pass over memory rather than arithmetic, and not counted.
    """
    learned = linear(size, streams) + linear(streams, streams**2) + linear(streams, streams)
    return learned + norm(2 * size) + product(size * streams)


def laurel(size: int, rank: int) -> Block:
    return linear(size, rank) + linear(rank, size) + norm(size)
