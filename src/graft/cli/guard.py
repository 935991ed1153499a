"""What every verb has in common: --plugin, --strict, --traceback, and how errors leave the program."""

from __future__ import annotations

import functools
import inspect
import json
import sys
import traceback as tracebacks
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graft.base.authors import told
from graft.base.errors import GraftError
from graft.cli.documents import error_document
from graft.cli.interrupts import is_interrupt, tell
from graft.cli.options import Plugins
from graft.cli.waiting import waiting

ParserError = typer.BadParameter.__mro__[2]  # click's, or that of the copy of click that newer typers have
AS_JSON = "graft.as_json"
Strict = Annotated[bool, typer.Option("--strict", help="An installed plugin that cannot be used is an error.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error came from, line by line.")]
COMMON: dict[str, tuple[Any, Any]] = {
    "plugins": (Plugins, None),
    "strict": (Strict, False),
    "traceback": (Traceback, False),
}


def guarded(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with the options that all have. Errors that graft knows end the program with one line, and so do those
    of an author's code, with his file and line. Exit codes: 1 a run failed, 2 the request was wrong."""
    own = inspect.signature(verb, eval_str=True)
    added = {name: option for name, option in COMMON.items() if name not in own.parameters}

    @functools.wraps(verb)
    def command(**given: Any) -> None:
        common = {
            name: given.pop(name, default) if name in added else given[name] for name, (_, default) in COMMON.items()
        }
        sign = waiting(f"graft {verb.__name__.replace('_', '-')}")
        errors = told_in_a_line(common["traceback"], as_json=bool(given.get("as_json") or given.get("json_logs")))
        with errors, sign, plugins_loaded(common["plugins"], common["strict"]):
            verb(**given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword) for p in own.parameters.values()]
    parameters += [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in added.items()
    ]
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


@contextmanager
def plugins_loaded(named: list[str] | None, strict: bool) -> Iterator[None]:
    """What was named is loaded before the verb begins; what is installed, when a verb needs transforms."""
    from graft.base.plugins import STATE

    before, STATE.strict = STATE.strict, strict
    try:
        if named or strict:
            from graft.passes.registry import load_all

            load_all(tuple(named or ()))
        yield
    finally:
        STATE.strict = before


def of_plugin(error: BaseException) -> bool:
    """Whether the code of a plugin was running."""
    from graft.base.plugins import STATE

    homes = [Path(plugin.folder) for plugin in STATE.active()]
    files = [Path(frame.filename) for frame in tracebacks.extract_tb(error.__traceback__)]
    return any(home in file.parents for home in homes for file in files)


@contextmanager
def told_in_a_line(whole: bool, *, as_json: bool = False) -> Iterator[None]:
    """whole: with the traceback, too. as_json: also as a document on standard output."""
    try:
        yield
    except GraftError as error:
        if whole:
            tracebacks.print_exception(error)
        raise ended(error, str(error), error.exit_code, as_json) from None
    except BaseException as error:
        if is_interrupt(error):
            tell()
            if as_json:
                print(json.dumps(error_document(error, "interrupted", 1)))
            raise typer.Exit(1) from None
        if not isinstance(error, Exception) or isinstance(error, (typer.Exit, typer.Abort)):
            raise
        if whole or not of_plugin(error):
            if as_json and not is_usage(error):
                print(json.dumps(error_document(error, told(error), 1)))
            raise
        raise ended(error, f"{told(error)}; --traceback shows the rest", 1, as_json) from None


def ended(error: Exception, message: str, code: int, as_json: bool) -> typer.Exit:
    print(f"graft: error: {message}", file=sys.stderr)
    if as_json:
        print(json.dumps(error_document(error, message, code)))
    return typer.Exit(code)


def is_usage(error: Exception) -> bool:
    """Whether the parser of the command line tells it."""
    return isinstance(error, ParserError)


@contextmanager
def parser_errors_too(as_json: bool) -> Iterator[None]:
    """The usage is on standard error as ever; the document is beside it."""
    try:
        yield
    except ParserError as error:
        if as_json:
            told = error.format_message()  # pyrefly: ignore[missing-attribute]
            print(json.dumps(error_document(error, told, error.exit_code)))  # pyrefly: ignore[missing-attribute]
        raise


class JsonGroup(TyperGroup):
    """What the parser refuses is a document too, where --json is among the words."""

    def make_context(self, info_name: Any, args: Any, *rest: Any, **given: Any) -> Any:
        as_json = "--json" in args
        with parser_errors_too(as_json):
            context = super().make_context(info_name, args, *rest, **given)
        context.meta[AS_JSON] = as_json
        return context

    def invoke(self, ctx: Any) -> Any:
        with parser_errors_too(ctx.meta[AS_JSON]):
            return super().invoke(ctx)
