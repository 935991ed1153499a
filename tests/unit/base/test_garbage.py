"""Old objects are frozen while an engine works, and collected as ever afterwards."""

from __future__ import annotations

import pytest

from marks import short
from processes import run_python

# in a process of its own: a test run has frozen what it imported, and would have to thaw it
PROGRAM = """
import gc
import weakref

from graft.base.garbage import old_objects_frozen


class Node:
    def __init__(self):
        self.me = self


gc.unfreeze()
gc.collect()
counted, gc.get_freeze_count = gc.get_freeze_count, lambda: counted() + BEGUN
old = Node()
found = weakref.ref(old)
with old_objects_frozen():
    del old
    with old_objects_frozen():
        pass
    new = weakref.ref(Node())
    gc.collect()
    assert found() is not None and counted() > 0, "an inner block does not thaw"
    assert new() is None
gc.collect()
assert found() is None and counted() == 0
try:
    with old_objects_frozen():
        1 / 0
except ZeroDivisionError:
    assert counted() == 0, "an error thaws"
    print("through")
"""


@pytest.mark.parametrize("begun", short(["0", "375"], "375"))
def test_what_is_old_waits_and_what_is_new_is_collected(begun):
    """begun: objects that Python itself has frozen, as 3.12 does; nobody has asked for anything by that."""
    done = run_python("-c", PROGRAM.replace("BEGUN", begun))
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr


FROZEN = """
import gc

from graft.base.garbage import old_objects_frozen

gc.freeze()
before, made = gc.get_freeze_count(), [[] for _ in range(1000)]
with old_objects_frozen(), old_objects_frozen():
    assert 0 < before <= gc.get_freeze_count() + 100 < before + len(made), "nothing that could not be taken back"
assert gc.get_freeze_count() > before - 100  # less what was let go
print("through")
"""


def test_what_others_froze_stays_frozen():
    done = run_python("-c", FROZEN)
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr


RARE = """
import gc

from graft.base.garbage import RARELY, old_objects_frozen

full = []
gc.callbacks.append(lambda phase, about: full.append(about["generation"] == 2 and phase == "stop"))
gc.unfreeze()


def collections():
    before = sum(full)
    kept = [[] for _ in range(200_000)]  # they live on, and take in what a young collection leaves
    return sum(full) - before


usual = gc.get_threshold()
outside = collections()
with old_objects_frozen():
    inside = collections()
    with old_objects_frozen():
        assert gc.get_threshold() == (*usual[:2], RARELY)
    assert gc.get_threshold() == (*usual[:2], RARELY), "an inner block leaves them"
assert gc.get_threshold() == usual
with old_objects_frozen():
    gc.set_threshold(500, 5, 5)
assert gc.get_threshold() == (500, 5, 5), "what somebody sets meanwhile stays"
for given in ((700, 10, 2 * RARELY), (700, 10, 0)):  # rarer, and never
    gc.set_threshold(*given)
    with old_objects_frozen():
        assert gc.get_threshold() == given
    assert gc.get_threshold() == given
print("full", outside, inside)
"""


def test_full_collections_are_rare_while_an_engine_works():
    """They go through the token lists of all requests, and every sequence waits."""
    done = run_python("-c", RARE)
    assert done.returncode == 0, done.stderr
    outside, inside = map(int, done.stdout.split()[1:])
    assert outside > 0 == inside
