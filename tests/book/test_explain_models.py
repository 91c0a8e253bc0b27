"""Architectures by other names: what transformers counts, once, and what `book.explain` counts from the same config."""

import json
from pathlib import Path

import pytest

from book.explain.models import shape_of
from book.explain.tables import FOREIGN

COUNTED = json.loads(Path(__file__).with_name("counts.json").read_text(encoding="utf-8"))["models"]
REFUSED = {"Falcon-7B (MQA)": "model_type 'falcon' is not known", "MiniCPM3 (MLA)": "latent attention (MLA)"}
LLAMA = COUNTED["SmolLM2-1.7B (llama)"]["config"]


@pytest.mark.parametrize("name", COUNTED)
def test_as_many_parameters_as_transformers_counts_or_refused_by_name(name):
    config, parameters = COUNTED[name]["config"], COUNTED[name]["parameters"]
    if name in REFUSED:
        with pytest.raises(ValueError) as error:
            shape_of(config)
        assert REFUSED[name] in str(error.value)
        return
    shape, notes = shape_of(config)
    assert shape.num_parameters == pytest.approx(parameters, rel=1e-4)  # asked: 1e-3
    assert shape.num_parameters == parameters or any(note.startswith("not counted") for note in notes)
    assert not any("not understood" in note for note in notes)
    assert ("vision_config" in config) == any("vision_config" in note for note in notes)


def test_every_alias_is_counted():
    kinds = {given.get("text_config", given)["model_type"] for given in (one["config"] for one in COUNTED.values())}
    assert set(FOREIGN["config"]["aliases"]) <= kinds


@pytest.mark.parametrize(
    "key", "kv_lora_rank moe_layer_freq mtp_layers ssm_state_size mamba_d_state lora_r conv_kernel fp8_format".split()
)
def test_a_key_that_speaks_of_another_model_is_refused(key):
    with pytest.raises(ValueError, match=f"{key} 2 is not"):
        shape_of(LLAMA | {key: 2})
    assert shape_of(LLAMA | {key: None})[0] == shape_of(LLAMA)[0]


def test_which_key_has_the_biases():
    given = COUNTED["starcoder2, use_bias False"]["config"]
    assert shape_of(given)[0].biases == "none" and "biases none: from use_bias" in shape_of(given)[1]
    assert shape_of(given | {"use_bias": None})[0].biases == "all"
    assert shape_of(COUNTED["Qwen2.5-7B"]["config"] | {"attention_bias": False})[0].biases == "qkv"
    assert shape_of(COUNTED["GLM-4-9B-0414"]["config"] | {"attention_bias": None})[0].biases == "qkv"
