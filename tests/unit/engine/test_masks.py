"""allowed_token_ids and bad_words: what is barred never comes, whatever else is asked; others' tokens stay."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graft.base.errors import LogitsError, UsageError
from graft.engine.decode.choose import host_reason
from graft.engine.grammar import choice_grammar
from graft.engine.masks import AllOf, OnlyThese, WithoutWords, joined, mask_problem, word_tokens
from graft.engine.params import SamplingParams
from text_llm import llm_with_text

PROMPT = [40, 41, 42]
WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=4)


@pytest.mark.parametrize("record", [True, False])
def test_only_allowed_tokens_come(record):
    """As with a bias against all others; beside requests that may choose freely."""
    llm, few = llm_with_text(record), [30, 45, 60, 61, 62]
    others = {token: -100 for token in range(128) if token not in few}
    for more in ({}, {"temperature": 1.2, "seed": 7}, {"temperature": 1.2, "seed": 7, "n": 3}):
        asked = {"max_tokens": 12, **more}
        free = SamplingParams(max_tokens=12, ignore_eos=True)
        held = SamplingParams(**asked, allowed_token_ids=few)
        found, beside = llm.generate([PROMPT, PROMPT], [held, free])
        assert {token for each in (found, *found.alternatives) for token in each.token_ids} <= set(few)
        assert beside.token_ids == llm.generate(PROMPT, free)[0].token_ids
        biased = llm.generate(PROMPT, SamplingParams(**asked, logit_bias=others))[0]
        for one, other in zip((found, *found.alternatives), (biased, *biased.alternatives), strict=True):
            assert one.token_ids == other.token_ids
    assert llm.generate(PROMPT, SamplingParams(allowed_token_ids=[2, 50], min_tokens=3))[0].token_ids[:3] == [50] * 3


@pytest.mark.parametrize("record", [True, False])
def test_a_bad_word_never_comes_whole(record):
    """Its beginning may: only the token that would end it is barred."""
    llm = llm_with_text(record)
    plain = llm.generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True))[0]
    at = next(i for i in range(3, 20) if " " not in llm.tokenizer.decode(plain.token_ids[i : i + 2]).strip())
    word = llm.tokenizer.decode(plain.token_ids[at : at + 2])
    tokens = [tuple(one) for one in word_tokens([word], lambda t: llm.tokenizer(t)["input_ids"])]
    assert tuple(plain.token_ids[at : at + 2]) in tokens, "what is to be barred is what was said"
    held = llm.generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True, bad_words=[word]))[0]
    first = next(i for i in range(24) if tuple(plain.token_ids[i : i + 2]) in tokens)
    assert held.token_ids[: first + 1] == plain.token_ids[: first + 1]
    assert held.token_ids[first + 1] != plain.token_ids[first + 1]
    hot = SamplingParams(max_tokens=60, temperature=0.7, seed=1, n=4, ignore_eos=True, bad_words=[word])
    found = llm.generate(PROMPT, hot)[0]
    for each in (held, found, *found.alternatives):
        ids = each.token_ids
        assert not {tuple(ids[i : i + len(one)]) for one in tokens for i in range(len(ids))} & set(tokens)


def test_masks_hold_together():
    llm = llm_with_text(True)
    grammar = choice_grammar(["yes", "yet", "no"])
    for bad, said in ((["yes"], "yet"), (["yet"], "yes"), (["y"], "no"), (["no", "yes"], "yet")):
        assert llm.generate(PROMPT, SamplingParams(grammar=grammar, bad_words=bad))[0].text == said
    letters = [llm.tokenizer.convert_tokens_to_ids(letter) for letter in "no"]
    only = SamplingParams(grammar=grammar, allowed_token_ids=[2, *letters])
    assert llm.generate(PROMPT, only)[0].text == "no"
    nothing = llm.generate(
        [PROMPT, PROMPT], [SamplingParams(grammar=grammar, bad_words=["y", "n"]), SamplingParams()]
    )
    assert isinstance(nothing[0].error, LogitsError) and nothing[1].error is None


def test_what_cannot_be_is_refused():
    llm = llm_with_text(True)
    for params, why in (
        (SamplingParams(allowed_token_ids=[5, 128]), "allowed_token_ids: token id 128 is outside"),
        (SamplingParams(allowed_token_ids=[2], min_tokens=1), "allowed_token_ids has no token that would not end"),
    ):
        with pytest.raises(UsageError, match=why):
            llm.generate(PROMPT, params)
    with pytest.raises(UsageError, match=r"LLM\.submit"), llm.held() as engine:
        engine.add(PROMPT, SamplingParams(bad_words=["x"]))
    with pytest.raises(UsageError, match="'x' has no tokens"):
        word_tokens(["x"], lambda _: [])
    assert mask_problem(SamplingParams(min_tokens=1, stop_token_ids=[0, 1]), 3, [2]) is not None
    assert mask_problem(SamplingParams(min_tokens=1, stop_token_ids=[0, 9]), 3, [2]) is None


def test_the_host_chooses_where_there_is_a_mask():
    assert host_reason(SamplingParams(allowed_token_ids=[1]), 0) == "allowed_token_ids"
    assert host_reason(SamplingParams(bad_words=["x"]), 0) == "bad_words"
    assert host_reason(SamplingParams(bad_words=[], allowed_token_ids=None), 0) is None


@example([(1, 0, 3)], [1, 2], 1)  # what the copy had when it was made counts
@given(WORDS, st.lists(st.integers(0, 3), max_size=12), st.integers(0, 12))
def test_what_is_barred_is_what_would_end_a_word(words, came, split):
    """Also in a copy, which goes its own way."""
    mask = WithoutWords(words, 4)
    for token in came[:split]:
        mask.accept(token)
    other = mask.copy()
    for token in came[split:]:
        mask.accept(token)
    other.accept(0)
    for found, said in ((mask, came), (other, [*came[:split], 0])):
        barred = {one for one in range(4) if any(tuple([*said, one])[-len(word) :] == word for word in words)}
        assert {one for one in range(4) if not found.allowed()[one]} == barred


def test_words_at_the_beginning_and_behind_a_blank():
    codes = {"foo": [1], " foo": [2], "bar baz": [3, 4], " bar baz": [5, 3, 4], " ": [9], "  ": [9, 9]}
    assert word_tokens(["  foo", "bar baz", "foo"], codes.__getitem__) == [(1,), (2,), (3, 4), (5, 3, 4)]
    assert word_tokens([" "], codes.__getitem__) == [(9,), (9, 9)]


def test_several_masks_are_one():
    only = OnlyThese([1, 2], 4)
    assert joined([]) is None and joined([only]) is only
    both = joined([only, WithoutWords([(2,), (3, 1)], 4)])
    assert isinstance(both, AllOf) and both.allowed().tolist() == [False, True, False, False]
    other = both.copy()
    assert other.accept(3) is None and not other.allowed().any() and both.allowed()[1]
