"""`graft stages`: what the seven stages of torch.compile did to a model or a function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from graft.base.errors import UsageError
from graft.cli.aside import output_aside
from graft.cli.documents import print_json
from graft.cli.guard import guarded
from graft.cli.inspect.stage_options import (
    DYNAMIC,
    check_dynamic,
    check_function,
    check_mode,
    check_used,
    in_own_process,
    index_options,
    read_options,
    read_sizes,
)
from graft.cli.options import Device, DType, Json

if TYPE_CHECKING:
    from graft.stages.bucket_story import BucketStory
    from graft.stages.story import Story
    from graft.stages.tell import Keeper
    from graft.workbench.diff_text import StyledLine
    from graft.workbench.stages.questions import Answer

TargetName = Annotated[
    str, typer.Argument(help="A model, FILE.py:FUNCTION, or a folder that -o wrote.", metavar="TARGET")
]
Backend = Annotated[str, typer.Option(help="inductor, graft, or eager (Dynamo alone).")]
Dynamic = Annotated[str, typer.Option(help="auto, true or false, as torch.compile's dynamic.")]
Mode = Annotated[str, typer.Option(help="torch.compile's mode: reduce-overhead, max-autotune …")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", help="An option of Inductor: freezing=true. Repeatable.", metavar="KEY=VALUE"),
]
Tokens = Annotated[str, typer.Option(help="Of a model: tokens in each call, 8,12 for two calls.")]
IndexAsserts = Annotated[
    bool | None,
    typer.Option(
        "--index-asserts/--no-index-asserts",
        help="Generated code checks every index, or none; left out: those that may be out of bounds.",
        show_default=False,
    ),
]


class DefaultGroup(TyperGroup):
    """`graft stages TARGET` is `graft stages show TARGET`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            args = ["show", *args]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] != "--help":
            args = ["show", *args]
        return super().parse_args(ctx, args)


def show(
    target: TargetName,
    backend: Backend = "inductor",
    dynamic: Dynamic = "auto",
    mode: Mode = "",
    options: Options = None,
    stage: Annotated[int | None, typer.Option(help="This stage alone, 1 to 7.", min=1, max=7)] = None,
    tokens: Tokens = "8",
    index_asserts: IndexAsserts = None,
    values: Annotated[
        bool, typer.Option("--values", help="Also what every launch wrote: least, largest, mean, not finite.")
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh/--no-fresh", help="Make the first call in a fresh process, too, which has this one's artifacts."
        ),
    ] = True,
    buckets: Annotated[
        str, typer.Option(help="Compile in pieces for these sizes (tokens of a model): 1,8,64.", metavar="SIZES")
    ] = "",
    split_at: Annotated[
        str, typer.Option(help="--buckets: split at ops with one of these words in their name.", metavar="WORDS")
    ] = "attention",
    dtype: DType = "auto",
    device: Device = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write story, graphs and kernels here.", metavar="DIR")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell what torch.compile did, stage by stage. FILE.py has FUNCTION_inputs(): a list of tuples, one a call.

    The exit code is 1 where the run ended before its end; the story then says in which stage and why.
    """
    from graft.stages.story import STAGES
    from graft.workbench.stages.saved import save_story
    from graft.workbench.stages.text import story_lines

    given = [*(options or []), *index_options(index_asserts)]
    if buckets:
        unused = {"--stage": stage, "-o": output, "--values": values, "--mode": mode, "--tokens": tokens != "8"}
        show_buckets(target, buckets, split_at, backend, dynamic, given, dtype, device, unused, as_json)
        return
    shown = fresh and (stage in (None, 7) or output is not None)
    story = story_of(target, backend, dynamic, mode, given, tokens, dtype, device, values=values, fresh=shown)
    if output is not None:
        save_story(story, output)
    if as_json:
        left_out = [name for number, name in enumerate(STAGES, 1) if stage not in (None, number)]
        print_json("stages", {key: value for key, value in story.to_dict().items() if key not in left_out})
    else:
        print_lines(story_lines(story, stage))
    if story.end is not None:
        raise typer.Exit(1)


def show_buckets(
    target: str, buckets: str, split_at: str, backend: str, dynamic: str, options: list[str], dtype: str, device: str,
    unused: dict[str, Any], as_json: bool,
) -> None:  # fmt: skip
    from graft.stages.bucket_story import BucketStory
    from graft.workbench.stages.bucket_text import bucket_lines

    sizes, words = read_sizes(buckets), tuple(word.strip() for word in split_at.split(",") if word.strip())
    for name, value in unused.items():
        if value:
            raise UsageError(f"{name} is not for --buckets, which tells sizes and pieces; --json has all of it")
    if backend != "inductor":
        raise UsageError(f"--buckets compiles pieces with Inductor, not with {backend}")
    check_dynamic(dynamic)
    check_function(target, {"--dtype": dtype != "auto", "--device": device != "auto"})
    free = True if dynamic == "auto" else DYNAMIC[dynamic]

    def make(keeper: Keeper | None = None) -> BucketStory:
        return new_buckets(target, sizes, words, free, options, dtype, device, keeper)

    story = in_own_process(make, target, BucketStory)
    if as_json:
        print_json("stages-buckets", story.to_dict())
    else:
        print_lines(bucket_lines(story))
    if story.end is not None:
        raise typer.Exit(1)


def new_buckets(
    target: str, sizes: list[int], words: tuple[str, ...], dynamic: bool | None, options: list[str], dtype: str,
    device: str, keeper: Keeper | None,
) -> BucketStory:  # fmt: skip
    from graft.cli.show import progress_bar
    from graft.stages.buckets import tell_buckets
    from graft.workbench.stages.targets import bucket_target

    given = read_options(options)
    with progress_bar() as progress, output_aside():
        found = bucket_target(target, sizes, progress, dtype=dtype, device=device)
        progress("compiling in pieces", 0, 1)
        calls = dict(zip(sizes, found.calls, strict=True))
        return tell_buckets(
            found.function, calls, target=found.name, split_at=words, dynamic=dynamic, options=given, keeper=keeper
        )


def story_of(
    target: str, backend: str = "inductor", dynamic: str = "auto", mode: str = "", options: list[str] | None = None,
    tokens: str = "8", dtype: str = "auto", device: str = "auto", *, values: bool = False, fresh: bool = False,
    enough: str = "inductor",
) -> Story:  # fmt: skip
    """enough: the backend where none is asked for."""
    from graft.stages.story import Story
    from graft.workbench.stages.saved import is_story, open_story

    check_dynamic(dynamic)
    if backend not in ("", "inductor", "graft", "eager"):
        raise UsageError(f"--backend {backend}: write inductor, graft or eager")
    if is_story(target):
        settings = {
            "--mode": mode, "--option": options, "--dynamic": dynamic != "auto", "--values": values,
            "--backend": backend not in ("", "inductor"), "--tokens": tokens != "8", "--dtype": dtype != "auto",
            "--device": device != "auto",
        }  # fmt: skip
        check_used(f"{target}, which holds a story of a run that is over", {n: bool(v) for n, v in settings.items()})
        return open_story(target)
    backend = backend or enough
    if backend == "eager":
        check_used("--backend eager, which compiles nothing", {"--mode": bool(mode), "--option": bool(options)})
    check_function(target, {"--tokens": tokens != "8", "--dtype": dtype != "auto", "--device": device != "auto"})

    def make(keeper: Keeper | None = None) -> Story:
        return new_story(target, backend, dynamic, mode, options or [], tokens, dtype, device, values, fresh, keeper)

    return in_own_process(make, target, Story)


def new_story(
    target: str, backend: str, dynamic: str, mode: str, options: list[str], tokens: str, dtype: str, device: str,
    values: bool, fresh: bool, keeper: Keeper | None,
) -> Story:  # fmt: skip
    check_mode(mode)
    from graft.cli.show import progress_bar
    from graft.stages.tell import tell_story
    from graft.workbench.discover.sources import read_tokens
    from graft.workbench.stages.fresh import FreshRun
    from graft.workbench.stages.targets import find_target

    given, counts = read_options(options), read_tokens(tokens)
    again = FreshRun(target, list(counts), dtype, device, backend, DYNAMIC[dynamic], mode or None, given)
    with progress_bar() as progress, output_aside():
        found = find_target(target, counts, progress, dtype=dtype, device=device)
        progress("compiling with every stage watched", 0, 1)
        return tell_story(
            found.function, found.calls, target=found.name, backend=backend, dynamic=DYNAMIC[dynamic],  # pyrefly: ignore
            mode=mode or None, options=given, values=values, elsewhere=again if fresh else None, keeper=keeper,
        )  # fmt: skip


def print_lines(lines: list[StyledLine]) -> None:
    from graft.cli.inspect.diff import show as show_lines

    show_lines(lines)


def why(
    target: TargetName,
    place: Annotated[str, typer.Argument(help="A node (%mul_3) or a line (model.py:12, :12).", metavar="NODE|LINE")],
    backend: Backend = "inductor",
    dynamic: Dynamic = "auto",
    mode: Mode = "",
    options: Options = None,
    tokens: Tokens = "8",
    as_json: Json = False,
) -> None:
    """Follow one node or line of the model through all stages: what became of it, and in which kernel it is."""
    from graft.cli.show import out
    from graft.stages.follow import follow
    from graft.workbench.stages.questions import trail_lines
    from graft.workbench.stages.text import end_lines

    story = story_of(target, backend, dynamic, mode, options, tokens)
    trails = follow(story, place)
    if as_json:
        print_json("stages-why", [one.to_dict() for one in trails])
    for one in trails if not as_json else ():
        at = f" at {', '.join(one.lines)}" if one.lines else ""
        out.print(f"{place} in graph {one.graph}{at}", style="bold", markup=False, soft_wrap=True)
        for line in trail_lines(one):
            out.print(f"  {line.removeprefix(one.graph).strip()}", markup=False, soft_wrap=True)
    if story.end is not None:
        if not as_json:
            print_lines(end_lines(story))
        raise typer.Exit(1)


def diff(
    before: Annotated[str, typer.Argument(help="A folder that -o wrote, a model or FILE.py:FUNCTION.", metavar="A")],
    after: Annotated[str, typer.Argument(help="Another one.", metavar="B")],
    backend: Backend = "inductor",
    unfold: Annotated[bool, typer.Option("--all", help="Every difference.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two runs: the first stage that differs, and what differs in each. The exit code is 0 either way."""
    from graft.workbench.stages.compare import diff_lines, diff_stories

    found = diff_stories(story_of(before, backend), story_of(after, backend))
    if as_json:
        print_json("stages-diff", found.to_dict())
    else:
        print_lines(diff_lines(found, unfold=unfold))


def ask(
    question: Annotated[
        str,
        typer.Argument(help="recompiles, cudagraph, breaks, kernel, copies, fusion or cache.", metavar="QUESTION"),
    ],
    target: TargetName,
    words: Annotated[
        list[str] | None, typer.Argument(help="kernel: a node or line; fusion: two of them.", metavar="[NODE|LINE]…")
    ] = None,
    since: Annotated[
        Path | None, typer.Option(help="cache: an earlier run (-o) to compare keys with.", metavar="DIR")
    ] = None,
    backend: Backend = "",
    dynamic: Dynamic = "auto",
    mode: Mode = "",
    options: Options = None,
    tokens: Tokens = "8",
    as_json: Json = False,
) -> None:
    """Answer one question: why it recompiled, why a CUDA graph was skipped, what broke the graph, which kernel a
    line is in, what was copied, why two nodes did not fuse, why the cache was missed.

    The exit code is 1 where the run ended before its end; the answer then says in which stage and why.
    """
    from dataclasses import asdict

    from graft.workbench.stages.questions import find_question, with_end
    from graft.workbench.stages.saved import open_story

    asked = find_question(question, words or [])  # told before anything is compiled
    if since is not None and question != "cache":
        raise UsageError("--since is for the question cache")
    earlier = {"since": open_story(since)} if since is not None else {}
    dynamo = question in ("recompiles", "breaks") and not (mode or options)  # Dynamo alone knows these
    enough = "eager" if dynamo else "inductor"
    story = story_of(target, backend, dynamic, mode, options, tokens, enough=enough)
    answer = with_end(asked.ask(story, *(words or []), **earlier), story)
    if as_json:
        print_json("stages-ask", asdict(answer))
    else:
        print_answer(answer)
    if story.end is not None:
        raise typer.Exit(1)


def print_answer(answer: Answer) -> None:
    from graft.cli.show import out

    out.print(answer.answer, style="bold", markup=False, soft_wrap=True)
    for line in answer.details:
        out.print(f"  {line}", markup=False, soft_wrap=True)
    if answer.advice:
        out.print(f"what to do: {answer.advice}", markup=False, soft_wrap=True)


stages = typer.Typer(
    cls=DefaultGroup, no_args_is_help=True, help="See and ask what torch.compile's seven stages did."
)
for verb in (show, why, diff, ask):
    stages.command()(guarded(verb))
