"""Products are rounded before they are added, in the code that a GPU runs too."""

from __future__ import annotations

import re

from gpu_code import compiled
from marks import FULL


def test_no_rotation_is_contracted_into_multiply_adds():
    """`plain` rounds without `rounded`: it shows what would be lost, and that this test finds it."""
    dtypes = ("bf16", "fp16") if FULL else ("bf16",)  # a kernel takes a core-second to compile
    done = compiled()
    found = dict(re.findall(r"^(\w+ \w+) (fma|rounds)$", done.stdout, re.MULTILINE))
    rounds = {"pairs": "rounds", "newest": "rounds", "plain": "fma"}
    assert found == {f"{kernel} {dtype}": how for kernel, how in rounds.items() for dtype in dtypes}, done.stderr
