"""Native kernels of rotation, cache and attention against float64 references, in poisoned memory."""

from __future__ import annotations

import pytest

from native_cases import check_op, needs_compiler, poisoned

pytestmark = needs_compiler


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "op",
    ["rope", "rope_kv_write", "cached_attention", "paged_attention", "rope_attention", "paged_latent_attention"],
)
def test_kernels_agree_with_float64_and_a_wrong_one_does_not(op, monkeypatch):
    monkeypatch.setattr("graft.backends.native.call.fresh", poisoned)
    check_op(op)
