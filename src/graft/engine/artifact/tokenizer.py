"""The tokenizer of a compiled engine: the `tokenizers` library alone until somebody asks for more.

Importing a tokenizer class of transformers takes longer than all else of a start. Encoding and decoding are those of
tokenizer.json, which was held against the model's own tokenizer when the engine was compiled; whatever else is asked
for (a chat template, special tokens) is the model's own tokenizer, loaded then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from graft.base.manifest import OpenFolder
from graft.engine.artifact.format import TOKENIZER

PROBES = (
    "Hello, world!",
    " two  spaces\n\tand lines",
    "naïve café – 你好 🙂",
    "def f(x):\n    return x[0] != 'a'",
    "",
)
FAST = f"{TOKENIZER}/tokenizer.json"


class StoredTokenizer:
    """files: all of them by name, since the folder may be replaced while this engine runs."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fast: Tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        self.fast.no_truncation()
        self.fast.no_padding()

    def __call__(self, text: Any, **options: Any) -> Any:
        if options or not isinstance(text, str):
            return self.own(text, **options)
        return {"input_ids": self.fast.encode(text).ids}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **options: Any) -> str:
        if options.pop("clean_up_tokenization_spaces", False) or options or not isinstance(ids, list):
            return self.own.decode(ids, skip_special_tokens=skip_special_tokens, **options)
        return self.fast.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def backend_tokenizer(self) -> Tokenizer:
        return self.fast

    @property
    def clean_up_tokenization_spaces(self) -> bool:
        return False  # one that does so is not stored in this form

    @cached_property
    def own(self) -> Any:
        return own_tokenizer(self.files)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def own_tokenizer(files: dict[str, bytes]) -> Any:
    """As transformers loads it from its folder."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="graft-tokenizer-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def read_tokenizer(folder: OpenFolder, fast: bool) -> Any:
    names = folder.names(TOKENIZER)
    if not names:
        return None
    files = {Path(name).name: folder.read(name) for name in names}
    return StoredTokenizer(files) if fast else own_tokenizer(files)


def is_fast(tokenizer: Any, folder: Path) -> bool:
    """Whether tokenizer.json gives what the tokenizer itself gives."""
    file = folder / "tokenizer.json"
    if not file.is_file() or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    stored = StoredTokenizer({"tokenizer.json": file.read_bytes()})
    for text in PROBES:
        ids = list(tokenizer(text)["input_ids"])
        if stored(text)["input_ids"] != ids:
            return False
        if any(stored.decode(ids, skip) != tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False)):
            return False
    return True
