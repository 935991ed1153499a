"""torch's database of operators (OpInfo) through graft's routes: each sample as in eager, or graft says why not.

    python tests/op_parity.py --route eager --dtype float32      # runs what build/op_parity.jsonl does not have yet
    python tests/op_parity.py --route inductor graft --jobs 16   # entry by entry, in so many processes
    python tests/op_parity.py --route inductor --unoptimized     # kernels as Inductor writes them, compiled at -O0
    python tests/op_parity_page.py                               # docs/op_parity.md with all results so far

A line is written before an entry runs and once more after it, so that one at which the process ended is seen; with
--jobs another process goes on behind it.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, TextIO

import torch
import torch._inductor.config
from torch.utils import _pytree as pytree

import graft
from graft.base.errors import GraftError
from graft.testing import assert_near_float64

sys.path.append(str(Path(__file__).parent / "peers"))
from peer_compare import compare, observe

ROUTES = ("eager", "cuda_graph", "inductor", "graft")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}
DEFECTS = ("raw", "wrong", "crash")
STORE = Path("build") / "op_parity.jsonl"
FAILED_CAPTURE = "cannot be captured"
TOLD = ("uninitialised memory", "samples", "random")


@dataclass(frozen=True)
class Outcome:
    op: str
    route: str
    dtype: str
    outcome: str
    why: str = ""
    device: str = "cpu"
    torch: str = torch.__version__.partition("+")[0]
    samples: int = 1  # as many as the entry had, of those asked for


class Sample(torch.nn.Module):
    """One sample as a program: its tensors are the arguments, all else is fixed."""

    def __init__(self, op: Callable[..., Any], sample: Any) -> None:
        super().__init__()
        self.op = op
        leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[place] for place in self.places]
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.op(first, *args, **kwargs)


def database() -> dict[str, Any]:
    """Every entry by its name; importing it takes 10 s. Entries that sample seed torch's generator themselves, which
    a graph refuses to do: here it is seeded before each call instead."""
    from torch.testing._internal import common_methods_invocations as known

    known.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in known.op_db}


def samples(op: Any, dtype: torch.dtype, count: int, device: str = "cpu") -> list[Sample]:
    torch.manual_seed(0)
    return [Sample(op.op, sample) for sample in islice(op.sample_inputs(device, dtype), count)]


def given(sample: Sample) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.detach().clone() for tensor in sample.tensors)


def run_route(sample: Sample, route: str) -> tuple[Any, Sequence[str]]:
    """What a call leaves behind on a route, and what the report says."""
    inputs = given(sample)
    if route == "graft":
        torch._dynamo.reset()
        backend = graft.Backend()
        compiled = torch.compile(sample, backend=backend)
        torch.manual_seed(0)
        seen = observe(compiled, inputs, None)
        return seen, [note for report in backend.reports for note in report.notes]
    compiled = graft.compile(sample, given(sample), backend=route)
    torch.manual_seed(0)
    return observe(compiled, inputs, None), compiled.report.notes


def tried(sample: Sample, route: str) -> tuple[str, str]:
    torch.manual_seed(0)
    try:
        expected = observe(sample, given(sample), None)
    except Exception as error:  # noqa: BLE001  (what eager cannot do is nobody's defect)
        return "no sample", f"eager: {type(error).__name__}"
    try:
        got, notes = run_route(sample, route)
    except GraftError as error:
        return "refused", first_line(error)
    except Exception as error:  # noqa: BLE001  (this is what is looked for)
        return "raw", f"{type(error).__name__}: {first_line(error)}"
    try:
        compare(got, expected, layouts=False, close=True)
    except AssertionError as error:
        if rounds_as_well(sample, got, expected):
            return "same", ""
        said = [note for note in notes if any(word in note for word in TOLD)]
        return ("told", said[0]) if said else ("wrong", first_line(error))
    return "same", ""


def rounds_as_well(sample: Sample, got: Any, expected: Any) -> bool:
    """Results in 16 bits that are not eager's, but as near to those in float64 as graft holds its own kernels to:
    Inductor rounds a chain of operators once, eager each of them, and neither is the other's yardstick."""
    if not any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in sample.tensors):
        return False
    wide = copy.copy(sample)
    wide.tensors = [tensor.double() if tensor.is_floating_point() else tensor for tensor in sample.tensors]
    try:
        exact = observe(wide, given(wide), None)
        compare(replace(got, results=[]), replace(expected, results=[]), layouts=False, close=True)
    except Exception:  # noqa: BLE001  (no float64 to compare with, or other inputs or memory)
        return False
    numbers = [(a, b) for a, b in zip(got.results, expected.results, strict=True) if not torch.is_tensor(b)]
    try:
        assert_near_float64(got.results, exact.results, like=expected.results)
    except AssertionError:
        return False
    return all(value == eager for value, eager in numbers)


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:160]


def outcome_of(op: Any, name: str, route: str, dtype: str, count: int = 1, device: str = "cpu") -> Outcome:
    """The worst of the samples."""
    if DTYPES[dtype] not in op.supported_dtypes(device):
        return Outcome(name, route, dtype, "no sample", f"no {dtype}", device)
    order = ("no sample", "same", "told", "refused", "raw", "wrong")
    found = [tried(sample, route) for sample in samples(op, DTYPES[dtype], count, device)]
    outcome, why = max(found or [("no sample", "none")], key=lambda pair: order.index(pair[0]))
    return Outcome(name, route, dtype, outcome, why, device, samples=len(found))


def stored(path: Path = STORE) -> dict[tuple[str, ...], Outcome]:
    """The last line for each entry counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    return {(one.op, one.route, one.dtype, one.device, one.torch): one for one in found}


def note(file: TextIO, one: Outcome) -> Outcome:
    file.write(json.dumps(asdict(one)) + "\n")
    file.flush()
    return one


def run_all(asked: argparse.Namespace) -> Iterator[Outcome]:
    """Every entry of this share that is not stored yet."""
    share, shares = map(int, asked.share.split("/"))
    known = stored(asked.store)
    asked.store.parent.mkdir(exist_ok=True)
    entries = list(islice(database().items(), share * asked.every, None, shares * asked.every))
    with asked.store.open("a") as file:
        for dtype, (name, op), route in product(asked.dtype, entries, asked.route):
            where = (route, dtype)
            if (name, *where, asked.device, Outcome.torch) in known:
                continue
            note(file, Outcome(name, *where, "crash", device=asked.device))
            faulthandler.dump_traceback_later(asked.limit, exit=True)
            found = note(file, outcome_of(op, name, *where, asked.samples, asked.device))
            faulthandler.cancel_dump_traceback_later()
            yield found
            if shares > 1 and found.outcome == "refused" and FAILED_CAPTURE in found.why:
                sys.exit(FAILED_CAPTURE)  # torch does not undo it; the next process goes on behind it


def run_jobs(jobs: int, options: Sequence[str], store: Path) -> None:
    """A process for each share; one that ended within an entry is begun again behind it."""
    own = [sys.executable, __file__, *options, "--jobs", "1"]
    shares = [[*own, "--share", f"{share}/{jobs}"] for share in range(jobs)]
    running = [(subprocess.Popen(share), size_of(store)) for share in shares]
    while running:
        process, size = running.pop(0)
        if process.wait():
            if size_of(store) == size:
                raise SystemExit(f"{process.args} ended with {process.returncode} ahead of its first entry")
            running.append((subprocess.Popen(process.args), size_of(store)))


def size_of(store: Path) -> int:
    return store.stat().st_size if store.exists() else 0


def compile_unoptimized(folder: Path) -> None:
    """A compiler for Inductor that takes -O0 for -O3, in 10 to 30 % less time: floating-point flags stay, so the
    kernels mean the same. Inductor precompiles its headers for compilers whose name it knows alone, so it is g++."""
    wrapper = folder.absolute() / "unoptimized" / "g++"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    wrapper.write_text('#!/bin/bash\nexec g++ "${@/#-O3/-O0}"\n')
    wrapper.chmod(0o755)
    torch._inductor.config.cpp.cxx = (None, str(wrapper))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--route", nargs="+", choices=ROUTES, default=["eager"])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--samples", type=int, default=1, help="of each entry")
    parser.add_argument("--every", type=int, default=1, help="which entries: each, or one of so many")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one entry, else it is a crash")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--share", default="0/1", help="which entries: the I-th of N shares")
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--unoptimized", action="store_true", help="compile Inductor's C++ at -O0")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    if asked.unoptimized:
        compile_unoptimized(asked.store.parent)
    if asked.jobs > 1:
        run_jobs(asked.jobs, sys.argv[1:], asked.store)
        return
    for one in run_all(asked):
        if one.outcome not in ("same", "no sample"):
            print(f"{one.outcome:8} {one.op}: {one.why}", flush=True)


if __name__ == "__main__":
    main()
