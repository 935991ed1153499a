"""`graft repro`: one match of a run, or one generated kernel, as a Python file that runs by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graft.base.errors import UsageError
from graft.cli.documents import print_json
from graft.cli.options import Json, Plugins


def repro(
    run: Annotated[Path, typer.Argument(help="A folder that graft dump wrote, or graft stages -o.", metavar="RUN")],
    match: Annotated[
        str, typer.Option("--match", help="fuse_rope:3, or 3 with --transform; left out: list them.", metavar="ID")
    ] = "",
    transform: Annotated[str, typer.Option("--transform", "-t", help="The matches of this one.")] = "",
    kernel: Annotated[
        str,
        typer.Option("--kernel", help="Of graft stages -o: run and time this kernel.", metavar="NAME"),
    ] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write; else repro_TRANSFORM_N.py.", metavar="FILE")
    ] = None,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Write one runnable file with what a match replaced, its replacement, seeded inputs and the comparison.

    The file exits with 0 when both give the same and with 1 when not. Weights are those of the dump where it has them
    (graft dump --weights), else random.

    Of a folder that graft stages -o wrote: --kernel NAME writes a file with that kernel alone, runs it in a process
    of its own and says how long a call takes; left out, kernels are listed.
    """
    from graft.workbench.stages.saved import is_story

    if is_story(str(run)) or kernel:
        if match or transform:
            raise UsageError(
                "--match and --transform are for a folder of graft dump, --kernel for one of graft stages"
            )
        repro_kernel(run, kernel, output, as_json)
        return
    from graft.base.files import write_together
    from graft.cli.show import busy, out
    from graft.passes.registry import load_all
    from graft.workbench.repro.write import find_match, matches_of, repro_source
    from graft.workbench.runs import open_run

    load_all(tuple(plugins or ()))
    opened = open_run(run)
    if not match:
        listed = matches_of(opened, transform)
        if as_json:
            print_json("repro-matches", [{"id": one.id, "anchor": one.record.anchor} for one in listed])
        for one in listed if not as_json else ():
            nodes = f"{len(one.record.replaced)} → {len(one.record.made)} calls"
            out.print(f"{one.id:<28} {nodes:<16} {one.record.anchor}", markup=False, soft_wrap=True)
        return
    chosen = find_match(opened, match, transform)
    with busy("cutting the match out"):
        text = repro_source(opened, chosen)
    path = output or Path(f"repro_{chosen.id.replace(':', '_')}.py")
    write_together({path: text})
    if as_json:
        print_json("repro", {"id": chosen.id, "file": str(path), "anchor": chosen.record.anchor})
    else:
        out.print(f"{chosen.id} {chosen.record.anchor}", markup=False, soft_wrap=True)
        out.print(f"next  python {path}", markup=False, soft_wrap=True)


def repro_kernel(folder: Path, name: str, output: Path | None, as_json: bool) -> None:
    from graft.base.files import write_together
    from graft.cli.show import busy, out
    from graft.workbench.repro.kernel import find_kernel, kernel_source, time_file
    from graft.workbench.stages.saved import open_story
    from graft.workbench.stages.words import times_text

    story = open_story(folder)
    if not name:
        if as_json:
            listed = [
                {"graph": k.graph, "name": k.name, "us": k.us, "us_range": list(k.us_range)}
                for k in story.kernels.kernels
            ]
            print_json("repro-kernels", listed)
            return
        for one in story.kernels.kernels:
            time = times_text(one.us, one.us_range) if one.us else one.not_timed or "not timed"
            out.print(f"{one.graph:<5} {one.name}  {time}", markup=False, soft_wrap=True)
        return
    chosen = find_kernel(story, name)
    path = output or Path(f"repro_{chosen.name.replace('.', '_')[:60]}.py")
    write_together({path: kernel_source(story, chosen, f"graft repro {folder} --kernel {name}")})
    with busy("timing the kernel"):
        found = time_file(path)
    if as_json:
        print_json("repro-kernel", {"file": str(path), "graph": chosen.graph, **found})
        return
    out.print(
        f"{chosen.name}: {found['us']} µs a call, the median; {found['least_us']} to {found['most_us']};"
        f" {found['calls']} calls on {found['bytes']:,} bytes",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    out.print(f"next  python {path}", markup=False, soft_wrap=True)
