"""The native product and the thread team under address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import numpy as np
import pytest
from test_native_linear import PRODUCTS
from test_native_team import call

from native_build import Target, compiled, sanitized
from native_linear_cases import KINDS, close, expected, make, run


def target_of(kinds: str) -> Target:
    target = sanitized(kinds)
    if target is None:
        pytest.skip(f"a program with -fsanitize={kinds} cannot be made or run on this machine")
    return target


@pytest.mark.exhaustive
@pytest.mark.parametrize("kinds", ["address,undefined", "thread"])
def test_products_are_clean(kinds):
    target = target_of(kinds)
    for kind in KINDS:
        for product in PRODUCTS[1::2]:
            p = replace(product, kind=kind, threads=2)
            d = make(p)
            assert close(run(p, d, target), expected(p, d))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kinds", ["address,undefined", "thread"])
def test_the_team_is_clean(kinds):
    target = target_of(kinds)
    assert call(target, "barriers", 1, 3, 200, 7, 0, 0) == [0]
    assert call(target, "barriers", 1, 3, 30, 7, 300, 0) == [0]
    assert call(target, "chunks", 100, 3, 50, 100) == [50] * 100
    assert call(target, "callers", 2, 3, 4, 50) == [4 * 50 * 15, 0]
    assert call(target, "ends", 1, 3, 20) == [20]


WRONG = """
#include <thread>
extern "C" void past(void** arrays, const int64_t* number) { static_cast<float*>(arrays[0])[number[0]] = 1; }
extern "C" void race(void** arrays, const int64_t*) {
  int64_t& n = *static_cast<int64_t*>(arrays[0]);
  std::thread other([&] { for (int i = 0; i < 1000; i++) n++; });
  for (int i = 0; i < 1000; i++) n++;
  other.join();
}
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kinds", "entry"), [("address,undefined", "past"), ("thread", "race")])
def test_the_sanitizers_notice(kinds, entry):
    library = compiled("#include <cstdint>\n" + WRONG, ("past", "race"), target_of(kinds))
    with pytest.raises(subprocess.CalledProcessError):
        library.call(entry, [np.zeros(16, np.int64)], [32])
