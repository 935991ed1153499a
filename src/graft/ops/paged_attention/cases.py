"""Batches of sequences over a paged cache."""

from __future__ import annotations

from functools import partial

from graft.ops.cases import Case
from graft.ops.paged_batches import BATCHES, make

CASES = [Case(name, partial(make, *args), reduction) for name, args, reduction in BATCHES]
