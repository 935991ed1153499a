"""Streamed text: the pieces are the text, whatever the tokens, and it ends at the first stop string."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from graft.engine.params import SamplingParams
from graft.engine.text.detokenize import Detokenizer, TextStream
from marks import examples

CORPUS = [
    "the cat sat on the mat, and it didn't play .",
    "playing players 123 été naïve 😀 猫が好き",
    "  two  spaces\n\ttab",
]
SPECIAL = ["<s>", "</s>", "<pad>"]


class Slices:
    """Tokens are slices of bytes, cut anywhere; it counts the tokens that it decodes."""

    def __init__(self, slices):
        self.slices = [bytes(s) for s in slices]
        self.decoded = 0

    def decode(self, tokens, skip_special_tokens):
        self.decoded += len(tokens)
        return b"".join(self.slices[t] for t in tokens).decode("utf-8", "replace")


def slices(text: str, cuts: list[int]) -> Slices:
    """The text's bytes cut at these places; a place twice makes a token without text."""
    data = text.encode()
    places = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return Slices(data[a:b] for a, b in pairwise(places))


def first_stop(text: str, stops) -> tuple[int, int, str] | None:
    """The end and the beginning of the stop string that ends first, by find on the whole text."""
    return min(((text.find(s) + len(s), text.find(s), s) for s in stops if s in text), default=None)


def cut_off(text: str, stops, include: bool) -> str:
    found = first_stop(text, stops)
    return text if found is None else text[: found[0 if include else 1]]


def run(tokenizer, prompt, tokens, **fields) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, prompt, SamplingParams(**fields))
    pieces = [stream.feed(token) for token in tokens]
    return [*pieces, stream.finish()], stream


letters = st.text("abé😀\ufffd", max_size=30)
stop_lists = st.lists(st.text("abé😀\ufffd", min_size=1, max_size=5), max_size=4)


@settings(max_examples=examples(400), deadline=None)
@given(letters, st.lists(st.integers(0, 200), max_size=40), stop_lists, st.booleans(), letters)
@example("aaab", [], ["aab"], False, "")  # what was matched is given up in part alone
def test_pieces_are_the_text_up_to_the_first_stop_string(text, cuts, stops, include, prompt):
    """Random text, random cuts, also inside characters, random stop strings; a stop string in the prompt is none."""
    tokenizer = slices(text, cuts)
    count = len(tokenizer.slices)
    tokenizer.slices.append(prompt.encode())
    pieces, stream = run(tokenizer, [count], range(count), stop=stops, include_stop_str_in_output=include)
    assert "".join(pieces) == stream.text == cut_off(text, stops, include)
    found = first_stop(text, stops)
    assert stream.stopped == (found and found[2])
    assert stream.feed(0) == stream.finish() == "", "nothing after the end"


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.text("ab", max_size=3), max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), max_size=3))
def test_no_more_is_held_back_than_may_begin_a_stop_string(parts, stops):
    tokenizer = Slices(part.encode() for part in parts)
    stream = TextStream(tokenizer, [], SamplingParams(stop=stops))
    seen = ""
    for token, part in enumerate(parts):
        stream.feed(token)
        seen += part
        if stream.stopped is not None:
            assert first_stop(seen, stops)
            break
        assert first_stop(seen, stops) is None
        beginnings = [s[:k] for s in stops for k in range(len(s)) if seen.endswith(s[:k])]
        assert stream.text == seen[: len(seen) - max(map(len, beginnings), default=0)]


def test_stop_strings_by_example():
    tokens = ["Hello", " wor", "ld\n", "\nUs", "er: no", "t this"]
    tokenizer = Slices(t.encode() for t in tokens)
    pieces, stream = run(tokenizer, [], range(6), stop="\n\nUser:")
    assert pieces == ["Hello", " wor", "ld", "", "", "", ""]
    assert stream.stopped == "\n\nUser:"
    pieces, _ = run(tokenizer, [], range(6), stop="\n\nUser:", include_stop_str_in_output=True)
    assert pieces == ["Hello", " wor", "ld", "", "\n\nUser:", "", ""]
    pieces, stream = run(tokenizer, [], range(4), stop="\n\nUser:")
    assert pieces == ["Hello", " wor", "ld", "", "\n\nUs"], "held back, and given at the end"
    assert stream.stopped is None
    _, stream = run(tokenizer, [], range(6), stop=["or", "world"])
    assert (stream.text, stream.stopped) == ("Hello w", "or"), "the one that ends first"
    _, stream = run(tokenizer, [], range(6), stop=["ld", "world"])
    assert (stream.text, stream.stopped) == ("Hello ", "world"), "of two that end together, the longest"
    assert run(tokenizer, [0, 1, 2], range(3, 6), stop=["world"])[1].stopped is None, "only in the prompt"
    assert run(tokenizer, [0, 1], range(2, 6), stop=["world"])[1].stopped is None, "it began in the prompt"


def test_a_stop_string_counts_from_min_tokens_on():
    tokenizer = Slices(t.encode() for t in ["ab", "ab", "ab", "ab"])
    assert run(tokenizer, [], range(4), stop="b", min_tokens=0)[1].text == "a"
    assert run(tokenizer, [], range(4), stop="b", min_tokens=1)[1].text == "a"
    assert run(tokenizer, [], range(4), stop="b", min_tokens=3)[1].text == "ababa"
    assert run(Slices([b"a"]), [], [0] * 4, stop="aa", min_tokens=3)[1].text == "a", (
        "it overlaps one that did not count"
    )
    pieces, stream = run(tokenizer, [], range(4), stop="abc", min_tokens=4)
    assert "".join(pieces) == stream.text == "abababab"


def fast(model: models.Model, trainer, *, decoder, pre=None, normalizer=None, clean=False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    if pre:
        tokenizer.pre_tokenizer = pre
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoder
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=clean,
    )


def with_bytes(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same with a token for each byte, for what its alphabet lacks."""
    backend = tokenizer.backend_tokenizer
    model = json.loads(backend.to_str())["model"]
    vocab = model["vocab"] | {f"<0x{i:02X}>": len(model["vocab"]) + i for i in range(256)}
    merges = [tuple(pair) for pair in model["merges"]]
    backend.model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    return tokenizer


@cache
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """Small ones of each style, trained here."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    llama = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return {
        "byte-level": fast(
            models.BPE(),
            trainers.BpeTrainer(
                vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
            ),
            pre=pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoder=decoders.ByteLevel(),
        ),
        "llama": with_bytes(
            fast(
                models.BPE(unk_token="<unk>"),
                trainers.BpeTrainer(
                    vocab_size=90, special_tokens=[*SPECIAL, "<unk>"], limit_alphabet=24, show_progress=False
                ),
                normalizer=prepend,
                decoder=decoders.Sequence(llama),
            )
        ),
        "metaspace": fast(
            models.Unigram(),
            trainers.UnigramTrainer(
                vocab_size=90, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
            ),
            pre=pre_tokenizers.Metaspace(),
            decoder=decoders.Metaspace(),
        ),
        "wordpiece": fast(
            models.WordPiece(unk_token="[UNK]"),
            trainers.WordPieceTrainer(vocab_size=120, special_tokens=[*SPECIAL, "[UNK]"], show_progress=False),
            pre=pre_tokenizers.Whitespace(),
            decoder=decoders.WordPiece(),
            clean=True,
        ),
    }


def whole(tokenizer, prompt: list[int], tokens: list[int], skip: bool = True) -> str:
    """The new text, from two decodes of everything."""
    options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
    return tokenizer.decode(prompt + tokens, **options)[len(tokenizer.decode(prompt, **options)) :]


STYLES = ["byte-level", "llama", "metaspace", "wordpiece"]


@pytest.mark.parametrize("style", STYLES)
def test_real_tokenizers_are_what_they_should_be(style):
    """The styles differ in what makes streaming hard, or the tests below would show nothing."""
    tokenizer = tokenizers()[style]
    ids = tokenizer("the cat 🚀 playing")["input_ids"]
    separate = "".join(tokenizer.decode([i], skip_special_tokens=True) for i in ids)
    assert separate != tokenizer.decode(ids, skip_special_tokens=True), "tokens one by one are not the text"
    assert tokenizer.decode(ids).split()[:2] == ["the", "cat"]
    if style in ("byte-level", "llama"):
        assert "🚀" in tokenizer.decode(ids) and "🚀" not in separate


words = st.lists(
    st.sampled_from(
        [
            "the cat",
            " ",
            "  ",
            "play",
            "ing",
            "didn't",
            ".",
            ",",
            "é",
            "😀😀",
            "🚀",
            "猫",
            "\n",
            "x",
            "\ufffd",
            "<s>",
            "<pad>",
        ]
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=examples(80), deadline=None)
@given(
    prompt=words,
    text=words,
    skip=st.booleans(),
    stops=st.lists(st.sampled_from(["at", " p", "😀", "t.", "s>"]), max_size=2),
)
def test_streams_of_real_tokenizers_are_their_text(style, prompt, text, skip, stops):
    tokenizer = tokenizers()[style]
    before, tokens = tokenizer(prompt)["input_ids"], tokenizer(text)["input_ids"]
    pieces, stream = run(tokenizer, before, tokens, stop=stops, skip_special_tokens=skip)
    assert "".join(pieces) == stream.text == cut_off(whole(tokenizer, before, tokens, skip), stops, False)


@pytest.mark.parametrize("style", ["byte-level", "metaspace", "wordpiece"])
def test_any_tokens_of_real_tokenizers_stream_to_their_text(style):
    """Tokens that no text encodes to: unfinished characters in the middle, special tokens anywhere."""
    tokenizer = tokenizers()[style]
    draw = random.Random(0)
    unfinished = 0
    for _ in range(150):
        prompt = tokenizer("the cat")["input_ids"]
        tokens = [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(30))]
        pieces, stream = run(tokenizer, prompt, tokens)
        assert "".join(pieces) == stream.text == whole(tokenizer, prompt, tokens)
        unfinished += "\ufffd" in stream.text
    assert unfinished > 50 or style != "byte-level"


def test_a_prompt_cut_inside_its_last_bytes_does_not_garble_the_text():
    """Byte tokens before the new ones count from the beginning of a character, wherever the context begins."""
    tokenizer = tokenizers()["llama"]
    for emojis in range(1, 5):
        for tail in ("", "x", "é"):
            prompt = tokenizer("😀" * emojis + tail)["input_ids"]
            tokens = tokenizer.convert_tokens_to_ids([f"<0x{b:02X}>" for b in "猫😀".encode()])
            pieces, _ = run(tokenizer, prompt, [*tokens, *tokenizer("x")["input_ids"][1:]])
            assert "".join(pieces).startswith("猫😀")


def test_a_prompt_that_ends_with_skipped_tokens_keeps_the_space_after_it():
    tokenizer = tokenizers()["llama"]
    for skipped in range(0, 40, 3):
        prompt = [*tokenizer("the cat")["input_ids"], *[tokenizer.pad_token_id] * skipped]
        assert run(tokenizer, prompt, tokenizer("sat")["input_ids"])[1].text == " sat"


def test_a_character_that_the_prompt_began_is_finished():
    text = Detokenizer(Slices([b"a", b"\xf0\x9f", b"\x98", b"\x80", b"b"]), [0, 1])
    assert [text.feed(2), text.feed(3), text.feed(4), text.rest()] == ["", "😀", "b", ""]
    real = Detokenizer(Slices([b"a\xef\xbf\xbd", b"b"]), [0])
    assert real.feed(1) == "b", "a replacement character that the prompt really has is not given again"


def test_unfinished_and_replacement_characters_at_the_end():
    tokenizer = Slices([b"a", b"\xf0\x9f", "\ufffd".encode(), b"b"])
    assert run(tokenizer, [], [0, 1])[0] == ["a", "", "\ufffd"]
    assert run(tokenizer, [], [0, 2])[0] == ["a", "", "\ufffd"]
    assert run(tokenizer, [], [2, 3])[0] == ["", "\ufffdb", ""]
    assert run(tokenizer, [], [0, 2], stop="\ufffd")[1].stopped == "\ufffd"
    assert run(tokenizer, [], [])[0] == [""]


@pytest.mark.parametrize(
    ("kind", "slice_"),
    [("text", b"word "), ("nothing", b""), ("garbage", b"\xff"), ("replacement", "\ufffd".encode())],
)
def test_feeding_decodes_a_bounded_number_of_tokens(kind, slice_):
    """Also in a long run of tokens without certain text: the cost for a token does not grow with the text."""
    costs = []
    for count in (500, 2000):
        tokenizer = Slices([slice_, b"end"])
        _, stream = run(tokenizer, [1] * 10, [0] * count + [1], stop="never")
        assert stream.text == (slice_ * count).decode("utf-8", "replace") + "end"
        costs.append(tokenizer.decoded / count)
    assert costs[1] < 20 and costs[1] < 1.2 * costs[0]


def test_special_tokens_are_skipped_or_shown():
    tokenizer = tokenizers()["byte-level"]
    tokens = [*tokenizer("the cat")["input_ids"], tokenizer.eos_token_id]
    assert run(tokenizer, [tokenizer.bos_token_id], tokens)[1].text == "the cat"
    shown = run(tokenizer, [tokenizer.bos_token_id], tokens, skip_special_tokens=False)[1]
    assert shown.text == "the cat</s>"


def test_cleaning_up_does_not_take_back_given_text():
    """A tokenizer that joins "didn 't" later would shorten text that was given: the stream leaves them apart."""
    tokenizer = tokenizers()["wordpiece"]
    ids = tokenizer("it didn't play .")["input_ids"]
    assert tokenizer.decode(ids) != tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    for place in range(len(ids)):
        pieces, stream = run(tokenizer, ids[:place], ids[place:])
        assert "".join(pieces) == stream.text == whole(tokenizer, ids[:place], ids[place:])
