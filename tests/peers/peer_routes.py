"""The ways through graft that a program takes; `passes` and `dynamo` run Inductor's final graph, no C++ is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from peer_programs import Program

import graft
from graft.api import torch_compile as route
from graft.backends.inductor import inductor_settings, post_grad_backend, reset_compiler
from graft.backends.inductor_caches import without_caches

COMPILE = torch.compile


def seen(_: str, gm: Any) -> None:
    gm.graph.lint()


def through_passes(gm: Any, **settings: Any) -> Any:
    """torch.compile(gm, dynamic=…, options=…) as far as the graph that code would be generated from."""
    backend = post_grad_backend(settings["options"], seen)
    return COMPILE(gm, backend=backend, dynamic=settings["dynamic"])


def with_passes(
    gm: Any, inputs: Sequence[Any], mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """The same in the place of graft.backends.inductor.compile_with_inductor."""
    return post_grad_backend({**inductor_settings(), **(options or {})}, seen)(gm, list(inputs))


@contextmanager
def no_code() -> Iterator[None]:
    with (
        mock.patch("graft.backends.inductor.torch.compile", through_passes),
        mock.patch.object(route, "compile_with_inductor", with_passes),
        without_caches(),
    ):
        yield


def graft_compile(backend: str) -> Callable[[Program, Any], Any]:
    def compiled(program: Program, subject: Any) -> Any:
        return graft.compile(
            subject, program.inputs(), backend=backend, dynamic_shapes=program.dynamic, config=program.config
        )

    return compiled


def torch_compile(dynamic: bool) -> Callable[[Program, Any], Any]:
    def compiled(program: Program, subject: Any) -> Any:
        backend = graft.Backend(program.config)
        run = COMPILE(subject, backend=backend, dynamic=dynamic)

        def call(*args: Any) -> Any:
            return run(*args)

        call.reports = backend.reports  # type: ignore[attr-defined]
        return call

    return compiled


ROUTES: dict[str, Callable[[Program, Any], Any]] = {
    "eager": graft_compile("eager"),
    "passes": graft_compile("inductor"),
    "dynamo": torch_compile(False),
    "dynamo-dynamic": torch_compile(True),
    "cuda_graph": graft_compile("cuda_graph"),
    "inductor": graft_compile("inductor"),  # with code
    "torch.compile": torch_compile(False),  # with code
}
WITH_CODE = ("eager", "cuda_graph", "inductor", "torch.compile")


@contextmanager
def compiled_on(name: str, program: Program, subject: Any) -> Iterator[Any]:
    """The program on a route; within it, calls compile what is left to the first call."""
    reset_compiler()
    try:
        if name in WITH_CODE:
            yield ROUTES[name](program, subject)
        else:
            with no_code():
                yield ROUTES[name](program, subject)
    finally:
        reset_compiler()


def reports(compiled: Any) -> list[Any]:
    return [compiled.report] if hasattr(compiled, "report") else list(compiled.reports)
