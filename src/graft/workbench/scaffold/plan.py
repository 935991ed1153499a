"""From a name to files: in a checkout of graft, as a package, or as a plugin. All of them are written, or none."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from graft.base.errors import PatternError, UsageError
from graft.base.files import write_together
from graft.ir.effects import is_mutating
from graft.ir.nodes import calls
from graft.passes.base import Stage
from graft.workbench.scaffold import names
from graft.workbench.scaffold.body import (
    Body,
    Tried,
    arguments,
    body_of_functions,
    default_body,
    read_shapes,
    try_out,
)
from graft.workbench.scaffold.candidate import BEFORE, STAGE, Seed, body_of_seed
from graft.workbench.scaffold.destination import Destination
from graft.workbench.scaffold.op import op_files
from graft.workbench.scaffold.package import check_package, package_files
from graft.workbench.scaffold.render import with_sorted_imports
from graft.workbench.scaffold.texts import New, test_text, transform_text


@dataclass(frozen=True)
class Written:
    """What was made. no_kernel: why the op has no Triton kernel yet, where it was asked for. note: what to know."""

    name: str
    root: Path
    checkout: bool
    files: tuple[Path, ...]
    changed: tuple[Path, ...]
    op: str = ""
    no_kernel: str = ""
    note: str = ""
    package: str = ""


def new_transform(
    name: str,
    folder: Path | Destination | None = None,
    *,
    op: bool = False,
    stage: str | None = None,
    pattern: str | None = None,
    replacement: str | None = None,
    shapes: str | None = None,
    force: bool = False,
) -> Written:
    """Writes a transform, its YAML entry (off), its tests, and with `op` an op folder. folder: see Destination."""
    check_request(name, stage)
    body = choose_body(op, pattern, replacement, shapes)
    return write_transform(name, body, destination(folder), stage or "match", force)


def transform_from(
    name: str,
    seed: Seed,
    folder: Path | Destination | None = None,
    *,
    op: bool = False,
    stage: str | None = None,
    force: bool = False,
    enabled: bool = False,
    ahead_of: tuple[str, ...] = (),
) -> Written:
    """The same for a candidate of `graft discover`: its op is made, unless a kernel that exists can be called.
    enabled: listed as on, for one that was measured. ahead_of: transforms that take part of what it takes."""
    check_request(name, stage)
    body, note = body_of_seed(seed, name, op)
    try:
        before = (*ahead_of, *(BEFORE if not stage else ()))
        written = write_transform(name, body, destination(folder), stage or STAGE, force, before, enabled=enabled)
    except PatternError as error:
        if body.replacement is None:
            raise
        why = next((line for line in str(error).split("\n") if line.startswith("found:")), str(error).split("\n")[0])
        raise PatternError(
            f"candidate {seed.id}: {seed.existing[0][1]} fits its model, but not all that its pattern fits"
            f" ({why.removeprefix('found:').strip()}). {note or 'Nothing was written'};"
            " pass --op to make an op of its own"
        ) from error
    return replace(written, note=note)


def refuse_writes(body: Body, tried: Tried) -> None:
    """An op whose schema does not say that it writes would be taken for one that does not."""
    writer = next((node for node in calls(tried.before) if is_mutating(node)), None)
    if writer is not None:
        raise PatternError(
            f"{body.pattern_name} writes into one of its arguments (%{writer.name}), and --op makes ops that only"
            " read; name a --replacement that calls one which writes (graft.define_op, Tensor(a!) in its schema)"
        )


def destination(folder: Path | Destination | None) -> Destination:
    return folder if isinstance(folder, Destination) else Destination.of(folder)


def check_request(name: str, stage: str | None) -> None:
    names.check_name(name)
    stages = [s.value for s in Stage if s is not Stage.INDUCTOR]
    if stage is not None and stage not in stages:
        raise UsageError(f"--stage {stage}: a stage is one of {', '.join(stages)}")


def choose_body(op: bool, pattern: str | None, replacement: str | None, shapes: str | None = None) -> Body:
    if pattern is None:
        for option, value in (("--replacement", replacement), ("--shapes", shapes)):
            if value is not None:
                raise UsageError(f"{option} needs --pattern, the function that it belongs to")
        return default_body(op)
    if op == (replacement is not None):
        raise UsageError(
            "--pattern needs either --replacement FILE.py:function, or --op to make an op of the pattern"
        )
    return body_of_functions(pattern, replacement, None if shapes is None else read_shapes(shapes))


def write_transform(
    name: str,
    body: Body,
    destination: Destination,
    stage: str = "match",
    force: bool = False,
    before: tuple[str, ...] = (),
    *,
    enabled: bool = False,
) -> Written:
    """The whole of it for a given pattern; `body.replacement` None makes an op, whose reference is the pattern.
    before: the transforms of its stage that come after it."""
    names.check_free(name, destination.transform(name), force)
    op = names.op_name(name) if body.replacement is None else ""
    if op:
        names.check_op(op, arguments(body.pattern), destination.op_folder(op), force)
    if destination.package:
        check_package(destination)
    elif not destination.checkout:
        names.check_importable(name, destination.root)
    tried = try_out(body, name)
    made: dict[Path, str] = {}
    no_kernel = ""
    if op:
        refuse_writes(body, tried)
        files, no_kernel = op_files(op, destination.op_module(op), body, tried)
        made |= {destination.op_folder(op) / file: text for file, text in files.items()}
    native = bool(op) and destination.op_folder(op) / "native.h" in made
    new = New(name, op, body, tried, destination, kernel=bool(op) and not no_kernel, native=native)
    made[destination.transform(name)] = transform_text(new)
    made[destination.test(name)] = test_text(new)
    if not destination.checkout:
        own = {destination.module(name).partition(".")[0], destination.op_module(op).partition(".")[0]}
        made = {path: with_sorted_imports(text, own) if path.suffix == ".py" else text for path, text in made.items()}
    added, changed = listings(name, stage, destination, before, op=bool(op), enabled=enabled)
    made |= added
    taken = [path for path in made if path.exists()]
    if taken and not force:
        raise UsageError(f"{taken[0]} is there already; choose another name, or --force to write it anew")
    write_together({**made, **changed})
    return Written(
        name,
        destination.root,
        destination.checkout,
        tuple(made),
        tuple(changed),
        op,
        no_kernel,
        package=destination.package,
    )


# ── listings ────────────────────────────────────────────────────────────────────────────────────────────────────

PLUGIN_CONFIG = """# Laid over graft's own configuration: --plugin {name}.py
transforms:
  {name}: {{{entry}}}
"""


def listings(
    name: str,
    stage: str,
    destination: Destination,
    before: tuple[str, ...] = (),
    *,
    op: bool = False,
    enabled: bool = False,
) -> tuple[dict[Path, str], dict[Path, str]]:
    """The YAML files in which the transform is listed: off unless `enabled`, and for every family why it is absent.
    Those that are new (with the project around a package), and those that are changed."""
    if destination.package:
        return package_files(destination, name, entry_text(stage, before, enabled=enabled), op=op)
    if not destination.checkout:
        text = PLUGIN_CONFIG.format(name=name, entry=entry_text(stage, before))
        return {destination.root / f"{name}.yaml": text}, {}
    defaults = destination.root / "src/graft/passes/default.yaml"
    common = destination.root / "src/graft/models/registry/common.yaml"
    changed = {defaults: with_entry(defaults.read_text(), name, stage, before)}
    text = common.read_text()
    if not re.search(rf"^  {name}:", text, re.MULTILINE):
        changed[common] = text.rstrip("\n") + f"\n  {name}: off by default\n"
    return {}, changed


def entry_text(stage: str, before: tuple[str, ...], *, enabled: bool = False) -> str:
    order = f", before: [{', '.join(before)}]" if before else ""
    return f"stage: {stage}, enabled: {str(enabled).lower()}{order}"


def with_entry(text: str, name: str, stage: str, before: tuple[str, ...] = ()) -> str:
    """default.yaml with the transform after the last one of its stage; a transform that is listed stays as it is."""
    lines = text.split("\n")
    if any(line.startswith(f"  {name}:") for line in lines):
        return text
    last = max(i for i, line in enumerate(lines) if re.match(rf"  \w+:\s+\{{stage: {stage}\b", line))
    lines.insert(last + 1, f"  {name + ':':<20} {{{entry_text(stage, before)}}}")
    return "\n".join(lines)
