"""One class for each mistake a user can make. Each message says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class GraftError(Exception):
    """Base of every error that graft raises on purpose; the command line prints it without a traceback."""

    exit_code = 1


class UsageError(GraftError):
    """The request itself is wrong: an unknown name, key or option."""

    exit_code = 2


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'? Known: …` for an unknown name."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
    return f"{hint or '.'} Known: {', '.join(names) or 'none'}."


class UnknownModel(UsageError):
    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown model {name!r}: not a registry name, a folder, or a .gguf file{near(name, known)}")


class UnknownTransform(UsageError):
    def __init__(self, name: str, known: Iterable[str], where: str = "") -> None:
        super().__init__(f"unknown transform {name!r}{f' in {where}' if where else ''}{near(name, known)}")


class UnknownOp(UsageError):
    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown op {name!r}{near(name, known)}")


class DuplicateTransform(GraftError):
    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(
            f"a transform named {name!r} is registered already; names are unique. Known: {', '.join(sorted(known))}."
        )


class ConfigError(UsageError):
    """A configuration key or value that cannot be used."""


class UnknownKey(ConfigError):
    def __init__(self, key: str, where: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown key {key!r} in {where}{near(key, known)}")


class WrongType(ConfigError):
    def __init__(self, key: str, value: object, expected: str, where: str) -> None:
        super().__init__(
            f"{where}: {key} must be {expected}, but is {value!r} ({type(value).__name__}); correct the value"
        )


class OrderError(ConfigError):
    """`after` / `before` constraints that no order can satisfy."""


class CheckpointError(GraftError):
    """A model's files are missing, truncated or not what they should be."""


class PackingError(GraftError):
    """A weight that cannot be packed for the native kernels."""


class TokenizerMissing(GraftError):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} has no tokenizer, so text cannot be turned into tokens; pass token ids instead"
            " (LLM.generate([[1, 2, 3]]), graft run --token-ids 1,2,3) or add tokenizer files to the folder"
        )


class PromptTooLong(UsageError):
    def __init__(self, tokens: int, new_tokens: int, context: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens and {new_tokens} new ones are asked for, but the model's context is"
            f" {context}; shorten the prompt or lower max_tokens"
        )


class EmptyPrompt(UsageError):
    def __init__(self) -> None:
        super().__init__("a prompt has no tokens; give at least one (a tokenizer may add none to an empty text)")


class NotText(UsageError):
    def __init__(self, detail: str) -> None:
        super().__init__(f"the prompt is not valid text: {detail}; decode it as UTF-8 first, or pass token ids")


class LogitsError(GraftError):
    def __init__(self) -> None:
        super().__init__(
            "the logits of a request have no finite largest value (NaN, infinity, or every token barred), so no token"
            " can be chosen; check the weights, try float32, or weaken the penalties"
        )


class DiskFull(GraftError):
    def __init__(self, path: str, detail: str, advice: str = "Free space and run again") -> None:
        super().__init__(f"writing {path} failed: {detail}; nothing was left behind. {advice}")


class CaptureError(GraftError):
    """torch.export could not capture the module."""


class UnsupportedAttention(CaptureError):
    def __init__(self, module: str, problem: str) -> None:
        super().__init__(
            f"attention module {module}: {problem}; graft will not drop it silently."
            " Extend capture/attention.py and the schema of graft::attention, or capture without it"
        )


class UnsupportedState(CaptureError):
    """What a decoder keeps from step to step would be lost; the message names the layers and their state."""


class PatternError(GraftError):
    """A pattern or replacement function that cannot be used as one."""


class VerificationError(GraftError):
    """A rewritten graph broke an invariant."""


class DecodeMismatch(VerificationError):
    """Decode steps do not compute what one pass over the same tokens computes; the first layer is named."""


class ProofError(VerificationError):
    """A replacement does not compute what it replaced, or that could not be tried out."""


class StreamOrderError(VerificationError):
    """Two calls on different streams touch one memory, and nothing makes the second wait for the first."""

    def __init__(self, first: str, second: str, problem: str, fix: str) -> None:
        super().__init__(f"{second} does not wait for {first}: {problem}; {fix}")


class ProfileError(GraftError):
    """A profile of measured costs cannot be read, or was measured on something else."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"profile {path}: {problem}; measure it again, or leave `profile` empty")


class TableError(UsageError):
    """A table of measured kernels that cannot be read."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"tuning table {path}: {problem}; correct the file, or delete it and run `graft tune`")


class NoGpu(UsageError):
    def __init__(self, what: str) -> None:
        super().__init__(f"{what} measures on a GPU, and torch sees none here; run it on the machine that has one")


class TransformError(GraftError):
    def __init__(self, transform: str, detail: str) -> None:
        super().__init__(
            f"transform {transform} failed and was rolled back: {detail}."
            f" Set transforms.{transform}.on_error=skip to go on without it, or transforms.{transform}.enabled=false"
        )


class UnknownBackend(UsageError):
    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown backend {name!r}{near(name, known)}")


class NoCompiler(UsageError):
    def __init__(self, asked: str | None, tried: Iterable[str]) -> None:
        why = f"CXX names {asked!r}, which is not there" if asked else f"none of {', '.join(tried)} is on the path"
        super().__init__(
            f"backend='native' needs a C++ compiler: {why}; install g++ or clang++ (apt install g++), name one in"
            " CXX, or use backend='eager'"
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


class BadIndex(UsageError):
    def __init__(self, node: str, path: str) -> None:
        place = f"%{node}" + (f" ({path})" if path else "")
        super().__init__(f"{place} was given an index outside of its table: a token or position the model lacks")


class QuantizationError(GraftError):
    """A weight that cannot be quantized, or one that is not what it was quantized from."""


class KernelUnavailable(GraftError):
    """A kernel asked for by name cannot run this call."""


class ProgramError(GraftError):
    """The program of a graft::elementwise call cannot be read."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        pointer = f"{text[:position]}⟨here⟩{text[position:]}"
        super().__init__(f"bad elementwise program at position {position}: {problem}; {pointer}")


class EngineStuck(GraftError):
    def __init__(self, waiting: int, running: int, available: int) -> None:
        super().__init__(
            f"none of the requests can be served (waiting: {waiting}, running: {running}, blocks: {available}); this"
            " is a defect of the scheduler. Please report it with the requests that led to it"
        )


class EngineFailed(GraftError):
    """A step of the engine failed, or the engine takes no request (from here); the message says which."""


class OutOfMemory(GraftError):
    """Memory is not there for what was asked; the message has the numbers."""


class PeerNotRun(GraftError):
    """An engine that a benchmark leaves out: not there, or not for this model. Its row says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not run: {reason}")


class DumpError(GraftError):
    """A dump folder cannot be written or read."""


class ReportError(GraftError):
    """A report cannot be written, or a file that goes into it cannot be read."""


class RunMismatch(UsageError):
    def __init__(self, before: str, after: str) -> None:
        super().__init__(
            f"{before} and {after} cannot be compared strictly; dump the same model twice, or leave out --strict"
        )


class BaselineMismatch(UsageError):
    def __init__(self, folder: str, kept: str, checked: str) -> None:
        super().__init__(
            f"the baseline {folder} is a run of {kept}, but {checked} is checked; check that model"
            " (--model, --dtype), or save a baseline of this one (graft check --model MODEL --save-baseline DIR)"
        )


class ShapesUnknown(GraftError):
    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} has no recorded shape, so what it moves cannot be counted; capture the model with graft"
            " (graft discover MODEL), or dump it again (graft dump MODEL -o DIR)"
        )


class UnknownCandidate(UsageError):
    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown candidate {name!r}{near(name, known)} `graft discover` lists them")


class UnknownMatch(UsageError):
    def __init__(self, name: str, known: Sequence[str], run: str) -> None:
        listed = f"it has {', '.join(known[:3])}{' …' if len(known) > 3 else ''}" if known else "it has none"
        super().__init__(f"unknown match {name!r} of {run}: {listed}; graft repro {run} lists them")


class ReproRefused(GraftError):
    """A match that no file of its own can show; the message says why."""


class ExportRefused(GraftError):
    """A graph that a format cannot hold; the message says what would be lost."""


class GuardFailed(UsageError):
    """The inputs take another way through the program than the one that was captured."""


class PositionError(UsageError):
    """A write to a place that the cache does not have. Nothing was written."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; nothing was written. Pass a longer cache or a smaller position")


class SharedMemoryError(UsageError):
    """Inputs that share memory, at least one of which the program writes."""

    def __init__(self, written: str, other: str) -> None:
        super().__init__(
            f"{written} is written and shares memory with {other}, so that a write to one changes the other."
            " Nothing was written. Pass tensors of their own (clone one of them)"
        )


class ReplacedBuffer(UsageError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"the buffer {name} was replaced after compiling, and the graph would go on with the old one;"
            f" write into it ({name}.copy_(…), load_state_dict), or compile the module again"
        )


class ReadOnlyInput(UsageError):
    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} is written by the program but {problem}; nothing was written. Pass {name}.clone()")


class LiftError(GraftError):
    """A buffer cannot be made an input of the graph, or put back."""


class ArtifactError(GraftError):
    """A saved module cannot be written, or what is there is not one that can be loaded."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


class LayoutError(GraftError):
    """Inputs of the engine's graph, or a batch for them, that are not as kvcache/layout.py has them: a defect."""


class OutOfCache(GraftError):
    """The key-value cache has no room for the requests."""


class CacheMisuse(GraftError):
    """A call of the block manager that cannot be meant: a closed table, a write without room. Nothing has changed."""


class CacheCorrupt(GraftError):
    """An invariant of the block manager does not hold: a defect of graft."""


class EventOrder(GraftError):
    """A key-value cache event that cannot follow on those before it: events were lost, repeated or mixed up."""


class GraphRefused(GraftError):
    """A graph of torch.compile that graft leaves to stock Inductor; the message says why."""


class Recompiled(GraftError):
    """A call that Dynamo compiled anew although that was refused; the message has the guards that failed."""


class CaptureRefused(GraftError):
    """What a CUDA graph cannot hold; the message names the node, and nothing was written."""
