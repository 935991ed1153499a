"""The short run: matrices thinned out to each value once, tables left whole; processes that are forked."""

from __future__ import annotations

import itertools
import os
import sys
from types import SimpleNamespace

import pytest
from _pytest.assertion import rewrite
from hypothesis import given
from hypothesis import strategies as st

from bytecode import rewrite_files
from marks import short, thin_out
from processes import run_python


class Item:
    """As much of a pytest item as thinning looks at."""

    def __init__(self, name: str, decorators: dict[str, tuple], exhaustive: bool = False) -> None:
        self.nodeid = f"{name}[{decorators}]"
        self.decorators, self.left_out = decorators, exhaustive
        names = [key.split(",") for key in decorators]
        values = [value if len(key) > 1 else (value,) for key, value in zip(names, decorators.values(), strict=True)]
        pairs = [zip(key, value, strict=True) for key, value in zip(names, values, strict=True)]
        self.callspec = SimpleNamespace(params=dict(itertools.chain.from_iterable(pairs)))

    def iter_markers(self, _name):
        return [SimpleNamespace(args=(names, ())) for names in self.decorators]

    def get_closest_marker(self, _name):
        return self.left_out or None

    def add_marker(self, mark):
        assert mark.name == "exhaustive"
        self.left_out = True


def matrix(**axes):
    return [Item("test", dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def kept(items):
    thin_out(items)
    return [item for item in items if not item.left_out]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_each_value_is_there_once(sizes):
    items = matrix(**{f"axis{number}": range(size) for number, size in enumerate(sizes)})
    left = kept(items)
    for axis in items[0].decorators:
        assert {item.decorators[axis] for item in left} == {item.decorators[axis] for item in items}
    assert max(sizes) <= len(left) <= sum(sizes) and left[0] is items[0]
    assert len(sizes) > 1 or len(left) == len(items), "a table keeps its rows"


def test_values_that_are_free_to_choose_take_turns():
    left = kept(matrix(name="abcdef", dtype=("float32", "bfloat16")))
    assert [item.decorators["dtype"] for item in left].count("float32") == 3 == len(left) / 2


def test_rows_of_one_decorator_stay_although_their_values_repeat():
    rows = [Item("test", {"a,b": row}) for row in ((1, 1), (1, 2), (2, 1), (2, 2))]
    assert kept(rows) == rows


def test_what_is_left_out_already_shows_nothing():
    items = matrix(a="xy", b="pq")
    items[0].left_out = items[3].left_out = True
    assert kept(items) == items[1:3]


def test_a_value_that_is_kept_must_be_one():
    with pytest.raises(ValueError, match="no parameter"):
        short(["a"], "b")


def test_a_forked_process_has_torch_and_its_own_environment(tmp_path):
    program = "import os, sys; print('torch' in sys.modules, 'graft' in sys.modules, os.getcwd(), os.environ['IT'])"
    done = run_python("-c", program, "argument", cwd=tmp_path, env={**os.environ, "IT": "is"})
    assert (done.returncode, done.stdout, done.stderr) == (0, f"True False {tmp_path} is\n", "")
    done = run_python("-c", "import atexit, sys; atexit.register(print, 'bye'); sys.exit(3)")
    assert (done.returncode, done.stdout) == (3, "bye\n")
    done = run_python("-c", "1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_the_first_process_rewrites_the_files(pytestconfig, tmp_path, monkeypatch):
    files = [tmp_path / "folder" / f"test_{number}.py" for number in range(2)]
    files[0].parent.mkdir()
    for file in files:
        file.write_text("def test_it():\n    assert [1] == [2]\n")
    monkeypatch.setattr(pytestconfig, "args", [str(tmp_path), str(files[0])])
    written = [rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}" for file in files]
    for without, there in ((True, [False, False]), (False, [True, True])):
        monkeypatch.setattr(sys, "dont_write_bytecode", without)
        rewrite_files(pytestconfig)
        assert [path.exists() for path in written] == there
    code = rewrite._read_pyc(files[0], written[0])
    assert code is not None and "_pytest.assertion.rewrite" in code.co_names, (
        "an import takes it, and it is rewritten"
    )
    files[0].write_text("def test_other():\n    assert [1] == [2]\n")
    assert rewrite._read_pyc(files[0], written[0]) is None
