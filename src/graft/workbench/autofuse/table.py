"""The outcomes as a table in Markdown."""

from __future__ import annotations

from graft.workbench.autofuse.ledger import CandidateOutcome, Ledger

HEAD = "| candidate | calls | × | predicted | decode | prefill | status | kernels | reason |"


def table_text(ledger: Ledger) -> str:
    facts = ledger.facts
    where = ", ".join(str(facts[name]) for name in ("model", "device_name", "torch", "date") if name in facts)
    lines = ["# What graft autofuse found", "", where, "", HEAD, f"|{'---|' * (HEAD.count('|') - 1)}"]
    lines += [f"| {' | '.join(cells(one))} |" for one in ledger.outcomes]
    return "\n".join([*lines, ""])


def cells(one: CandidateOutcome) -> list[str]:
    predicted = " / ".join(f"{share:.1%}" for share in one.predicted_share)
    return [
        f"`{one.id}`",
        one.title,
        str(one.count),
        predicted,
        measured(one, "decode"),
        measured(one, "prefill"),
        one.status,
        ", ".join(one.kernels) or ("existing" if one.path == "existing_kernel_path" else ""),
        one.reason.replace("|", "\\|"),
    ]


def measured(one: CandidateOutcome, shape: str) -> str:
    """`+12.3 % ± 0.4 %` of a step."""
    found = next((times for times in one.times if times.shape == shape), None)
    return "" if found is None else f"{found.saving:+.1%} ± {found.noise:.1%}"
