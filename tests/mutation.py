"""Plants faults in the code, one at a time, and holds that the short run finds each.

    python tests/mutation.py             every fault of tests/faults.py; the exit status is the number not found
    python tests/mutation.py engine      those in files with this in their names
    python tests/mutation.py --sound     the tests that are named, on the code as it is: all must pass

A fault is planted in a copy of src/. The tests that are named for it run as in `make test`, less what is marked
exhaustive, in a process forked after torch and transformers were imported, which takes longer than most of them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
os.environ.setdefault("GRAFT_CXXFLAGS", "-O1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined

import pytest

# for the forked processes
import sympy  # noqa: F401
import triton  # noqa: F401

from fault import Fault
from faults import FAULTS

ROOT = Path(__file__).parents[1]


def run_tests(source: Path, tests: tuple[str, ...], log: Path) -> int:
    """pytest's exit status over these tests with graft from `source`."""
    child = os.fork()
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(ROOT)
        sys.path[:0] = [str(source), str(ROOT)]  # tests import benchmarks, too
        os.environ["PYTHONPATH"] = str(source)
        status = pytest.main(["-x", "-p", "no:xdist", "-p", "no:cacheprovider", *tests])
        sys.stdout.flush()
        os._exit(int(status))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def planted(fault: Fault, source: Path, log: Path) -> str:
    """What became of a fault: "found", or why not."""
    file = source / "graft" / fault.file
    right = file.read_text()
    if right.count(fault.right) != 1:
        return f"the text is there {right.count(fault.right)} times"
    file.write_text(right.replace(fault.right, fault.wrong))
    try:
        status = run_tests(source, fault.arguments, log)
    finally:
        file.write_text(right)
    if status == pytest.ExitCode.TESTS_FAILED:
        return "found"
    return "NOT FOUND" if status == pytest.ExitCode.OK else f"pytest ended with {status}: {log.read_text()[-500:]}"


def main(words: list[str]) -> int:
    chosen = [fault for fault in FAULTS if not words or any(word in fault.file for word in words)]
    with tempfile.TemporaryDirectory(prefix="graft-faults-") as folder:
        source, log = Path(folder) / "src", Path(folder) / "log"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        if words == ["--sound"]:
            runs = [fault.arguments for fault in FAULTS]
            alone = dict.fromkeys(run for run in runs if "-k" in run)
            together = dict.fromkeys(test for run in runs if "-k" not in run for test in run)
            failed = [run for run in (tuple(together), *alone) if run_tests(source, run, log)]
            print(*failed, log.read_text()[-3000:] if failed else "all pass", sep="\n")
            return len(failed)
        lost = 0
        for number, fault in enumerate(chosen, 1):
            told = planted(fault, source, log)
            lost += told != "found"
            line = " ".join(fault.wrong.split())
            print(f"{number:3}/{len(chosen)} {told:10} {fault.file}: {line}", flush=True)
    print(f"{len(chosen) - lost} of {len(chosen)} found")
    return lost


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
