"""How many ranks a model can have."""

from __future__ import annotations

from typing import Any

from graft.base.errors import UsageError


def fits(heads: int, kv_heads: int, world: int) -> bool:
    """Whether attention can be split by heads; key-value heads are repeated where there are fewer than ranks."""
    return heads % world == 0 and (kv_heads % world == 0 or world % kv_heads == 0)


def possible_sizes(heads: int, kv_heads: int) -> list[int]:
    return [world for world in range(1, heads + 1) if fits(heads, kv_heads, world)]


def check_size(size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UsageError(f"tensor_parallel_size must be a whole number of at least 1, but is {size!r}")


def check_heads(config: Any, world: int, name: str) -> None:
    """Refuses a number of ranks that the heads of a model (its configuration) do not divide by."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if fits(heads, kv_heads, world):
        return
    sizes = possible_sizes(heads, kv_heads)
    near = sorted(sorted(sizes, key=lambda size: (abs(size - world), size))[:2])
    raise UsageError(
        f"tensor_parallel_size={world}: {name} has {heads} heads ({kv_heads} for keys and values), which {world} ranks"
        f" cannot share evenly; the nearest that can: {' or '.join(map(str, near))} (all: {', '.join(map(str, sizes))})"
    )
