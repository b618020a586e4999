"""The prefix cache, rule by rule: what is found, and what is kept."""

from dataclasses import replace

import numpy as np
import pytest

from prefixes import SIZE, Seq, World, tokens_of


@pytest.fixture
def world() -> World:
    return World()


class TestMatch:
    def test_nothing_is_cached(self, world: World) -> None:
        match = world.match("abcdefgh")
        assert (match.length, match.pages, match.slot, match.shared) == (0, (), None, 0)
        assert world.match("").length == 0

    def test_pages_without_a_state_are_no_hit(self, world: World) -> None:
        world.end(world.start("abcdefgh"))
        match = world.match("abcdefgh")
        assert (match.length, match.pages, match.shared) == (0, (), 8)

    def test_state_at_a_page_boundary(self, world: World) -> None:
        slot = world.put("abcdefgh")
        match = world.match("abcdefghij")
        assert (match.length, match.slot, match.tail_page, match.shared) == (8, slot, None, 8)
        assert len(match.pages) == 2

    @pytest.mark.parametrize("limit", [-1, 0, 7])
    def test_limit_below_the_boundary(self, world: World, limit: int) -> None:
        world.put("abcdefgh")
        match = world.match("abcdefgh", limit)
        assert (match.length, match.shared) == (0, 8)

    @pytest.mark.parametrize("limit", [8, 9, 1000])
    def test_limit_at_and_above_the_boundary(self, world: World, limit: int) -> None:
        world.put("abcdefgh")
        assert world.match("abcdefghi", limit).length == 8

    def test_prompt_shorter_than_the_boundary(self, world: World) -> None:
        world.put("abcdefgh")
        assert world.match("abcdefg", 1000).length == 0

    def test_tail_is_compared_token_by_token(self, world: World) -> None:
        slot = world.put("abcdef")
        match = world.match("abcdefgh")
        assert (match.length, match.slot, match.shared) == (6, slot, 4)
        assert match.tail_page is not None and match.tail_page not in match.pages
        assert world.match("abcdeXgh").length == 0
        assert world.match("abcde", 1000).length == 0

    def test_longest_of_several_tails_that_fits(self, world: World) -> None:
        slots = {text: world.put(text) for text in ("abcde", "abcdef", "abcdefg", "abcdXY")}
        for text, limit, longest in [
            ("abcdefgh", 7, "abcdefg"),
            ("abcdefgh", 6, "abcdef"),
            ("abcdefZ", 7, "abcdef"),
            ("abcdeZZ", 7, "abcde"),
            ("abcdXYZ", 7, "abcdXY"),
        ]:
            match = world.match(text, limit)
            assert (match.length, match.slot) == (len(longest), slots[longest])

    def test_prompt_of_less_than_a_page(self, world: World) -> None:
        slot = world.put("abc")
        match = world.match("abcdefgh")
        assert (match.length, match.slot, match.pages, match.shared) == (3, slot, (), 0)

    def test_nearest_checkpoint_above_the_limit_or_a_branch(self, world: World) -> None:
        first = world.put("abcd")
        world.put("abcdefgh")
        assert world.match("abcdefgh", 7).slot == first
        match = world.match("abcdefXX")
        assert (match.length, match.slot, match.shared) == (4, first, 4)

    def test_shared_tells_where_prompts_part(self, world: World) -> None:
        world.put("abcdefghijkl")
        assert (world.match("abcdefghXXXX").length, world.match("abcdefghXXXX").shared) == (0, 8)
        world.put("abcdefgh")  # the branch point
        assert world.match("abcdefghYYYY").length == 8

    def test_same_page_at_another_place_is_no_hit(self, world: World) -> None:
        world.put("abcdabcd")
        match = world.match("XXXXabcd")
        assert (match.length, match.shared) == (0, 0)

    def test_large_tokens_are_told_apart(self, world: World) -> None:
        tokens = np.array([1, 2, 3, 2**40 + 7], dtype=np.int64)
        page = world.pages.alloc(1)
        assert page is not None
        world.cache.extend(None, tokens, page)
        assert world.cache.match(tokens, 4).shared == 4
        assert world.cache.match(tokens - 2**40 * (tokens > 9), 4).shared == 0

    def test_takes_nothing(self, world: World) -> None:
        world.put("abcdefg")
        before = world.pages.num_free, world.slots.num_free, world.cache.num_evictable
        world.match("abcdefgh")
        assert (world.pages.num_free, world.slots.num_free, world.cache.num_evictable) == before
        assert world.cache.stats.queries == 1  # that of put


class TestStateless:
    @pytest.fixture
    def world(self) -> World:
        return World(stateful=False)

    def test_any_full_page_boundary_is_a_hit(self, world: World) -> None:
        world.end(world.start("abcdefghij"))
        for limit, length in [(10, 8), (8, 8), (7, 4), (3, 0)]:
            match = world.match("abcdefghij", limit)
            assert (match.length, len(match.pages)) == (length, length // SIZE)
            assert (match.slot, match.tail_page, match.shared) == (None, None, 8)

    def test_states_are_not_kept(self, world: World) -> None:
        seq = world.start("abcdef")
        assert world.keep(seq, "abcdef") is None
        assert world.slots.num_free == world.slots.capacity

    def test_leaves_go_first(self, world: World) -> None:
        world.end(world.start("abcdefghijkl"))
        assert world.cache.reclaim_pages(world.pages.capacity - 2)
        assert world.match("abcdefghijkl").length == 8
        world.cache.check()

    def test_least_recently_used_goes_first(self, world: World) -> None:
        for text in ("aaaabbbb", "ccccdddd", "eeeeffff"):
            world.end(world.start(text))
        assert world.cache.reclaim_pages(world.pages.capacity - 5)
        world.end(world.start("aaaabbbb", 8))
        assert world.cache.reclaim_pages(world.pages.capacity - 2)
        assert [world.match(t).length for t in ("aaaabbbb", "ccccdddd", "eeeeffff")] == [8, 0, 0]


class TestReferences:
    def test_taken_pages_are_not_evictable_until_released(self, world: World) -> None:
        world.put("abcdefgh")
        assert (world.cache.num_evictable, world.cache.num_pages) == (2, 2)
        match = world.match("abcdefghi")
        held = world.cache.take(match)
        assert held == list(match.pages)
        assert world.cache.num_evictable == 0
        world.cache.hold(held)
        world.cache.release(held)
        assert world.cache.num_evictable == 0
        world.cache.release(held)
        assert world.cache.num_evictable == 2
        world.cache.check()

    def test_pages_that_are_not_cached_are_just_counted(self, world: World) -> None:
        pages = world.pages.alloc(2)
        assert pages is not None
        world.cache.hold(pages)
        world.cache.release(pages)
        world.cache.release(pages)
        assert world.pages.num_free == world.pages.capacity

    def test_statistics(self, world: World) -> None:
        world.put("abcdefgh")
        world.put("abcdefghij")
        world.put("XX")
        stats = world.cache.stats
        assert (stats.queries, stats.hits, stats.query_tokens, stats.hit_tokens) == (3, 1, 20, 8)

    def test_match_out_of_date_is_refused(self, world: World) -> None:
        world.put("abcdefgh")
        match = world.match("abcdefghi")
        world.cache.clear()
        with pytest.raises(AssertionError, match="out of date"):
            world.cache.take(match)


class TestNoRoom:
    def test_put_back_undoes_take(self, world: World) -> None:
        world.put("abcdefgh")
        before = world.cache.num_evictable, replace(world.cache.stats)
        match = world.match("abcdefghi")
        world.cache.take(match)
        world.cache.put_back(match)
        assert (world.cache.num_evictable, world.cache.stats) == before
        world.cache.check()

    @pytest.mark.parametrize("text", ["abcdef", "abcdefgh", "abc"])
    def test_adopted_state_is_the_callers(self, world: World, text: str) -> None:
        slot = world.put(text)
        match = world.match(text + "X")
        held = world.cache.take(match)
        assert match.slot == slot and world.cache.adopt(match)
        world.cache.check()
        tail = [] if match.tail_page is None else [match.tail_page]
        assert (world.cache.num_states, world.match(text + "X").length) == (0, 0)
        assert world.slots.references(slot or 0) == 1
        assert [world.pages.references(page) for page in tail] == [1] * len(tail)
        assert not world.cache.adopt(match)
        world.end(Seq(held + tail))
        world.cache.clear()
        assert world.pages.num_free == world.pages.capacity

    def test_state_that_others_need_is_not_adopted(self, world: World) -> None:
        world.put("abcdef")
        match = world.match("abcdefg")
        assert match.slot is not None and match.tail_page is not None
        for pool, number in ((world.slots, match.slot), (world.pages, match.tail_page)):
            pool.fork([number])
            assert not world.cache.adopt(match)
            pool.free([number])
        assert world.cache.num_states == 1
        assert not world.cache.adopt(world.match("XYZ"))


class TestExtend:
    def test_duplicate_pages_are_exchanged(self, world: World) -> None:
        first = world.start("abcdefgh")
        second = Seq(world.pages.alloc(3) or [])
        private = second.pages
        second.cursor, kept = world.cache.extend(None, tokens_of("abcdefghXXXX"), private)
        assert kept == [*first.pages, private[2]]
        assert world.pages.references(private[0]) == world.pages.references(private[1]) == 0
        assert world.pages.references(first.pages[0]) == 3
        second.pages = kept
        world.end(first)
        assert world.cache.num_evictable == 0
        world.end(second)
        assert world.cache.num_evictable == world.cache.num_pages == 3

    def test_own_pages_again_change_nothing(self, world: World) -> None:
        seq = world.start("abcdefgh")
        cursor, kept = world.cache.extend(None, tokens_of("abcdefgh"), seq.pages)
        assert kept == seq.pages and cursor is seq.cursor
        assert [world.pages.references(page) for page in kept] == [2, 2]

    def test_idle_pages_are_held_in_exchange(self, world: World) -> None:
        world.put("abcdefgh")
        pages = world.pages.alloc(2)
        assert pages is not None
        _, kept = world.cache.extend(None, tokens_of("abcdefgh"), pages)
        assert world.cache.num_evictable == 0 and set(kept).isdisjoint(pages)
        world.end(Seq(kept))
        assert world.cache.num_evictable == 2

    def test_nothing_to_add(self, world: World) -> None:
        assert world.cache.extend(None, tokens_of(""), []) == (None, [])

    def test_misuse_is_caught(self, world: World) -> None:
        seq = world.start("abcd")
        with pytest.raises(AssertionError, match="full pages"):
            world.cache.extend(None, tokens_of("abc"), seq.pages)
        with pytest.raises(AssertionError, match="other tokens"):
            world.cache.extend(None, tokens_of("wxyz"), seq.pages)
        world.end(seq)
        with pytest.raises(AssertionError, match="no reference"):
            world.cache.extend(seq.cursor, tokens_of(""), [])
        world.cache.clear()
        with pytest.raises(AssertionError, match="no longer cached"):
            world.cache.extend(seq.cursor, tokens_of(""), [])


class TestStates:
    def test_second_one_at_the_same_place_is_refused(self, world: World) -> None:
        assert world.put("abcdef") is not None
        seq = world.start("abcdef")
        assert world.keep(seq, "abcdef") is None
        world.end(seq)
        assert world.cache.num_states == 1
        assert world.slots.num_free == world.slots.capacity - 1
        assert world.pages.num_free == world.pages.capacity - 2

    def test_no_tokens_no_state(self, world: World) -> None:
        assert not world.cache.wants_state(None, 0, tokens_of(""))

    def test_tail_page_goes_with_its_checkpoint(self, world: World) -> None:
        slot = world.put("abcdef")
        assert slot is not None
        assert (world.cache.num_pages, world.cache.num_evictable) == (2, 2)
        world.cache.drop_state(slot)
        world.cache.check()
        assert (world.cache.num_pages, world.cache.num_states) == (1, 0)
        assert world.slots.num_free == world.slots.capacity
        world.cache.drop_state(slot)  # unknown by now

    def test_tail_of_a_running_sequence_is_in_use(self, world: World) -> None:
        seq = world.start("abcdef")
        world.keep(seq, "abcdef")
        assert world.cache.num_evictable == 0
        world.end(seq)
        assert world.cache.num_evictable == 2

    def test_tail_page_that_fills_up_becomes_a_node_as_well(self, world: World) -> None:
        seq = world.start("abcdef")
        world.keep(seq, "abcdef")
        world.keep(seq, "abcdef"[:5])
        cursor, kept = world.cache.extend(seq.cursor, tokens_of("efgh"), seq.pages[1:])
        assert kept == seq.pages[1:]
        world.cache.check()
        world.end(seq)
        assert (world.cache.num_pages, world.cache.num_evictable) == (2, 2)
        assert world.match("abcdeX").length == 5
        assert world.cache.reclaim_pages(world.pages.capacity)
        world.cache.check()
        assert (world.cache.num_pages, world.cache.num_states) == (0, 0)

    def test_misuse_is_caught(self, world: World) -> None:
        with pytest.raises(AssertionError, match="missing or too many"):
            world.cache.wants_state(None, 5, tokens_of("abc"))
        with pytest.raises(AssertionError, match="full page"):
            world.cache.wants_state(None, 4, tokens_of("abcd"))

    def test_clear_gives_everything_back(self, world: World) -> None:
        for text in ("abcdef", "abcdefgh", "abXX", "abcdefghijk"):
            world.put(text)
        world.cache.clear()
        world.cache.check()
        assert world.pages.num_free == world.pages.capacity
        assert world.slots.num_free == world.slots.capacity
        assert world.match("abcdefgh").shared == 0
        world.put("abcdef")
        assert world.match("abcdef").length == 6


class TestScenarios:
    def test_identical_resend_leaves_a_token(self, world: World) -> None:
        seq = world.start("abcdefgh")  # its last page boundary at or before 7 is 4
        short = Seq(seq.pages[:1], None)
        short.cursor, _ = world.cache.extend(None, tokens_of("abcd"), short.pages)
        world.keep(short, "abcd")
        world.end(seq)
        match = world.match("abcdefgh", 7)
        assert (match.length, match.shared) == (4, 8)

    def test_next_turn_continues_from_the_reply(self, world: World) -> None:
        world.put("abcdefghi")
        match = world.match("abcdefghijklmn", 13)
        assert match.length == 9 and match.tail_page is not None
        world.put("abcdefghijklmn")
        assert world.match("abcdefghijklmnop", 15).length == 14

    def test_under_pressure_a_long_run_never_leaks(self) -> None:
        world = World(num_pages=9, num_slots=4)
        for turn in range(200):
            text = "sys " + ("abcd", "efghi", "xy", "z")[turn * turn % 7 % 4]
            assert world.cache.reclaim_pages(3) and world.cache.reclaim_slot()
            world.put(text)
            assert world.cache.reclaim_pages(3)
            world.end(world.start(text + "!"))
        assert world.cache.stats.hits >= 200
        assert world.cache.stats.evicted_pages > 20
        world.cache.clear()
        assert world.pages.num_free == world.pages.capacity
