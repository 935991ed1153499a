"""`graft compare`: graft beside Hugging Face at every module boundary, both against float64."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.documents import print_json
from graft.cli.options import (
    DEFAULT_MODEL,
    Backend,
    ConfigFile,
    Device,
    DType,
    Json,
    Plugins,
    Quantize,
    Sets,
    TrustRemoteCode,
)

if TYPE_CHECKING:
    from rich.table import Table

    from graft.engine.llm import LLM
    from graft.workbench.compare import Boundary, Comparison

RANDOM_PROMPT = 12  # tokens, where the model has no tokenizer
WITH_NODES = 110  # columns of a terminal that has room for the names of nodes
PROMPT = "The lighthouse keeper counted the ships that passed before the fog came in, and wrote their names down."


def compare(
    model: Annotated[str, typer.Argument(help="Registry name, folder or .gguf file.")] = DEFAULT_MODEL,
    prompt: Annotated[str | None, typer.Option(help="The text to compare on. A sentence if left out.")] = None,
    new: Annotated[int, typer.Option(min=1, help="Decode steps after the prompt.")] = 4,
    layers: Annotated[bool, typer.Option("--layers", help="One row for each decoder layer.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also plot it: .png, .svg or .pdf.", metavar="FILE")] = None,
    dtype: DType = "auto",
    device: Device = "auto",
    backend: Backend = "auto",
    quantize: Quantize = None,
    config: ConfigFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Where graft and Hugging Face drift from float64, module by module, and which transform made each node.

    Both run the prompt and some decode steps. What a fusion computes inside a larger op has no numbers of its own.
    """
    from graft.bench.plot import check_plot
    from graft.cli.load import load_llm
    from graft.cli.show import err, progress_bar
    from graft.workbench.compare import compare_modules
    from graft.workbench.compare.plot import plot_comparison

    if plot is not None:
        check_plot(plot)
    with progress_bar() as progress:
        llm = load_llm(
            model, progress, dtype=dtype, device=device, backend=backend, quantize=quantize, config=config, sets=sets,
            plugins=plugins, trust_remote_code=trust_remote_code, keep_weights=True,
        )  # fmt: skip
        progress("comparing with float64", 0, 0)
        found = compare_modules(llm, with_new_tokens(llm, prompt, new), new)
    rows = found.layers if layers else found.boundaries
    if plot is not None:
        plot_comparison(found, rows, plot)
        err.print(f"graft: plotted in {plot}", markup=False)
    if as_json:
        print_json("compare", found.to_dict())
    else:
        show(found, rows)


def with_new_tokens(llm: LLM, prompt: str | None, new: int) -> list[int]:
    """The prompt's tokens, and those that the engine itself goes on with: both engines are fed them."""
    from graft.base.errors import UsageError
    from graft.engine.params import SamplingParams

    if llm.model.tokenizer is None:
        if prompt is not None:
            raise UsageError(f"{llm.model.name} has no tokenizer, so --prompt cannot be read; leave it out")
        vocabulary = llm.model.module.config.get_text_config().vocab_size
        ids = [(7 * at + 3) % vocabulary for at in range(RANDOM_PROMPT)]
    else:
        ids = llm.encode(prompt or PROMPT)
    (done,) = llm.generate([ids], SamplingParams(max_tokens=new, ignore_eos=True))
    return [*ids, *done.token_ids]


def show(found: Comparison, rows: tuple[Boundary, ...]) -> None:
    from graft.cli.show import out
    from graft.workbench.compare.compare import DRIFT

    out.print(table(found, rows))
    drift = found.drift
    if drift is None:
        text = f"no drift: nowhere is graft more than {DRIFT:g} times as far from float64 as Hugging Face"
    else:
        text = f"drift begins behind {drift.module}: {drift.ratio:.1f} times as far from float64 as Hugging Face"
        text += f"; %{drift.node} was made by {drift.made_by or 'capture'}" if drift.node else ""
    out.print(text, markup=False, soft_wrap=True)
    if found.weights:
        text = f"weights are in {found.weights}: what that costs in accuracy is counted as graft's"
        out.print(f"{text}; --quantize none compares the same numbers", markup=False, soft_wrap=True)
    if found.not_found:
        names = ", ".join(found.not_found)
        out.print(f"not found in the captured graph, so not compared: {names}", markup=False, soft_wrap=True)


def table(found: Comparison, rows: tuple[Boundary, ...]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    from graft.cli.show import out

    title = f"{found.model}, {found.dtype}, {found.device}: distance from float64 over"
    title += f" {found.tokens - found.decode_steps} prompt tokens and {found.decode_steps} decode steps"
    made = Table(title=title, title_justify="left", box=SIMPLE)
    made.add_column("module", overflow="fold")
    for name in ("prompt", "HF", "decode", "HF", "ratio"):
        made.add_column(name, justify="right", no_wrap=True)
    wide = out.width >= WITH_NODES
    if wide:
        made.add_column("graft's node", overflow="fold")
    for one in rows:
        numbers = (one.prompt, one.hf_prompt, one.decode, one.hf_decode)
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        made.add_row(one.module, *(number_text(n) for n in numbers), ratio, *([origin(one)] if wide else []))
    return made


def number_text(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def origin(one: Boundary) -> str:
    if one.inside:
        return f"inside %{one.inside} ({one.made_by})"
    if one.node:
        return f"%{one.node} ({one.made_by})" if one.made_by else f"%{one.node}"
    return one.kind if one.kind.startswith("backend") else "not in the graph"
