"""A model, a function or a dumped graph as a package of AOTInductor, which is loaded and run in a fresh process and
compared with eager before it is written."""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graft.api.functionalization import fix_functionalization
from graft.api.inductor_passes import passes_for_inductor
from graft.backends.inductor import build_package, trust_instruction_sets
from graft.base.errors import ExportRefused
from graft.base.files import Progress, atomic_file, disk_errors
from graft.capture.function import FunctionModule, has_signature
from graft.ir.nodes import calls as graph_calls
from graft.ops.cases import tolerance
from graft.workbench.discover.values import restore_values
from graft.workbench.export.inputs import made_up_arguments, needs_layout
from graft.workbench.export.pt2 import own_storage, program_of
from graft.workbench.op_modules import OWN, op_modules
from graft.workbench.runs import StoredRun, StoredStep
from graft.workbench.stages.targets import StageTarget

RUNNER = Path(__file__).with_name("package_run.py")
LIMIT = 600.0  # seconds for the process that loads and runs it
REDUCTION = 1 << 16  # additions behind one number of a model; kernels add in another order than eager


@dataclass(frozen=True)
class Packaged:
    """error: the largest difference to eager, relative to the largest value. modules: what to import first."""

    file: Path
    bytes: int
    calls: int
    error: float
    load_seconds: float
    call_us: float
    modules: tuple[str, ...]
    dynamic: tuple[str, ...]


@dataclass(frozen=True)
class Exportable:
    """program: made from the first call. expected: what eager returns for each of `calls`, one after the other."""

    program: torch.export.ExportedProgram
    calls: tuple[tuple[Any, ...], ...]
    expected: tuple[Any, ...]
    modules: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()


def target_program(target: StageTarget) -> Exportable:
    """Dims in which its calls differ are open in the program."""
    function = target.function
    own = isinstance(function, nn.Module)
    module = copy.deepcopy(function) if isinstance(function, nn.Module) else FunctionModule(function)
    dims = open_dims(target.calls)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own code
            shapes = tuple(dims) if own or has_signature(function) else (tuple(dims),)
            program = torch.export.export(module, copy.deepcopy(target.calls[0]), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export raises whatever an op raises; its first line says which
        told = str(error).strip().partition("\n")[0]
        raise ExportRefused(f"torch.export refuses {target.name}: {told}") from error
    names = [f"argument {i + 1}, dim {d}" for i, one in enumerate(dims) if one for d in one]
    return Exportable(program, target.calls, eager_results(function, target.calls), (), tuple(names))


def open_dims(calls: Sequence[tuple[Any, ...]]) -> list[dict[int, Any] | None]:
    found: list[dict[int, Any] | None] = []
    for values in zip(*calls, strict=True):
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(tensors) < len(values):
            found.append(None)
            continue
        sizes = list(zip(*(one.shape for one in tensors), strict=True))
        found.append({d: torch.export.Dim.DYNAMIC for d, size in enumerate(sizes) if len(set(size)) > 1})
    return found


def run_program(run: StoredRun, step: StoredStep) -> Exportable:
    """The graph of a dump with weights, called with made-up inputs."""
    shapes = step.graph()
    restore_values(shapes)
    if reason := needs_layout(shapes):
        raise ExportRefused(f"{reason}, which made-up inputs have not; take an earlier graph: --step captured")
    program, _ = program_of(run, step)
    gm, args = step.graph(own_storage(run.state())), tuple(made_up_arguments(shapes))
    modules = tuple(one.module for one in op_modules(graph_calls(gm.graph)))
    return Exportable(program, (args,), eager_results(gm, (args,)), modules)


def eager_results(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """One call after the other, on a copy of a module's state."""
    fresh = copy.deepcopy(function) if isinstance(function, nn.Module) else function
    with torch.no_grad():
        return tuple(copy.deepcopy(fresh(*copy.deepcopy(args))) for args in calls)


def write_package(
    made: Exportable, output: Path, *, fusions: bool = False, progress: Progress | None = None
) -> Packaged:
    """Builds, runs and compares; the file appears if all of that went well. fusions: graft's, whose ops Python
    registers; without them the package has ATen's ops alone and runs in C++ as well."""
    trust_instruction_sets()
    if output.suffix != ".pt2":
        raise ExportRefused(f"{output} has to end in .pt2: torch reads the format from the name")
    options = passes_for_inductor() if fusions else fix_functionalization()
    modules = tuple(dict.fromkeys((*made.modules, *((OWN,) if fusions else ()))))

    def refuse(error: Exception) -> ExportRefused:
        return ExportRefused(f"{output} cannot be written: {str(error).partition(chr(10))[0]}")

    with disk_errors(output, refuse), atomic_file(output) as partial:
        if progress:
            progress("compiling the package", 0, 2)
        try:
            build_package(made.program, partial, options)
        except Exception as error:  # the compiler's own, of whatever kind
            raise ExportRefused(f"AOTInductor refuses it: {first_told(error)}") from error
        if progress:
            progress("running it in a fresh process", 1, 2)
        ran = run_package(partial, made.calls, modules)
        error = largest_error(made.expected, tuple(ran["returned"]))
        limit = allowed(made.expected)
        if not error <= limit:
            raise ExportRefused(
                f"the package differs from eager by {error:.1e}, {limit:.1e} allowed; nothing is written"
            )
    size = output.stat().st_size
    return Packaged(
        output, size, len(made.calls), error, ran["load_seconds"], ran["call_seconds"] * 1e6, modules, made.dynamic
    )


def first_told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def run_package(package: Path, calls: Sequence[tuple[Any, ...]], modules: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="graft-package-") as folder:
        given, results = Path(folder) / "calls.pt", Path(folder) / "results.pt"
        torch.save(list(calls), given)
        command = [sys.executable, "-c", RUNNER.read_text(), str(package), str(given), str(results), *modules]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            raise ExportRefused(f"the package did not run within {LIMIT:.0f} s in a fresh process") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ExportRefused(f"the package does not run in a fresh process: {last}")
        return torch.load(results)


def largest_error(expected: Any, found: Any) -> float:
    """Relative to the largest value of a tensor; infinite where structure, shape or dtype differ, or one is NaN."""
    left, right = pytree.tree_leaves(expected), pytree.tree_leaves(found)
    if len(left) != len(right):
        return float("inf")
    return max((tensor_error(a, b) for a, b in zip(left, right, strict=True)), default=0.0)


def tensor_error(one: Any, two: Any) -> float:
    if not isinstance(one, torch.Tensor):
        return 0.0 if one == two else float("inf")
    if not isinstance(two, torch.Tensor) or one.shape != two.shape or one.dtype != two.dtype:
        return float("inf")
    if not one.numel() or torch.equal(one, two):
        return 0.0
    if not one.is_floating_point():
        return float("inf")
    a, b = one.double(), two.double().to(one.device)
    same = (a == b) | (a.isnan() & b.isnan())
    error = (a - b).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0.0).max().item()
    return error / (a[a.isfinite()].abs().max().item() or 1.0)


def allowed(expected: Any) -> float:
    """Of the coarsest dtype that is returned."""
    dtypes = {v.dtype for v in pytree.tree_leaves(expected) if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return max((tolerance(dtype, REDUCTION) for dtype in dtypes), default=0.0)
