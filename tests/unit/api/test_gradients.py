"""Gradients through graft.compile: honoured, refused or dropped, never lost without a word."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import graft
from graft.base.errors import GradientsRefused, UsageError
from marks import short


class Block(nn.Module):
    """Norm, merged gate and up, a straight-through rounding whose backward differs from its forward, dropout."""

    def __init__(self, d=8, p=0.0, cut=False):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d))
        self.gate, self.up, self.down = nn.Linear(d, 16, False), nn.Linear(d, 16, False), nn.Linear(16, d, False)
        self.p, self.cut = p, cut

    def forward(self, x, scale=None):
        h = self.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        y = self.down(F.silu(self.gate(h)) * self.up(h))
        y = y + (y.round() - y).detach() * 0.1
        if self.cut:
            with torch.no_grad():
                y = y + h
        y = F.dropout(y, self.p, training=True)
        return {"y": x + y * (1 if scale is None else scale), "top": y.argmax(-1)}


def gradients(run, module, x, scale, weight):
    for parameter in module.parameters():
        parameter.grad = None
    leaf, factor = x.clone().requires_grad_(), scale.clone().requires_grad_()
    torch.manual_seed(0)
    result = run(leaf * 2, factor)  # not a leaf: what comes before goes on from the gradient of the input
    (result["y"] * weight).sum().backward()
    found = {name: p.grad for name, p in module.named_parameters()}
    return result, {**found, "x": leaf.grad, "scale": factor.grad}


@pytest.mark.parametrize("backend", short(["eager", "inductor"], "eager"))
def test_honoured_gradients_are_those_of_the_module(backend):
    module, x, scale = Block(), torch.randn(2, 3, 8), torch.randn(8)
    expected, wanted = gradients(
        module, module, x, scale, torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    )
    compiled = graft.compile(module, (x, scale), grad="honour", backend=backend)
    assert len(compiled.report.transforms["fuse_rms_norm"].matches) == 1
    assert any(note.startswith("gradients: backward runs") for note in compiled.report.notes)
    got, found = gradients(
        compiled, module, x, scale, torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    )
    torch.testing.assert_close(got["y"], expected["y"])
    assert got["y"].requires_grad and not got["top"].requires_grad
    torch.testing.assert_close(found, wanted, check_device=False)
    with pytest.raises(AssertionError):  # the tolerance tells a wrong gradient from a right one
        torch.testing.assert_close({**found, "x": found["x"] * 1.001}, wanted)


@settings(max_examples=8)
@given(p=st.sampled_from([0.0, 0.5]), cut=st.booleans(), frozen=st.sets(st.sampled_from(["w", "gate", "down"])))
def test_any_mix_of_frozen_parameters_cuts_and_dropout(p, cut, frozen):
    module, x, scale, weight = Block(p=p, cut=cut), torch.randn(2, 3, 8), torch.randn(8), torch.randn(2, 3, 8)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.partition(".")[0] not in frozen)
    _, wanted = gradients(module, module, x, scale, weight)
    compiled = graft.compile(module, (x, scale), grad="honour")
    _, found = gradients(compiled, module, x, scale, weight)
    assert {n for n, g in found.items() if g is None} == {n for n, g in wanted.items() if g is None}
    known = [name for name, grad in wanted.items() if grad is not None]
    torch.testing.assert_close([found[name] for name in known], [wanted[name] for name in known])


def test_training_goes_on_with_the_trained_weights():
    torch.manual_seed(0)
    left, right = Block(), Block()
    right.load_state_dict(left.state_dict())
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    compiled = graft.compile(right, (x,), grad="honour")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (left, right)]
    for _ in range(3):
        for run, optimizer in zip((left, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(run(x)["y"], target).backward()
            optimizer.step()
    torch.testing.assert_close(dict(right.named_parameters()), dict(left.named_parameters()))


def test_an_input_that_requires_gradients_is_refused_before_anything_runs():
    module, x = Block(), torch.randn(2, 8)
    compiled = graft.compile(module, (x,))
    with pytest.raises(GradientsRefused, match=r"x requires gradients.*torch.no_grad.*grad='honour'"):
        compiled(x.clone().requires_grad_())
    with pytest.raises(GradientsRefused, match="x requires gradients"):
        torch.func.grad(lambda x: compiled(x)["y"].sum())(x)  # gave zeros
    with pytest.raises(GradientsRefused, match="x requires gradients"):
        graft.compile(module, (x.clone().requires_grad_(),))
    with pytest.raises(GradientsRefused, match="x requires gradients"):
        torch.compile(lambda x: compiled(x)["y"] + 1, backend="eager")(x.clone().requires_grad_())
    with torch.no_grad():
        torch.testing.assert_close(compiled(x.clone().requires_grad_())["y"], module(x)["y"])
    (note,) = compiled.report.notes
    known = "results carry none, though w, gate.weight, up.weight and 1 more require them"
    assert note == f"gradients: {known}; grad='honour' gives them"


def test_dropped_gradients_are_in_the_report():
    x = torch.randn(2, 8)
    compiled = graft.compile(Block().requires_grad_(False), (x,), grad="drop")
    assert compiled.report.notes == ()
    for _ in range(2):
        assert not compiled(x.clone().requires_grad_())["y"].requires_grad
    assert compiled.report.notes == ("gradients of the input x are dropped, as asked",)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * self.w


def test_what_cannot_be_honoured_is_refused_with_its_name(tmp_path):
    x = torch.randn(3)
    with pytest.raises(GradientsRefused, match=r"writes count.*written twice"):
        graft.compile(Counting(), (x,), grad="honour")
    with pytest.raises(GradientsRefused, match=r"dropout.*would sample other numbers"):
        graft.compile(Block(p=0.5), (torch.randn(2, 8),), grad="honour", backend="inductor")
    with pytest.raises(UsageError, match="grad='honour' is for the backends eager and inductor"):
        graft.compile(Counting(), (x,), grad="honour", backend="cuda_graph")
    with pytest.raises(UsageError, match="grad must be one of"):
        graft.compile(Counting(), (x,), grad="keep")
    graft.compile(Block(), (torch.randn(2, 8),), grad="honour").save(tmp_path / "saved")
    loaded = graft.load(tmp_path / "saved")
    assert "a loaded module has no program for backward to run" in loaded.report.notes[-1]
    with pytest.raises(GradientsRefused):
        loaded(torch.randn(2, 8, requires_grad=True))


def test_autograd_notices_inputs_written_before_backward():
    module, x, scale = Block(), torch.randn(2, 8, requires_grad=True), torch.ones(8)
    compiled = graft.compile(module, (x, scale), grad="honour")
    result = compiled(x, scale)["y"].sum()
    scale.add_(1)  # requires no gradient itself, but backward would compute with it
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_results_that_are_inputs_stay_those_objects():
    x = torch.randn(4, requires_grad=True)
    compiled = graft.compile(lambda x: (x, x.view(2, 2), x * 2), (x,), grad="honour")
    same, view, twice = compiled(x)
    assert same is x and view is not x
    (view.sum() + twice.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full((4,), 3.0))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_samples_in_a_branch_are_refused(backend):
    """torch.cond runs a branch once more in backward, with other numbers: gradients of another mask."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda a, w: F.dropout(a * w, 0.5, True), lambda a, w: a * w, (x, self.w))

    with pytest.raises(GradientsRefused, match="would sample other numbers"):
        graft.compile(Dropping(), (torch.ones(8),), grad="honour", backend=backend)


class Scaled(nn.Module):
    """Tensors that require gradients and are neither parameters nor buffers."""

    def __init__(self):
        super().__init__()
        self.own, self.listed = torch.ones(3, requires_grad=True), [torch.full((3,), 2.0, requires_grad=True)]

    def forward(self, x):
        return x * self.own * self.listed[0]


def test_attributes_and_items_of_lists_that_require_gradients_are_told_and_honoured():
    module = Scaled()
    told = graft.compile(module, (torch.ones(3),)).report.notes
    assert "gradients: results carry none, though own, listed_0 require them; grad='honour' gives them" in told
    graft.compile(module, (torch.ones(3),), grad="honour")(torch.full((3,), 5.0)).sum().backward()
    torch.testing.assert_close(module.own.grad, torch.full((3,), 10.0))
    torch.testing.assert_close(module.listed[0].grad, torch.full((3,), 5.0))


def test_a_function_that_closes_over_what_requires_gradients_says_so():
    w = torch.ones(3, requires_grad=True)
    notes = graft.compile(lambda x: x * w, (torch.ones(3),)).report.notes
    assert "gradients: results carry none, though w requires them; grad='honour' gives them" in notes


@pytest.mark.parametrize("way", ["method", "attribute"])
def test_a_program_that_marks_a_tensor_itself_says_so_with_its_line(way):
    def mark(x):
        y = x * 2
        if way == "method":
            return y.requires_grad_() * 3
        y.requires_grad = True
        return y * 3

    x = torch.randn(3)
    assert mark(x).requires_grad
    compiled = graft.compile(mark, (x,))
    (note,) = (note for note in compiled.report.notes if note.startswith("gradients: "))
    line = mark.__code__.co_firstlineno + (3 if way == "method" else 4)
    assert f"forward asks for them with requires_grad (test_gradients.py:{line}); grad='honour' gives them" in note
    assert compiled(x).grad_fn is None
    honoured = graft.compile(mark, (x,), grad="honour")
    assert any(f"(test_gradients.py:{line}) are that run's own" in note for note in honoured.report.notes)
    assert not honoured(x).requires_grad
    if way == "method":  # the attribute of what has a history cannot be set, in eager neither
        assert honoured(x.clone().requires_grad_()).grad_fn is not None


def test_gradients_that_a_program_takes_itself_are_traced_without_a_word():
    def force(x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((y**3).sum(), y)
        return -slope

    def unmarked(x):
        return x.detach().requires_grad_(False) * 3

    x = torch.randn(3)
    for program in (force, unmarked):
        compiled = graft.compile(program, (x,))
        assert torch.allclose(compiled(x), program(x)) and not any("gradients" in n for n in compiled.report.notes)


def test_only_results_that_carry_gradients_in_eager_carry_them():
    def program(x):
        with torch.no_grad():
            still = x * 3
        return x * 2, x.detach(), still, x.argmax(), x[:2]

    x = torch.randn(4, requires_grad=True)
    results = graft.compile(program, (x,), grad="honour")(x)
    assert (
        [t.requires_grad for t in results]
        == [t.requires_grad for t in program(x)]
        == [True, False, False, False, True]
    )
    (results[0].sum() + results[4].sum()).backward()
    torch.testing.assert_close(x.grad, torch.tensor([3.0, 3.0, 2.0, 2.0]))


def test_a_hook_on_a_parameter_runs_once():
    module, seen = nn.Linear(2, 2), []
    module.weight.register_hook(lambda grad: seen.append(1) or grad * 2)
    compiled = graft.compile(module, (torch.ones(1, 2),), grad="honour")
    for run in (module, compiled):
        module.weight.grad = None
        run(torch.ones(1, 2)).sum().backward()
        torch.testing.assert_close(module.weight.grad, torch.full((2, 2), 2.0))
    assert len(seen) == 2


@pytest.mark.parametrize("grad", ["refuse", "drop"])
def test_a_view_of_a_parameter_is_no_leaf_of_its_own(grad):
    """torch gives views under no_grad out as leaves: backward would end in them, and the parameter have nothing."""
    module = Scaled()
    module.forward = lambda x: (module.own, module.own[:2], x * module.own)
    whole, view, product = graft.compile(module, (torch.ones(3),), grad=grad)(torch.ones(3))
    assert whole is module.own and view.data_ptr() == module.own.data_ptr()
    assert not view.requires_grad and not product.requires_grad


@pytest.mark.parametrize("grad", ["refuse", "drop"])
def test_state_that_is_unfrozen_later_is_told(grad, tmp_path):
    module, x = Block().requires_grad_(False), torch.randn(2, 3, 8)
    module.head = nn.Linear(8, 2).requires_grad_(False)  # which forward leaves out
    compiled = graft.compile(module, (x,), grad=grad)
    module.head.requires_grad_(True)
    compiled.save(tmp_path / "saved")
    assert compiled(x)["y"].grad_fn is None and not any("gradients" in note for note in compiled.report.notes)
    module.gate.weight.requires_grad_(True)  # a part of the merged weight that the graph has in its place
    for _ in range(2):
        with torch.no_grad():
            compiled(x)
        compiled(x)
    module.w.requires_grad_(True)
    compiled(x)
    told = [note.partition("though ")[2].partition(";")[0] for note in compiled.report.notes if "gradients" in note]
    assert told == [f"{name} requires them since it was compiled" for name in ("gate.weight", "w")]
    loaded = graft.load(tmp_path / "saved")
    loaded.w.requires_grad_(True)
    loaded(x)
    assert "though w requires them since" in loaded.report.notes[-1]
