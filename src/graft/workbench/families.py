"""The table of families and expected matches as Markdown, for docs/families.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from graft.models.registry import families
from graft.passes.config import load_config
from graft.passes.pipeline import order_transforms

HEAD = """# Families and matches

How often each transform matches a model of a family with L layers. The tests capture, transform, check and count a
tiny model of each family. Written by `graft models --markdown`.
"""


GPU = """
## On a GPU

What matches there beyond the table above, or in place of what it says; on a CPU the others are skipped.
"""


def families_markdown() -> str:
    """One row a family, one column a transform that is on, if only in one family; then what GPUs add, and why a
    transform finds nothing."""
    settings, known = load_config(), families().values()
    counted = {name for family in known for name in (*family.expect, *family.expect_gpu)}
    names = [name for name in order_transforms(settings) if settings.transforms[name].enabled or name in counted]
    on_gpu = [name for name in names if any(name in family.expect_gpu for family in known)]
    everywhere = [name for name in names if name not in on_gpu or any(name in family.expect for family in known)]
    lines = [HEAD, *table(everywhere, "expect"), GPU, *table(on_gpu, "expect_gpu"), "", "## Why not", ""]
    for name in names:
        reasons: dict[str, list[str]] = {}
        for family in known:
            if name not in family.expect and name not in family.expect_gpu:
                reasons.setdefault(family.absent.get(name, "not counted"), []).append(family.name)
        lines += [f"- `{name}`: {why} ({', '.join(who)})" for why, who in reasons.items()]
    return "\n".join(lines) + "\n"


def table(names: Sequence[str], column: Literal["expect", "expect_gpu"]) -> list[str]:
    head = [f"| family | {' | '.join(f'`{name}`' for name in names)} |", "|" + "---|" * (len(names) + 1)]
    return head + [
        f"| {family.name} | {' | '.join(str(getattr(family, column).get(name, '–')) for name in names)} |"
        for family in families().values()
    ]
