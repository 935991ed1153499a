"""Starting and changing an application: on a cluster of its own, until it is told to end, or on one that runs."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from typing import Any

from graft.base.errors import ClusterMissing, ExtraMissing, ModelNotLoaded
from graft.deploy.spec import AppSpec

WHAT = "an application of several replicas"
try:
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from graft.deploy.application import application
    from graft.serve.run import listening
except ModuleNotFoundError as error:
    extra = "serve" if (error.name or "").split(".")[0] in ("starlette", "uvicorn") else "ray"
    raise ExtraMissing(WHAT, extra, error.name or "ray") from error

QUIET: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
LOGS = {"log_level": "WARNING"}


def serve_replicas(spec: AppSpec) -> int:
    """A cluster of this machine, which ends with it; the exit code. The first signal drains, the second ends."""
    told, options = threading.Event(), spec.serve
    with listening(options.host, options.port) as free:  # Ray's proxy takes no 0, and tries one in use for a minute
        spec = replace(spec, serve=replace(options, port=free.getsockname()[1]))

    def on_signal(number: int, _: Any) -> None:
        if told.is_set():
            os._exit(128 + number)
        told.set()

    cores = max(os.cpu_count() or 1, int(spec.replicas.max * spec.cpus))  # or replicas would wait for ever
    ray.init(address="local", num_cpus=cores, **QUIET)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        start(spec)
        shown = f"{spec.replicas.min}" if spec.replicas.fixed else f"{spec.replicas.min} to {spec.replicas.max}"
        print(f"graft serve: ready at {url(spec)}/v1 (model {spec.serve.names[0]}, {shown} replicas)", flush=True)
        told.wait()
        return 0
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(spec: AppSpec, address: str) -> dict[str, Any]:
    """On a cluster that runs. Where the application is there, its replicas are exchanged one after another."""
    try:
        ray.init(address=address, namespace="serve", **{k: v for k, v in QUIET.items() if k != "include_dashboard"})
    except (ConnectionError, ValueError) as error:
        raise ClusterMissing(str(error).split("\n")[0]) from error
    try:
        short = lacking(spec)
        before = spec.name in serve.status().applications
        start(spec)
        status = serve.status().applications[spec.name]
        states = {name: dict(one.replica_states) for name, one in status.deployments.items()}
        return {"name": spec.name, "url": f"{url(spec)}/v1", "changed": before, "status": str(status.status.value),
                "replicas": states, "lacking": short}  # fmt: skip
    finally:
        ray.shutdown()


def start(spec: AppSpec) -> None:
    options = spec.serve
    http: dict[str, Any] = {"host": options.host, "port": options.port}
    if options.ssl_certfile is not None:
        http |= {"ssl_certfile": options.ssl_certfile, "ssl_keyfile": options.ssl_keyfile or options.ssl_certfile}
    serve.start(http_options=http, logging_config=LOGS)
    try:
        serve.run(application(spec), name=spec.name, route_prefix="/", logging_config=LOGS)
    except (RayServeException, RuntimeError) as error:
        why = str(error).strip().splitlines()[-1]
        raise ModelNotLoaded(f"Ray Serve cannot run the application: {why}", 1) from error


def lacking(spec: AppSpec) -> dict[str, float]:
    """What the cluster has too little of for the most replicas; they wait until it grows."""
    have, most = ray.cluster_resources(), spec.replicas.max
    wanted = {"CPU": most * spec.cpus, "GPU": most * (spec.gpus or 0)}
    return {name: count - have.get(name, 0) for name, count in wanted.items() if count > have.get(name, 0)}


def url(spec: AppSpec) -> str:
    host = spec.serve.host
    scheme = "http" if spec.serve.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{spec.serve.port}"
