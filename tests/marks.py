"""Parameters of which `make test` runs some and `make test-all` all: the others carry the mark `exhaustive`.

What is left out repeats, on more models, dtypes, routes or in a new process, what the short run has seen once;
tests/mutation.py plants faults in the code and shows that the short run still finds them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

# one family of each kind: plain; window and soft cap; no RoPE; experts; parallel block
KINDS = ("llama", "gemma-2", "gpt2", "qwen3-moe", "cohere")


# the long run and `make fuzz` name another profile of hypothesis than the short run
FULL = os.environ.get("HYPOTHESIS_PROFILE") in ("all", "fuzz")


def short(values: Iterable[Any], *kept: Any) -> list[Any]:
    """All values as parameters, those that are not kept marked exhaustive. A kept value that is none is an error."""
    values = list(values)
    if unknown := [value for value in kept if value not in values]:
        raise ValueError(f"kept in the short run, but no parameter: {unknown}")
    return [value if value in kept else left_out(value) for value in values]


def firsts(values: Iterable[Any], group: Callable[[Any], Any], count: int = 2) -> list[Any]:
    """All values as parameters; in the short run the first of each group."""
    seen: Counter[Any] = Counter()
    marked = []
    for value in values:
        seen[group(value)] += 1
        marked.append(value if seen[group(value)] <= count else left_out(value))
    return marked


def left_out(value: Any) -> Any:
    """The value as a parameter of the long run alone, with the id that it has."""
    return pytest.param(*value_set(value), marks=pytest.mark.exhaustive, id=getattr(value, "id", None))


def value_set(value: Any) -> Sequence[Any]:
    """The arguments that a value stands for: parametrize takes a tuple as one for each name."""
    if hasattr(value, "values") and hasattr(value, "marks"):  # a pytest.param
        return value.values
    return value if isinstance(value, tuple) else (value,)


def thin_out(items: Sequence[pytest.Item]) -> None:
    """Of a test with several parametrize decorators the short run takes as many cases as show each value of each
    decorator once; the rest is marked exhaustive. A test that is asked for by the names of its cases has them all."""
    matrices: dict[str, list[tuple[pytest.Item, set[Any]]]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("exhaustive") is None:
            matrices.setdefault(item.nodeid.partition("[")[0], []).append((item, chosen_values(item)))
    for cases in matrices.values():
        missing, used = set[Any]().union(*(values for _, values in cases)), Counter[Any]()
        while missing:
            # the first of those that show most; in turn where a value of another decorator is free to choose
            kept = max(cases, key=lambda case: (len(missing & case[1]), -sum(used[value] for value in case[1])))
            missing -= kept[1]
            used.update(kept[1])
            cases.remove(kept)
        for item, _ in cases:
            item.add_marker(pytest.mark.exhaustive)


def keep_some(items: Sequence[pytest.Item]) -> None:
    """Of a test marked `some(n)` the short run takes n of the cases it has left, spread over them."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some") and item.get_closest_marker("exhaustive") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("some")
        count = min(marker.args[0], len(cases)) if marker else 0
        kept = {index * len(cases) // count for index in range(count)}
        for index, item in enumerate(cases):
            if index not in kept:
                item.add_marker(pytest.mark.exhaustive)


def chosen_values(item: Any) -> set[Any]:
    """What each parametrize decorator gives this case: the names of its arguments, and which values."""
    given = item.callspec.params
    decorators = [marker.args[0] for marker in item.iter_markers("parametrize")]
    names = [names.replace(" ", "").split(",") if isinstance(names, str) else names for names in decorators]
    named = {name for group in names for name in group}
    groups = [tuple(group) for group in names] + [(name,) for name in given if name not in named]  # of fixtures
    return {(group, *(id(given[name]) for name in group)) for group in groups}


def examples(count: int) -> int:
    """Examples of a property: the short run takes a quarter."""
    return count if FULL else max(3, count // 4)


def cross(groups: Sequence[Any], cases: Sequence[tuple[Any, ...]], dtypes: Sequence[Any]) -> list[Any]:
    """Every case with every dtype: in the short run all cases with the first dtype, and the first case of a group
    with all dtypes. `groups` names the group of each case."""
    firsts = [group not in groups[:index] for index, group in enumerate(groups)]
    pairs = [(case, first, dtype) for case, first in zip(cases, firsts, strict=True) for dtype in dtypes]
    return [
        (*case, dtype) if first or dtype == dtypes[0] else left_out((*case, dtype)) for case, first, dtype in pairs
    ]


def crossed(name: str, values: Iterable[Any], dtypes: Iterable[Any], ids: Any = None) -> Any:
    """parametrize over values × dtypes: in the short run every value in the second dtype (of 16 bits, where what is
    cast shows), and the first value in all of them."""
    cases, (first, main, *others) = [(value,) for value in values], dtypes
    rows = cross([name] * len(cases), cases, [main, first, *others])
    return pytest.mark.parametrize((name, "dtype"), rows, ids=ids)
