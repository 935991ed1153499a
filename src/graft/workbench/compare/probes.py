"""Values at module boundaries: of the Hugging Face module by hooks, of a graph by running it node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from graft.bench.quality import engine_steps, float64_twin
from graft.engine.llm import LLM

LOGITS = "logits of the engine"  # stands for them among the paths of modules
Values = dict[str, Tensor]  # module path or node name → [tokens, …] of one sequence


@contextmanager
def hooked(module: nn.Module, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    """While it lasts, what each submodule returns is appended to `seen`, if that is one tensor [1, tokens, …]."""

    def watch(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor)]
            if len(tensors) == 1 and tensors[0].dim() >= 3 and tensors[0].is_floating_point():
                seen.setdefault(path, []).append(tensors[0].detach()[0].clone())

        return hook

    handles = [part.register_forward_hook(watch(path)) for path, part in module.named_modules() if path]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def module_values(module: Any, ids: Sequence[int], prompt: int) -> Values:
    """Of a Hugging Face module: a prompt of `prompt` tokens, then the others one by one, with its own cache."""
    seen: dict[str, list[Tensor]] = {}
    row = torch.tensor([list(ids)], device=module.device)
    with hooked(module, seen):
        done = module(row[:, :prompt], use_cache=True)
        for at in range(prompt, len(ids)):
            seen.setdefault(LOGITS, []).append(done.logits[0])
            done = module(row[:, at : at + 1], past_key_values=done.past_key_values, use_cache=True)
    seen.setdefault(LOGITS, []).append(done.logits[0])
    return joined(seen, len(ids))


def exact_values(module: Any, ids: Sequence[int]) -> Values:
    """The same in float64, by one pass over all tokens; norms and softmax may compute in float32, where the model's
    code says so."""
    second = float64_twin(module)
    seen: dict[str, list[Tensor]] = {}
    with hooked(second, seen):
        done = second(torch.tensor([list(ids)], device=module.device), use_cache=False)
    return joined(seen, len(ids)) | {LOGITS: done.logits[0]}


def captured_values(gm: GraphModule, ids: Sequence[int], names: Mapping[str, str]) -> Values:
    """Of the captured graph, by one pass. names: module path → node."""
    row = torch.tensor([list(ids)], device=next(gm.parameters()).device)
    probe = Probe(gm, set(names.values()))
    probe.run(row, torch.arange(len(ids), device=row.device)[None])
    return {path: probe.seen[name][0] for path, name in names.items() if name in probe.seen}


def engine_values(llm: LLM, ids: Sequence[int], prompt: int, names: Mapping[str, str]) -> Values:
    """Of the transformed graph as the engine feeds it: the prompt as one step, then steps of one token."""
    probe, seen = Probe(llm.graph_module, set(names.values())), dict[str, list[Tensor]]()
    for inputs in engine_steps(llm, ids, len(ids) - prompt):
        probe.run(*inputs)
        for path, name in names.items():
            if name in probe.seen:
                seen.setdefault(path, []).append(probe.seen[name][0])
    return joined(seen, len(ids))


def joined(seen: Mapping[str, list[Tensor]], tokens: int) -> Values:
    """The steps one behind the other. A module that ran more than once a step, or for other rows, is left out."""
    whole = {path: torch.cat(parts) for path, parts in seen.items() if len({p.shape[1:] for p in parts}) == 1}
    return {path: value for path, value in whole.items() if value.shape[0] == tokens}


class Probe(Interpreter):
    """Keeps copies of the values of some nodes, since later ones may write over them."""

    def __init__(self, gm: GraphModule, names: set[str]) -> None:
        super().__init__(gm)
        self.names = names
        self.seen: dict[str, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.name in self.names and isinstance(value, Tensor):
            self.seen[n.name] = value.clone()
        return value
