"""What a compiled module does where its caller has gradients on: `graft.compile(…, grad=…)`.

    refuse   an input that requires gradients is an error, before anything runs
    drop     results are detached, and the report says whose gradients were dropped
    honour   the transformed graph runs forward; backward runs the module itself once more, with autograd

Parameters require gradients in every module that nobody froze, so they are no sign that somebody trains: unless
honoured they are noted in the report, and `backward()` on a result raises, as results have no gradient function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from graft.api.call_form import MOST_KINDS, kind
from graft.api.func_transforms import refuse_func_transforms, transforms_around
from graft.base.errors import GradientsRefused, UsageError
from graft.capture.containers import CallContainers, Container, put_together, take_apart
from graft.ir.branches import graphs_of
from graft.ir.canonical.normal_form import is_random
from graft.ir.nodes import where
from graft.ir.storage import storage_id
from graft.memory.writes import state_writes

if TYPE_CHECKING:
    from graft.api.compiled import CompiledModule

MODES = ("refuse", "honour", "drop")
HONOURED_ON = ("auto", "eager", "inductor")
MOST_NAMED = 3
ADVICE = (
    "call it within torch.no_grad(), pass x.detach(), or compile with grad='honour' (backward by autograd of the"
    " module) or grad='drop'"
)


def check_mode(grad: str, backend: str) -> None:
    if grad not in MODES:
        raise UsageError(f"grad must be one of {', '.join(map(repr, MODES))}, but is {grad!r}")
    if grad == "honour" and backend not in HONOURED_ON:
        raise UsageError(f"grad='honour' is for the backends eager and inductor; {backend!r} keeps no gradients")


def state_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def trained(compiled: CompiledModule) -> list[Tensor]:
    """State that may require gradients: the module's, and what its graphs read beside that (items of lists)."""
    graphs = (variant.graph_module for variant in compiled.variants)
    found = [*state_of(compiled.source).values(), *(t for graph in graphs for t in trainable(graph).values())]
    return list({id(tensor): tensor for tensor in found}.values())


def trainable(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that require gradients. Of a captured graph: those that it uses."""
    return {name: tensor for name, tensor in state_of(module).items() if tensor.requires_grad}


def untrained(module: torch.nn.Module, graph: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of the module that require no gradients and could, and that the graph reads, be it as
    parts of a weight that a transform made."""
    read = {storage_id(tensor) for tensor in state_of(graph).values()} - {None}
    state = [(n, t) for n, t in state_of(module).items() if not t.requires_grad and storage_id(t) in read]
    return [(name, tensor) for name, tensor in state if tensor.is_floating_point() or tensor.is_complex()]


def listed(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def gradient_notes(grad: str, names: Sequence[str], lines: Sequence[str] = ()) -> tuple[str, ...]:
    """For the report: what becomes of the gradients of the state that the graph uses, and of tensors that the program
    marks itself at these lines."""
    if grad == "honour":
        again = "gradients: backward runs the module itself once more, with autograd"
        if not lines:
            return (again,)
        apart = f"gradients: those that forward asks for with requires_grad ({listed(lines)}) are that run's own"
        return again, f"{apart}; results carry some where an input or a parameter requires them"
    asked = without(grad)
    verb = "requires" if len(names) == 1 else "require"
    whose = [f"{listed(names)} {verb} them"] * bool(names)
    whose += [f"forward asks for them with requires_grad ({listed(lines)})"] * bool(lines)
    return tuple(f"gradients: results carry none, though {one}; {asked}" for one in whose)


def late_note(grad: str, names: Sequence[str]) -> str:
    """For the report: somebody began to train state that nobody did when the module was compiled."""
    verb = "requires" if len(names) == 1 else "require"
    return f"gradients: results carry none, though {listed(names)} {verb} them since it was compiled; {without(grad)}"


def without(grad: str) -> str:
    return "as asked" if grad == "drop" else "grad='honour' gives them"


def requiring(values: Sequence[Any], names: Sequence[str]) -> list[str]:
    """The inputs that require gradients."""
    found = zip(values, names, strict=False)
    return [name for value, name in found if isinstance(value, Tensor) and value.requires_grad]


def detached_views(result: Any) -> Any:
    """The result with views of what requires gradients detached: torch lets them pass for leaves of their own."""

    def apart(value: Tensor) -> Tensor:
        lost = value.requires_grad and value.grad_fn is None and value._is_view()
        return value.detach() if lost else value

    return pytree.tree_map_only(Tensor, apart, result)


def refuse_inputs(values: Sequence[Any], names: Sequence[str]) -> None:
    found = requiring(values, names)
    if found:
        raise GradientsRefused(
            f"{listed(found)} require{'s' * (len(found) == 1)} gradients, and the results of a compiled module carry"
            f" none; {ADVICE}"
        )


def refuse_unhonoured(gm: GraphModule, before: Mapping[str, Tensor], backend: str) -> None:
    """Raises for a transformed graph whose gradients a second run of the module would not give.

    `before`: what required gradients in the graph as it was captured.
    """
    for write in state_writes(gm):
        raise GradientsRefused(
            f"grad='honour' runs the program a second time, and {where(write.node)} writes {write.owner.name}, which"
            " would then be written twice; compile with grad='drop', or take the state out of what is trained"
        )
    for path, node in ((path, node) for path, graph in graphs_of(gm.graph) for node in graph.nodes):
        # torch.cond itself runs a branch once more in backward, with other numbers
        if is_random(node) and (backend != "eager" or path or node.kwargs.get("generator") is not None):
            raise GradientsRefused(
                f"grad='honour' runs the program a second time, and {where(node)} would sample other numbers then;"
                " use backend='eager' and torch's own generator, or module.eval()"
            )
    kept = {storage_id(tensor) for tensor in state_of(gm).values()}
    lost = [name for name, tensor in before.items() if storage_id(tensor) not in kept]
    if lost:
        raise GradientsRefused(
            f"grad='honour': a transform made another tensor of {listed(lost)}, which would not follow when it is"
            " trained; turn that transform off (compiled.report says which), or requires_grad_(False)"
        )


@dataclass(frozen=True)
class RandomState:
    """The states of torch's own generators, so that a second run samples the same numbers."""

    host: Tensor
    devices: Mapping[int, Tensor]

    @staticmethod
    def now(tensors: Sequence[Tensor]) -> RandomState:
        devices = sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
        return RandomState(torch.get_rng_state(), {index: torch.cuda.get_rng_state(index) for index in devices})

    def put(self) -> None:
        torch.set_rng_state(self.host)
        for index, state in self.devices.items():
            torch.cuda.set_rng_state(state, index)


@dataclass
class HonouredCall:
    """One call: how it runs forward, what it is called with, and the module that backward runs."""

    run: Callable[[], Any]
    module: torch.nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]  # plain
    containers: CallContainers  # what they are taken apart from
    inputs: list[Tensor]  # the tensors among the arguments, each once
    random: RandomState | None
    spec: Any = None
    template: Container | None = None
    returned: dict[int, Tensor] = field(default_factory=dict)  # results that are inputs themselves
    carry: Sequence[bool] = ()  # which results carry gradients

    def reference(self, inputs: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """The results of the module itself, and the tensors in place of the inputs, on which they depend."""
        fresh = {
            id(old): t.detach().requires_grad_(t.requires_grad) for old, t in zip(self.inputs, inputs, strict=True)
        }
        plain = pytree.tree_map_only(Tensor, lambda t: fresh[id(t)], self.arguments)
        args, kwargs = self.containers.put_together(*plain) if self.containers else plain
        devices = list(self.random.devices) if self.random is not None else []
        with torch.random.fork_rng(devices) if self.random is not None else nullcontext():
            if self.random is not None:
                self.random.put()
            result, _ = take_apart(self.module(*args, **kwargs), results=True)
            return pytree.tree_leaves(result), list(fresh.values())


class FusedForward(torch.autograd.Function):
    """Forward: the transformed graph. Backward: autograd through the module, run once more on the saved inputs.

    Inputs and state are saved, so that autograd itself raises when one was written in between.
    """

    @staticmethod
    def forward(ctx: Any, call: HonouredCall, *tensors: Tensor) -> Any:  # pyrefly: ignore
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        result, call.template = take_apart(call.run(), results=True)
        results, call.spec = pytree.tree_flatten(result)
        given = {id(t) for t in tensors}
        call.returned = {index: t for index, t in enumerate(results) if id(t) in given}
        bare = [t for t, carries in zip(results, call.carry, strict=True) if isinstance(t, Tensor) and not carries]
        ctx.mark_non_differentiable(*bare)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyrefly: ignore
        call: HonouredCall = ctx.call
        tensors = ctx.saved_tensors
        with torch.enable_grad():
            results, inputs = call.reference(tensors[: len(call.inputs)])
        wanted = [t for t in (*inputs, *tensors[len(inputs) :]) if t.requires_grad]
        reached = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and isinstance(result, Tensor) and result.requires_grad
        ]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if reached and wanted:
            outputs, given = zip(*reached, strict=True)
            with hooks_once(wanted):
                found = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
        order = iter(found)
        return (None, *(next(order) if t.requires_grad else None for t in tensors))


@contextmanager
def hooks_once(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Hooks on these tensors are left for the caller's backward, which runs them on what this one gives."""
    tables = [table for tensor in tensors if (table := tensor._backward_hooks)]
    saved = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)


def run_honoured(compiled: CompiledModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call whose results carry gradients, if any input or any parameter requires them."""
    run = partial(compiled.run, args, kwargs)
    module, containers = compiled.source, compiled.form.containers
    given = compiled.form.given(args, kwargs)
    values = given.values
    if transforms_around():
        named = compiled.ordered(compiled.variants[0], given)
        refuse_func_transforms(named, compiled.variants[0].names, "honour")
    inputs = list({id(t): t for t in values if isinstance(t, Tensor)}.values())
    state = trained(compiled)
    if not any(t.requires_grad for t in (*inputs, *state)):
        return run()
    random = RandomState.now([*inputs, *state]) if compiled.samples else None
    call = HonouredCall(run, module, (given.args, given.kwargs), containers, inputs, random)
    key = (
        compiled.modes(),
        given.orders,
        *map(kind, values),
        *(t.requires_grad for t in (*inputs, *state)),
    )
    if key not in compiled.carrying:
        if len(compiled.carrying) >= MOST_KINDS:
            compiled.carrying.clear()
        compiled.carrying[key] = carrying(call)
    call.carry = compiled.carrying[key]
    results = FusedForward.apply(call, *inputs, *state)
    # autograd makes another object of a result that is an input itself, and lets a view of one carry gradients
    bare = (
        t.detach() if isinstance(t, Tensor) and t.requires_grad and not carries else t
        for t, carries in zip(results, call.carry, strict=True)
    )
    plain_results = [call.returned.get(index, t) for index, t in enumerate(bare)]
    return put_together(pytree.tree_unflatten(plain_results, call.spec), call.template)


def carrying(call: HonouredCall) -> list[bool]:
    """Which results carry gradients: those of the module itself, which is run for that."""
    with torch.enable_grad():
        results, _ = call.reference(call.inputs)
    return [isinstance(t, Tensor) and t.requires_grad for t in results]
