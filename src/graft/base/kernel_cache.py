"""Triton's compiled kernels and launchers, carried from one machine to another of the same kind.

Triton keeps what it compiled under keys of everything that it depends on: source, constants, options, target,
version. So a file that is put under its key is used where the key is the same, and nowhere else. While a recorder is
on, it takes note of the keys that this process uses; `used_files` gives their files, and `seed` puts them into
another cache.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from graft.base.files import write_whole

CARRIED = (".json", ".cubin", ".so")  # not what a kernel went through on its way
GROUP = "__grp__"  # how Triton names the list of a kernel's files, which has whole paths


class Recorder:
    """used: keys that were read or written since it is on; made: those that were compiled."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.made: set[str] = set()


RECORDERS: list[Recorder] = []  # one a process


def record() -> Recorder:
    """Switches the recorder on, once and for all; kernels that this process has loaded before are not seen."""
    if RECORDERS:
        return RECORDERS[0]
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    found, base = Recorder(), knobs.cache.manager_class or FileCacheManager

    class RecordingCache(base):
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            super().__init__(key, override=override, dump=dump)
            self.plain_key = None if override or dump else key

        def take_note(self, result: Any) -> Any:
            if result and self.plain_key is not None:
                found.used.add(self.plain_key)
            return result

        def get_file(self, filename: str) -> Any:
            return self.take_note(super().get_file(filename))

        def get_group(self, filename: str) -> Any:
            return self.take_note(super().get_group(filename))

        def put(self, data: Any, filename: str, binary: bool = True) -> Any:
            if self.plain_key is not None:
                found.made.add(self.plain_key)
            return self.take_note(super().put(data, filename, binary))

    knobs.cache.manager_class = RecordingCache
    RECORDERS.append(found)
    return found


def cache_home() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def launcher_platform() -> str:
    """What Triton puts into the keys of its launchers. One part of it is what the program `file` says of Python, and
    is empty on machines without that program: there the same launcher would have another key."""
    from triton.runtime import build

    return build.platform_key()


def adopt_platform(saved: str) -> None:
    """From here on launchers have the keys of the place where they were compiled."""
    from triton.runtime import build

    build.platform_key = lambda: saved


def used_files(recorder: Recorder, home: Path | None = None) -> dict[str, bytes]:
    """By key and name: binaries, what is known of them, and lists of the files of a kernel, without their paths."""
    home, found = home or cache_home(), {}
    for key in sorted(recorder.used):
        files = [path for path in sorted((home / key).glob("*")) if path.is_file()]
        for path in files:
            if path.suffix not in CARRIED:
                continue
            content = path.read_bytes()
            if path.name.startswith(GROUP):
                own = [child for child in json.loads(content)["child_paths"] if Path(child).suffix in CARRIED]
                content = json.dumps(sorted(own)).encode()
            found[f"{key}/{path.name}"] = content
    return found


def seed(names: Iterable[str], read: Callable[[str], bytes], home: Path | None = None) -> int:
    """Puts files under their keys, where there is none yet; how many kernels and launchers came that way.

    names: `key/file`. A list of files is written last, with the paths of this cache: a kernel is there whole or not.
    """
    home, keys = home or cache_home(), set[str]()
    for name in sorted(names, key=lambda name: Path(name).name.startswith(GROUP)):
        key, _, file = name.rpartition("/")
        if not re.fullmatch(r"[\w-]+", key) or file in ("", ".", ".."):
            raise ValueError(f"{name!r} is no file of a kernel")
        target = home / key / file
        if target.exists():
            continue
        content = read(name)
        if file.startswith(GROUP):
            own = {child: str(home / key / child) for child in json.loads(content)}
            if not all(map(os.path.exists, own.values())):
                continue  # not whole: it is compiled
            content = json.dumps({"child_paths": own}).encode()
        write_whole(target, content)
        if target.suffix == ".so":
            os.chmod(target, 0o755)
        keys.add(key)
    return len(keys)
