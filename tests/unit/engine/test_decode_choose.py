"""Choosing tokens in a capture: the tokens of the host's sampling for the same random numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.engine.decode.choose import WIDE, SamplingRows, choose, kind_of, settings_of
from graft.engine.params import SamplingParams
from graft.engine.sampling.distribution import HEAD
from graft.engine.sampling.sampling import make_generator, sample
from graft.ops.advance_rows.reference import LEAVE, NOTHING, advance_rows
from graft.ops.advance_rows.triton import advance_rows_triton
from graft.ops.argmax_rows.op import argmax_into
from graft.ops.argmax_rows.triton import argmax_rows_triton
from marks import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def column(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)[:, None]


def on_device(logits, params, seeds, kind):
    """What a capture chooses, with the first number of each generator."""
    uniform = [torch.rand((), dtype=torch.float64, generator=make_generator(seed)).item() for seed in seeds]
    rows = SamplingRows(
        column([p.temperature for p in params]),
        column([p.min_p for p in params]),
        column([p.top_p for p in params]),
        column([p.top_k for p in params], torch.int64),
        column(uniform),
    )
    tokens = torch.empty(len(params), dtype=torch.int64)
    choose(kind, tokens, logits, rows)
    return tokens.tolist()


def on_host(logits, params, seeds):
    requests = [
        SimpleNamespace(params=p, prompt=[1], new_tokens=[], generator=make_generator(seed))
        for p, seed in zip(params, seeds, strict=True)
    ]
    return [choice.token for choice in sample(logits, requests)]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-39, 0.3, 1.0, 4.0, 1e300]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 50, 1000]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 2**32), st.sampled_from([5, 300]), st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_capture_draws_the_tokens_of_the_host(params, seed, vocab, tied, dtype):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), vocab, generator=g) * 3
    logits = (logits.round() if tied else logits).to(dtype)
    seeds = [seed + row for row in range(len(params))]
    assert on_device(logits, params, seeds, "cut") == on_host(logits, params, seeds)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_without_top_k_and_top_p_nothing_is_sorted_and_the_tokens_are_the_same(seed, tied):
    params = [SamplingParams(temperature=t, min_p=m) for t, m in ((0.0, 0.0), (0.7, 0.0), (1.5, 0.1), (1.0, 1.0))]
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(seed)) * 2
    logits = logits.round() if tied else logits
    seeds = list(range(seed, seed + 4))
    expected = on_host(logits, params, seeds)
    assert on_device(logits, params, seeds, "sampled") == expected == on_device(logits, params, seeds, "cut")


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.5, 0.9, 0.99]), st.sampled_from([0.2, 1.0, 2.0, 30.0]))
def test_a_nucleus_is_drawn_right_or_said_to_be_wide(seed, top_p, temperature):
    """A vocabulary larger than the head."""
    params = [SamplingParams(temperature=temperature, top_p=top_p, top_k=k) for k in (0, 0, HEAD, 300)]
    logits = torch.randn(4, 3 * HEAD, generator=torch.Generator().manual_seed(seed)) * 3
    seeds = list(range(seed, seed + 4))
    got, expected = on_device(logits, params, seeds, "cut"), on_host(logits, params, seeds)
    assert all(token in (right, WIDE) for token, right in zip(got, expected, strict=True))
    assert got[2:] == expected[2:], "with top_k up to HEAD no nucleus is wide"
    if temperature == 30.0:
        assert got[:2] == [WIDE, WIDE]
    if temperature == 0.2:
        assert WIDE not in got


def test_rows_without_a_finite_largest_value_are_minus_one():
    logits = torch.zeros(4, 50)
    logits[1, 3], logits[2], logits[3, 7] = torch.nan, -torch.inf, torch.inf
    for kind in ("greedy", "sampled", "cut"):
        tokens = on_device(logits, [SamplingParams(temperature=1.0, top_p=0.5)] * 4, range(4), kind)
        assert tokens[1:] == [-1, -1, -1] and tokens[0] >= 0


def test_what_a_request_needs():
    kinds = {
        "greedy": [SamplingParams(), SamplingParams(top_k=5, top_p=0.5), SamplingParams(min_tokens=2)],
        "sampled": [SamplingParams(temperature=1), SamplingParams(temperature=1, min_p=0.5, top_k=-1)],
        "cut": [SamplingParams(temperature=1, top_k=HEAD), SamplingParams(temperature=1, top_p=0.5)],
        "logits": [
            SamplingParams(logprobs=0),
            SamplingParams(repetition_penalty=1.1),
            SamplingParams(min_tokens=3),
            SamplingParams(temperature=1, top_k=HEAD + 1),
        ],
    }
    for kind, params in kinds.items():
        assert [kind_of(one, 2) for one in params] == [kind] * len(params)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 12), st.sampled_from([1, 3, 100, 1023, 1025, 5000]), st.integers(0, 2**32), st.booleans())
def test_the_kernel_takes_the_first_of_the_largest(rows, vocab, seed, tied):
    """Exactly, whatever the dtype: an index that is nearly right is wrong."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 2, vocab, generator=g)[:, 1]  # rows lie apart
    logits = logits.round() if tied else logits
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        narrow = logits.to(device=DEVICE, dtype=dtype)
        first = (narrow == narrow.amax(-1, keepdim=True)).to(torch.uint8).cpu().numpy().argmax(-1)
        out, again = (torch.full((rows,), -9, device=DEVICE) for _ in range(2))
        argmax_rows_triton(narrow, out)
        argmax_into(again, narrow)
        assert out.tolist() == again.tolist() == first.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_that_advances_rows_writes_what_the_reference_writes(seed):
    """Lengths, tables and commands too, which the op changes in place; and nothing beyond its rows."""
    from graft.ops.advance_rows.cases import CASES

    g = torch.Generator().manual_seed(seed)
    for case in CASES:
        args = case.make(DEVICE, torch.float32, g)
        ours = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        theirs = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        out = torch.full((3, len(args[0]) + 5), -7, device=DEVICE)
        advance_rows_triton(*ours, out=out[:, : len(args[0])])
        assert out[:, : len(args[0])].equal(advance_rows(*theirs)) and (out[:, len(args[0]) :] == -7).all()
        for one, other in zip(ours[:6], theirs[:6], strict=True):
            assert one.equal(other)
        assert (ours[3] == NOTHING).all()


def test_commands_and_padding():
    """A row that gets a block, one whose block is exchanged, one that leaves, padding; the padding block is 99."""
    tokens = torch.tensor([7, 8, -1, 5])
    seq_lens, live = torch.tensor([4, 6, 9, 1]), torch.tensor([1, 1, 1, 0])
    places, blocks = torch.tensor([1, 0, LEAVE, NOTHING]), torch.tensor([40, 41, 42, 43])
    block_tables = torch.tensor([[10, 10, 10], [11, 12, 11], [13, 14, 15], [99, 99, 99]])
    ids, positions, slots = advance_rows(tokens, seq_lens, live, places, blocks, block_tables, 99, 4)
    assert ids.tolist() == [7, 8, 0, 5] and positions.tolist() == [4, 6, 0, 0]
    assert slots.tolist() == [160, 50, 396, 396] and seq_lens.tolist() == [5, 7, 1, 1]
    assert live.tolist() == [1, 1, 0, 0]
    assert block_tables[:, 0].tolist() == [10, 41, 99, 99] and block_tables[0, 1] == 40


def test_a_temperature_may_be_any_whole_number():
    """One above 2^63 made the array of a step one of objects, and the step of all requests failed."""
    params = SamplingParams(temperature=10**26, seed=0)
    request = SimpleNamespace(params=params, generator=make_generator(0))
    assert settings_of([request], torch.device("cpu")).temperature.item() == 1e26
