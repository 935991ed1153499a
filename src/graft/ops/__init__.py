"""graft's operators. Importing this package registers all of them with torch as `torch.ops.graft.*`.

Each folder here is one op; its `op.py` defines it. `streams.py` defines those that say what runs where.
"""

import importlib
import pkgutil

from graft.ops import streams
from graft.ops.call import Call
from graft.ops.selection import bind, choose
from graft.ops.spec import OPS, Kernel, OpSpec

for folder in pkgutil.iter_modules(__path__):
    if folder.ispkg:
        importlib.import_module(f"{__name__}.{folder.name}.op")

__all__ = ["OPS", "Call", "Kernel", "OpSpec", "bind", "choose", "streams"]
