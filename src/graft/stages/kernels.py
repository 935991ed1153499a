"""Stage 5, code: the kernels that Inductor wrote or calls, the nodes and lines that each computes, autotuning."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._inductor.config

from graft.stages.autotune import SeenChoices, configs_of, single_choices, why_no_choices
from graft.stages.needs import swapped
from graft.stages.origins import NEEDS as ORIGINS
from graft.stages.origins import computed_nodes
from graft.stages.story import StageGraph
from graft.stages.story_code import KernelRecord, KernelStage
from graft.stages.trace import TraceCollector, current_graph

WRITTEN = "set_kernel_post_grad_provenance_tracing"
NEEDS = (
    "torch._inductor.config:trace.provenance_tracking_level",
    *(f"torch._inductor.{module}:{WRITTEN}" for module in ("debug", "codegen.cpp", "codegen.triton")),
    *ORIGINS,
)
WRAPPED = "inductor_entry_impl("  # the function of C++ that calls the kernels, where Python does not
IN_CPP = re.compile(r'^extern "C"\s+void\s+(\w+)\([^;{]*\)\n\{\n.*?^\}', re.M | re.S)
TEMPLATE_TILE = re.compile(r"^\s*(BLOCK_[MNK])\s*: tl\.constexpr = (\d+)", re.M)
IN_WRAPPER = "C++ calls it: option cpp_wrapper"
NOT_LAUNCHED = "not launched by the first call, whose kernels alone are timed"
NO_GPU = "registers and spills: of Triton kernels on a GPU; this run was on {device}"


@dataclass(frozen=True)
class GeneratedKernel:
    """One kernel: `cpp_fused_add_0` in C++, or `triton_poi_fused_add_0` in Triton's language."""

    name: str
    language: str
    source: str = field(repr=False)


@dataclass
class SeenKernels:
    """launches: as the code for them is written, each with the nodes that it computes."""

    launches: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)  # graph, kernel, nodes


@contextmanager
def watch_kernels(seen: SeenKernels) -> Iterator[None]:
    """Inductor says which part of its IR each kernel is written for."""
    from torch._inductor import debug
    from torch._inductor.codegen import cpp, triton

    with ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch({"trace.provenance_tracking_level": 1}))
        for module in (debug, cpp, triton):  # the latter two have imported it
            stack.enter_context(swapped(module, WRITTEN, lambda before: noting_launches(before, seen)))
        yield


def noting_launches(before: Callable[..., Any], seen: SeenKernels) -> Callable[..., Any]:
    def written(schedule: Any, kernel: str, *args: Any, **kwargs: Any) -> Any:
        inner = [getattr(one, "node", None) for one in schedule] if isinstance(schedule, list) else [schedule]
        nodes = dict.fromkeys(node for one in inner for node in computed_nodes(one))
        seen.launches.append((current_graph(), kernel, tuple(nodes)))
        return before(schedule, kernel, *args, **kwargs)

    return written


def read_kernels(tree: ast.AST) -> Iterator[GeneratedKernel]:
    """`name = async_compile.LANGUAGE(…, '''source''', …)`; the source is the longest text among the arguments. With
    `cpp_wrapper` all kernels stand in one text of C++."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and WRAPPED in node.value:
            yield from (GeneratedKernel(found[1], "cpp", found[0]) for found in IN_CPP.finditer(node.value))
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        called, target = dotted(node.value.func), node.targets[0]
        texts = [a.value for a in node.value.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if called.startswith("async_compile.") and texts and isinstance(target, ast.Name):
            language = called.removeprefix("async_compile.").removesuffix("_pybinding")
            yield GeneratedKernel(target.id, language, max(texts, key=len))


def read_source(code: str) -> Iterator[GeneratedKernel]:
    return read_kernels(ast.parse(code))


def read_calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name.startswith(("torch.ops.", "extern_kernels.", "aten.")):
                yield name


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def kernel_stage(
    seen: SeenKernels,
    choices: SeenChoices,
    trace: TraceCollector,
    last: Sequence[StageGraph],
    device: str,
    measured: Mapping[tuple[str, str], Any],
) -> KernelStage:
    """last: the graphs that code was generated for. measured: by graph and name, a `MeasuredKernel`."""
    found: list[KernelRecord] = []
    for row in trace.of("inductor_output_code"):
        if all(one.graph != row.graph for one in found):
            found += kernels_of(row.graph, row.payload, launches_of(seen, row.graph), last)
    resources = NO_GPU.format(device=device) if not device.startswith("cuda") else ""
    code = {row.graph: row.payload for row in trace.of("inductor_output_code")}
    kernels = tuple(with_time(one, measured.get((one.graph, one.name)), bool(measured)) for one in found)
    configs = configs_of(choices, kernels)
    return KernelStage(
        kernels=kernels, choices=tuple(choices.timed), configs=configs, single=single_choices(choices),
        autotuning=why_no_choices(choices, configs, device), resources=resources, code=code,
    )  # fmt: skip


def with_time(kernel: KernelRecord, found: Any, others: bool) -> KernelRecord:
    """others: whether kernels were timed at all."""
    if found is None:
        return replace(kernel, not_timed=kernel.not_timed or NOT_LAUNCHED) if others else kernel
    return replace(
        kernel, us=found.us, us_range=found.us_range, shapes=found.shapes, not_timed=found.problem,
        arguments=found.arguments,
        registers=found.registers, spills=found.spills, shared=found.shared,
        tile=", ".join(filter(None, (template_tile(kernel.source), found.tile))),
    )  # fmt: skip


def template_tile(source: str) -> str:
    """`BLOCK_M 64, BLOCK_N 32, BLOCK_K 128` of a matmul from a template, in whose source they are constants."""
    found = dict(TEMPLATE_TILE.findall(source))
    return ", ".join(f"{name} {found[name]}" for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if name in found)


def launches_of(seen: SeenKernels, graph: str) -> dict[str, list[tuple[str, ...]]]:
    """By kernel the nodes that each launch of it computes."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for number, name, nodes in seen.launches:
        if number == graph:
            found.setdefault(name, []).append(nodes)
    return found


def kernels_of(
    graph: str, code: str, launches: Mapping[str, Sequence[tuple[str, ...]]], last: Sequence[StageGraph]
) -> list[KernelRecord]:
    lines = {node.name: node.line for one in last if one.graph == graph for node in one.nodes}
    tree = ast.parse(code)
    written = {kernel.name: kernel for kernel in read_kernels(tree)}
    called = list(read_calls(tree))
    found = []
    for name in dict.fromkeys([*written, *launches, *called]):
        by_launch = launches.get(name, ())
        nodes = dict.fromkeys(node for one in by_launch for node in one)
        kernel = written.get(name)
        language = kernel.language if kernel else "extern" if name.startswith("extern_kernels.") else "op"
        where = tuple(dict.fromkeys(line for node in nodes if (line := lines.get(node))))
        count = len(by_launch) or called.count(name) or 1
        source = kernel.source if kernel else ""
        untimed = IN_WRAPPER if WRAPPED in code else ""
        apart = tuple(by_launch) if len(by_launch) > 1 else ()
        found.append(
            KernelRecord(
                graph, name, language, count, tuple(nodes), where, source, not_timed=untimed, by_launch=apart
            )
        )
    return found


def kernel_by_node(stage: KernelStage) -> dict[tuple[str, str], str]:
    """A node that is read by a call beside the kernels belongs to the kernel that computes it."""
    ordered = sorted(stage.kernels, key=lambda kernel: bool(kernel.source))
    return {(kernel.graph, node): kernel.name for kernel in ordered for node in kernel.nodes}
