"""Templates: plain text files beside this one, with $names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template

TEMPLATES = Path(__file__).with_name("templates")


def fill(name: str, values: Mapping[str, str]) -> str:
    """The template with every name filled in; one that is not given is an error."""
    return Template((TEMPLATES / f"{name}.txt").read_text()).substitute(values)
