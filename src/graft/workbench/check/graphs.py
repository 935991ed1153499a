"""What a run says about a transform: its matches, its dumps, the numeric checks, what became of the metadata."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule

from graft.base.errors import DumpError, UnknownTransform
from graft.ir.nodes import module_path, source_line
from graft.passes.pipeline import order_transforms
from graft.passes.registry import TransformRegistry
from graft.passes.report import TransformRecord
from graft.testing.metadata import kept_problems, node_problems
from graft.workbench.check.line import CheckLine
from graft.workbench.check.steps import StepGraphs
from graft.workbench.check.trial import CheckTrial

OFF = "off by default"  # how the registry says that it has no count


def run_lines(trial: CheckTrial, name: str, *, wanted: bool = False) -> list[CheckLine]:
    """wanted: the transform was asked for by name, so no match at all needs a reason."""
    record = trial.run.report.transforms.get(name)
    if record is None:
        raise UnknownTransform(name, trial.run.report.transforms, str(trial.run.folder))
    if record.status == "rolled_back":
        return [CheckLine("matches", "fail", f"it failed and was taken back: {record.reason}")]
    lines = [matches_line(trial, record, wanted)]
    if not record.matches:
        why = f"nothing to look at: {record.reason or record.status}"
        return [*lines, *(CheckLine(check, "skip", why) for check in ("dumps", "numerics", "ops", "metadata"))]
    dumps = dumps_line(trial.graphs, name)
    readable = trial.graphs.readable(name)
    metadata = (
        metadata_line(trial.graphs, record) if readable else CheckLine("metadata", "skip", "its dumps cannot be read")
    )
    return [*lines, dumps, numerics_line(trial, record), ops_line(trial, record), metadata]


def matches_line(trial: CheckTrial, record: TransformRecord, wanted: bool) -> CheckLine:
    """As often as the registry says for this family and number of layers."""
    found, family = len(record.matches), trial.family
    if record.status in ("disabled", "skipped"):
        return CheckLine("matches", "skip", f"{record.status}: {record.reason}" if record.reason else record.status)
    counted = family is not None and record.name in {*family.expect, *family.expect_gpu, *family.absent}
    if wanted and not found and not counted:
        model = trial.run.manifest.model
        return CheckLine(
            "matches", "fail", f"none: {record.reason}; choose a --model that has what it looks for, not {model}"
        )
    if family is None or trial.layers is None:
        return CheckLine("matches", "skip", f"{found}; {trial.run.manifest.model} is of no family in the registry")
    expected = family.expected_matches(trial.layers, gpu=trial.on_gpu).get(record.name)
    formula = {**family.expect, **(family.expect_gpu if trial.on_gpu else {})}.get(record.name)
    why = family.absent.get(record.name, "")
    if expected is None:
        return CheckLine("matches", "skip", f"{found}; the registry does not count it for {family.name}")
    if formula is None and why == OFF:
        return CheckLine("matches", "skip", f"{found}; it is {OFF}, so the registry has no count")
    if formula is None and found and trial.run.manifest.dtype != "float32":
        return CheckLine("matches", "skip", f"{found}; the registry counts float32 models ({why})")
    if found == expected:
        return CheckLine(
            "matches", "pass", f"{found} = {formula} (L = {trial.layers})" if formula else f"none: {why}"
        )
    missing = [name for name in earlier_counted(trial, record.name) if not trial.config.transforms[name].enabled]
    told = f"{found}, and {family.name} expects {expected}" + (
        f" = {formula} (L = {trial.layers})" if formula else ""
    )
    if missing:
        return CheckLine("matches", "skip", f"{told} with {', '.join(missing)}, which is off here")
    return CheckLine("matches", "fail", f"{told}{f'; {record.reason}' if record.reason else ''}")


def earlier_counted(trial: CheckTrial, name: str) -> list[str]:
    """The transforms before this one that match this family by default."""
    assert trial.family is not None
    order = order_transforms(trial.config)
    counted = {*trial.family.expect, *(trial.family.expect_gpu if trial.on_gpu else ())}
    return [other for other in order[: order.index(name)] if other in counted]


def dumps_line(graphs: StepGraphs, name: str) -> CheckLine:
    """The graphs before and after are there, and load back as graphs that differ."""
    try:
        before, after = graphs.run.around(name)
        counts = [len(graphs.at(step).graph.nodes) for step in (before, after)]
    except (DumpError, OSError) as error:
        return CheckLine("dumps", "fail", str(error))
    if before.text() == after.text().replace(after.transform, before.transform):
        return CheckLine("dumps", "fail", f"{after.stem.name} is as {before.stem.name}, although it matched")
    return CheckLine(
        "dumps", "pass", f"{before.stem.name} → {after.stem.name}: {counts[0]} → {counts[1]} nodes, load back"
    )


def numerics_line(trial: CheckTrial, record: TransformRecord) -> CheckLine:
    """Every match against what it replaced, on fresh inputs of the recorded shapes and dtypes."""
    wrong = trial.wrong_matches.get(record.name)
    total = len(record.matches)
    if wrong:
        return CheckLine("numerics", "fail", f"{len(wrong)} of {total} matches: {wrong[0].reason}")
    if TransformRegistry.get(record.name).uncheckable:
        return CheckLine(
            "numerics", "skip", f"matches cannot be run alone: {TransformRegistry.get(record.name).uncheckable}"
        )
    checks = [match.numeric_check for match in record.matches if match.numeric_check is not None]
    if record.unchecked:
        return CheckLine("numerics", "fail", f"{total - len(checks)} of {total} matches: {record.unchecked}")
    if len(checks) < total:
        return CheckLine("numerics", "skip", "dumped without numeric checks; dump again with --set verify=matches")
    worst = max(checks, key=lambda check: check.share)
    told = f"{total} of {total} matches; worst {worst.error:.1e} of {worst.limit:.1e} allowed ({worst.inputs} inputs)"
    kinds = len(set(checks))
    trials = f"; {sum(check.trials for check in set(checks))} trials of {kinds} kind{'s' if kinds > 1 else ''}"
    return CheckLine("numerics", "pass", told + trials)


def ops_line(trial: CheckTrial, record: TransformRecord) -> CheckLine:
    """The ops that it brings keep to their schemas."""
    if trial.captured is None:
        return CheckLine("ops", "skip", "read from dumps; check the model itself to run its ops")
    ops = trial.ops.get(record.name, {})
    wrong = [f"{op} {problem}" for op, problems in ops.items() for problem in problems]
    if wrong:
        return CheckLine("ops", "fail", "; ".join(wrong))
    told = f"{', '.join(ops)}: no undeclared write or alias, the same twice" if ops else "torch's and graft's own"
    return CheckLine("ops", "pass", told)


def metadata_line(graphs: StepGraphs, record: TransformRecord) -> CheckLine:
    problems = metadata_problems(graphs, record.name)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return CheckLine(
            "metadata", "fail", f"{problems[0]}{more}; make nodes with Editor.call(…, like=<what it replaces>)"
        )
    made = sum(len(match.made) for match in record.matches)
    return CheckLine(
        "metadata", "pass", f"new nodes: {made}, with value, module, source line and maker; the others kept theirs"
    )


def metadata_problems(graphs: StepGraphs, name: str) -> list[str]:
    """Of nodes that the transform made, and of those that it left alone."""
    record = graphs.run.report.transforms[name]
    before, after = graphs.around(name)
    return [*made_problems(before, after, record), *left_problems(before, after, name)]


def made_problems(before: GraphModule, after: GraphModule, record: TransformRecord) -> Iterator[str]:
    present = {node.name: node for node in after.graph.nodes}
    sources = {node.name: node for node in before.graph.nodes}
    rebuilds = bool(TransformRegistry.get(record.name).uncheckable)
    for match in record.matches:
        for name in match.made:
            node = present.get(name)
            if node is None or node.op == "placeholder":  # an input is of no module
                continue
            known = {} if rebuilds and module_path(node) and source_line(node) else sources
            yield from node_problems(node, match, known, record.name)


def left_problems(before: GraphModule, after: GraphModule, name: str) -> list[str]:
    """A transform that changes what the graph computes gives other values, inputs and results to what it leaves."""
    return [] if TransformRegistry.get(name).uncheckable else list(kept_problems(before, after))
