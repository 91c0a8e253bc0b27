"""Which program a file or a command is for: by keys that no other program has.

The problem: five frameworks have a `micro_batch_size`, and a file of one was explained as a run of another. The idea:
each framework has a list of keys that are its own. A file with none of them, or with those of two, is refused; so is
one of a program that is known and not read here, and one whose options are in another file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from book.explain.files import Said
from book.explain.tables import FOREIGN, FRAMEWORKS, OFF
from book.explain.values import as_in_table

OPTIONS = "give the model and the layout as options, such as --model llama3-8b --tp 8 --zero 1"


def framework_of(said: Said, name: str) -> str:
    """The framework whose own keys these are.

    Args:
        name: of the file, or nothing for a command.

    Raises:
        ValueError: of no framework, of two, or of a program that is not read here.
    """
    what, keys = name or "the command", {as_in_table(key): key for key in said.keys}
    for pattern, why in FOREIGN["programs"].items():
        if of := next((one for one in said.programs if re.fullmatch(pattern, one)), ""):
            raise ValueError(f"{what} runs {of}, which {why}: {OPTIONS}")
    for other, pattern in FOREIGN["others"].items():
        if of := next((key for short, key in keys.items() if re.fullmatch(pattern, short)), ""):
            raise ValueError(f"{what} has {of} of {other}, which is not read here: {OPTIONS}")
    refuse_other_files(said.keys, re.compile(rf"(.+\.)?{FOREIGN['names_file']['keys']}"), re.compile(r".+"))
    found = {framework: own for framework, table in FRAMEWORKS.items() if (own := _own(table, keys, said))}
    if not found:
        raise ValueError(f"{what} has no key of {', '.join(FRAMEWORKS)} that no other program has: {OPTIONS}")
    if len(found) > 1:
        of_each = " and ".join(f"{own} of {framework}" for framework, own in found.items())
        raise ValueError(f"{what} has {of_each}: give a file of one of them")
    return next(iter(found))


def _own(table: Mapping[str, Any], keys: Mapping[str, str], said: Said) -> str:
    """A key, or a program, that only this framework has."""
    own = "|".join(table["only"].split())
    found = [key for short, key in keys.items() if re.fullmatch(own, short)]
    found += [one for one in said.programs if table["programs"] and re.fullmatch(table["programs"], one)]
    both = [keys[one] for one in table.get("both", ()) if one in keys]
    found += both if len(both) > 1 else []
    return next(iter(found), "")


def refuse_other_files(said: Mapping[str, Any], keys: re.Pattern[str], files: re.Pattern[str]) -> None:
    """Raise a ValueError if one of these keys names another file: what it says counts, and is not here."""
    for key, value in said.items():
        named = isinstance(value, str) and value.lower() not in OFF and files.fullmatch(value)
        if named and keys.fullmatch(as_in_table(key)):
            file = value.split()[0]
            raise ValueError(
                f"{key} names another file, {file}, whose keys count: give that one first, python -m book.explain "
                f"{file}, and what this one changes as options behind it"
            )
