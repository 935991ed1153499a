"""A step on its way: what it feeds, whose tokens it chooses, and how they come to the host.

    chosen on the device ─▶ Arrival, on the host, when the device has come so far
                         └▶ Feed: into the inputs of the step after it, which is launched before anybody knows them

While it is on its way, `Request.feeding` and `Request.coming` count what it brings, so that the next step can be
planned as if it had been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from graft.engine.core import Request
from graft.engine.decode.arrival import Arrival
from graft.engine.decode.capture import CapturedStep
from graft.engine.due import Due
from graft.engine.scheduler import StepPlan
from graft.ops.layout import on_host


@dataclass(frozen=True)
class Feed:
    """Tokens that only the device knows, and the rows that they are fed in. A row of them is one token."""

    rows: Tensor  # [n]
    tokens: Tensor  # [n]

    def into(self, target: Tensor) -> None:
        """target: [rows or more]."""
        target.index_copy_(0, self.rows, self.tokens)


@dataclass(eq=False)
class InFlightStep:
    """`index` says where in `chosen`, on the device, and in `arrival` the token of a request is."""

    plan: StepPlan
    due: list[Due]
    chosen: Tensor  # [rows]
    arrival: Arrival
    index: dict[Request, int]
    capture: CapturedStep | None = None  # that runs it; None: it is launched kernel by kernel, or has prompts in it
    fed: dict[Request, int] = field(default_factory=dict)  # since it took off
    launching: float = 0.0  # seconds of the host

    def take_off(self) -> None:
        self.fed = dict(zip(self.plan.requests, self.plan.counts, strict=True))
        for request, count in self.fed.items():
            request.feeding += count
        for one in self.due:
            one.request.coming += 1

    def land(self) -> None:
        for request, count in self.fed.items():
            request.feeding -= count
        for one in self.due:
            one.request.coming -= one.request in self.fed

    def drop(self, request: Request) -> None:
        """Its token is not wanted: the request is as if this step had never been."""
        for one in self.due:
            if one.request is request:
                one.restore()
                request.coming -= request in self.fed
        request.feeding -= self.fed.pop(request, 0)
        self.due = [one for one in self.due if one.request is not request]

    def tokens(self) -> list[int]:
        """Waits for the step. The token of a request is at `index`."""
        self.arrival.wait()
        return self.arrival.tokens[: max(self.index.values(), default=-1) + 1].tolist()

    @property
    def seconds(self) -> float:
        """On the device; on a CPU the launch is the step."""
        return self.arrival.seconds() or self.launching

    def feed(self, requests: Sequence[Request]) -> Feed | None:
        """What the rows of the next step feed that nobody knows yet. A row without a finite largest logit has -1,
        and its request ends: anything can be fed for it."""
        pairs = [(row, self.index[one]) for row, one in enumerate(requests) if one.coming]
        if not pairs:
            return None
        device = self.chosen.device
        flat = on_host([number for pair in pairs for number in pair], device).to(device, non_blocking=True)
        rows, sources = flat.view(-1, 2).unbind(1)
        return Feed(rows, self.chosen[sources].clamp_(min=0))
