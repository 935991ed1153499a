"""torch's database of operators (OpInfo) through graft's routes: each sample as in eager, or graft says why not.

    python tests/op_parity.py --route eager --dtype float32      # runs what build/op_parity.jsonl does not have yet
    python tests/op_parity.py --table > docs/op_parity.md         # the table of all results so far

A line is written before an entry runs and once more after it, so that one at which the process ended is seen.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.utils import _pytree as pytree

import graft
from graft.base.errors import GraftError

sys.path.append(str(Path(__file__).parent / "peers"))
from peer_compare import compare, observe

ROUTES = ("eager", "cuda_graph", "inductor", "graft")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}
DEFECTS = ("raw", "wrong", "crash")
STORE = Path("build") / "op_parity.jsonl"
TOLD = ("uninitialised memory", "samples", "random")

HEAD = """# Operators

torch's own database of operators (OpInfo, torch {version}) through the routes of graft: the first sample of each
entry, compared with eager in values, in what is left in its inputs, and in whose memory results are. `python
tests/op_parity.py` makes this page. A row counts the entries that were run: an entry takes seconds on the routes
through Inductor (`inductor`, and `graft` for `torch.compile(backend="graft")`), so that some rows are samples.
Without a GPU, `cuda_graph` makes direct calls in place of replays.

- `same`: as in eager. `told`: the report names the difference (random numbers of Inductor's, memory that nobody
  wrote). `refused`: an error of graft's, with its reason.
- `raw`: an error that is not graft's. `wrong`: other values, and no word. `crash`: the process ended. These three are
  defects.
"""


@dataclass(frozen=True)
class Outcome:
    op: str
    route: str
    dtype: str
    outcome: str
    why: str = ""


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


def samples(op: Any, dtype: torch.dtype, count: int) -> list[Sample]:
    torch.manual_seed(0)
    return [Sample(op.op, sample) for sample in islice(op.sample_inputs("cpu", dtype), count)]


def given(sample: Sample) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.detach().clone() for tensor in sample.tensors)


def run_route(sample: Sample, route: str) -> tuple[Any, Sequence[str]]:
    """What a call leaves behind on a route, and what the report says."""
    inputs = given(sample)
    if route == "graft":
        torch._dynamo.reset()
        compiled = torch.compile(sample, backend="graft")
        torch.manual_seed(0)
        return observe(compiled, inputs, None), ()
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
        said = [note for note in notes if any(word in note for word in TOLD)]
        return ("told", said[0]) if said else ("wrong", first_line(error))
    return "same", ""


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:160]


def outcome_of(op: Any, name: str, route: str, dtype: str, count: int = 1) -> Outcome:
    """The worst of the samples."""
    if DTYPES[dtype] not in op.dtypes:
        return Outcome(name, route, dtype, "no sample", f"no {dtype}")
    order = ("no sample", "same", "told", "refused", "raw", "wrong")
    found = [tried(sample, route) for sample in samples(op, DTYPES[dtype], count)] or [("no sample", "none")]
    return Outcome(name, route, dtype, *max(found, key=lambda pair: order.index(pair[0])))


def stored(path: Path = STORE) -> dict[tuple[str, str, str], Outcome]:
    """The last line for each entry counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    return {(one.op, one.route, one.dtype): one for one in found}


def note(file: TextIO, one: Outcome) -> Outcome:
    file.write(json.dumps(asdict(one)) + "\n")
    file.flush()
    return one


def run_all(route: str, dtype: str, count: int, every: int, path: Path) -> Iterator[Outcome]:
    known = stored(path)
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        for name, op in islice(database().items(), 0, None, every):
            if (name, route, dtype) in known:
                continue
            note(file, Outcome(name, route, dtype, "crash"))
            yield note(file, outcome_of(op, name, route, dtype, count))


def table(found: Sequence[Outcome]) -> str:
    """As docs/op_parity.md has it."""
    kinds = ("same", "told", "refused", *DEFECTS)
    head = HEAD.format(version=torch.__version__.partition("+")[0])
    lines = [head, f"| route | dtype | entries | {' | '.join(kinds)} |", f"|---|---|{'---|' * (len(kinds) + 1)}"]
    groups: dict[tuple[str, str], Counter[str]] = {}
    for one in found:
        if one.outcome != "no sample":
            groups.setdefault((one.route, one.dtype), Counter())[one.outcome] += 1
    for (route, dtype), counts in sorted(groups.items()):
        numbers = " | ".join(str(counts[kind]) for kind in kinds)
        lines.append(f"| {route} | {dtype} | {sum(counts.values())} | {numbers} |")
    for kind in kinds[1:]:
        reasons: dict[str, list[str]] = {}
        for one in found:
            if one.outcome == kind:
                reasons.setdefault(one.why, []).append(f"`{one.op}` ({one.route}, {one.dtype})")
        if reasons:
            lines += ["", f"## {kind.capitalize()}", ""]
            lines += [f"- {why.replace('|', ' ')}: {', '.join(ops)}" for why, ops in sorted(reasons.items())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--route", choices=ROUTES, default="eager")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--samples", type=int, default=1, help="of each entry")
    parser.add_argument("--every", type=int, default=1, help="which entries: each, or one of so many")
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--table", action="store_true", help="print the table of what is stored")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    if asked.table:
        print(table(list(stored(asked.store).values())))
        return
    for one in run_all(asked.route, asked.dtype, asked.samples, asked.every, asked.store):
        if one.outcome not in ("same", "no sample"):
            print(f"{one.outcome:8} {one.op}: {one.why}", flush=True)


if __name__ == "__main__":
    main()
