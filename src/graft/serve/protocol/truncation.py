"""vLLM's truncate_prompt_tokens: a prompt that is too long is cut, where a client asks for that."""

from __future__ import annotations

from dataclasses import dataclass

from graft.serve.protocol.values import Json, whole, wrong

SIDES = ("left", "right")
ALL_THAT_FITS = -1


@dataclass(frozen=True)
class Truncation:
    """most: tokens that stay, or ALL_THAT_FITS. left: what is cut off is the beginning."""

    most: int
    left: bool = True

    def cut(self, ids: list[int], room: int) -> list[int]:
        """room: how many tokens a prompt may have, with the answer that is asked for. Less than one is left to
        whoever checks the length."""
        most = max(room, 1) if self.most == ALL_THAT_FITS else self.most
        if len(ids) <= most:
            return ids
        return ids[-most:] if self.left else ids[:most]


def truncation(body: Json, side: str = "left") -> Truncation | None:
    """side: what is cut where the body does not say."""
    most = whole(body, "truncate_prompt_tokens", ALL_THAT_FITS, 2**31 - 1)
    given = body.get("truncation_side")
    if given is not None and given not in SIDES:
        raise wrong("truncation_side", "left or right", given)
    if most == 0:
        raise wrong("truncate_prompt_tokens", "a whole number of 1 or more, or -1 for all that fits", most)
    return None if most is None else Truncation(most, (given or side) == "left")


def cut(asked: Truncation | None, ids: list[int], room: int) -> list[int]:
    return ids if asked is None else asked.cut(ids, room)
