"""What is to be checked, on which model, and whether that makes sense."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from graft.base.errors import BaselineMismatch, UnknownTransform, UsageError
from graft.models.registry import Family, entries, families
from graft.passes.config import PipelineConfig
from graft.passes.pipeline import order_transforms
from graft.passes.registry import TransformRegistry
from graft.workbench.check.baseline import Baseline

USUAL = "llama"  # the family that is tried where the transform matches it


@dataclass(frozen=True)
class CheckRequest:
    """What is to be checked. transform: '' for all that are on. tests: their folder, where it is not the usual one.

    baseline: a run to compare with. save: where to keep this one. note: where to write the iteration note.
    """

    config: PipelineConfig
    transform: str = ""
    dtype: str = "auto"
    baseline: Path | None = None
    save: Path | None = None
    tests: Path | None = None
    note: Path | None = None
    must_match: bool = (
        True  # a transform that was named and matches nothing is a failure, unless the registry says why
    )
    trust_remote_code: bool = False
    run_tests: bool = False  # its own test files, and their result goes into list and note
    dtypes: tuple[str, ...] = ()  # in which the results are compared as well, end to end
    other_devices: bool = True  # transforms that are for other devices run, too

    @property
    def running(self) -> PipelineConfig:
        """The configuration with the transform that was asked for switched on."""
        transforms = dict(self.config.transforms)
        if self.transform:
            transforms[self.transform] = replace(transforms[self.transform], enabled=True)
        return replace(self.config, transforms=transforms)


def chosen_model(model: str, request: CheckRequest, kept: Baseline | None) -> tuple[str, str]:
    """The model and its dtype: as asked for, else those of the baseline, else a tiny one."""
    if kept is not None and model in entries() and model != kept.run.manifest.model:
        raise BaselineMismatch(str(kept.run.folder), kept.run.manifest.model, model)
    if model or kept is None:
        return model or usual_model(request.transform), request.dtype
    manifest = kept.run.manifest
    if manifest.model not in entries():
        raise UsageError(
            f"the baseline is a run of {manifest.model}, which is no registry name; name it with --model"
        )
    return manifest.model, manifest.dtype if request.dtype == "auto" else request.dtype


def check_request(request: CheckRequest) -> None:
    name, known = request.transform, request.config.transforms
    if name:
        TransformRegistry.get(name)
        if name not in known:
            where = "the configuration (a plugin's transform needs --config, with its stage)"
            raise UnknownTransform(name, known, where)
    if request.run_tests and not request.transform:
        raise UsageError("--run-tests is about one transform; name it: graft check TRANSFORM --run-tests")
    if request.note is not None and not request.transform:
        raise UsageError("--note is about one transform; name it: graft check TRANSFORM --note FILE.md")
    if request.note and request.note.is_dir():
        raise UsageError(f"the note cannot be written to {request.note}, which is a folder; name a file in it")
    if request.save is not None and same_folder(request.save, request.baseline):
        raise UsageError(
            f"{request.save} cannot be the baseline and be written anew; give --save-baseline another folder"
        )


def names_of(request: CheckRequest) -> list[str]:
    config = request.running
    ordered = [name for name in order_transforms(config) if config.transforms[name].enabled]
    return [request.transform] if request.transform else ordered


def usual_model(transform: str) -> str:
    """A tiny model of the registry that the transform is expected to match."""

    def counted(family: Family) -> bool:
        return not transform or transform in family.expect or transform in family.expect_gpu

    ordered = sorted(families().values(), key=lambda family: family.name != USUAL)
    return f"tiny-{next(filter(counted, ordered), families()[USUAL]).name}"


def same_folder(one: Path, other: Path | None) -> bool:
    return other is not None and one.resolve() == other.resolve()
