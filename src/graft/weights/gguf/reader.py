"""A GGUF file's metadata is read once: transformers reads it anew for the tokenizer, the config and the weights.

A reader of the gguf package takes 4 s of an ARM core for 49152 tokens and their merges, because each of its 250,000
small reads makes a numpy.memmap; over a plain array that is 2 s. The map of tensor names is made for every module of
the model, 400 times for 30 layers, and is always the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

LOCK = threading.RLock()


@contextmanager
def one_reader() -> Iterator[None]:
    """While this is open, whoever asks the gguf package for a reader or a map of names gets one that is there."""
    import gguf

    with LOCK:
        reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
        if not isinstance(reader, type):  # open already
            yield
            return

        class PlainReader(reader):
            def _get(self, *args: Any, **options: Any) -> Any:
                if isinstance(self.data, np.memmap):
                    self.data = self.data.view(np.ndarray)
                return super()._get(*args, **options)

        made = cache(PlainReader)
        gguf.GGUFReader = lambda path, *_: made(str(path))  # pyrefly: ignore
        gguf.get_tensor_name_map = cache(names)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, names
