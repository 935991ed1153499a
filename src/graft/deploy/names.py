"""Names that processes of an application know each other by."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve

from graft import __version__
from graft.deploy.directory import CacheDirectory

NAMESPACE = "graft"


def this_replica() -> str:
    """As PrefixRouter sees it."""
    return serve.get_replica_context().replica_id.unique_id


def directory_actor(application: str) -> Any:
    """Made by whoever asks first; started again where it died, and then told everything anew."""
    made: Any = ray.remote(CacheDirectory)
    return made.options(
        name=f"graft-caches-{application}-{__version__}", namespace=NAMESPACE, get_if_exists=True,
        lifetime="detached", num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=1000,
    ).remote()  # fmt: skip
