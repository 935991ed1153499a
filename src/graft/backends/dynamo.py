"""Graphs of torch.compile: Dynamo's torch-level calls in the ATen form that torch.export gives, and back to Dynamo.

    before:  %y = torch.nn.functional.silu(%x)       after:  %y = aten.silu(%x)

Weights are inputs here, marked `meta["weight"]`. What ATen calls alone do not carry (autocast, higher-order ops,
checks of values at run time…) is refused with the reason; stock Inductor then compiles the graph as Dynamo gave it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from graft.backends.inductor import OTHER_NUMBERS, python_dispatcher
from graft.backends.nvtx import NONE, ranges_on
from graft.base.errors import CaptureError, GraphRefused
from graft.ir.branches import all_nodes, is_control_flow, write_inside
from graft.ir.canonical.normal_form import canonicalize
from graft.ir.checks import METADATA, is_check
from graft.ir.edit import attribute
from graft.ir.effects import mutated_roots, storage_root
from graft.ir.nodes import OpOverload, is_op, placeholders, tensor_val, where
from graft.ir.program.results import keep_results_apart, result_objects
from graft.ir.storage import storage_id
from graft.ir.trace import canonicalize_inside, fill_values, quiet
from graft.memory.regions import same_layout
from graft.memory.uninitialised import EMPTY, SEEDS

aten = torch.ops.aten
ENTER_AUTOCAST, EXIT_AUTOCAST = (getattr(torch.amp.autocast_mode, n) for n in ("_enter_autocast", "_exit_autocast"))
SET_GRAD = torch._C._set_grad_enabled
SETS = (aten.set_.source_Tensor, aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.set_.default)
# Modes that a graph switches on for a part of itself; ATen calls would not carry them.
MODES = ("functorch", "_enter_inference_mode", "autograd")


def trace_dynamo(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """The canonical ATen graph of a Dynamo graph, with its inputs in the same order. `gm` stays as it is.

    Sizes stay as symbolic as Dynamo made them; `refuse_modes` has seen the graph. Raises GraphRefused, or
    CaptureError when tracing fails.
    """
    sources = placeholders(gm.graph)
    mode = fake_mode_of(sources)
    try:
        with mode, torch.no_grad(), python_dispatcher(), preserve_node_meta(), quiet("torch._subclasses.fake_tensor"):
            examples = [fresh(node.meta["example_value"]) for node in sources]
            traced = make_fx(lambda *args: DynamoReplay(gm).run(*args), pre_dispatch=True)(*examples)
    except Exception as error:  # whatever an operator raises; nothing is swallowed
        raise CaptureError(f"the graph cannot be traced to ATen: {type(error).__name__}: {error}") from error
    drop_detach(traced.graph)
    refuse_calls(traced.graph, inputs)
    fill_values(traced)
    if written := write_inside(traced):
        raise GraphRefused(written)
    objects = result_objects(traced.graph)
    canonicalize(traced)
    keep_results_apart(traced.graph, objects)
    for node, source, value in zip(placeholders(traced.graph), sources, inputs, strict=True):
        node._rename(short_name(source.name))
        node.target = node.name
        node.meta = {**source.meta, "val": node.meta["val"], "weight": is_state(source, value)}
    canonicalize_inside(traced)
    for node in all_nodes(traced.graph):
        shorten_module_names(node)
    traced.recompile()
    return traced


class DynamoReplay(Interpreter):
    """Runs a Dynamo graph without its switches of grad mode and of autocast that is off; refuse_modes saw them."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (SET_GRAD, ENTER_AUTOCAST, EXIT_AUTOCAST):
            return None
        return super().call_function(target, args, kwargs)


def drop_detach(graph: Graph) -> None:
    """`torch.tensor(…)` traces as a constant that is detached in place; without gradients that does nothing."""
    for node in list(graph.nodes):
        if is_op(node, aten.detach_.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def unlike_eager_by_name(graph: Graph) -> list[str]:
    """What Inductor does otherwise than eager with a graph of torch-level calls, told by their names."""
    notes = [NONE] * ranges_on()
    calls = [(node, call_name(node)) for node in graph.nodes if node.op in ("call_function", "call_method")]
    if not torch._inductor.config.fallback_random and any(samples(name) for _, name in calls):
        notes.append(OTHER_NUMBERS)
    made = [f"%{node.name}" for node, name in calls if f"aten::{name}" in EMPTY or may_give_seed(name)]
    if made:
        notes.append(f"uninitialised memory: {', '.join(made)}; where its values go is not followed in this graph")
    return notes


def call_name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def samples(name: str) -> bool:
    """Whether the operator of that name draws random numbers in one of its forms."""
    return any(torch.Tag.nondeterministic_seeded in form.tags for form in forms(name))


def may_give_seed(name: str) -> bool:
    """Whether results of it are the state of its random numbers, which it writes only where it samples some."""
    return any(result.name in SEEDS for form in forms(name) for result in form._schema.returns)


def forms(name: str) -> list[Any]:
    packet = getattr(aten, name, None) if name else None
    return [getattr(packet, form) for form in packet.overloads()] if hasattr(packet, "overloads") else []


def fake_mode_of(sources: Sequence[Node]) -> Any:
    values = [node.meta.get("example_value") for node in sources]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    strange = next((value for value in tensors if not hasattr(value, "fake_mode")), None)
    if strange is not None:
        raise GraphRefused(f"an input is a {type(strange).__name__}, a tensor class of its own")
    if not tensors:
        raise GraphRefused("no input of the graph is a tensor")
    return next(value.fake_mode for value in values if hasattr(value, "fake_mode"))


def fresh(value: Any) -> Any:
    """A fake tensor of its own, so that tracing changes nothing of Dynamo's. Scalars remember their symbol: kept."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return value


def is_state(source: Node, value: Any) -> bool:
    """A parameter, or a tensor of a module: Dynamo knows those by their fixed address, and Inductor relies on it."""
    known = source.meta.get("tensor_dict") or {}
    return isinstance(value, torch.nn.Parameter) or bool(known.get("_dynamo_static_input_type"))


# ── what is left to stock Inductor ──────────────────────────────────────────────────────────────────────────────


def refuse_modes(graph: Graph, inputs: Sequence[Any]) -> None:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    kinds = {t.device.type for t in tensors if torch.amp.is_autocast_available(t.device.type)}
    if any(torch.is_autocast_enabled(kind) for kind in kinds):
        raise GraphRefused("autocast is on around the call; its casts are not in the graph")
    needs_grad = any(t.requires_grad for t in tensors)
    if needs_grad and torch.is_grad_enabled():
        raise GraphRefused(
            "the call needs gradients, and graft's ops have no backward; call the model under torch.no_grad() or"
            " torch.inference_mode(), or freeze its parameters"
        )
    for node in graph.nodes:
        inner = getattr(graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inner, GraphModule) and all(map(is_control_flow, node.users)):
            refuse_modes(inner.graph, ())
            continue
        if node.op in ("get_attr", "call_module"):
            raise GraphRefused(f"{where(node)} is a tensor or a subgraph of the graph itself ({node.target})")
        if node.meta.get("unbacked_bindings"):
            raise GraphRefused(f"{where(node)} gives a number or a size that is known at run time only")
        if node.op == "call_function":
            refuse_target(node, needs_grad)


def refuse_target(node: Node, needs_grad: bool) -> None:
    target = node.target
    if getattr(target, "namespace", "") == "higher_order" and not is_control_flow(node):
        raise GraphRefused(f"{where(node)} is the higher-order op {target}")
    if target is ENTER_AUTOCAST and (node.args[2] if len(node.args) > 2 else True):
        raise GraphRefused(f"{where(node)} opens an autocast region; its casts are not in the graph")
    if target is SET_GRAD and node.args[0] and needs_grad:
        raise GraphRefused(f"{where(node)} turns gradients on inside the graph; graft's ops have no backward")
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"
    if target is not SET_GRAD and any(part in name for part in MODES):
        raise GraphRefused(f"{where(node)} calls {name}, a mode that ATen calls would not carry")


def exchanges_memory(node: Node) -> bool:
    """`set_` of an input to a tensor that lies otherwise: Inductor then checks the old input for the new shape."""
    into, source = (tensor_val(argument) for argument in node.args[:2])
    same = into is not None and source is not None and same_layout(into, source)
    return not same and storage_root(node.args[0]).op == "placeholder"


def refuse_calls(graph: Graph, inputs: Sequence[Any]) -> None:
    for node in graph.nodes:
        if is_op(node, *SETS) and exchanges_memory(node):
            raise CaptureError(
                f"{where(node)} gives an input other memory of another shape (`x.data = …`, `x.set_(…)`), which"
                " Inductor cannot hand back to the caller; return the new tensor, or write values with copy_"
            )
        if isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags:
            raise GraphRefused(f"{where(node)} changes the shape of a tensor in place ({node.target})")
        if is_check(node) and node.target is not METADATA:
            raise GraphRefused(f"{where(node)} checks a value at run time ({node.target})")
    written = mutated_roots(graph)
    owners = [storage_id(value) if isinstance(value, torch.Tensor) else None for value in inputs]
    for node, owner in zip(placeholders(graph), owners, strict=True):
        if node in written and owner is not None and owners.count(owner) > 1:
            raise GraphRefused(f"{where(node)} is written in place and shares its memory with another input")


# ── what Dynamo and Inductor rely on ────────────────────────────────────────────────────────────────────────────


def short_name(name: str) -> str:
    """l_self_modules_norm_parameters_weight_ → norm_weight."""
    short = re.sub(r"(^l_(self_)?)|modules_|parameters_|buffers_|_$", "", name)
    return short if short.isidentifier() else name


def shorten_module_names(node: Node) -> None:
    """`L['self'].model.layers.0` is `model.layers.0` in reports, as on the other routes."""
    stack = node.meta.get("nn_module_stack")
    if stack:
        node.meta["nn_module_stack"] = {
            key: (re.sub(r"^(L\['self'\]\.?|L\['(\w+)'\])", r"\2", path), kind) for key, (path, kind) in stack.items()
        }


def hand_back(gm: GraphModule, transformed: GraphModule) -> GraphModule:
    """Dynamo's module with the transformed graph. What AOTAutograd reads of inputs and module is Dynamo's."""
    for node, source in zip(placeholders(transformed.graph), placeholders(gm.graph), strict=True):
        node._dynamo_source = getattr(source, "_dynamo_source", None)
    for node in transformed.graph.nodes:
        value = attribute(transformed, str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, GraphModule):
            gm.add_module(str(node.target), value)
        elif value is not None:  # constants; as buffers they would need a source in the user's program
            object.__setattr__(gm, str(node.target), value)
    gm.graph = transformed.graph
    gm.recompile()
    return gm
