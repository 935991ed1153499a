"""Shared fixtures: quiet libraries, tiny models built once, Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.filterwarnings("ignore")

import pytest  # noqa: E402
import transformers  # noqa: E402

from graft.models.load import LoadedModel, load_model  # noqa: E402
from graft.models.registry import families  # noqa: E402

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

FAMILIES = sorted(families())


@cache
def tiny(family: str, dtype: str = "float32") -> LoadedModel:
    """A tiny model of a family. Shared: tests that rewrite weights load their own."""
    return load_model(f"tiny-{family}", dtype=dtype, device="cpu")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
