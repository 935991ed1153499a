"""`graft serve`: an OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from graft.cli.options import (
    DEFAULT_MODEL,
    Backend,
    CacheDtype,
    CacheMemory,
    Device,
    DType,
    MaxModelLen,
    Model,
    OffloadingSize,
    Plugins,
    Quantize,
    Recompile,
    Sets,
    TensorParallel,
    TrustRemoteCode,
    UseCache,
)

Host = Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every interface.")]
Port = Annotated[int, typer.Option(help="0 takes a free one.")]
ServedNames = Annotated[
    list[str] | None, typer.Option(help="What clients call the model. Repeatable; the first is in answers.")
]
ApiKey = Annotated[
    list[str] | None, typer.Option(help="Ask for this key. Repeatable; GRAFT_API_KEY keeps it out of `ps`.")
]
ApiKeyFile = Annotated[
    str | None, typer.Option(help="Keys, one a line; read again when the file changes.", metavar="FILE")
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(help="Requests that run at once. [256; on a GPU what the cache has room for, up to 1024]"),
]
MaxBatchedTokens = Annotated[int | None, typer.Option(help="Tokens of one step; longer prompts are fed in chunks.")]
# 8B on an H200, 1000/1000 at 21 requests a second for ten minutes: p99 between tokens 1.4 times p50, where bunches of
# 8,192 tokens of prompts made it four; a wave of requests that all came at once takes 4 to 8 % longer
MIXED_PREFILL = 2048
MaxMixedPrefill = Annotated[
    int, typer.Option(help="Tokens of prompts in a step in which others decode, which wait for them.")
]
MaxQueued = Annotated[int, typer.Option(help="Answers that may wait beside those that run; more are a 429.")]
MaxWait = Annotated[
    float, typer.Option(help="A request that waits for longer is a 429; 0: never.", metavar="SECONDS")
]
MaxBody = Annotated[int, typer.Option(help="Bytes of a request; more are a 413.", metavar="BYTES")]
Drain = Annotated[float, typer.Option(help="Time for open requests after SIGTERM.", metavar="SECONDS")]
SlowReader = Annotated[float, typer.Option(help="Cut off who reads nothing for so long.", metavar="SECONDS")]
Stall = Annotated[
    float, typer.Option(help="/health is 503 when a busy engine makes no step for so long.", metavar="SECONDS")
]
Restart = Annotated[bool, typer.Option("--restart", help="Start an engine process that died again.")]
CacheEvents = Annotated[
    bool,
    typer.Option("--enable-kv-cache-events", help="/v1/kv_cache_events, which has the tokens of all prompts."),
]
PrefixCaching = Annotated[bool, typer.Option(help="Prompts that begin alike share the cache.")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Decode without CUDA graphs.")]
OptionsFile = Annotated[
    str | None,
    typer.Option(
        "--config", help="YAML with these options by name, and what the pipeline takes. Command, environment"
        " (GRAFT_SERVE_PORT), file: the first that has it.", metavar="FILE",
    ),
]  # fmt: skip
Policy = Annotated[
    str, typer.Option(help="fcfs, or priority: requests say whose go first, and may give way to others.")
]
ToolParserName = Annotated[
    str, typer.Option(help="How the model writes tool calls: auto, hermes, smollm, llama3_json or mistral.")
]
ReasoningName = Annotated[
    str, typer.Option(help="How the model marks what it thinks: auto, none, deepseek_r1, qwen3 or mistral.")
]
EventsConfig = Annotated[
    str | None,
    typer.Option(
        help='Events of the cache over ZMQ, as vLLM publishes them: {"enable_kv_cache_events": true, …}.',
        metavar="JSON",
    ),
]
KeyFile = Annotated[str | None, typer.Option(help="Private key, for https.", metavar="PEM")]
CertFile = Annotated[str | None, typer.Option(help="Certificate, for https.", metavar="PEM")]
Origins = Annotated[
    list[str] | None,
    typer.Option(help="Pages of this origin may ask from a browser (CORS); * is all. Repeatable.", metavar="ORIGIN"),
]
Runner = Annotated[
    str, typer.Option(help="generate, or pooling: a model's hidden states as embeddings (/v1/embeddings).")
]
Replicas = Annotated[int, typer.Option(help="Engines behind one address, on Ray Serve (graft[ray]).", min=1)]
JsonLogs = Annotated[bool, typer.Option("--json", help="Log lines as JSON objects on standard output.")]


def serve(
    ctx: typer.Context,
    model: Model = DEFAULT_MODEL,
    runner: Runner = "generate",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedNames = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    max_mixed_prefill_tokens: MaxMixedPrefill = MIXED_PREFILL,
    max_queued_requests: MaxQueued = 1024,
    max_queue_time: MaxWait = 0.0,
    scheduling_policy: Policy = "fcfs",
    max_body_size: MaxBody = 4_194_304,
    drain_timeout: Drain = 30.0,
    slow_client_timeout: SlowReader = 60.0,
    stall_timeout: Stall = 300.0,
    tool_call_parser: ToolParserName = "auto",
    reasoning_parser: ReasoningName = "auto",
    restart: Restart = False,
    enable_kv_cache_events: CacheEvents = False,
    kv_events_config: EventsConfig = None,
    ssl_keyfile: KeyFile = None,
    ssl_certfile: CertFile = None,
    allowed_origins: Origins = None,
    enable_prefix_caching: PrefixCaching = True,
    enforce_eager: EnforceEager = False,
    dtype: DType = "auto",
    device: Device = "auto",
    backend: Backend = "auto",
    config: OptionsFile = None,
    sets: Sets = None,
    plugins: Plugins = None,
    quantize: Quantize = None,
    kv_cache_memory: CacheMemory = None,
    kv_offloading_size: OffloadingSize = None,
    kv_cache_dtype: CacheDtype = "auto",
    tensor_parallel: TensorParallel = None,
    replicas: Replicas = 1,
    trust_remote_code: TrustRemoteCode = False,
    use_cache: UseCache = True,
    recompile: Recompile = False,
    json_logs: JsonLogs = False,
) -> None:
    """Serve a model over HTTP as OpenAI's API has it: chat, completions, streams, metrics."""
    given = {name: value for name, value in locals().items() if name != "ctx"}
    from graft.cli.generate.serve_sources import layered

    found = layered(ctx, given)
    raise typer.Exit(serve_until_told(found, found.pop("replicas")))


def serve_until_told(found: dict[str, Any], replicas: int) -> int:
    """found: options by name. The exit code."""
    from graft.base.errors import ExtraMissing
    from graft.cli.waiting import end_waiting
    from graft.models.names import check_name
    from graft.serve.options import options_from

    options = options_from(found)
    if not options.load.plugins:  # which may bring models
        check_name(options.load.model)  # the engine's process would tell it after seconds
    if replicas > 1:
        from graft.deploy.run import serve_replicas
        from graft.deploy.spec import AppSpec, Scaling

        end_waiting()
        return serve_replicas(AppSpec(options, replicas=Scaling(replicas, replicas)))
    try:
        from graft.serve.run import serve as serve_one
    except ModuleNotFoundError as error:
        raise ExtraMissing("graft serve", "serve", error.name or "starlette") from error
    end_waiting()
    return serve_one(options)
