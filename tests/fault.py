"""A fault that tests/mutation.py plants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    file: str
    right: str  # once in the file
    wrong: str
    tests: tuple[str, ...]  # under tests/, and options of pytest

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(f"tests/{test}" if ".py" in test else test for test in self.tests)


def fault(file: str, right: str, wrong: str, *tests: str) -> Fault:
    return Fault(file, right, wrong, tests)
