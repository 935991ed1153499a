"""torch.fx's own `__call__` and `__getattr__` of modules, put on and taken off without a look at a thousand classes.

A trace puts both on torch.nn.Module and takes them off again. Python then looks through all subclasses for slots to
fill: 2.5 ms a trace with those of transformers and of the test files, 3 % of the short run. The slots call whatever
function has the name, before and after, so the name is written and Python told that the class has changed.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

NAMES = ("__call__", "__getattr__")


def patch_modules_directly() -> None:
    import torch
    from torch.fx import _symbolic_trace

    (namespace,) = gc.get_referents(vars(torch.nn.Module))
    kind = _symbolic_trace._PatchedFnSetAttr
    known = sys.implementation.name == "cpython" and isinstance(namespace, dict)
    if not known or "__wrapped__" in vars(kind.patch):  # by the process that this one was forked from
        return
    changed = ctypes.pythonapi.PyType_Modified
    changed.argtypes, changed.restype = [ctypes.py_object], None

    def writing(original: Any, field: str) -> Any:
        def write(self: Any) -> None:
            if self.frame_dict is not torch.nn.Module or self.fn_name not in NAMES:
                return original(self)
            namespace[self.fn_name] = getattr(self, field)
            changed(torch.nn.Module)
            return None

        write.__wrapped__ = original  # type: ignore[attr-defined]
        return write

    kind.patch = writing(kind.patch, "new_fn")
    kind.revert = writing(kind.revert, "orig_fn")
