"""The tokenizer of a compiled engine: the `tokenizers` library alone until somebody asks for more.

Importing a tokenizer class of transformers takes longer than all else of a start. Encoding and decoding are those of
tokenizer.json, which was held against the model's own tokenizer when the engine was compiled; the chat template and
the special tokens, which a server asks for, were written down then. Whatever else is asked for is the model's own
tokenizer, loaded when it is.
"""

from __future__ import annotations

import json
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
WORDS, WORD_NAMES = "words.json", ("chat_template", "special_tokens_map")


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
    def words(self) -> dict[str, Any]:
        if WORDS in self.files:
            return json.loads(self.files[WORDS])
        return {name: getattr(self.own, name) for name in WORD_NAMES}  # compiled before they were written down

    @cached_property
    def chat_template(self) -> Any:
        return self.words["chat_template"]

    @cached_property
    def special_tokens_map(self) -> dict[str, Any]:
        return self.words["special_tokens_map"]

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
            if name != WORDS:
                (Path(folder) / name).write_bytes(content)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def read_tokenizer(folder: OpenFolder, fast: bool) -> Any:
    names = folder.names(TOKENIZER)
    if not names:
        return None
    files = {Path(name).name: folder.read(name) for name in names}
    return StoredTokenizer(files) if fast else own_tokenizer(files)


def write_tokenizer(tokenizer: Any, folder: Path) -> bool:
    """Whether tokenizer.json alone gives the same tokens and texts."""
    if tokenizer is None:
        return False
    tokenizer.save_pretrained(folder)
    words = {name: getattr(tokenizer, name) for name in WORD_NAMES}
    (folder / WORDS).write_text(json.dumps(words, default=str), encoding="utf-8")
    return is_fast(tokenizer, folder)


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
