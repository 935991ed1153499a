"""What each decode fusion is worth: a decode step with all of them, with each one left out, and with none.

python benchmarks/decode_fusions.py --model llama-3.2-1b --batch 1 8 64 --json

The model is loaded once. Every variant is an engine of its own; all stay in memory, with merged weights of their own
(of the 8B model 9 GB each), because times are medians of repeats in turns. `saved` is what a fusion is worth beside
all others: the step without it less the step with all, a layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch

import graft
from graft.bench.bench import prompts_for
from graft.bench.limits.machine import facts
from graft.bench.plan import Cell
from graft.bench.runner import Graft, synchronize
from graft.cli.show import quiet_libraries
from graft.engine.setup.stages import overlay
from graft.models.load import load_model
from graft.models.loaded import LoadedModel
from graft.models.places import resolve_device
from graft.passes.config import load_config
from graft.passes.registry import TransformRegistry, load_all

FUSIONS = (
    "fuse_residual_into_matvec",
    "fuse_norm_into_matvec",
    "fuse_swiglu_into_matvec",
    "tabulate_rope",
    "fuse_rope_kv_write",
    "fuse_rope_into_attention",
)


@dataclass
class Variant:
    """An engine without some of the fusions. `matches` is how often each of the others was applied."""

    name: str
    off: tuple[str, ...]
    engine: Graft | None = None
    matches: dict[str, int] = field(default_factory=dict)
    step_ms: dict[int, list[float]] = field(default_factory=dict)  # by batch size
    failed: str = ""


def variants(known: list[str]) -> list[Variant]:
    found = [Variant("all on", ())]
    found += [Variant(f"without {name}", (name,)) for name in known]
    return [*found, Variant("all off", tuple(known))] if known else found


def build(variant: Variant, known: list[str], model: LoadedModel, args: argparse.Namespace) -> None:
    sets = [f"transforms.{name}.enabled={'false' if name in variant.off else 'true'}" for name in known]
    try:
        llm = graft.LLM(
            model,
            config=load_config(model=overlay(model), sets=sets),
            backend=args.backend,
            kv_cache_memory=args.kv_cache_memory,
            max_num_seqs=max(args.batch),
        )
    except Exception as error:  # noqa: BLE001  a variant that cannot be built is a result
        variant.failed = first_line(error)
        return
    variant.engine = Graft(llm)
    records = llm.report.transforms
    variant.matches = {name: len(records[name].matches) for name in known if name in records}


def step_seconds(engine: Graft, prompts: list[list[int]], more: list[list[int]], new: int) -> float:
    """A decode step: a call with `new` tokens after the first, less a call with the first alone."""
    device = next(engine.llm.model.module.parameters()).device
    times = []
    for batch, tokens in ((prompts, 1), (more, 1 + new)):
        synchronize(device)
        started = time.perf_counter()
        engine.generate(batch, tokens)
        synchronize(device)
        times.append(time.perf_counter() - started)
    return (times[1] - times[0]) / new


def measure(found: list[Variant], batch: int, model: LoadedModel, args: argparse.Namespace) -> None:
    """Repeats in turns, so that what changes with time changes for all."""
    calls = prompts_for(model, Cell(batch, args.prompt))
    for repeat in range(args.repeats + 1):  # the first one warms up
        for variant in (v for v in found if v.engine is not None and not v.failed):
            first, second = ([next(calls) for _ in range(batch)] for _ in range(2))
            try:
                seconds = step_seconds(variant.engine, first, second, args.new)  # pyrefly: ignore
            except Exception as error:  # noqa: BLE001  as above
                variant.failed = first_line(error)
                continue
            if repeat:
                variant.step_ms.setdefault(batch, []).append(1e3 * seconds)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['without a message'])[0]}"


def rows_of(found: list[Variant], batches: list[int], layers: int) -> list[dict[str, Any]]:
    rows = []
    for variant in found:
        for batch in batches:
            row: dict[str, Any] = {"variant": variant.name, "batch": batch, "failed": variant.failed}
            times, all_on = variant.step_ms.get(batch), found[0].step_ms.get(batch)
            if times:
                row |= {"step_ms": statistics.median(times), "spread_ms": max(times) - min(times)}
            if times and all_on:
                row["saved_us_a_layer"] = 1e3 * (row["step_ms"] - statistics.median(all_on)) / layers
            rows.append(row | {"matches": variant.matches})
    return rows


def show(rows: list[dict[str, Any]], unknown: list[str]) -> None:
    print(f"{'variant':36} {'batch':>5} {'ms/step':>9} {'spread':>8} {'saved us/layer':>14}")
    for row in rows:
        if row["failed"]:
            print(f"{row['variant']:36} {row['batch']:5} failed: {row['failed']}")
        elif "step_ms" in row:
            saved = f"{row['saved_us_a_layer']:14.2f}" if row["variant"] != "all on" else ""
            print(f"{row['variant']:36} {row['batch']:5} {row['step_ms']:9.4f} {row['spread_ms']:8.4f} {saved}")
    for name in unknown:
        print(f"{name}: not known to the registry, so not measured")
    for name, count in rows[0]["matches"].items():
        print(f"{name}: {count} matches with all on")


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.2-1b" if gpu else "tiny-llama")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-cache-memory", default="2GiB" if gpu else "64MiB", help="of each variant")
    parser.add_argument("--fusions", nargs="+", default=list(FUSIONS))
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    args = parser.parse_args()
    quiet_libraries()
    load_all()
    known = [name for name in args.fusions if name in TransformRegistry.names()]
    unknown = [name for name in args.fusions if name not in known]
    model = load_model(args.model, dtype=args.dtype, device=args.device)
    found = variants(known)
    for variant in found:
        print(f"building: {variant.name}", file=sys.stderr)
        build(variant, known, model, args)
    for batch in args.batch:
        print(f"measuring: batch {batch}", file=sys.stderr)
        measure(found, batch, model, args)
    rows = rows_of(found, args.batch, model.layers)
    if args.json:
        setup = {**vars(args), **facts(resolve_device(args.device)), "layers": model.layers}
        print(json.dumps({"setup": setup, "unknown": unknown, "rows": rows}))
    else:
        show(rows, unknown)


if __name__ == "__main__":
    main()
