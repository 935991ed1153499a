"""The second half of the mutation score: transforms whose matches cannot run alone, seen by the results end to end.

    python tests/graph_faults.py              # the score, survivors by name; exit status: survivors without a reason

One call that such a transform made in a whole decoder's graph gets a fault (call_faults.py), and the steps of
`graft check` (a prompt, decode steps, mixed batches) must give other results than the captured graph.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

sys.path.append(str(Path(__file__).parent / "cases"))
from call_faults import faults_of
from conftest import graph_of
from graft.ir.edit import second_module
from graft.ir.evaluate import RecordedCall
from graft.ir.nodes import calls
from graft.models.load import load_model
from graft.ops.cases import tolerance
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.pipeline import run_pipeline
from graft.workbench.check.outputs import distance
from graft.workbench.check.scenario import logits
from graft.workbench.check.trial import everywhere

WHOLE = ("last_token_logits", "insert_kv_cache", "fuse_rope_kv_write", "fuse_rope_into_attention", "tabulate_rope")
OFF = {"enabled": False}
# what runs: on a CPU, on a GPU, and there without the fusion that takes what fuse_rope_kv_write made
PIPELINES: dict[str, tuple[bool, dict[str, Any]]] = {
    "cpu": (False, {}),
    "gpu": (True, {}),
    "gpu, two kernels": (True, {"transforms": {"fuse_rope_into_attention": OFF}}),
}
FINITE = "end to end sees float32 and finite values of a model's own size: "
REASONS = {
    r"(in bfloat16|in float16|cast to bfloat16 and back): ": FINITE + "`graft check` compares in both others, too",
    r"(NaN swallowed|clamped at 4|above 5): ": FINITE + "no such value is there",
    r"at 37 tokens: ": FINITE + "no step has 37 tokens",
    r"(strided|offset in memory): ": "no fault: what it reads lies as it does there, whatever the model",
    r"one token: %(paged|cached|rope)_": "no fault: there are several heads, so there is never one row",
    r"(one token|above 64 tokens): %embedding_": "no fault: the dim that is counted is another",
    r"argument \d+ (one more|one less|flipped): ": "no fault: of a window, a cap or a norm that is not there",
    r"arguments \d and \d swapped: %(paged|rope)_": "no fault: both caches change places, for writes and reads",
    r"argument [34] in another order: %rope_": "no fault: one row of angles for all heads",
    r"(a thousandth more|the last row|one token|above 64 tokens): %(index_select|add)_": "no fault: a norm follows",
    r"above 64 tokens: %rms_norm": "no fault: it has a row for each sequence",
    r"argument 2 (doubled|a percent more): %rms_norm": "an eps of 1e-6 beside a mean square of 1, in float32",
    r"argument 1 in another order: %rms_norm": "the norm weights of a tiny model are ones",
}


def transformed(gpu: bool, more: dict[str, Any]) -> tuple[GraphModule, Tensor, float]:
    """The graph after all transforms, the captured one's results, and how far off `graft check` lets results be."""
    model = load_model("tiny-llama", dtype="float32", device="cpu")
    captured = graph_of(model.module)
    config = load_config(more)
    chosen = everywhere(config, "cpu")[0] if gpu else config
    gm = second_module(captured)
    run_pipeline(gm, chosen, Context(route="decoder", context_length=model.context))
    return gm, logits(captured), tolerance(torch.float32, len(list(calls(captured.graph))))


def variants(gm: GraphModule) -> Iterator[tuple[str, Node, RecordedCall]]:
    seen = set()
    for node in calls(gm.graph):
        kind = (node.meta.get("made_by"), node.target)
        if kind[0] in WHOLE and kind not in seen:  # equal layers have equal calls
            seen.add(kind)
            call = RecordedCall(node.op, node.target, node.args, node.kwargs, 0)
            for name, wrong in faults_of(call, node.meta.get("val")):
                yield f"{name}: %{node.name} of {kind[0]}", node, wrong


def results(gm: GraphModule, node: Node, wrong: RecordedCall) -> Tensor | None:
    """With one call replaced; None where the graph does not run."""
    right = node.target, node.args, node.kwargs
    node.target, node.args, node.kwargs = wrong.target, wrong.args, wrong.kwargs
    try:
        return logits(gm)
    except (RuntimeError, ValueError, TypeError, LookupError):
        return None
    finally:
        node.target, node.args, node.kwargs = right


def score() -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    survivors = []
    for pipeline, (gpu, more) in PIPELINES.items():
        gm, expected, allowed = transformed(gpu, more)
        assert distance(logits(gm), expected) <= allowed
        for name, node, wrong in variants(gm):
            made = results(gm, node, wrong)
            found = made is None or not distance(made, expected) <= allowed
            reason = next((why for pattern, why in REASONS.items() if re.match(pattern, name)), "")
            counts["caught" if found else "with a reason" if reason else "survived"] += 1
            if not found and not reason:
                survivors.append(f"{name} on {pipeline}")
    return counts, survivors


if __name__ == "__main__":
    counts, survivors = score()
    print(dict(counts), *survivors, sep="\n")
    sys.exit(len(survivors))
