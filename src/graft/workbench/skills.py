"""The skills that coding agents follow: `skills/<name>/SKILL.md` of a checkout, which travel in the wheel."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from graft.base.errors import SkillError, SkillsDiffer, UnknownSkill
from graft.base.files import write_together
from graft.base.yaml_file import parse_yaml

PACKAGE = Path(__file__).parents[1]
HOMES = (PACKAGE / "skills", PACKAGE.parents[1] / "skills")  # in an installed package, in a checkout
FENCE = "---\n"


@dataclass(frozen=True)
class Skill:
    """description: when to take it, which is all that an agent reads before it does. text: the whole file."""

    name: str
    description: str
    text: str
    path: Path

    def to_dict(self) -> dict[str, str]:
        return {**asdict(self), "path": str(self.path)}


@dataclass(frozen=True)
class InstalledFile:
    """status: new, same (it was there already) or replaced."""

    path: Path
    status: str


def skills_folder() -> Path:
    for folder in HOMES:
        if folder.is_dir():
            return folder
    raise SkillError(f"this installation has no skills ({HOMES[0]} is missing); install graft again")


def all_skills() -> list[Skill]:
    return [read_skill(file) for file in sorted(skills_folder().glob("*/SKILL.md"))]


def find_skill(name: str) -> Skill:
    known = {skill.name: skill for skill in all_skills()}
    if name not in known:
        raise UnknownSkill(name, known)
    return known[name]


def read_skill(file: Path) -> Skill:
    """The front matter is YAML between two lines of `---`; its name is that of the folder."""
    text = file.read_text(encoding="utf-8")
    start, _, rest = text.partition(FENCE)
    head, fence, _ = rest.partition("\n" + FENCE)
    if start or not fence:
        raise SkillError(f"{file} does not begin with front matter: --- above and below its name and description")
    try:
        fields = parse_yaml(head)
    except yaml.YAMLError as error:
        raise SkillError(f"the front matter of {file} is not YAML: {error}") from error
    if not isinstance(fields, dict) or fields.get("name") != file.parent.name or not fields.get("description"):
        raise SkillError(f"the front matter of {file} needs name: {file.parent.name} and a description")
    return Skill(file.parent.name, str(fields["description"]), text, file)


def install_skills(folder: Path, *, force: bool = False) -> list[InstalledFile]:
    """Copies every skill to `folder/<name>/`, all of them or none. What else is in there stays as it is; a file of
    ours that was changed there is replaced with `force` alone."""
    wanted = {folder / skill.name / skill.path.name: skill.text for skill in all_skills()}
    statuses = {path: status_of(path, text) for path, text in wanted.items()}
    changed = [path for path, status in statuses.items() if status == "replaced"]
    if changed and not force:
        raise SkillsDiffer(folder, [str(path.relative_to(folder)) for path in changed])
    write_together({path: text for path, text in wanted.items() if statuses[path] != "same"})
    return [InstalledFile(path, status) for path, status in statuses.items()]


def status_of(path: Path, text: str) -> str:
    if not path.exists():
        return "new"
    return "same" if path.is_file() and path.read_bytes() == text.encode() else "replaced"
