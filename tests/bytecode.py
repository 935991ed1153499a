"""The rewritten asserts of test files, made once in a run without bytecode.

The first process of a run rewrites them while the one that the others are forked from imports torch: 10 core-seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_files(config: pytest.Config) -> None:
    """The test files in the folders that are asked for, as pytest's import hook writes them, atomically."""
    if sys.dont_write_bytecode:
        return
    state = config.stash[rewrite.assertstate_key]
    folders = [folder for folder in map(Path, config.args) if folder.is_dir()]
    for file in sorted(file for folder in folders for file in folder.rglob("test_*.py")):
        target = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, target) is None and rewrite.try_makedirs(target.parent):
            source, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, source, target)
