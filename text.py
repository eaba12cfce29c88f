"""Text from token ids as they arrive: whole characters only, cut at stop strings, the same as decoding all at once.

A token need not be whole characters: emoji and rare scripts come in pieces, and decoding a piece alone gives U+FFFD,
the replacement character. Nor is the text of a token always its own: some decoders drop the space in front of the
first one. So `TextStream` decodes a short window, the last token that gave text and those after it, and shows what
comes after the part already shown: a few tokens of work per token, however long the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")  # how byte-fallback vocabularies (Llama 2, Mistral) spell a single byte
LONG_WINDOW = 16  # tokens; a window grows this long only in a run of bytes that are no characters
LONGEST_CUT_SHORT = 3  # bytes, thus tokens at most, of a character that may still be completed


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Decode all ids at once, without special tokens and without tidying of spaces: what a stream adds up to."""
    ids = list(token_ids)
    return cast(str, tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """The text of one generation, in chunks that are final when they are returned.

    The chunks of `push` and `finish`, joined, are `text`; without a stop string that is `decode` of the ids pushed.
    A chunk never ends inside a character. A U+FFFD that the text really has is shown with the token after it, or by
    `finish`. Bytes of a byte-fallback vocabulary are shown when their run ends, since its decoder turns the whole run
    to U+FFFD should one byte not fit. Special tokens, end tokens among them, count and have no text.

    Stop strings: text that may be the beginning of one is held back until that is decided. The stop whose last
    character comes first wins, the longest of those that end together; the text ends before it. The token whose text
    completes it is the last that counts: `num_tokens` of the ids pushed belong to the output, the rest are ignored.
    So text and num_tokens do not depend on how the ids are divided into pushes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: str | Sequence[str] = ()) -> None:
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self._stop:
            raise ValueError("a stop string is empty, so nothing could be generated: remove it")
        self.num_tokens = 0
        self.stopped = False
        self._tokenizer = tokenizer
        self._finished = False
        self._kinds: dict[int, str] = {}  # token id -> "text", "byte" or "hidden"
        self._window: list[int] = []  # ids with text: the last one that was shown, then those still open
        self._num_shown = 0  # how many characters of the window's text have been passed on
        self._held = ""  # passed on, but perhaps the beginning of a stop string
        self._chunks: list[str] = []

    @property
    def text(self) -> str:
        """All the text shown so far."""
        return "".join(self._chunks)

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next ids and return the text that is now certain; ids after a completed stop string are ignored."""
        if self._finished:
            raise ValueError("this stream is finished: make a new TextStream for the next generation")
        chunk = ""
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            chunk += self._push_one(token_id)
        self._chunks.append(chunk)
        return chunk

    def finish(self) -> str:
        """Return what was held back, characters cut short included; call it when no more ids come."""
        chunk = ""
        if not (self.stopped or self._finished):
            chunk = self._release(decode(self._tokenizer, self._window)[self._num_shown :])
            if not self.stopped:
                chunk += self._held
        self._finished = True
        self._chunks.append(chunk)
        return chunk

    def _push_one(self, token_id: int) -> str:
        """Add one token and return the text that is now certain."""
        kind = self._kind(token_id)
        if kind == "hidden":
            return ""
        self._window.append(token_id)
        text = decode(self._tokenizer, self._window)
        fresh = text[self._num_shown :]
        if kind == "byte":  # not certain before the run ends; if a stop string is complete, it has ended here
            return self._release("", perhaps="" if fresh.endswith(REPLACEMENT) else fresh)
        if text.endswith(REPLACEMENT):  # at most this last one can still become a character
            fresh = fresh[:-1]
            self._num_shown += len(fresh)
            self._shorten(text)
        elif fresh:
            self._window = [token_id]
            self._num_shown = len(decode(self._tokenizer, self._window))
        return self._release(fresh)

    def _shorten(self, text: str) -> None:
        """Cut a long window between two characters, where the texts of both sides add up to the text of the whole."""
        if len(self._window) < LONG_WINDOW:
            return
        last = len(self._window) - LONGEST_CUT_SHORT - 1
        for cut in range(last, last - LONGEST_CUT_SHORT - 1, -1):
            before, after = decode(self._tokenizer, self._window[:cut]), decode(self._tokenizer, self._window[cut:])
            if after and before + after == text:
                self._window = self._window[cut:]
                self._num_shown -= len(before)
                return

    def _release(self, certain: str, perhaps: str = "") -> str:
        """Pass on text that is certain, up to a stop string or the beginning of one; perhaps: text that may follow."""
        pending = self._held + certain
        matches = [(start + len(s), start) for s in self._stop if (start := (pending + perhaps).find(s)) >= 0]
        if matches:
            self.stopped = True
            self._held = ""
            return (pending + perhaps)[: min(matches)[1]]
        num_held = self._num_to_hold(pending)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def _num_to_hold(self, pending: str) -> int:
        """Return the length of the longest end of the pending text with which a stop string begins."""
        longest = max((len(string) for string in self._stop), default=1) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if any(string.startswith(pending[-length:]) for string in self._stop):
                return length
        return 0

    def _kind(self, token_id: int) -> str:
        """Return whether a token is "text", a "byte" of a byte-fallback vocabulary, or "hidden" (special, unknown)."""
        if token_id not in self._kinds:
            token = cast("str | None", self._tokenizer.convert_ids_to_tokens(token_id))
            if token is None or self._is_special(token_id):
                self._kinds[token_id] = "hidden"
            else:
                self._kinds[token_id] = "byte" if BYTE_TOKEN.fullmatch(token) else "text"
        return self._kinds[token_id]

    def _is_special(self, token_id: int) -> bool:
        """Return whether decoding leaves a token out as special; its lists of special tokens do not always say."""
        shown = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return shown != decode(self._tokenizer, [token_id])
