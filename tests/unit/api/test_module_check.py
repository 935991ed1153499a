"""What a graph was made of changes after compiling, or is called inside of a transform: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import graft
from graft.base.errors import (
    CaptureError,
    ChangedModule,
    GradientsRefused,
    ReplacedBuffer,
    TransformRefused,
    UsageError,
)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3))
        self.scale, self.unread = 2.0, 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def made(backend: str = "eager", **options) -> tuple[Scaled, graft.api.compiled.CompiledModule]:
    torch.manual_seed(0)
    module = Scaled()
    return module, graft.compile(module, (torch.ones(3),), backend=backend, **options)


def hook(module: Scaled) -> None:
    module.inner[0].register_forward_hook(lambda _, __, y: y + 1)


CHANGES: dict[str, tuple[Callable[[Scaled], object], type[UsageError], str]] = {
    "number": (lambda m: setattr(m, "scale", 3.0), ChangedModule, r"scale was set to 3.0 \(the graph holds 2"),
    "gone": (lambda m: delattr(m, "scale"), ChangedModule, "attribute scale was taken away"),
    "weight": (lambda m: setattr(m.inner[0], "weight", nn.Parameter(torch.ones(3, 3))), ReplacedBuffer,
               r"the parameter inner.0.weight was replaced"),
    "module": (lambda m: m.inner.__setitem__(0, nn.ReLU()), ChangedModule, "the submodule inner.0 was replaced"),
    "hook": (hook, ChangedModule, "the module inner.0 got a hook"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "backend"), [*product(CHANGES, ["eager"]), *product(["number", "weight"], ["cuda_graph"])]
)
def test_what_the_graph_does_not_follow_is_refused(name, backend):
    change, error, message = CHANGES[name]
    module, compiled = made(backend)
    module.unread = 6
    module.scale = float("2")  # equal
    assert torch.equal(compiled(torch.ones(3)), module(torch.ones(3)))
    change(module)
    with pytest.raises(error, match=message):
        compiled(torch.ones(3))


def test_state_that_is_written_is_followed():
    module, compiled = made()
    with torch.no_grad():
        module.inner[0].weight.mul_(2)
    module.load_state_dict({name: tensor + 1 for name, tensor in module.state_dict().items()})
    assert torch.equal(compiled(torch.ones(3)), module(torch.ones(3)))


SHARE = 0.5


@dataclass
class Options:
    power: int = 2

    def raised(self, x: torch.Tensor) -> torch.Tensor:
        return x**self.power


class Reads(nn.Module):
    """Everything that code can read beside tensors, and layers of torch's that read numbers of their own."""

    offset = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.rest = nn.Sequential(nn.ReLU())
        self.options, self.factors, self.table, self.half = Options(), [2.0, 3.0], {"add": (1, 2)}, 0.5
        self.bias: torch.Tensor | None = None
        self.plain, self.activation = torch.ones(3), torch.sin
        self.hook = self.rest[0].register_forward_hook(lambda _, __, y: y * 2)
        self.used_by_nobody = [1]

    @property
    def halved(self) -> float:
        return self.half

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.rest(self.drop(self.norm(x))) * self.factors[0] + self.table["add"][0] + self.offset * self.halved
        y = self.activation(y) if self.bias is None else y + self.bias
        return self.options.raised(y) * SHARE * self.plain


READ: dict[str, tuple[Callable[[Reads], object], str]] = {
    "of a layer of torch": (lambda m: setattr(m.drop, "p", 0.1), r"attribute drop.p was set to 0.1 \(the graph"),
    "of another": (lambda m: setattr(m.norm, "momentum", None), "attribute norm.momentum was set to None"),
    "None": (lambda m: setattr(m, "bias", torch.ones(3)), "attribute bias was set to tensor"),
    "in a list": (lambda m: m.factors.__setitem__(0, 9.0), r"attribute factors was set to \[9.0, 3.0\]"),
    "in a dict": (lambda m: m.table.update(add=(5, 2)), "attribute table was set to"),
    "in an object": (lambda m: setattr(m.options, "power", 3), r"attribute options.power was set to 3"),
    "of a class": (lambda _: setattr(Reads, "offset", 2.0), r"attribute Reads.offset was set to 2.0"),
    "over that of a class": (lambda m: setattr(m, "offset", 2.0), "offset was set to 2.0 .*that of its class"),
    "in a property": (lambda m: setattr(m, "half", 1.0), "attribute half was set to 1.0"),
    "a function": (lambda m: setattr(m, "activation", torch.cos), "attribute activation was replaced"),
    "a tensor": (lambda m: setattr(m, "plain", torch.zeros(3)), "attribute plain was replaced"),
    "outside": (lambda _: globals().update(SHARE=0.25), r"variable SHARE was set to 0.25 \(the graph holds 0.5\)"),
    "a module more": (lambda m: m.rest.append(nn.Tanh()), r"module rest got or lost submodules \(1 before, 2 now"),
    "a hook less": (lambda m: m.hook.remove(), "module rest.0 lost a hook"),
    "a forward": (lambda m: setattr(m.rest, "forward", lambda x: x), "forward of one of its modules was replaced"),
    "forward of a class": (lambda _: setattr(Reads, "forward", lambda _, x: x), "method Reads.forward was replaced"),
}


@pytest.mark.parametrize("name", READ)
def test_whatever_the_code_reads_is_refused_when_it_changes(name, monkeypatch):
    change, message = READ[name]
    monkeypatch.setattr(Reads, "offset", 1.0)  # all three are put back
    monkeypatch.setattr(Reads, "forward", Reads.forward)
    monkeypatch.setitem(globals(), "SHARE", 0.5)
    module, x = Reads().train(), torch.randn(4, 3)
    compiled = graft.compile(module, (x,), backend="eager")
    module.used_by_nobody.append(2)
    module.factors, module.half = [2.0, 3.0], float("0.5")  # equal
    compiled(x)
    change(module)
    with pytest.raises(ChangedModule, match=message):
        compiled(x)


def test_what_a_function_closes_over_is_refused_when_it_changes():
    scale, weight, kept = 2.0, torch.ones(3), [1.0]

    def program(x):
        return x * scale + weight + kept[0]

    compiled = graft.compile(program, (torch.ones(3),))
    weight.add_(1)  # written: followed
    assert torch.equal(compiled(torch.ones(3)), program(torch.ones(3)))
    kept[0] = 5.0
    with pytest.raises(ChangedModule, match=r"kept was set to \[5.0\]"):
        compiled(torch.ones(3))
    kept[0], scale = 1.0, 3.0
    with pytest.raises(ChangedModule, match=r"variable scale was set to 3.0"):
        compiled(torch.ones(3))
    scale, weight = 2.0, torch.zeros(3)
    with pytest.raises(ChangedModule, match="variable weight was replaced"):
        compiled(torch.ones(3))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "cuda_graph"])
def test_weights_that_were_merged_are_followed_or_refused(backend):
    module, x = Gated(), torch.randn(2, 8)
    compiled = graft.compile(module, (x,), backend=backend)
    assert compiled.report.transforms["merge_gate_up"].status == "applied"
    module.gate.weight.mul_(2)
    module.down.weight.data = torch.randn(8, 8)
    torch.testing.assert_close(compiled(x), module(x))
    module.up.weight.data = torch.randn(8, 8)
    with pytest.raises(ChangedModule, match=r"the memory of up.weight was replaced \(`.data = …`\) after compiling"):
        compiled(x)


TRANSFORMS: dict[str, Callable[..., object]] = {
    "vmap": lambda call, x: torch.func.vmap(call)(x.expand(2, 3)),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "functionalize": lambda call, x: torch.func.functionalize(call)(x),
    "grad": lambda call, x: torch.func.grad(lambda y: call(y).sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("grad", ["refuse", "honour"])
def test_transforms_of_torch_func_are_refused(name, grad):
    _, compiled = made(grad=grad)
    error = GradientsRefused if (name, grad) == ("grad", "refuse") else TransformRefused
    with pytest.raises(
        error, match=f"x requires gradients|torch.func.{name} is around .* transform the module itself"
    ):
        TRANSFORMS[name](compiled, torch.ones(3))


def test_ways_around_torch_func_are_right_or_refused():
    module, compiled = made()
    x = torch.randn(2, 3)
    with pytest.raises(ReplacedBuffer, match="parameter inner"):  # it was ignored
        named: dict[str, torch.Tensor] = {name: torch.zeros_like(p) for name, p in compiled.named_parameters()}
        torch.func.functional_call(compiled, named, (x[0],))
    with forward_ad.dual_level(), pytest.raises(TransformRefused, match="forward-mode"):
        compiled(forward_ad.make_dual(x[0], x[1]))
    batched = graft.compile(torch.func.vmap(module), (x,), backend="eager")
    torch.testing.assert_close(batched(x), module(x))
    assert torch.equal(compiled(x[0]), module(x[0]))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp])
def test_a_derivative_inside_of_a_program_is_refused(transform):
    """torch.export traces it in part, and its results were tensors without values."""

    def program(x):
        if transform is torch.func.grad:
            return torch.func.grad(lambda y: (y**2).sum())(x)
        return torch.func.vjp(lambda y: y**2, x)[1](x)[0]

    with pytest.raises(CaptureError):
        graft.compile(program, (torch.ones(3),), backend="eager")


def test_a_forward_derivative_inside_of_a_program():
    x = torch.randn(2, 3)

    def program(y):
        return torch.func.jvp(torch.sin, (y,), (y,))[1]

    if torch.__version__ < "2.12":  # whose export cannot trace it
        with pytest.raises(CaptureError, match=r"torch\.export could not capture"):
            graft.compile(program, (x,), backend="eager")
        return
    torch.testing.assert_close(graft.compile(program, (x,), backend="eager")(x), x * x.cos())
