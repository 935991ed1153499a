"""What a server is started with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from graft.base.errors import UsageError
from graft.serve.kv_events_config import KvEventsConfig, parse_config
from graft.serve.protocol.scheduling import POLICIES
from graft.serve.tools.formats import AUTO, check_format
from graft.serve.tools.reasoning import check_reasoning

MIB = 1 << 20
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")  # as a browser sends it: no path, no slash at its end
LISTS = ("served_model_name", "api_key", "allowed_origins", "sets", "plugins")


@dataclass(frozen=True)
class ModelOptions:
    """What the engine process loads, as `graft run` takes it; `engine` are fields of EngineOptions. config: laid over
    the pipeline's default.yaml."""

    model: str
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    config: Mapping[str, Any] | None = None
    sets: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    quantize: str | None = None
    trust_remote_code: bool = False
    use_cache: bool = True
    recompile: bool = False
    tensor_parallel: int | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServeOptions:
    """Names as in vLLM where it has them; times in seconds.

    served_model_name: what clients call the model; the first is used in answers.
    max_queued_requests: answers that may wait beside those that run (max_num_seqs); one more is a 429.
    max_queue_time: how long a request may wait before it is begun; longer is a 429. 0: for ever.
    scheduling_policy: fcfs, or priority, with which clients say whose requests go first.
    max_body_size: bytes of a request.
    drain_timeout: how long open requests may go on after SIGTERM.
    slow_client_timeout: how long a client may take none of what is sent to it.
    stall_timeout: an engine that has work and makes no step for so long is told by /health as 503.
    tool_call_parser: how the model writes calls (tools/formats.py); auto: as its chat template has it.
    reasoning_parser: how it marks what it thinks (tools/reasoning.py); auto likewise, none: not looked for.
    restart: a dead engine process is started again.
    enable_kv_cache_events: /v1/kv_cache_events is there; it tells the tokens of all prompts to whoever has a key.
    kv_events_config: vLLM's JSON object: where events of the cache are published over ZMQ (kv_events_config.py).
    ssl_keyfile, ssl_certfile: PEM files, for https. The key may be in the file of the certificate.
    allowed_origins: of pages in browsers that may ask (CORS); "*" is all, none is none but our own.
    """

    load: ModelOptions
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    max_queued_requests: int = 1024
    max_queue_time: float = 0.0
    scheduling_policy: str = "fcfs"
    max_body_size: int = 4 * MIB
    drain_timeout: float = 30.0
    slow_client_timeout: float = 60.0
    stall_timeout: float = 300.0
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    restart: bool = False
    enable_kv_cache_events: bool = False
    kv_events_config: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    json_logs: bool = False

    def __post_init__(self) -> None:
        least = {"max_queued_requests": 0, "max_queue_time": 0, "max_body_size": 1, "drain_timeout": 0, "port": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {bound}, but is {getattr(self, name)}")
        for name in ("slow_client_timeout", "stall_timeout"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name.replace('_', '-')} must be more than 0, but is {getattr(self, name)}")
        if self.scheduling_policy not in POLICIES:
            known = " or ".join(POLICIES)
            raise UsageError(f"--scheduling-policy must be {known}, but is {self.scheduling_policy!r}")
        if self.port > 65_535:
            raise UsageError(f"--port must be at most 65535, but is {self.port}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UsageError("--ssl-keyfile needs --ssl-certfile, the certificate of that key")
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"--allowed-origins takes origins like https://chat.example.com, or *, not {origin!r}"
                )
        _ = self.published
        check_format(self.tool_call_parser)
        check_reasoning(self.reasoning_parser)
        if not all(self.names):
            raise UsageError("a --served-model-name is empty")

    @property
    def published(self) -> KvEventsConfig:
        return parse_config(self.kv_events_config)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model: the folder's or file's own name where none was given."""
        return self.served_model_name or (Path(self.load.model).name or self.load.model,)


def options_from(given: Mapping[str, Any]) -> ServeOptions:
    """From the options of the command, by name: of the server, of what it loads, and the rest of its engine. Lists
    become tuples."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    values |= {name: values[name] or () for name in LISTS if name in values}
    own = {name: values[name] for name in ServeOptions.__dataclass_fields__ if name in values}
    loads = {name: values[name] for name in ModelOptions.__dataclass_fields__ if name in values}
    engine = {name: value for name, value in values.items() if name not in own | loads}
    return ServeOptions(ModelOptions(**loads, engine=engine), **own)
