"""Graphs of one op for the native backend, compiled together: a compiler run takes seconds, a kernel microseconds."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product, zip_longest
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from graft.backends.native.build import load
from graft.backends.native.call import Arena, RegionCall, Threads
from graft.backends.native.compiler import COMPILERS
from graft.backends.native.emit import emit
from graft.backends.native.program import Program, Text
from graft.backends.native.regions import NativeRegion, split
from graft.backends.native.weights import in_form
from graft.ops import OPS
from graft.ops.cases import tolerance
from marks import FULL

HAS_COMPILER = any(shutil.which(name) for name in COMPILERS)
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason=f"no C++ compiler: none of {', '.join(COMPILERS)}")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Built:
    """One op's call: `run` gives the results of the native kernel, `args` are its arguments in graph order."""

    run: RegionCall
    gm: GraphModule
    inputs: list[Tensor]


class Symbols:
    """Fake tensors whose batch, tokens, sequences and block counts are symbols, as in a captured decoder."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        sizes = torch.empty(3, 5, 7, 11, 13)
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * sizes.dim())
        shape = self.mode.from_tensor(sizes, symbolic_context=context).shape
        self.batch, self.tokens, self.sequences, self.table, self.blocks = shape

    def fake(self, shape: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        with self.mode:
            return torch.empty(shape, dtype=dtype)


def rows_shape(s: Symbols, tensor: Tensor) -> tuple[Any, ...]:
    """[1, T, w], [1, h, T, d] (by default) or [T, w] with symbols for batch and tokens."""
    if tensor.dim() == 2:
        return (s.batch * s.tokens, tensor.shape[1])
    if tensor.dim() == 3:
        return (s.batch, s.tokens, tensor.shape[2])
    return (s.batch, tensor.shape[1], s.tokens, tensor.shape[3])


LAYOUT: dict[str, Callable[[Symbols], tuple[Any, ...]]] = {
    "indices": lambda s: (s.batch, s.tokens),
    "slot_mapping": lambda s: (s.tokens,),
    "token_to_seq": lambda s: (s.tokens,),
    "block_tables": lambda s: (s.sequences, s.table),
    "cu_seqlens": lambda s: (s.sequences + 1,),
    "seq_lens": lambda s: (s.sequences,),
    "lens_cpu": lambda s: (s.sequences, 2),
}


def graph_of(
    op: Any, args: tuple[Any, ...], weights: frozenset[str], heads_last: frozenset[str] = frozenset()
) -> Built:
    """A graph that calls `op` once. `weights` are attributes; other floats are rows of tokens, or caches."""
    s, graph, root, inputs = Symbols(), Graph(), torch.nn.Module(), [torch.zeros(1, 1)]
    ids = graph.placeholder("input_ids")
    ids.meta["val"] = s.fake((s.batch, s.tokens), torch.int64)
    given, fakes = [], []
    for argument, value in zip(op._schema.arguments, args, strict=False):
        node, fake = value, value
        if isinstance(value, Tensor):
            name = argument.name
            if name in weights:
                root.register_buffer(name, value)
                node, shape = graph.get_attr(name), value.shape
            else:
                node = graph.placeholder(name)
                inputs.append(value)
                shape = shape_of(s, name, value, heads_last)
            fake = s.fake(tuple(shape), value.dtype)
            node.meta["val"] = fake
        given.append(node)
        fakes.append(fake)
    call = graph.call_function(op, tuple(given))
    with s.mode:
        call.meta["val"] = op(*fakes)
    results = [call]
    if isinstance(call.meta["val"], tuple):
        results = [graph.call_function(getitem, (call, i)) for i in range(len(call.meta["val"]))]
        for index, node in enumerate(results):
            node.meta["val"] = call.meta["val"][index]
    graph.output((tuple(results),))
    return Built(None, GraphModule(root, graph), inputs)  # pyrefly: ignore


def shape_of(s: Symbols, name: str, value: Tensor, heads_last: frozenset[str]) -> tuple[Any, ...]:
    if name in LAYOUT:
        return LAYOUT[name](s)
    if name.endswith("_cache"):
        return (s.blocks, *value.shape[1:])
    if name in heads_last:  # packed tokens have no batch
        return (*(s.batch, s.tokens)[4 - value.dim() :], *value.shape[-2:])
    return rows_shape(s, value)


def compile_all(
    graphs: list[Built], changes: list[Callable[[Program], Program] | None], right: int, threads: int = 2
) -> tuple[list[Built], list[Built]]:
    """All graphs in one library: the first `right` as they are, the rest as wrong variants."""
    found = [split(built.gm, {}) for built in graphs]
    assert not (reasons := [parts.reasons for parts in found if parts.reasons]), reasons
    regions = []
    for index, (parts, change) in enumerate(zip(found, changes, strict=True)):
        (region,) = parts.regions
        program = change(region.program) if change else region.program
        regions.append(replace(region, program=replace(program, name=f"case_{index}")))
    library, _ = load(emit([region.program for region in regions], "Kernels under test."))
    team, arena = Threads(library, threads), Arena()

    def made(built: Built, region: NativeRegion) -> Built:
        own = [in_form(w, getattr(built.gm, w.target).detach()) for w in region.program.weights]
        run = RegionCall(region.program, library, team, own, arena)
        order = [node.name for node in built.gm.graph.nodes if node.op == "placeholder"]
        return Built(run, built.gm, [built.inputs[order.index(node.name)] for node in region.inputs])

    done = [made(built, region) for built, region in zip(graphs, regions, strict=True)]
    return done[:right], done[right:]


def one_sequence(tokens: Tensor) -> list[Tensor]:
    """The graph's inputs for one prompt in the first blocks of the cache (engine/batch.py)."""
    n, places = len(tokens), torch.arange(len(tokens))
    return [
        tokens[None], places[None], places[-1:], places, places * 0, torch.arange(-(-n // 16))[None],
        torch.tensor([0, n]), torch.tensor([n]), torch.tensor([[n, n]]),
    ]  # fmt: skip


def poisoned(shape: Any, dtype: torch.dtype) -> Tensor:
    """NaN where floats are, so that what a kernel does not write shows."""
    return torch.full(list(shape), float("nan") if dtype.is_floating_point else -7, dtype=dtype)


def cases_of(op: str) -> list[Any]:
    return importlib.import_module(f"graft.ops.{op}.cases").CASES


def with_field(program: Program, kernel: str, name: str, change: Callable[[Any], Any]) -> Program:
    """A wrong variant: one argument of one kernel is another."""
    steps = []
    for step in program.steps:
        fields = step.fields
        if step.kernel.name.startswith(kernel):
            fields = tuple((key, change(value) if key == name else value) for key, value in fields)
        steps.append(replace(step, fields=fields))
    return replace(program, steps=tuple(steps))


# ── every op's cases ────────────────────────────────────────────────────────────────────────────────────────────

ops = torch.ops.graft
NORMS = frozenset({"weight", "bias", "norm", "q_norm", "k_norm", "sinks"})
WEIGHTS = {
    "linear": frozenset({"w", "b"}),
    "fused_linear": frozenset({"weight", "bias", "norm"}),
    "moe_experts": frozenset({"gate_up", "down"}),
    "packed_embedding": frozenset({"weight", "scale"}),
    "paged_latent_attention": frozenset({"weight"}),
}
# kernel, field and how it is changed: what must then fail
WRONG = {
    "rms_norm": ("rms_norm", "eps", lambda eps: eps + 0.1),
    "add_rms_norm": ("add_rms_norm", "offset", lambda offset: offset + 0.1),
    "layer_norm": ("layer_norm", "eps", lambda eps: eps + 0.1),
    "rope": ("rope", "rotation.interleaved", lambda pairs: not pairs),
    "rope_kv_write": ("kv_write", "rotation.rotates", lambda _: False),
    "cached_attention": ("attention", "scale", lambda scale: scale * 1.1),
    "paged_attention": ("attention", "window", lambda window: window - 1 if window else 3),
    "rope_attention": ("attention", "rotation.rotates", lambda _: False),
    "paged_latent_attention": ("latent_attention", "scale", lambda scale: scale * 1.1),
    "swiglu": ("swiglu", "act", lambda act: Text("Act::silu" if act.text == "Act::gelu" else "Act::gelu")),
    "linear": ("linear", "k", lambda k: k - 1),
    "fused_linear": ("linear", "k", lambda k: k - 1),
    "moe_route": ("moe_route", "top_k", lambda k: k - 1 if k > 1 else 2),
    "moe_experts": ("experts_up", "act", lambda _: Text("Act::none")),
    "packed_embedding": ("packed_embedding", "columns", lambda columns: columns - 32),
}
# op → case → why it stays eager: all other cases must be lowered
REFUSED = {
    "fused_linear": dict.fromkeys(
        (
            "stablelm gate-up, LayerNorm",
            "starcoder2 up, LayerNorm, bias, no gate",
            "cohere qkv, LayerNorm without bias, 3 tokens",
            "minitron up, LayerNorm, 18 tokens",
        ),
        "its norm is a LayerNorm",
    ),
    "moe_route": {
        "llama-4, sigmoid of one": "experts are chosen first and weighed by sigmoid",
    },
    "moe_experts": {
        "gpt-oss/40": "experts with gate_up_bias, down_bias, interleaved",
        "llama-4/80": "experts with weigh_input",
        "llama-4/80 decode": "experts with weigh_input",
    },
}
CACHES = ("k_cache", "v_cache", "latent_cache")


def packed(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Batches laid side by side as rows of one: [b, s, w] → [1, b·s, w], [b, h, s, d] → [1, h, b·s, d]."""
    if op in ("rope_kv_write", "cached_attention", "paged_attention", "rope_attention", "moe_route", "moe_experts",
              "packed_embedding", "paged_latent_attention"):  # fmt: skip
        return args
    names = [argument.name for argument in getattr(ops, op).default._schema.arguments]
    weights = WEIGHTS.get(op, NORMS)

    def one(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or name in weights:
            return value
        if is_heads_last(op, args):
            return value.flatten(0, 1)[None] if value.dim() == 4 else value
        if value.dim() < 4:
            return value.reshape(1, -1, value.shape[-1])
        return value.transpose(0, 1).flatten(1, 2)[None]

    return tuple(one(name, value) for name, value in zip(names, args, strict=False))


def is_heads_last(op: str, args: tuple[Any, ...]) -> bool:
    """Cosines are [b, s, 1, r] where x is [b, s, h, d], and [t, 1, r] where it is [t, h, d]."""
    return op == "rope" and args[1].shape[-2] == 1 != args[0].shape[-2]


@cache
def programs(op: str) -> list[tuple[torch.dtype, str, tuple[Any, ...], float, Built, Built | None]]:
    """Dtype, case, arguments, tolerance, right and wrong kernel: one compiler run an op."""
    found, graphs = [], []
    for dtype, (index, case) in product(DTYPES, enumerate(cases_of(op))):
        if index and dtype is not DTYPES[0] and not FULL:
            continue  # the short run has all cases in float32, and the first in the others
        args = case.make("cpu", dtype, torch.Generator().manual_seed(0))
        if (op == "fused_linear" and args[3] is not None) or (op == "moe_experts" and len(args) > 10):
            continue  # quantized for a GPU: they stay eager
        last = frozenset({"x", "cos", "sin"}) if is_heads_last(op, args) else frozenset()
        args = packed(op, args)
        graph = graph_of(getattr(ops, op).default, args, WEIGHTS.get(op, NORMS), last)
        if reason := REFUSED.get(op, {}).get(case.name):
            assert is_refused(graph, reason), f"{case.name}, {dtype}"
            continue
        found.append((dtype, case.name, args, tolerance(dtype, case.reduction)))
        graphs.append(graph)
    plain = sum(
        dtype is torch.float32 for dtype, *_ in found
    )  # wrong ones in float32 alone: each takes a while to compile
    right, wrong = compile_all(
        [*graphs, *graphs[:plain]], [*[None] * len(graphs), *[change_of(op)] * plain], len(graphs)
    )
    return [(*each, good, bad) for each, good, bad in zip_longest(found, right, wrong)]


def is_refused(built: Built, reason: str) -> bool:
    """Nothing of it is native, and the call says exactly why."""
    parts = split(built.gm, {})
    return not parts.regions and next(iter(parts.reasons.values())) == reason


def change_of(op: str) -> Callable[[Program], Program]:
    kernel, field, change = WRONG[op]
    return lambda program: with_field(program, kernel, field, change)


def wide(args: tuple[Any, ...]) -> list[Any]:
    return pytree.tree_map(
        lambda a: a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a, list(args)
    )


def results(op: str, built: Built, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """What a call gives, and what it wrote into the caches at the slots."""
    inputs = [tensor.clone() for tensor in built.inputs]
    outputs = list(built.run(*inputs))
    caches = [t for name, t in zip(built.run.program.inputs, inputs, strict=True) if name in CACHES]
    return [*outputs, *(written(op, cache, args) for cache in caches)]


def written(op: str, cache: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
    named = dict(zip([a.name for a in getattr(ops, op).default._schema.arguments], args, strict=False))
    rows = cache.view(-1, *cache.shape[2:])
    return rows[named["slot_mapping"]] if "slot_mapping" in named else rows[:0]


def expected(op: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    given = [torch.float64 if isinstance(value, torch.dtype) else value for value in wide(args)]
    made = OPS[op].reference(*given)
    named = dict(zip([a.name for a in getattr(ops, op).default._schema.arguments], given, strict=False))
    caches = [written(op, named[name], args) for name in CACHES if name in named]
    return [*(made if isinstance(made, tuple) else (made,)), *caches]


def far(left: list[torch.Tensor], right: list[torch.Tensor], bound: float) -> str:
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if a.shape != b.shape:
            return f"result {index} is {list(a.shape)}, not {list(b.shape)}"
        if not torch.allclose(a.double(), b.double(), rtol=bound, atol=bound):
            return f"result {index} is off by {(a.double() - b.double()).abs().max()}, allowed {bound}"
    return ""


def check_op(op: str) -> None:
    """The right kernels are near their references, and some case tells the wrong one."""
    caught = False
    for dtype, name, args, bound, good, bad in programs(op):
        wanted = expected(op, args)
        assert not (problem := far(results(op, good, args), wanted, bound)), f"{name}, {dtype}: {problem}"
        caught = caught or (bad is not None and bool(far(results(op, bad, args), wanted, bound)))
    assert caught, "no case tells the wrong kernel from the right one"
