"""Files that cannot be written, or do not hold what they should."""

from __future__ import annotations

from graft.base.errors.base import GraftError, UsageError


class DiskFull(GraftError):
    def __init__(self, path: str, detail: str, advice: str = "Free space and run again") -> None:
        super().__init__(f"writing {path} failed: {detail}; nothing was left behind. {advice}")


class ProfileError(GraftError):
    """A profile of measured costs cannot be read, or was measured on something else."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"profile {path}: {problem}; measure it again, or leave `profile` empty")


class TableError(UsageError):
    """A table of measured kernels that cannot be read."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"tuning table {path}: {problem}; correct the file, or delete it and run `graft tune`")


class ArtifactError(GraftError):
    """A saved module cannot be written, or what is there is not one that can be loaded."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


class OtherTarget(ArtifactError):
    """A compiled engine is for another graft, torch or machine. differences: in words, for whoever compiles again."""

    def __init__(self, path: object, differences: str, advice: str) -> None:
        super().__init__(path, f"was compiled for another place: {differences}. {advice}")
        self.differences = differences
