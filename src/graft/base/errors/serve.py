"""The server: what it refuses, and an engine process that is not there. The HTTP status is part of each."""

from __future__ import annotations

from graft.base.errors.base import GraftError, UsageError


class ExtraMissing(UsageError):
    def __init__(self, what: str, extra: str, module: str) -> None:
        super().__init__(f"{what} needs {module}, which is not installed: pip install 'graft[{extra}]'")


class HttpRefused(UsageError):
    """A request that is not served. param: the field at fault. code: OpenAI's word for it, if it has one."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class Overloaded(HttpRefused):
    """429: as many requests wait as may."""

    def __init__(self, asked: int, open_now: int, most: int) -> None:
        super().__init__(
            f"the queue is full: {open_now} answers are open, {asked} more are asked for, and {most} may be; try"
            " again later (--max-queued-requests, --max-num-seqs)",
            status=429,
            code="queue_full",
        )


class QueueTimeout(HttpRefused):
    """429: the request waited for too long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the request waited for {seconds:g} seconds and was not begun; try again later (--max-queue-time)",
            status=429,
            code="queue_timeout",
        )


class EngineGone(GraftError):
    """503: the engine process is loading, has died, or the server is shutting down; the message says which."""

    status = 503


class ModelNotLoaded(GraftError):
    """The engine process could not load the model; the message and the exit code are its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class TokenizerRefused(GraftError):
    def __init__(self, model: str, why: str) -> None:
        super().__init__(
            f"graft serve cannot use the tokenizer of {model}: {why}; convert it to a tokenizer.json, or serve the"
            " model from a program of your own with graft.LLM"
        )


class ServerFailed(GraftError):
    """A server that is measured does not answer."""

    def __init__(self, server: str, why: str) -> None:
        super().__init__(f"the server at {server} cannot be measured: {why}")


class ReplicaLost(EngineGone):
    """503: the replica that computed an answer is gone."""

    def __init__(self, tries: int) -> None:
        tried = "" if tries == 1 else f" ({tries} were tried)"
        super().__init__(f"the replica that computed this answer is gone{tried}; the answer is lost, try again")


class ClusterMissing(UsageError):
    def __init__(self, why: object) -> None:
        super().__init__(
            f"no Ray cluster can be reached ({why}): start one with `ray start --head`, name one with --address, or"
            " use `graft serve MODEL --replicas N`, which starts its own"
        )
