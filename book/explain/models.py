"""A model as Hugging Face writes it: of the forty keys of a `config.json` ten decide size and time.

A key gives a field, is known to change neither bytes nor seconds, is not modelled (with what that changes), or is not
understood. A size that is missing is an error, never a guess. `book/static/model_config.js` reads the same tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from book.explain.files import read_text
from book.explain.tables import FOREIGN, USUAL_TOKENS
from book.explain.values import Asked, enter, left_over, refuse_keys
from lib.cost.sizes import ModelShape


def read_config(path: str | Path, tokens: int | None = None, read: Callable | None = None) -> tuple[Any, list[str]]:
    """The model of a `config.json`, and notes on its keys.

    A config has only the maximum of `tokens` in a sequence; the default is 8,192, or the maximum if that is less.

    Args:
        read: of config and tokens; by default `shape_of`.

    Raises:
        ValueError: not a JSON object; not a model whose size is known; a size that is missing or not a number.
    """
    text = read_text(path)
    try:
        config = json.loads(text)
        if isinstance(config, dict):
            return (read or shape_of)(config, tokens)
    except ValueError as error:
        raise ValueError(f"{path}{' is not JSON' * isinstance(error, json.JSONDecodeError)}: {error}") from None
    raise ValueError(f"{path} must be a JSON object, as Hugging Face writes it, not a {type(config).__name__}")


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a model of text; where one of images has these inside, they are taken out and come before its own."""
    outer = {key: value for key, value in config.items() if key != "text_config"}
    inner = config.get("text_config")
    return outer | inner if isinstance(inner, dict) else outer


def shape_of(config: Mapping[str, Any], tokens: int | None = None) -> tuple[ModelShape, list[str]]:
    """The same for a config that is read already."""
    table, config = FOREIGN["config"], text_part(config)
    refuse_keys(config)
    kind = config.get("model_type")
    family, (bias, biased) = _family(kind)
    asked, apart = Asked(kind, {}, {}, []), family.pop("apart", None)
    sizes = {key for keys in table["sizes"].values() for key in keys}
    for field, keys in (table["sizes"] | table["switches"]).items():
        for key in keys:
            if config.get(key) is not None:
                enter(asked, key, config[key], field)
    has_biases = config.get(bias)
    if has_biases and config.get("mlp_bias"):
        enter(asked, "mlp_bias", True, {"biases": {"true": "all"}})
    elif has_biases or (has_biases is not None and family["biases"] != "none"):
        enter(asked, bias, bool(has_biases), {"biases": {"true": biased, "false": "none"}})
    given = family | asked.found
    if lacks := [" or ".join(keys) for field, keys in [*table["sizes"].items()][:-2] if field not in given]:
        raise ValueError(f"it lacks {', '.join(lacks)}, without which the size of a {kind} model is not known")
    most = given["context"]
    shape = ModelShape(**given | {"context": tokens or min(most, USUAL_TOKENS)})
    said = {one.name: f"{one.name} {getattr(shape, one.name)}" for one in fields(shape) if one.name != "context"}
    notes = [f"{said[field]}: from {key.split()[0]}" for field, key in asked.by.items() if field in said]
    rest = ", ".join(words for field, words in said.items() if field not in asked.by)
    notes.append(f"{rest}: of model_type {kind}")
    notes.append(f"context {shape.context}: {'--seq' if tokens else 'a default'}; the config has a maximum, {most}")
    notes += [f"not counted: {apart}"] if apart else []
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None
    if set(re.findall(r"\w+", str(config.get("layer_types")))) == {"full_attention"}:
        config["layer_types"] = None
    return shape, notes + left_over({key: value for key, value in config.items() if key not in sizes}, table)


def _family(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """What the class of a `model_type` takes, with the families that it is like; and the key of its biases."""
    table = FOREIGN["config"]
    families = table["families"] | table["aliases"]
    if not isinstance(kind, str) or kind not in families:
        raise ValueError(f"model_type {kind!r} is not known; known are {', '.join(families)}")
    family, bias = dict(families[kind]), table["bias_keys"].get(kind)
    while "like" in family:
        bias = bias or table["bias_keys"].get(family["like"])
        family = families[family.pop("like")] | family
    return family, bias or ["", ""]
