"""Compilers, kernels, CUDA graphs and torch.compile."""

from __future__ import annotations

from collections.abc import Iterable

from graft.base.errors.base import GraftError, UsageError


class NoGpu(UsageError):
    def __init__(self, what: str) -> None:
        super().__init__(f"{what} measures on a GPU, and torch sees none here; run it on the machine that has one")


class NoCompiler(UsageError):
    def __init__(self, asked: str | None, tried: Iterable[str]) -> None:
        missing = (
            f"CXX names {asked!r}, which is not there" if asked else f"none of {', '.join(tried)} is on the path"
        )
        super().__init__(
            f"backend='native' needs a C++ compiler: {missing}; install g++ or clang++ (apt install g++), name one in"
            " CXX, or use backend='eager'"
        )


class NoFloat8(UsageError):
    def __init__(self, device: object, why: str) -> None:
        super().__init__(f"kv_cache_dtype='fp8' cannot be had on {device}: {why}; leave it out, or use 'auto'")


class CacheNotNative(UsageError):
    def __init__(self) -> None:
        super().__init__(
            "kv_cache_dtype='fp8' is not supported by the native kernels, which read and write 16 and 32 bits; leave"
            " out backend='native' (eager runs it then), or leave out kv_cache_dtype"
        )


class NativeFailed(GraftError):
    """The native backend cannot serve; where nobody asked for it by name, eager does."""


class CompilerFailed(NativeFailed):
    def __init__(self, compiler: str, source: str, said: str) -> None:
        super().__init__(
            f"{compiler} could not compile {source}; use backend='eager', or try another compiler with CXX. It said:"
            f"\n{said}"
        )


class CannotLoad(NativeFailed):
    def __init__(self, path: str, said: str) -> None:
        super().__init__(
            f"{path} was compiled but does not load: {said}; if its folder is mounted noexec, name another in"
            " GRAFT_NATIVE_CACHE_DIR, or use backend='eager'"
        )


class NothingNative(NativeFailed):
    def __init__(self, reason: str) -> None:
        super().__init__(f"backend='native' can lower nothing of this graph: {reason}; use backend='eager'")


class TooManyThreads(UsageError):
    def __init__(self, asked: int, cores: int, name: str = "GRAFT_NUM_THREADS") -> None:
        super().__init__(
            f"{name} is {asked}, but this process may use {cores} cores, and threads that share one wait"
            f" for each other; set it to {cores} or less, or leave it out"
        )


class KernelUnavailable(GraftError):
    """A kernel asked for by name cannot run this call."""


class GraphRefused(GraftError):
    """A graph of torch.compile that graft leaves to stock Inductor; the message says why."""


class Recompiled(GraftError):
    """A call that Dynamo compiled anew although that was refused; the message has the guards that failed."""


class CaptureRefused(GraftError):
    """What a CUDA graph cannot hold; the message names the node, and nothing was written."""
