"""Candidates around GEMMs: a piece together with the GEMM that it reads or feeds, and GEMMs that read one input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from operator import getitem

import torch
from torch.fx import GraphModule, Node

from graft.ir.nodes import is_op, is_weight, options_of, tensor_val
from graft.passes.base import Context, Stage, TransformConfig
from graft.passes.elementwise import is_pointwise
from graft.passes.library.merge.named import layer_name
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter
from graft.workbench.discover.calls import is_attention, is_free, is_matmul
from graft.workbench.discover.grouping import structure
from graft.workbench.discover.regions import CandidateRegion

aten, ops = torch.ops.aten, torch.ops.graft
GROWN = ("norm_chain", "elementwise_chain", "gemm_epilogue", "gemm_prologue")
MERGES = "merge_gemms"


def with_gemms(pieces: Sequence[CandidateRegion], order: dict[Node, int], taken: set[Node]) -> list[CandidateRegion]:
    """Each of these pieces with the GEMM beside it, where it is a part of its tiles. taken: GEMMs that have a piece
    already; those that are found are added."""
    found = []
    for piece in pieces:
        read = read_gemm(piece, order)
        gemm = read or fed_gemm(piece)
        if gemm is None or gemm in taken:
            continue
        taken.add(gemm)
        nodes = tuple(sorted((*piece.nodes, gemm), key=order.__getitem__))
        found.append(CandidateRegion("gemm_epilogue" if read else "gemm_prologue", nodes))
    return found


def read_gemm(piece: CandidateRegion, order: dict[Node, int]) -> Node | None:
    """The last GEMM whose result this piece alone reads, number by number: the piece is then its epilogue."""
    if not grows(piece) or not all(is_pointwise(node) for node in piece.nodes):
        return None
    inside = set(piece.nodes)
    read = [node for node in piece.inputs() if is_linear(node) and set(node.users) <= inside]
    return max(read, key=order.__getitem__, default=None)


def fed_gemm(piece: CandidateRegion) -> Node | None:
    """The one GEMM that reads what this piece gives, and that nobody else reads: the piece makes its rows."""
    outputs = piece.outputs()
    if not grows(piece) or len(outputs) != 1 or is_op(outputs[0], getitem):
        return None
    users = list(outputs[0].users)
    once = len(users) == 1 and users[0].args[0] is outputs[0] and users[0].all_input_nodes.count(outputs[0]) == 1
    return users[0] if once and is_linear(users[0]) else None


def grows(piece: CandidateRegion) -> bool:
    """No GEMM and no attention is in it yet, and no walk of the library takes it."""
    working = [node for node in piece.nodes if not is_free(node)]
    plain = not any(is_matmul(node) or is_attention(node) for node in working)
    return piece.walk is None and piece.kind in GROWN and plain and len(piece.outputs()) == 1


def is_linear(node: Node) -> bool:
    """A linear layer whose weight is a matrix of floats."""
    if not is_op(node, aten.linear.default, ops.linear.default, ops.fused_linear.default):
        return False
    options = options_of(node)
    value = tensor_val(options["weight"])
    matrix = is_weight(options["weight"]) and value is not None and value.dim() == 2
    return matrix and options.get("scale") is None and options.get("activation", "none") == "none"


# ── GEMMs side by side ──────────────────────────────────────────────────────────────────────────────────────────


def mergeable(gm: GraphModule) -> list[tuple[str, ...]]:
    """The weights of linear layers that `merge_gemms` could make one, of a graph as it was captured: later transforms
    take the norm before them or the sum behind them into some."""
    transform = TransformRegistry.get(MERGES)(TransformConfig(Stage.FUSE))
    assert isinstance(transform, Rewriter)
    run = transform.start(gm, Context())
    return [tuple(str(node.args[1].target) for node in match.nodes) for match in transform.matches(run)]  # pyrefly: ignore


def horizontal(gm: GraphModule, together: Iterable[tuple[str, ...]]) -> dict[str, list[CandidateRegion]]:
    """Those of these layers that are GEMMs of their own in `gm` and read one input, by their structure and names."""
    of_weight: dict[str, Node] = {}
    for node in gm.graph.nodes:
        if is_linear(node):
            of_weight[str(options_of(node)["weight"].target)] = node
    groups: dict[str, list[CandidateRegion]] = {}
    for weights in together:
        nodes = tuple(of_weight[weight] for weight in weights if weight in of_weight)
        piece = CandidateRegion("horizontal_gemm", nodes)
        layers = layer_names(piece)
        named = all(layers) and len(set(layers)) == len(weights)
        if named and len({node.args[0] for node in nodes}) == 1:
            key = f"{structure(piece)}\n{' '.join(layers)}"
            groups.setdefault(blake2b(key.encode(), digest_size=4).hexdigest(), []).append(piece)
    return groups


def layer_names(piece: CandidateRegion) -> tuple[str, ...]:
    """What the modules of its layers are called: q_proj, k_proj, v_proj."""
    return tuple(map(layer_name, piece.nodes))
