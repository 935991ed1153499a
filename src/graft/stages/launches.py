"""Generated code while it runs: which kernels a graph launches with what, and what each launch writes.

A generated module calls its kernels by global names. For one call of it those names are replaced by ones that note
what they were called with.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graft.stages.kernels import GeneratedKernel
from graft.stages.runtime import RunnableGraph
from graft.stages.story_code import ValueRecord

NAMESPACES = ("extern_kernels", "aten", "torch")  # what a module calls that is not generated


@dataclass
class NotedLaunch:
    """One call of a kernel as the generated code makes it; result: what an op returned."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    values: tuple[ValueRecord, ...] = ()

    def __call__(self) -> Any:
        given = dict(self.kwargs)
        if "stream" in given:  # Triton's launches name their stream, which is another one inside of a capture
            given["stream"] = torch.cuda.current_stream().cuda_stream
        return self.function(*self.args, **given)


def launches_of(graph: RunnableGraph, kernels: dict[str, GeneratedKernel], values: bool) -> list[NotedLaunch]:
    """One call of the graph, on copies of what it writes."""
    launches: list[NotedLaunch] = []
    runner = getattr(graph.call, "__self__", None)
    names: dict[str, Any] = graph.call.__globals__  # type: ignore[attr-defined]
    before, partitions = dict(names), getattr(runner, "partitions", None)
    for name, kernel in kernels.items():
        if name in names:
            names[name] = NotedKernel(graph.graph, kernel, names[name], launches, values)
    for name in NAMESPACES:
        if name in names:
            names[name] = NotedNames(graph.graph, name, names[name], launches, values)
    if runner is not None and partitions is not None:
        runner.partitions = graph.partitions
    try:
        written = set(graph.written)
        graph.call([a.clone() if i in written else a for i, a in enumerate(graph.args)])
    finally:
        names.update(before)
        if runner is not None and partitions is not None:
            runner.partitions = partitions
    return launches


class NotedKernel:
    """A generated kernel that notes its calls: `kernel(…)` of C++, `kernel.run(…)` of Triton."""

    def __init__(
        self, graph: str, kernel: GeneratedKernel, function: Any, launches: list[NotedLaunch], values: bool
    ) -> None:
        self.graph, self.kernel, self.function, self.launches = graph, kernel, function, launches
        self.values = values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.note(self.function, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.note(self.function.run, args, kwargs)

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        launch = NotedLaunch(self.kernel.name, function, args, kwargs, result)
        if self.values:
            names = parameter_names(self.kernel)
            made = [(n, a) for n, a in zip(names, args, strict=False) if n.startswith(("out_ptr", "in_out_ptr"))]
            launch.values = values_of(self.graph, self.kernel.name, made)
        self.launches.append(launch)
        return result


class NotedNames:
    """`extern_kernels`, `aten` or `torch` whose calls of kernels and ops are noted; all else passes through."""

    def __init__(self, graph: str, path: str, found: Any, launches: list[NotedLaunch], values: bool) -> None:
        self._graph, self._path, self._found, self._launches, self._values = graph, path, found, launches, values

    def __getattr__(self, name: str) -> Any:
        found, path = getattr(self._found, name), f"{self._path}.{name}"
        if self._path.startswith("torch") and not path.startswith("torch.ops"):
            return found
        if isinstance(found, torch.dtype):
            return found
        return NotedNames(self._graph, path, found, self._launches, self._values)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._found(*args, **kwargs)
        launch = NotedLaunch(self._path, self._found, args, kwargs, result)
        if self._values:
            made = kwargs.get("out", result)
            launch.values = values_of(self._graph, self._path, [("out", made)])
        self._launches.append(launch)
        return result


def parameter_names(kernel: GeneratedKernel) -> list[str]:
    """Of the kernel's own function: `in_ptr0`, `out_ptr1`."""
    if kernel.language.startswith("cpp"):
        found = re.search(r"kernel\(([^)]*)\)", kernel.source)
        return [re.findall(r"\w+", part)[-1] for part in found[1].split(",") if part.strip()] if found else []
    found = re.search(r"def \w+\(([^)]*)\)", kernel.source)
    return [part.partition(":")[0].strip() for part in found[1].split(",")] if found else []


def values_of(graph: str, kernel: str, made: Sequence[tuple[str, Any]]) -> tuple[ValueRecord, ...]:
    found = []
    for name, value in made:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() and not tensor.is_meta:
                found.append(value_record(graph, kernel, name, tensor))
    return tuple(found)


def value_record(graph: str, kernel: str, name: str, tensor: torch.Tensor) -> ValueRecord:
    """Least, largest and mean of what is finite, and how many are not; complex numbers by their absolute values."""
    kind = argument_text(tensor)
    if tensor.is_complex():
        tensor, kind = tensor.detach().abs(), f"{kind} absolute values"
    flat = tensor.detach().flatten().double()
    finite = flat[flat.isfinite()]
    odd = flat.numel() - finite.numel()
    if not finite.numel():
        return ValueRecord(graph, kernel, name, kind, not_finite=odd)
    return ValueRecord(graph, kernel, name, kind, finite.min().item(), finite.max().item(), finite.mean().item(), odd)


def argument_text(value: Any) -> str:
    """`float32[4, 16] (16, 1) cpu` of a tensor with its strides; a value that code can hold; else its type."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)} {tuple(value.stride())} {value.device}"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    try:
        ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):
        return type(value).__name__
    return repr(value)
