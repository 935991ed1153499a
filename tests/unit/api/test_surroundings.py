"""Modes of modules and autocast: another one than at compile time is followed, or refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import graft
from graft.base.errors import AutocastRefused, CaptureRefused, UsageError


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.plain(x))


X = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 2.0]])


@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_train_and_eval_after_compiling_are_followed(backend, tmp_path):
    torch.manual_seed(0)
    module, twin = Norms().eval(), Norms().eval()
    twin.load_state_dict(module.state_dict())
    compiled = graft.compile(module, (X,), backend=backend)
    for change in (compiled.train, compiled.eval, module.train, module.norm.eval, compiled.eval):
        change()
        twin.train(module.training)
        twin.norm.train(module.norm.training)
        torch.testing.assert_close(compiled(X), twin(X))
        torch.testing.assert_close(module.norm.running_mean, twin.norm.running_mean)
    assert len(compiled.variants) == 2
    assert (
        compiled.variants[1].made_by == "the module norm is in training mode, and the graph was captured in the other"
    )
    compiled.save(tmp_path / "both")
    loaded = graft.load(tmp_path / "both")
    for mode in (True, False):
        torch.testing.assert_close(loaded.train(mode)(X), twin.train(mode)(X))
    with pytest.raises(UsageError, match="has the shape"):
        compiled.train()(X[:, :2])


def test_a_mode_that_a_loaded_or_frozen_module_lacks_is_refused(tmp_path):
    compiled = graft.compile(Norms().eval(), (X,), backend="eager", stance="error_on_new_variant")
    compiled.save(tmp_path / "one")
    loaded = graft.load(tmp_path / "one")
    assert torch.equal(loaded.eval()(X), compiled(X))
    with pytest.raises(UsageError, match="the graph was captured in evaluation mode"):
        loaded.train()
    with pytest.raises(UsageError, match=r"the module norm is in training mode.*frozen"):
        compiled.train()(X)


@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_the_default_dtype_is_that_of_the_call(backend):
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(3) + x / 2

    x = torch.ones(3, dtype=torch.int64)
    compiled = graft.compile(forward, (x,), backend=backend)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            found = compiled(x)
            assert found.dtype is dtype and torch.equal(found, forward(x))
        finally:
            torch.set_default_dtype(torch.float32)
    if compiled.replays is not None:
        assert compiled.replays.events[-1] == "capture 2: default dtype torch.float64, was torch.float32"


def test_a_tensor_class_of_its_own_is_no_memory_to_replay():
    class Tagged(torch.Tensor):
        pass

    compiled = graft.compile(torch.neg, (X,), backend="cuda_graph")
    with pytest.raises(CaptureRefused, match=r"is a Tagged, a tensor class of its own.*backend='eager'"):
        compiled(X.as_subclass(Tagged))
    assert type(graft.compile(torch.neg, (X,), backend="eager")(X.as_subclass(Tagged))) is Tagged


def test_numbers_that_are_fixed_are_told_by_their_text():
    compiled = graft.compile(lambda x, n: x / n, (X, 0.0), backend="eager")
    assert compiled(X, 0.0)[0, 0] == torch.inf
    with pytest.raises(UsageError, match=r"n is -0.0, but 0.0 is fixed"):
        compiled(X, -0.0)
    nan = graft.compile(lambda x, n: x * n, (X, float("nan")), backend="eager")
    assert nan(X, -float("nan")).isnan().all()


def test_an_exported_program_stays_in_its_mode():
    program = torch.export.export(Norms().eval(), (X,))
    compiled = graft.compile(program, backend="eager")
    assert torch.equal(compiled.eval()(X), program.module()(X))
    with pytest.raises(UsageError, match="export it in training mode"):
        compiled.train()


def test_a_mode_that_nothing_asks_for_does_not_matter(tmp_path):
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = graft.compile(module, (X,), backend="eager", stance="error_on_new_variant")
    compiled.save(tmp_path / "plain")
    for call in (compiled.eval(), compiled.train(), graft.load(tmp_path / "plain").eval()):
        assert torch.equal(call(X), module(X))


def test_autocast_around_a_call_is_refused():
    module = nn.Linear(3, 3)
    compiled = graft.compile(module, (X,), backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(AutocastRefused, match=r"on for cpu \(torch.bfloat16\), whose casts are not in the graph"):
            compiled(X)
        with pytest.raises(AutocastRefused, match="open it inside of the forward"):
            graft.compile(module, (X,), backend="eager")
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(compiled(X), module(X))

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    inside = graft.compile(forward, (X,), backend="eager")(X)
    assert inside.dtype is torch.bfloat16 and torch.equal(inside, forward(X))


def by_gradients(x):
    return x * 2 if torch.is_grad_enabled() else x * 3


def by_inference(x):
    return x * 2 if torch.is_inference_mode_enabled() else x * 3


def by_flag(x):
    return x * 2 if x.requires_grad else x * 3


def by_bit(x):
    return x * 2 if x.is_conj() else x * 3


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (by_gradients, r"forward asks for is_grad_enabled\(\); in the graph the answer is no"),
        (by_inference, r"forward asks for is_inference_mode_enabled\(\); in the graph the answer is no"),
        (
            by_flag,
            r"forward reads requires_grad \(test_surroundings.py:\d+\); the graph has the answer of its capture",
        ),
        (by_bit, r"forward reads is_conj\(\) \(test_surroundings.py:\d+\); the graph has the answer of its capture"),
        (lambda x: x * 2, None),
    ],
)
def test_what_a_program_asks_about_a_call_and_a_graph_cannot_is_told(program, told):
    compiled = graft.compile(program, (torch.ones(3),))
    found = [note for note in compiled.report.notes if note.startswith("asked: ")]
    assert [bool(re.fullmatch(f"asked: {told}", note)) for note in found] == [True] * bool(told)
