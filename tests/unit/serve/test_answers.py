"""Tokens to answers: texts, logprobs, events, errors."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from graft.engine.params import SamplingParams
from graft.engine.text.detokenize import TextStream
from graft.serve.protocol import answers
from graft.serve.protocol.choices import Choice
from graft.serve.protocol.completions import CompletionFormat
from graft.serve.text import ServedText
from graft.serve.wire import AnswerRow, TokenLogprobs
from protocol_cases import TEXT, completion
from serve_cases import tokenizer_json


def rows_of(tokens, cuts, finish, stop):
    """The tokens in pieces, the last of which has the end."""
    edges = [0, *sorted(cuts), len(tokens)]
    parts = [tokens[a:b] for a, b in itertools.pairwise(edges)]
    last = len(parts) - 1
    ends = [(finish, stop) if index == last else (None, None) for index in range(len(parts))]
    likely = [[TokenLogprobs(-1.0, [(7, -0.5)]) for _ in part] for part in parts]
    return [AnswerRow(1, 0, part, p, *end, 0, None) for part, p, end in zip(parts, likely, ends, strict=True)]


@given(
    tokens=st.lists(st.integers(0, 299), min_size=1, max_size=12),
    data=st.data(),
    finish=st.sampled_from([("length", None), ("stop", 2)]),
)
def test_however_an_answer_is_cut_its_text_and_logprobs_are_the_same(tokens, data, finish):
    params = SamplingParams(logprobs=1, max_tokens=20)
    cuts = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=4))
    choice = Choice(0, params, TextStream(TEXT, [5], params))
    parts = [
        (piece, answers.text_choice(choice, piece, TEXT))
        for piece in map(choice.take, rows_of(tokens, cuts, *finish))
    ]
    one = Choice(0, params, TextStream(TEXT, [5], params))
    one.take(rows_of(tokens, [], *finish)[0])
    whole = answers.text_choice(one, one.whole(), TEXT)
    assert "".join(part["text"] for _, part in parts) == whole["text"] == choice.whole().text
    shown = tokens[:-1] if finish[0] == "stop" else tokens  # the token that ended it is no part of the text
    assert whole["text"] == Tokenizer.from_str(tokenizer_json()).decode([5, *shown])[len(TEXT.decode([5])) :]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for _, part in parts for value in part["logprobs"][name]] == whole["logprobs"][name]
    assert choice.tokens == len(tokens) and choice.ended


def test_minus_infinity_is_a_number():
    row = AnswerRow(
        1, 0, [9], [TokenLogprobs(float("-inf"), [(9, float("-inf")), (9, -1.0)])], "length", None, 0, None
    )
    choice = Choice(0, SamplingParams(logprobs=2), None)
    shown = answers.text_choice(choice, choice.take(row), TEXT)["logprobs"]
    assert shown["token_logprobs"] == [-9999.0] and json.dumps(shown, allow_nan=False)


def test_a_prompts_logprobs_are_built_once_and_each_token_is_decoded_once():
    asked = completion(prompt=[5, 6, 7], n=64, prompt_logprobs=2)
    choices = []
    for index in range(64):
        choices.append(Choice(index, asked.params, None))
        choices[-1].prompt_logprobs = [TokenLogprobs(-1.0, [(8, -0.5), (9, -0.7)], 3) for _ in range(2)]
        choices[-1].take(AnswerRow(1, index, [5], None, "length", None, 0, None))
    text, decoded = ServedText(TEXT.model), []

    class Counted:
        def decode(self, ids, **_):
            decoded.extend(ids)
            return str(ids)

    text.tokenizer = Counted()
    made = CompletionFormat(asked, answers.Envelope("x", 0, "mine", False), asked.prompts, text).whole(choices)
    assert sorted(decoded) == [6, 7, 8, 9]
    first, *rest = [one["prompt_logprobs"] for one in made["choices"]]
    assert len(first) == 3 and first[0] is None and all(one is first for one in rest)


def test_errors_have_openais_shape():
    assert answers.error_body("no", 400, "n", "c") == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "c"}
    }
    assert answers.error_body("no", 429)["error"]["type"] == "rate_limit_error"


@given(st.text())
def test_events_are_one_line_of_json(text):
    line = answers.event({"text": text})
    assert line.startswith(b"data: ") and line.endswith(b"\n\n") and line.count(b"\n") == 2
    assert json.loads(line[6:]) == {"text": text}


@given(
    tokens=st.lists(st.integers(0, 299), min_size=1, max_size=6),
    finish=st.sampled_from([(None, None), ("length", None), ("stop", 2)]),
)
def test_a_row_in_single_tokens_is_the_same_answer(tokens, finish):
    """What is of the prompt comes with the first of them, the end with the last."""
    likely = [TokenLogprobs(-float(at), []) for at in range(len(tokens))]
    row = AnswerRow(1, 0, tokens, likely, *finish, 3, None, [TokenLogprobs(-9.0, [], 2)])
    each = row.singles()
    assert [one.tokens for one in each] == [[token] for token in tokens]
    assert [one.logprobs for one in each] == [[one] for one in likely]
    assert [(one.finish_reason, one.stop_reason) for one in each] == [(None, None)] * (len(tokens) - 1) + [finish]
    assert [one.prompt_logprobs for one in each] == [row.prompt_logprobs] + [None] * (len(tokens) - 1)
    bare = row._replace(logprobs=None)
    assert bare.singles() == [bare]
