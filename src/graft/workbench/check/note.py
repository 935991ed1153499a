"""The iteration note of one transform as Markdown, filled in from the run: what a reviewer asks for."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch.fx import Graph

from graft.base.device_memory import size_text
from graft.base.errors import UsageError
from graft.base.files import write_whole
from graft.ir.io.text import target_text
from graft.ir.nodes import calls
from graft.ops import OPS
from graft.passes.config import PipelineConfig
from graft.passes.registry import TransformRegistry
from graft.passes.report import TransformRecord
from graft.workbench.check.negative_tests import negative_tests, own_files
from graft.workbench.check.results import CheckReport, TransformCheck
from graft.workbench.check.risks import open_risks
from graft.workbench.check.trial import CheckTrial
from graft.workbench.check.written import Home, shown
from graft.workbench.diff_runs import folded
from graft.workbench.diff_text import counted
from graft.workbench.discover.savings import cost, machine_of, sizes_for

TOKENS = (1, 512)  # in a step


def write_note(file: Path, text: str) -> None:
    """Whole or not at all."""
    write_whole(
        file, text, lambda error: UsageError(f"the note cannot be written to {file}: {error}; choose another place")
    )


def note_text(trial: CheckTrial, report: CheckReport, config: PipelineConfig, home: Home) -> str:
    (checked,) = report.checks
    record = trial.run.report.transforms[checked.name]
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    lines = [
        f"# {checked.name} on {report.model}: {'accepted' if report.ok else 'not accepted'}",
        "",
        f"{report.dtype} on {report.device}; {versions}.",
        *section("Candidate", candidate(record)),
        *section("Path", path(record, config, home, trial)),
        *section("Rationale", rationale(record, trial)),
        *section("Graph validation", validation(checked, report)),
        *section("Summary before and after", before_and_after(record, report, trial)),
        *section("Tests", [*tests(checked.name, home), *as_run(checked)]),
        *section("Open risks", open_risks(record, report, trial)),
    ]
    return "\n".join(lines) + "\n"


def section(title: str, body: Iterable[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    yield from body


def doc_of(name: str) -> str:
    return inspect.getdoc(TransformRegistry.get(name)) or ""


def candidate(record: TransformRecord) -> Iterator[str]:
    """What is fused, in the author's words, and where."""
    words = doc_of(record.name).split("\n\n")
    yield words[0].replace("\n", " ")
    graphs = [part for part in words if "before:" in part]
    yield from ("", "```text", *(line for part in graphs for line in part.splitlines()), "```")
    if not record.matches:
        yield f"\nIt matched nowhere: {record.reason or record.status}."
        return
    yield f"\n{counted(len(record.matches), 'match')}:\n"
    yield from (f"- {site}" for site in folded(match.module or "the root" for match in record.matches))
    patterns = Counter(match.pattern for match in record.matches if match.pattern)
    if patterns:
        yield f"\nPatterns: {', '.join(f'`{name}` × {count}' for name, count in patterns.items())}."


def path(record: TransformRecord, config: PipelineConfig, home: Home, trial: CheckTrial) -> Iterator[str]:
    """Which way was taken: the transform, the ops it makes, the kernels there are for them."""
    settings = config.transforms[record.name]
    given = (("after", settings.after), ("before", settings.before))
    order = "; ".join(f"{kind} {', '.join(names)}" for kind, names in given if names)
    site = f"`{shown(home.file, home.root)}`, stage {settings.stage.value}"
    yield f"- transform: {site}{f' ({order})' if order else ''}"
    made = Counter(made_ops(record, trial))
    for name, count in made.items():
        op = OPS.get(name.removeprefix("graft."))
        if op is None:
            yield f"- makes `{name}` × {count}: torch's own"
        else:
            kernels = ", ".join(f"{kernel.name} ({kernel.kind})" for kernel in op.table)
            yield f"- makes `{name}` × {count}: an op of graft with the kernels {kernels}"


def made_ops(record: TransformRecord, trial: CheckTrial) -> list[str]:
    if not record.matches:
        return []
    names = {name for match in record.matches for name in match.made}
    _, after = trial.graphs.around(record.name)
    return [target_text(node.target) for node in calls(after.graph) if node.name in names]


def rationale(record: TransformRecord, trial: CheckTrial) -> Iterator[str]:
    """What it saves, by the recorded shapes, and what the author says about numerics."""
    if record.matches:
        before, after = (gm.graph for gm in trial.graphs.around(record.name))
        yield "| tokens in a step | launches | bytes moved | estimated µs |"
        yield "|---|---|---|---|"
        yield from (saving_row(before, after, tokens) for tokens in TOKENS)
        machine = machine_of()
        costs = f"{machine.bandwidth_gb_s:.0f} GB/s and {machine.launch_us} µs a launch, {machine.source}"
        yield f"\nOf the whole graph, batch 1; {costs}. An estimate: nothing was timed."
    doc = " ".join(doc_of(record.name).split())
    if "Numerics:" in doc:
        yield f"\nNumerics: {doc.partition('Numerics:')[2].strip()}"


def saving_row(before: Graph, after: Graph, tokens: int) -> str:
    costs = [cost(graph.nodes, sizes_for(graph, tokens)) for graph in (before, after)]
    machine = machine_of()
    times = [machine.microseconds(*one) for one in costs]
    (launches, moved), (launches_after, moved_after) = costs
    return (
        f"| {tokens} | {launches} → {launches_after} | {size_text(moved)} → {size_text(moved_after)}"
        f" | {times[0]:.1f} → {times[1]:.1f} |"
    )


def validation(checked: TransformCheck, report: CheckReport) -> Iterator[str]:
    yield "| check | verdict | why |"
    yield "|---|---|---|"
    for line in (*checked.lines, *report.whole):
        yield f"| {line.check} | {line.verdict} | {cell(line.reason)} |"
    found = report.bisection
    if found is not None:
        site = f"match {found.number} of {found.matches}, {found.match}" if found.match else found.why_no_match
        yield f"\nFirst bad transform: `{found.transform}` ({site}); {found.runs} runs, at most {found.bound}."


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def before_and_after(record: TransformRecord, report: CheckReport, trial: CheckTrial) -> Iterator[str]:
    yield f"`{record.summary}`"
    if record.matches:
        around = trial.graphs.around(record.name)
        counts = [Counter(target_text(node.target) for node in calls(gm.graph)) for gm in around]
        yield "\n| op | before | after |"
        yield "|---|---|---|"
        yield f"| all nodes | {record.nodes_before} | {record.nodes_after} |"
        for op in sorted({*counts[0], *counts[1]}):
            if counts[0][op] != counts[1][op]:
                yield f"| `{op}` | {counts[0][op]} | {counts[1][op]} |"
    if not report.baseline:
        yield "\nNo baseline was given (`--baseline DIR`), so there is nothing to say about an earlier version."
        return
    yield f"\nAgainst the baseline `{report.baseline}`:\n"
    for change in report.changes:
        yield f"- {change.transform}: **{', '.join(change.kinds)}**{f'; {change.reason}' if change.reason else ''}"


def tests(name: str, home: Home) -> Iterator[str]:
    if home.tests is None:
        yield "There is no tests folder beside this transform."
        return
    found = negative_tests(name, home.tests)
    if found is None:
        yield "**No test says what it must not fuse.**"
    else:
        yield f"Must not fuse ({found.how}):\n"
        yield from (f"- `{test}`" for test in found.tests)
    files = own_files(name, home.tests, found)
    if files:
        yield "\n```bash"
        yield f"python -m pytest {' '.join(shown(file, home.root) for file in files)}"
        yield "```"


def as_run(checked: TransformCheck) -> Iterator[str]:
    if checked.tests is None:
        yield "\nNot run with this note (`--run-tests`)."
        return
    yield f"\nAs run: {checked.tests.problem or checked.tests.counts} in {checked.tests.seconds:.1f} s."
    yield from (f"- failed: `{text}`" for text in checked.tests.failures)
