"""Triton's interpreter in less time: it makes its language ready once in a launch, not for each device function too.

Where a kernel calls a function of its own, the interpreter goes through all members of the language again, of which
none is left to replace: a third of the time of such tests. And it makes a table of dtypes whenever it looks at one.
Each sum and product of integers is computed again in 64 bits, for an assertion that is left out unless a kernel is
debugged; and each tensor has a shape made anew, with a constant for every size: a fifth of the time each.
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
    check_overflow_where_it_is_asserted()
    make_shapes_once()


def check_overflow_where_it_is_asserted() -> None:
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def in_debugging(self: Any, *operation: Any) -> None:
        if self.builder.options.debug:
            check(self, *operation)

    TritonSemantic.binary_op_sanitize_overflow_impl = in_debugging


def make_shapes_once() -> None:
    """A shape is made for the first tensor that has it, and for the first type."""
    from triton.language.core import block_type, constexpr, tensor

    make, make_type = tensor.__init__, block_type.__init__
    shapes, types = dict[tuple[int, ...], tuple[Any, Any]](), dict[tuple[Any, ...], tuple[Any, ...]]()

    def init(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(n.value if isinstance(n, constexpr) else n for n in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types[key]

    tensor.__init__, block_type.__init__ = init, init_type
