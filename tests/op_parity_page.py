"""docs/op_parity.md out of what tests/op_parity.py has stored.

python tests/op_parity_page.py [STORE …] > docs/op_parity.md
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from op_parity import DEFECTS, STORE, Outcome, stored

HEAD = """# Operators

torch's own database of operators (OpInfo) through the routes of graft: samples of each entry, compared with eager in
values, in what is left in its inputs, and in whose memory results are. An entry counts by the worst of its samples.
`python tests/op_parity.py` runs it, `python tests/op_parity_page.py` makes this page. `graft` is
`torch.compile(backend="graft")`. On a CPU, `cuda_graph` makes direct calls in place of replays. Rows with fewer
entries are samples, as compiling takes seconds on those routes. In rows of torch 2.11, entries are missing that came
behind a failed capture in the same process (torch does not undo one) or ran out of time, and those whose outcome has
been changed since (`unsafe_split`, `unsafe_chunk`, some of `fft`, two attention kernels).

- `same`: as in eager. `told`: the report names the difference (random numbers of Inductor's, memory that nobody
  wrote). `refused`: an error of graft's, with its reason.
- `raw`: an error that is not graft's. `wrong`: other values, and no word. `crash`: the process ended. These three are
  defects. Known: on a GPU four operators in bfloat16 differ by more than assert_close allows, and were
  not compared with float64 there. `masked_select` has been mended since (masks that broadcast).
"""
KINDS = ("same", "told", "refused", *DEFECTS)
COLUMNS = ("torch", "device", "route", "dtype", "entries", "samples", *KINDS)


def rows(found: Sequence[Outcome]) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for one in found:
        if one.outcome != "no sample":
            groups.setdefault((one.torch, one.device, one.route, one.dtype), []).append(one)
    for key, group in sorted(groups.items()):
        counts = Counter(one.outcome for one in group)
        numbers = (len(group), sum(one.samples for one in group), *(counts[kind] for kind in KINDS))
        yield f"| {' | '.join(map(str, (*key, *numbers)))} |"


def plain(why: str) -> str:
    """Without what differs from one run to the next: lines of the script, and places in a table's row."""
    return re.sub(r" \(op_parity\.py:\d+\)", "", why).replace("|", " ")


def reasons(found: Sequence[Outcome], kind: str) -> Iterator[str]:
    """Each reason once, with the entries it is about and where."""
    places: dict[str, dict[str, set[str]]] = {}
    for one in found:
        if one.outcome == kind:
            entries = places.setdefault(plain(one.why), {})
            entries.setdefault(one.op, set()).add(f"{one.route} {one.dtype} {one.device} {one.torch}")
    for why, entries in sorted(places.items()):
        everywhere = sorted(set.union(*entries.values()))
        yield f"- {why or 'no word'}: {', '.join(f'`{op}`' for op in sorted(entries))} ({'; '.join(everywhere)})"


def table(found: Sequence[Outcome]) -> str:
    lines = [HEAD, f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", *rows(found)]
    for kind in KINDS[1:]:
        told = list(reasons(found, kind))
        if told:
            lines += ["", f"## {kind.capitalize()}", "", *told]
    return "\n".join(lines)


if __name__ == "__main__":
    stores = [Path(name) for name in sys.argv[1:]] or [STORE]
    print(table([one for store in stores for one in stored(store).values()]))
