"""quantize_linear: the weights of linear layers in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from graft.errors import UsageError
from graft.graph.edit import Editor
from graft.graph.nodes import is_op
from graft.transforms.base import BaseTransform, Context, Outcome, TransformConfig
from graft.transforms.decode import device_of
from graft.transforms.packed import pack_layers
from graft.transforms.quantization import (
    How,
    Layers,
    Quantized,
    Saving,
    pattern_fits,
    quantize_weight,
    release,
    totals,
    weight_problem,
)
from graft.transforms.quantized_calls import (
    ADDMM,
    EXPERTS_STAY,
    MM,
    call_problem,
    experts,
    linear_calls,
    near_miss,
    norm_of,
    operands,
    rewrite,
)
from graft.transforms.registry import TransformRegistry
from graft.transforms.report import MatchRecord

OUTPUT_HEAD = "lm_head"
FP8_CAPABILITY = (8, 9)
FP8_ROWS = 16  # torch's product takes a multiple of it


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
class QuantizeLinear(BaseTransform):
    """Weights of linear layers as int8 (a scale a row), fp8 (e4m3, a scale a row) or int4 (a scale each 128).

    before:  %y = linear(%x, %w, %b);   %z = graft.fused_linear(%x, %v, norm=%g, eps=…);   %u = addmm(%b, %x, %t)
    after:   %y = graft.fused_linear(%x, %q, %b, %s);   %z = graft.fused_linear(%x, %r, scale=%t, eps=…, normed=True)

    Only parameters that nothing else reads; a tied embedding, what `skip` names and experts stay as they are, each
    with its reason. The output head has 8 bits in every format (`head`). The weight of a norm goes into the product's
    before that is rounded, and with it a sixth of the kernel's instructions. Layer by layer; where the engine loaded
    the module itself, the old weight is given up as soon as the new one is there. Numerics: they change by design.
    Each weight is checked to be the nearest number that its scale can give (ops/fused_linear/rounding.py), and the
    record says how far that is; products are summed in float32. With fp8 on a GPU that multiplies float8, steps of
    `fp8_from` tokens and more round each row of activations to float8 too, with a scale of its own (in the report).

    native:  %e = graft.packed_embedding(%q, %s, %ids, …);   %y = graft.fused_linear(%x, %q, None, %s, %g, …)

    For the native backend a weight goes into its tiles, with a scale (int8) or a scale and a minimum (int4) each 32
    columns; `file` takes the blocks of a GGUF file as they are. An embedding that is tied to the head reads the same
    tiles, and norms keep their weights. Numerics there: the product rounds rows of x to 8 bits in blocks of 32.
    """

    config: QuantizeConfig  # pyrefly: ignore

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return QuantizeConfig

    def apply(self, gm: GraphModule, context: Context) -> Outcome:
        if context.backend == "native" and device_of(gm) == "cpu":
            return self.pack(gm, context)
        if self.config.format == "file":
            raise UsageError("quantize_linear: format file is for backend='native' on a CPU; use int8, int4 or fp8")
        layers, editor = Layers.of(gm), Editor(gm, self.name)
        done: list[tuple[MatchRecord, Quantized]] = []
        misses = [near_miss(node, EXPERTS_STAY) for node in experts(gm)]
        # a roll-back needs the old weights
        owned = context.owned if self.config.on_error == "raise" else None
        activations = fp8_activations_problem(gm, self.config.fp8_from)
        for node in linear_calls(gm):
            given = operands(node)
            problem = call_problem(node) or weight_problem(layers, given["weight"], self.skipped())
            if problem:
                misses.append(near_miss(node, problem))
                continue
            weight = given["weight"]
            how = How(
                self.format_of(str(weight.target)), self.config.search, is_op(node, MM, ADDMM), *norm_of(gm, given)
            )
            made = quantize_weight(gm, str(weight.target), how, context.shared)
            rounds = not activations and made.format == "fp8" and made.q.shape[0] % FP8_ROWS == 0
            given["fp8_from"] = self.config.fp8_from if rounds else 0
            done.append((rewrite(editor, node, given, made), made))
            if owned is not None:
                release(gm, owned, str(weight.target))
        if not done:
            reasons = list(dict.fromkeys(miss.reason for miss in misses))
            return Outcome((), tuple(misses), "; ".join(reasons[:3]) or "the graph has no linear layer")
        context.outputs["quantized"] = Saving(self.config.format, sum(made.before - made.after for _, made in done))
        context.notes += totals([made for _, made in done], misses, kept_because(owned, context))
        if floats := [made for _, made in done if made.format == "fp8"]:
            context.notes.append(f"quantize_linear: {activations_text(activations, self.config.fp8_from, floats)}")
        context.notes += [f"quantize_linear: skip names no weight: {p!r}" for p in self.idle_patterns(layers)]
        return Outcome(tuple(record for record, _ in done), tuple(misses))

    def pack(self, gm: GraphModule, context: Context) -> Outcome:
        """In tiles of the native backend; a weight that is tied to an embedding too."""
        formats = (self.config.format, self.config.head_format)
        if "fp8" in formats:
            raise UsageError("quantize_linear: the native backend has no fp8; use int8 or int4")
        layers = Layers.of(gm)
        context.notes += [f"quantize_linear: skip names no weight: {p!r}" for p in self.idle_patterns(layers)]
        owned = context.owned if self.config.on_error == "raise" else None
        return pack_layers(gm, context, layers, self.format_of, self.skipped(), owned, kept_because(owned, context))

    def skipped(self) -> tuple[str, ...]:
        return (*self.config.skip, OUTPUT_HEAD) if self.config.head == "none" else self.config.skip

    def format_of(self, name: str) -> str:
        if self.config.format == "file":
            return "file"
        return self.config.head_format if pattern_fits(OUTPUT_HEAD, name) else self.config.format

    def idle_patterns(self, layers: Layers) -> list[str]:
        """Patterns that the user gave and that fit nothing."""
        return [p for p in self.config.skip if not any(pattern_fits(p, name) for name in layers.names)]


def kept_because(owned: Any, context: Context) -> str:
    """Why the float weights are still in memory, or '' where they are not."""
    if owned is not None:
        return ""
    return "on_error: skip may need them" if context.owned is not None else "the module is the caller's"


def fp8_activations_problem(gm: GraphModule, tokens: int) -> str:
    """Why rows of activations are not rounded to float8, or ''."""
    if tokens <= 0:
        return "fp8_from is 0"
    device = gpu_of(gm)
    if device is None:
        return "there is no GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < FP8_CAPABILITY:
        return f"compute capability {major}.{minor} does not multiply float8; 8.9 and above do"
    return ""


def gpu_of(gm: GraphModule) -> torch.device | None:
    return next((p.device for p in gm.parameters() if p.device.type == "cuda"), None)


def activations_text(problem: str, tokens: int, done: Sequence[Quantized]) -> str:
    if problem:
        return f"activations are not rounded, because {problem}: products of many tokens widen the weights instead"
    odd = [made.name for made in done if made.q.shape[0] % FP8_ROWS]
    but = f", but for {', '.join(odd[:3])} ({len(odd)} in all): rows are no multiple of {FP8_ROWS}" if odd else ""
    return f"in steps of {tokens} tokens and more activations are rounded to float8 too, a scale a row{but}"
