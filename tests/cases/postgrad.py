"""Programs through AOTAutograd and Inductor's FX passes, without code generation; the final graphs are executed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import view_to_reshape
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graft.ir.nodes import is_op
from graft.memory.inductor_fix.functionalization import fix_functionalization, record_memory
from graft.memory.inductor_fix.report import FunctionalizationReport
from graft.memory.inductor_fix.work import INPLACEABLE

aten = torch.ops.aten
DECOMPOSITIONS = select_decomp_table()


@dataclass
class Compiled:
    """A program after all FX passes, once as Inductor does it and once with the fix."""

    run: Callable  # picks the graph by `which`
    which: str = "fixed"
    graphs: dict[str, torch.fx.GraphModule] = field(default_factory=dict)
    report: FunctionalizationReport = field(default_factory=FunctionalizationReport)

    def __call__(self, which: str, *args: torch.Tensor) -> object:
        self.which = which
        with torch.no_grad():
            return self.run(*args)


def compile_passes(
    fn: Callable, args: tuple, kinds: tuple[str, ...] = ("stock", "fixed"), *, v2: bool = True, dynamic: bool = False
) -> Compiled:
    """AOTAutograd once, then Inductor's passes for each kind on a copy of its graph."""
    compiled = Compiled(lambda *_: None)

    def passes(gm: torch.fx.GraphModule, kind: str) -> None:
        def fix(graph: torch.fx.Graph) -> None:
            compiled.report = fix_functionalization(graph)
            graph.lint()

        with config.patch(post_grad_custom_post_pass=fix if kind == "fixed" else None):
            post_grad_passes(gm, True)

    def compiler(gm: torch.fx.GraphModule, examples: list) -> Callable:
        with V.set_fake_mode(detect_fake_mode(examples)):
            with config.patch(joint_custom_pre_pass=record_memory):
                joint_graph_passes(gm)
            view_to_reshape(gm)
            for kind in kinds:
                compiled.graphs[kind] = copy.deepcopy(gm) if kind != kinds[-1] else gm
                passes(compiled.graphs[kind], kind)
        return make_boxed_func(lambda *inputs: compiled.graphs[compiled.which](*inputs))

    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    v1 = contextlib.nullcontext() if v2 else config.patch(enable_auto_functionalized_v2=False)
    with torch.no_grad(), tracing(TracingContext(mode)), v1:
        compiled.run = aot_function(
            fn,
            fw_compiler=compiler,
            inference_compiler=compiler,
            decompositions=DECOMPOSITIONS,
            keep_inference_input_mutations=True,
        )
        compiled.which = kinds[-1]
        compiled.run(*copy.deepcopy(args))
    return compiled


def copies(gm: torch.fx.GraphModule) -> int:
    """Calls that copy a whole value: clones, writes out of place, write-backs of inputs."""
    targets = (aten.clone.default, *INPLACEABLE)
    count = 0
    for node in gm.graph.nodes:
        count += is_op(node, *targets)
        count += (
            is_op(node, aten.copy_.default) and node.args[0].op == "placeholder" and node.args[0] is not node.args[1]
        )
    return count
