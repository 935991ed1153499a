"""Every Triton kernel of every op once under compute-sanitizer: memory errors, then races in shared memory.

python benchmarks/sanitize.py                     # both tools over all ops; the log goes to benchmarks/sanitizer.log
python benchmarks/sanitize.py --run fused_linear  # only run an op's kernels, in this process

One process a tool, since starting one takes longer than the kernels. Kernels are compiled by a run without the tool
before. Exit code: 0 clean, 1 errors were found, 2 the tool or a GPU is not there.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from glob import glob
from pathlib import Path
from typing import Any

LOG = Path(__file__).with_name("sanitizer.log")
TOOLS = {"memcheck": ("--leak-check", "no"), "racecheck": ("--racecheck-report", "all")}
PLACES = (
    "/usr/local/cuda*/bin/compute-sanitizer",
    "/usr/local/cuda*/compute-sanitizer/compute-sanitizer",
    f"{sys.prefix}/lib/python3*/site-packages/nvidia/*/bin/compute-sanitizer",
)
KEPT_LINES = 40  # of a tool's own report; the first errors say what is wrong


def run_kernels(names: list[str], most_cases: int) -> int:
    """Runs the Triton kernels of these ops over a few of their cases; how many calls there were."""
    import importlib

    import torch

    from graft.ops import OPS
    from graft.ops.selection import problem_of

    if not torch.cuda.is_available():
        print("no GPU is available here")
        raise SystemExit(2)
    calls = 0
    for name in names or sorted(OPS):
        kernels = [kernel for kernel in OPS[name].kernels if kernel.kind == "triton"]
        ran: dict[str, int] = {kernel.name: 0 for kernel in kernels}
        for case in small_first(importlib.import_module(f"graft.ops.{name}.cases").CASES):
            args = case.make("cuda", torch.bfloat16, torch.Generator().manual_seed(0))
            for kernel in kernels:
                if ran[kernel.name] < most_cases and problem_of(kernel, OPS[name].call(*args)) is None:
                    kernel.run(*args)
                    torch.cuda.synchronize()
                    ran[kernel.name] += 1
        calls += sum(ran.values())
        told = ", ".join(f"{kernel} {count}" for kernel, count in ran.items()) or "no Triton kernel"
        print(f"ran {name}: {told}", flush=True)
    return calls


def small_first(cases: list[Any]) -> list[Any]:
    """By the values of their tensors: under racecheck a kernel is a hundred times as slow."""
    import torch

    def values(case: Any) -> int:
        args = case.make("cpu", torch.bfloat16, torch.Generator().manual_seed(0))
        return sum(a.numel() for a in args if isinstance(a, torch.Tensor))

    return sorted(cases, key=values)


def find_tool(given: str | None) -> str | None:
    installed = sorted(p for pattern in PLACES for p in glob(pattern))
    return given or shutil.which("compute-sanitizer") or next(iter(installed), None)


def check(tool: str, command: list[str], timeout: float) -> tuple[int, str]:
    """(exit code, what the process and the tool said); 124 when the time was up."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else a tensor's neighbours hide overruns
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return 124, (said.decode(errors="replace") if isinstance(said, bytes) else said) + f"\n{tool}: time is up"
    return done.returncode, done.stdout


def summary(tool: str, code: int, said: str, seconds: float) -> tuple[bool, list[str]]:
    """Whether it was clean, and the lines for the log: the verdict, what ran, and the tool's own words."""
    verdicts = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", said)
    ran = [line for line in said.splitlines() if line.startswith("ran ")]
    idle = [line for line in ran if re.search(r" 0(,|$)", line)]  # a kernel that no case of its op reaches
    clean = code == 0 and bool(verdicts) and all("SUMMARY: 0 " in verdict for verdict in verdicts) and not idle
    words = [line for line in said.splitlines() if line.startswith("=========")]
    if not words:  # the process died before the tool could say anything
        words = said.splitlines()[-KEPT_LINES:]
    state = "clean" if clean else f"NOT clean{', a kernel was never run' if idle else ''}"
    return clean, [f"{tool}: {state}, exit code {code}, {seconds:.0f} s", *ran, *words[:KEPT_LINES], ""]


def header(sanitizer: str) -> list[str]:
    import torch

    from graft.bench.limits.machine import facts

    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False).stdout
    known = facts(torch.device("cuda"))
    versions = ", ".join(f"{name} {known[name]}" for name in ("torch", "triton", "python"))
    return [
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {known['device_name']}, {versions}",
        (version.strip().splitlines() or ["compute-sanitizer of unknown version"])[-1],
        f"command: {shlex.join(['python', *sys.argv])}",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs="*", metavar="OP", help="run the kernels of these ops (all if none) here")
    parser.add_argument("--ops", nargs="*", default=[], help="ops to check; all if left out")
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--cases", type=int, default=20, help="cases of each kernel, small first")
    parser.add_argument("--timeout", type=float, default=140.0, help="seconds of each tool")
    parser.add_argument("--sanitizer", help="path of compute-sanitizer")
    parser.add_argument("--log", type=Path, default=LOG)
    args = parser.parse_args()
    if args.run is not None:
        print(f"calls: {run_kernels(args.run, args.cases)}")
        return
    sanitizer = find_tool(args.sanitizer)
    if sanitizer is None:
        print("compute-sanitizer is not on this machine; it comes with the CUDA toolkit", file=sys.stderr)
        raise SystemExit(2)
    inner = [sys.executable, __file__, "--cases", str(args.cases), "--run", *args.ops]
    code, said = check("without a tool", inner, args.timeout)  # compiles the kernels, and says what fails anyway
    if code:
        print(said[-3000:], file=sys.stderr)
        raise SystemExit(2 if code == 2 else 1)
    lines, all_clean = header(sanitizer), True
    for tool in args.tools:
        print(f"{tool} …", file=sys.stderr)
        options = ["--target-processes", "application-only", "--error-exitcode", "9", *TOOLS[tool]]
        command = [sanitizer, "--tool", tool, *options, *inner]
        started = time.perf_counter()
        code, said = check(tool, command, args.timeout)
        clean, told = summary(tool, code, said, time.perf_counter() - started)
        all_clean, lines = all_clean and clean, [*lines, *told]
        args.log.write_text("\n".join(lines))  # what is known stays, whatever the next tool does
        print(told[0])
    raise SystemExit(0 if all_clean else 1)


if __name__ == "__main__":
    main()
