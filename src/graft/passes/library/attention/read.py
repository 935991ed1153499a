"""A whole attention from its anchor, a softmax or scaled_dot_product_attention, or the reason why it is none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch
from torch.fx import GraphModule, Node

from graft.ir.effects import storage_root, writers
from graft.ir.nodes import is_op, options_of, same_sizes, static_int, tensor_of, tensor_val, where
from graft.ir.patterns.match import Refused, refuse_readers
from graft.passes.library.attention.matmuls import scores_matmul, values_matmul
from graft.passes.library.attention.operands import Operand, lifted, unrepeated, unscaled
from graft.passes.library.attention.parts import Attention, MaskTerm, ScoreChain
from graft.passes.library.attention.walk import read_scores, weights_path

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_softmax(gm: GraphModule, softmax: Node, out: Node, mutated: Collection[Node]) -> Attention:
    """The attention around a softmax whose weights feed `out`."""
    if softmax.args[1] != -1:
        raise Refused(softmax, f"softmax runs over dim {softmax.args[1]}, not over the keys")
    path = weights_path(softmax, out)
    walk, matmul = read_scores(gm, softmax, path)
    scores, values = scores_matmul(matmul), values_matmul(out)
    if values is None or scores is None:
        raise Refused(out, f"{where(out)} is not the matmul of weights and values")
    found = Attention(
        *(softmax, out, tuple(walk.inner), scores.q, scores.k, values.v, values.order, walk.scale),
        *(tuple(walk.pieces), walk.softcap, walk.sinks),
    )
    check_dtypes(found)
    check_casts(path, tensor_of(out).dtype)
    check_sink_dtypes(walk, found)
    check_readers(found)
    readers = [(scores.q.node, matmul), (scores.k.node, matmul), *((p.node, p.at) for p in found.pieces)]
    if walk.sinks is not None and walk.sinks_at is not None:
        readers.append((walk.sinks, walk.sinks_at))
    check_writes(found, readers, mutated)
    return in_op_terms(gm, found, mutated)


def read_sdpa(gm: GraphModule, node: Node, mutated: Collection[Node]) -> Attention:
    """torch's scaled_dot_product_attention. Its `is_causal` counts from the first key, the op's from the last."""
    given = options_of(node)
    q, k, v = (Operand.of(given[name]) for name in ("query", "key", "value"))
    if given["dropout_p"]:
        raise Refused(node, f"training-mode dropout (p={given['dropout_p']}); call eval() before capture")
    head, scale = static_int(q.shape[-1]), given["scale"]
    scale = head**-0.5 if scale is None and head else scale
    if not isinstance(scale, (int, float)):
        raise Refused(node, "its scale is not a number")
    causal = given["is_causal"]
    if causal and not same_sizes(q.shape[-2:-1], k.shape[-2:-1]):
        raise Refused(
            node,
            f"is_causal counts from the first key here and from the last in the op, and {q.shape[-2]} queries meet"
            f" {k.shape[-2]} keys",
        )
    pieces = (MaskTerm(given["attn_mask"], node),) if given["attn_mask"] is not None else ()
    order = tuple(range(len(q.shape)))
    found = Attention(
        *(node, node, (), q, k, v, order, float(scale), pieces), is_causal=bool(causal), softmax_rows=False
    )
    check_dtypes(found)
    return in_op_terms(gm, found, mutated)


# ── what must hold ──────────────────────────────────────────────────────────────────────────────────────────────


def check_dtypes(found: Attention) -> None:
    """The op rounds where its reference does: scores in the inputs' dtype, softmax in float32."""
    dtypes = {tensor_of(n).dtype for n in (found.q.node, found.k.node, found.v.node, found.out)}
    if len(dtypes) > 1:
        raise Refused(
            found.anchor, f"queries, keys and values differ in dtype: {', '.join(sorted(str(d) for d in dtypes))}"
        )
    if not dtypes <= set(DTYPES):
        raise Refused(found.anchor, f"the op's softmax is float32, the scores are {dtypes.pop()}")
    if tensor_of(found.anchor).dtype not in (torch.float32, *dtypes):
        raise Refused(found.anchor, f"softmax runs in {tensor_of(found.anchor).dtype}")


def check_casts(path: Collection[Node], dtype: torch.dtype) -> None:
    """The weights are rounded to the inputs' dtype and to no other."""
    for node in path:
        if is_op(node, aten.to.dtype) and tensor_of(node).dtype not in (dtype, torch.float32):
            raise Refused(
                node, f"the weights become {tensor_of(node).dtype} at {where(node)}; the op keeps them {dtype}"
            )


def check_sink_dtypes(walk: ScoreChain, found: Attention) -> None:
    dtype, softmax = tensor_of(found.out).dtype, found.anchor
    if walk.sinks is None or dtype == torch.float32:
        return
    if not walk.shifted or {tensor_of(softmax).dtype, tensor_of(softmax.args[0]).dtype} != {dtype}:
        raise Refused(
            softmax,
            f"with sinks the op takes the row's maximum away, then softmax, both in {dtype}; here it is otherwise",
        )


def check_readers(found: Attention) -> None:
    refuse_readers((*found.inner, found.out), (found.out,))


def check_writes(found: Attention, readers: Collection[tuple[Node, Node]], mutated: Collection[Node]) -> None:
    """The op reads everything where the result stands: nobody may write to an input after it was read."""
    inside = set(found.inner)
    for source, reader in readers:
        root = storage_root(source)
        for writer in writers(root) if root in mutated else ():
            if reader < writer < found.out and writer not in inside:
                raise Refused(writer, f"{where(writer)} writes to {where(source)} before attention is done")


# ── the op's terms ──────────────────────────────────────────────────────────────────────────────────────────────


def in_op_terms(gm: GraphModule, found: Attention, mutated: Collection[Node]) -> Attention:
    """Four dims, the whole scale as one number, keys and values with as many heads as they have."""
    scale = found.scale
    for below in (False, True):  # first what hides a fold of the heads, then what lies under it
        peel = partial(unscaled, gm, below=below)
        q, q_scale = peeled(found.q, mutated, peel)
        k, k_scale = peeled(found.k, mutated, peel)
        scale *= q_scale * k_scale
        found = four_dims(replace(found, q=q, k=k))
    fewer_k, more_scale = peeled(found.k, mutated, lambda operand: unscaled(gm, unrepeated(operand), below=True))
    fewer_v, _ = peeled(found.v, mutated, lambda operand: (unrepeated(operand), 1.0))
    if same_sizes(fewer_k.shape[1:2], fewer_v.shape[1:2]):
        found = replace(found, k=fewer_k, v=fewer_v)
        scale *= more_scale
    found = replace(found, scale=scale)
    check_shapes(found)
    return found


def peeled(
    operand: Operand, mutated: Collection[Node], peel: Callable[[Operand], tuple[Operand, float]]
) -> tuple[Operand, float]:
    """`peel(operand)`, or the operand itself where someone writes to what would be read instead."""
    result, factor = peel(operand)
    written = mutated and {storage_root(operand.node), storage_root(result.node)} & set(mutated)
    return (operand, 1.0) if written else (result, factor)


def four_dims(found: Attention) -> Attention:
    """Operands as [b, h, s, d]: unfolded from [b * h, s, d] where the graph folded them, else with one head."""
    ranks = {len(operand.shape) for operand in (found.q, found.k, found.v)}
    if ranks == {4}:
        return found  # as it is, or unfolded before
    if ranks != {3}:
        raise Refused(
            found.anchor,
            f"queries, keys and values have {sorted(ranks)} dims; the op takes [b, h, s, d] or [b, s, d]",
        )
    q, k, v = (lifted(operand) for operand in (found.q, found.k, found.v))
    folds = is_op(found.q.node, aten.reshape.default) and len(found.q.node.args[1]) == 3 and not found.q.steps
    if q is None or k is None or v is None or not folds or not same_sizes((k.shape[0], v.shape[0]), [q.shape[0]] * 2):
        if any(tensor_of(node).dim() == 4 for node in found.inner):
            raise Refused(
                found.anchor, "the scores have heads, but the heads of q, k and v cannot be told from the batch"
            )
        q, k, v = (operand.with_heads() for operand in (found.q, found.k, found.v))
        return replace(found, q=q, k=k, v=v, folded=())
    batch, queries, _ = found.q.node.args[1]
    return replace(found, q=q, k=k, v=v, folded=(batch, queries, found.v.shape[-1]))


def check_shapes(found: Attention) -> None:
    b, h, s, d = found.q.shape
    kv, t = found.k.shape[1:3]
    if 0 in (static_int(s), static_int(t)):
        raise Refused(found.anchor, f"{s} queries meet {t} keys: there is nothing to attend to")
    if not same_sizes(found.k.shape, (b, kv, t, d)) or not same_sizes(found.v.shape[:3], (b, kv, t)):
        raise Refused(
            found.anchor,
            f"queries {text(found.q)}, keys {text(found.k)} and values {text(found.v)} do not fit the op",
        )
    if static_int(h) is None or static_int(kv) is None or h % kv:
        raise Refused(found.anchor, f"{h} heads cannot share {kv} heads of keys and values")
    result = (b, h, s, found.v.shape[-1])
    given = tensor_of(found.out).shape
    if len(given) == 4 and not same_sizes(given, [result[i] for i in found.order]):
        raise Refused(
            found.out, f"{where(found.out)} gives {list(given)}, attention over these inputs gives {list(result)}"
        )
    for node in found.inner:
        tensor = tensor_val(node)
        rank = tensor.dim() if tensor is not None else 3
        if rank not in (3, 4) or (tensor is not None and rank == 4 and not same_sizes(tensor.shape[:2], (b, h))):
            raise Refused(node, f"{where(node)} lays batch and heads out in another way than [b, h, s, t]")


def text(operand: Operand) -> str:
    return f"[{', '.join(str(size) for size in operand.shape)}]"
