"""torchtitan's names: of a configuration in Python, of a model and its flavor, and numbers of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from book.explain.values import Asked
from lib.cost.models import known
from lib.layout import whole_number
from lib.planner.training import PRESET_MODELS


def with_config(said: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that `--module llama3 --config llama3_8b` stands for, overruled by the others.

    Raises:
        ValueError: a configuration that is in no table; it is Python, which is not run here.
    """
    name = said.get("config") if "module" in said else None
    configs = table.get("configs", {})
    if name is None or not configs:
        return dict(said)
    if name not in configs:
        raise ValueError(
            f"--config {name} is a Python function of {table['name']}, which is not run here; known are "
            f"{', '.join(configs)}: give one of them and the keys that differ, such as --training.seq_len 4096"
        )
    return configs[name] | {key: value for key, value in said.items() if key != "config"}


def enter_tokens(asked: Asked, said: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    """Sequences, where a key has their tokens; -1 leaves it open.

    Raises:
        ValueError: tokens that are no whole sequences.
    """
    for key, field in table.get("tokens", {}).items():
        if key in said and said[key] != -1:
            context = asked.found["context"]
            whole_number(key, said[key], 1)
            if said[key] % context:
                raise ValueError(f"{key} {said[key]} is no multiple of the {context} tokens of a sequence")
            asked.found[field], asked.by[field] = said[key] // context, f"{key} {said[key]}"


def enter_flavor(asked: Asked, said: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    """The model that `model.name` and `model.flavor` mean, or that `base_model` names; unknown ones are noted.

    `model` is the name of a preset, so that --model on the command line takes its place.
    """
    flavors = table.get("flavors", {})
    if "model.flavor" in said and flavors:
        model = flavors.get(flavor := f"{said.get('model.name', 'llama3')} {said['model.flavor']}")
        if isinstance(model, dict):
            asked.found.update(model)
            asked.by.update(dict.fromkeys(model, f"model.flavor {said['model.flavor']}"))
        elif model:
            asked.found["model"], asked.by["model"] = model, f"model.flavor {said['model.flavor']}"
        else:
            asked.notes.append(f"not understood: model.flavor {flavor}; known are {', '.join(flavors)}")
    elif "base_model" in said and table["name"] == "axolotl":
        try:
            asked.found["model"] = known(str(said["base_model"]), PRESET_MODELS, "model")
            asked.by["model"] = f"base_model {said['base_model']}"
        except ValueError as error:
            if "not modelled" in str(error):
                raise
            asked.notes.append(f"not understood: base_model {said['base_model']}; give --model, or its --config")
