"""Foreign configurations: a model of Hugging Face, a command or file of a framework. Facts, not files copied."""

import json
import sys
from dataclasses import fields

import pytest

from book.explain.__main__ import main
from book.explain.configs import FOREIGN, FRAMEWORKS, read_config, read_foreign, shape_of
from lib.cost.sizes import ModelShape
from lib.planner.training import Layout4D, Stack

KEYS = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size".split()
NEOX = {"model_type": "gpt_neox", "max_position_embeddings": 2048, "vocab_size": 50432}


def config(kind, sizes, context, **more):
    return {"model_type": kind, "max_position_embeddings": context} | dict(zip(KEYS, sizes, strict=False)) | more


def gpt2(width, layers, heads):
    names = "n_embd", "n_layer", "n_head", "vocab_size", "n_positions"
    return {"model_type": "gpt2"} | dict(zip(names, (width, layers, heads, 50257, 1024), strict=True))


UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
# Sizes as in the config.json on huggingface.co; parameters as published there (Qwen3-0.6B: the tied head once;
# gemma-3-4b: without the vision tower).
MODELS = {
    "Llama-2-7b": (config("llama", (4096, 11008, 32, 32, 32, 32000), 4096, **UNTIED), 6_738_415_616),
    "Meta-Llama-3-8B": (config("llama", (4096, 14336, 32, 32, 8, 128256), 8192, **UNTIED), 8_030_261_248),
    "Llama-3.1-70B": (config("llama", (8192, 28672, 80, 64, 8, 128256), 131072, **UNTIED), 70_553_706_496),
    "Llama-3.1-405B": (config("llama", (16384, 53248, 126, 128, 8, 128256), 131072, **UNTIED), 405_853_388_800),
    "Llama-3.2-1B": (config("llama", (2048, 8192, 16, 32, 8, 128256), 131072, head_dim=64, **TIED), 1_235_814_400),
    "Llama-3.2-3B": (config("llama", (3072, 8192, 28, 24, 8, 128256), 131072, head_dim=128, **TIED), 3_212_749_824),
    "Qwen2.5-0.5B": (config("qwen2", (896, 4864, 24, 14, 2, 151936), 32768, **TIED), 494_032_768),
    "Qwen2.5-7B": (config("qwen2", (3584, 18944, 28, 28, 4, 152064), 131072, **UNTIED), 7_615_616_512),
    "Qwen3-0.6B": (config("qwen3", (1024, 3072, 28, 16, 8, 151936), 40960, head_dim=128, **TIED), 596_049_920),
    "Qwen3-8B": (config("qwen3", (4096, 12288, 36, 32, 8, 151936), 40960, head_dim=128, **UNTIED), 8_190_735_360),
    "Qwen3-32B": (config("qwen3", (5120, 25600, 64, 64, 8, 151936), 40960, head_dim=128, **UNTIED), 32_762_123_264),
    "Mistral-7B-v0.1": (config("mistral", (4096, 14336, 32, 32, 8, 32000), 32768, **UNTIED), 7_241_732_096),
    "gemma-2b": (config("gemma", (2048, 16384, 18, 8, 1, 256000), 8192, head_dim=256), 2_506_172_416),
    "gemma-7b": (config("gemma", (3072, 24576, 28, 16, 16, 256000), 8192, head_dim=256), 8_537_680_896),
    "gemma-2-9b": (config("gemma2", (3584, 14336, 42, 16, 8, 256000), 8192, head_dim=256), 9_241_705_984),
    "gemma-2-27b": (config("gemma2", (4608, 36864, 46, 32, 16, 256000), 8192, head_dim=128), 27_227_128_320),
    "gemma-3-1b": (config("gemma3_text", (1152, 6912, 26, 4, 1, 262144), 32768, head_dim=256), 999_885_952),
    "gemma-3-4b": (
        {"model_type": "gemma3", "text_config": dict(zip(KEYS[:3], (2560, 10240, 34), strict=True))},
        3_880_099_328,
    ),
    "gpt2": (gpt2(768, 12, 12), 124_439_808),
    "gpt2-xl": (gpt2(1600, 48, 25), 1_557_611_200),
    "gpt-neox-20b": (NEOX | dict(zip(KEYS[:4], (6144, 24576, 44, 64), strict=True)), 20_554_567_680),
    "pythia-6.9b": (NEOX | dict(zip(KEYS[:4], (4096, 16384, 32, 32), strict=True)), 6_857_302_016),
    "phi-2": (config("phi", (2560, 10240, 32, 32, 32, 51200), 2048), 2_779_683_840),
    "Phi-3-mini-4k": (config("phi3", (3072, 8192, 32, 32, 32, 32064), 4096), 3_821_079_552),
    "OLMo-7B": (config("olmo", (4096, 11008, 32, 32, 32, 50304), 2048), 6_888_095_744),
    "OLMo-2-7B": (config("olmo2", (4096, 11008, 32, 32, 32, 100352), 4096), 7_298_617_344),
}
LLAMA8 = MODELS["Meta-Llama-3-8B"][0]


@pytest.mark.parametrize("name", MODELS)
def test_the_published_number_of_parameters(name):
    given, published = MODELS[name]
    shape, notes = shape_of(given)
    assert shape.num_parameters == pytest.approx(published, rel=1e-4)  # asked: 1e-3
    left_out = any(note.startswith("not counted") for note in notes)
    assert left_out or shape.num_parameters == published
    assert not any("not understood" in note for note in notes)


def test_every_family_has_a_model_here():
    kinds = {given["model_type"] for given, _ in MODELS.values()}
    assert kinds == set(FOREIGN["config"]["families"])


def test_notes_say_which_key_gave_what_and_what_was_not_understood():
    odd = {"sliding_window": 4096, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "bos_token_id": 1, "warp": 9}
    off = {"attention_bias": False, "quantization_config": None, "mlp_bias": False}
    shape, notes = shape_of(LLAMA8 | odd | off)
    assert "d_model 4096: from hidden_size" in notes and "tied False: from tie_word_embeddings" in notes
    assert notes[-1] == "not understood: warp 9"
    assert notes[-2].startswith("not modelled: sliding_window 4096: attention over a window takes less time")
    assert "context 8192: a default; the config has a maximum, 8192" in notes
    assert not any("rope" in note or "dtype" in note for note in notes)
    assert shape == shape_of(LLAMA8)[0]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"vision_config": {"depth": 2}}, "not modelled: vision_config: parameters, activations and tokens"),
        ({"quantization_config": {"bits": 4}}, "not modelled: quantization_config: weights with fewer bits"),
        ({"num_nextn_predict_layers": 1}, "not modelled: num_nextn_predict_layers 1: prediction of several"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "not modelled: layer_types: blocks with another"),
        ({"attn_logit_softcapping": 50.0}, "not modelled: attn_logit_softcapping 50.0: capped scores"),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"layer_types": ["full_attention"] * 32}, None),
    ],
)
def test_what_is_not_modelled_says_what_it_would_change(more, words):
    notes = [note for note in shape_of(LLAMA8 | more)[1] if note.startswith("not ")]
    assert [note[: len(words)] for note in notes] == [words] if words else notes == []


def test_each_switch_is_its_own():
    qkv = shape_of(LLAMA8 | {"attention_bias": True})[0]
    assert qkv.biases == "qkv" and qkv.gated and qkv.rms_norm and qkv.rotary and not qkv.tied
    assert shape_of(LLAMA8 | {"attention_bias": True, "mlp_bias": True})[0].biases == "all"
    assert shape_of(LLAMA8 | {"tie_word_embeddings": True})[0].tied
    assert shape_of(LLAMA8 | {"head_dim": 64})[0].d_q == 2048
    assert shape_of(gpt2(768, 12, 12))[0].dropout_masks
    assert not shape_of(gpt2(768, 12, 12) | {"resid_pdrop": 0.0})[0].dropout_masks


def test_a_key_that_is_left_out_is_as_its_class_has_it():
    """huggingface/transformers, models/*/configuration_*.py."""
    sizes = dict.fromkeys(("tie_word_embeddings", "head_dim", "num_key_value_heads"), None)
    of_class = {"llama": (False, None, None), "mistral": (False, None, 8), "qwen2": (False, None, 32)}
    of_class |= {"qwen3": (False, 128, 32), "gemma": (True, 256, 16), "gemma2": (True, 256, 4)}
    for kind, expected in of_class.items():
        shape = shape_of(LLAMA8 | sizes | {"model_type": kind})[0]
        assert (shape.tied, shape.head_dim, shape.num_kv_heads) == expected, kind


def test_the_length_of_a_config_is_a_maximum():
    long = LLAMA8 | {"max_position_embeddings": 131072}
    assert shape_of(long)[0].context == 8192 and shape_of(long, 32768)[0].context == 32768
    assert shape_of(gpt2(768, 12, 12))[0].context == 1024
    assert "context 32768: --seq; the config has a maximum, 131072" in shape_of(long, 32768)[1]


BAD_CONFIGS = {
    "not json": ("{", "is not JSON: "),
    "empty": (" \n", "is empty"),
    "a list": ("[1]", "must be a JSON object, as Hugging Face writes it, not a list"),
    "no kind": ("{}", "model_type None is not known; known are llama, mistral"),
    "kind": ('{"model_type": "mamba"}', "model_type 'mamba' is not known; known are llama, mistral"),
    "no size": ('{"model_type": "llama", "hidden_size": 64}', "it lacks num_hidden_layers or n_layer, num_attention"),
    "mixtral": ('{"model_type": "mixtral", "num_local_experts": 8}', "it lacks num_experts_per_tok, intermediate_size"),
    "qwen3 moe": ('{"model_type": "qwen3_moe", "num_experts": 128}', "it lacks num_experts_per_tok, moe_intermediate"),
    "deepseek": ('{"model_type": "deepseek_v2", "n_routed_experts": 160}', "n_routed_experts 160 is not modelled"),
    "lora": ('{"peft_type": "LORA", "r": 8}', "peft_type LORA is not modelled; an adapter (LoRA) is not a model"),
    "words": (json.dumps(LLAMA8 | {"hidden_size": "4096"}), "hidden_size='4096' must be a whole number of at least 1"),
    "negative": (json.dumps(LLAMA8 | {"vocab_size": -1}), "vocab_size=-1 must be a whole number of at least 1"),
    "half": (json.dumps(LLAMA8 | {"num_hidden_layers": 31.5}), "num_hidden_layers=31.5 must be a whole number"),
    "true": (json.dumps(LLAMA8 | {"num_attention_heads": True}), "num_attention_heads=True must be a whole number"),
    "no switch": (json.dumps(LLAMA8 | {"tie_word_embeddings": "false"}), "embeddings='false' must be true, false"),
    "no word": ('{"model_type": ["llama"]}', "model_type ['llama'] is not known"),
    "heads": (json.dumps(LLAMA8 | {"num_key_value_heads": 7}), "7 heads of keys and values do not divide 32 heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_config_that_cannot_be_read_is_one_clear_sentence(case, tmp_path, capsys):
    text, words = BAD_CONFIGS[case]
    (tmp_path / "config.json").write_text(text)
    said = refused(capsys, "--config", tmp_path / "config.json", "--gpus", 8)
    assert words in said and "config.json" in said


def test_a_config_that_is_no_file(tmp_path, capsys):
    assert "is a folder; give a file in it" in refused(capsys, "--config", tmp_path, "--gpus", 8)
    assert "there is no file /nowhere/config.json" in refused(capsys, "--config", "/nowhere/config.json", "--gpus", 8)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\xff\x00")
    with pytest.raises(ValueError, match="is not JSON"):
        read_config(tmp_path / "model.safetensors")


def test_the_planner_plans_the_model_of_a_config(tmp_path, capsys):
    path = tmp_path / "config.json"
    assert "both name a model: give one" in refused(capsys, "--config", path, "--model", "llama-7b", "--gpus", 8)
    path.write_text(json.dumps(MODELS["Qwen3-32B"][0]))
    said = answered(capsys, "--config", path, "--gpus", 64)
    assert "32.76 billion parameters" in said
    assert "context 8192: a default; the config has a maximum, 40960" in said
    plain = json.loads(answered(capsys, "--config", path, "--gpus", 64, "--seq", 4096, "--json"))
    assert plain["model"]["context"] == 4096 and plain["model"]["head_dim"] == 128
    assert any(note.startswith("not counted: norms of queries and keys") for note in plain["notes"])


# ---- a run ----------------------------------------------------------------------------------------------------------

LLAMA8_FLAGS = """
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --seq-length 8192 --position-embedding-type rope --hidden-dropout 0.0 --swiglu
    --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 128256
"""
# NVIDIA/Megatron-LM examples/gpt3/train_gpt3_175b_distributed.sh at 157006d, on 1,024 GPUs.
GPT3 = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-128}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # flash/fused/unfused
)
TRAINING_ARGS=(--micro-batch-size ${MICRO_BATCH:-1} --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --fp16)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
    # --context-parallel-size 4
    --use-distributed-optimizer
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    --sequence-parallel
"""
# pytorch/torchtitan torchtitan/models/llama3/train_configs/llama3_8b.toml at 01424cb.
TITAN = """
# NOTE: for 64 A100 GPUs
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
# converters = "float8"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
batch_size = 1
seq_len = 8192
max_norm = 1.0
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1
[activation_checkpoint]
mode = 'selective'
selective_ac_option = 'op'
[float8]
filter_fqns = "output"
"""
# huggingface/accelerate examples/torch_native_parallelism/configs/tp_hsdp.yaml at 571ca02.
TP_HSDP = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""
HSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD, fsdp_activation_checkpointing: true, fsdp_offload_params: true}
mixed_precision: fp8
num_machines: 4
num_processes: 32
"""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    "flux": 3,
}


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in arguments])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and "Traceback" not in said
    return said


def answered(capsys, *arguments):
    main([str(word) for word in arguments])
    return capsys.readouterr().out


@pytest.fixture
def ask(tmp_path, capsys):
    """Explain a text as a file (or flags), with further words behind it: the found fields, or what JSON says."""

    def ask(text, *words, name="file", plain=True):
        if isinstance(text, dict):
            text = json.dumps(text)
        (tmp_path / name).write_text(text)
        return json.loads(answered(capsys, tmp_path / name, *words, "--json"))

    return ask


def of(asked, *names):
    return tuple(asked.found.get(name) for name in names)


def test_flags_of_megatron(tmp_path):
    flags = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size=9 --context-parallel-size 2"
    flags += " --num-layers-per-virtual-pipeline-stage 2 --micro-batch-size 1 --global-batch-size 252"
    flags += " --sequence-parallel --use-distributed-optimizer --recompute-granularity selective --lr 1e-4 --bf16"
    asked = read_foreign(flags.split())
    assert asked.framework == "Megatron-LM" and asked.notes == []
    names = "tp pp cp stage_layers rows batch sequence_parallel zero recompute overlaps_dp exposed_tp".split()
    assert of(asked, *names) == (8, 9, 2, 2, 1, 252, True, 1, "selective", False, 1.0)
    assert asked.by["pp"] == "pipeline-model-parallel-size 9" and asked.by["zero"] == "use-distributed-optimizer"
    more = "--overlap-grad-reduce --tp-comm-overlap --warp 9 --fp8-format hybrid --grad-reduce-in-bf16".split()
    more = read_foreign(flags.split() + more)
    assert of(asked, "stack") == ("megatron-lm",) and of(more, "stack") == ("megatron",)
    assert of(more, "overlaps_dp", "exposed_tp") == (True, "stack")
    said = "--tensor-model-parallel-size 8 --overlap-grad-reduce False --sequence-parallel=true".split()
    assert of(read_foreign(said), "overlaps_dp", "sequence_parallel") == (False, True)
    assert more.notes == ["not understood: warp 9"] and more.by["fp8"] == "fp8-format hybrid"


def test_a_command_with_its_launcher(capsys):
    words = (
        "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --tensor-model-parallel-size 8 --micro-batch-size 1"
    )
    asked = read_foreign([*words.split(), "--use-distributed-optimizer"])
    assert of(asked, "gpus", "tp", "zero") == (16, 8, 1) and asked.notes == []
    run = "--use-distributed-optimizer --model llama-7b --gpus 8 --json".split()
    said = json.loads(answered(capsys, *words.split(), *run))
    assert said["report"]["axes"][1].endswith("zero 0")  # one data-parallel rank has nobody to share with


def test_the_model_of_megatron_flags(capsys):
    run = "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 128 --gpus 16 --json".split()
    said = json.loads(answered(capsys, *LLAMA8_FLAGS.split(), *run))
    assert said["report"]["assumes"]["model"].startswith("8.03 billion parameters, 32 blocks of width 4096")
    narrow = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --swiglu --micro-batch-size 1".split()
    assert read_foreign(narrow).found["d_mlp"] == 2688  # int(4 · 1024 · 2/3 / 64) · 64
    assert of(read_foreign([*narrow, "--num-query-groups", "4"]), "num_kv_heads") == (None,)
    assert of(read_foreign([*narrow, "--group-query-attention"]), "num_kv_heads") == (1,)


def test_405b_of_nvidia_on_576_gpus(capsys):
    """NVIDIA/dgxc-benchmarking llama3.1/README_405b.md at 143b90dd; 126 layers in 9 · 7 stages of 2."""
    flags = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 9 --context-parallel-size 2 --swiglu"
    flags += " --num-layers-per-virtual-pipeline-stage 2 --micro-batch-size 1 --global-batch-size 252"
    flags += " --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --tp-comm-overlap"
    run = "--model llama-405b --gpus 576 --json".split()
    said = json.loads(answered(capsys, *flags.split(), *run))
    assert said["report"]["axes"][:3] == [
        "576 ranks = pp 9 x dp 4 x cp 2 x tp 8 (neighbours on the last axis have consecutive numbers)",
        "dp 4: 63 of 252 sequences each, in 63 microbatches of 1; zero 1",
        "pp 9: 63 stages, schedule interleaved 1F1B",
    ]
    assert said["by"]["stages_per_rank"] == "num-layers-per-virtual-pipeline-stage 2" and said["notes"] == []


def test_a_script_of_megatron(ask):
    said = ask(GPT3, "--vocab", 51200, "--gpu", "a100")
    assert said["report"]["axes"][0].startswith("1024 ranks = pp 16 x dp 8 x cp 1 x tp 8")
    assert said["report"]["assumes"]["model"].startswith("174.6 billion parameters")
    assert said["by"]["zero"] == "use-distributed-optimizer" and "cp" not in said["by"]
    assert [note.partition(":")[2].split()[0] for note in said["notes"]] == ["rampup-batch-size"]
    assert said["by"]["per_node"] == "nproc_per_node 8"
    assert said["remarks"] == ["with the flags of TRAINING_ARGS, MODEL_PARALLEL_ARGS, which the command does not use"]


def test_yaml_of_megatron(ask):
    pytest.importorskip("yaml")
    text = """
language_model:
  num_layers: 24
  hidden_size: 1024
  num_attention_heads: 16
  activation_func: swiglu
  add_bias_linear: False
  num_moe_experts: null
model_parallel: {tensor_model_parallel_size: 2, expert_model_parallel_size: 1, sequence_parallel: True}
micro_batch_size: 2
global_batch_size: 128
seq_length: 4096
"""
    said = ask(text, "--gpus", 8, "--vocab", 50304)
    assert said["by"]["tp"] == "model_parallel.tensor_model_parallel_size 2" and said["notes"] == []
    assert said["report"]["axes"][1].startswith("dp 4: 32 of 128 sequences each, in 16 microbatches of 2")


def test_toml_of_torchtitan(tmp_path):
    (tmp_path / "a.toml").write_text(TITAN)
    asked = read_foreign([str(tmp_path / "a.toml")])
    assert asked.framework == "torchtitan" and asked.notes == []
    assert of(asked, "zero", "local", "recompute", "every", "context", "replicas") == (3, 1, "ops", 1, 8192, 1)
    assert of(asked, "stack") == ("fsdp-eager",)
    assert of(read_foreign([str(tmp_path / "a.toml"), "--training.compile"]), "stack") == ("fsdp",)
    more = "--activation_checkpoint.selective_ac_option 3 --parallelism.pipeline_parallel_degree 2".split()
    more += "--parallelism.pipeline_parallel_schedule Interleaved1F1B --model.converters float8".split()
    asked = read_foreign([str(tmp_path / "a.toml"), *more])
    assert of(asked, "recompute", "every", "pp", "stages_per_rank", "zero") == ("full", 3, 2, 2, 2)
    assert asked.notes == [] and of(asked, "fp8") == (True,)
    asked = read_foreign([str(tmp_path / "a.toml"), "--parallelism.pipeline_parallel_schedule", "GPipe"])
    assert asked.notes[0].startswith("not modelled: parallelism.pipeline_parallel_schedule GPipe; known are 1f1b")


def test_a_torchtitan_file_is_planned(ask):
    """torchtitan/models/llama3/train_configs/llama3_405b.toml at 01424cb, for 128 H100 GPUs: ZeRO-3 with tp."""
    text = TITAN.replace("batch_size = 1", "batch_size = 2").replace(
        "parallel_degree = 1\npipe", "parallel_degree = 8\npipe"
    )
    said = ask(text.replace("'selective'", "'full'"), "--model", "llama-405b", "--gpus", 128)
    assert said["report"]["axes"][0].startswith("128 ranks = pp 1 x dp 16 x cp 1 x tp 8")
    assert said["report"]["axes"][1] == "dp 16: 2 of 32 sequences each, in 1 microbatches of 2; zero 3"
    assert said["report"]["notes"][0].startswith("fits: ") and said["by"]["rows"] == "training.batch_size 2"


def test_yaml_of_accelerate(tmp_path, ask):
    pytest.importorskip("yaml")
    (tmp_path / "a.yaml").write_text(TP_HSDP)
    asked = read_foreign([str(tmp_path / "a.yaml")])
    assert of(asked, "gpus", "tp", "replicas", "shards", "zero", "recompute") == (8, 2, 2, 2, 3, "none")
    assert asked.notes == []
    said = ask(HSDP, "--model", "llama-7b")
    assert "replicas 4: ZeRO shards over 8 ranks" in said["report"]["axes"]
    assert said["by"]["replicas"] == "fsdp_config.fsdp_sharding_strategy HYBRID_SHARD"
    assert said["by"]["recompute"] == "fsdp_config.fsdp_activation_checkpointing"
    assert said["stack"]["fp8_speedup"] > 1.5 and said["by"]["fp8"] == "mixed_precision fp8"
    assert said["notes"][0].startswith("not modelled: fsdp_config.fsdp_offload_params: what moves to the CPU")
    for strategy, zero in {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "2": 2}.items():
        words = f"--num_processes 8 --distributed_type FSDP --fsdp_sharding_strategy {strategy}".split()
        assert of(read_foreign(words), "zero", "replicas") == (zero, 1)


def test_adapters_on_a_model_of_hugging_face(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA8))
    words = "--config", tmp_path / "config.json", "--gpus", 1, "--seq", 2048, "--memory", "24GB", "--batch", 16
    said = " ".join(answered(capsys, *words, "--lora", 16, "--base", "4bit").split())
    assert "fits: 19.3 of 24.0 GB with adapters of rank 16 on a base in 4 bit" in said


def test_gradients_that_accelerate_keeps_whole(tmp_path, ask):
    """With FSDP and several microbatches, unless our own option says that each microbatch is reduced."""
    pytest.importorskip("yaml")
    text = "use_fsdp: true\ndistributed_type: FSDP\nnum_processes: 8\ngradient_accumulation_steps: 4\n"
    (tmp_path / "a.yaml").write_text(text)
    held = {}
    for given in ((), ("--whole-gradients", 0), ("--whole-gradients", 4), ("--batch", 8)):
        said = ask(text, "--model", "llama-7b", *given)
        held[given[-2:]] = said["report"]["places"][0]["held"]["gradients"] / 6.738e9
    assert held == pytest.approx(
        {(): 2, ("--whole-gradients", 0): 1 / 4, ("--whole-gradients", 4): 4, ("--batch", 8): 1 / 4}, rel=1e-3
    )
    said = ask(text, "--model", "llama-7b")
    assert said["by"]["whole_gradient_bytes"] in ("use_fsdp", "distributed_type FSDP")


def test_json_of_deepspeed(ask):
    said = ask(DEEPSPEED, "--model", "llama-7b", "--gpus", 16)
    assert said["report"]["axes"][1] == "dp 16: 8 of 128 sequences each, in 4 microbatches of 2; zero 2"
    assert said["by"]["overlaps_dp"] == "zero_optimization.overlap_comm"
    assert said["notes"][0].startswith("not modelled: zero_optimization.offload_optimizer.device cpu: what moves")
    assert said["notes"][1:] == ["not understood: flux 3"]
    more = ask(
        DEEPSPEED | {"gradient_accumulation_steps": "auto"}, "--model", "llama-7b", "--gpus", 16, "--batch", 64
    )
    assert more["report"]["axes"][1].startswith("dp 16: 4 of 64 sequences each, in 2 microbatches of 2")


def test_our_own_options_overrule(ask):
    said = ask(GPT3, "--vocab", 51200, "--gpus", 256, "--pp", 8, "--batch", 512, "--recompute", "full")
    assert said["report"]["axes"][0].startswith("256 ranks = pp 8 x dp 4 x cp 1 x tp 8")
    assert said["by"]["pp"] == "--pp 8" and said["by"]["recompute"] == "--recompute full"
    assert said["report"]["layout"]["recompute"] == "full" and said["global_batch"] == 512
    in_8_bit = ask(GPT3, "--vocab", 51200, "--fp8")
    assert in_8_bit["stack"]["fp8_speedup"] > 1.5 and said["stack"]["fp8_speedup"] == 1
    assert ask(GPT3, "--vocab", 51200, "--fp4")["notes"][-1] == "not modelled: FP4"


def test_each_flag_says_what_a_rank_does_by_it_and_the_run_without_it(capsys, tmp_path):
    run = (
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 128"
    )
    run += " --sequence-parallel --use-distributed-optimizer --recompute-granularity full --overlap-grad-reduce"
    run += " --gpus 64"
    said = answered(capsys, *LLAMA8_FLAGS.split(), *run.split())
    paragraphs = said.partition("\n\n")[0].splitlines()
    at = {line: paragraphs[i + 1 : i + 3] for i, line in enumerate(paragraphs) if not line.startswith(" ")}
    flags = [
        "tensor-model-parallel-size 4",
        "pipeline-model-parallel-size 2",
        "micro-batch-size 2",
        "sequence-parallel",
    ]
    flags += ["use-distributed-optimizer", "recompute-granularity full", "overlap-grad-reduce"]
    assert set(at) == {paragraphs[0], *flags}
    does, without = at["use-distributed-optimizer"]
    assert does == "  holds shards of model states (ZeRO-1); sends gradients, and gathers parameters"
    assert "optimizer +" in without and "(+" in without
    assert (
        "without it" in at["recompute-granularity full"][1] and "activations +" in at["recompute-granularity full"][1]
    )
    assert max(map(len, paragraphs)) <= 100
    assert "64 ranks = pp 2 x dp 8 x cp 1 x tp 4" in said and "s per step" in said


SHARDS = "[parallelism]\ndata_parallel_shard_degree = 4\n[training]\nlocal_batch_size = 1"
COPIES = "[parallelism]\ndata_parallel_replicate_degree = 3"
BAD_FILES = {
    "not json": ("{1", [], "is malformed: "),
    "not toml": ("[job]\nx = = 2", [], "is malformed: "),
    "a list": ("[1, 2]", [], "must have keys and values, not a list"),
    "empty": ("", [], "is empty"),
    "foreign": ('{"a": 1}', [], "has no key of Megatron-LM, torchtitan, Accelerate, DeepSpeed"),
    "a model": (json.dumps(LLAMA8), [], "is the config of a model; give it as --config"),
    "words": ('{"train_micro_batch_size_per_gpu": "two"}', [], "per_gpu='two' must be a whole number"),
    "negative": ('{"zero_optimization": {"stage": -1}}', [], "stage=-1 must be a whole number of at least 0"),
    "no number": ("[parallelism]\ntensor_parallel_degree = true", [], "degree=True must be a whole number"),
    "experts": ("[parallelism]\nexpert_parallel_degree = 8", [], "expert_parallel_degree 8 is not modelled; a mixture"),
    "unset": ("x.py --tensor-model-parallel-size $TP", [], "$TP, which nothing sets; add --tensor-"),
    "no model": (json.dumps(DEEPSPEED), ["--gpus", 8], "give --model, or all its numbers; missing: --hidden"),
    "no gpus": (json.dumps(DEEPSPEED), ["--model", "llama-7b"], "give --gpus, the number of all GPUs"),
    "tp": (GPT3, ["--vocab", 51200, "--tensor-model-parallel-size", 7], "cannot be shared by 7 tensor-parallel ranks"),
    "gpus": (GPT3, ["--vocab", 51200, "--gpus", 100], "100 GPUs do not divide by tp × cp × pp = 128"),
    "copies": (COPIES, ["--gpus", 8, "--model", "llama-7b"], "3 copies of 2 shards are not dp 8: give --gpus"),
    "shards": (SHARDS, ["--gpus", 16, "--model", "llama-7b"], "1 copies of 4 shards are not dp 16: give --gpus"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_cannot_be_explained_is_one_clear_sentence(case, tmp_path, capsys):
    text, more, words = BAD_FILES[case]
    (tmp_path / "file").write_text(text)
    assert words in refused(capsys, tmp_path / "file", *more)


def test_a_folder_no_file_no_words_and_no_yaml(tmp_path, capsys, monkeypatch):
    assert "is a folder; give a file in it" in refused(capsys, tmp_path)
    assert "there is no file /nowhere/run.sh" in refused(capsys, "/nowhere/run.sh")
    assert "the command has no key of Megatron-LM" in refused(capsys)
    (tmp_path / "a.yaml").write_text(HSDP)
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "Python needs PyYAML: pip install PyYAML" in refused(capsys, tmp_path / "a.yaml")


def test_tables_name_fields_that_exist():
    known = {one.name for kind in (ModelShape, Stack) for one in fields(kind)} | {*Layout4D._fields}
    known |= set("gpus nodes per_node batch accumulation local shards stage_layers stack".split())
    known |= {"grouped", "groups", "precision", "reshards", "fp8"}
    for name, table in FRAMEWORKS.items():
        into = {field for to in table["keys"].values() for field in (to if isinstance(to, dict) else [to])}
        assert into | set(table["defaults"]) | set(table.get("model", {})) <= known, name
        assert "at 0" in table["source"]
    assert set(FOREIGN["explain"]["does"]) <= known
    config = FOREIGN["config"]
    named = {*config["sizes"], *config["switches"]}
    for family in config["families"].values():
        named |= set(family)
    assert named - {"like", "apart"} <= {one.name for one in fields(ModelShape)}
