"""Log-probabilities in the forms of OpenAI's completions and chat, and of vLLM for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from yocolm.engine.outputs import Logprob
from yocolm.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no infinity

Entry = Mapping[int, Logprob] | None


def token_text(
    tokenizer: Tokenizer | None, token: int, entry: Logprob | None, as_id: bool = False
) -> str:
    """How a token is spelled; half a character as OpenAI does, ``bytes:\\xe2\\x80``."""
    if as_id or tokenizer is None:
        return f"token_id:{token}"
    piece = tokenizer.token_bytes(token)
    if piece is not None:
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
    if entry is not None and entry.decoded_token is not None:
        return entry.decoded_token
    return tokenizer.decode([token], skip_special_tokens=False)


class CompletionLogprobs:
    """Builds the ``logprobs`` of a completion, also piece by piece.

    Offsets are in characters of the returned text, in which a token begins.
    """

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool, skip_special: bool) -> None:
        self._tokenizer, self._as_ids, self._skip_special = tokenizer, as_ids, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def copy(self) -> CompletionLogprobs:
        """Another that goes on from the same place."""
        other = CompletionLogprobs(self._tokenizer, self._as_ids, self._skip_special)
        other._decoder.setstate(self._decoder.getstate())
        other._offset = self._offset
        return other

    def build(self, tokens: Sequence[int], entries: Sequence[Entry]) -> dict[str, list[Any]]:
        """The four lists for ``tokens``; the first of a prompt has no entry."""
        result: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token, entry in zip(tokens, entries, strict=True):
            own = None if entry is None else entry[token]
            result["tokens"].append(token_text(self._tokenizer, token, own, self._as_ids))
            result["token_logprobs"].append(None if own is None else max(own.logprob, LEAST))
            result["top_logprobs"].append(None if entry is None else self._top(entry))
            result["text_offset"].append(self._offset)
            self._advance(token)
        return result

    def _top(self, entry: Mapping[int, Logprob]) -> dict[str, float]:
        """By spelling, likeliest first; of two tokens spelled alike, the likelier counts."""
        top: dict[str, float] = {}
        for token, value in sorted(entry.items(), key=lambda item: -item[1].logprob):
            text = token_text(self._tokenizer, token, value, self._as_ids)
            top.setdefault(text, max(value.logprob, LEAST))
        return top

    def _advance(self, token: int) -> None:
        tokenizer = self._tokenizer
        if tokenizer is None or (self._skip_special and tokenizer.is_special(token)):
            return
        piece = tokenizer.token_bytes(token)
        if piece is None:
            piece = tokenizer.decode([token], skip_special_tokens=False).encode()
        self._offset += len(self._decoder.decode(piece))


def chat_logprobs(
    tokenizer: Tokenizer | None,
    tokens: Sequence[int],
    entries: Sequence[Mapping[int, Logprob]],
    top: int,
    as_ids: bool,
) -> dict[str, Any]:
    """The ``logprobs`` of a chat answer, with the ``top`` likeliest tokens at each place."""

    def shape(token: int, value: Logprob) -> dict[str, Any]:
        text = token_text(tokenizer, token, value, as_ids)
        piece = None if tokenizer is None else tokenizer.token_bytes(token)
        return {
            "token": text,
            "logprob": max(value.logprob, LEAST),
            "bytes": list(text.encode() if piece is None else piece),
        }

    content = []
    for token, entry in zip(tokens, entries, strict=True):
        likeliest = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:top]
        item = shape(token, entry[token])
        item["top_logprobs"] = [shape(other, value) for other, value in likeliest]
        content.append(item)
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[Entry] | None) -> list[Any] | None:
    """vLLM's form: by token id, with rank and text."""
    if entries is None:
        return None
    return [None if entry is None else _by_id(entry) for entry in entries]


def _by_id(entry: Mapping[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token): {
            "logprob": max(value.logprob, LEAST),
            "rank": value.rank,
            "decoded_token": value.decoded_token,
        }
        for token, value in entry.items()
    }
