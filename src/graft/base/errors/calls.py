"""Arguments that a compiled program cannot be called with."""

from __future__ import annotations

from graft.base.errors.base import UsageError


class GuardFailed(UsageError):
    """The inputs take another way through the program than the one that was captured."""


class PositionError(UsageError):
    """A write to a location that the cache does not have. Nothing was written."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; nothing was written. Pass a longer cache or a smaller position")


class SharedMemoryError(UsageError):
    """Inputs that share memory, at least one of which the program writes."""

    def __init__(self, written: str, other: str) -> None:
        super().__init__(
            f"{written} is written and shares memory with {other}, so that a write to one changes the other."
            " Nothing was written. Pass tensors of their own (clone one of them)"
        )


class UnsupportedCache(UsageError):
    """A cache of Hugging Face's that a graph cannot write."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name} among the inputs or results is not supported: it {why}. Pass a StaticCache(config=…,"
            " max_cache_len=…), or an EncoderDecoderCache of two, or use_cache=False"
        )


class ReplacedBuffer(UsageError):
    def __init__(self, name: str, kind: str = "buffer") -> None:
        super().__init__(
            f"the {kind} {name} was replaced after compiling, and the graph would go on with the old one;"
            f" write into it ({name}.copy_(…), load_state_dict), or compile the module again"
        )


class ChangedModule(UsageError):
    """What the graph holds as it was: a submodule, a number, the hooks of a module."""

    def __init__(self, what: str, change: str) -> None:
        super().__init__(
            f"{what} {change} after compiling, and the graph would go on without that; compile the module again"
        )


class ReadOnlyInput(UsageError):
    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} is written by the program but {problem}; nothing was written. Pass {name}.clone()")


class GradientsRefused(UsageError):
    """Gradients are asked for that the results would not carry, or not rightly. Nothing ran."""


class TransformRefused(UsageError):
    """A transform of torch.func around a call, whose inputs have no memory of their own."""

    def __init__(self, transform: str, name: str) -> None:
        super().__init__(
            f"{transform} is around the call of a compiled module, whose kernels read memory, and {name} is wrapped"
            " by it; transform the module itself: graft.compile(torch.func.vmap(module), …) compiles what comes out"
        )


class AutocastRefused(UsageError):
    """The casts of torch.autocast are no part of a graph that it is around."""

    def __init__(self, kind: str, dtype: object) -> None:
        super().__init__(
            f"torch.autocast is on for {kind} ({dtype}), whose casts are not in the graph; open it inside of the"
            " forward that is compiled, convert the module (module.to(torch.bfloat16)), or leave it before the call"
        )


class OutRefused(UsageError):
    """Tensors that the results cannot be written into. Nothing ran."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}; nothing ran. compiled.signature.results says what each result is")


class DonationRefused(UsageError):
    """Memory that a result cannot take over without somebody seeing another value."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} cannot be donated: {problem}")
