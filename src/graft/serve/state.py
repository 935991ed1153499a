"""What a running server consists of, and whether it is fit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from graft.base.errors import EngineGone, HttpRefused
from graft.serve.keys import ApiKeys
from graft.serve.link import EngineLink
from graft.serve.logs import ServerLog
from graft.serve.metrics import Metrics
from graft.serve.options import ServeOptions
from graft.serve.text import ServedText
from graft.serve.wire import ServedModel


@dataclass(eq=False)
class ServerState:
    options: ServeOptions
    link: EngineLink
    metrics: Metrics
    keys: ApiKeys
    log: ServerLog
    text: ServedText | None = None  # once the model is loaded
    warm: bool = False  # a first request went through
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.monotonic)

    @property
    def loaded(self) -> tuple[ServedText, ServedModel]:
        """For requests that need the model."""
        if self.draining:
            raise EngineGone("the server is shutting down; try again elsewhere")
        if self.link.gone is not None or not self.warm or self.text is None or self.link.model is None:
            raise EngineGone(f"{self.link.gone or 'the model is being loaded'}; try again later")
        return self.text, self.link.model

    def loaded_to(self, runner: str, path: str) -> tuple[ServedText, ServedModel]:
        """The same, for an endpoint of servers that generate, or of those that embed."""
        text, model = self.loaded
        if model.runner == runner:
            return text, model
        does, start = (
            ("embeds", "without --runner pooling")
            if runner == "generate"
            else ("generates", f"for embeddings: graft serve {self.options.load.model} --runner pooling")
        )
        raise HttpRefused(
            f"{path}: this server of {self.options.names[0]} {does}; start another {start}",
            code="unsupported_endpoint",
        )

    @property
    def ready(self) -> bool:
        return self.warm and not self.draining and self.link.gone is None

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Alive: the engine is loading, idle, or its steps go on. A busy one is alive."""
        quiet = time.monotonic() - self.link.stepped
        dead = self.link.gone is not None and not self.link.loading and not self.draining
        stalled = self.link.gone is None and quiet > self.options.stall_timeout
        status = "dead" if dead else "stalled" if stalled else "ready" if self.ready else "loading"
        told = {
            "status": "draining" if self.draining and not stalled else status,
            "seconds_since_step": round(quiet, 3),
            "running": self.link.load.running,
            "waiting": self.link.load.waiting,
        }
        return not dead and not stalled, told | ({"reason": self.link.gone} if dead else {})
