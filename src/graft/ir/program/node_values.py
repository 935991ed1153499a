"""What torch writes beside the value of each node, left out while a module is exported.

`meta["tensor_meta"]` repeats sizes, strides and layout of `meta["val"]`, which graft reads alone; a graph that comes
from the cache has none either. With open sizes it is asked of symbols: 8 % of an export.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental import proxy_tensor

_exporting = threading.local()  # .depth: how many exports this thread is in; other threads keep what torch writes
_metadata, _set_meta = proxy_tensor._extract_tensor_metadata, proxy_tensor.set_meta


@contextmanager
def values_alone() -> Iterator[None]:
    """Within it, nodes that this thread makes have their value alone."""
    # they stay: of two threads, the one that ends first would put the other's back
    proxy_tensor._extract_tensor_metadata, proxy_tensor.set_meta = metadata, set_meta
    _exporting.depth = depth() + 1
    try:
        yield
    finally:
        _exporting.depth -= 1


def depth() -> int:
    return getattr(_exporting, "depth", 0)


def metadata(value: Any) -> Any:
    return None if depth() else _metadata(value)


def set_meta(proxy: Any, value: Any) -> Any:
    made = _set_meta(proxy, value)
    if depth():
        made.node.meta.pop("tensor_meta", None)
    return made
