"""Stop strings in text that comes in pieces, wherever the pieces are cut."""

from __future__ import annotations


class StopString:
    """One stop string, and how much of it the text ends with (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self.shorter = [0] * (len(text) + 1)  # shorter[m]: the next shorter beginning that text[:m] ends with
        for m in range(1, len(text)):
            self.shorter[m + 1] = self.step(self.shorter[m], text[m])

    def step(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self.shorter[matched]
        return matched + (self.text[matched] == character)

    def feed(self, character: str) -> bool:
        """Whether the stop string ends with this character."""
        self.matched = self.step(self.matched, character)
        if self.matched < len(self.text):
            return False
        self.matched = self.shorter[self.matched]
        return True


class StopFinder:
    """The first stop string to end in the text; of several that end together, the longest."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = [StopString(text) for text in sorted(stops, key=len, reverse=True)]

    def feed(self, piece: str, counts: bool = True) -> tuple[int, str] | None:
        """The stop string that ends in this piece and how far into it, if one does and it counts by now."""
        for end, character in enumerate(piece, 1):
            ended = [stop.text for stop in self.stops if stop.feed(character)]
            if ended and counts:
                return end, ended[0]
        return None

    @property
    def open(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max((stop.matched for stop in self.stops), default=0)
