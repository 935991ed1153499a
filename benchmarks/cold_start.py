"""How long a start takes, phase by phase, in a fresh process: with empty caches, then with what the first one left.

python benchmarks/cold_start.py --model llama-3.1-8b --json

Two processes, one after the other. The first has empty folders for Triton's compiled kernels, Inductor's and graft's
own (captured graphs, tuning, converted checkpoints); the second has the same folders again. Phases are those that the
engine's progress names: `capturing the graph` the first time, `loading the captured graph` the second. `load` is the
model's, and `first token` a prompt's first call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDERS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "GRAFT_CACHE_DIR": "graft"}
TARGETS = {"cold": 25.0, "warm": 6.0}  # seconds for the 8B model on an H200, weights already there


def start(args: argparse.Namespace) -> dict[str, Any]:
    """One start in this process."""
    began = time.perf_counter()
    import torch

    import graft
    from graft.bench.limits.machine import facts
    from graft.bench.phases import PhaseClock
    from graft.bench.runner import synchronize
    from graft.cli.show import quiet_libraries
    from graft.models.load import load_model

    quiet_libraries()
    imported = time.perf_counter() - began
    loading = PhaseClock()
    loading.mark("load")
    model = load_model(args.model, dtype=args.dtype, device=args.device)
    device = next(model.module.parameters()).device
    synchronize(device)
    load = sum(loading.phases().values())
    clock = PhaseClock()
    clock.mark("configuration")
    options = {} if args.kv_cache_memory is None else {"kv_cache_memory": args.kv_cache_memory}
    llm = graft.LLM(model, backend=args.backend, progress=clock, **options)
    synchronize(device)
    clock.mark("first token")
    prompt = torch.arange(args.prompt).remainder(model.module.config.vocab_size).tolist()
    llm.generate([prompt], graft.SamplingParams(max_tokens=1, ignore_eos=True))
    clock.mark("second call, 8 tokens")
    llm.generate([prompt[::-1]], graft.SamplingParams(max_tokens=8, ignore_eos=True))
    phases = {"import": imported, "load": load, **clock.phases()}
    ready = sum(
        seconds for name, seconds in phases.items() if name not in ("import", "load", "second call, 8 tokens")
    )
    notes = [note for note in llm.report.notes if not note.startswith("key-value cache")]
    return {"phases": phases, "ready_seconds": ready, "backend": llm.backend, "notes": notes, **facts(device)}


def fresh(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One start in a process of its own, with its caches under `folder`."""
    paths = {name: str(folder / sub) for name, sub in FOLDERS.items()}
    command = [sys.executable, __file__, "--once", *sys.argv[1:]]
    done = subprocess.run(
        command, env={**os.environ, **paths}, stdout=subprocess.PIPE, text=True, timeout=args.timeout, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def show(results: dict[str, dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for result in results.values() for name in result["phases"]))
    print(f"{'phase':32}" + "".join(f"{kind:>10}" for kind in results))
    for name in names:
        cells = (result["phases"].get(name) for result in results.values())
        print(f"{name:32}" + "".join(f"{'':>10}" if cell is None else f"{cell:10.2f}" for cell in cells))
    print(f"{'loaded → first token':32}" + "".join(f"{r['ready_seconds']:10.2f}" for r in results.values()))
    print(f"{'target (8B on an H200)':32}" + "".join(f"{TARGETS[kind]:10.2f}" for kind in results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--kv-cache-memory", default=None)
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds that one start may take")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--once", action="store_true", help="one start in this process, as JSON")
    args = parser.parse_args()
    if args.once:
        print(json.dumps(start(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for kind in TARGETS:
            print(f"{kind} start", file=sys.stderr)
            results[kind] = fresh(args, Path(folder))
    if args.json:
        print(json.dumps({"setup": vars(args), **results}))
    else:
        show(results)


if __name__ == "__main__":
    main()
