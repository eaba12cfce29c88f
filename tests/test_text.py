"""Streamed text is whole characters, adds up to the one-shot decode, and ends where the stop string begins."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import text
from text import TextStream, decode

END, MARK = "<|im_end|>", "<tool>"  # a special token, which has no text, and an added one that has
HARD = "naïve café e\u0301 中文字 🙂🙂 👩\u200d👩\u200d👧 क्षि \u200b \ufffd bad\ufffd\ufffd ok\n\tend  two"
BASES = "a中🙂\ufffdé 👩\u200d👧"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE as in Qwen: a token per byte, and merges such as ' a' or a space with half an emoji."""
    letters = list(bytes_to_unicode().values())
    merges = [("Ġ", "ð"), ("Ġð", "Ł"), ("Ġ", "b"), ("s", "t"), ("st", "o"), ("Ł", "Ļ"), ("ä", "¸"), ("Ģ", "ð")]
    vocab = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    return finished(tokenizer)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece BPE as in Llama 2: ▁ for a space, dropped in front; bytes for what the vocabulary lacks."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        "▁b",
        *"abcdefghijklmnopqrstuvwxyz",
        "中",
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[("▁", "▁"), ("▁", "b")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)  # type: ignore
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(strip)  # type: ignore
    return finished(tokenizer)


def finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([MARK])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"byte-level": byte_tokenizer(), "metaspace": metaspace_tokenizer()}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def ids_of(tokenizer: Any, string: str) -> list[int]:
    return tokenizer.encode(string, add_special_tokens=False)


def stream(tokenizer: Any, ids: list[int], size: int = 1, stop: tuple[str, ...] = ()) -> tuple[TextStream, list[str]]:
    """Push the ids in blocks of a size; return the stream and its chunks, the last one from finish."""
    stream = TextStream(tokenizer, stop)
    chunks = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    return stream, [*chunks, stream.finish()]


@every_tokenizer
def test_chunks_add_up_to_the_one_shot_decode_at_every_length(tokenizer: Any) -> None:
    """Caught: half an emoji shown as U+FFFD and never taken back; a last character lost; a space in front dropped."""
    ids = ids_of(tokenizer, HARD)
    assert decode(tokenizer, ids) == HARD
    for length in range(len(ids) + 1):
        for size in (1, 2, 5):
            result, chunks = stream(tokenizer, ids[:length], size)
            assert "".join(chunks) == result.text == decode(tokenizer, ids[:length])
            assert result.num_tokens == length
            assert HARD.startswith("".join(chunks[:-1]))  # so no replacement character that the text does not have


@every_tokenizer
def test_decoding_token_by_token_is_not_enough(tokenizer: Any) -> None:
    """Negative control: these tokenizers do show the faults that the stream is there for."""
    ids = ids_of(tokenizer, HARD)
    assert "".join(decode(tokenizer, [token_id]) for token_id in ids) != HARD
    starts = [decode(tokenizer, ids[:length]) for length in range(len(ids))]
    assert any(not HARD.startswith(start) for start in starts)


@every_tokenizer
def test_random_ids_add_up_and_cost_a_few_tokens_each(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: special and unknown ids inside a character; windows that grow with the text in runs of stray bytes."""
    lengths: list[int] = []
    real = text.decode

    def counting(tokenizer: Any, ids: list[int]) -> str:
        lengths.append(len(ids))
        return real(tokenizer, ids)

    monkeypatch.setattr(text, "decode", counting)
    choice = random.Random(1)
    stray = tokenizer.convert_tokens_to_ids("ÿ" if tokenizer is TOKENIZERS["byte-level"] else "▁")
    for _ in range(30):
        ids = [choice.randrange(len(tokenizer) + 3) for _ in range(choice.randrange(40))]
        ids[3:3] = [stray] * choice.choice((0, 0, 60))
        result, chunks = stream(tokenizer, ids)
        assert "".join(chunks) == result.text == real(tokenizer, ids)
    assert max(lengths) <= 2 * text.LONG_WINDOW


@settings(derandomize=True, max_examples=150, deadline=None, database=None)
@given(st.text(alphabet=BASES, max_size=12), st.integers(1, 4), st.sampled_from(sorted(TOKENIZERS)))
def test_any_text_arrives_whole(string: str, size: int, name: str) -> None:
    """Caught: a genuine U+FFFD beside cut characters, told apart wrongly."""
    ids = ids_of(TOKENIZERS[name], string)
    whole = decode(TOKENIZERS[name], ids)
    _, chunks = stream(TOKENIZERS[name], ids, size)
    assert whole == (string if name == "byte-level" else string.removeprefix(" "))
    assert "".join(chunks) == whole
    assert whole.startswith("".join(chunks[:-1]))


def test_a_genuine_replacement_character_holds_nothing_back() -> None:
    """Caught: text held back while its end is U+FFFD, to the end of the output once a real one came."""
    tokenizer = TOKENIZERS["byte-level"]
    result = TextStream(tokenizer)
    assert result.push(ids_of(tokenizer, "a\ufffd")) == "a"
    assert result.push(ids_of(tokenizer, "b")) == "\ufffdb"
    assert result.push(ids_of(tokenizer, "\ufffd" * 40)).count("\ufffd") == 39
    assert result.push(ids_of(tokenizer, "c")) == "\ufffdc"
    assert result.push(ids_of(tokenizer, "\ufffd")) == ""
    assert result.finish() == "\ufffd"


@every_tokenizer
def test_text_flows_without_spaces(tokenizer: Any) -> None:
    """Caught: a streamer that waits for a space gave 60 tokens in one final chunk."""
    ids = ids_of(tokenizer, "abcde中fgh" * 6 + "ij")
    _, chunks = stream(tokenizer, ids)
    assert max(map(len, chunks)) <= 2
    assert sum(map(bool, chunks)) == 9 * 6 + 2
    assert chunks[-1] == ""


@every_tokenizer
def test_special_tokens_count_but_have_no_text(tokenizer: Any) -> None:
    """Caught: an end marker in the text, a space lost after one, and a character cut in two by one."""
    end, mark = tokenizer.convert_tokens_to_ids([END, MARK])
    ids = ids_of(tokenizer, "a b🙂")
    for at in range(len(ids) + 1):
        marked = [*ids[:at], end, end, *ids[at:], mark, end]
        result, chunks = stream(tokenizer, marked)
        assert "".join(chunks) == "a b🙂" + MARK == decode(tokenizer, marked)
        assert result.num_tokens == len(marked)


def expected_stop(tokenizer: Any, ids: list[int], stop: tuple[str, ...]) -> tuple[str, int]:
    """Text and token count by definition: decode after every token, and look for a stop string that is complete."""
    for count in range(1, len(ids) + 1):
        shown = decode(tokenizer, ids[:count])
        found = [(shown.find(string) + len(string), shown.find(string)) for string in stop if string in shown]
        if found:
            return shown[: min(found)[1]], count
    return decode(tokenizer, ids), len(ids)


@every_tokenizer
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_strings_cut_text_and_tokens_alike(tokenizer: Any, size: int) -> None:
    """Caught: the beginning of a stop shown before the rest came; tokens of the block after it counted and shown."""
    choice = random.Random(size)
    num_stopped = 0
    for _ in range(120):
        string = "".join(choice.choice("aab\n中🙂 ") for _ in range(12))
        stop = tuple("".join(choice.choice("ab\n🙂 ") for _ in range(choice.randint(1, 4))) for _ in range(2))
        ids = ids_of(tokenizer, string)
        result, chunks = stream(tokenizer, ids, size, stop)
        wanted, count = expected_stop(tokenizer, ids, stop)
        assert ("".join(chunks), result.text, result.num_tokens) == (wanted, wanted, count), (string, stop)
        assert result.stopped == any(one in decode(tokenizer, ids) for one in stop)
        assert all(wanted.startswith("".join(chunks[:at])) for at in range(len(chunks)))
        num_stopped += result.stopped
    assert 20 < num_stopped < 120


def test_text_is_held_only_while_it_may_begin_a_stop() -> None:
    """Caught: a fixed delay of the longest stop's length, or 'aab' missed in 'aaab'."""
    tokenizer = TOKENIZERS["byte-level"]
    result = TextStream(tokenizer, ["aab", "\n\nUser:"])
    chunks = [result.push(ids_of(tokenizer, letter)) for letter in "xaac\n\nUsx"]
    assert chunks == ["x", "", "", "aac", "", "", "", "", "\n\nUsx"]
    assert [result.push(ids_of(tokenizer, letter)) for letter in "aaab"] == ["", "", "a", ""]
    assert result.stopped
    assert result.num_tokens == 13
    assert result.push(ids_of(tokenizer, "more")) == result.finish() == ""
    assert result.num_tokens == 13


def test_an_unfinished_stop_is_text() -> None:
    """Caught: the last characters of an output lost because they might have begun a stop string."""
    tokenizer = TOKENIZERS["byte-level"]
    result = TextStream(tokenizer, "stop")
    assert result.push(ids_of(tokenizer, "do not sto")) == "do not "
    assert (result.finish(), result.finish(), result.text, result.stopped) == ("sto", "", "do not sto", False)
    with pytest.raises(ValueError, match="new TextStream"):
        result.push([1])


def test_a_byte_fallback_newline_stops_at_once() -> None:
    """Caught: the run of bytes that a newline may belong to was waited for, and one token too many counted."""
    tokenizer = TOKENIZERS["metaspace"]
    result = TextStream(tokenizer, ["\n"])
    assert result.push(ids_of(tokenizer, "ab\n")) == "ab"
    assert (result.stopped, result.num_tokens) == (True, len(ids_of(tokenizer, "ab\n")))


def test_the_stop_that_is_complete_first_wins() -> None:
    """Caught: the cut depended on whether 'b' and 'abc' came in one token or three."""
    tokenizer = TOKENIZERS["byte-level"]
    assert "sto" in tokenizer.get_vocab()
    assert stream(tokenizer, ids_of(tokenizer, "xstop"), 9, ("sto", "t"))[0].text == "xs"
    assert stream(tokenizer, ids_of(tokenizer, "xstop"), 9, ("top", "stop"))[0].text == "x"
    with pytest.raises(ValueError, match="empty"):
        TextStream(tokenizer, ["a", ""])
