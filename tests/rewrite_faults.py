"""The mutation score of the numeric check: wrong variants of what the library's transforms put in place.

    python tests/rewrite_faults.py            # the score, survivors by name; exit status: survivors without a reason

Every kind of match of a few tiny families, and of modules for what these do not have, is taken as the pipeline made
it; then one call of the replacement gets a fault (call_faults.py), and the numeric check must refuse the pair.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

sys.path.append(str(Path(__file__).parent / "cases"))
from attention_cases import KV, SCALE, D, H, S, attend, causal, repeat_kv, tensors
from call_faults import faults_of
from conftest import graph_of
from golden_graphs import on_meta
from graft.base.errors import NumericCheckError
from graft.ir.evaluate import Subprogram
from graft.ir.trace import export_graph
from graft.models.load import load_model
from graft.passes import numeric_check
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.numeric_check import MatchTrials, PairTrials
from graft.passes.pipeline import run_pipeline
from moe_cases import block, tokens

ALL_ON = {"verify": "matches", "transforms": {"fuse_l2_norm": {"enabled": True}}}
MODELS = {"llama": False, "gemma-2": False, "cohere": False, "llama-gpu": True}
# survivors by name, and why the numeric check lets them pass; what is named here is no fault, or a known gap
REASONS = {
    r"one token: %rope_": "no fault: the op has several heads, so it never has one row",
    r"(strided|offset in memory): %(slice|rms_norm)_": "no fault: it reads a value that the replacement made itself",
    r"argument 3 one more: %slice_": "no fault: the slice ends where its tensor ends",
    r"arguments 0 and 1 swapped: %add_rms_norm_": "no fault: a sum",
    r"argument [5679] .*: %fused_linear_": "no fault: of a norm or an activation that the call does not have",
    r"argument \d in another order: %rope_": "no fault: one row of angles for all heads",
    r"argument 1 left out: %layer_norm_": "told as not covered: the weight is ones, which may be left out",
    r"NaN swallowed: .* in fuse_attention": "not kept on purpose: torch's own kernels lose NaN (not_kept)",
    r"one token: .* in fuse_attention": "no fault: there are several heads, so there is never one row",
    r"(above 64|at 37) tokens: .* in fuse_attention": "told as not covered: the graph has no open size",
    r"(strided|offset in memory): %transpose_": "no fault: it reads a value that the replacement made itself",
    r"argument 9 flipped: %attention_": "no fault: whether rows without a key give zeros, and every row has one",
    r"argument 3 in another order: %attention_": "no fault: one mask for all heads",
    r"(clamped at 4|above 5): %(l2_norm|moe_route)_": "no fault: the results are at most 1",
    r"argument 5 flipped: %layer_norm_": "where 16 bits are rounded: within three times the original's error",
}


class Attention(nn.Module):
    """Spelled out, with grouped heads and a mask that is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ repeat_kv(k, H // KV).transpose(2, 3) * SCALE + mask
        return attend(scores, repeat_kv(v, H // KV))


class Lengths(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class Heads(nn.Module):
    """Linear layers that read one input, of which no merge has a name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(D, 6), nn.Linear(D, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).tanh(), self.two(x).sin()


def modules() -> list[tuple[nn.Module, tuple[Tensor, ...], Any]]:
    """Programs for transforms that find nothing in the decoders, with what they take and which sizes are open."""
    torch.manual_seed(0)
    q, k, v = tensors(kv=KV)
    mask = torch.where(causal(S), 0.0, -torch.inf)[None, None]
    open_rows = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    return [
        (Attention(), (q, k, v, mask), None),
        (Lengths(), (torch.randn(2, 5, D),), (open_rows,)),
        (Heads(), (torch.randn(2, 5, D),), (open_rows,)),
        (block(), (tokens(),), ({1: Dim.DYNAMIC},)),
    ]


@dataclass(frozen=True)
class KeptPair:
    """One kind of match, as the pipeline had it when it was checked."""

    transform: str
    old: Subprogram
    new: Subprogram
    most: int | None
    not_kept: Any


# ── the score ───────────────────────────────────────────────────────────────────────────────────────────────────────


def pairs() -> list[KeptPair]:
    """Every kind of match that the pipeline makes of these models."""
    kept: dict[tuple[str, str], KeptPair] = {}
    real = MatchTrials.check
    current = [""]

    def check(self: MatchTrials, record: Any) -> Any:
        old, new = self.sides.pieces(record)
        kind = numeric_check.kind_of(old, new)
        if kind not in self.known:
            kept.setdefault((current[0], kind), KeptPair(record.pattern, old, new, self.most, self.not_kept))
            self.known[kind] = numeric_check.NumericCheck(0.0, 0.0, "not tried")
        return self.known[kind]

    def progress(where: str) -> Callable[[str, int, int], None]:
        return lambda transform, _, __: current.__setitem__(0, f"{transform} of {where}")

    MatchTrials.check = check  # pyrefly: ignore
    try:
        for name, gpu in MODELS.items():
            model = load_model(
                f"tiny-{name.removesuffix('-gpu')}", dtype="bfloat16" if gpu else "float32",
                device="meta" if gpu else "cpu",
            )  # fmt: skip
            config = load_config({**(on_meta() if gpu else {}), "verify": "matches"})
            context = Context(route="decoder", backend="eager", context_length=model.context)
            run_pipeline(graph_of(model.module), config, context, progress=progress(name))
        for module, args, sizes in modules():
            gm = export_graph(module.eval().requires_grad_(False), args, dynamic_shapes=sizes)
            run_pipeline(gm, load_config(ALL_ON), progress=progress(type(module).__name__))
    finally:
        MatchTrials.check = real
    return [replace(pair, transform=where) for (where, _), pair in kept.items()]


def variants(pair: KeptPair) -> Iterator[tuple[str, Subprogram]]:
    """One call of the replacement is wrong."""
    for node in pair.new.program:
        call = pair.new.calls[node]
        if pair.new.boundary(node) is not None or call.op != "call_function" or node in pair.old.calls:
            continue
        for name, wrong in faults_of(call, node.meta.get("val")):
            calls = {**pair.new.calls, node: wrong}
            yield f"{name}: %{node.name} in {pair.transform}", replace(pair.new, calls=calls)


def caught(pair: KeptPair, wrong: Subprogram) -> str:
    """How it was noticed; '' where it was not."""
    try:
        PairTrials(pair.old, wrong, "%planted", pair.most).all(pair.not_kept)
    except NumericCheckError:
        return "refused"
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        return f"does not run: {type(error).__name__}"
    return ""


def score(limit: int | None = None) -> tuple[Counter[str], list[str]]:
    """How many variants there are by what became of them, and the survivors that no reason covers. limit: of each
    pair, so many spread over all of its variants."""
    counts: Counter[str] = Counter()
    survivors = []
    for pair in pairs():
        planted = list(variants(pair))
        step = max(len(planted) // limit, 1) if limit else 1
        for name, wrong in planted[::step]:
            found = caught(pair, wrong)
            reason = next((why for pattern, why in REASONS.items() if re.match(pattern, name)), "")
            counts["caught" if found else "with a reason" if reason else "survived"] += 1
            if not found and not reason:
                survivors.append(name)
    return counts, survivors


def main(*options: str) -> int:
    counts, survivors = score(int(options[0]) if options else None)
    print(dict(counts), *survivors, sep="\n")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
