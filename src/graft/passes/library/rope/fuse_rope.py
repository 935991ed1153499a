"""fuse_rope: the spelled-out rotary embedding becomes one op."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graft.ir.edit import Editor
from graft.ir.effects import storage_root
from graft.ir.nodes import calls, is_op, same_sizes, static_int, tensor_of, val, where
from graft.ir.patterns.match import Match, NearMiss, Refused
from graft.passes.base import Context
from graft.passes.library.rope.rotary import Rotation, find_rotation
from graft.passes.registry import TransformRegistry
from graft.passes.rewriter import Rewriter, RewriteRun

aten, ops = torch.ops.aten, torch.ops.graft


@TransformRegistry.register("fuse_rope")
class FuseRoPE(Rewriter):
    """The spelled-out rotary embedding becomes one op, for queries and keys each.

    before:  %a = mul(%x, %cos);  %hi = slice(%x, -1, d/2, d);  %n = neg(%hi);  %lo = slice(%x, -1, 0, d/2)
             %c = cat([%n, %lo], -1);  %b = mul(%c, %sin);  %y = add(%a, %b)
    after:   %y = graft.rope(%x, %cos, %sin)

    Halves or pairs rotate (Llama; GPT-J, GLM, Cohere), all of a head or its first r values. x is [b, h, s, d] or
    [b, s, h, d], or [t, h, d] where tokens are packed (vLLM); cos and sin are one angle a token, of r values or of
    r/2, in x's dtype or float32 with a cast back, also where x is cast first. The spellings are listed in
    rotary.py beside this. Where cos and sin have r/2 values or are one complex tensor, they are written out once for
    all layers.
    Numerics: bitwise with the reference, save the complex spelling, where ac - bd and ad + bc may be fused
    into one rounding: within float32 rounding. The Triton kernel rounds where eager does.

    A walk: halves or pairs, each spelled in many ways that may be mixed, and a result for all layers at once.
    """

    reads_decomposed = True  # its ops are left as they are

    find_first = True
    lacking = "nothing in the graph rotates parts of a head by cos and sin"

    def start(self, gm: GraphModule, context: Context) -> RopeRun:
        return RopeRun(gm, context, Editor(gm, self.name))

    def candidates(self, run: RopeRun) -> list[Node]:
        return list(calls(run.gm.graph))

    def find(self, run: RopeRun, node: Node) -> RotationMatch | None:
        rotation = find_rotation(node)
        if rotation is None:
            return None
        check_written(rotation, run.mutated)
        check_angles(rotation)
        stops = {rotation.x, rotation.cos, rotation.sin, rotation.origin, *(rotation.parts or ())}
        x, out = settle_dtype(rotation, inner_nodes(rotation.result, stops))
        spelling = f"{'interleaved' if rotation.interleaved else 'half'} {rotation.spelling}"
        longer = with_rest(rotation, x, out)
        if longer is not None:
            (x, out), stops, spelling = longer, {rotation.cos, rotation.sin, longer[0]}, f"{spelling}, partial"
        tensors = {"x": x, "cos": rotation.cos, "sin": rotation.sin}
        return RotationMatch(spelling, tensors, {}, tuple(inner_nodes(out, {*stops, x})), (out,), rotation)

    def write(self, run: RopeRun, match: RotationMatch) -> list[Node]:
        rotation, out, x = match.rotation, match.anchor, run.editor.current(match.tensors["x"])
        run.made, run.like = [], out
        cos, sin = (run.angle(rotation, x, which) for which in (0, 1))
        if rotation.sizes is not None:
            x = run.call(aten.reshape.default, (x, list(rotation.sizes)), out)
        if rotation.parts is not None:
            x = run.call(aten.cat.default, (list(rotation.parts), -1), out)
        rope = run.call(ops.rope.default, (x, cos, sin, True) if rotation.interleaved else (x, cos, sin), out)
        if rotation.heads is not None:
            rope = run.laid_out(rope, rotation.result, out)
        run.editor.replace(out, rope)
        return run.made

    def near_miss(self, run: RopeRun, node: Node, refused: Refused) -> NearMiss:
        return replace(super().near_miss(run, node, refused), matched=2 if is_rotation(node) else 1)


@dataclass(frozen=True)
class RotationMatch(Match):
    """`tensors["x"]` is what the op reads, the anchor what it stands in for."""

    rotation: Rotation


# ── what to do, decided before anything is changed ──────────────────────────────────────────────────────────────


def is_rotation(node: Node) -> bool:
    """Whether it is a rotation that the op could do, wherever it stands."""
    try:
        return find_rotation(node) is not None
    except Refused:
        return False


def check_written(rotation: Rotation, mutated: Collection[Node]) -> None:
    """The op reads cos and sin where they are made; a write to them in between would be lost."""
    angle = next((node for node in (rotation.cos, rotation.sin) if mutated and storage_root(node) in mutated), None)
    if angle is not None:
        raise Refused(angle, f"{where(angle)} is written in place")


def inner_nodes(result: Node, stops: Collection[Node | None]) -> list[Node]:
    """The calls between `stops` and `result`, which is the first of them; computed sizes do not count."""
    found: dict[Node, None] = {}
    waiting = [result]
    while waiting:
        node = waiting.pop()
        if node not in found and node not in stops and not isinstance(val(node), torch.SymInt):
            found[node] = None
            waiting += node.all_input_nodes
    return list(found)


def check_angles(rotation: Rotation) -> None:
    """Refused where cos and sin are not one angle a token and pair of values."""
    shape = rotation.heads or tensor_of(rotation.result).shape
    rank = len(shape)
    if rank not in (3, 4):
        raise Refused(
            rotation.result,
            f"x has {rank} dims; the op takes [b, h, s, d] or [b, s, h, d] with cos, sin [b, 1, s, r] or [b, s, 1, r]"
            ", and [t, h, d] with [t, 1, r]: reshape it to that, a single head to [t, 1, d]",
        )
    if rotation.sizes is None and rotation.parts is None and not same_sizes(tensor_of(rotation.x).shape, shape):
        raise Refused(rotation.result, f"cos or sin is larger than {where(rotation.x)}, which is broadcast")
    for angle in (rotation.cos, rotation.sin):
        sizes = [1] * (rank - tensor_of(angle).dim()) + list(tensor_of(angle).shape)
        if str(sizes[-3]) != "1" and str(sizes[-2]) != "1":
            raise Refused(rotation.result, "cos and sin differ between heads")
        if str(sizes[-1]) != str(shape[-1] // 2 if rotation.halved else shape[-1]):
            raise Refused(rotation.result, "cos or sin is broadcast over the head")
    if (table(rotation.cos), table(rotation.sin)) == ("sin", "cos"):
        raise Refused(rotation.result, f"cos and sin are swapped: {where(rotation.cos)} is a sine")


def table(angle: Any) -> str:
    """Whether a tensor was made by aten.cos or aten.sin, as far as first arguments tell; '' where they do not."""
    for _ in range(12):  # unsqueeze, slice, repeat, cast, scale…
        while isinstance(angle, (list, tuple)) and angle:
            angle = angle[0]
        if not isinstance(angle, Node) or angle.op != "call_function":
            return ""
        if is_op(angle, aten.cos.default, aten.sin.default):
            return "cos" if is_op(angle, aten.cos.default) else "sin"
        angle = angle.args[0] if angle.args else None
    return ""


def settle_dtype(rotation: Rotation, nodes: Sequence[Node]) -> tuple[Node, Node]:
    """What the op reads and replaces. It gives x's dtype: a cast back goes into it, or a cast of x stays out."""
    given, made = tensor_of(rotation.x).dtype, tensor_of(rotation.result).dtype
    odd = next((n for n in nodes if is_op(n, aten.mul.Tensor) and tensor_of(n).dtype != made), None)
    if odd is not None and rotation.spelling != "complex":
        raise Refused(odd, f"{where(odd)} is {tensor_of(odd).dtype}, what it is added to is {made}")
    if given == made:
        return rotation.x, rotation.result
    reader = next(iter(rotation.result.users), None)
    if len(rotation.result.users) == 1 and is_op(reader, aten.to.dtype) and tensor_of(reader).dtype == given:
        return rotation.x, reader
    readers = [user for user in rotation.x.users if user in nodes]
    if len(readers) == 1 and is_op(readers[0], aten.to.dtype) and tensor_of(readers[0]).dtype == made:
        return readers[0], rotation.result
    raise Refused(
        rotation.result, f"{where(rotation.result)} stays {made}, while x is {given}, which the op would give"
    )


def with_rest(rotation: Rotation, x: Node, out: Node) -> tuple[Node, Node] | None:
    """The whole head and the result with the values that pass through: `cat([out, head[..., r:]], -1)`."""
    reader = next(iter(out.users), None)
    if (
        reader is None
        or len(out.users) != 1
        or not is_op(reader, aten.cat.default)
        or not is_op(x, aten.slice.Tensor)
    ):
        return None
    if (
        rotation.sizes is not None
        or rotation.parts is not None
        or rotation.heads is not None
        or rotation.origin not in (None, x)
    ):
        return None
    head, pieces = x.args[0], reader.args[0]
    r, d = (static_int(tensor_of(node).shape[-1]) for node in (x, head))
    if len(pieces) != 2 or pieces[0] is not out or reader.args[1:] != (-1,) or x.args[1:] != (-1, 0, r):
        return None
    rest = is_op(pieces[1], aten.slice.Tensor) and pieces[1].args == (head, -1, r, d)
    return (head, reader) if rest else None


# ── doing it ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class RopeRun(RewriteRun):
    """What is derived from cos and sin is made once and shared by all layers."""

    derived: dict[str, Node] = field(default_factory=dict)
    made: list[Node] = field(default_factory=list)  # by the rotation that is being written
    like: Node | None = None

    def angle(self, rotation: Rotation, x: Node, which: int) -> Node:
        """cos or sin of r values, in a dtype that makes the op compute in that of the spelling."""
        angle = (rotation.cos, rotation.sin)[which]
        if rotation.spelling == "complex":
            angle = self.derive(aten.select.int, self.derive(aten.view_as_real.default, angle), -1, which)
        dtype = tensor_of(rotation.result).dtype
        if torch.promote_types(tensor_of(x).dtype, tensor_of(angle).dtype) != dtype:
            angle = self.derive(aten.to.dtype, angle, dtype)
        if not rotation.halved:
            return angle
        if rotation.interleaved:
            return self.derive(aten.repeat_interleave.self_int, angle, 2, -1)
        return self.derive(aten.cat.default, [angle, angle], -1)

    def laid_out(self, rope: Node, result: Node, before: Node) -> Node:
        """The heads as the graph had them: pairs, or what one reshape made of those."""
        if is_op(result, aten.stack.default, aten.view_as_real.default):
            return self.call(aten.unflatten.int, (rope, -1, [-1, 2]), before)
        return self.call(aten.reshape.default, (rope, result.args[1]), before)

    def derive(self, target: Any, source: Any, *args: Any) -> Node:
        """A call right below what it reads, so that every layer can read it."""
        key = f"{target}{source}{args}"
        if key not in self.derived:
            node = source[0] if isinstance(source, list) else source
            below = node.next
            while below.op in ("placeholder", "get_attr"):
                below = below.next
            self.derived[key] = self.call(target, (source, *args), below)
        return self.derived[key]

    def call(self, target: Any, args: tuple[Any, ...], before: Node) -> Node:
        node = self.editor.call(target, args, before=before, like=self.like or before)
        self.made.append(node)
        return node
