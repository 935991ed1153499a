"""graft.compile: any nn.Module through the pipeline, with the signature and results it had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graft.backends import lower
from graft.errors import CaptureError, UsageError
from graft.graph.nodes import leaves, mutated_roots, static_int
from graft.graph.text import abstract_text
from graft.graph.trace import export_graph
from graft.transforms.base import Context
from graft.transforms.config import PipelineConfig, load_config
from graft.transforms.pipeline import run_pipeline
from graft.transforms.report import Report


@dataclass(frozen=True)
class Inputs:
    """What the graph was captured with: abstract tensors, and values that are fixed in it."""

    examples: tuple[Any, ...]
    keywords: tuple[str, ...]

    @staticmethod
    def of(gm: torch.fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        given = list(leaves((args, kwargs)))
        recorded = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
        if len(given) != len(recorded):
            raise CaptureError("inputs in containers other than list, tuple and dict cannot be checked; pass tensors")
        examples = [v if isinstance(g, torch.Tensor) else g for g, v in zip(given, recorded, strict=True)]
        return Inputs(tuple(examples), tuple(kwargs))

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises UsageError for inputs that the graph was not captured for; it would compute something else."""
        if set(kwargs) != set(self.keywords):
            raise UsageError(f"compiled with the keyword arguments {list(self.keywords)}, called with {list(kwargs)}")
        given = list(leaves((args, {name: kwargs[name] for name in self.keywords})))
        if len(given) != len(self.examples):
            raise UsageError(f"compiled with {len(self.examples)} inputs, called with {len(given)}")
        for index, (value, example) in enumerate(zip(given, self.examples, strict=True)):
            problem = input_problem(value, example)
            if problem:
                raise UsageError(f"input {index} {problem}; compile again, with dynamic_shapes where sizes vary")


def input_problem(value: Any, example: Any) -> str | None:
    if not isinstance(example, torch.Tensor):
        return None if value == example else f"is {value!r}, but {example!r} is fixed in the graph"
    if not isinstance(value, torch.Tensor):
        return f"is {type(value).__name__}, but was a tensor"
    if value.dtype != example.dtype or value.device != example.device:
        return f"is {value.dtype} on {value.device}, but was {example.dtype} on {example.device}"
    sizes = [static_int(size) for size in example.shape]
    if value.dim() != len(sizes) or any(s is not None and s != v for s, v in zip(sizes, value.shape, strict=True)):
        return f"has the shape {tuple(value.shape)}, but was captured as {abstract_text(example)}"
    return None


class CompiledModule(torch.nn.Module):
    """A module that calls its transformed graph. State is shared with the module it was made from."""

    _call: Callable[..., Any]

    def __init__(
        self,
        graph_module: torch.fx.GraphModule,
        call: Any,
        report: Report,
        backend: str,
        inputs: Inputs,
        aliases: tuple[Any, ...] = (),
        kernels: Mapping[str, str] | None = None,
        initial: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.aliases = aliases
        self.kernels = dict(kernels or {})
        self.initial = dict(initial or {})
        self._inputs = inputs
        self.graph_module = graph_module
        self.report = report
        self.backend = backend
        # no submodule: it shares the state of graph_module, which would be in state_dict and exports a second time
        self.__dict__["_call"] = call

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._inputs.check(args, kwargs)
        # an exported program keeps graft's ops, which trace; kernels that were chosen for this machine do not
        call = self.graph_module if torch.compiler.is_exporting() else self._call
        return call(*args, **kwargs)

    def reset(self) -> None:
        """Gives every state buffer its initial value."""
        for name, value in self.initial.items():
            self.graph_module.get_buffer(name).copy_(value)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Writes a folder that `graft.load` reads in a new process; state is saved as it is now."""
        from graft.runtime.artifacts import save_compiled

        save_compiled(self, path, overwrite=overwrite)


def compile(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    config: str | Path | Mapping[str, Any] | PipelineConfig | None = None,
    backend: str = "auto",
    dump_dir: str | Path | None = None,
) -> CompiledModule:
    """Captures `module` with example inputs, transforms the graph and lowers it.

    Sizes are fixed to the example's unless `dynamic_shapes` (as for torch.export) frees them.
    """
    settings = config if isinstance(config, PipelineConfig) else load_config(config)
    gm = export_graph(module, args, kwargs, dynamic_shapes)
    inputs = Inputs.of(gm, args, kwargs or {})
    report = run_pipeline(gm, settings, Context(route="module"), model=type(module).__name__, dump_dir=dump_dir)
    lowered = lower(gm, backend, settings.kernels)
    report = replace(report, kernels=lowered.kernels, notes=(*report.notes, *lowered.notes))
    written = {str(node.target) for node in mutated_roots(gm.graph) if node.op == "get_attr"}
    initial = {name: gm.get_buffer(name).clone() for name in sorted(written)}
    return CompiledModule(gm, lowered.call, report, lowered.backend, inputs, (), settings.kernels, initial)
