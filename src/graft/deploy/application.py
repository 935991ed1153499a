"""The Ray Serve application of an AppSpec."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import ray
from ray.serve.config import RequestRouterConfig

from graft.deploy.gateway import gateway_deployment
from graft.deploy.replica import engine_deployment
from graft.deploy.router import PrefixRouter
from graft.deploy.spec import AppSpec
from graft.engine.options import MANY_SEQS
from graft.engine.start import ranks_asked

HEALTH = {"health_check_period_s": 2.0, "health_check_timeout_s": 30.0}
GATEWAY_REQUESTS = 10_000  # that one gateway has open: it only hands on, and replicas bound what is computed


def application(spec: AppSpec) -> Any:
    """For `serve.run`."""
    spec = spec.found
    scaling = spec.replicas
    scaled: dict[str, Any] = {"num_replicas": scaling.max}
    if not scaling.fixed:
        scaled = {
            "autoscaling_config": {
                "min_replicas": scaling.min, "max_replicas": scaling.max,
                "target_ongoing_requests": scaling.open_requests,
                "upscale_delay_s": scaling.up_after, "downscale_delay_s": scaling.down_after,
            }
        }  # fmt: skip
    at_once = spec.serve.load.engine.get("max_num_seqs") or MANY_SEQS
    router = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs=asdict(spec.routing))
    engines = engine_deployment(
        **scaled, **HEALTH, request_router_config=router,
        max_ongoing_requests=at_once + spec.serve.max_queued_requests,
        graceful_shutdown_timeout_s=spec.serve.drain_timeout,
        ray_actor_options={"num_cpus": spec.cpus, "num_gpus": gpus(spec)},
    )  # fmt: skip
    gateways = gateway_deployment(
        num_replicas=spec.gateways, **HEALTH, max_ongoing_requests=GATEWAY_REQUESTS,
        graceful_shutdown_timeout_s=spec.serve.drain_timeout, ray_actor_options={"num_cpus": 0},
    )  # fmt: skip
    return gateways.bind(engines.bind(spec.serve, spec.name), spec)


def gpus(spec: AppSpec) -> float:
    """Of one replica, all on one machine: its ranks are processes that it starts itself."""
    if spec.gpus is not None:
        return spec.gpus
    asked = spec.serve.load.device
    wanted = asked.startswith("cuda") or (asked == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    return ranks_asked(spec.serve.load.model, spec.serve.load.tensor_parallel) if wanted else 0
