"""Sampling against exact probabilities in plain Python: frequencies, supports, seeds and log probabilities."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from graft.base.errors import LogitsError
from graft.engine.params import SamplingParams
from graft.engine.sampling import distribution
from graft.engine.sampling.distribution import sample_tokens, weights
from graft.engine.sampling.sampling import make_generator, sample
from marks import examples
from sampling_cases import HOT, INF, LOGITS, NEW, PROMPT, exact, normal, penalised, request

LAST = 1 - 2**-53  # the largest number that a draw can give


def chi_square(seen: Counter, p: list[float]) -> float:
    """How far the counts are from the probabilities, in standard deviations above what chance gives."""
    samples = sum(seen.values())
    if any(count and p[token] == 0 for token, count in seen.items()):
        return INF
    likely = [t for t, value in enumerate(p) if value > 0]
    statistic = sum((seen[t] - samples * p[t]) ** 2 / (samples * p[t]) for t in likely)
    freedom = len(likely) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


FAR = 5.0  # standard deviations
SAMPLES = 12_000
# what is asked for: a wrong reading of it, which the same samples must refute
READINGS = {
    "temperature": ({"temperature": 0.7}, lambda x, p: exact(x, replace(p, temperature=0.8))),
    "temperature above 1": ({"temperature": 2.5}, lambda x, p: exact(x, replace(p, temperature=1 / 2.5))),
    "top_k": ({"top_k": 5}, lambda x, p: exact(x, replace(p, top_k=4))),
    "top_k one more": ({"top_k": 5}, lambda x, p: exact(x, replace(p, top_k=6))),
    "top_p one more": ({"top_p": 0.7}, lambda x, p: exact(x, replace(p, top_p=0.8))),
    "top_p one less": ({"top_p": 0.7}, lambda x, p: exact(x, replace(p, top_p=0.6))),
    "min_p": ({"min_p": 0.3}, lambda x, p: exact(x, replace(p, min_p=0.4))),
    "min_p absolute": ({"min_p": 0.2}, lambda x, p: exact(x, replace(p, min_p=0.2 / max(exact(x, HOT))))),
    "top_p of what top_k left": (
        {"top_k": 6, "top_p": 0.6},
        lambda x, p: exact(x, p, ("temperature", "min_p", "top_p", "top_k")),
    ),
    "temperature before top_p": (
        {"temperature": 1.8, "top_p": 0.6},
        lambda x, p: exact(x, p, ("min_p", "top_k", "top_p", "temperature")),
    ),
    "temperature before min_p": (
        {"temperature": 1.8, "min_p": 0.3},
        lambda x, p: exact(x, p, ("min_p", "temperature", "top_k", "top_p")),
    ),
    "all together": (
        {"temperature": 0.9, "top_k": 8, "top_p": 0.85, "min_p": 0.1},
        lambda x, p: exact(x, replace(p, top_p=1.0)),
    ),
}


def samples(logits: list[float], one, ends=frozenset()) -> Counter:
    rows = torch.tensor(logits).expand(SAMPLES, -1)
    return Counter(choice.token for choice in sample(rows, [one] * SAMPLES, ends))


@pytest.mark.some(6)
@pytest.mark.parametrize("name", READINGS)
def test_frequencies_are_the_exact_probabilities(name):
    fields, wrong = READINGS[name]
    params = replace(HOT, **fields)
    seen = samples(LOGITS, request(params, seed=1))
    assert chi_square(seen, exact(LOGITS, params)) < FAR
    assert chi_square(seen, wrong(LOGITS, params)) > FAR, "the bound tells a wrong reading"


PENALTIES = {
    "repetition over the prompt too": ({"repetition_penalty": 1.4}, {"prompt": ()}, {}),
    "repetition over the new tokens too": ({"repetition_penalty": 1.4}, {"new": ()}, {}),
    "repetition strength": ({"repetition_penalty": 1.4}, {}, {"repetition_penalty": 1.25}),
    "repetition of negative logits": ({"repetition_penalty": 2.5}, {"prompt": [3, 1, 4]}, {}),
    "presence over the new tokens alone": ({"presence_penalty": 0.8}, {"new": PROMPT + NEW}, {}),
    "presence once": ({"presence_penalty": 0.8}, {}, {"presence_penalty": 0.0, "frequency_penalty": 0.8}),
    "frequency each time": ({"frequency_penalty": 0.4}, {}, {"frequency_penalty": 0.0, "presence_penalty": 0.4}),
    "frequency over the new tokens alone": ({"frequency_penalty": 0.4}, {"new": PROMPT + NEW}, {}),
    "a bonus": ({"presence_penalty": -0.5}, {}, {"presence_penalty": 0.5}),
    "all together": (
        {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": -0.3},
        {},
        {"repetition_penalty": 1.0},
    ),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_give_the_exact_probabilities(name):
    fields, wrong_history, wrong_fields = PENALTIES[name]
    params = replace(HOT, **fields)
    history = {"prompt": PROMPT, "new": NEW}
    seen = samples(LOGITS, request(params, seed=2, **history))
    assert chi_square(seen, exact(penalised(LOGITS, params, **history), params)) < FAR
    wrong = penalised(LOGITS, replace(params, **wrong_fields), **(history | wrong_history))
    assert chi_square(seen, exact(wrong, params)) > FAR, "the bound tells a wrong reading"


def test_end_tokens_are_barred_until_min_tokens():
    params = replace(HOT, min_tokens=5, stop_token_ids=(9, 10**6))
    early = samples(LOGITS, request(params, new=[1] * 4), frozenset({3}))
    assert early[3] == early[9] == 0 and len(early) == len(LOGITS) - 2
    late = samples(LOGITS, request(params, new=[1] * 5), frozenset({3}))
    assert late[3] and late[9]
    assert chi_square(late, exact(LOGITS, params)) < FAR < chi_square(early, exact(LOGITS, params))
    greedy = SamplingParams(min_tokens=1)
    row = torch.tensor([LOGITS])
    assert sample(row, [request(greedy)])[0].token == 3
    assert sample(row, [request(greedy)], frozenset({3}))[0].token == 6
    assert sample(row, [request(greedy, new=[1])], frozenset({3}))[0].token == 3


def test_greedy_is_the_largest_after_penalties():
    params = SamplingParams(repetition_penalty=2.0)
    logits = torch.tensor([LOGITS, LOGITS, [-x for x in LOGITS]])
    given_ = [request(params, prompt=[3]), request(params, new=[3, 6]), request(params, new=[11])]
    expected = [
        penalised(row.tolist(), params, one.prompt, one.new_tokens) for row, one in zip(logits, given_, strict=True)
    ]
    before = logits.clone()
    assert [c.token for c in sample(logits, given_)] == [row.index(max(row)) for row in expected] == [6, 9, 5]
    assert torch.equal(logits, before), "the caller's logits stay as they are"


quarters = st.integers(-24, 24).map(lambda i: i / 4)  # exact in every dtype, and often equal
wide = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 1.9]),
        "top_k": st.integers(-1, 12),
        "top_p": st.sampled_from([0.05, 0.31, 0.53, 0.8, 0.97, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.23, 0.71]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 2.0]),
        "presence_penalty": st.sampled_from([0.0, 0.75, -1.25]),
        "frequency_penalty": st.sampled_from([0.0, 0.5, -0.25]),
    }
).map(lambda fields: SamplingParams(**fields))
few = st.lists(st.integers(0, 5), max_size=6)


def clear_cut(x: list[float], params: SamplingParams) -> bool:
    """Whether no threshold of min_p or top_p is so near that rounding decides."""
    p = exact(x, replace(params, min_p=0.0, top_k=0, top_p=1.0))
    if params.min_p and any(abs(value / max(p) - params.min_p) < 1e-9 for value in p):
        return False
    sums, total = [], 0.0
    for value in sorted(exact(x, replace(params, top_p=1.0)), reverse=True):
        total += value
        sums.append(total)
    return all(abs(value - params.top_p) > 1e-9 for value in sums) or params.top_p == 1


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(quarters | st.just(-INF), min_size=6, max_size=12),
    wide,
    few,
    few,
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_what_can_be_drawn_is_exactly_what_is_allowed(logits, params, prompt, new, dtype):
    """The weights are the exact probabilities, and each allowed token is sampled from its own interval, no other."""
    assume(max(logits) > -INF)
    x = penalised(logits, params, prompt, new)
    p = exact(x, params)
    assume(clear_cut(x, params))
    edited = torch.tensor([x], dtype=torch.float64)
    own = normal(weights(edited, [params])[0].tolist())
    assert own == pytest.approx(p, abs=1e-9)
    assert [w > 0 for w in own] == [value > 0 for value in p]
    allowed = {t for t, value in enumerate(p) if value > 0}
    middles = {t: math.fsum(p[:t]) + p[t] / 2 for t in sorted(allowed) if p[t] > 1e-9}
    low, high = sample_tokens(edited.expand(2, -1), [params] * 2, [0.0, LAST]).tolist()
    assert {low, high} <= allowed and low <= min(middles) and high >= max(middles)
    got = sample_tokens(edited.expand(len(middles), -1), [params] * len(middles), list(middles.values()))
    assert got.tolist() == list(middles)
    one = request(params, prompt, new)
    tokens = {c.token for c in sample(torch.tensor([logits] * 20, dtype=dtype), [one] * 20)}
    assert tokens <= allowed


def test_ties_stay_together():
    """top_k and top_p keep every token as likely as the last one they keep."""
    logits = torch.tensor([[0.0, 1.0, 1.0, 2.0, 1.0]])
    for fields in ({"top_k": 2}, {"top_k": 3}, {"top_p": 0.6}):
        assert weights(logits, [replace(HOT, **fields)])[0].nonzero()[:, 0].tolist() == [1, 2, 3, 4]
    assert weights(logits, [replace(HOT, top_k=1)])[0].nonzero()[:, 0].tolist() == [3]
    halves = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log2() * math.log(2)
    assert weights(halves, [replace(HOT, top_p=0.74)])[0].nonzero()[:, 0].tolist() == [0, 1]
    assert weights(halves, [replace(HOT, top_p=0.76)])[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [700, 1024, 5000, 20_000])
def test_large_nuclei_are_exact_too(size):
    """Flat rows, whose nucleus is larger than the head that is looked at first, beside steep ones."""
    g = torch.Generator().manual_seed(size)
    scale = torch.tensor([[0.01], [0.3], [3.0], [12.0]])
    logits = torch.randn(4, size, generator=g) * scale
    params = [replace(HOT, top_p=p) for p in (0.97, 0.5, 0.9, 0.9)]
    own = weights(logits, params) > 0
    for row in range(4):
        p = exact(logits[row].tolist(), params[row])
        assert own[row].tolist() == [value > 0 for value in p]
    assert size < 5000 or own[0].sum() > 2 * distribution.HEAD


any_params = st.tuples(wide, st.sampled_from([None, 0, 3]), st.booleans()).map(
    lambda t: replace(t[0], logprobs=t[1], temperature=0.0 if t[2] else t[0].temperature)
)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.tuples(any_params, few, few, st.integers(0, 99)), min_size=2, max_size=6),
    st.integers(0, 1000),
    st.randoms(),
)
def test_a_request_gets_the_same_tokens_alone_or_among_others(rows, seed, order):
    """Tokens and log probabilities of four steps: alone, together, and together in another order and in pieces."""
    logits = torch.randn(4, len(rows), 1200, generator=torch.Generator().manual_seed(seed)) * 2

    def steps(picked: list[int]) -> dict[int, list]:
        asked = {i: request(*rows[i][:3], seed=rows[i][3]) for i in picked}
        got = [sample(step[picked], list(asked.values())) for step in logits]
        return {i: [choices[place] for choices in got] for place, i in enumerate(picked)}

    alone = {i: steps([i])[i] for i in range(len(rows))}
    assert steps(list(range(len(rows)))) == alone
    mixed = list(range(len(rows)))
    order.shuffle(mixed)
    at_once, distribution.AT_ONCE = distribution.AT_ONCE, 2 * 1200
    try:
        assert steps(mixed) == alone
    finally:
        distribution.AT_ONCE = at_once


def test_a_token_takes_one_number_of_the_requests_own_generator():
    one, other = request(HOT, seed=5), request(SamplingParams(), seed=6)
    before, world = other.generator.get_state(), torch.get_rng_state()
    sample(torch.tensor([LOGITS] * 4), [one, other, one, one])
    expected = make_generator(5)
    torch.rand(3, dtype=torch.float64, generator=expected)
    assert torch.equal(one.generator.get_state(), expected.get_state())
    assert torch.equal(other.generator.get_state(), before), "greedy samples nothing"
    assert torch.equal(torch.get_rng_state(), world)


def test_seeds_differ_and_siblings_may_run_past_64_bits():
    def tokens(seed):
        return [c.token for c in sample(torch.tensor([LOGITS] * 40), [request(HOT, seed=seed)] * 40)]

    assert tokens(1) == tokens(1) != tokens(2)
    assert tokens(2**64 - 1 + 3) == tokens(2)
    assert tokens(-1) == tokens(-1)
    assert make_generator(None).initial_seed() != make_generator(None).initial_seed()


def test_a_token_without_probability_is_never_drawn():
    """At both ends of the uniform numbers; barred tokens first, last and in the middle; weights that vanish."""
    logits = torch.tensor([[-INF, 0.0, -INF, -1e30, 0.0, -INF]])
    for uniform in (0.0, 1e-320, 0.25, 0.5 - 2**-54, 0.5, LAST):
        assert sample_tokens(logits, [HOT], [uniform]).item() == (1 if uniform < 0.5 else 4)
    for temperature in (1e-39, 5e-324, 1e300):
        assert sample_tokens(torch.tensor([LOGITS]), [replace(HOT, temperature=temperature)], [0.0]).item() in (0, 3)
    assert sample_tokens(torch.tensor([LOGITS]), [replace(HOT, temperature=5e-324)], [LAST]).item() == 3


@pytest.mark.parametrize("drift", [1e-9, -1e-9])
def test_sums_that_drift_draw_no_token_without_probability(monkeypatch, drift):
    """A device adds in an order of its own, so that the sum at a barred token may differ from the one before it."""
    real = torch.Tensor.cumsum
    monkeypatch.setattr(
        torch.Tensor, "cumsum", lambda t, dim: real(t, dim) + drift * torch.arange(1.0, t.shape[-1] + 1)
    )
    logits = torch.tensor([[-INF, 0.0, -INF, 0.0, -INF]])
    for uniform in (0.0, 0.5 - 1e-9, 0.5, 0.5 + 1e-9, LAST):
        assert sample_tokens(logits, [HOT], [uniform]).item() in (1, 3)


BAD = {"nan": [0.0, math.nan, 1.0], "infinity": [0.0, INF, 1.0], "all barred": [-INF, -INF, -INF]}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("params", [SamplingParams(), HOT, replace(HOT, top_p=0.5, top_k=2, min_p=0.1)])
def test_bad_logits_are_the_error_of_their_row_alone(name, params):
    good = [0.0, 1.0, 2.0]
    told = sample(torch.tensor([good, BAD[name], BAD[name], good]), [request(params)] * 4)
    assert [choice.error is None for choice in told] == [True, False, False, True]
    assert isinstance(told[1].error, LogitsError) and "try float32" in str(told[1].error) and told[1].token == -1
    assert len(sample(torch.tensor([good, [-INF, 0.0, -INF]]), [request(params)] * 2)) == 2, "some barred is no error"


def test_nothing_left_to_choose_is_an_error():
    (told,) = sample(torch.zeros(1, 2), [request(SamplingParams(min_tokens=1))], frozenset({0, 1}))
    assert "every token barred" in str(told.error)


class Reads(TorchDispatchMode):
    """Counts the calls that read a tensor of this size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.calls = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(a, torch.Tensor) and a.numel() >= self.size for a in args):
            self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_greedy_batch_reads_the_logits_once():
    logits = torch.randn(7, 500)
    with Reads(7 * 500) as reads:
        choices = sample(logits, [request(SamplingParams(top_p=0.5, top_k=3))] * 7)
    assert reads.calls == ["aten.max.dim"]
    assert [c.token for c in choices] == logits.argmax(-1).tolist()
    assert sample(torch.empty(0, 500), []) == []


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 20), wide, st.sampled_from([torch.float32, torch.bfloat16]))
def test_log_probabilities_are_the_models_own(seed, count, params, dtype):
    """Of the logits as they came: before penalties, temperature and everything else."""
    logits = (torch.randn(2, 15, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    asked = request(replace(params, logprobs=count), prompt=[1, 2], new=[3, 3])
    plain, choice = sample(logits, [request(params), asked])
    assert plain.logprobs is None
    own = logits[1].double().log_softmax(-1).tolist()
    rank = {t: 1 + sum(other > value for other in own) for t, value in enumerate(own)}
    assert choice.token in choice.logprobs and set(map(type, choice.logprobs)) == {int}
    for token, entry in choice.logprobs.items():
        assert entry.logprob == pytest.approx(own[token], abs=1e-4)
        assert entry.rank == rank[token]
    others = [t for t in choice.logprobs if t != choice.token or rank[t] <= count]
    assert len(others) >= min(count, 15) - 1 and len(choice.logprobs) <= min(count, 15) + 1
    least = sorted(own, reverse=True)[: min(count, 15)]
    assert [e.logprob for e in choice.logprobs.values()][: len(least)] == pytest.approx(least, abs=1e-4)


def test_log_probabilities_tell_penalised_from_raw():
    params = SamplingParams(repetition_penalty=2.0, logprobs=2)
    (choice,) = sample(torch.tensor([LOGITS]), [request(params, prompt=[3])])
    own = torch.tensor(LOGITS).log_softmax(-1).tolist()
    assert choice.token == 6 and list(choice.logprobs) == [3, 6]
    assert choice.logprobs[3].rank == 1 and choice.logprobs[3].logprob == pytest.approx(own[3])
    wrong = torch.tensor(penalised(LOGITS, params, prompt=[3])).log_softmax(-1).tolist()
    assert choice.logprobs[3].logprob != pytest.approx(wrong[3], abs=1e-2)
    (only,) = sample(
        torch.tensor([LOGITS]), [request(SamplingParams(repetition_penalty=2.0, logprobs=0), prompt=[3])]
    )
    assert list(only.logprobs) == [6] and only.logprobs[6].rank == 2
