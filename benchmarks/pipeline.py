"""What the pipeline costs: capture and transforms of a real model, matching by depth, memory while merging.

python benchmarks/pipeline.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from graft.capture.decoder import capture_decoder
from graft.cli.show import quiet_libraries
from graft.ir.patterns.match import Finder
from graft.models.load import load_model
from graft.passes.base import Context
from graft.passes.config import load_config
from graft.passes.library.norms.fuse_rms_norm import SHAPES, rms_norm
from graft.passes.pipeline import run_pipeline


def pipeline_times(name: str) -> dict[str, float | int | str]:
    """Capture and all transforms on meta weights, in a fresh process, patterns traced for the first time included."""
    model = load_model(name, device="meta")
    started = time.perf_counter()
    gm = capture_decoder(model.module)
    captured = time.perf_counter()
    report = run_pipeline(gm, load_config(), Context(route="decoder"))
    transforms = sum(r.seconds for r in report.transforms.values())
    return {
        "model": name,
        "capture_s": round(captured - started, 2),
        "transforms_s": round(transforms, 3),
        "total_s": round(captured - started + transforms, 2),
        "transforms_ms_per_layer": round(1000 * transforms / model.layers, 1),
    }


def tiny_llama(layers: int, device: str = "meta") -> PreTrainedModel:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=128, num_hidden_layers=layers, **shape)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config).eval()


def check_times(layers: int = 32) -> dict[str, float | int]:
    """The pipeline on a deep tiny Llama with real weights, without and with the numeric check of every match."""
    seconds, checked = {}, 0
    run_pipeline(
        capture_decoder(tiny_llama(1, "cpu")), load_config(), Context(route="decoder")
    )  # traces the patterns
    for verify in ("structure", "matches"):
        gm = capture_decoder(tiny_llama(layers, "cpu"))
        started = time.perf_counter()
        report = run_pipeline(gm, load_config({"verify": verify}), Context(route="decoder"))
        seconds[verify] = round(time.perf_counter() - started, 2)
        checked = sum(match.numeric_check is not None for r in report.transforms.values() for match in r.matches)
    return {"layers": layers, "checked": checked, "without_s": seconds["structure"], "with_s": seconds["matches"]}


def matching_times(depths: tuple[int, ...] = (2, 8, 32, 128), repeats: int = 5) -> list[dict[str, float | int]]:
    """Finding all RMSNorms of Llama graphs of different depth; the cost per node must stay flat."""
    rows = []
    for layers in depths:
        gm = capture_decoder(tiny_llama(layers))
        times, found = [], 0
        for _ in range(repeats):
            started = time.perf_counter()
            found = len(Finder(rms_norm, SHAPES).find(gm.graph)[0])
            times.append(time.perf_counter() - started)
        nodes = len(gm.graph.nodes)
        micros = round(1e6 * sorted(times)[repeats // 2] / nodes, 2)
        rows.append({"layers": layers, "nodes": nodes, "matches": found, "match_us_per_node": micros})
    return rows


def merge_memory(name: str) -> dict[str, float | str]:
    """Peak memory of loading, capturing and transforming real weights, over the size of the model."""
    script = f"import benchmarks.pipeline as b; b.measure_merge({name!r})"
    # mimalloc, which some builds of torch allocate with, keeps freed pages for a while; told so, it gives them back
    env = {**os.environ, "MIMALLOC_PURGE_DELAY": "0"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    return json.loads(result.stdout.splitlines()[-1])


def measure_merge(name: str) -> None:
    """Runs in a process of its own: how far memory rises over what the loaded, captured model takes."""
    quiet_libraries()
    model = load_model(name, dtype="float32", device="cpu")
    gm = capture_decoder(model.module)
    size = sum(p.numel() * p.element_size() for p in model.module.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory_kib("VmRSS")
    run_pipeline(gm, load_config(), Context(route="decoder"))
    growth = (memory_kib("VmHWM") - before) * 1024
    row = {
        "model": name,
        "model_MB": size >> 20,
        "growth_MB": growth >> 20,
        "peak_ratio": round(1 + growth / size, 3),
    }
    print(json.dumps(row))


def memory_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--merge-model", default="qwen3-0.6b")
    args = parser.parse_args()
    quiet_libraries()
    times = pipeline_times(args.model)
    cost = f"{times['transforms_s']} s ({times['transforms_ms_per_layer']} ms a layer)"
    print(f"{times['model']}: capture {times['capture_s']} s, transforms {cost}")
    rows = matching_times()
    for row in rows:
        cost = f"{row['match_us_per_node']} µs a node to find {row['matches']} norms"
        print(f"{row['layers']} layers, {row['nodes']} nodes: {cost}")
    checks = check_times()
    cost = (
        f"{checks['with_s']} s with the numeric check of {checks['checked']} matches, {checks['without_s']} s without"
    )
    print(f"{checks['layers']} layers: {cost}")
    memory = merge_memory(args.merge_model)
    growth = f"{memory['peak_ratio']} x the model (+{memory['growth_MB']} MB)"
    print(f"{memory['model']}: peak while transforming {growth}")
    print(
        json.dumps(
            {"torch": torch.__version__, "pipeline": times, "matching": rows, "checks": checks, "merge": memory}
        )
    )


if __name__ == "__main__":
    main()
