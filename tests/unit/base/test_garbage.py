"""Old objects are frozen while an engine works, and collected as ever afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from graft.base.garbage import old_objects_frozen


class Node:
    def __init__(self):
        self.me = self


def test_what_is_old_waits_and_what_is_new_is_collected():
    gc.collect()
    old = Node()
    found = weakref.ref(old)
    with old_objects_frozen():
        del old
        with old_objects_frozen():
            pass
        new = weakref.ref(Node())
        gc.collect()
        assert found() is not None and gc.get_freeze_count() > 0, "an inner block does not thaw"
        assert new() is None
    gc.collect()
    assert found() is None and gc.get_freeze_count() == 0


def test_an_error_thaws():
    with pytest.raises(ZeroDivisionError), old_objects_frozen():
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0
