"""How large a regular expression is when its repetitions are written out: a bound of the states that it takes."""

from __future__ import annotations

import re

TIMES = re.compile(r"\{(\d*)(,(\d*))?\}")
FACTOR = 10**9  # enough to be refused, and no number of thousands of digits
CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]", re.S)


def regex_size(pattern: str) -> int:
    """Characters, classes and groups, each as often as it may be repeated. What is no regular expression has a size,
    too: whoever compiles it says what is wrong."""
    groups, last, at = [0], 0, 0  # sizes of what is open; the size of the newest atom
    while at < len(pattern):
        letter, width, size = pattern[at], 1, 1
        if letter == "\\":
            width = 2
        elif letter == "[" and (found := CLASS.match(pattern, at)):
            width = len(found[0])
        elif letter == "(":
            groups.append(0)
            size = 0
        elif letter == ")" and len(groups) > 1:
            size = groups.pop()
        elif letter == "{" and (found := TIMES.match(pattern, at)):
            width, size = len(found[0]), last * (times(found) - 1)
            groups[-1] += size
            last, at = last + size, at + width
            continue
        groups[-1] += size
        last, at = size, at + width
    return min(sum(groups), FACTOR)


def times(found: re.Match[str]) -> int:
    """The larger of the two numbers. Without an upper one the rest is a loop, which takes no more states."""
    numbers = [int(number[-9:]) if len(number) < 10 else FACTOR for number in (found[1], found[3] or "") if number]
    return min(max(numbers, default=1), FACTOR)
