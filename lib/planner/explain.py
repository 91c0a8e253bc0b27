"""The layout that a foreign command or file asks for: Megatron-LM, torchtitan, Accelerate (FSDP), DeepSpeed.

The problem: one layout has four spellings, and a flag that a reader passes over makes a report of another run. The
idea: a table for each framework (`foreign.toml`, with sources), key → field. What is in no table is listed, and each
flag that is understood says what it costs and saves: the same run without it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

from lib.cost.sizes import ModelShape
from lib.planner.configs import FOREIGN, read_text, whole
from lib.planner.search import memory_bytes
from lib.planner.seconds import Seconds, has_even_stages, step_s
from lib.planner.training import Layout4D, Stack, Training

TABLES = {name: table for name, table in FOREIGN["explain"].items() if "keys" in table}
OFF = ("", "0", "0.0", "false", "no", "none", "null", "disabled", "auto", "default", "[]", "{}")
WORDS = ("recompute", "schedule", "biases", "replicas")
SWITCHES = (
    "sequence_parallel overlaps_dp fused_attention fused_swiglu gated rms_norm rotary tied dropout_masks".split()
)
DOES = {  # field → what a rank holds, sends and waits for by it
    "tp": "holds 1/{} of each matrix; sends sums of activations in each block",
    "cp": "holds 1/{} of each sequence; sends keys and values",
    "pp": "holds 1/{} of the blocks; sends activations to its neighbours, and waits for them",
    "stages_per_rank": "holds {} stages: waits less for others, sends more messages",
    "schedule": "computes its microbatches in the order {}",
    "zero": "holds a shard of model states (ZeRO-{}); sends gradients and gathers parameters",
    "replicas": "shards within 1/{} of the data-parallel ranks; sends gradients to the rest",
    "sequence_parallel": "holds 1/tp of what is kept between the matrices",
    "recompute": "keeps less of each block ({}), and computes it again",
    "every": "recomputes one block in {}",
    "rows": "holds activations of {} sequences per microbatch, and has fewer microbatches",
    "overlaps_dp": "waits only for gradients whose sums backward does not hide ({})",
}


@dataclass
class Asked:
    """What a command or a file asks for.

    Args:
        found: field of a layout, model, stack or run → value.
        by: field → the flag that says so.
        notes: what is not modelled, and what is not understood.
    """

    framework: str
    found: dict[str, Any]
    by: dict[str, str]
    notes: list[str]


def read_foreign(words: Sequence[str]) -> Asked:
    """Flags; or a file, recognised by its content, and flags that overrule it.

    Raises:
        ValueError: no such file, malformed, of no framework that is known, or a value that a field cannot have.
    """
    is_file = words and not words[0].startswith("-") and (len(words) == 1 or Path(words[0]).is_file())
    name = words[0] if is_file and not words[0].endswith(".py") else ""
    said = dict(_content(read_text(name), name) if name else ()) | dict(_flags(words[bool(name) :]))
    if "model_type" in said:
        raise ValueError(f"{name} is the config of a model; give it as --config {name}")
    full = {key.replace("-", "_"): key for key in said}
    keys = {short.rpartition(".")[2]: key for short, key in full.items()} | full
    of = max(TABLES, key=lambda framework: len(TABLES[framework]["keys"].keys() & keys))
    if not TABLES[of]["keys"].keys() & keys:
        raise ValueError(f"{name or 'this command'} has no key of {', '.join(TABLES)}")
    asked, read = Asked(of, dict(TABLES[of]["defaults"]), {}, []), set()
    for key, into in TABLES[of]["keys"].items():
        if key in keys:
            read.add(keys[key])
            _enter(asked, keys[key], said[keys[key]], into)
    return replace(asked, notes=asked.notes + _left({key: value for key, value in said.items() if key not in read}))


def _enter(asked: Asked, key: str, value: Any, into: str | dict[str, dict]) -> None:
    """Enter the value of a key that the table knows."""
    text = str(value).lower()
    if text in ("none", "null", "auto"):
        return
    for field, meant in into.items() if isinstance(into, dict) else [(into, {"*": "said"})]:
        here = meant.get(text, meant.get("*"))
        if here is None:
            asked.notes += [] if text in OFF else [f"not modelled: {key} {value}; known are {', '.join(meant)}"]
        elif here != "":
            asked.found[field], asked.by[field] = (
                _value(field, key, text) if here == "said" else here,
                f"{key} {value}",
            )


def _value(field: str, key: str, text: str) -> Any:
    if field in SWITCHES:
        return text not in OFF
    number = text.split()[0]
    if field == "zero" and number in ("0", "1", "2", "3"):
        return int(number)
    if "$" in text:
        raise ValueError(f"{key} is {text}, which the file does not set; add --{key.lstrip('-')} and a number")
    return whole(key, int(number) if re.fullmatch(r"-?\d+", number) else text)


def _left(said: dict[str, Any]) -> list[str]:
    """Notes on keys that the table does not know; a key that is off says nothing."""
    table, unknown, notes = FOREIGN["explain"], [], []
    ignored = re.compile(r"(^|\.)(" + "|".join(map(re.escape, table["no_effect"].split())) + ")")
    for key, value in said.items():
        text = f"{key.replace('-', '_')} {value}".lower()
        on, plain = str(value).lower() not in OFF, text.partition(" ")[0]
        if (why := next((why for part, why in table["refused"].items() if part in plain), "")) and on and value != 1:
            raise ValueError(f"{key} {value} is not modelled; {why}")
        why = next((why for part, why in table["not_modelled"].items() if part in text), None)
        if why and (on or "precision" in text):
            notes.append(f"not modelled: {key} {value}: {why}")
        elif on and not ignored.search(plain):
            unknown.append(key)
    return notes + ([f"not understood: {', '.join(unknown)}"] if unknown else [])


# ---- files and flags → key and value --------------------------------------------------------------------------------


def _content(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """The keys of JSON, TOML or YAML, dotted, or the flags in a script; its first line tells which."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    try:
        if re.match(r"\[+[\w.\"-]+\]+", first):
            return _dotted(tomllib.loads(text), name)
        if first.lstrip()[:1] in ("{", "["):
            return _dotted(json.loads(text), name)
        if re.match(r"---|[\"']?[\w-]+[\"']?\s*:(\s|$)", first):
            return _dotted(_yaml(text, name), name)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{name} is malformed: {error}") from None
    sets = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=[\"']?([\w.+-]+|\$\{\w+:-\w+\})", text, re.MULTILINE))
    sets = {key: re.sub(r"\$\{\w+:-(\w+)\}", r"\1", value) for key, value in sets.items()}
    text = re.sub(r"(^|\s)#.*", "", text)
    text = re.sub(r"\$\{?(\w+)(?::-\w+)?\}?", lambda match: sets.get(match[1], match[0]), text)
    return _flags(re.sub(r"[\\\"'()]", " ", text).split())


def _yaml(text: str, name: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError(f"{name} is YAML: to read it, pip install PyYAML") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is malformed: {' '.join(str(error).split())}") from None


def _dotted(tree: Any, name: str, before: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        raise ValueError(f"{name} must have keys and values, not a {type(tree).__name__}")
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _dotted(value, name, f"{before}{key}.")
        else:
            yield f"{before}{key}".lstrip("-"), value


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """`--key value`, `--key=value` or `--key`, wherever they are; a flag may have several values."""
    key, values = "", []
    for word in [*words, "--"]:
        if word.startswith("--"):
            if key:
                yield key, " ".join(values) or True
            key, _, value = word[2:].partition("=")
            values = [value] if value else []
        else:
            values.append(word)
