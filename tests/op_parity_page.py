"""docs/op_parity.md out of what tests/op_parity.py has stored.

python tests/op_parity_page.py [STORE …]     rows and reasons that the stores know nothing of stay
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from op_parity import DEFECTS, STORE, Outcome, stored

HEAD = """# Operators

torch's own database of operators (OpInfo) through the routes of graft: samples of each entry, compared with eager in
values, in what is left in its inputs, and in whose memory results are. An entry counts by the worst of its samples.
`python tests/op_parity.py` runs it, `python tests/op_parity_page.py` makes this page; rows that it has no results for
stay as they are. `graft` is `torch.compile(backend="graft")`. On a CPU, `cuda_graph` makes direct calls in place of
replays. On `eager` and `cuda_graph` of a CPU up to twelve samples of each entry ran, else the first, as compiling one
takes seconds; rows of one torch and dtype with fewer entries are a choice of them, for that reason. Those of torch
2.13 on `inductor` and `graft` had its C++ compiled at -O0.
In rows of torch 2.11, entries are missing that came behind a failed capture in the same process (torch does not undo
one), found another process's memory or ran out of time, and those whose outcome has been changed since
(`unsafe_split`, `unsafe_chunk`, some of `fft`, two attention kernels).

- `same`: as in eager, or in 16 bits as near to float64 as eager is (three times its error at most). `told`: the
  report names the difference (random numbers of Inductor's, memory that nobody wrote). `refused`: an error of
  graft's, with its reason.
- `raw`: an error that is not graft's. `wrong`: other values, and no word. `crash`: the process ended. These three are
  defects.
"""
KINDS = ("same", "told", "refused", *DEFECTS)
PAGE = Path(__file__).parents[1] / "docs" / "op_parity.md"
COLUMNS = ("torch", "device", "route", "dtype", "entries", "samples", *KINDS)


@dataclass(frozen=True)
class Page:
    """What a page says that was made before: its rows, and the reasons with the places that they hold at."""

    rows: dict[tuple[str, ...], str]
    reasons: dict[str, dict[str, tuple[str, set[str]]]]  # kind → reason → entries as text, places

    def without(self, found: Sequence[Outcome]) -> Page:
        """Less what is known anew."""
        anew = {(one.torch, one.device, one.route, one.dtype) for one in found}
        gone = {f"{route} {dtype} {device} {torch}" for torch, device, route, dtype in anew}
        kept = {
            kind: {why: (ops, places - gone) for why, (ops, places) in known.items() if places - gone}
            for kind, known in self.reasons.items()
        }
        return Page({key: row for key, row in self.rows.items() if key not in anew}, kept)


def read_page(text: str) -> Page:
    found, kind = Page({}, {}), ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if line.startswith("| ") and len(cells) == len(COLUMNS) and cells[0] != COLUMNS[0]:
            found.rows[tuple(cells[:4])] = line
        elif line.startswith("## "):
            kind = line[3:].lower()
        elif kind and (parts := re.fullmatch(r"- (.*): (`.*`) \(([^()]*)\)", line)):
            why, entries, places = parts.groups()
            found.reasons.setdefault(kind, {})[why] = entries, set(places.split("; "))
    return found


def rows(found: Sequence[Outcome], kept: Page) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for one in found:
        if one.outcome != "no sample":
            groups.setdefault((one.torch, one.device, one.route, one.dtype), []).append(one)
    lines = dict(kept.rows)
    for key, group in groups.items():
        counts = Counter(one.outcome for one in group)
        numbers = (len(group), sum(one.samples for one in group), *(counts[kind] for kind in KINDS))
        lines[key] = f"| {' | '.join(map(str, (*key, *numbers)))} |"
    yield from (lines[key] for key in sorted(lines))


def plain(why: str) -> str:
    """Without what differs from one run to the next: lines of the script, and places in a table's row."""
    return re.sub(r" \(op_parity\.py:\d+\)", "", why).replace("|", " ")


def reasons(found: Sequence[Outcome], kind: str, kept: Page) -> Iterator[str]:
    """Each reason once, with the entries it is about and where."""
    entries = {why: set(re.findall("`([^`]+)`", ops)) for why, (ops, _) in kept.reasons.get(kind, {}).items()}
    places = {why: set(known) for why, (_, known) in kept.reasons.get(kind, {}).items()}
    for one in found:
        if one.outcome == kind:
            why = plain(one.why) or "no word"
            entries.setdefault(why, set()).add(one.op)
            places.setdefault(why, set()).add(f"{one.route} {one.dtype} {one.device} {one.torch}")
    for why in sorted(entries):
        yield f"- {why}: {', '.join(f'`{op}`' for op in sorted(entries[why]))} ({'; '.join(sorted(places[why]))})"


def table(found: Sequence[Outcome], kept: Page | None = None) -> str:
    kept = (kept or Page({}, {})).without(found)
    lines = [HEAD, f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", *rows(found, kept)]
    for kind in KINDS[1:]:
        told = list(reasons(found, kind, kept))
        if told:
            lines += ["", f"## {kind.capitalize()}", "", *told]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    stores = [Path(name) for name in sys.argv[1:]] or [STORE]
    results = [one for store in stores for one in stored(store).values()]
    PAGE.write_text(table(results, read_page(PAGE.read_text())))
