import pytest

from yocolm.engine.pages import SCRATCH, Copy, PagePool, PendingCopies, SlotPool
from yocolm.errors import ConfigError


def test_scratch_is_never_handed_out() -> None:
    for pool in (PagePool(5, 16), SlotPool(5)):
        assert pool.size == 5 and pool.capacity == pool.num_free == 4
        assert pool.alloc(4) == [1, 2, 3, 4]
        assert pool.references(SCRATCH) == 0
        pool.check()


def test_too_large_an_allocation_changes_nothing() -> None:
    pool = PagePool(4, 16)
    assert pool.alloc(4) is None
    assert pool.num_free == 3
    assert pool.alloc(0) == []


def test_lowest_free_number_comes_first() -> None:
    pool = PagePool(7, 16)
    pool.alloc(6)
    pool.free([5, 2, 4])
    assert pool.alloc(2) == [2, 4]


def test_shared_number_is_free_when_its_last_owner_gives_it_back() -> None:
    pool = PagePool(4, 16)
    assert pool.alloc(2) == [1, 2]
    pool.fork([1])
    pool.free([1, 2])
    assert (pool.references(1), pool.references(2), pool.num_free) == (1, 0, 2)
    pool.check()
    pool.free([1])
    assert pool.num_free == pool.capacity


def test_misuse_is_caught() -> None:
    pool = PagePool(4, 16)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([1])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.fork([1])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([SCRATCH])


def test_check_sees_a_lost_number() -> None:
    pool = PagePool(4, 16)
    pool.alloc(1)
    pool._references[1] = 0
    with pytest.raises(AssertionError, match="differ from the unused"):
        pool.check()


def test_sizes_without_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 slots are too few"):
        SlotPool(1)
    with pytest.raises(ConfigError, match="page_size=0"):
        PagePool(4, 0)


def test_pages_for() -> None:
    pool = PagePool(4, 16)
    assert [pool.pages_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


class TestPendingCopies:
    def test_source_is_kept_until_the_copy_is_issued(self) -> None:
        pages, slots = PagePool(4, 16), SlotPool(4)
        copies = PendingCopies(pages, slots)
        pages.alloc(2)
        copies.add("sibling", Copy("page", 1, 2))
        pages.free([1])  # its owner ended
        assert pages.alloc(2) is None
        assert copies.issue() == (Copy("page", 1, 2),)
        assert pages.references(1) == 0 and pages.num_free == 2
        assert copies.issue() == ()

    def test_copy_is_dropped_with_the_owner_of_its_destination(self) -> None:
        pages, slots = PagePool(4, 16), SlotPool(4)
        copies = PendingCopies(pages, slots)
        slots.alloc(3)
        copies.add("first", Copy("slot", 1, 2))
        copies.add("second", Copy("slot", 1, 3))
        assert copies.references() == {("slot", 1): 2}
        copies.drop("first")
        assert slots.references(1) == 2
        assert copies.issue() == (Copy("slot", 1, 3),)
        assert slots.references(1) == 1
