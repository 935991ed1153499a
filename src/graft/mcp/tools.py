"""The tools: typed arguments in, one command of graft's out. None takes a shell line, and what they write lies in the
workspace."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from mcp.server.mcpserver import Context
from pydantic import Field

from graft.base.errors import GraftError
from graft.mcp.runner import ToolAnswer, page_of, refusal, run_verb
from graft.mcp.workspace import Workspace, plain

Model = Annotated[str, Field(description="Registry name (tiny-llama), or a folder inside the workspace")]
Sets = Annotated[list[str] | None, Field(description="transforms.fuse_rope.enabled=false, …")]
DType = Annotated[str, Field(description="auto, float32, bfloat16, float16")]
Plugins = Annotated[list[str] | None, Field(description="Plugin files inside the workspace")]
LIMIT = 600.0  # seconds of a call


class Tools:
    """Of one workspace."""

    def __init__(self, workspace: Workspace, limit: float = LIMIT) -> None:
        self.workspace, self.limit = workspace, limit

    async def run(self, ctx: Context, *arguments: str) -> ToolAnswer:
        async def tell(passed: float, message: str) -> None:
            await ctx.report_progress(passed, self.limit, message)

        return await run_verb(self.workspace, [*arguments, "--json"], self.limit, tell)

    def model(self, name: str) -> str:
        return self.workspace.source(name, "model")

    def options(
        self, dtype: str = "auto", sets: list[str] | None = None, plugins: list[str] | None = None
    ) -> list[str]:
        found = ["--dtype", plain(dtype, "dtype")]
        for text in sets or ():
            found += ["--set", plain(text, "set")]
        for name in plugins or ():
            found += ["--plugin", self.workspace.inside(name, "plugin")]
        return found

    async def models(self, ctx: Context) -> ToolAnswer:
        """The models of the registry."""
        return await self.run(ctx, "models")

    async def dump(
        self, ctx: Context, model: Model, folder: str, dtype: DType = "auto", sets: Sets = None
    ) -> ToolAnswer:
        """Write the graph after every transform to a new folder of the workspace."""
        target = self.workspace.inside(folder, "folder")
        return await self.run(ctx, "dump", self.model(model), "-o", target, *self.options(dtype, sets))

    async def discover(
        self,
        ctx: Context,
        model: Model,
        dtype: DType = "auto",
        sets: Sets = None,
        plugins: Plugins = None,
    ) -> ToolAnswer:
        """Fusion candidates by estimated saving, with the kernels that exist for each."""
        given = self.options(dtype, sets, plugins) if not self.is_dumps(model) else []
        return await self.run(ctx, "discover", self.model(model), "--measure", "none", *given)

    async def search(self, ctx: Context, pattern: str, where: list[str] | None = None) -> ToolAnswer:
        """Where FILE.py:function or a line of ops ('relu pow mul') occurs, and which kernels compute the function."""
        file, colon, name = plain(pattern, "pattern").rpartition(":")
        text = f"{self.workspace.inside(file, 'pattern')}:{name}" if colon else pattern
        return await self.run(ctx, "search", text, *(self.model(one) for one in where or ()))

    async def explain(
        self,
        ctx: Context,
        model: Model,
        transform: str,
        dtype: DType = "auto",
        sets: Sets = None,
        plugins: Plugins = None,
    ) -> ToolAnswer:
        """The matches of a transform, and for every near miss the reason."""
        given = self.options(dtype, sets, plugins)
        return await self.run(ctx, "explain", self.model(model), plain(transform, "transform"), *given)

    async def diff(self, ctx: Context, run: str, other: str = "", transform: str = "") -> ToolAnswer:
        """What a transform did to a dumped graph, or what differs between two dumps."""
        names = [self.workspace.inside(name, "run") for name in (run, other) if name]
        chosen = ["--transform", plain(transform, "transform")] if transform else []
        return await self.run(ctx, "diff", *names, *chosen)

    async def new_transform(
        self, ctx: Context, name: str, folder: str, candidate: str = "", model: str = "", pattern: str = "",
        op: bool = False, dtype: DType = "auto", sets: Sets = None,
    ) -> ToolAnswer:  # fmt: skip
        """Write a transform with op, kernels and tests as a package in the workspace: from a candidate of discover
        (with its model, dtype and sets), or from a pattern FILE.py:function."""
        given = [plain(name, "name"), "--package", self.workspace.inside(folder, "folder"), *(["--op"] if op else [])]
        if candidate:
            given += ["--from", plain(candidate, "candidate"), "--model", self.model(model)]
            given += self.options(dtype, sets) if not self.is_dumps(model) else []
        elif pattern:
            file, _, function = plain(pattern, "pattern").rpartition(":")
            given += ["--pattern", f"{self.workspace.inside(file, 'pattern')}:{plain(function, 'function')}"]
        return await self.run(ctx, "new-transform", *given)

    async def check(
        self, ctx: Context, transform: str, model: Model, note: str = "", dtype: DType = "auto", sets: Sets = None,
        plugins: Plugins = None,
    ) -> ToolAnswer:  # fmt: skip
        """The review list of a transform on a model; `note`: a file of the workspace for the iteration note."""
        given = ["--note", self.workspace.inside(note, "note")] if note else []
        given += self.options(dtype, sets, plugins)
        return await self.run(ctx, "check", plain(transform, "transform"), "--model", self.model(model), *given)

    async def bench(
        self, ctx: Context, model: Model, batch: int = 1, prompt: int = 128, new: int = 32, dtype: DType = "auto",
        sets: Sets = None, plugins: Plugins = None,
    ) -> ToolAnswer:  # fmt: skip
        """Latency and throughput of the engine, without baselines."""
        sizes = ["--batch", str(batch), "--prompt", str(prompt), "--new", str(new), "--against", "none"]
        return await self.run(ctx, "bench", self.model(model), *sizes, *self.options(dtype, sets, plugins))

    async def eval(
        self, ctx: Context, model: Model, transform: str = "", tasks: str = "all", tokens: int = 512,
        dtype: DType = "auto", sets: Sets = None, plugins: Plugins = None,
    ) -> ToolAnswer:  # fmt: skip
        """Perplexity and accuracy on small tasks: without and with `transform`, or Hugging Face beside the engine."""
        given = ["--transform", plain(transform, "transform")] if transform else []
        given += ["--tasks", plain(tasks, "tasks"), "--tokens", str(tokens), *self.options(dtype, sets, plugins)]
        for name in tasks.split(","):
            if name.strip().endswith(".yaml"):
                self.workspace.inside(name.strip(), "tasks")
        return await self.run(ctx, "eval", self.model(model), *given)

    async def report(self, ctx: Context, run: str, file: str) -> ToolAnswer:
        """One HTML file of a folder that dump or stages wrote: pipeline, layers, changes, candidates."""
        target = self.workspace.inside(file, "file")
        return await self.run(ctx, "report", self.workspace.inside(run, "run"), "-o", target)

    async def repro(
        self, ctx: Context, run: str, match: str = "", kernel: str = "", file: str = "", plugins: Plugins = None
    ) -> ToolAnswer:
        """A runnable file of one match of a dump (fuse_rope:1), or of one kernel of a folder of stages; without
        either they are listed."""
        given = [self.workspace.inside(run, "run")]
        given += ["--match", plain(match, "match")] if match else []
        given += ["--kernel", plain(kernel, "kernel")] if kernel else []
        if match or kernel:
            given += ["-o", self.workspace.inside(file, "file")]
        for name in plugins or ():
            given += ["--plugin", self.workspace.inside(name, "plugin")]
        return await self.run(ctx, "repro", *given)

    async def stages(
        self, ctx: Context, target: str, folder: str = "", why: str = "", ask: str = "",
        words: list[str] | None = None, backend: str = "inductor",
    ) -> ToolAnswer:  # fmt: skip
        """What torch.compile's stages did with a model, FILE.py:function or a folder of an earlier call; `why`
        follows a node (%mul_3) or a line (:12), `ask` answers one question (breaks, recompiles, kernel, …)."""
        file, colon, name = plain(target, "target").rpartition(":")
        place = f"{self.workspace.inside(file, 'target')}:{plain(name, 'function')}" if colon else self.model(target)
        engine = ["--backend", plain(backend, "backend")]
        if why:
            return await self.run(ctx, "stages", "why", place, plain(why, "why"), *engine)
        if ask:
            given = [plain(word, "word") for word in words or ()]
            return await self.run(ctx, "stages", "ask", plain(ask, "ask"), place, *given, *engine)
        output = ["-o", self.workspace.inside(folder, "folder")] if folder else []
        return await self.run(ctx, "stages", "show", place, *engine, *output)

    async def autofuse(
        self,
        ctx: Context,
        model: Model,
        folder: str,
        steps: int = 1,
        dtype: DType = "auto",
        sets: Sets = None,
    ) -> ToolAnswer:
        """Find, write, check and measure fusions; the package in the workspace has what pays. Call again to go on."""
        target = self.workspace.inside(folder, "folder")
        given = ["-o", target, "--steps", str(steps), *self.options(dtype, sets)]
        return await self.run(ctx, "autofuse", self.model(model), *given)

    async def more(self, result: str, offset: int) -> ToolAnswer:
        """The next page of an answer that had next_offset."""
        return page_of(self.workspace, result, max(0, offset))

    def is_dumps(self, model: str) -> bool:
        folder = self.workspace.root / model
        return folder.is_dir() and not (folder / "config.json").is_file()

    def all(self) -> list[Callable[..., Awaitable[ToolAnswer]]]:
        tools = (
            self.models, self.dump, self.discover, self.search, self.explain, self.diff, self.new_transform,
            self.check, self.bench, self.eval, self.report, self.repro, self.stages, self.autofuse, self.more,
        )  # fmt: skip
        return [told(tool) for tool in tools]


def told(tool: Callable[..., Awaitable[ToolAnswer]]) -> Callable[..., Awaitable[ToolAnswer]]:
    """What is wrong with a request is an answer too, as it is of a command."""

    @functools.wraps(tool)
    async def answered(*args: Any, **given: Any) -> ToolAnswer:
        try:
            return await tool(*args, **given)
        except GraftError as error:
            return refusal(error)

    return answered
