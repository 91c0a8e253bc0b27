"""A Hugging Face `config.json` as a `ModelShape`, with notes: what gave which size, and what was not understood.

The problem: of the forty keys of a config ten decide size and time, and a reader that skips what it does not know is
wrong in silence. The idea: a table (`foreign.toml`). A key is a size, a switch, known to change neither bytes nor
seconds, not modelled (with what that changes), or not understood. A size that is missing is an error, never a guess.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from textwrap import fill
from typing import Any

from lib.cost.sizes import ModelShape
from lib.layout import whole_number

FOREIGN = tomllib.loads(Path(__file__).with_name("foreign.toml").read_text(encoding="utf-8"))
OFF = ("", "0", "0.0", "false", "no", "none", "null", "disabled", "auto", "default", "[]", "{}")
USUAL_TOKENS = 8192  # of a sequence, unless --seq says more or less


def read_config(path: str | Path, tokens: int | None = None) -> tuple[ModelShape, list[str]]:
    """The model of a `config.json`, and notes on its keys.

    Args:
        tokens: of a sequence. A config has only their maximum; the default is 8,192, or the maximum if that is less.

    Raises:
        ValueError: not a JSON object; not a model whose size is known; a size that is missing or not a number.
    """
    text = read_text(path)
    try:
        config = json.loads(text)
        if isinstance(config, dict):
            return shape_of(config, tokens)
    except ValueError as error:
        raise ValueError(f"{path}{' is not JSON' * isinstance(error, json.JSONDecodeError)}: {error}") from None
    raise ValueError(f"{path} must be a JSON object, as Hugging Face writes it, not a {type(config).__name__}")


def shape_of(config: Mapping[str, Any], tokens: int | None = None) -> tuple[ModelShape, list[str]]:
    """The same for a config that is read already."""
    table, inner = FOREIGN["config"], config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else dict(config)
    refuse_experts(config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in table["families"]:
        raise ValueError(f"model_type {kind!r} is not known; known are {', '.join(table['families'])}")
    family = _family(kind)
    apart, sizes, switches = family.pop("apart", None), table["sizes"], table["switches"]
    found: dict[str, tuple[Any, str]] = {}
    for key, field in sizes.items():
        if config.get(key) is not None:
            whole_number(key, config[key], 1)
            found[field] = config[key], key
    for key, field in switches.items():
        if config.get(key) is not None:
            if not isinstance(config[key], int | float):
                raise ValueError(f"{key}={config[key]!r} must be true, false or a number")
            found[field] = bool(config[key]), key
    if config.get("attention_bias") and "biases" in family:
        found["biases"] = ("all", "mlp_bias") if config.get("mlp_bias") else ("qkv", "attention_bias")
    given = family | {field: value for field, (value, _) in found.items()}
    lacks = [field for field in list(dict.fromkeys(sizes.values()))[:-2] if field not in given]
    if lacks:
        keys = ", ".join(" or ".join(key for key, field in sizes.items() if field == one) for one in lacks)
        raise ValueError(f"it lacks {keys}, without which the size of a {kind} model is not known")
    most = given["context"]
    shape = ModelShape(**given | {"context": tokens or min(most, USUAL_TOKENS)})
    notes = [f"{field} {value}: from {key}" for field, (value, key) in found.items() if field != "context"]
    rest = [one.name for one in fields(shape) if one.name not in found and one.name != "context"]
    notes.append(f"{', '.join(f'{name} {getattr(shape, name)}' for name in rest)}: of model_type {kind}")
    notes.append(f"context {shape.context}: {'--seq' if tokens else 'a default'}; the config has a maximum, {most}")
    notes += [f"not counted: {apart}"] if apart else []
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None
    if set(re.findall(r"\w+", str(config.get("layer_types")))) == {"full_attention"}:
        config["layer_types"] = None
    return shape, notes + left_over({key: value for key, value in config.items() if key not in sizes}, table)


def _family(kind: str) -> dict[str, Any]:
    row = dict(FOREIGN["config"]["families"][kind])
    return _family(row.pop("like")) | row if "like" in row else row


def left_over(said: Mapping[str, Any], table: Mapping[str, Any]) -> list[str]:
    """Notes on the keys that are no fields: not modelled, with what that changes, or not understood.

    A key that is off says nothing.
    """
    no_effect = re.compile(rf"(^|\.)({'|'.join(table['no_effect'].split())})")
    keys: dict[str, list[str]] = {}
    for key, value in said.items():
        plain = key.replace("-", "_").lower()
        if str(value).lower() not in OFF and not no_effect.search(plain):
            why = next((why for part, why in table["not_modelled"].items() if part in f"{plain} {value}".lower()), "")
            keys.setdefault(why, []).append(key if isinstance(value, list | dict | bool) else f"{key} {value}")
    unknown = keys.pop("", [])
    notes = [f"not modelled: {', '.join(of)}: {why}" for why, of in keys.items()]
    return notes + ([f"not understood: {', '.join(unknown)}"] if unknown else [])


def refuse_experts(said: Mapping[str, Any]) -> None:
    """Raise a ValueError for experts, adapters and encoders: no number would hold for them."""
    for key, value in said.items():
        for part, why in FOREIGN["refused"].items():
            if part in key.replace("-", "_") and str(value).lower() not in (*OFF, "1"):
                raise ValueError(f"{key} {value} is not modelled; {why}")


def notes_text(notes: list[str]) -> str:
    """Notes, a line or more each."""
    return "\n".join(fill(note, 100, subsequent_indent="  ") for note in notes)


def read_text(path: str | Path) -> str:
    """The text of a file, or an error that says which file is needed."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is a folder; give a file in it" if path.is_dir() else f"there is no file {path}")
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text
