"""torch.export to a canonical graph: the one way in, for models and for patterns."""

from __future__ import annotations

import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from graft.base.errors import CaptureError, UnsupportedCache
from graft.ir.branches import inner_graphs, mark_weights, name_nodes, write_inside
from graft.ir.canonical.normal_form import canonicalize, drop_unused_state
from graft.ir.constants import KeepConstants
from graft.ir.edit import attach_state, attribute, fake_mode
from graft.ir.nodes import OpOverload
from graft.ir.program.assigned_weights import AssignedWeights, refuse_reads, with_memory_of_their_own
from graft.ir.program.assignments import assignments_as_writes
from graft.ir.program.frames import forward_frames
from graft.ir.program.generators import MARK, OTHER, generators_kept, refuse_new_generators, refuse_seeds
from graft.ir.program.gradient_flags import META, QUESTIONS, GradientFlags
from graft.ir.program.indexing import TensorPositions
from graft.ir.program.node_values import values_alone
from graft.ir.program.results import keep_results_apart, result_objects
from graft.ir.program.zero_sizes import zero_sizes_asked
from graft.ir.snapshot import ModuleSnapshot
from graft.ir.storage import identity


@dataclass(frozen=True)
class DecompositionLevel:
    """How far ops are taken apart in the graphs at hand. Patterns are traced the same way, or nothing would match."""

    name: str
    decompositions: Mapping[Any, Callable[..., Any]] = field(default_factory=dict, compare=False)
    composite: bool = False  # ops that torch composes of others (linear) are whole, if not in the table
    applied_to: set[str] = field(default_factory=set, compare=False)  # ops for which a program was taken apart

    def keeps(self, op: Any) -> bool:
        """Whether calls of `op` are still there; other ops cannot be looked for."""
        return op not in self.decompositions


FAKE_TENSOR = "torch._subclasses.fake_tensor"  # a logger
RETURN_INSTEAD = "return the new value from it, and write it after the call"
EXPORT = DecompositionLevel("export")
_codeless = threading.local()  # .depth: how many graphs this thread puts together without their code
_recompile = GraphModule.recompile
_level: ContextVar[DecompositionLevel] = ContextVar("decomposition_level", default=EXPORT)


def current_level() -> DecompositionLevel:
    return _level.get()


@contextmanager
def use_level(level: DecompositionLevel) -> Iterator[None]:
    """Within it, patterns and replacements are traced in `level`."""
    token = _level.set(level)
    try:
        yield
    finally:
        _level.reset(token)


def export_graph(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    exact_sizes: bool = False,
    positions: TensorPositions | None = None,
) -> GraphModule:
    """Exports, turns lifted state back into attributes, and canonicalizes. State is shared with `module`.

    torch takes it for granted that a dynamic size is neither 0 nor 1, and keeps no guard. With `exact_sizes` it does
    not: whatever the program decided by a size is among the guards (ir/program/signature.py).
    """
    try:
        return export_seedless(module, args, kwargs, dynamic_shapes, exact_sizes=exact_sizes, positions=positions)
    except AssignedWeights as tied:
        with with_memory_of_their_own(tied):
            gm = export_seedless(module, args, kwargs, dynamic_shapes, exact_sizes=exact_sizes, positions=positions)
            refuse_reads(gm, tied)
        return gm


def export_seedless(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, dynamic_shapes: Any,
    *, exact_sizes: bool, positions: TensorPositions | None,
) -> GraphModule:  # fmt: skip
    """A program that holds generators is traced with two seeds, so that nothing in its graph comes of one."""
    gm, held = export_once(module, args, kwargs, dynamic_shapes, exact_sizes=exact_sizes, positions=positions)
    if held:
        other, _ = export_once(module, args, kwargs, dynamic_shapes, exact_sizes=exact_sizes, mark=OTHER)
        refuse_seeds(gm, other)
    return gm


def export_once(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    dynamic_shapes: Any,
    *,
    exact_sizes: bool,
    positions: TensorPositions | None = None,
    mark: int = MARK,
) -> tuple[GraphModule, list[torch.Generator]]:
    """The graph, and the generators that the module and its arguments hold."""
    sizes = torch.fx.experimental._config.patch(backed_size_oblivious=exact_sizes)
    try:
        with (
            sizes,
            zero_sizes_asked() if exact_sizes else nullcontext(),
            torch.no_grad(),
            _use_lazy_graph_module(True),  # torch writes Python code for 30 graphs on the way: a seventh of the time
            positions or TensorPositions(),
            KeepConstants(),
            forward_frames(),
            values_alone(),
            assignments_as_writes(module),
            quiet(FAKE_TENSOR),
            generators_kept(module, (args, kwargs or {}), mark) as generators,
            GradientFlags() as flags,
        ):
            program = torch.export.export(module, args, kwargs or {}, dynamic_shapes=dynamic_shapes, strict=False)
            program = taken_apart(program)
    except (CaptureError, UnsupportedCache):
        raise
    except Exception as error:  # torch.export raises whatever the model raises; nothing is swallowed
        raise CaptureError(why_not_captured(module, error)) from error
    gm = program_graph(program, module)
    refuse_fake_constants(gm, module)
    refuse_new_generators(gm, generators)
    gm.meta[META], gm.meta[QUESTIONS] = tuple(flags.lines), tuple(flags.asked)
    return gm, generators


def refuse_fake_constants(gm: GraphModule, module: torch.nn.Module) -> None:
    """torch.export traces torch.func.grad and jacfwd in part: what lies between the calls becomes a constant of the
    trace, which holds no values."""
    given = [*module.parameters(), *module.buffers()]
    if any(isinstance(tensor, FakeTensor) for tensor in given):  # of a module that has no values itself
        return
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(attribute(gm, str(node.target)), FakeTensor):
            raise CaptureError(
                f"{next(iter(node.users), node)} reads a value of the trace itself, as it is within torch.func.grad"
                " and its relatives, which torch.export does not trace as a whole; take the gradient with"
                " torch.autograd.grad within torch.enable_grad()"
            )


def why_not_captured(module: torch.nn.Module, error: Exception) -> str:
    text = f"torch.export could not capture {type(module).__name__}: {type(error).__name__}: {error}"
    if "input mutation during higher order op" not in text:
        return text
    # torch 2.11 says so while it traces; newer ones leave it in the graph, where `write_inside` finds it
    return f"a branch or body writes to what lives outside of it; {RETURN_INSTEAD}\n{text}"


def taken_apart(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program in the current level, where that is one of the caller's and an op of its table may be met.

    run_decompositions makes the program functional, so that views of what it writes become copies: a program without
    such ops is left as it is. Transforms of torch.func are always taken apart, into ops of whole batches.
    """
    level = current_level()
    if any(map(is_func_transform, program.graph.nodes)):
        program = program.run_decompositions({})
    if not level.composite:
        return program
    found = decomposed_ops(program, level)
    level.applied_to.update(found)
    return program.run_decompositions(dict(level.decompositions)) if found else program


def is_func_transform(node: Node) -> bool:
    """A step of torch.func.vmap or jvp, which export keeps as calls that change what the ops between them do."""
    return node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith("torch._functorch")


def decomposed_ops(program: torch.export.ExportedProgram, level: DecompositionLevel) -> set[str]:
    """The ops of the program that are in the table or may lead to one: as `silu_`, or composed of views (reshape)."""
    table = {op._schema.name.rstrip("_") for op in level.decompositions}
    modules = (part for part in program.graph_module.modules() if isinstance(part, GraphModule))
    ops = {node.target for part in modules for node in part.graph.nodes if isinstance(node.target, OpOverload)}
    return {str(op) for op in ops if op._schema.name.rstrip("_") in table or (composed(op) and not functional(op))}


def composed(op: Any) -> bool:
    """torch writes it as other ops."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def functional(op: Any) -> bool:
    """No argument is written or aliased: run_decompositions keeps composed ops of this kind whole."""
    return not any(argument.alias_info is not None for argument in op._schema.arguments)


def program_graph(program: torch.export.ExportedProgram, module: torch.nn.Module | None = None) -> GraphModule:
    """The canonical graph of an exported program, decomposed or not; writes that it keeps apart become `copy_`."""
    with no_code():
        exported = without_guards(program)
        gm = GraphModule(exported, exported.graph)  # drops export's call hooks, keeps its pytree code
    write_code_inside(gm)
    name_constants(gm, exported if module is None else module)
    for name, buffer in list(gm.named_buffers(remove_duplicate=False)):
        attach_state(gm, name, buffer, persistent=name in program.state_dict)
    fill_values(gm)
    if written := write_inside(gm):
        raise CaptureError(f"{written}; {RETURN_INSTEAD}")
    objects = result_objects(gm.graph)
    canonicalize(gm)
    keep_results_apart(gm.graph, objects)
    drop_unused_state(gm)
    canonicalize_inside(gm)
    gm.recompile()
    return gm


def without_guards(program: torch.export.ExportedProgram) -> GraphModule:
    """The program as a module, without a call of a submodule that checks guards: graft's own are in the signature."""
    if "check_guards" in inspect.signature(program.module).parameters:
        return program.module(check_guards=False)
    return program.module()


@contextmanager
def no_code() -> Iterator[None]:
    """Within it, this thread's graphs get no Python code: of the five that an exported program becomes on its way,
    only the last is run, and `recompile` writes its code in the end."""
    # it stays: of two threads, the one that ends first would put the other's back
    GraphModule.recompile = recompile  # type: ignore[method-assign]
    _codeless.depth = getattr(_codeless, "depth", 0) + 1
    try:
        yield
    finally:
        _codeless.depth -= 1


def recompile(self: GraphModule) -> Any:
    return None if getattr(_codeless, "depth", 0) else _recompile(self)


def write_code_inside(gm: GraphModule) -> None:
    """The graphs that control flow calls, as modules that have their code: Dynamo does not enter lazy ones."""
    for path, inner in inner_graphs(gm).items():
        if isinstance(inner, _LazyGraphModule):
            owner, _, leaf = path.rpartition(".")
            setattr(gm.get_submodule(owner), leaf, GraphModule(inner, inner.graph))


def canonicalize_inside(gm: GraphModule) -> None:
    """The graphs that control flow calls, in normal form, with their nodes named after them."""
    mark_weights(gm)
    for path, inner in inner_graphs(gm).items():
        objects = result_objects(inner.graph)
        canonicalize(inner)
        keep_results_apart(inner.graph, objects)
        name_nodes(path, inner.graph)
        inner.recompile()


def name_constants(gm: GraphModule, module: torch.nn.Module) -> None:
    """Tensors that export took for constants are the module's own, under the names that it has for them.

    A cache that is a plain attribute, or an attribute of some object that the module holds (as Hugging Face's
    StaticCache is), becomes `lifted_tensor_0`, even where the same tensor is registered as a buffer. It is another
    tensor over that memory, too, which does not say whether the module's own requires gradients.
    """
    held = ModuleSnapshot()
    held.add_module(module)
    known = {
        identity(tensor): (re.sub(r"\W+", "_", path).strip("_"), tensor) for path, tensor in reversed(held.tensors)
    }
    for path, part in reversed(list(module.named_modules())):
        plain = {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
        for name, tensor in {**plain, **part._buffers}.items():
            if tensor is not None:
                known[identity(tensor)] = (f"{path}.{name}" if path else name), tensor
    for node in gm.graph.nodes:
        tensor = attribute(gm, str(node.target)) if node.op == "get_attr" else None
        name, own = known.get(identity(tensor), ("", None)) if isinstance(tensor, torch.Tensor) else ("", None)
        if own is None:
            continue
        if not str(node.target).rpartition(".")[2].startswith("lifted_tensor"):
            name = str(node.target)
        while (present := attribute(gm, name)) is not None and not is_same(present, own):
            name += "_"
        if present is not own and not isinstance(present, torch.nn.Parameter):
            attach_state(gm, name, own, persistent=False)
        node.target = name


def is_same(value: Any, own: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and identity(value) == identity(own)


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Holds back a logger that prints a traceback for an error which is raised and reported anyway."""
    logger = logging.getLogger(name)
    disabled, logger.disabled = logger.disabled, True  # a level instead would empty the caches of all loggers
    try:
        yield
    finally:
        logger.disabled = disabled


def trace_function(function: Callable[..., Any], examples: Sequence[torch.Tensor]) -> GraphModule:
    """A plain function of tensors as a canonical graph, in the current decomposition level.

    torch.export traces with make_fx; for a function without state this is the same graph in a third of the time
    (14 ms instead of 35 ms a pattern), which a test holds for every pattern of the library.
    """
    gm = raw_trace(function, examples)
    canonicalize(gm)
    return gm


def raw_trace(function: Callable[..., Any], examples: Sequence[torch.Tensor]) -> GraphModule:
    """The same as `tracing_mode="fake"`, within a mode that is entered before: a fifth of the time less.

    The graph's Python code is made when it is first run, which patterns never are.
    """
    level, lazy = current_level(), _use_lazy_graph_module(True)
    table, whole = dict(level.decompositions), level.composite or not level.decompositions
    with torch.no_grad(), quiet(FAKE_TENSOR), lazy, values_alone(), FakeTensorMode(static_shapes=True) as mode:
        traced = make_fx(function, decomposition_table=table, tracing_mode="real", pre_dispatch=whole)
        return traced(*(abstract(example, mode) for example in examples))


def abstract(example: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if example.is_meta:  # it is abstract already, and from_tensor takes four times as long
        return FakeTensor(mode, example, example.device)
    return mode.from_tensor(example, static_shapes=True)


def fill_values(gm: GraphModule) -> None:
    """Gives nodes the abstract value that export leaves out: of some attributes, and of the writes that it adds."""
    mode = next((m for n in gm.graph.nodes if (m := fake_mode(n)) is not None), None)
    for node in gm.graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            value = attribute(gm, str(node.target))
            if isinstance(value, torch.Tensor):
                node.meta["val"] = mode.from_tensor(value, static_shapes=True) if mode else value
        if node.target is torch.ops.aten.copy_.default and "val" not in node.meta:
            node.meta["val"] = node.args[0].meta["val"]
