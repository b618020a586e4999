"""Passages: whole sentences, exactly as long as asked for."""

import random
from pathlib import Path

import pytest
import tokenizers

from yocolm.errors import RequestError
from yocolm.eval.haystack import Haystack, Passage, continuation, sentence_starts
from yocolm.models.registry import load_tokenizer
from yocolm.tokenizer import JsonTokenizer, Tokenizer

TEXT = (
    'Mr. Knightley had been early. "What is it?" said Emma. "Nothing!" He left at 10 a.m. on '
    "foot...  They stayed.\n\nThe end of no sentence\n\nA new paragraph (in brackets.) It rained"
)
SENTENCES = [
    "Mr. Knightley had been early.",
    ' "What is it?" said Emma.',
    ' "Nothing!"',
    " He left at 10 a.m. on foot...",
    "  They stayed.",
    "\n\nThe end of no sentence",
    "\n\nA new paragraph (in brackets.)",
    " It rained",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer("bundled")
    assert found is not None
    return found


def made_up(sentences: int, longest: int = 40, seed: int = 0) -> Haystack:
    """Sentences of random sizes, whose tokens count upwards."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, longest) for _ in range(sentences)]
    starts = [sum(sizes[:i]) for i in range(sentences)]
    return Haystack(range(sum(sizes)), starts)


def test_sentences_end_where_they_do(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    starts = sentence_starts(tokenizer, ids)
    found = [tokenizer.decode(ids[a:b]) for a, b in zip(starts, [*starts[1:], None], strict=True)]
    assert found == SENTENCES


def test_tokens_that_hold_white_space_end_sentences_behind_it() -> None:
    vocab = {word: i for i, word in enumerate(["One", ".\n\n", "Two", ".", " Three"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="One"))
    inner.decoder = tokenizers.decoders.Fuse()
    assert sentence_starts(JsonTokenizer(inner), [0, 1, 2, 3, 4]) == [0, 2, 4]


@pytest.mark.parametrize("tokens", [1, 2, 17, 100, 101, 102, 103, 999, 5000])
def test_a_passage_has_exactly_its_tokens_in_whole_sentences(tokens: int) -> None:
    haystack = made_up(120)
    stops = [*haystack.starts[1:], len(haystack.token_ids)]
    sentences = [list(range(a, b)) for a, b in zip(haystack.starts, stops, strict=True)]
    for first in (0, 5, 119):
        passage = haystack.passage(first, tokens)
        assert len(passage.token_ids) == tokens == passage.ends[-1]
        pieces = [
            passage.token_ids[a:b] for a, b in zip(passage.ends, passage.ends[1:], strict=False)
        ]
        assert all(piece in sentences for piece in pieces)
        in_order = [sentences[(first + i) % 120] for i in range(len(pieces))]
        assert tokens < 100 or pieces[: len(pieces) // 2] == in_order[: len(pieces) // 2]


def test_passages_that_begin_alike_stay_alike() -> None:
    haystack = made_up(2000)
    one, two = haystack.passage(3, 9000), haystack.passage(3, 9007)
    common = next(i for i, (a, b) in enumerate(zip(one.token_ids, two.token_ids)) if a != b)  # noqa: B905
    assert common > 8800
    assert one.token_ids[:100] != haystack.passage(4, 9000).token_ids[:100]


@pytest.mark.parametrize("tokens", [1, 5, 99, 100, 101, 250])
def test_text_without_fitting_sentences_lacks_its_beginning(tokens: int) -> None:
    haystack = Haystack(range(200), [0, 100])
    passage = haystack.passage(0, tokens)
    assert len(passage.token_ids) == tokens
    assert passage.token_ids[-1] in (99, 199)
    assert passage.ends[0] == 0 and passage.ends[-1] == tokens


def test_nothing_is_asked_of_the_text() -> None:
    assert made_up(3).passage(1, 0) == Passage([], [0])


def test_the_place_of_a_depth_is_the_nearest_end_of_a_sentence() -> None:
    passage = Passage(list(range(100)), [0, 10, 60, 100])
    places = [passage.cut(depth) for depth in (0, 0.04, 0.06, 0.3, 0.36, 0.79, 0.81, 1)]
    assert places == [0, 0, 10, 10, 60, 60, 100, 100]


def test_pieces_are_put_in_at_their_places() -> None:
    passage = Passage([1, 2, 3, 4], [0, 2, 4])
    got = passage.insert([(4, [90]), (0, [70, 71]), (2, [80]), (0, [72])])
    assert got == [70, 71, 72, 1, 2, 80, 3, 4, 90]


def test_files_follow_each_other(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("One of 12. Two\n")
    (tmp_path / "b").write_text("Three 345. Four.")
    haystack = Haystack.from_files([tmp_path / "a", tmp_path / "b"], tokenizer)
    assert haystack.num_sentences == 4
    assert haystack.numbers == {"12", "345"}
    assert tokenizer.decode(haystack.token_ids) == "\n\nOne of 12. Two\n\nThree 345. Four."
    (tmp_path / "a").write_text(" \n")
    with pytest.raises(RequestError, match="hold no text to hide needles in"):
        Haystack.from_files([tmp_path / "a"], tokenizer)


def test_what_continues_a_text_has_nothing_put_before_it(tokenizer: Tokenizer) -> None:
    ids = continuation(tokenizer, " The end.")
    assert tokenizer.decode(ids) == " The end."
    before = tokenizer.encode("It rained.", add_special_tokens=False)
    assert before + ids == tokenizer.encode("It rained. The end.", add_special_tokens=False)
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁.": 0, ".": 1, "▁The": 2}))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    assert continuation(JsonTokenizer(inner), " The") == [2]
