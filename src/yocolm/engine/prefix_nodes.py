"""What the prefix cache is made of: nodes, which are pages, and checkpoints, which are states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

TOKEN_BYTES = 8
"""Keys are the bytes of int64 tokens: equal keys are equal tokens."""


@dataclass(eq=False, slots=True)
class Node:
    """A cached full page: the tokens of ``key`` behind those of all its ancestors.

    The root stands for no tokens; its ``page`` is never handed out. ``since`` is the clock of the
    ranking of pages when the page was last given back.
    """

    parent: Node | None
    key: bytes
    page: int
    depth: int
    since: float
    children: dict[bytes, Node] = field(default_factory=dict)
    checkpoints: dict[bytes, Checkpoint] = field(default_factory=dict)
    alive: bool = True

    def longest(self, following: bytes, at_most: int) -> Checkpoint | None:
        """The checkpoint here with the longest tail, of up to ``at_most`` tokens, in which
        ``following`` begins."""
        if not self.checkpoints:
            return None
        for length in range(min(at_most, len(following) // TOKEN_BYTES), -1, -1):
            found = self.checkpoints.get(following[: length * TOKEN_BYTES])
            if found is not None:
                return found
        return None

    def below(self) -> Iterator[Node]:
        """All nodes below this one."""
        todo: list[Node] = [self]
        while todo:
            parent = todo.pop()
            for key, node in parent.children.items():
                assert node.parent is parent and node.key == key and node.depth == parent.depth + 1
                todo.append(node)
                yield node


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A kept state: that in ``slot``, after the pages down to ``node`` and the tokens of ``tail``.

    base: the boundary from which its tokens would be computed without it; slot_since, page_since:
    the clocks of the rankings of states and of pages when it was last used.
    """

    node: Node
    tail: bytes
    num_tokens: int
    slot: int
    tail_page: int | None
    base: int = 0
    slot_since: float = 0.0
    page_since: float = 0.0

    def nearest(self) -> int:
        """The longest boundary below its own at which a state is kept, 0 if there is none."""
        node = self.node
        found = node.longest(self.tail, len(self.tail) // TOKEN_BYTES - 1)
        while found is None and node.parent is not None:
            key, node = node.key, node.parent
            if node.checkpoints:
                found = node.longest(key, len(key) // TOKEN_BYTES - 1)
        return 0 if found is None else found.num_tokens


Cursor = Node
"""A place in the cache: all tokens up to the end of a full page. None is the place before all."""


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache has for a prompt. Valid until the cache is next changed.

    length: tokens that need not be computed; 0 is a miss. pages: the full ones below it.
    tail_page: to be copied, its first ``length % page_size`` tokens are of use. slot: the state
    at ``length``, to be copied; None for a model without, or a miss.
    shared: tokens, in whole pages, that are cached from the first on, whether or not a state is
    kept there: where the prompt parts from those before it. ``limit`` does not bound it.
    cursor: the place behind ``pages``. num_queried: the tokens of the prompt.
    """

    length: int
    pages: tuple[int, ...]
    tail_page: int | None
    slot: int | None
    shared: int
    cursor: Cursor | None = None
    num_queried: int = 0


@dataclass(slots=True)
class PrefixStats:
    """Totals since the start. ``queries`` and ``hits`` count requests, the rest what it says."""

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    evicted_states: int = 0
