"""Whether what a transform makes can still be traced back: values, modules, source lines, its own name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from graft.ir.io.text import abstract_text
from graft.ir.nodes import leaves, module_path, output_node, placeholders, source_line, val
from graft.ir.trace import export_graph
from graft.passes.report import MatchRecord
from graft.testing.failure import failure
from graft.testing.fusion import Trial, Tried, as_module, assert_fuses


def assert_metadata_preserved(module: Tried, args: tuple[Any, ...], transform: str, **options: Any) -> Trial:
    """Every node that the transform makes has its value, module, source line and maker; all other nodes keep theirs.

    The values are those of a run with `args`, not only what an op's shape rule says. options: of `assert_fuses`.
    """
    __tracebackhide__ = True
    trial = assert_fuses(module, args, transform, **options)
    original = export_graph(as_module(module), args, dict(options.get("kwargs") or {}), options.get("dynamic_shapes"))
    problems = [
        *made_problems(original, trial),
        *kept_problems(original, trial.graph_module),
        *run_problems(trial.graph_module, args, dict(options.get("kwargs") or {})),
    ]
    if problems:
        raise failure(
            f"what {transform} makes in {trial.name} keeps value, module, source line and maker",
            f"{len(problems)} of these are lost or wrong",
            problems,
            advice="make nodes with Editor.call(…, like=<a node that is replaced>); values come from the op's `fake`",
        )
    return trial


def made_problems(original: GraphModule, trial: Trial) -> Iterator[str]:
    present = {node.name: node for node in trial.graph_module.graph.nodes}
    sources = {node.name: node for node in original.graph.nodes}
    for match in trial.record.matches:
        for name in match.made:
            if name in present:
                yield from node_problems(present[name], match, sources, trial.transform)


def node_problems(node: Node, match: MatchRecord, sources: dict[str, Node], transform: str) -> Iterator[str]:
    replaced = [sources[name] for name in match.replaced if name in sources]
    for what, read in (("module", module_path), ("source line", source_line)):
        known = {read(source) for source in replaced} - {""}
        if known and read(node) not in known:
            others = ", ".join(sorted(known))
            yield f"%{node.name} has the {what} {read(node) or '(none)'}, what it replaced has {others}"
    if val(node) is None:
        yield f"%{node.name} has no value (shape and dtype) recorded"
    if node.meta.get("made_by") != transform:
        yield f"%{node.name} says it was made by {node.meta.get('made_by') or '(nobody)'}, not by {transform}"


def kept_problems(original: GraphModule, changed: GraphModule) -> Iterator[str]:
    """Of nodes that were there before: value, module, line; of the graph: its inputs, the kinds of its results."""
    present = {node.name: node for node in changed.graph.nodes}
    for node in original.graph.nodes:
        kept = present.get(node.name)
        if kept is None or node.op == "output" or "made_by" in kept.meta:
            continue
        for what, read in (("module", module_path), ("source line", source_line), ("value", value_text)):
            if read(kept) != read(node):
                yield f"%{node.name} was not replaced, but its {what} is {read(kept) or '(none)'}, not {read(node)}"
    names = [[node.name for node in placeholders(gm.graph)] for gm in (original, changed)]
    if names[0] != names[1]:
        yield f"the graph's inputs are {', '.join(names[1])}, not {', '.join(names[0])}"
    results = [[value_text(n) for n in leaves(output_node(gm.graph).args)] for gm in (original, changed)]
    if results[0] != results[1]:
        yield f"the graph returns {', '.join(results[1])}, not {', '.join(results[0])}"


def value_text(node: Any) -> str:
    return abstract_text(val(node)) if isinstance(node, Node) and val(node) is not None else ""


class MetadataChecker(Interpreter):
    """Runs a graph and compares each tensor with what is recorded for its node; dynamic sizes may be any."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.problems: list[str] = []

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        recorded = val(n)
        if n.op == "call_function" and isinstance(result, torch.Tensor) and isinstance(recorded, torch.Tensor):
            sizes = len(result.shape) == len(recorded.shape) and all(
                not isinstance(wanted, int) or got == wanted
                for got, wanted in zip(result.shape, recorded.shape, strict=True)
            )
            if not sizes or result.dtype != recorded.dtype or result.device != recorded.device:
                self.problems.append(
                    f"%{n.name} is recorded as {abstract_text(recorded)},"
                    f" and running it gives {abstract_text(result)}"
                )
        return result


def run_problems(gm: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    recording = MetadataChecker(gm)
    given = [leaf for leaf in leaves((args, kwargs)) if leaf is not None]
    with torch.no_grad():
        recording.run(*given, enable_io_processing=False)
    return recording.problems
