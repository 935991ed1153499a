"""What quantized weights do to the predictions of a real model: perplexity, KL divergence, agreement, sizes.

python benchmarks/quantization.py --model smollm2-135m --device cpu --dtype float32

The text is quantization.txt, written for this. The first row is the model as it is; `int4, no search` scales every
group by its largest magnitude; `int4, wrong scales` has the scales of the neighbouring group, to show what a defect
would look like; `fp8, activations too` rounds every row of activations as well, as a GPU does in steps of several
tokens. In the last rows only the output head is quantized, which has weights of its own for that.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from graft.bench.quality import Quality, logits_of, quality, with_transforms
from graft.capture.decoder import capture_decoder
from graft.models.load import load_model

TEXT = Path(__file__).with_name("quantization.txt")
ROWS = ("int8", "fp8", "fp8, activations too", "int4", "int4, no search", "int4, wrong scales")
HEADS = ("int8", "fp8", "int4")


def quantized(gm: GraphModule, row: str) -> GraphModule:
    """The graph of one row of the table."""
    settings = {"format": row.partition(",")[0], "search": row != "int4, no search"}
    if row.startswith("head alone"):
        settings = {"head": row.rpartition(" ")[2], "skip": ["layers"]}
    made = with_transforms(gm, {"quantize_linear": settings})
    if row == "int4, wrong scales":
        shift_scales(made)
    if row == "fp8, activations too":
        round_activations(made)
    return made


@torch.no_grad()
def untied(module: Any) -> GraphModule:
    """The graph of the same model, whose head has weights of its own."""
    head: Any = module.get_submodule("lm_head")
    head.weight = torch.nn.Parameter(head.weight.clone())
    return capture_decoder(module)


@torch.no_grad()
def shift_scales(gm: GraphModule) -> None:
    """Every scale goes to the next group of its row, or to the next row where a row has one."""
    for name, parameter in gm.named_parameters():
        if name.endswith("_scale"):
            parameter.copy_(parameter.roll(1, -1))


def round_activations(gm: GraphModule) -> None:
    """From one token on, whatever the device."""
    target = torch.ops.graft.fused_linear.default
    for node in gm.graph.find_nodes(op="call_function", target=target):
        node.kwargs = {**node.kwargs, "fp8_from": 1}
    gm.recompile()


def sizes(gm: GraphModule) -> dict[str, float]:
    """Megabytes of all that the graph reads."""
    return {"megabytes": sum(p.nbytes for p in gm.parameters()) / 1e6}


def measure(row: str, gm: GraphModule, ids: list[int], device: torch.device, original: Any) -> tuple[Quality, dict]:
    started = time.perf_counter()
    made = gm if original is None else quantized(gm, row)
    seconds = time.perf_counter() - started
    found = quality(logits_of(made, ids, device), ids, original)
    return found, {**sizes(made), "transform_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--rows", nargs="+", default=[*ROWS, *(f"head alone as {kind}" for kind in HEADS)])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    device = next(model.module.parameters()).device
    ids = model.tokenizer(TEXT.read_text())["input_ids"][: options.tokens]
    with torch.no_grad():
        gm = capture_decoder(model.module)
    original = logits_of(gm, ids, device)
    print(f"{options.model}, {options.dtype}, {device}, {len(ids)} tokens")
    print(f"{'weights':20} {'MB':>7} {'perplexity':>10} {'ratio':>7} {'KL':>9} {'top-1':>7} {'seconds':>8}")
    base = quality(original, ids)
    print(f"{options.dtype:20} {sizes(gm)['megabytes']:7.1f} {base.perplexity:10.4f}")
    for row in options.rows:
        if row.startswith("head alone") and "lm_head.weight" not in dict(gm.named_parameters()):
            gm = untied(model.module)
        found, more = measure(row, gm, ids, device, original)
        if options.json:
            print(json.dumps({"weights": row, **asdict(found), **more}))
        print(
            f"{row:20} {more['megabytes']:7.1f} {found.perplexity:10.4f} {found.perplexity / base.perplexity:7.4f}"
            f" {found.divergence:9.2e} {found.agreement:7.1%} {more['transform_seconds']:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
