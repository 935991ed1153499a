"""Triton's interpreter, as near to a GPU as kernels of 16 bits need it."""

from __future__ import annotations

from typing import Any

import numpy as np


def round_to_nearest() -> None:
    """float32 becomes the nearest bfloat16. The interpreter cuts the number off: twice the error, and all of it
    towards zero, so that whole rows are off by a factor. And tl.dot multiplies numbers in bfloat16, where the
    interpreter multiplies the whole numbers that it keeps them as; tl.maximum of a number and NaN is the number.
    Idempotent."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain, product = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_dot
    if hasattr(plain, "graft_plain"):
        return

    def cast(self: Any, src: Any, to: Any) -> Any:
        if src.dtype.scalar is tl.float32 and to.scalar is tl.bfloat16:
            return interpreter.TensorHandle(nearest(src.data), tl.bfloat16)
        return plain(self, src, to)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(self, widened(a), widened(b), *rest)

    cast.graft_plain = plain  # pyrefly: ignore
    interpreter.InterpreterBuilder.cast_impl = cast  # pyrefly: ignore
    interpreter.InterpreterBuilder.create_dot = dot  # pyrefly: ignore
    interpreter.InterpreterBuilder.create_maxnumf = larger  # pyrefly: ignore
    interpreter.InterpreterBuilder.create_minnumf = smaller  # pyrefly: ignore


def larger(self: Any, a: Any, b: Any) -> Any:
    return self.binary_op(a, b, np.fmax)


def smaller(self: Any, a: Any, b: Any) -> Any:
    return self.binary_op(a, b, np.fmin)


def widened(handle: Any) -> Any:
    """A matrix of bfloat16, which the interpreter keeps as whole numbers, in float32."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not handle.dtype.is_bf16():
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def nearest(numbers: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16; of two that are as near the even one."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1).astype(np.uint32)) >> 16
    odd = np.isnan(numbers)
    return np.where(odd, (bits >> 16) | 0x40, rounded).astype(np.uint16)
