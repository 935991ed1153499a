"""What differs between the arguments of two calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.ir.nodes import changed_leaves

LITERALS = st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.0, -0.0, 1.0, float("nan")])
NESTED = st.recursive(
    LITERALS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner), max_leaves=6
)


def text(value):
    """Python's repr, with keywords in order."""
    if isinstance(value, dict):
        return repr({key: text(value[key]) for key in sorted(value)})
    return repr([text(item) for item in value]) if isinstance(value, list) else repr(value)


@given(NESTED, NESTED)
def test_nothing_differs_between_calls_that_read_the_same(one, other):
    assert (changed_leaves(one, other) == []) == (text(one) == text(other))
    assert changed_leaves(one, one) == []


@pytest.mark.parametrize(
    ("one", "other", "changed"),
    [
        ((1, 2), (1, 3), [(2, 3)]),
        ({"min": 1}, {"max": 1}, None),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
        ([1, [2]], [[1], 2], None),
        ([1, 2], (1, 2), []),
        (slice(0, 1), slice(0, 2), [(1, 2)]),
        (slice(0, 1), [0, 1, None], None),
        (1, True, [(1, True)]),
        ("a", "a", []),
    ],
)
def test_pairs_or_none_where_the_nesting_differs(one, other, changed):
    assert changed_leaves(one, other) == changed
