"""Models with experts: configs against the counts of transformers, the command, and why there are no seconds."""

import json
from pathlib import Path

import pytest

from book.explain.__main__ import main
from book.explain.experts import expert_shape_of
from book.published.experts import dense_twin, expert_errors, expert_errors_text
from lib.cost.expert_models import EXPERT_MODELS
from lib.planner.experts import MISSES, NO_SECONDS_OF_EXPERTS
from tests.book.test_explain import LLAMA8

COUNTED = json.loads(Path(__file__).with_name("expert_counts.json").read_text(encoding="utf-8"))["models"]
MIXTRAL, QWEN, GPT_OSS, DEEPSEEK = (
    COUNTED[name]["config"] for name in ("Mixtral-8x7B", "Qwen3-30B-A3B", "gpt-oss-20b", "DeepSeek-V3")
)
# Further keys, as the four publishers have them in their files.
MORE = {
    "mixtral": {
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "rope_theta": 1e6,
    },
    "qwen3_moe": {
        **{"attention_bias": False, "decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": []},
        **{"norm_topk_prob": True, "output_router_logits": False, "router_aux_loss_coef": 0.001},
        **{"sliding_window": None, "use_sliding_window": False},
    },
    "gpt_oss": {
        **{"attention_bias": True, "experts_per_token": 4, "initial_context_length": 4096, "swiglu_limit": 7.0},
        **{"layer_types": ["sliding_attention", "full_attention"], "quantization_config": {"quant_method": "mxfp4"}},
        **{"output_router_logits": False, "router_aux_loss_coef": 0.9, "sliding_window": 128},
    },
    "deepseek_v3": {
        **{"attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "n_group": 8},
        **{"norm_topk_prob": True, "num_nextn_predict_layers": 1, "pretraining_tp": 1, "routed_scaling_factor": 2.5},
        **{"quantization_config": {"fmt": "e4m3"}, "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 4},
        **{"topk_method": "noaux_tc"},
    },
}
SHARED = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


@pytest.mark.parametrize("name", COUNTED)
def test_as_many_parameters_as_transformers_counts(name):
    config, parameters, routed = (COUNTED[name][key] for key in ("config", "parameters", "routed"))
    shape, notes = expert_shape_of(config | SHARED | MORE[config["model_type"]] | config)
    assert shape.routed_parameters(shape.blocks) == routed
    left_out = any(note.startswith("not counted") for note in notes)
    assert shape.num_parameters == pytest.approx(parameters, rel=1e-3 if "small" in name else 1e-6)
    assert left_out or shape.num_parameters == parameters
    assert not any("not understood" in note for note in notes), notes


def inside_of_images(config: dict) -> dict:
    """A config of images and text, whose text is this model."""
    return {"model_type": "llava", "vision_config": {"depth": 32}, "text_config": config}


@pytest.mark.parametrize("config", [MIXTRAL, QWEN, GPT_OSS, DEEPSEEK], ids=lambda config: config["model_type"])
def test_the_text_part_of_a_model_of_images_is_the_same_model(config):
    shape, notes = expert_shape_of(inside_of_images(config))
    alone, plain = expert_shape_of(config)
    more = [note for note in notes if note not in plain]
    assert shape == alone and set(plain) < set(notes)
    assert len(more) == 1 and more[0].startswith("not modelled: vision_config: parameters, activations and tokens")


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_a_preset_is_what_its_config_says(name):
    """Kimi K2's config has `deepseek_v3`."""
    of = {one.lower(): one for one in COUNTED}[name]
    shape, _ = expert_shape_of(COUNTED[of]["config"], EXPERT_MODELS[name].base.context)
    assert (shape.num_parameters, shape.num_active_parameters, shape.dense, shape.latent) == (
        EXPERT_MODELS[name].num_parameters,
        EXPERT_MODELS[name].num_active_parameters,
        EXPERT_MODELS[name].dense,
        EXPERT_MODELS[name].latent,
    )
    assert shape.base.d_head == EXPERT_MODELS[name].base.d_head and shape.base.d_kv == EXPERT_MODELS[name].base.d_kv


def test_notes_say_which_key_gave_which_size():
    _, notes = expert_shape_of(DEEPSEEK | MORE["deepseek_v3"])
    for note in (
        "num_experts 256: from n_routed_experts",
        "q_rank 1536: from q_lora_rank",
        "first_k_dense_replace 3",
        "d_mlp 18432: from intermediate_size",
        "context 8192: a default; the config has a maximum, 163840",
        "not modelled: num_nextn_predict_layers 1: prediction of several tokens adds blocks and losses",
    ):
        assert note in notes
    _, notes = expert_shape_of(GPT_OSS | MORE["gpt_oss"])
    assert any("blocks with another kind of attention" in note for note in notes)
    assert any("biases all" in note and note.endswith("of model_type gpt_oss") for note in notes)
    assert expert_shape_of(LLAMA8) is None and expert_shape_of({"model_type": ["mixtral"]}) is None


BAD = {
    "no experts": (
        MIXTRAL | {"num_local_experts": None},
        "it lacks num_local_experts, without which the size of a mix",
    ),
    "nothing": (
        {"model_type": "mixtral", "num_local_experts": 8},
        "it lacks num_experts_per_tok, intermediate_size,",
    ),
    "half": (QWEN | {"num_experts": 1.5}, "num_experts=1.5 must be a whole number of at least 1"),
    "words": (QWEN | {"moe_intermediate_size": "768"}, "moe_intermediate_size='768' must be a whole number"),
    "too many": (QWEN | {"num_experts_per_tok": 129}, "129 experts per token of 128; use 1 to 128"),
    "no heads": (QWEN | {"head_dim": None}, "it lacks head_dim, without which the size of a qwen3_moe model"),
    "biases": (QWEN | {"attention_bias": True}, "attention_bias True is not counted in a qwen3_moe model"),
    "no biases": (GPT_OSS | {"attention_bias": False}, "attention_bias False is not counted in a gpt_oss model"),
    "places": (QWEN | {"mlp_only_layers": "all"}, "mlp_only_layers='all' must be a list of places of blocks"),
    "all dense": (QWEN | {"decoder_sparse_step": 49}, "none of the 48 blocks has experts; count it as a dense model"),
    "shared": (
        MIXTRAL | {"n_shared_experts": 2},
        "n_shared_experts 2 is not counted in a mixtral model, which does not",
    ),
    "frequency": (DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq 2 is not counted: only 1"),
    "no rank": ({key: DEEPSEEK[key] for key in DEEPSEEK if key != "q_lora_rank"}, "it lacks q_lora_rank, without"),
    "another": (QWEN | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size 64 is not"),
    "adapter": (MIXTRAL | {"lora_r": 8}, "lora_r 8 is not"),
    "dense size": (MIXTRAL | {"hidden_size": None}, "it lacks hidden_size or n_embd, without which"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_config_that_cannot_be_counted_is_one_sentence(case):
    config, words = BAD[case]
    with pytest.raises(ValueError) as error:
        expert_shape_of(config)
    assert words in str(error.value) and "\n" not in str(error.value)


def answered(capsys, *words):
    main([str(word) for word in words])
    return capsys.readouterr().out


def refused(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    return said


def test_the_command_reads_a_config_with_experts(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    said = answered(capsys, path, "--gpus", 64, "--seq", 4096)
    assert "46.7 billion parameters, 12.88 billion active" in said and NO_SECONDS_OF_EXPERTS in said.replace(
        "\n  ", " "
    )
    assert "8     8   1   1  64       36.3            33.5      69.8  87%  fits       3.758   0.000" in said
    assert said == answered(capsys, "--config", path, "--gpus", 64, "--seq", 4096)
    one = json.loads(answered(capsys, path, "--gpus", 64, "--ep", 8, "--json"))
    assert one["asked"]["ep"] == 8 and "num_experts 8: from num_local_experts" in one["notes"]
    assert "train.sh asks for a run" in refused(capsys, "train.sh", "--config", path, "--gpus", 64)
    assert "--hidden cannot be changed" in refused(capsys, path, "--gpus", 64, "--hidden", 8)
    path.write_text(json.dumps(MIXTRAL | {"num_experts_per_tok": 9}))
    assert "config.json: 9 experts per token of 8" in refused(capsys, path, "--gpus", 64)


def test_a_file_of_a_framework_with_experts_is_refused_and_led_on(capsys):
    said = refused(capsys, "--num-layers", 32, "--num-experts", 8, "--gpus", 64)
    flags = (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 32000 --micro-"
    )
    flags += "batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 1 --gpus 64 --ep 2"
    assert "--ep 2 divides experts, and this model has none" in refused(capsys, *flags.split())
    assert "num-experts 8 is not modelled" in said and "answered by memory: --config config.json" in said


def test_seconds_are_refused_with_the_errors_that_the_planner_has(say):
    found = expert_errors()
    say(expert_errors_text(found))
    errors = [round(one.error, 2) for one in found]
    assert (len(errors), min(errors), max(errors)) == MISSES, "set MISSES to these, in lib/planner/experts.py"
    runs, least, most = MISSES
    assert f"misses {runs} published runs by {least:+.0%} to {most:+.0%}" in NO_SECONDS_OF_EXPERTS


def test_the_twin_multiplies_as_many_parameters():
    for shape in EXPERT_MODELS.values():
        twin, active = dense_twin(shape), shape.num_active_parameters
        assert twin.num_parameters == pytest.approx(active, rel=1e-3)
