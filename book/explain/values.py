"""Keys and values by a table: a field, a key without effect, one that is not modelled, or one that is not understood.

A key that no row has is named; one that speaks of parallelism, precision, adapters or another architecture is refused,
because a report without it would be of another run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from book.explain.shell_words import Undecided
from book.explain.tables import FOREIGN, OFF, SWITCHES
from lib.layout import whole_number

ONE_IS_NONE = ("parallelism", "experts")  # a degree of one
SWITCHED_OFF = ("parallelism", "precision", "what a rank keeps in memory")  # may be on where nobody says so


class Asked(NamedTuple):
    """Values of fields that a configuration gives, the key of each, and notes on all keys that are not understood;
    remarks are on what it does not say."""

    framework: str
    found: dict[str, Any]  # by field of a layout, model, stack or run
    by: dict[str, str]
    notes: list[str]
    remarks: tuple[str, ...] = ()


def enter(asked: Asked, key: str, value: Any, into: str | dict[str, dict]) -> None:
    """Enter the value of a key of a table.

    Raises:
        ValueError: a value that the field cannot have, that nothing sets or decides, or that no number here holds for.
    """
    text = str(value).lower()
    if isinstance(value, Undecided):
        raise ValueError(f"{key} depends on {value.condition}, which nothing sets; {how_to_decide(key)}")
    if "$" in text:
        raise ValueError(f"{key} is {value}, which nothing sets; add --{key} N after the file")
    for field, meant in into.items() if isinstance(into, dict) else [(into, {"*": "said"})]:
        here = meant.get(text, meant.get("*", "" if text in OFF else "unknown"))
        if here == "refused":
            ways = ", ".join(one for one, number in meant.items() if number != "refused")
            raise ValueError(f"{key} {value} is not modelled: its bytes are not known here, those of {ways} are")
        if here == "unknown":
            asked.notes.append(f"not modelled: {key} {value}; known are {', '.join(meant)}")
            continue
        if here == "said" and field in SWITCHES:
            if not isinstance(value, int | float):
                raise ValueError(f"{key}={value!r} must be true, false or a number")
            here = bool(value)
        elif here == "said":
            whole_number(key, value, 0 if field == "zero" else 1)
            here = value
        if here != "":
            asked.found[field], asked.by[field] = here, key if value is True else f"{key} {value}"


def how_to_decide(key: str) -> str:
    """How to decide a flag that a script leaves open."""
    return f"add --{key} after the file, with its value, or true or false"


def as_in_table(key: str) -> str:
    """A key as the tables write it."""
    return key.replace("-", "_").lower()


def without_effect(table: Mapping[str, Any]) -> re.Pattern[str]:
    """Keys, as the tables write them, that change neither bytes nor seconds."""
    return re.compile(rf"(^|\.)({'|'.join(table['no_effect'].split())})")


def left_over(said: Mapping[str, Any], table: Mapping[str, Any]) -> list[str]:
    """Notes on keys that are no fields, and not off: not modelled, with what that changes, or not understood.

    Args:
        table: with `no_effect`, `not_modelled` and `speaks`.

    Raises:
        ValueError: a key that is not understood and speaks of what every number depends on.
    """
    no_effect = without_effect(table)
    keys: dict[str, list[str]] = {}
    for key, value in said.items():
        text, short = str(value).lower(), as_in_table(key)
        both = f"{short} {text}"
        why = next((why for pattern, why in table["not_modelled"].items() if re.search(pattern, both)), "")
        known = any(re.search(pattern, f"{short} true") for pattern in table["not_modelled"])
        if (known and text in OFF) or (not why and no_effect.search(short)):
            continue
        speaks = "" if why else next((of for pattern, of in table["speaks"].items() if re.search(pattern, short)), "")
        if isinstance(value, Undecided) and (speaks or why):
            raise ValueError(f"{key} depends on {value.condition}, which nothing sets; {how_to_decide(key)}")
        if speaks in ONE_IS_NONE and text == "1":
            continue
        if speaks and text not in OFF:
            raise ValueError(
                f"{key} {value} is not understood, and speaks of {speaks}: no number here would hold for this run; "
                "take it out if it changes nothing"
            )
        if text not in OFF or (speaks in SWITCHED_OFF and text == "false"):
            keys.setdefault(why, []).append(key if isinstance(value, list | dict | bool) else f"{key} {value}")
    unknown = keys.pop("", [])
    notes = [f"not modelled: {', '.join(of)}: {why}" for why, of in keys.items()]
    return notes + ([f"not understood: {', '.join(unknown)}"] if unknown else [])


def refuse_keys(said: Mapping[str, Any]) -> None:
    """Raise a ValueError for experts, adapters, encoders and the like: no number would hold for them."""
    for key, value in said.items():
        for pattern, why in FOREIGN["refused"].items():
            if re.search(pattern, key.replace("-", "_")) and str(value).lower() not in (*OFF, "1"):
                raise ValueError(f"{key} {value} is not modelled; {why}")


def refuse_values(said: Mapping[str, Any]) -> None:
    """The same for values that name such a model, as `--spec` does."""
    for key, value in said.items():
        for pattern, why in FOREIGN["refused_values"].items():
            if re.search(pattern, f"{as_in_table(key)} {value}".lower()):
                raise ValueError(f"{key} {value} is not modelled; {why}")
