"""Who may ask: API keys from options, the environment and a file, which is read again when it changes."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from graft.base.errors import UsageError

VARIABLE = "GRAFT_API_KEY"


class ApiKeys:
    """Hashes of the keys. Every comparison takes the same time, whichever key it is and however much of it fits."""

    def __init__(self, given: Iterable[str], file: str | None, environment: Mapping[str, str] = os.environ) -> None:
        keys = [*given, *([environment[VARIABLE]] if environment.get(VARIABLE) else [])]
        if not all(key.strip() for key in keys):
            raise UsageError("an --api-key is empty")
        self.fixed = [digest(key.encode()) for key in keys]
        self.file = None if file is None else Path(file)
        self.seen: tuple[int, int, int] | None = None
        self.from_file: list[bytes] = []
        if self.file is not None:
            try:
                self.read(self.file)
            except OSError as error:
                raise UsageError(f"--api-key-file {file} cannot be read: {error}") from error
            if not self.from_file:
                raise UsageError(f"--api-key-file {file} has no key; write one a line")

    @property
    def needed(self) -> bool:
        return bool(self.fixed) or self.file is not None

    def allow(self, authorization: bytes, plain: bytes = b"") -> bool:
        """Values of headers: Authorization, and x-api-key, where Anthropic's clients put a key alone. One will do."""
        if not self.needed:
            return True
        if self.file is not None:
            self.refresh(self.file)
        scheme, _, key = authorization.strip().partition(b" ")
        return any([scheme.lower() == b"bearer" and self.known(key), self.known(plain)])

    def known(self, key: bytes) -> bool:
        asked = digest(key.strip())
        return any([hmac.compare_digest(asked, known) for known in (*self.fixed, *self.from_file)])

    def refresh(self, file: Path) -> None:
        """A file that is gone, or is being written, leaves the keys as they were."""
        try:
            if stamp(file) != self.seen:
                self.read(file)
        except OSError:
            self.seen = None

    def read(self, file: Path) -> None:
        seen = stamp(file)
        lines = [line.strip() for line in file.read_bytes().splitlines()]
        self.from_file = [digest(line) for line in lines if line and not line.startswith(b"#")]
        self.seen = seen


def stamp(file: Path) -> tuple[int, int, int]:
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def digest(key: bytes) -> bytes:
    return sha256(key).digest()
