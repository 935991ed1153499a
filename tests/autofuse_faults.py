"""Plants faults in the files that `graft autofuse` generates, one at a time, and holds that its trial finds each.

    python tests/autofuse_faults.py              every fault of tests/cases/generated_faults.py; the exit status is
                                                 the number not found
    python tests/autofuse_faults.py native.h     those with this in their titles
    python tests/autofuse_faults.py --sound      every subject without a fault: the trial must pass

Each is judged by the parts of the trial itself up to the clock, in a process forked from one that has imported torch:
the generated tests, the kernels by themselves, and for candidates of a model the review list and two engines.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
os.environ.setdefault("GRAFT_CXXFLAGS", "-O1")
sys.path.append(str(Path(__file__).parent / "cases"))

# for the forked processes
import pytest  # noqa: F401
import sympy  # noqa: F401
import triton  # noqa: F401

import graft.workbench.check  # noqa: F401
from generated_faults import FAULTS, GeneratedFault
from graft.workbench.autofuse import AutofuseRequest
from graft.workbench.autofuse.engines import candidates_of
from graft.workbench.autofuse.trial import Findings, TrialOrder, Wrong, check_alone, check_in_model
from graft.workbench.autofuse.writing import CandidateWriter
from graft.workbench.discover import Discovery
from graft.workbench.scaffold.destination import Destination
from interpreter import patch_once
from row_cases import RowPattern, write

LIBRARY = ("fuse_rms_norm", "fuse_swiglu", "fuse_rope", "merge_qkv", "merge_gate_up", "merge_gemms")
OFF = tuple(f"transforms.{name}.enabled=false" for name in LIBRARY)
REQUEST = AutofuseRequest(
    "tiny-llama", Path("unused"), device="cpu", backend="native", dtype="float32", sets=OFF, own=True, prompt=16
)
LIMIT = 300


def order_for(name: str, op: str, shapes: dict[str, str], place: Destination) -> TrialOrder:
    return TrialOrder(
        REQUEST.model, f"fuse_{name}", op, shapes, (str(place.source),), str(place.test(f"fuse_{name}")),
        str(place.root / "note.md"), "cpu", REQUEST.backend, REQUEST.dtype, None, OFF, (), REQUEST.prompt,
        4, 3, False,
    )  # fmt: skip


def write_subject(subject: RowPattern | str, folder: Path, found: Discovery) -> tuple[TrialOrder, Destination]:
    place = Destination.in_package(folder / "fault-trial")
    if isinstance(subject, RowPattern):
        write(subject, place.root)
        return order_for(subject.name, subject.name, subject.shapes, place), place
    writer = CandidateWriter(next(one for one in found.candidates if one.title == subject), found.model, own=True)
    written, _, _ = writer.trial(place)
    return order_for(writer.candidate.function_name, written.op, writer.shapes(), place), place


def judged(subject: RowPattern | str, order: TrialOrder, findings: Findings) -> None:
    """As the trial does, which ends at the first that fails."""
    try:
        check_alone(order, findings)
        if isinstance(subject, str):
            check_in_model(order, findings)
    except Wrong as wrong:
        findings.data["failure"] = str(wrong)
        findings.save()


def in_its_own_process(work: Callable[[], None], log: Path) -> int:
    child = os.fork()
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            work()
        except BaseException as error:  # noqa: BLE001  whatever it is, it is told
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(subject: RowPattern | str, fault: GeneratedFault | None, found: Discovery) -> str:
    """How the trial ended: '' where it passed."""
    with tempfile.TemporaryDirectory(prefix="graft-fault-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"

        def work() -> None:
            order, place = write_subject(subject, Path(folder), found)
            if fault is not None:
                fault.plant(place, order.transform.removeprefix("fuse_"))
            sys.path.insert(0, str(place.source.parent))
            judged(subject, order, Findings(result))

        status = in_its_own_process(work, log)
        data = json.loads(result.read_text()) if result.is_file() else {"failure": "", "phase": "before the trial"}
        if data["phase"] == "before the trial":
            raise RuntimeError(log.read_text()[-3000:])
        if status:
            return f"ended with {status} in its part {data['phase']}: {' '.join(log.read_text().split())[-200:]}"
        return data["failure"]


def main(words: list[str]) -> int:
    patch_once()
    found = candidates_of(REQUEST)
    if words == ["--sound"]:
        failed = 0
        for subject in {str(fault.subject): fault.subject for fault in FAULTS}.values():
            told = outcome(subject, None, found)
            failed += bool(told)
            print(f"{subject if isinstance(subject, str) else subject.name}: {told or 'passes'}", flush=True)
        return failed
    chosen = [fault for fault in FAULTS if not words or any(word in fault.title for word in words)]
    lost = 0
    for number, fault in enumerate(chosen, 1):
        told = outcome(fault.subject, fault, found)
        lost += not told
        print(
            f"{number:3}/{len(chosen)} {'found' if told else 'NOT FOUND'}  {fault.title}\n        {told[:160]}",
            flush=True,
        )
    print(f"{len(chosen) - lost} of {len(chosen)} found")
    return lost


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
