"""The standard headers of native kernels, read once in a run: half of what a compiler does with each of them.

A user's start compiles two files, side by side, and would wait longer for the precompiled header than it saves. And
what Inductor compiles is linked to all of torch, over which ld.gold takes 0.1 core-seconds, ld.bfd 0.4.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from graft.backends.native.compiler import EXTRA, find_compiler, flags, headers, is_gcc, version
from graft.base.errors import NoCompiler
from graft.base.files import write_whole


def precompile_headers(folder: Path) -> None:
    """Begins to, and has every later call of the compiler begin with them. Until then, and where a call has other
    flags, gcc reads their text; other compilers keep such files in other ways, and are left alone."""
    try:
        compiler = find_compiler()
    except NoCompiler:
        return
    if not is_gcc(compiler):
        return
    options, text = flags(compiler), standard_headers()
    key = hashlib.blake2b(repr((version(tuple(compiler)), options, text)).encode(), digest_size=16).hexdigest()
    header = folder / f"{key}.h"
    made = header.with_name(f"{key}.h.gch")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(header, text)
    if not made.exists():
        partial = made.with_name(f"{made.name}.{os.getpid()}")
        command = [*compiler, *options, "-w", "-x", "c++-header", str(header), "-o", str(partial)]
        subprocess.Popen(["sh", "-c", f"{shlex.join(command)} && mv {shlex.join([str(partial), str(made)])}"])
    os.environ[EXTRA] = f"{os.environ.get(EXTRA, '')} -include {shlex.quote(str(header))}".strip()


def link_with_gold(folder: Path) -> None:
    """Where it is installed, gcc finds it as `ld`."""
    gold, linker = shutil.which("ld.gold"), folder / "gold" / "ld"
    if gold is None or sys.platform != "linux":
        return
    linker.parent.mkdir(parents=True, exist_ok=True)
    linker.unlink(missing_ok=True)
    linker.symlink_to(gold)
    os.environ["COMPILER_PATH"] = os.pathsep.join(filter(None, (str(linker.parent), os.environ.get("COMPILER_PATH"))))


def standard_headers() -> str:
    """All that graft's own include and this compiler has: some are of one kind of machine."""
    names = {
        name for path in headers() for name in re.findall(r"^ *#include <(.+?)>", path.read_text(), re.MULTILINE)
    }
    return "#pragma once\n" + "".join(f"#if __has_include(<{n}>)\n#include <{n}>\n#endif\n" for n in sorted(names))
