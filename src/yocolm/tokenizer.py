"""Text to token ids and back, and streaming text that never splits a character.

`JsonTokenizer` wraps a `tokenizer.json`; `AuthorsTokenizer` is the YOCO authors' one, tiktoken's
cl100k_base with every id shifted by four. Both share the surface of `Tokenizer`.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders

from yocolm.errors import CheckpointError, MissingDependencyError
from yocolm.fields import read_json

if TYPE_CHECKING:
    import tiktoken

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
RANKS_FILE = "cl100k_base.tiktoken"
LONG = 4096  # characters, from which on other threads run while a text is encoded

# tiktoken's pattern for cl100k_base: how text is cut before the byte pairs are merged.
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
AUTHORS_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
ID_SHIFT = len(AUTHORS_SYMBOLS)
BOS = AUTHORS_SYMBOLS.index("<s>")
# Before the shift. The authors gave 100276 twice; decoding it yields the later name.
AUTHORS_SPECIALS = {
    "<|endoftext|>": 100257,
    "<|fim_prefix|>": 100258,
    "<|fim_middle|>": 100259,
    "<|fim_suffix|>": 100260,
    "<|endofprompt|>": 100276,
    **{
        name: 100264 + index
        for index, name in enumerate(
            "<fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <reponame> <filename> <gh_stars> "
            "<issue_start> <issue_comment> <issue_closed> <jupyter_start> <jupyter_text> "
            "<jupyter_code> <jupyter_output> <empty_output> <commit_before> <commit_msg> "
            "<commit_after>".split()
        )
    },
}


class Tokenizer(ABC):
    """What the engine needs of a tokenizer."""

    vocab_size: int  # one above the largest id
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def eos_token_id(self) -> int | None:
        """The first of the ids that end a text."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with special tokens (BOS) where the model was trained with them."""

    def fewest_tokens(self, text: str) -> int:
        """A bound from below on the length of ``encode(text)`` that costs nothing to find; 0 where
        none is known."""
        return 0

    def opening(self) -> list[int]:
        """What `encode` puts before every text: BOS where the model was trained with it."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        starts = range(len(whole) - len(plain) + 1)
        return whole[: next((i for i in starts if whole[i : i + len(plain)] == plain), 0)]

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids that name no token are left out, broken UTF-8 becomes U+FFFD."""

    @abstractmethod
    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves this token out by default."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes a token stands for, or None if the decoder does not simply join bytes."""

    @abstractmethod
    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an unknown id."""


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`, run by the `tokenizers` library."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.inner = inner
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.vocab_size = max(inner.get_vocab().values(), default=-1) + 1
        added = inner.get_added_tokens_decoder()
        self._special = frozenset(index for index, token in added.items() if token.special)
        self._bytewise = isinstance(inner.decoder, decoders.ByteLevel)
        self._pieces: dict[int, bytes] = {}
        self._longest = _longest_token(inner)

    @classmethod
    def from_folder(cls, folder: Path, ids: Mapping[str, Any]) -> JsonTokenizer:
        """Reads `tokenizer.json`; BOS and EOS from tokenizer_config.json, else from `ids`
        (generation_config.json or config.json: `bos_token_id`, `eos_token_id`)."""
        path = folder / TOKENIZER_FILE
        inner = read_tokenizer(path)
        named: dict[str, Any] = {}
        for file in (SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE):
            if (folder / file).exists():
                named.update(read_json(folder / file))
        bos = _named_id(inner, named.get("bos_token"), ids.get("bos_token_id"))
        eos = _named_id(inner, named.get("eos_token"), ids.get("eos_token_id"))
        return cls(inner, bos[0] if bos else None, eos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) < LONG:
            encoding = self.inner.encode(text, add_special_tokens=add_special_tokens)
        else:  # unlike encode, this lets other threads run meanwhile
            [encoding] = self.inner.encode_batch([text], add_special_tokens=add_special_tokens)
        ids = encoding.ids
        # The text itself may spell the BOS token that the post-processor adds as well.
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            return ids[1:]
        return ids

    def fewest_tokens(self, text: str) -> int:
        return 0 if self._longest is None else -(-len(text) // self._longest)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes | None:
        if not self._bytewise:
            return None
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self.token_string(token_id) or ""
            try:
                piece = bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token is plain text
                piece = token.encode()
            self._pieces[token_id] = piece
        return piece

    def token_string(self, token_id: int) -> str | None:
        return self.inner.id_to_token(token_id)


class AuthorsTokenizer(Tokenizer):
    """cl100k_base behind four symbols of its own, as the YOCO authors trained with.

    `ranks` are cl100k_base's mergeable ranks. Documents begin with `<s>`.
    """

    vocab_size = max(AUTHORS_SPECIALS.values()) + 1 + ID_SHIFT
    bos_token_id = BOS
    eos_token_ids = (AUTHORS_SYMBOLS.index("</s>"),)

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        self.ranks = dict(ranks)
        self._encoding: tiktoken.Encoding = _tiktoken().Encoding(
            name="cl100k_base_shifted",
            pat_str=CL100K_PATTERN,
            mergeable_ranks=self.ranks,
            special_tokens=AUTHORS_SPECIALS,
        )
        self._bytes = {rank + ID_SHIFT: token for token, rank in self.ranks.items()}
        for name, rank in AUTHORS_SPECIALS.items():
            self._bytes[rank + ID_SHIFT] = name.encode()
        for index, name in enumerate(AUTHORS_SYMBOLS):
            self._bytes[index] = name.encode()
        specials = {rank + ID_SHIFT for rank in AUTHORS_SPECIALS.values()}
        self._special = frozenset(specials | set(range(ID_SHIFT)))
        self._longest = max(map(len, self._bytes.values()))

    @classmethod
    def from_folder(cls, folder: Path | None = None) -> AuthorsTokenizer:
        """Ranks from `cl100k_base.tiktoken` in the folder, else from tiktoken's cache or download.

        Raises MissingDependencyError without tiktoken, CheckpointError if the ranks cannot be had.
        """
        return cls(load_cl100k_ranks(folder))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [rank + ID_SHIFT for rank in self._encoding.encode(text, allowed_special="all")]
        return [BOS, *ids] if add_special_tokens else ids

    def fewest_tokens(self, text: str) -> int:
        return -(-len(text) // self._longest)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in ids if not (skip_special_tokens and i in self._special))
        return b"".join(self._bytes.get(i, b"") for i in kept).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._bytes.get(token_id, b"")

    def token_string(self, token_id: int) -> str | None:
        piece = self._bytes.get(token_id)
        return None if piece is None else _byte_level(piece)


class StreamDecoder:
    """Turns token ids into text piece by piece.

    The pieces joined are exactly `tokenizer.decode` of all the ids; no piece ends inside a
    character. Each push costs the same whatever came before (amortised).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # For decoders that are more than joined bytes: ids from the last flushed group on.
        self._ids: list[int] = []
        self._flushed = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty inside a multi-byte character."""
        if self._skip and self._tokenizer.is_special(token_id):
            return ""
        piece = self._tokenizer.token_bytes(token_id)
        if piece is not None:
            return self._utf8.decode(piece)
        self._ids.append(token_id)
        # Byte-fallback decoders judge a run of byte tokens as a whole, so a run is held back.
        if _BYTE_TOKEN.fullmatch(self._tokenizer.token_string(token_id) or ""):
            return ""
        return self._flush()

    def finish(self) -> str:
        """What was still held back: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True) + self._flush()

    def _flush(self) -> str:
        # Decoding after the previous group keeps what depends on the neighbour (leading spaces).
        before = self._tokenizer.decode(self._ids[: self._flushed], self._skip)
        text = self._tokenizer.decode(self._ids, self._skip)
        self._ids = self._ids[self._flushed :]
        self._flushed = len(self._ids)
        return text[len(before) :]


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """A `tokenizer.json`; CheckpointError naming the file if it is absent or cannot be read."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(
            f"{path} is not a tokenizer that the tokenizers library reads ({error}); "
            "fetch or save the file again"
        ) from error


def load_cl100k_ranks(folder: Path | None = None) -> dict[bytes, int]:
    """cl100k_base's mergeable ranks; see `AuthorsTokenizer.from_folder` for source and errors."""
    module = _tiktoken()
    if folder is not None and (folder / RANKS_FILE).exists():
        from tiktoken.load import load_tiktoken_bpe

        try:
            return load_tiktoken_bpe(str(folder / RANKS_FILE))
        except ValueError as error:
            raise CheckpointError(f"{folder / RANKS_FILE} is damaged: {error}") from error
    try:
        return module.get_encoding("cl100k_base")._mergeable_ranks
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "the cl100k_base ranks are not on this machine and cannot be downloaded: put "
            f"{RANKS_FILE} into the model's folder, or set TIKTOKEN_CACHE_DIR to a folder where "
            f"tiktoken has cached them ({error})"
        ) from error


def cl100k_to_json(ranks: Mapping[bytes, int]) -> tokenizers.Tokenizer:
    """The authors' tokenizer as a `tokenizer.json`, with the same ids.

    Two differences are inherent in the format: text that spells `<s>`, `<pad>`, `</s>` or `<unk>`
    becomes that symbol, and `<|endofprompt|>`, whose id another symbol shares, becomes ordinary
    tokens.
    """
    vocab = {_byte_level(token): rank + ID_SHIFT for token, rank in ranks.items()}
    symbols = {name: index for index, name in enumerate(AUTHORS_SYMBOLS)}
    # Of two symbols with one id the later stays.
    names = {rank + ID_SHIFT: name for name, rank in AUTHORS_SPECIALS.items()}
    specials = {name: index for index, name in names.items()}
    merges = [(_byte_level(left), _byte_level(right)) for left, right in _merges(ranks)]
    model = tokenizers.models.BPE(
        vocab={**symbols, **vocab, **specials}, merges=merges, ignore_merges=True
    )
    result = tokenizers.Tokenizer(model)
    # Oniguruma reads `{1,3}+` and `$` differently from tiktoken's engine.
    pattern = CL100K_PATTERN.replace("{1,3}+", "{1,3}").replace("$", r"\z")
    cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    as_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([cut, as_bytes])
    result.decoder = decoders.ByteLevel()
    result.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", symbols["<s>"])]
    )
    result.add_special_tokens([*symbols, *specials])
    return result


def _merges(ranks: Mapping[bytes, int]) -> Iterable[tuple[bytes, bytes]]:
    """Every way to make a token out of two, by rank of the result: tiktoken merges by result."""
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise MissingDependencyError(
            "the authors' cl100k_base tokenizer needs tiktoken: pip install tiktoken"
        ) from error
    return tiktoken


def _named_id(inner: tokenizers.Tokenizer, token: Any, ids: Any) -> tuple[int, ...]:
    """The id of a token that a file names (a string, or a dictionary with its content)."""
    content = token.get("content") if isinstance(token, Mapping) else token
    named = inner.token_to_id(content) if isinstance(content, str) else None
    if named is not None:
        return (named,)
    if isinstance(ids, int):
        return (ids,)
    return tuple(ids) if isinstance(ids, (list, tuple)) else ()


def _longest_token(inner: tokenizers.Tokenizer) -> int | None:
    """The most characters of a text that one token stands for; None where that has no bound that
    we know, as when a normaliser drops characters or one "unknown" stands for many."""
    model = inner.model
    if not isinstance(model, tokenizers.models.BPE) or inner.truncation is not None:
        return None
    added = inner.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # they take all the white space beside them
    parts = [_state(inner.normalizer), _state(inner.pre_tokenizer)]
    steps = [step for part in parts for step in _steps(part)]
    if not all(map(_keeps_all, steps)):
        return None
    names = [step["type"] for step in steps]
    every_byte = _CHAR_OF_BYTE.values() if "ByteLevel" in names else ()
    if model.byte_fallback and not every_byte:
        every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = inner.get_vocab()
    if not every_byte or not all(name in vocab for name in every_byte):
        return None  # what is not in the vocabulary is dropped, or joined to one "unknown"
    return max(map(len, vocab))


def _state(component: Any) -> dict[str, Any] | None:
    """A normaliser or pre-tokenizer as `tokenizer.json` describes it."""
    return None if component is None else json.loads(component.__getstate__())


def _steps(state: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    """The state's steps, those of sequences one by one."""
    if state is None:
        return
    if state["type"] != "Sequence":
        yield state
        return
    for inner in state.get("normalizers") or state.get("pretokenizers") or ():
        yield from _steps(inner)


def _keeps_all(step: dict[str, Any]) -> bool:
    """Whether a step never makes a text shorter, in characters."""
    kind = step["type"]
    if kind == "Replace":
        old = step["pattern"].get("String")
        return old is not None and len(step["content"]) >= len(old)
    if kind in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return kind in ("Prepend", "ByteLevel", "Metaspace", "Digits")


def _byte_chars() -> dict[int, str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in chars)
    return chars | {byte: chr(256 + index) for index, byte in enumerate(others)}


_CHAR_OF_BYTE = _byte_chars()
_BYTE_OF_CHAR = {char: byte for byte, char in _CHAR_OF_BYTE.items()}
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_level(token: bytes) -> str:
    return "".join(_CHAR_OF_BYTE[byte] for byte in token)
