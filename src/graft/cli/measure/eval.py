"""`graft eval`: what a transform, a backend or a format does to a model's predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from graft.bench.evaluate import Evaluation
    from graft.bench.evaluate.evaluate import EvalSides
    from graft.engine.llm import LLM


def eval(
    model: Annotated[str, typer.Argument(help="Registry name, folder or .gguf file.")] = DEFAULT_MODEL,
    transform: Annotated[
        list[str] | None,
        typer.Option("--transform", "-t", help="Before: without it; after: with it. Repeatable.", metavar="NAME"),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="The text. One that ships with graft if left out.")] = None,
    tokens: Annotated[int, typer.Option(help="How much of it.", min=2)] = 512,
    tasks: Annotated[
        str, typer.Option(help="all, none, names with commas (facts, endings, …) or a .yaml file.", metavar="NAMES")
    ] = "all",
    lm_eval: Annotated[
        str | None, typer.Option("--lm-eval", help="Tasks of lm-eval, where it is installed.", metavar="NAMES")
    ] = None,
    lm_eval_limit: Annotated[int | None, typer.Option(help="Documents of each of lm-eval's tasks.", min=1)] = None,
    lm_eval_include: Annotated[
        str | None, typer.Option(help="A folder with tasks of yours for lm-eval.", metavar="DIR")
    ] = None,
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
    """Perplexity of a text and accuracy on small tasks, before and after.

    Before is Hugging Face's module with the same weights and after is graft's engine; with --transform, before is the
    engine without it and after the engine with it.
    """
    from graft.bench.evaluate import evaluate, find_tasks, shipped_text
    from graft.bench.evaluate.score import Encoder
    from graft.bench.evaluate.with_lm_eval import require_lm_eval, run_lm_eval
    from graft.cli.show import progress_bar

    chosen = find_tasks([name.strip() for name in tasks.split(",")])
    content = shipped_text() if text is None else read_text(text)
    if lm_eval is not None:
        require_lm_eval()
    given: dict[str, Any] = {
        "dtype": dtype, "device": device, "backend": backend, "quantize": quantize, "config": config,
        "plugins": plugins, "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    with progress_bar() as progress:
        sides, llm, notes = both_sides(model, transform or [], list(sets or ()), given, progress)
        encode = Encoder(llm.tokenizer, llm.model.module.config.get_text_config().vocab_size)
        check_length(llm)
        found = evaluate(
            sides, encode, content, tokens, chosen, model=llm.model.name, setup=setup_of(llm, transform or []),
            notes=notes, progress=progress,
            lm_eval=run_lm_eval(sides, encode, lm_eval.split(","), lm_eval_limit, lm_eval_include) if lm_eval else {},
        )  # fmt: skip
    if as_json:
        print_json("eval", found.to_dict())
    else:
        show(found)


def read_text(path: Path) -> str:
    from graft.base.errors import UsageError

    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path} cannot be read as text: {error}") from error


def both_sides(
    model: str, transforms: list[str], sets: list[str], given: dict[str, Any], progress: Any
) -> tuple[EvalSides, LLM, list[str]]:
    """What is compared, the engine after, and what is to be said of both."""
    from graft.bench.evaluate.evaluate import EvalSides
    from graft.bench.evaluate.score import engine_scorer, module_scorer
    from graft.cli.load import load_llm

    if not transforms:
        llm = load_llm(model, progress, sets=sets, keep_weights=True, **given)
        loaded = llm.model
        module = loaded.module if loaded.floats is None else loaded.floats()
        return EvalSides(module_scorer(module), engine_scorer(llm), "Hugging Face", f"graft ({llm.backend})"), llm, []
    switch = [(f"transforms.{name}.enabled=false", f"transforms.{name}.enabled=true") for name in transforms]
    before = load_llm(model, progress, sets=[*sets, *(off for off, _ in switch)], **given)
    after = load_llm(model, progress, sets=[*sets, *(on for _, on in switch)], **given)
    names = ", ".join(transforms)
    notes = [note for name in transforms if (note := matches_note(after, name))]
    sides = EvalSides(engine_scorer(before), engine_scorer(after), f"without {names}", f"with {names}")
    return sides, after, notes


def matches_note(llm: LLM, name: str) -> str:
    record = llm.report.transforms[name]
    if record.matches:
        return f"{name}: {len(record.matches)} matches"
    return f"{name}: no match, so both engines run the same graph: {record.reason or record.status}"


def check_length(llm: LLM) -> None:
    """Told before anything is computed."""
    from graft.base.errors import UsageError
    from graft.bench.evaluate.score import WINDOW

    if llm.model.context < WINDOW:
        raise UsageError(f"{llm.model.name} takes {llm.model.context} tokens at most; eval needs {WINDOW}")


def setup_of(llm: LLM, transforms: list[str]) -> dict[str, Any]:
    from graft.bench.limits.machine import facts

    return {
        **facts(llm.device),
        "backend": llm.backend,
        "dtype": str(llm.model.module.dtype).removeprefix("torch."),
        "weights": llm.quantized.format if llm.quantized else "",
        "transforms": transforms,
    }


def show(found: Evaluation) -> None:
    from graft.cli.show import headed_table, out

    title = f"{found.model}, {found.setup['dtype']}, {found.setup['device']}: {found.before} → {found.after}"
    out.print(title, style="bold", markup=False, soft_wrap=True)
    what = "bytes" if found.tokens_are == "bytes" else "tokens"
    change = f"{found.perplexity_before:.4f} → {found.perplexity_after:.4f} (× {found.ratio:.6f})"
    out.print(f"perplexity  {change}, {found.tokens} {what}", markup=False, soft_wrap=True)
    same = f"{found.divergence:.1e} nats a token, {found.agreement:.1%} have the same likeliest successor"
    out.print(f"divergence  {same}", markup=False, soft_wrap=True)
    if found.tasks:
        table = headed_table("task", "before >", "after >", "± >", "chance >", "changed >", "lost >")
        for one in found.tasks:
            shares = (f"{share:.1%}" for share in (one.before, one.after, one.error, one.chance))
            table.add_row(one.task, *shares, f"{one.changed} of {one.questions}", str(one.lost))
        out.print(table)
    for task, numbers in found.lm_eval.get("after", {}).items():
        for metric, value in numbers.items():
            before = found.lm_eval["before"][task].get(metric, float("nan"))
            out.print(f"lm-eval {task} {metric}: {before:.4f} → {value:.4f}", markup=False, soft_wrap=True)
    notes = list(found.notes)
    if found.tokens_are == "bytes":
        notes.append("the model has no tokenizer, so bytes are taken for tokens: compare before and after alone")
    for note in notes:
        out.print(note, markup=False, soft_wrap=True)
