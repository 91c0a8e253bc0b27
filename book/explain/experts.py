"""A model with experts as Hugging Face writes it: the dense part by `book.explain.models`, and the keys of experts.

`book/static/experts.js` reads the same table, and a test compares both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from book.explain.files import read_text
from book.explain.models import read_config, shape_of, text_part
from book.explain.tables import FOREIGN
from lib.cost.experts import ExpertShape, LatentAttention
from lib.cost.sizes import ModelShape
from lib.layout import whole_number

TABLE = FOREIGN["experts"]
PLACES = {
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
}  # key → what is as if it were not there


def read_model(path: str | Path, tokens: int | None = None) -> tuple[ModelShape | ExpertShape, list[str]]:
    """The model of a `config.json`, with or without experts, and notes on its keys; as `read_config`."""
    return read_config(
        path, tokens, lambda config, tokens: expert_shape_of(config, tokens) or shape_of(config, tokens)
    )


def config_with_experts(words: Sequence[str]) -> str | None:
    """The only word, if it is a `config.json` of a model with experts."""
    if len(words) != 1 or not Path(words[0]).is_file():
        return None
    try:
        config = json.loads(read_text(words[0]))
    except ValueError:
        return None
    is_model = isinstance(config, dict) and "base_model" not in config
    return words[0] if is_model and text_part(config).get("model_type") in TABLE["families"] else None


def expert_shape_of(config: Mapping[str, Any], tokens: int | None = None) -> tuple[ExpertShape, list[str]] | None:
    """The model and notes on its keys, or None for a `model_type` without experts.

    Raises:
        ValueError: a size that is missing or no number, or blocks of a kind that is not counted.
    """
    given = text_part(config)
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in TABLE["families"]:
        return None
    family = TABLE["families"][kind]
    sizes = {"num_experts": family["num_experts"], "top_k": "num_experts_per_tok", "d_expert": family["d_expert"]}
    latent = family.get("latent", {})
    needs = [*sizes.values(), *family["needs"], *(key for key in latent.values() if key != "q_lora_rank")]
    lacks = [key for key in needs if given.get(key) is None] + ["q_lora_rank"] * (
        "q_lora_rank" not in given and bool(latent)
    )
    if lacks:
        raise ValueError(f"it lacks {', '.join(lacks)}, without which the size of a {kind} model is not known")
    bias = given.get("attention_bias")
    if bias is not None and bool(bias) != family["attention_bias"]:
        raise ValueError(
            f"attention_bias {bias} is not counted in a {kind} model, whose published configs have {not bias}"
        )
    for key, usual in PLACES.items():
        if key not in family["places"] and repr(given.get(key)) not in (repr(usual), "None"):  # True is not 1
            raise ValueError(
                f"{key} {given[key]} is not counted in a {kind} model, which does not have it: leave it out"
            )
    found = {field: _size(given, key) for field, key in sizes.items()}
    ranks = {field: _size(given, key) if given[key] is not None else 0 for field, key in latent.items()}
    taken = {*sizes.values(), *latent.values(), *PLACES, "attention_bias"} - {"intermediate_size"}
    no_effect = re.compile(f"({'|'.join(TABLE['no_effect'].split())})")
    plain = {key: value for key, value in given.items() if key not in taken and not no_effect.match(key)}
    plain |= {"model_type": family["like"]} | ({"head_dim": ranks["d_rope"] + ranks["d_nope"]} if latent else {})
    base, notes = shape_of(plain, tokens)
    base = replace(base, biases=family["biases"])
    shared, dense = _shared_and_dense(given, base.num_layers)
    shape = ExpertShape(
        base,
        **found,
        d_shared=shared * found["d_expert"],
        dense=dense,
        latent=LatentAttention(**ranks) if latent else None,
    )
    notes = [note.replace(f"of model_type {family['like']}", f"of model_type {kind}") for note in notes]
    if latent:
        notes = [note for note in notes if not note.startswith("head_dim ")]
    notes = [note.replace("biases none,", f"biases {family['biases']},") for note in notes]
    own = [f"{field} {value}: from {key}" for (field, value), key in zip(found.items(), sizes.values(), strict=True)]
    own += [f"{field} {ranks[field]}: from {key}" for field, key in latent.items()]
    own += [f"{key} {given[key]}" for key in PLACES if given.get(key) is not None]
    own += [f"not counted: {family['apart']}"] if family["apart"] else []
    return shape, own + notes


def _size(given: Mapping[str, Any], key: str, least: int = 1) -> int:
    whole_number(key, given[key], least)
    return given[key]


def _shared_and_dense(given: Mapping[str, Any], layers: int) -> tuple[int, tuple[int, ...]]:
    """How many experts are shared, and the places of the blocks that have none."""
    numbers = {key: usual for key, usual in PLACES.items() if key != "mlp_only_layers"}
    for key, usual in numbers.items():
        if given.get(key) is not None:
            numbers[key] = _size(given, key, usual)
    if (frequency := numbers["moe_layer_freq"]) != 1:
        raise ValueError(
            f"moe_layer_freq {frequency} is not counted: only 1, experts in each block after the dense ones"
        )
    only = given.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(type(place) is int for place in only):
        raise ValueError(f"mlp_only_layers={only!r} must be a list of places of blocks")
    step, first = numbers["decoder_sparse_step"], numbers["first_k_dense_replace"]
    dense = [place for place in range(layers) if place < first or (place + 1) % step or place in only]
    return numbers["n_shared_experts"], tuple(dense)
