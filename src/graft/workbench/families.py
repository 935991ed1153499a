"""The table of families and expected matches as Markdown, for docs/families.md."""

from __future__ import annotations

from graft.models.registry import Family, families
from graft.transforms.config import load_config
from graft.transforms.pipeline import order_transforms

HEAD = """# Families and matches

How often each transform matches a model of a family with L layers. The tests capture, transform, prove and count a
tiny model of each family. Written by `graft models --markdown`.
"""


def families_markdown() -> str:
    """One row a family, one column a transform that is on; below, why a transform finds nothing."""
    settings = load_config()
    names = [name for name in order_transforms(settings) if settings.transforms[name].enabled]
    lines = [HEAD, f"| family | {' | '.join(f'`{name}`' for name in names)} |", "|" + "---|" * (len(names) + 1)]
    for family in families().values():
        lines.append(f"| {family.name} | {' | '.join(count(family, name) for name in names)} |")
    lines += ["", "## Why not", ""]
    for name in names:
        reasons: dict[str, list[str]] = {}
        for family in families().values():
            if name not in family.expect:
                reasons.setdefault(family.absent[name], []).append(family.name)
        lines += [f"- `{name}`: {why} ({', '.join(who)})" for why, who in reasons.items()]
    return "\n".join(lines) + "\n"


def count(family: Family, name: str) -> str:
    return str(family.expect.get(name, "–"))
