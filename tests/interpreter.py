"""Triton's interpreter in less time: it makes its language ready once in a launch, not for each device function too.

Where a kernel calls a function of its own, the interpreter goes through all members of the language again, of which
none is left to replace: a third of the time of such tests. And it makes a table of dtypes whenever it looks at one.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def patch_once() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    if hasattr(interpreter, "graft_patched"):  # by the process that this one was forked from
        return
    interpreter.graft_patched = True
    patch, look_up, ready, dtypes = (
        interpreter._patch_lang,
        interpreter._get_np_dtype,
        set[Any](),
        dict[Any, np.dtype](),
    )

    class Scope(interpreter._LangPatchScope):
        """Of a launch: when it ends, nothing is ready any more."""

        def restore(self) -> None:
            super().restore()
            ready.clear()

    def patch_language(fn: Any) -> Any:
        seen = {lang for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values())}
        if seen and seen <= ready:
            return interpreter._LangPatchScope()
        ready.update(seen)
        scope = Scope()
        scope._changes = patch(fn)._changes
        return scope

    def np_dtype(dtype: Any) -> np.dtype:
        if isinstance(dtype, tl.block_type):
            dtype = dtype.element_ty
        if isinstance(dtype, tl.pointer_type):
            return look_up(dtype)
        if dtype not in dtypes:
            dtypes[dtype] = look_up(dtype)
        return dtypes[dtype]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_language, np_dtype
