"""Native kernels of rotation, cache and attention against float64 references, in poisoned memory."""

from __future__ import annotations

import pytest

from marks import short
from native_cases import check_op, needs_compiler, poisoned

pytestmark = needs_compiler


# rotation and cache in the short run: native engines beside Hugging Face, test_llm.py
@pytest.mark.parametrize(
    "op",
    short(
        ["rope", "rope_kv_write", "cached_attention", "paged_attention", "rope_attention", "paged_latent_attention"],
        *("paged_attention", "paged_latent_attention"),
    ),
)
def test_kernels_agree_with_float64_and_a_wrong_one_does_not(op, monkeypatch):
    monkeypatch.setattr("graft.backends.native.call.fresh", poisoned)
    check_op(op)
