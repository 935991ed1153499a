"""`graft search`: where a pattern occurs in models and dumps, and which kernels compute it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.options import DType, Json, TrustRemoteCode

if TYPE_CHECKING:
    from graft.workbench.search import Found, GraphHits


def search(
    pattern: Annotated[str, typer.Argument(help="FILE.py:function, or a line of ops: 'relu pow mul'.")],
    places: Annotated[
        list[str] | None, typer.Argument(help="Models and folders of dumps.", metavar="[WHERE]...")
    ] = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="A tiny model of every family.")] = False,
    step: Annotated[str, typer.Option(help="Of dumps: the graph after this transform.", metavar="TRANSFORM")] = "",
    shapes: Annotated[
        str | None, typer.Option(help="Sizes of the function's arguments: 'x: b s d, w: n d'.", metavar="SHAPES")
    ] = None,
    dtype: DType = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Find a pattern: in graphs exactly or nearly, with counts, and among the kernels of graft, ATen, Inductor and
    every package that registered ops, by what they compute.
    """
    from graft.base.errors import UsageError
    from graft.cli.show import progress_bar
    from graft.models.registry import families
    from graft.workbench.search import read_pattern
    from graft.workbench.search import search as run

    named = [*(places or ()), *([f"tiny-{family}" for family in families()] if all_models else [])]
    asked = read_pattern(pattern, shapes)
    if asked.function is None and not named:
        raise UsageError("a line of ops is looked for in graphs: name models or folders of dumps, or --all-models")
    with progress_bar() as progress:
        found = run(asked, named, dtype, step, progress, trust_remote_code=trust_remote_code)
    if as_json:
        print_json("search", found.to_dict())
    else:
        show(found, kernels=asked.function is not None)


def show(found: Found, *, kernels: bool) -> None:
    from graft.cli.show import out

    for hits in found.graphs:
        show_graph(hits)
    if kernels:
        for kernel in found.kernels:
            by = f" by {', '.join(kernel.transforms)}" if kernel.transforms else ""
            note = f" ({kernel.note})" if kernel.note else ""
            out.print(f"kernel  {kernel.symbol}  {kernel.file}{by}{note}", markup=False, soft_wrap=True)
        if not found.kernels:
            why = f"; not compared by value: {found.unseen}" if found.unseen else ""
            out.print(f"no kernel computes all of it{why}", markup=False, soft_wrap=True)
    out.print(f"{found.seconds:.1f} s", style="dim")


def show_graph(hits: GraphHits) -> None:
    from graft.cli.show import out

    text = hits.problem or f"{hits.exact} exactly, {hits.near} nearly"
    out.print(f"{hits.graph}  {text}", style="bold" if hits.exact else "", markup=False, soft_wrap=True)
    for path, count in hits.sites:
        out.print(f"  {path} × {count}", markup=False, soft_wrap=True)
    for reason, count in hits.nearly:
        out.print(f"  nearly × {count}: {reason}", style="dim", markup=False, soft_wrap=True)
