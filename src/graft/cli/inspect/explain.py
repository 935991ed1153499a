"""`graft explain`: where a transform matched, and why it did not elsewhere; inputs, state and results of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.inspect.explain_cost import Bandwidth, Batch, ContextTokens, Cost, Launch, Measure, explain_cost
from graft.cli.options import ConfigFile, Device, DType, Json, Plugins, Sets, TrustRemoteCode

if TYPE_CHECKING:
    from graft.passes.config import PipelineConfig
    from graft.workbench.explain import Explanation, ModelSite


def explain(
    model: Annotated[str, typer.Argument(help="Registry name, folder or .gguf file, or what compiled.save wrote.")],
    transform: Annotated[
        str | None, typer.Argument(help="The transform to explain; without one, inputs, state and results are shown.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Also check every match numerically.")] = False,
    cost: Cost = False,
    measure: Measure = False,
    batch: Batch = None,
    context: ContextTokens = None,
    bandwidth: Bandwidth = None,
    launch: Launch = None,
    dtype: DType = "auto",
    device: Device = "auto",
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Show the matches of a transform by layer, and for every near miss the node, its source line and the reason."""
    from graft.cli.show import progress_bar
    from graft.passes.config import load_config
    from graft.workbench.explain import check_listed, explain_model

    given = [*(sets or ()), *(["verify=matches"] if verify else [])]
    settings = load_config(config, sets=given, plugins=tuple(plugins or ()))
    if cost or measure or any(given is not None for given in (batch, context, bandwidth, launch)):
        sizes = (batch, context, bandwidth, launch)
        return explain_cost(
            model, transform, settings, cost, measure, sizes, dtype, device, trust_remote_code, as_json
        )
    if transform is None:
        show_io(model, settings, dtype, trust_remote_code=trust_remote_code, as_json=as_json)
        return
    check_listed(transform, settings)  # told before the model is loaded
    with progress_bar() as progress:
        explanation = explain_model(model, transform, settings, dtype, progress, trust_remote_code=trust_remote_code)
    if as_json:
        print_json("explain", explanation.to_dict())
    else:
        show(explanation)


def show_io(model: str, settings: PipelineConfig, dtype: str, *, trust_remote_code: bool, as_json: bool) -> None:
    from graft.cli.show import out, progress_bar
    from graft.workbench.io_of import io_of

    with progress_bar() as progress:
        table = io_of(model, settings, dtype, progress, trust_remote_code=trust_remote_code)
    if as_json:
        print_json("explain-io", table.to_dict())
    else:
        out.print(str(table), markup=False, highlight=False, soft_wrap=True)


def show(explanation: Explanation) -> None:
    from graft.cli.show import out

    misses = explanation.closest()
    counts = f"{counted(explanation.matches, 'match')}, {counted(misses, 'near miss')}"
    out.print(f"{explanation.transform} on {explanation.model}: {counts}", style="bold", markup=False, soft_wrap=True)
    for text in (explanation.note, explanation.reason):
        if text:
            out.print(text, markup=False, soft_wrap=True)
    for layer, matches in explanation.by_layer().items():
        out.print("outside the layers" if layer is None else f"layer {layer}", style="cyan")
        for match in matches:
            checked = (
                f", error {match.numeric_check.error:.1e} of {match.numeric_check.limit:.1e}"
                if match.numeric_check
                else ""
            )
            checked += f", proved: {match.proved}" if match.proved else ""
            form = f" as {match.pattern}" if match.pattern else ""
            out.print(f"  {site_text(match.site)}: {match.nodes} nodes{form}{checked}", markup=False, soft_wrap=True)
    if misses:
        out.print("near misses", style="yellow")
    for miss in misses:
        out.print(f"  {site_text(miss.site)}", markup=False, soft_wrap=True)
        out.print(f"    {miss.reason}", markup=False, soft_wrap=True)
        out.print(
            f"    {miss.matched} of {miss.size} calls of {miss.pattern} fitted at {miss.anchor}",
            markup=False,
            soft_wrap=True,
        )


def counted(things: Sequence[object], name: str) -> str:
    """`1 match`, `2 matches`."""
    return f"{len(things)} {name}{'' if len(things) == 1 else 'es'}"


def site_text(site: ModelSite) -> str:
    return "  ".join(part for part in (f"%{site.node}" if site.node else "", site.module, site.source) if part)
