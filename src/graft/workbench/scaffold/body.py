"""The pattern and the replacement that a new transform is written around, as source, and whether they are right."""

from __future__ import annotations
import __future__

import ast
import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graft.base.authors import told
from graft.base.errors import GraftError, PatternError, TransformError, UsageError
from graft.ir.patterns.arguments import tensor_names
from graft.passes.base import Stage, TransformConfig
from graft.passes.patterns import PatternTransform, Rewrite
from graft.testing.negatives import assert_refused_or_harmless, negatives, positive

USUAL = ("import torch", "import torch.nn.functional as F", "from torch import Tensor")


@dataclass(frozen=True)
class Body:
    """Two functions of the same arguments, as source, and what they import: all that `write_transform` (plan.py)
    needs. Whoever has a pattern from elsewhere makes a Body of it.

    shapes: as a Rewrite takes them. replacement: None where an op is to be made, whose reference is the pattern.
    wrong: an expression for a result that is nearly right. extra_tests: more of the test file.
    """

    pattern: str
    replacement: str | None
    imports: tuple[str, ...]
    shapes: Mapping[str, str]
    wrong: str = ""
    extra_tests: str = ""
    lines: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # function → its file and line, if it has one

    @property
    def pattern_name(self) -> str:
        return function_name(self.pattern)


DEFAULT_PATTERN = """def silu_by_hand(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)"""
DEFAULT_REPLACEMENT = """def silu(x: Tensor) -> Tensor:
    return F.silu(x)"""
DEFAULT_TESTS = '''

def test_another_function_is_left_alone():
    """quick_gelu: x * sigmoid(1.702 x)."""
    assert_not_fuses(Wrong(), INPUTS, NAME, reason="expected %mul again", config=CONFIG)
'''


def default_body(op: bool) -> Body:
    """A worked example that matches a small module; its functions are there to be replaced."""
    return Body(
        DEFAULT_PATTERN,
        None if op else DEFAULT_REPLACEMENT,
        USUAL,
        {"x": "b s d"},
        "x * torch.sigmoid(1.702 * x)",
        DEFAULT_TESTS,
    )


def body_of_functions(pattern: str, replacement: str | None, given: Mapping[str, str] | None = None) -> Body:
    """From `FILE.py:function` of both. given: the arguments' shapes; else a dict SHAPES in the first file."""
    source, imports, tree, line = read_function(pattern)
    other, more, lines = None, (), {function_name(source): line}
    if replacement is not None:
        other, more, _, line = read_function(replacement)
        lines.setdefault(function_name(other), line)
        if arguments(source) != arguments(other):
            raise PatternError(
                f"{pattern} takes {', '.join(arguments(source))} and {replacement} takes"
                f" {', '.join(arguments(other))}; both need the same arguments, in the same order"
            )
        if function_name(source) == function_name(other):
            raise UsageError(f"pattern and replacement are both named {function_name(source)}; rename one of them")
    guessed = {name: guess_shape(name) for name in tensor_arguments(source)}
    shapes = given or given_shapes(tree, pattern) or guessed
    every = tuple(dict.fromkeys((*imports, *more, "from torch import Tensor")))
    return Body(source, other, every, shapes, lines=lines)


def read_shapes(text: str) -> dict[str, str]:
    """`--shapes "x: b s d, w: n d"` → {'x': 'b s d', 'w': 'n d'}; a dtype may follow: `"i: b s: int64"`."""
    shapes: dict[str, str] = {}
    for part in filter(str.strip, text.split(",")):
        name, colon, dims = (piece.strip() for piece in part.partition(":"))
        if not colon or not name.isidentifier() or not dims:
            raise UsageError(f'--shapes: {part.strip()!r} is no argument with its sizes; write "x: b s d, w: n d"')
        if name in shapes:
            raise UsageError(f"--shapes: {name} has two shapes; keep one")
        shapes[name] = dims
    if not shapes:
        raise UsageError('--shapes is empty; write "x: b s d, w: n d", a letter for each size')
    return shapes


def guess_shape(name: str) -> str:
    return "d" if name.startswith(("weight", "bias")) else "b s d"


def read_function(reference: str) -> tuple[str, tuple[str, ...], ast.Module, tuple[str, int]]:
    """`FILE.py:function` → its source, the imports it uses, the file's tree, and where the function stands."""
    path, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier():
        raise UsageError(f"{reference!r} does not name a function; write FILE.py:function")
    try:
        text = Path(path).read_text()
        tree = ast.parse(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}; write FILE.py:function") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not Python: {error}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise UsageError(f"{path} has no function {name!r} at its top level; it has {', '.join(functions) or 'none'}")
    node = functions[name]
    source = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
    return source, used_imports(tree, node, reference), tree, (str(Path(path).resolve()), node.lineno)


def used_imports(tree: ast.Module, function: ast.FunctionDef, reference: str) -> tuple[str, ...]:
    """The file's imports that the function needs; any other name from outside it is an error."""
    known: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", "") != "__future__":
            for alias in node.names:
                one = copy_import(node, alias)
                known[alias.asname or alias.name.split(".")[0]] = ast.unparse(one)
    own = {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
    own |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    free = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)} - own - set(dir(builtins))
    missing = sorted(free - set(known))
    if missing:
        raise UsageError(f"{reference} uses {', '.join(missing)} of its file; write it inside the function")
    return tuple(known[name] for name in sorted(free))


def copy_import(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.stmt:
    if isinstance(node, ast.Import):
        return ast.Import([alias])
    return ast.ImportFrom(node.module, [alias], node.level)


def given_shapes(tree: ast.Module, reference: str) -> dict[str, str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "SHAPES" for t in node.targets):
            try:
                return dict(ast.literal_eval(node.value))
            except (ValueError, TypeError) as error:
                raise UsageError(f"SHAPES beside {reference} is not a plain dict like {{'x': 'b s d'}}") from error
    return None


def parsed(source: str) -> ast.FunctionDef:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    return node


def function_name(source: str) -> str:
    return parsed(source).name


def arguments(source: str) -> list[str]:
    return [argument.arg for argument in parsed(source).args.args]


def results_of(source: str) -> int:
    """How many tensors it gives, by its annotation; 0 where that is one tensor and no tuple."""
    node = parsed(source).returns
    several = (
        isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and ast.unparse(node.value) == "tuple"
    )
    return len(node.slice.elts) if several else 0  # pyrefly: ignore


def returned(source: str) -> str:
    """The annotation of its result: Tensor, or tuple[Tensor, Tensor]."""
    count = results_of(source)
    return f"tuple[{', '.join(['Tensor'] * count)}]" if count else "Tensor"


def kind_of(argument: ast.arg) -> str:
    """Tensor, int or float."""
    text = ast.unparse(argument.annotation) if argument.annotation else "Tensor"
    return text if text in ("int", "float") else "Tensor"


def tensor_arguments(source: str) -> list[str]:
    return [a.arg for a in parsed(source).args.args if kind_of(a) == "Tensor"]


def typed_arguments(source: str) -> list[tuple[str, str]]:
    """(name, Tensor | int | float) of each."""
    return [(a.arg, kind_of(a)) for a in parsed(source).args.args]


def literals_of(source: str) -> dict[str, int | float]:
    """What tests give for the numbers among the arguments, as graft.testing.negatives does."""
    return {name: 2 if kind == "int" else 0.25 for name, kind in typed_arguments(source) if kind != "Tensor"}


# ── whether they are right ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Tried:
    """The rewrite as functions, the traced pattern and replacement, and whether both give the same bits."""

    rewrite: Rewrite
    before: torch.fx.Graph
    after: torch.fx.Graph
    exact: bool


def functions_of(body: Body) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compiled as if they stood in their files, so that what they raise names a line there."""
    scope: dict[str, Any] = {"__name__": "graft_new_transform"}
    lazy = __future__.annotations.compiler_flag
    for source in (*USUAL, *body.imports):
        exec(compile(source, "<new transform>", "exec", lazy), scope)
    for source in (body.pattern, body.replacement or body.pattern):
        file, line = body.lines.get(function_name(source), ("<new transform>", 1))
        exec(compile("\n" * (line - 1) + source, file, "exec", lazy), scope)
    return scope[body.pattern_name], scope[function_name(body.replacement or body.pattern)]


def try_out(body: Body, name: str) -> Tried:
    """Runs what the generated tests will run; what would fail there is told before anything is written."""
    refuse_constants(body)
    pattern, replacement = functions_of(body)
    missing = sorted(set(tensor_names(pattern)) ^ set(body.shapes))
    if missing:
        raise PatternError(
            f"the shapes and the arguments of {pattern.__name__} differ in {', '.join(missing)}; every tensor needs"
            ' its sizes: --shapes "x: b s d, w: n d", or a dict SHAPES in its file'
        )
    misfit: AssertionError | None = None
    for exact in (True, False):  # the same bits, or a few roundings off
        rewrite = Rewrite(pattern, replacement, dict(body.shapes), exact=exact)
        transform = type(name, (PatternTransform,), {"rewrites": lambda _, r=rewrite: [r], "name": name})
        try:
            return Tried(rewrite, *check(transform(TransformConfig(Stage.MATCH)), rewrite), exact)
        except AssertionError as error:
            misfit = error
        except TransformError as error:  # of a transform that nobody has yet, so its settings are no advice
            if isinstance(error.__cause__, PatternError):
                raise PatternError(f'{error.__cause__}; --shapes "x: b s d, w: n d" names them') from error
            raise cannot_trace(body, str(error.__cause__ or error)) from error
        except GraftError:
            raise
        except Exception as error:  # whatever the user's functions raise when they are traced
            raise cannot_trace(body, told(error).replace("\n", " ")) from error
    raise PatternError(f"{pattern.__name__} and {replacement.__name__} do not fit: {misfit}") from misfit


def refuse_constants(body: Body) -> None:
    """The generated tests give every tensor as an input of the module."""
    called = [node.func for node in ast.walk(parsed(body.pattern)) if isinstance(node, ast.Call)]
    if any(isinstance(function, ast.Name) and function.id == "constant" for function in called):
        raise PatternError(
            f"{body.pattern_name} says constant(…), which only a parameter or a buffer matches, and the tests that"
            " are written here pass inputs; leave constant out, and put it back with a module of your own in them"
        )


def cannot_trace(body: Body, why: str) -> PatternError:
    functions = " or ".join(dict.fromkeys([body.pattern_name, function_name(body.replacement or body.pattern)]))
    given = ", ".join(f"{name}: {shape}" for name, shape in body.shapes.items())
    return PatternError(
        f"{functions} cannot be traced: {why}. It was tried with {given}, a letter for each size: name others with"
        ' --shapes "x: b s d, w: n d". Patterns are plain functions of tensors and numbers, without branches on what'
        " the tensors hold"
    )


def check(transform: PatternTransform, rewrite: Rewrite) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    """The pattern is found, its numbers stay in every dtype, and every changed graph is refused or stays right."""
    case = positive(rewrite, torch.float32)
    before = torch.fx.Graph()
    before.output(before.graph_copy(case.module.graph, {}))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = positive(rewrite, dtype)
        record = assert_refused_or_harmless(transform, found)
        if not record.matches:
            raise PatternError(f"{rewrite.pattern.__name__} does not match itself in {dtype}: {record.reason}")
        case = found if dtype is torch.float32 else case
    for negative in negatives(rewrite):
        assert_refused_or_harmless(transform, negative)
    return before, case.module.graph
