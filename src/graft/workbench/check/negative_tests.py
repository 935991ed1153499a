"""Finds the tests that hold a transform back: those that must not fuse. Test files are read, never imported."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from graft.passes.patterns import PatternTransform
from graft.passes.registry import TransformRegistry
from graft.workbench.check.line import CheckLine

HELPERS = frozenset({"assert_not_fuses", "assert_refused_or_harmless", "negatives"})
# how a test is called that expects a refusal, where it has assertions of its own instead of a helper
REFUSAL = re.compile(r"refus|_not_|(is|are)_no_|without|alone|unlike|stays?_|skip|untouched|never|left_|unless")


@dataclass(frozen=True)
class TestDefinition:
    """A function or a constant of a test file: the names that stand in it, and the strings."""

    names: frozenset[str]
    strings: frozenset[str]


@dataclass(frozen=True)
class TestEvidence:
    """how: with the testing kit, or by the titles of tests with assertions of their own. tests: file::test, seen from
    the folder of tests."""

    how: str
    tests: tuple[str, ...]


def negative_line(name: str, tests: Path | None) -> CheckLine:
    if tests is None:
        return CheckLine("negative tests", "skip", "there is no tests folder beside it; --tests DIR names one")
    found = negative_tests(name, tests)
    if found is None:
        advice = "write one with graft.testing.assert_not_fuses"
        return CheckLine("negative tests", "fail", f"no test in {tests} says what {name} must not fuse; {advice}")
    more = f" and {len(found.tests) - 2} more" if len(found.tests) > 2 else ""
    return CheckLine("negative tests", "pass", f"{found.how}: {', '.join(found.tests[:2])}{more}")


def negative_tests(name: str, folder: Path) -> TestEvidence | None:
    """The tests that call a helper of the kit for this transform; else those about it whose names are a refusal.

    A test is about a transform that it names itself, through a constant, or through a function of its own file; one
    that goes through the registry (`TransformRegistry.names()`) is about every transform made of patterns.
    """
    by_helper, by_name = [], []
    for path in test_files(folder):
        for test, part in tests_about(name, path):
            if part.names & HELPERS:
                by_helper.append(f"{path.relative_to(folder)}::{test}")
            elif REFUSAL.search(test) and (is_own(name, path) or name in part.strings):
                by_name.append((not is_own(name, path), f"{path.relative_to(folder)}::{test}"))
    if by_helper:
        return TestEvidence("with the testing kit", tuple(by_helper))
    return TestEvidence("by their titles", tuple(text for _, text in sorted(by_name))) if by_name else None


def own_files(name: str, folder: Path, found: TestEvidence | None) -> tuple[Path, ...]:
    """The files to run after a change: the transform's own, and those that hold it back."""
    holding = {test.partition("::")[0] for test in found.tests} if found else set()
    return tuple(
        path for path in test_files(folder) if is_own(name, path) or str(path.relative_to(folder)) in holding
    )


def is_own(name: str, path: Path) -> bool:
    """`test_fuse_rope_spellings.py` is the transform's own file."""
    return path.stem == f"test_{name}" or path.stem.startswith(f"test_{name}_")


def tests_about(name: str, path: Path) -> list[tuple[str, TestDefinition]]:
    """The tests of a file that are about this transform, each with all that it reaches."""
    text = read_text(path)
    patterns = issubclass(TransformRegistry.get(name), PatternTransform)
    # most files are about something else; parsing them all would take seconds
    quoted = f'"{name}"' in text or f"'{name}'" in text or is_own(name, path)
    if not quoted and not (patterns and "TransformRegistry.names" in text):
        return []
    parts = read_parts(path)
    found = [(test, reached(test, parts)) for test in parts if test.startswith("test_")]
    every = {"TransformRegistry", "names", "PatternTransform"}
    own = is_own(name, path)
    return [(t, part) for t, part in found if own or name in part.strings or (patterns and every <= part.names)]


@cache
def test_files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(folder.rglob("test_*.py")))


@cache
def read_text(path: Path) -> str:
    """A file that is no text holds no test."""
    return path.read_bytes().decode(errors="replace")


@cache
def read_parts(path: Path) -> dict[str, TestDefinition]:
    """Functions, classes and constants of a file by name; nothing where it is not Python."""
    try:
        tree = ast.parse(read_text(path))
    except (SyntaxError, ValueError):
        return {}
    parts: dict[str, TestDefinition] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            parts[node.name] = part_of(node)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            parts |= {n.name: part_of(n) for n in inner if isinstance(n, ast.FunctionDef)}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            parts |= dict.fromkeys(names, part_of(node))
    return parts


def part_of(node: ast.AST) -> TestDefinition:
    names, strings = set(), set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            names.add(inner.id)
        elif isinstance(inner, ast.Attribute):
            names.add(inner.attr)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            strings.add(inner.value)
    return TestDefinition(frozenset(names), frozenset(strings))


def reached(name: str, parts: dict[str, TestDefinition]) -> TestDefinition:
    """A part with those of its own file that it refers to."""
    names: set[str] = set()
    strings: set[str] = set()
    seen, waiting = {name}, [name]
    while waiting:
        part = parts[waiting.pop()]
        names |= part.names
        strings |= part.strings
        waiting += [other for other in part.names if other in parts and other not in seen]
        seen |= part.names
    return TestDefinition(frozenset(names), frozenset(strings))
