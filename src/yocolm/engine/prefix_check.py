"""Whether all that the prefix cache keeps account of agrees. For tests, after every operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yocolm.engine.prefix_nodes import TOKEN_BYTES

if TYPE_CHECKING:
    from yocolm.engine.prefix import PrefixCache


def check_cache(cache: PrefixCache) -> None:
    nodes = list(cache._root.below())
    assert cache._num_nodes == len(nodes) == sum(node is not None for node in cache._nodes)
    for node in nodes:
        references, cached = cache._pages.references(node.page), cache._cached(node.page)
        assert cache._nodes[node.page] is node and node.alive, "a node is unknown"
        assert len(node.key) == cache._page_size * TOKEN_BYTES, "a key is not of a full page"
        assert cache._idle[node.page] == (references == cached), "a page is idle, or not"
        assert references >= cached, "a page has lost the reference of the cache"
        assert node.parent is not None
        idle_above = cache._idle[node.parent.page]  # never of the root
        assert not idle_above or cache._idle[node.page], "in use without the pages above"
    assert cache._num_idle == sum(cache._idle) == sum(cache._idle[node.page] for node in nodes)
    tails: dict[int, int] = {}
    for node in (cache._root, *nodes):
        for tail, checkpoint in node.checkpoints.items():
            assert cache._checkpoints[checkpoint.slot] is checkpoint, "a checkpoint is unknown"
            assert checkpoint.node is node and checkpoint.tail == tail
            held = node.depth * cache._page_size + len(tail) // TOKEN_BYTES
            assert checkpoint.num_tokens == held, "a checkpoint is at the wrong place"
            assert cache._slots.references(checkpoint.slot) > 0, "a kept slot is free"
            if checkpoint.tail_page is not None:
                tails[checkpoint.tail_page] = tails.get(checkpoint.tail_page, 0) + 1
    assert tails == cache._tails, "tail pages are miscounted"
    assert all(cache._pages.references(page) >= cache._cached(page) for page in tails)
    checkpoints = {c for node in (cache._root, *nodes) for c in node.checkpoints.values()}
    assert len(cache._checkpoints) == len(checkpoints), "a checkpoint is lost"
    assert set(cache._order.states) == checkpoints, "states to evict are lost or foreign"
    leaves = {node for node in nodes if cache._idle[node.page] and not node.children}
    with_tail = {c for c in checkpoints if c.tail_page is not None}
    assert set(cache._order.pages) == leaves | with_tail, "pages to evict are lost or foreign"
    cache._order.check()
