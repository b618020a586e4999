import random

import pytest

from yocolm.engine.swap_space import SwapSpace
from yocolm.errors import ConfigError


def test_numbers_start_at_0_and_the_lowest_free_one_comes_first() -> None:
    space = SwapSpace(5, 2)
    assert space.alloc_blocks(4) == [0, 1, 2, 3]
    space.free_blocks([3, 1])
    assert space.alloc_blocks(3) == [1, 3, 4]
    assert (space.alloc_place(), space.alloc_place(), space.alloc_place()) == (0, 1, None)
    space.free_place(0)
    assert space.alloc_place() == 0
    assert (space.num_free_blocks, space.num_free_places) == (0, 0)
    space.check()


def test_too_large_an_allocation_changes_nothing() -> None:
    space = SwapSpace(3, 0)
    assert space.alloc_blocks(4) is None and space.alloc_place() is None
    assert space.num_free_blocks == 3 and space.alloc_blocks(0) == []


def test_misuse_is_caught() -> None:
    space = SwapSpace(3, 1)
    for free in (lambda: space.free_blocks([0]), lambda: space.free_place(0)):
        with pytest.raises(AssertionError, match="freed twice"):
            free()
    for free in (lambda: space.free_blocks([-1]), lambda: space.free_place(1)):
        with pytest.raises(AssertionError, match="there is no"):
            free()
    space.alloc_blocks(1)
    space._blocks._taken.clear()
    with pytest.raises(AssertionError, match="differ from the unused"):
        space.check()


@pytest.mark.parametrize(
    ("space", "page", "slot", "seqs", "expected"),
    [
        (1000, 10, 0, 8, (100, 8)),  # a Transformer: its places take nothing
        (1000, 0, 10, 8, (0, 8)),  # nothing that grows
        (1000, 0, 400, 8, (0, 2)),
        (1000, 10, 20, 8, (84, 8)),  # as many places as sequences, blocks in the rest
        (1000, 10, 100, 8, (50, 5)),  # places in no more than half
        (1000, 10, 700, 8, (30, 1)),  # but one, whatever it takes
        (11, 9, 2, 8, (1, 1)),
        (1000, 0, 0, 8, (0, 0)),
        (0, 10, 20, 8, (0, 0)),
    ],
)
def test_what_fits(space: int, page: int, slot: int, seqs: int, expected: tuple) -> None:
    sized = SwapSpace.sized(space, page, slot, seqs)
    assert (sized.num_blocks, sized.num_places) == expected


def test_it_never_takes_more_than_it_was_given_and_always_holds_a_sequence() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        page, slot, seqs = draw.randint(1, 50), draw.randint(1, 50), draw.randint(1, 9)
        space = draw.randint(page + slot, 500)
        sized = SwapSpace.sized(space, page, slot, seqs)
        assert sized.num_blocks >= 1 and 1 <= sized.num_places <= seqs
        assert sized.num_blocks * page + sized.num_places * slot <= space


def test_sizes_without_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="29 bytes holds no sequence.*at least 30"):
        SwapSpace.sized(29, 10, 20, 8)
    with pytest.raises(ConfigError, match="-1 places"):
        SwapSpace(1, -1)


def test_random_use_leaks_nothing() -> None:
    draw = random.Random(1)
    space, blocks, places = SwapSpace(40, 6), set[int](), set[int]()
    for _ in range(1500):
        if draw.random() < 0.5:
            count = draw.randint(0, 8)
            got = space.alloc_blocks(count)
            assert (got is None) == (count > 40 - len(blocks))
            assert not blocks.intersection(got or ())
            blocks.update(got or ())
            place = space.alloc_place()
            assert (place is None) == (len(places) == 6)
            if place is not None:
                assert place not in places
                places.add(place)
        else:
            back = draw.sample(sorted(blocks), min(len(blocks), draw.randint(0, 8)))
            space.free_blocks(back)
            blocks.difference_update(back)
            if places:
                space.free_place(place := draw.choice(sorted(places)))
                places.remove(place)
        space.check()
        assert (space.num_free_blocks, space.num_free_places) == (40 - len(blocks), 6 - len(places))
