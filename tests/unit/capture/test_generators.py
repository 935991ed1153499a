"""Random number generators in a program: sampled from as in eager, or refused; never seeded just once."""

from __future__ import annotations

import random
import secrets
import sys
import threading
from random import uniform

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import random_sample as numpy_sample
from torch import manual_seed, nn
from torch.testing._utils import wrapper_set_seed

import graft
from graft.base.errors import CaptureError, CaptureRefused
from graft.ir.program.host_samples import host_samples_refused

GENERATOR = torch.Generator()
OLD = torch.__version__ < "2.12"  # whose export takes no generator as an argument: such calls are refused as a whole
UNKNOWN = r"could not capture \w+: NotImplementedError: argument of type: .*Generator"
takes_generators = pytest.mark.skipif(OLD, reason="this torch exports no call with a generator: it is refused")


def seeds(x):
    torch.manual_seed(3)
    return x + torch.rand(3)


def seeds_by_another_name(x):
    manual_seed(3)
    return x + torch.rand(3)


def puts_back(x):
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return x + first - torch.rand(3)


def seeds_with_a_helper_of_torch(x):
    return x + wrapper_set_seed(torch.rand, 3)  # torch.testing's


def forks(x):
    with torch.random.fork_rng():
        return x + torch.rand(3)


def reads_the_seed(x):
    return x + torch.initial_seed()


def makes_one(x):
    return x + torch.rand(3, generator=torch.Generator().manual_seed(1))


def seeds_its_own(x):
    GENERATOR.manual_seed(1)
    return x + torch.rand(3, generator=GENERATOR)


def python(x):
    return x + random.random()


def numpy(x):
    return x + np.random.rand()


def imported(x):
    return x + uniform(0, 1)


def imported_from_numpy(x):
    return x + helper()


def helper():
    return float(numpy_sample())


RANDOM, STREAM, LEGACY = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)


def object_of_python(x):
    return x + RANDOM.random()


def object_of_numpy(x):
    return x + float(STREAM.random())


def old_object_of_numpy(x):
    return x + LEGACY.rand()


def makes_one_of_numpy(x):
    return x + float(np.random.default_rng().random())


def seeds_numpy(x):
    np.random.seed(0)
    return x + 1


def a_secret(x):
    return x + secrets.randbelow(1000)


def reads_the_seed_of_its_own(x):
    return x + GENERATOR.initial_seed()


def adds_a_digit_of_the_seed(x):
    return x + GENERATOR.initial_seed() % 1000


def goes_by_the_seed(x):
    return x.sin() if GENERATOR.initial_seed() % 2 else x.cos().exp()


def keeps_a_digit_of_the_seed(x):
    return x + torch.tensor([GENERATOR.initial_seed() % 1000, 2, 3])


class Samples(nn.Module):
    def forward(self, x):
        return x + self.number()

    def number(self):
        return RANDOM.random()


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (seeds, r"manual_seed, test_generators.py:\d+.*seed before the call"),
        (seeds_by_another_name, r"manual_seed, test_generators.py:\d+"),
        (puts_back, r"get_state, test_generators.py:\d+"),
        (seeds_with_a_helper_of_torch, r"\w+, _utils.py:\d+"),
        (forks, r"get_state, test_generators.py:\d+"),
        (reads_the_seed, r"initial_seed, test_generators.py:\d+"),
        (makes_one, UNKNOWN if OLD else "samples from a torch.Generator that it makes itself"),
        (seeds_its_own, UNKNOWN if OLD else "seeds a random number generator"),
        (python, r"samples from Python's random \(test_generators.py:\d+\)"),
        (numpy, r"samples from numpy.random \(test_generators.py:\d+\)"),
        (imported, r"samples from Python's random \(test_generators.py:\d+\)"),
        (imported_from_numpy, r"samples from numpy.random \(test_generators.py:\d+\)"),
        (object_of_python, "samples from a Random object"),
        (object_of_numpy, "samples from a Generator object"),
        (old_object_of_numpy, "samples from a RandomState object"),
        (Samples(), "samples from a Random object"),
        (makes_one_of_numpy, r"samples from numpy.random.default_rng \(test_generators.py:\d+\)"),
        (seeds_numpy, r"samples from numpy.random.seed \(test_generators.py:\d+\)"),
        (a_secret, r"samples from secrets.randbelow \(test_generators.py:\d+\)"),
        (reads_the_seed_of_its_own, r"%add \(test_generators.py:\d+\) depends on the seed of a generator"),
        (adds_a_digit_of_the_seed, r"%add \(test_generators.py:\d+\) depends on the seed of a generator"),
        (goes_by_the_seed, "depends on the seed of a generator"),
        (keeps_a_digit_of_the_seed, "depends on the seed of a generator"),
    ],
)
def test_what_a_graph_would_do_once_is_refused(program, problem):
    GENERATOR.manual_seed(1)  # seeding it so again would change nothing that could be seen
    before = torch.get_rng_state(), GENERATOR.get_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(CaptureError, match=problem):
        graft.compile(program, (torch.zeros(3),))
    after = torch.get_rng_state(), GENERATOR.get_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1]) and before[2:] == after[2:]
    assert type(torch.random.default_generator) is torch.Generator and random.random() != random.random()


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("sampled", [0, 3])
def test_the_generator_object_of_torch_is_not_seeded_either(seed, sampled):
    """Whatever it was seeded with before, and whether it was sampled from since."""
    torch.manual_seed(seed)
    torch.rand(sampled)
    state = torch.get_rng_state()

    def program(x):
        torch.default_generator.manual_seed(6)
        return x + torch.rand(3)

    with pytest.raises(CaptureError, match="seeds a random number generator"):
        graft.compile(program, (torch.zeros(3),))
    assert torch.equal(torch.get_rng_state(), state) and torch.initial_seed() == seed
    if not OLD:
        graft.compile(lambda x: x + torch.rand(3, generator=torch.default_generator), (torch.zeros(3),))
        assert torch.equal(torch.get_rng_state(), state) and torch.initial_seed() == seed


def test_generators_that_the_program_only_holds_are_no_matter():
    states = RANDOM.getstate(), STREAM.bit_generator.state["state"], uniform

    def program(x):
        return x + 1 if RANDOM is not None and STREAM is not None and uniform is not None else x

    graft.compile(program, (torch.zeros(3),))
    assert (RANDOM.getstate(), STREAM.bit_generator.state["state"], uniform) == states


class Held(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = {"list": [held]}

    def forward(self, x, generator=None):
        own = torch.rand(3, generator=self.held["list"][0])
        return x + own * torch.randn(3, generator=generator) + torch.rand_like(x)


@takes_generators
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31), calls=st.integers(1, 3))
def test_a_generator_that_is_held_or_passed_is_sampled_from_as_in_eager(seed, calls):
    held, passed, x = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1), torch.zeros(3)
    module = Held(held)

    def run(program):
        torch.manual_seed(seed)
        held.manual_seed(seed)
        passed.manual_seed(seed + 1)
        return [program(x, passed) for _ in range(calls)]

    compiled = graft.compile(module, (x, passed))
    assert all(map(torch.equal, run(compiled), run(module)))
    assert not torch.equal(*map(torch.stack, (run(compiled), [module(x, passed) for _ in range(calls)])))


@takes_generators
def test_a_capture_that_would_not_advance_it_is_refused():
    with pytest.raises(CaptureRefused, match="samples from a generator of its own"):
        graft.compile(Held(torch.Generator()), (torch.zeros(3),), backend="cuda_graph")


def test_inductor_says_that_it_samples_other_numbers():
    compiled = graft.compile(lambda x: x + torch.rand(3), (torch.zeros(3),), backend="inductor")
    assert "inductor: it samples other random numbers than eager for the same seed" in compiled.report.notes


def test_other_threads_seed_while_one_compiles():
    problems, done = [], threading.Event()

    def seed():
        while not done.is_set():
            try:
                torch.manual_seed(1)
            except CaptureError as error:
                problems.append(error)
                return

    class Deep(nn.Module):
        def forward(self, x):
            for _ in range(20):
                x = torch.relu(x @ x)
            return x

    other = threading.Thread(target=seed)
    other.start()
    try:
        graft.compile(Deep(), (torch.randn(4, 4),))
    finally:
        done.set()
        other.join()
    assert not problems


def test_a_module_imported_while_one_is_traced_has_the_real_functions(tmp_path, monkeypatch):
    text = "from random import choice\nfrom numpy.random import rand\nfrom torch.random import default_generator\n"
    (tmp_path / "imported_meanwhile.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def program(x):
        import imported_meanwhile  # noqa: F401

        return x + 1

    graft.compile(program, (torch.ones(3),))
    imported = sys.modules.pop("imported_meanwhile")
    assert imported.choice is random.choice and imported.rand is np.random.rand
    assert imported.default_generator is torch.default_generator
    assert imported.choice([3]) == 3


def test_dynamo_does_not_take_what_stood_in_for_numpy_functions(monkeypatch):
    """Its table has ids; those of functions that are freed again would be the ids of anything, a branch's lambda."""
    from torch._dynamo import trace_rules

    table = trace_rules._numpy_function_ids
    monkeypatch.setattr(table, "function_ids", None)
    monkeypatch.setattr(table, "function_names", None)
    graft.compile(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)), (torch.ones(3),))
    assert trace_rules.is_numpy(np.random.rand)
    assert table() == set(table.lazy_initializer())


def test_traces_of_two_threads_refuse_and_leave_nothing_behind():
    real, inside, left, problems = (random.random, np.random.rand), threading.Barrier(2), threading.Event(), []

    def trace(last):
        with host_samples_refused():
            inside.wait(60)
            if last:
                left.wait(60)
            try:
                random.random()
            except CaptureError as error:
                problems.append(str(error))
        left.set()

    threads = [threading.Thread(target=trace, args=(last,)) for last in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (random.random, np.random.rand) == real
    assert len(problems) == 2 and all("samples from Python's random (test_generators.py:" in p for p in problems)
    assert 0 <= random.random() < 1


def test_samples_that_nothing_reads_advance_the_generator():
    def program(x):
        torch.rand(3)
        torch.empty(3).normal_()
        F.dropout(x, 0.5, training=True)
        return x * torch.rand(3), F.dropout(x, 0.0, training=True)

    x = torch.ones(3)
    compiled = graft.compile(program, (x,))
    for _ in range(2):
        torch.manual_seed(3)
        expected = program(x), torch.rand(2)
        torch.manual_seed(3)
        torch.testing.assert_close((compiled(x), torch.rand(2)), expected, rtol=0, atol=0)


def test_attention_and_recurrent_layers_without_dropout_do_not_sample():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(4, 4, 2)

        def forward(self, q):
            y = F.scaled_dot_product_attention(q, q, q)
            return F.dropout(self.layer(y)[0], 0.5, self.training)

    q = torch.randn(2, 3, 4)
    assert not graft.compile(Layers().eval(), (q,)).samples
    assert graft.compile(Layers().train(), (q,)).samples
