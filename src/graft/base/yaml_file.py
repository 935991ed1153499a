"""YAML files of settings, or an error that says what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from graft.base.errors import ConfigError

# libyaml's parser, where PyYAML has it, takes a tenth of the time
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=LOADER)


def read_yaml(path: Path) -> Any:
    try:
        read = parse_yaml(path.read_text())
        return {} if read is None else read
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not YAML: {error}") from error
