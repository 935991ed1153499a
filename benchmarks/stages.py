"""What watching costs: `graft stages` of a model beside the plain compilation of the same call.

    python -m benchmarks.stages [MODEL] [--repeats 3] [--json]

Each is a process of its own with empty caches, in turns. Processor time, that of the C++ compiler and of all other
processes that it starts included; ratios of medians. `watched` is --no-fresh, `whole` the command as it is, which
makes the first call in a fresh process once more.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile

PLAIN = """
import sys
import torch
from graft.workbench.stages.targets import find_target
target = find_target(sys.argv[1])
with torch.no_grad():
    torch.compile(target.function)(*target.calls[0])
"""
TARGET = 2.5  # times the plain compilation


def seconds(command: list[str]) -> float:
    """Of the processor, by the command and all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "GRAFT_CACHE_DIR": f"{folder}/graft"}
        subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny-llama")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    stages = [sys.executable, "-m", "graft", "stages", asked.model]
    commands = {
        "plain": [sys.executable, "-c", PLAIN, asked.model],
        "watched": [*stages, "--no-fresh"],
        "whole": stages,
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(asked.repeats):
        for name, command in commands.items():
            taken[name].append(seconds(command))
    plain = statistics.median(taken["plain"])
    ratios = {name: statistics.median(times) / plain for name, times in taken.items()}
    if asked.json:
        print(json.dumps({"model": asked.model, "seconds": taken, "ratios": ratios, "target": TARGET}, indent=1))
        return
    for name, times in taken.items():
        print(
            f"{name:8} {statistics.median(times):6.1f} s ({min(times):.1f} to {max(times):.1f})  {ratios[name]:.2f}"
        )
    print(f"target: at most {TARGET} × plain")


if __name__ == "__main__":
    main()
