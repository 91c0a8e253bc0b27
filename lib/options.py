"""Command-line options out of a dataclass: each is said once, in its docstring.

The problem: a program's settings are named three times, in a dataclass, in its documentation and in a parser, and the
three drift apart. The idea: a field is an option, its type and default are the option's, and what the docstring says
of it under `Args:` is the help. An error that names a field, `stages_per_rank=1`, becomes one that names the option.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields


def add_options(
    parser: argparse.ArgumentParser, config: type, leave_out: Iterable[str] = (), choices: Mapping | None = None
) -> None:
    """An option for each field of a dataclass that has a default: `stages_per_rank` is `--stages-per-rank`.

    Args:
        leave_out: names of fields that are no options.
        choices: field → the values that it may have.
    """
    says = described(config)
    for field in fields(config):
        if field.name in leave_out:
            continue
        more: dict = {"help": says.get(field.name, "").replace("%", "%%"), "default": argparse.SUPPRESS}
        if "bool" in str(field.type):
            more["action"] = argparse.BooleanOptionalAction
        else:
            more |= {"type": _kind(field), "choices": (choices or {}).get(field.name)}
            more["metavar"] = None if more["choices"] else field.name.upper()
        parser.add_argument(option(field.name), **more)


def option(name: str) -> str:
    """How a field is called on the command line."""
    return "--" + name.replace("_", "-")


def chosen(args: argparse.Namespace, config: type) -> dict:
    """The options of this dataclass that were given."""
    return {field.name: getattr(args, field.name) for field in fields(config) if hasattr(args, field.name)}


def described(config: type) -> dict[str, str]:
    """Field → what the docstring says of it under `Args:`."""
    text = inspect.getdoc(config) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section[1] if section else "", re.MULTILINE | re.DOTALL)
    return {name: " ".join(words.split()).rstrip(".") for name, words in found}


def in_options(sentence: str, configs: Sequence[type]) -> str:
    """An error's sentence with options in the place of fields: `dp=3` is `--dp 3`."""
    for config in configs:
        for field in fields(config):
            said = rf"(?<![\w-])(?:num_)?{field.name}=(?:'([^']*)'|([^\s,;:()]+))"
            sentence = re.sub(said, lambda m, name=field.name: f"{option(name)} {m[1] or m[2]}", sentence)
            if "_" in field.name:
                sentence = re.sub(rf"(?<![\w-]){field.name}(?![\w=-])", option(field.name), sentence)
    return sentence


def _kind(field: Field) -> type:
    kind = str(field.type).removesuffix(" | None")
    return {"int": int, "float": float, "str": str}[kind]
