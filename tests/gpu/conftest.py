"""GPU tests are skipped, with the reason, where there is no GPU.

Those that take the fixture `device` show nothing that only a GPU has: with GRAFT_GPU_TESTS=cpu they run on a CPU as
well, to see before a GPU is at hand that they are right.
"""

from __future__ import annotations

import os

import pytest
import torch

ON_CPU = os.environ.get("GRAFT_GPU_TESTS") == "cpu"


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if not (ON_CPU and "device" in item.fixturenames):
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
