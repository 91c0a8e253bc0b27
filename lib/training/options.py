"""Command-line options from a dataclass: each is written once, in its docstring.

The problem: the settings of a program are named three times, in a dataclass, in its documentation and in a parser, and
the three drift apart. The idea: a field is an option with its type and default, and its line under `Args:` in the
docstring is the help. An error that names a field, `stages_per_rank=1`, becomes an error that names the option.
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
        leave_out: names of fields that are not options.
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
    """The name of a field on the command line."""
    return "--" + name.replace("_", "-")


def chosen(args: argparse.Namespace, config: type) -> dict:
    """The options of this dataclass that were given."""
    return {field.name: getattr(args, field.name) for field in fields(config) if hasattr(args, field.name)}


def described(config: type) -> dict[str, str]:
    """Field → its description in the docstring, under `Args:`."""
    text = inspect.getdoc(config) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section[1] if section else "", re.MULTILINE | re.DOTALL)
    return {name: " ".join(words.split()).rstrip(".") for name, words in found}


def in_options(sentence: str, configs: Sequence[type]) -> str:
    """The sentence of an error with options instead of fields: `dp=3` becomes `--dp 3`."""
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
