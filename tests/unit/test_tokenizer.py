"""Tokenizers and streaming text: the pieces joined are always the full decode."""

import importlib.util
import os
import sys
import threading
import time
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from yocolm import fields
from yocolm import tokenizer as tokenizer_module
from yocolm.errors import CheckpointError, MissingDependencyError
from yocolm.fields import write_json
from yocolm.models.presets import CL100K_VOCAB_SIZE
from yocolm.models.registry import BUNDLED
from yocolm.tokenizer import (
    CL100K_PATTERN,
    AuthorsTokenizer,
    JsonTokenizer,
    StreamDecoder,
    Tokenizer,
    cl100k_to_json,
    read_tokenizer,
)

TEXTS = (
    "Hello world, don't WON'T I'LL",
    "  leading, trailing and \n\n  newlines \n  ",
    "naïve 😀😀👩‍👩‍👧 日本語テキスト 한국어 \x00\ufffd",
    "x = 1234567890;\r\n\tif (a <= b) {\n\n\n}  ",
    "a" * 300,
    "",
)


@cache
def byte_level() -> JsonTokenizer:
    """All 256 bytes, a few merges, a BOS that the post-processor adds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet, "he", "ll", "Ġw", "ð٪"]
    vocab = {word: index for index, word in enumerate(words)}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w")]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    inner.add_tokens(["naïve word"])
    return JsonTokenizer(inner, 0, (1,))


@cache
def byte_fallback() -> JsonTokenizer:
    """SentencePiece style: words with a leading mark, and bytes for whatever is not in there."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁the", "▁cat", "s", "at", "é", "▁▁"]
    vocab = {word: index for index, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    return JsonTokenizer(inner, 1, (2,))


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip)
    return [*(decoder.push(token) for token in ids), decoder.finish()]


def cl100k_folder() -> Path | None:
    """Where the ranks are, if this machine has them: tiktoken's cache, or a package with a copy."""
    name = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"  # how tiktoken's cache calls them
    places = [Path(os.environ.get("TIKTOKEN_CACHE_DIR", "/nowhere"))]
    if (litellm := importlib.util.find_spec("litellm")) and litellm.origin:
        places.append(Path(litellm.origin).parent / "litellm_core_utils" / "tokenizers")
    return next((place for place in places if (place / name).exists()), None)


def bundled_ranks() -> dict[bytes, int]:
    """Ranks of a real BPE that every clone has: the bundled model's, without its special token."""
    bundled = JsonTokenizer.from_folder(BUNDLED, {})
    pieces = (bundled.token_bytes(token) for token in range(1, bundled.vocab_size))
    return {piece: rank for rank, piece in enumerate(pieces) if piece is not None}


@pytest.fixture(scope="module", params=["bundled", "cl100k"])
def authors(request: pytest.FixtureRequest) -> AuthorsTokenizer:
    """The authors' tokenizer over ranks that are always here, and over their own if these are."""
    pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    if request.param == "bundled":
        return AuthorsTokenizer(bundled_ranks())
    folder = cl100k_folder()
    if folder is None:
        pytest.skip("the cl100k_base ranks are not here: install litellm or set TIKTOKEN_CACHE_DIR")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        return AuthorsTokenizer.from_folder()


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """Nobody is made to give way here: the other thread gets its turn during the call, or after."""
    tokenizer, text = byte_level(), "hello, naïve world " * 20_000
    begun, done, before = threading.Event(), [], sys.getswitchinterval()

    def encode() -> None:
        begun.set()
        done.append(tokenizer.encode(text))

    thread = threading.Thread(target=encode)
    sys.setswitchinterval(1000)  # seconds
    try:
        thread.start()
        begun.wait()
        seen = list(done)
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert not seen
    assert done == [tokenizer.inner.encode(text).ids]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=40) | st.text("helLw ▁thecat", max_size=40))
def test_the_fewest_tokens_bound_the_number(make: type, text: str) -> None:
    tokenizer = make()
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.fewest_tokens("x" * 1000) > 50


def _changed(**parts: Any) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer.from_str(byte_level().inner.to_str())
    for name, part in parts.items():
        setattr(inner, name, part)
    return inner


def _with_greedy_token() -> tokenizers.Tokenizer:
    inner = _changed()
    inner.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    return inner


def _truncating() -> tokenizers.Tokenizer:
    inner = _changed()
    inner.enable_truncation(3)
    return inner


@pytest.mark.parametrize(
    "inner",
    [
        _changed(normalizer=normalizers.Strip()),
        _changed(normalizer=normalizers.Replace("aa", "a")),
        _changed(normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")),
        _changed(normalizer=normalizers.Sequence([normalizers.Prepend("x"), normalizers.NFKC()])),
        _changed(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        _changed(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        _changed(model=models.BPE(vocab={"a": 0}, merges=[])),  # drops all that it does not know
        _changed(model=models.WordLevel({"<unk>": 0}, "<unk>")),
        _with_greedy_token(),
        _truncating(),
    ],
)
def test_no_bound_where_text_may_shrink(inner: tokenizers.Tokenizer) -> None:
    assert JsonTokenizer(inner).fewest_tokens(" " * 10_000) == 0


def test_bounds_of_real_tokenizers(authors: AuthorsTokenizer) -> None:
    for tokenizer in (JsonTokenizer.from_folder(BUNDLED, {}), authors):
        for text in TEXTS:
            assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, False))
        assert tokenizer.fewest_tokens("x" * 100_000) > 100


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    assert ids[0] == 0
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
    assert "".join(streamed(tokenizer, ids)) == text


def test_bos_is_never_doubled() -> None:
    assert byte_level().encode("<s>he") == byte_level().encode("he")
    assert byte_fallback().encode("<s>the", add_special_tokens=True)[:2] != [1, 1]


def test_unknown_ids_decode_to_nothing() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("he"), 5000]
    assert tokenizer.decode(ids) == "".join(streamed(tokenizer, ids)) == "he"
    assert tokenizer.token_string(5000) is None


def test_pieces_never_end_inside_a_character() -> None:
    tokenizer = byte_level()
    text = "é😀日"
    pieces = streamed(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert [piece for piece in pieces if piece] == ["é", "😀", "日"]


def test_a_character_that_never_becomes_whole() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a😀", add_special_tokens=False)[:-1]
    assert streamed(tokenizer, ids)[-1] == "\ufffd"
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "a\ufffd"


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("skip", [True, False])
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_streamed_text_equals_the_full_decode(make: type, skip: bool, data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=40))
def test_any_text_survives(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not any(tokenizer.is_special(token) for token in ids):
        assert "".join(streamed(tokenizer, ids)) == text


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_broken_bytes_do_not_slow_the_stream(make: type) -> None:
    """A model that emits nothing but broken characters must not make each token dearer."""
    tokenizer = make()
    broken = 2 + 255 if make is byte_level else 3 + 255
    decoder = StreamDecoder(tokenizer)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            decoder.push(broken)
        return time.perf_counter() - start

    first = seconds(2000)
    seconds(20000)
    assert seconds(2000) < 10 * first + 0.05


def test_ids_come_from_the_tokenizers_files_first(tmp_path: Path) -> None:
    byte_level().inner.save(str(tmp_path / "tokenizer.json"))
    generation = {"bos_token_id": 7, "eos_token_id": [8, 9]}
    plain = JsonTokenizer.from_folder(tmp_path, generation)
    assert (plain.bos_token_id, plain.eos_token_ids, plain.eos_token_id) == (7, (8, 9), 8)
    write_json(
        tmp_path / "tokenizer_config.json",
        {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}},
    )
    named = JsonTokenizer.from_folder(tmp_path, generation)
    assert (named.bos_token_id, named.eos_token_ids) == (0, (1,))
    assert named.encode("hell w") == byte_level().encode("hell w")
    none = JsonTokenizer(byte_level().inner)
    assert none.bos_token_id is None and none.eos_token_id is None


def test_no_tokenizer_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json does not exist"):
        JsonTokenizer.from_folder(tmp_path, {})


def test_without_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(MissingDependencyError, match="pip install tiktoken"):
        AuthorsTokenizer.from_folder()


def test_without_ranks_or_network(monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")

    def fail(_: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(CheckpointError, match="cl100k_base.tiktoken.*TIKTOKEN_CACHE_DIR"):
        AuthorsTokenizer.from_folder()


def test_damaged_ranks_in_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    (tmp_path / tokenizer_module.RANKS_FILE).write_text("nonsense\n")
    with pytest.raises(CheckpointError, match="cl100k_base.tiktoken is damaged"):
        AuthorsTokenizer.from_folder(tmp_path)


def test_authors_ids_are_shifted_by_four(authors: AuthorsTokenizer) -> None:
    import tiktoken

    base = tiktoken.Encoding(
        "plain", pat_str=CL100K_PATTERN, mergeable_ranks=authors.ranks, special_tokens={}
    )
    assert -(-authors.vocab_size // 8) * 8 == CL100K_VOCAB_SIZE
    for text in TEXTS:
        ids = authors.encode(text)
        assert ids == [0, *(rank + 4 for rank in base.encode(text))]
        assert authors.decode(ids) == "".join(streamed(authors, ids)) == text
    assert authors.decode([0, 1, 2, 3, 100288], skip_special_tokens=False) == "<s><pad></s><unk>"
    assert authors.encode("<|endoftext|>", add_special_tokens=False) == [100261]


@pytest.mark.parametrize("authors", ["cl100k"], indirect=True)
def test_ranks_are_read_as_tiktoken_reads_them(authors: AuthorsTokenizer) -> None:
    import tiktoken

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cl100k_folder()))
        base = tiktoken.get_encoding("cl100k_base")
    assert base._pat_str == CL100K_PATTERN and base._mergeable_ranks == authors.ranks


def test_authors_tokenizer_as_json_is_the_same(authors: AuthorsTokenizer, tmp_path: Path) -> None:
    cl100k_to_json(authors.ranks).save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    converted = JsonTokenizer.from_folder(tmp_path, {})
    assert converted.vocab_size == authors.vocab_size
    assert (converted.bos_token_id, converted.eos_token_ids) == (0, (2,))
    source = Path(str(fields.__file__)).read_text()
    for text in (*TEXTS, source, "<|endoftext|>a<jupyter_code>", "'S 'ſ ǅ 123456789 ...\n\n"):
        ids = authors.encode(text)
        assert converted.encode(text) == ids
        assert converted.decode(ids) == authors.decode(ids)
        assert converted.decode(ids[1:], False) == text
        assert [converted.token_bytes(i) for i in ids] == [authors.token_bytes(i) for i in ids]


def test_ranks_file_in_the_folder_wins(authors: AuthorsTokenizer, tmp_path: Path) -> None:
    lines = (f"{b64encode(token).decode()} {rank}\n" for token, rank in authors.ranks.items())
    (tmp_path / tokenizer_module.RANKS_FILE).write_text("".join(lines))
    assert AuthorsTokenizer.from_folder(tmp_path).ranks == authors.ranks


@pytest.mark.parametrize("content", ["{}", "", "[1]", '{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    for read in (lambda: read_tokenizer(path), lambda: JsonTokenizer.from_folder(tmp_path, {})):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
            read()
    path.write_text(content)
    for read in (lambda: read_tokenizer(path), lambda: JsonTokenizer.from_folder(tmp_path, {})):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
            read()
