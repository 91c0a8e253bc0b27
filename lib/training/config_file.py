"""The options of a run as a file: `--save-config` prints it, `--config run.toml` reads it.

The problem: a run has forty options, and a week later the command line is gone. The idea: a line of a TOML file is an
option, `global-batch = 16`, with the type and the choices that the command line knows; the command line wins.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches

from lib.training.config import CHOICES, NO_OPTIONS, SETTINGS, option

KINDS = {  # type of a field → what a file may have there, and how it is called
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "str": (str, 'a text, such as "a"'),
    "bool": (bool, "true or false"),
}


def options_of_file(path: str) -> dict[str, object]:
    """Field → value, for all options in a TOML file.

    Raises:
        ValueError: the file cannot be read, or has something that is no option, or no value of it.
    """
    try:
        with open(path, "rb") as file:
            lines = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not TOML: {error}") from None
    every = [field for settings in SETTINGS for field in fields(settings) if field.name not in NO_OPTIONS]
    kinds = {_key(field.name): str(field.type).removesuffix(" | None") for field in every}
    values: dict[str, object] = {}
    for written, value in lines.items():
        key = _key(written)
        if key not in kinds:
            (nearest,) = get_close_matches(key, kinds, n=1, cutoff=0)
            raise ValueError(f"--config {path}: {written} is no setting of a run; the nearest is {nearest}")
        name = key.replace("-", "_")
        if name in values:
            raise ValueError(f"--config {path}: {key} is there twice, with a - and with a _")
        kind, called = KINDS[kinds[key]]
        choices = CHOICES.get(name)
        is_bool = isinstance(value, bool)  # which is an int to Python
        if not isinstance(value, kind) or is_bool != (kind is bool) or (choices and value not in choices):
            called = f"one of {', '.join(map(_toml, choices))}" if choices else called
            raise ValueError(f"--config {path}: {written} = {_toml(value)} must be {called}")
        values[name] = float(value) if kinds[key] == "float" else value
    return values


def written_config(settings: Mapping[str, object]) -> str:
    """Settings as a TOML file: a line for each field that is an option, except those that are None."""
    given = {name: x for name, x in settings.items() if name not in NO_OPTIONS and x is not None}
    return "\n".join(f"{_key(name)} = {_toml(value)}" for name, value in given.items())


def _key(name: str) -> str:
    return option(name).removeprefix("--")


def _toml(value: object) -> str:
    """A value as TOML; JSON writes texts, numbers and truth values in the same way."""
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
