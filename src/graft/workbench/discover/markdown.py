"""Candidates in words: the lines that the terminal and Markdown share."""

from __future__ import annotations

from collections.abc import Iterator

from graft.workbench.discover.candidates import Candidate, Discovery, counted
from graft.workbench.discover.lookup import Existing
from graft.workbench.discover.measure import Measured
from graft.workbench.discover.savings import Estimate


def assumptions(found: Discovery) -> list[str]:
    """What the numbers stand on."""
    machine = found.machine
    steps = ", ".join(f"{us:.0f} µs at {counted(n)}" for us, n in zip(found.step_us, found.tokens, strict=True))
    return [
        f"assumed: {machine.bandwidth_gb_s:.0f} GB/s, {machine.launch_us:g} µs a launch, {machine.source}",
        f"sizes: {', '.join(found.sizes) or 'all static'}; the whole graph by this model: {steps}",
    ]


def heading(candidate: Candidate) -> str:
    saving = f"{candidate.saving_us:.1f} µs"
    return f"{candidate.id}  {candidate.recommendation}  {candidate.kind} × {candidate.count}  saves {saving}"


def details(candidate: Candidate) -> Iterator[tuple[str, list[str]]]:
    """Name and lines, in the order in which they are shown."""
    yield "calls", [candidate.title]
    yield "where", [", ".join(candidate.sites)]
    yield "estimate", [estimate_text(estimate) for estimate in candidate.estimates]
    if candidate.measured:
        yield "measured", [measured_text(one) for one in candidate.measured]
    yield "lookup", [existing_text(e) for e in candidate.existing] or ["not_found"]
    yield "why", [candidate.reason]
    yield "rating", [f"complexity {candidate.complexity}, numeric risk {candidate.numeric_risk}"]
    for name in ("strengths", "weaknesses", "risks"):
        lines = list(getattr(candidate, name))
        if lines:
            yield name, lines
    yield "one of them", list(candidate.nodes)


def estimate_text(e: Estimate) -> str:
    return (
        f"{counted(e.tokens)}: {e.launches_now} → {e.launches_after} launches,"
        f" {size(e.bytes_now)} → {size(e.bytes_after)}, {e.saving_us:.1f} µs ({e.share:.1%} of the step)"
    )


def measured_text(one: Measured) -> str:
    if one.problem:
        return f"{counted(one.tokens)}: not on {one.device}, {one.problem}"
    kernel = "" if one.existing_us is None else f", by the existing kernel {one.existing_us:.1f} µs"
    return (
        f"{counted(one.tokens)}: a site takes {one.now_us:.1f} µs on {one.device}{kernel}, a copy of its bytes"
        f" {one.copy_us:.1f} µs; × {one.sites} saves {one.saving_us:.1f} µs"
    )


def existing_text(e: Existing) -> str:
    by = f" by {', '.join(e.transforms)}" if e.transforms else ""
    return f"found {e.symbol} in {e.file}{by}"


def size(count: int) -> str:
    """`1.2 MB`."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count} B"


def markdown_of(found: Discovery, top: int) -> str:
    lines = [f"# Fusion candidates of {found.model}", "", *(f"{line}." for line in assumptions(found)), ""]
    if found.nothing_left():
        lines += [f"**{found.nothing_left()}.**", ""]
    chosen = (found.worthwhile or found.candidates)[:top]
    lines += ["| id | kind | calls | × | saving | complexity | numeric risk | lookup | recommendation |"]
    lines += [f"|{'---|' * (lines[-1].count('|') - 1)}"]
    for c in chosen:
        known = c.existing[0].symbol if c.existing else "not_found"
        rating = (str(c.complexity), c.numeric_risk)
        row = (
            f"`{c.id}`",
            c.kind,
            c.title,
            str(c.count),
            f"{c.saving_us:.1f} µs",
            *rating,
            known,
            f"`{c.recommendation}`",
        )
        lines.append("| " + " | ".join(row) + " |")
    for c in chosen:
        lines += ["", f"## {heading(c)}", ""]
        for name, texts in details(c):
            if name == "one of them":
                lines += ["", "```", *texts, "```"]
            else:
                lines += [f"- **{name}**: {'; '.join(texts)}"]
    return "\n".join(lines)
