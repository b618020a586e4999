"""The prefix cache, rule by rule: what goes when room is needed."""

import random

import pytest

from prefixes import Seq, World, tokens_of
from yocolm.engine.prefix_order import Ranking


@pytest.fixture
def world() -> World:
    return World()


class TestReclaimPages:
    def test_nothing_to_do(self, world: World) -> None:
        assert world.cache.reclaim_pages(world.pages.capacity)
        assert not world.cache.reclaim_pages(world.pages.capacity + 1)

    def test_too_many_evict_none(self, world: World) -> None:
        world.put("abcdefgh")
        seq = world.start("XXXX")
        assert not world.cache.can_reclaim(world.pages.capacity)
        assert not world.cache.reclaim_pages(world.pages.capacity)
        assert world.match("abcdefgh").length == 8
        assert world.cache.reclaim_pages(world.pages.capacity - 1)
        assert world.match("abcdefgh").shared == 0
        world.end(seq)

    def test_pages_without_checkpoint_go_first(self, world: World) -> None:
        world.put("abcdefgh")
        world.end(world.start("XXXXYYYY"))  # more recent, but leads to no state
        assert world.cache.reclaim_pages(world.pages.capacity - 2)
        assert (world.match("XXXXYYYY").shared, world.match("abcdefgh").length) == (0, 8)

    def test_losing_its_checkpoint_devalues_the_pages_above(self, world: World) -> None:
        slot = world.put("abcdefghijkl")
        world.put("XXXX")
        assert slot is not None
        world.cache.drop_state(slot)
        assert world.cache.reclaim_pages(world.pages.capacity - 1)
        assert (world.match("abcdefghijkl").shared, world.match("XXXX").length) == (0, 4)

    def test_page_of_a_checkpoint_takes_it_along(self, world: World) -> None:
        world.put("abcdefg")
        assert world.cache.reclaim_pages(world.pages.capacity)
        assert world.cache.num_states == 0
        assert world.slots.num_free == world.slots.capacity
        stats = world.cache.stats
        assert (stats.evicted_pages, stats.evicted_states) == (2, 1)

    def test_what_is_in_use_stays(self, world: World) -> None:
        world.put("abcdefghijkl")
        seq = world.start("abcdefghijklm", 12)
        world.put("abcdXXXX")
        assert world.cache.num_evictable == 1
        assert world.cache.reclaim_pages(world.pages.capacity - 4)
        assert world.match("abcdefghijkl").length == 12
        world.end(seq)

    def test_tail_above_pages_in_use_can_go(self, world: World) -> None:
        world.put("abcdef")
        seq = world.start("abcdXXXX")
        assert world.cache.num_evictable == 1
        assert world.cache.reclaim_pages(world.pages.capacity - 2)
        assert world.cache.num_states == 0
        world.end(seq)

    def test_tail_that_is_yet_to_be_copied_is_not_counted(self, world: World) -> None:
        world.put("ab")
        match = world.match("abc")
        world.cache.take(match)
        assert match.tail_page is not None
        world.pages.fork([match.tail_page])
        assert world.cache.num_evictable == 0
        assert not world.cache.reclaim_pages(world.pages.capacity)
        assert world.match("abc").length == 2
        world.pages.free([match.tail_page])
        assert world.cache.num_evictable == 1
        assert world.cache.reclaim_pages(world.pages.capacity)
        world.cache.check()

    def test_pages_without_checkpoint_go_first_however_recent(self, world: World) -> None:
        world.put("aaaa")
        world.put("bbbb")
        assert world.cache.reclaim_pages(world.pages.capacity - 1)  # the clock moves on
        world.end(world.start("XXXX"))
        assert world.cache.reclaim_pages(world.pages.capacity - 1)
        assert (world.match("XXXX").shared, world.match("bbbb").length) == (0, 4)

    def test_what_was_used_since_goes_later(self, world: World) -> None:
        for text in ("aaaa", "bbbb", "ccccc"):  # the last saves most
            world.put(text)
        assert world.cache.reclaim_pages(world.pages.capacity - 3)
        world.end(world.start("bbbbX"))
        assert world.cache.reclaim_pages(world.pages.capacity - 2)
        assert [world.match(t).length for t in ("aaaa", "bbbb", "ccccc")] == [0, 4, 0]

    def test_tail_used_since_goes_later(self, world: World) -> None:
        for text in ("a", "b", "cc"):
            world.put(text)
        assert world.cache.reclaim_pages(world.pages.capacity - 2)
        world.end(world.start("bX"))
        assert world.cache.reclaim_pages(world.pages.capacity - 1)
        assert [world.match(t).length for t in ("a", "b", "cc")] == [0, 1, 0]

    def test_seconds_saved_per_page_decide(self, world: World) -> None:
        world.put("aaaabbbbccccdddd")  # 16 seconds, four pages
        world.put("eeeee")  # 5 seconds, of which one page is a leaf and one a tail
        world.put("fff")  # 3 seconds, one page
        assert world.cache.reclaim_pages(world.pages.capacity - 6)
        assert world.match("fff").length == 0
        assert world.cache.reclaim_pages(world.pages.capacity - 5)
        assert world.match("aaaabbbbccccdddd").length == 0
        assert world.match("eeeee").length == 5
        assert world.cache.reclaim_pages(world.pages.capacity - 2)  # the rest leads to nothing
        assert world.match("eeeee").length == 5

    def test_leaf_saves_more_when_the_checkpoint_above_is_gone(self, world: World) -> None:
        first = world.put("aaaabb")  # a tail: the pages below go on without it
        world.put("aaaabbbb")  # saves two tokens of it
        world.put("XXXX")  # saves four
        assert first is not None
        world.cache.drop_state(first)
        world.end(world.start("YYYY"))
        assert world.cache.reclaim_pages(world.pages.capacity - 2)
        assert (world.match("aaaabbbb").length, world.match("XXXX").length) == (8, 0)

    def test_tail_saves_more_when_the_one_before_is_gone(self, world: World) -> None:
        first = world.put("aa")
        world.put("aaa")
        world.put("XX")
        assert first is not None
        world.cache.drop_state(first)
        assert world.cache.reclaim_pages(world.pages.capacity - 1)
        assert (world.match("aaa").length, world.match("XX").length) == (3, 0)

    def test_tail_that_is_yet_to_be_copied_is_passed_over(self, world: World) -> None:
        world.put("a")
        world.put("bb")
        match = world.match("a")
        assert match.tail_page is not None
        world.pages.fork([match.tail_page])
        assert world.cache.reclaim_pages(world.pages.capacity - 1)
        assert (world.match("a").length, world.match("bb").length) == (1, 0)
        world.pages.free([match.tail_page])
        assert world.cache.reclaim_pages(world.pages.capacity)

    def test_tail_of_a_page_that_is_a_node_is_copied_untold(self, world: World) -> None:
        seq = world.start("abcdefgh")
        short = Seq(seq.pages, None)
        short.cursor, _ = world.cache.extend(None, tokens_of("abcd"), seq.pages[:1])
        world.keep(short, "abcdef")
        match = world.match("abcdefX")
        held = world.cache.take(match)
        assert [match.tail_page] == seq.pages[1:]
        world.pages.fork(seq.pages[1:])
        world.end(seq)
        assert not world.cache.can_reclaim(world.pages.num_free + 1)
        world.pages.free(seq.pages[1:])  # copied
        assert world.cache.can_reclaim(world.pages.num_free + 1)
        assert (world.cache.num_evictable, world.cache.num_pages) == (1, 2)
        world.pages.fork(seq.pages[1:])
        assert not world.cache.can_reclaim(world.pages.num_free + 1)
        world.pages.free(seq.pages[1:])
        world.cache.release(held)
        assert world.cache.reclaim_pages(world.pages.capacity)

    def test_state_kept_after_its_pages_were_given_back(self, world: World) -> None:
        seq = world.start("abcd")
        world.end(seq)
        world.end(world.start("XXXX"))
        world.keep(seq, "abcd")
        assert world.cache.reclaim_pages(world.pages.capacity - 1)
        assert (world.match("XXXX").shared, world.match("abcd").length) == (0, 4)


class TestReclaimSlot:
    def fill(self, world: World, *texts: str) -> None:
        for text in texts:
            assert world.put(text) is not None
        assert world.slots.num_free == 0

    def test_free_slot_is_enough(self, world: World) -> None:
        world.put("abcd")
        assert world.cache.reclaim_slot()
        assert world.cache.num_states == 1

    def test_no_checkpoint_to_evict(self, world: World) -> None:
        world.slots.alloc(world.slots.capacity)
        assert not world.cache.reclaim_slot()

    def test_least_recently_used_of_equals(self) -> None:
        world = World(num_slots=4)
        self.fill(world, "aaaa", "bbbb", "cccc")
        assert world.cache.reclaim_slot()  # aaaa, and the clock moves on
        assert world.put("dddd") is not None
        world.end(world.start("bbbbX"))
        assert world.cache.reclaim_slot()
        assert [world.match(t).length for t in ("aaaa", "bbbb", "cccc", "dddd")] == [0, 4, 0, 4]
        world.cache.check()

    def test_least_seconds_saved(self) -> None:
        world = World(num_slots=4)
        self.fill(world, "aaaabbbbcccc", "aaaabbbbccccd", "eeee")
        assert world.cache.reclaim_slot()
        assert world.match("aaaabbbbccccd").length == 12  # from there it is one token only

    def test_saves_more_when_the_one_before_is_gone(self) -> None:
        world = World(num_slots=4)
        first = world.put("aaaabbbb")
        self.fill(world, "aaaabbbbc", "eeee")
        assert first is not None
        world.cache.drop_state(first)
        world.slots.alloc(1)
        assert world.cache.reclaim_slot()
        assert (world.match("aaaabbbbc").length, world.match("eeee").length) == (9, 0)

    def test_what_is_worth_more_goes_too_in_the_end(self) -> None:
        world = World(num_slots=3)
        self.fill(world, "aaaabbbbcccc", "dddd")
        for text in ("eeee", "ffff", "gggg", "hhhh"):  # each one's clock is 4 further
            assert world.cache.reclaim_slot()
            world.put(text)
        assert (world.match("aaaabbbbcccc").length, world.match("gggg").length) == (0, 4)

    def test_kept_again_is_used_anew(self) -> None:
        world = World(num_slots=5)
        for text in ("aaaa", "bbbb", "cccc"):
            world.put(text)
        world.put("bbbb")  # is there
        assert world.put("dddd") is not None
        for _ in range(2):
            assert world.cache.reclaim_slot()
            world.slots.alloc(1)
        assert [world.match(t).length for t in ("aaaa", "bbbb", "cccc", "dddd")] == [0, 4, 0, 4]

    def test_tail_on_the_way_counts_as_the_one_before(self) -> None:
        world = World(num_slots=4)
        self.fill(world, "aaaabb", "aaaabbbbcccc", "ddddddd")  # saving 6, 6 and 7 seconds
        assert world.cache.reclaim_slot()
        world.slots.alloc(1)
        assert world.cache.reclaim_slot()
        world.slots.alloc(1)
        assert world.match("ddddddd").length == 0
        assert world.match("aaaabbbbcccc").length == 12  # all of the 12 by now

    def test_pages_stay_when_the_state_goes(self) -> None:
        world = World(num_slots=2)
        self.fill(world, "aaaabbbbc")
        assert world.cache.reclaim_slot()
        match = world.match("aaaabbbbc")
        assert (match.length, match.shared) == (0, 8)  # never a hit without its state
        assert world.cache.num_evictable == world.cache.num_pages == 2

    def test_slot_that_is_yet_to_be_copied_is_passed_over(self) -> None:
        world = World(num_slots=3)
        self.fill(world, "aaaa", "bbbbbbbb")
        slot = world.match("aaaa").slot
        assert slot is not None
        world.slots.fork([slot])
        assert world.cache.reclaim_slot()
        assert (world.match("aaaa").length, world.match("bbbbbbbb").length) == (4, 0)
        world.slots.alloc(1)
        assert not world.cache.reclaim_slot()
        assert world.match("aaaa").length == 4
        world.slots.free([slot])
        assert world.cache.reclaim_slot()
        world.cache.check()


def test_ranking_equals_a_sorted_list() -> None:
    draw = random.Random(1)
    ranking: Ranking[int] = Ranking()
    expected: dict[int, tuple[float, int]] = {}
    for serial in range(3000):
        item = draw.randrange(30)
        if draw.random() < 0.7:
            expected.pop(item, None)
            expected[item] = (float(draw.randrange(5)), serial)
            ranking.put(item, expected[item][0])
        elif draw.random() < 0.5:
            expected.pop(item, None)
            ranking.discard(item)
        else:
            lowest = min(expected, key=lambda item: expected[item], default=None)
            popped = ranking.pop(lambda item: expected[item][0])
            assert popped == (None if lowest is None else (expected.pop(lowest)[0], lowest))
        ranking.check()
        assert set(ranking) == set(expected) and len(ranking) == len(expected)
        assert len(ranking._heap) <= 2 * 30 + 65  # outdated entries are dropped in time


def test_ranking_puts_back_what_is_worth_more_by_now() -> None:
    ranking: Ranking[str] = Ranking()
    for priority, item in enumerate("abc"):
        ranking.put(item, priority)
    worth = {"a": 1.5, "b": 0.0, "c": 9.0}
    assert [ranking.pop(worth.__getitem__) for _ in range(4)] == [
        (1, "b"),
        (1.5, "a"),
        (9.0, "c"),
        None,
    ]
