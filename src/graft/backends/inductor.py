"""Inductor, and the private parts of torch that the torch.compile routes need. No other backend file names them."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.exc import BackendCompilerFailed, TensorifyScalarRestartAnalysis, TorchRuntimeError
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch import config as functorch_config
from torch._guards import CompileContext, TracingContext, tracing
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from graft.backends.eager import ran_here
from graft.backends.inductor_caches import WatchedCall, without_caches
from graft.backends.inductor_loops import counters_allowed, has_counted_loops, with_counters
from graft.backends.lowered import InductorSettings, Lowered
from graft.backends.negative_bits import refuse_negative, without_negative
from graft.backends.nvtx import NONE, ranges_on
from graft.base.errors import GraftError, GraphRefused, Recompiled, UsageError, near
from graft.ir.branches import all_nodes
from graft.ir.canonical.normal_form import is_random
from graft.ir.edit import second_module
from graft.ir.effects import mutated_roots
from graft.ir.nodes import leaves, placeholders, val
from graft.ir.storage import storage_id
from graft.ir.streams import drop_streams, has_streams
from graft.memory.inductor_fix.functionalization import inductor_options

# A custom pass under this key runs after decomposition and functionalization, before Inductor's own patterns.
FUSION_PASS = "post_grad_custom_pre_pass"
OTHER_NUMBERS = "inductor: it samples other random numbers than eager for the same seed"


def lower_inductor(
    gm: GraphModule, kernels: Mapping[str, str] | None = None, settings: InductorSettings | None = None
) -> Lowered:
    refuse_named_kernels(kernels)
    settings = settings or InductorSettings()
    patches = inductor_patches(settings)
    refuse_negative((*gm.named_buffers(), *gm.named_parameters()))
    trust_instruction_sets()
    notes = [INDUCTOR_NOTE]
    if has_streams(gm.graph):
        gm = second_module(gm)
        drop_streams(gm.graph)
        gm.recompile()
        notes.append("inductor: it orders its kernels itself, on one stream; the stream ops are left out")
    notes += unlike_eager(gm.graph)
    compiled = torch.compile(gm, dynamic=has_symbols(gm.graph), options=patches)
    if has_counted_loops(gm.graph):
        compiled = with_counters(compiled)
    call = WatchedCall(told_failures(without_negative(with_right_artifacts(compiled, gm))))
    return Lowered(call, "inductor", ran_here(gm), tuple(notes), later=call.notes)


def unlike_eager(graph: Graph) -> list[str]:
    """What Inductor's code does otherwise than the operators do, for the report."""
    samples = not torch._inductor.config.fallback_random and any(map(is_random, all_nodes(graph)))
    return [OTHER_NUMBERS] * samples + [NONE] * ranges_on()


def told_failures(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, whose failures inside of Inductor are errors with a way out: a program that it cannot compile, and
    its own check of strides (torch 2.11 expects another layout of an fft than some libraries give)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except BackendCompilerFailed as error:
            inner = error.inner_exception
            if isinstance(inner, GraftError):
                raise
            raise GraphRefused(
                f"Inductor cannot compile this program: {type(inner).__name__}: {inner}; backend='eager' runs it"
            ) from error
        except TorchRuntimeError as error:  # an operator that Dynamo cannot run with open sizes
            if isinstance(error.__cause__, GraftError):
                raise
            said = next((line.strip() for line in str(error).splitlines() if "Explanation: " in line), str(error))
            raise GraphRefused(
                f"Inductor cannot compile this program: {said.partition('Explanation: ')[2] or said};"
                " backend='eager' runs operators as they are"
            ) from error
        except AssertionError as error:
            if not str(error).startswith("expected size"):
                raise
            raise GraphRefused(
                f"Inductor's code expects a tensor in another layout than its operator gave: {error}; that is between"
                " torch's operators and its Inductor, so use backend='eager' for this program"
            ) from error

    return call


def has_symbols(graph: Graph) -> bool:
    """Some input varies in size, or is a number that varies. Without one, code for fixed sizes is faster, and proofs
    that two parts of a cache are apart succeed."""
    values = (val(node) for node in placeholders(graph))
    sizes = (size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else (value,)))
    return any(isinstance(size, torch.SymInt) for size in sizes)


def with_right_artifacts(compiled: Callable[..., Any], gm: GraphModule) -> Callable[..., Any]:
    """`compiled`, which takes nothing from AOTAutograd's cache when its inputs share memory and some are written.

    That cache (on disk, 2.11 and 2.13) does not ask which inputs share memory, although code for `f(a, b)` is wrong
    for `f(c[:4], c[1:5])` where f writes: what one process compiled for the first, another would run for the second.
    """
    if not mutated_roots(gm.graph):
        return compiled
    state = {storage_id(tensor) for tensor in (*gm.parameters(), *gm.buffers())}

    def call(*args: Any, **kwargs: Any) -> Any:
        with autograd_cache(leaves((args, kwargs)), state):
            return compiled(*args, **kwargs)

    return call


def autograd_cache(inputs: Iterable[Any], state: Set[int | None] = frozenset()) -> AbstractContextManager[Any]:
    """Switches AOTAutograd's cache off where two inputs, or an input and `state`, share memory."""
    found = [storage_id(value) for value in inputs if isinstance(value, torch.Tensor)]
    if len(set(found)) == len(found) and state.isdisjoint(found):
        return nullcontext()
    return functorch_config.patch(enable_autograd_cache=False)


INDUCTOR_NOTE = "inductor: compiled at the first call; graft ops run as custom ops inside it"


def refuse_named_kernels(kernels: Mapping[str, str] | None) -> None:
    """Inside Inductor an op picks its kernel when it is called, so one that is named could not be promised."""
    if kernels:
        op, name = next(iter(kernels.items()))
        raise UsageError(
            f"kernels.{op}={name}: ops inside Inductor choose their kernels themselves;"
            " take kernels out of the config, or use the eager backend"
        )


def trust_instruction_sets() -> None:
    """Inductor tries out each instruction set in a subprocess, up to 20 s; the sets it names are trusted instead.

    The variable is read when Inductor's configuration is imported, so that one that is there already is told as well;
    it is part of the caches' keys, and another process would look for other ones.
    """
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    config = sys.modules.get("torch._inductor.config")
    if config is not None and os.environ["TORCHINDUCTOR_VEC_ISA_OK"] == "1" and config.cpp.vec_isa_ok is None:
        config.cpp.vec_isa_ok = True


def inductor_settings() -> dict[str, Any]:
    """What graft changes in Inductor's configuration wherever it compiles: writes in place that are right."""
    return inductor_options()


def inductor_patches(settings: InductorSettings, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Inductor's options: the caller's mode and options, and graft's passes (`own` beside the fix) among his.

    The caller's passes are those in his options, else those of torch._inductor.config. Where both have one, his runs
    first, on the graph that he knows; the memory of a graph is recorded before anybody changes it.
    """
    from torch._inductor import list_mode_options, list_options

    if settings.mode is not None and settings.mode not in list_mode_options():
        known = ", ".join(map(repr, list_mode_options()))
        raise UsageError(f"mode must be one of {known}, but is {settings.mode!r}")
    for name in settings.options:
        if name.replace("-", "_") not in list_options():
            raise UsageError(f"options.{name} is not an option of Inductor{near(name, list_options())}")
    given = {name.replace("-", "_"): value for name, value in settings.options.items()}
    patches = {**(list_mode_options(settings.mode) if settings.mode else {}), **given}
    for hook, ours in {**(inductor_options(settings.observer) if settings.fix else {}), **(own or {})}.items():
        theirs = given.get(hook, getattr(torch._inductor.config, hook))
        patches[hook] = ours if theirs is None else chained(hook, theirs, ours)
    return patches


def chained(hook: str, theirs: Any, ours: Any) -> Any:
    passes = [*(theirs if isinstance(theirs, (list, tuple)) else [theirs]), ours]
    ordered = passes if hook != "joint_custom_pre_pass" else [ours, *passes[:-1]]
    return ChainedPass(ordered, hands_on=hook.endswith("_fusion_custom_pass"))


# The kind of pass that post-grad hooks tell whether they compile for inference; some versions of torch have none.
InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
GraphPass: Any = InferenceAware or CustomGraphPass


class ChainedPass(GraphPass):
    """Passes of one hook, one after the other. Inductor's caches know it where they know each of them.

    hands_on: each gets what the one before returned (scheduler nodes). Passes on graphs may return anything.
    """

    def __init__(self, passes: Sequence[Callable[..., Any]], *, hands_on: bool = False) -> None:
        self.passes = list(passes)
        self.hands_on = hands_on

    def __call__(self, graph: Any, is_inference: bool | None = None) -> Any:
        told = {} if is_inference is None else {"is_inference": is_inference}
        for run in self.passes:
            aware = InferenceAware is not None and isinstance(run, InferenceAware)
            result = run(graph, **(told if aware else {}))
            graph = result if self.hands_on and result is not None else graph
        return graph

    def uuid(self) -> Any:
        known = [run.uuid() if isinstance(run, CustomGraphPass) else None for run in self.passes]
        return None if any(key is None for key in known) else repr(known)


def compile_with_inductor(
    gm: GraphModule, inputs: Sequence[Any], settings: InductorSettings | None = None
) -> Callable[..., Any]:
    """Dynamo's own hand-over: guards, mutation, aliasing and dynamic sizes are Inductor's business."""
    from torch._inductor.compile_fx import compile_fx

    trust_instruction_sets()
    patches = inductor_patches(settings or InductorSettings())
    with autograd_cache(inputs), counters_allowed(gm.graph, inputs):
        compiled: Any = compile_fx(gm, list(inputs), config_patches=patches)
    return without_negative(compiled)


def python_dispatcher() -> AbstractContextManager[Any]:
    """Symbolic sizes need the Python rules of composite ops while tracing."""
    return enable_python_dispatcher()


def apart_from_dynamo() -> AbstractContextManager[Any]:
    """Within it, what is traced (patterns) does not enter the shapes and guards of the compilation under way."""
    return tracing(None)


def frame_under_way() -> tuple[int | None, bool]:
    """The number of the frame that Dynamo compiles, and whether it never compiled it before."""
    compilation = CompileContext.current_compile_id()
    return (None, True) if compilation is None else (compilation.frame_id, compilation.frame_compile_id == 0)


def trace_again(constants: Set[str]) -> NoReturn:
    """Dynamo traces the frame once more with these symbols of floats as constants, each under a guard."""
    TensorifyState.force_specializations |= constants
    raise TensorifyScalarRestartAnalysis


def forget_constants(constants: Set[str]) -> None:
    """Dynamo would keep the list for good, and symbols of other programs have the same names."""
    TensorifyState.force_specializations -= constants


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """How Inductor takes ops apart before its post-grad passes see them."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def static_inputs() -> list[int]:
    """The inputs of the graph that is being compiled which are parameters or buffers, by position."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return list(metadata.static_input_indices) if metadata is not None else []


def compiles_ahead() -> bool:
    """Whether AOTInductor compiles right now: what it makes may run in another process, without Python."""
    from torch._inductor.virtualized import V

    return bool(V.aot_compilation)


# ── what tests look at ──────────────────────────────────────────────────────────────────────────────────────────


def reset_compiler() -> None:
    """Forgets all that torch.compile has compiled in this process."""
    torch._dynamo.reset()


def compiled_graphs() -> int:
    """How many graphs Dynamo has given to backends in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@contextmanager
def refuse_recompiles() -> Iterator[None]:
    """Within it, a function that was compiled before and would be compiled again raises Recompiled."""
    from torch._dynamo.exc import RecompileError

    with torch._dynamo.config.patch(error_on_recompile=True):
        try:
            yield
        except RecompileError as error:
            raise Recompiled(str(error)) from error


def post_grad_backend(
    options: Mapping[str, Any],
    see: Callable[[str, GraphModule], None],
    stand_in: Callable[[GraphModule], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """A backend that goes through Inductor's FX passes and stops before it generates code; the last graph runs.

    see: called with ("before", graph) and ("after", graph), around the post-grad passes. stand_in: makes of the graph
    as it comes what runs instead.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.utils import detect_fake_mode
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import view_to_reshape
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    def lower(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        instead = stand_in(gm) if stand_in is not None else None
        with V.set_fake_mode(detect_fake_mode(inputs)), torch._inductor.config.patch(dict(options)):
            joint_graph_passes(gm)
            view_to_reshape(gm)
            see("before", gm)
            post_grad_passes(gm, True)
            see("after", gm)
        gm.recompile()
        return make_boxed_func(instead or gm.forward)

    return aot_autograd(
        fw_compiler=lower,
        inference_compiler=lower,
        decompositions=decompositions(),
        keep_inference_input_mutations=True,
    )


def generated_code(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """The result of a compiled function, and the code that Inductor wrote for it in this call."""
    from torch._inductor.utils import run_and_get_code

    trust_instruction_sets()
    with without_caches():
        return run_and_get_code(function, *args, **kwargs)


# ── graphs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def build_package(program: torch.export.ExportedProgram, path: Path, options: Mapping[str, Any]) -> None:
    """Writes AOTInductor's package of the program to `path`, which ends in `.pt2`."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own code
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(options))


def sort_graph(graph: Graph) -> None:
    """Moves nodes below what they read; a graph in order stays as it is."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


class CachedPass(CustomGraphPass):
    """A graph pass that Inductor's caches know by `key`; a plain function would switch them off."""

    def __init__(self, key: str, run: Callable[[Graph], None]) -> None:
        self.key = key
        self.run = run

    def __call__(self, graph: Graph) -> None:
        self.run(graph)

    def uuid(self) -> str:
        return self.key
