"""The table of elementwise ops: which ATen calls each is, and how it is written in Triton and in C++.

`triton`: an expression of float32 values; `name(…)` without `tl.` is a function of ops/triton_math.py. `cpp`: the
same of floats, for the native backend, or None where that leaves the call to torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graft.ir.nodes import options_of

aten = torch.ops.aten
# What an op takes: t a tensor, s a tensor or a number, n a number, d a dtype.
KINDS = {"t": "a tensor", "s": "a tensor or a number", "n": "a number", "d": "a dtype"}


@dataclass(frozen=True)
class Pointwise:
    name: str
    takes: str
    aten: tuple[Any, ...]  # calls that are this op, their arguments in its order
    triton: str
    cpp: str | None = None

    @property
    def helper(self) -> bool:
        """Whether the expression is a call of ops/triton_math.py."""
        return self.triton.startswith(f"{self.name}(")


ROWS = (
    Pointwise("add", "ts", (aten.add.Tensor, aten.add.Scalar), "{0} + {1}", "({0} + {1})"),
    Pointwise("sub", "ts", (aten.sub.Tensor, aten.sub.Scalar), "{0} - {1}", "({0} - {1})"),
    Pointwise("rsub", "tn", (aten.rsub.Scalar,), "{1} - {0}"),
    Pointwise("mul", "ts", (aten.mul.Tensor, aten.mul.Scalar), "{0} * {1}", "({0} * {1})"),
    Pointwise("div", "ts", (aten.div.Tensor, aten.div.Scalar), "{0} / {1}", "({0} / {1})"),
    Pointwise("neg", "t", (aten.neg.default,), "-{0}", "(-{0})"),
    Pointwise("abs", "t", (aten.abs.default,), "tl.abs({0})", "std::fabs({0})"),
    Pointwise("exp", "t", (aten.exp.default,), "tl.exp({0})", "plain_exp({0})"),
    Pointwise("log", "t", (aten.log.default,), "tl.log({0})"),
    Pointwise("sqrt", "t", (aten.sqrt.default,), "tl.sqrt({0})", "std::sqrt({0})"),
    Pointwise("rsqrt", "t", (aten.rsqrt.default,), "tl.rsqrt({0})", "(1.0f / std::sqrt({0}))"),
    Pointwise("reciprocal", "t", (aten.reciprocal.default,), "1.0 / {0}"),
    Pointwise("sin", "t", (aten.sin.default,), "tl.sin({0})"),
    Pointwise("cos", "t", (aten.cos.default,), "tl.cos({0})"),
    Pointwise("erf", "t", (aten.erf.default,), "tl.erf({0})", "std::erf({0})"),
    Pointwise("relu", "t", (aten.relu.default,), "relu({0})", "relu({0})"),
    Pointwise("tanh", "t", (aten.tanh.default,), "tanh({0})", "plain_tanh({0})"),
    Pointwise("sigmoid", "t", (aten.sigmoid.default,), "sigmoid({0})", "(1.0f / (1.0f + plain_exp(-{0})))"),
    Pointwise("silu", "t", (aten.silu.default,), "silu({0})", "activate(Act::silu, {0})"),
    Pointwise("gelu", "t", (aten.gelu.default,), "gelu({0})", "activate(Act::gelu, {0})"),
    Pointwise("gelu_tanh", "t", (), "gelu_tanh({0})", "activate(Act::gelu_tanh, {0})"),
    Pointwise("softplus", "t", (aten.softplus.default,), "softplus({0})"),
    Pointwise("minimum", "tt", (aten.minimum.default,), "minimum({0}, {1})"),
    Pointwise("maximum", "tt", (aten.maximum.default,), "maximum({0}, {1})"),
    Pointwise("clamp", "tnn", (), "clamp({0}, {1}, {2})"),
    Pointwise("to", "td", (), "{0}"),
)
TABLE = {row.name: row for row in ROWS}
# elementwise calls that are neither in the table nor tagged so by torch
UNTAGGED = frozenset({aten.where.ScalarSelf, aten.where.ScalarOther, aten.__and__.Tensor, aten.__or__.Tensor})
BY_CALL = {call: row for row in ROWS for call in row.aten}


def pointwise_of(node: Node) -> Pointwise | None:
    """The op that a call is, its arguments taken as they are; None where it is none, or has options of its own."""
    row = BY_CALL.get(node.target)
    if row is None:
        return None
    if row.name == "gelu":
        return TABLE["gelu_tanh" if options_of(node)["approximate"] == "tanh" else "gelu"]
    return None if node.kwargs or len(node.args) > len(row.takes) else row
