"""quantize_linear: the weights of linear layers, and of the experts of a mixture, in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.fx import GraphModule, Node

from graft.base.errors import UsageError
from graft.ir.nodes import is_op
from graft.ir.patterns.match import Match, Refused
from graft.ops.launch import FLOAT8_CAPABILITY
from graft.passes.base import Context, TransformConfig
from graft.passes.library.matvec.linears import device_of
from graft.passes.library.quantize.calls import (
    ADDMM,
    EXPERTS,
    LATENT,
    LATENT_STAYS,
    MM,
    Quantizing,
    check_call,
    linear_calls,
    norm_of,
    operands,
    others,
    parameters,
    put_linear,
    weight_match,
)
from graft.passes.library.quantize.packed import TiledWeights
from graft.passes.library.quantize.quantization import (
    How,
    Quantized,
    check_weight,
    pattern_fits,
    quantize_weight,
    release,
    totals,
)
from graft.passes.library.quantize.stacked_experts import check_router
from graft.passes.registry import TransformRegistry
from graft.passes.report import MatchRecord
from graft.passes.rewriter import Rewriter
from graft.weights.quantize import QUANTIZERS, Saving

OUTPUT_HEAD = "lm_head"
FP8_ROWS = 16  # torch's GEMM takes a multiple of it


@dataclass(frozen=True)
class QuantizeConfig(TransformConfig):
    """skip: globs for the names of parameters, or of any run of their parts, that stay as they are. head: the format
    of the output head, `none` to leave it, `auto`: fp8 with fp8, else int8. search: of int4 in groups of 128, the
    clipping of each group that loses least, instead of its largest magnitude; the native form has a minimum each 32
    and needs none. format `file`: as the GGUF file has them, for the native backend. fp8_from: of fp8 on a GPU that
    multiplies it, rows of activations are rounded to float8 too in steps of so many tokens and more; 0: never."""

    format: Literal["int8", "int4", "fp8", "file"] = "int8"
    head: Literal["auto", "int8", "int4", "fp8", "none"] = "auto"
    search: bool = True
    skip: tuple[str, ...] = ()
    fp8_from: int = (
        2  # one row is quicker with its own values (2.14 ms a step of 8B, two rows rounded 2.83, else 11.6)
    )

    @property
    def head_format(self) -> str:
        if self.head != "auto":
            return self.head
        return "fp8" if self.format == "fp8" else "int8"


@TransformRegistry.register("quantize_linear")
class QuantizeLinear(Rewriter):
    """Weights of linear layers and experts as int8, fp8 (e4m3; a scale a row) or int4 (a scale each 128).

    before:  %y = linear(%x, %w, %b);   %z = graft.fused_linear(%x, %v, norm=%g, eps=…);   %u = addmm(%b, %x, %t)
    after:   %y = graft.fused_linear(%x, %q, %b, %s);   %z = graft.fused_linear(%x, %r, scale=%t, eps=…, normed=True)

    Only parameters that nothing else reads; a tied embedding, what `skip` names and in int4 a mixture's router stay
    as they are, each with its reason. The output head has 8 bits in every format (`head`). The weight of a norm goes
    into the GEMM's before that is rounded, which saves a sixth of its instructions. Layer by layer; where the engine
    loaded the module itself, the old weight is freed once the new one is there. Numerics: they change by design.
    Each weight is checked to be the nearest number that its scale can give (weights/rounding.py), and the
    record says how far that is; GEMMs are summed in float32. With fp8 on a GPU that multiplies float8, steps of
    `fp8_from` tokens and more round each row of activations to float8 too, with a scale of its own (in the report).

    experts: %y = graft.moe_experts(%x, %weights, %ids, %q, %r, "silu", gate_up_scale=%s, down_scale=%t)

    Both stacks of a mixture in one format, expert by expert; gate and up that take turns are put in halves.

    native:  %e = graft.packed_embedding(%q, %s, %ids, …);   %y = graft.fused_linear(%x, %q, None, %s, %g, …)

    For the native backend a weight goes into its tiles, with a scale (int8) or a scale and a minimum (int4) each 32
    columns; `file` takes the blocks of a GGUF file as they are. An embedding that is tied to the head reads the same
    tiles, and norms keep their weights. Numerics there: the GEMM rounds rows of x to 8 bits in blocks of 32.

    A walk: it makes new weights of the old ones, and asks who else reads them.
    """

    config: QuantizeConfig  # pyrefly: ignore

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return QuantizeConfig

    lacking = "the graph has no linear layer"
    size = 1

    def start(self, gm: GraphModule, context: Context) -> Quantizing:
        native = context.backend == "native" and device_of(gm) == "cpu"
        if not native and self.config.format == "file":
            raise UsageError("quantize_linear: format file is for backend='native' on a CPU; use int8, int4 or fp8")
        if native and "fp8" in (self.config.format, self.config.head_format):
            raise UsageError("quantize_linear: the native backend has no fp8; use int8 or int4")
        if native:
            return TiledWeights(gm, context, self.config.on_error, self.skipped(), self.format_of)
        return ScaledWeights(gm, context, self)

    def candidates(self, run: Quantizing) -> Iterable[Node]:
        return run.candidates()

    def find(self, run: Quantizing, node: Node) -> Match | None:
        return run.find(node)

    def check(self, run: Quantizing, match: Match) -> None:
        """One call for another; who else reads the weight was asked."""

    def write(self, run: Quantizing, match: Match) -> list[Node]:
        return run.write(match.anchor)

    def rewrite(self, run: Quantizing, match: Match) -> MatchRecord:
        record, made = super().rewrite(run, match), run.made[match.anchor]
        worst = max((each.numeric_check for each in made), key=lambda check: check.error)
        return replace(record, numeric_check=worst, note="; ".join(each.note for each in made))

    def finish(self, run: Quantizing) -> None:
        run.finish()
        idle = [p for p in self.config.skip if not any(pattern_fits(p, name) for name in run.layers.names)]
        run.context.notes += [f"quantize_linear: skip names no weight: {pattern!r}" for pattern in idle]

    def reason(self, run: Quantizing) -> str:
        reasons = list(dict.fromkeys(miss.reason for miss in run.misses))
        return "; ".join(reasons[:3]) or self.lacking

    def skipped(self) -> tuple[str, ...]:
        return (*self.config.skip, OUTPUT_HEAD) if self.config.head == "none" else self.config.skip

    def format_of(self, name: str) -> str:
        if self.config.format == "file":
            return "file"
        return self.config.head_format if pattern_fits(OUTPUT_HEAD, name) else self.config.format


class ScaledWeights(Quantizing):
    """int8, int4 and fp8 of a GPU, or of a CPU that widens them."""

    def __init__(self, gm: GraphModule, context: Context, transform: QuantizeLinear) -> None:
        super().__init__(gm, context, transform.config.on_error, transform.skipped())
        self.transform, self.config = transform, transform.config
        self.activations = fp8_activations_problem(gm, self.config.fp8_from)

    def candidates(self) -> Iterable[Node]:
        return [*others(self.gm), *linear_calls(self.gm)]

    def find(self, node: Node) -> Match:
        if is_op(node, LATENT):
            raise Refused(node, LATENT_STAYS)
        if is_op(node, EXPERTS):
            return self.find_experts(node)
        check_call(node)
        weight = operands(node)["weight"]
        check_weight(self.layers, node, weight, self.skip)
        format = self.format_of(str(weight.target))
        check_router(node, self.routers, format)
        return weight_match(node, format)

    def format_of(self, name: str) -> str:
        return self.transform.format_of(name)

    def write(self, node: Node) -> list[Node]:
        if is_op(node, EXPERTS):
            return self.write_experts(node, {kind: kind for kind in QUANTIZERS}, self.config.search)
        given = operands(node)
        name = str(given["weight"].target)
        norm = norm_of(self.gm, given)
        how = How(self.format_of(name), self.config.search, is_op(node, MM, ADDMM), *norm)
        made = quantize_weight(self.gm, name, how, self.context.shared)
        rounds = not self.activations and made.format == "fp8" and made.q.shape[0] % FP8_ROWS == 0
        given["fp8_from"] = self.config.fp8_from if rounds else 0
        self.made[node] = (made,)
        self.done.append(made)
        new = put_linear(self.editor, node, given, made, *parameters(self.editor, made, node))
        if self.owned is not None:
            release(self.gm, self.owned, name)
        return new

    def finish(self) -> None:
        done = self.done
        if not done:
            return
        saved = sum(made.before - made.after for made in done)
        self.context.outputs["quantized"] = Saving(self.config.format, saved)
        self.context.notes += totals(done, self.misses, self.kept)
        if floats := [made for made in done if made.format == "fp8"]:
            text = activations_text(self.activations, self.config.fp8_from, floats)
            self.context.notes.append(f"quantize_linear: {text}")


def fp8_activations_problem(gm: GraphModule, tokens: int) -> str:
    """Why rows of activations are not rounded to float8, or ''."""
    if tokens <= 0:
        return "fp8_from is 0"
    device = gpu_of(gm)
    if device is None:
        return "there is no GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < FLOAT8_CAPABILITY:
        return f"compute capability {major}.{minor} does not multiply float8; 8.9 and above do"
    return ""


def gpu_of(gm: GraphModule) -> torch.device | None:
    return next((p.device for p in gm.parameters() if p.device.type == "cuda"), None)


def activations_text(problem: str, tokens: int, done: Sequence[Quantized]) -> str:
    if problem:
        return f"activations are not rounded, because {problem}: GEMMs of many tokens widen the weights instead"
    odd = [made.name for made in done if made.q.shape[0] % FP8_ROWS]
    but = f", but for {', '.join(odd[:3])} ({len(odd)} in all): rows are no multiple of {FP8_ROWS}" if odd else ""
    return f"in steps of {tokens} tokens and more activations are rounded to float8 too, a scale a row{but}"
