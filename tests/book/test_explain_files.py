"""Whose file it is, and what of it counts: right, or refused in one sentence, and never a run of another program."""

import json
import sys
from pathlib import Path

import pytest

from book.explain.configs import completed, read_foreign
from book.explain.tables import FOREIGN, FRAMEWORKS
from lib.planner import Cluster, Training
from lib.planner.training import GPUS, PRESET_MODELS, stack_for
from tests.book.test_explain import TITAN, answered, of

MEGATRON = """
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 32000 --swiglu
    --micro-batch-size 1 --global-batch-size 64 --use-distributed-optimizer --bf16
"""
NANOTRON = """
checkpoints: {checkpoint_interval: 10}
general: {project: debug, run: a, seed: 42}
model:
  dtype: bfloat16
  model_config:
    is_llama_config: true
    hidden_size: 2048
    intermediate_size: 8192
    num_hidden_layers: 24
    num_attention_heads: 32
    num_key_value_heads: 32
    vocab_size: 49152
    max_position_embeddings: 8192
    tie_word_embeddings: true
optimizer:
  accumulate_grad_in_fp32: true
  zero_stage: 1
  optimizer_factory: {name: adamW, adam_beta1: 0.9}
parallelism: {dp: 4, tp: 2, pp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, expert_parallel_size: 1}
tokens: {micro_batch_size: 2, batch_accumulation_per_replica: 8, sequence_length: 4096, train_steps: 15}
"""
AXOLOTL = """
base_model: Qwen/Qwen3-8B
datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch_fused
learning_rate: 2e-5
bf16: true
"""
OTHERS = {
    "litgpt": "model_name: tiny-llama\ntrain: {global_batch_size: 512, micro_batch_size: 4}\ndevices: 8",
    "LLaMA-Factory": "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\nmicro_batch_size: 1",
    "Transformers": "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nbf16: true",
    "NeMo": "trainer: {devices: 8, num_nodes: 2}\nmodel: {tensor_model_parallel_size: 4, micro_batch_size: 1}",
    "GPT-NeoX": "pipe-parallel-size: 2\nmodel-parallel-size: 2\nnum-layers: 12\ntrain_micro_batch_size_per_gpu: 4",
    "LLM Foundry": "max_seq_len: 2048\nglobal_train_batch_size: 256\nfsdp_config: {sharding_strategy: FULL_SHARD}",
    "MaxText": "ici_fsdp_parallelism: 4\nper_device_batch_size: 1",
    "PaddleNLP": "tensor_parallel_degree: 8\npipeline_parallel_degree: 1",
}


@pytest.fixture
def read(tmp_path):
    """Read a text as a file of this name, with words behind it."""

    def read(text, *words, name="file"):
        (tmp_path / name).write_text(json.dumps(text) if isinstance(text, dict) else text, encoding="utf-8")
        return read_foreign([str(tmp_path / name), *words])

    return read


def recipe_of(asked, model="llama-7b", gpus=64):
    """Bytes of a parameter: weight, gradient, master copy, states."""
    cluster = Cluster(GPUS["h100"], gpus)
    training = Training(PRESET_MODELS[model], cluster, stack_for(asked.found["stack"], "h100"), 64)
    return tuple(vars(completed(asked, {}, training, None)[0].stack.recipe).values())


# ---- whose file it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", OTHERS)
def test_a_file_of_another_program_is_refused_by_its_name(program, read):
    pytest.importorskip("yaml")
    with pytest.raises(
        ValueError, match=f"{program}.*, which is not read here: give the model and the layout as opt"
    ):
        read(OTHERS[program])


@pytest.mark.parametrize(
    "keys",
    [
        {"micro_batch_size": 2, "global_batch_size": 16, "num_layers": 4, "hidden_size": 1024},
        {"gradient_accumulation_steps": 4, "bf16": True},
        {"tp": 2, "pp": 2, "seq_length": 1024},
        {"vocab_size": 50257, "context_parallel_size": 2},
    ],
)
def test_keys_that_many_programs_have_tell_nothing(keys, read):
    with pytest.raises(ValueError, match="has no key of Megatron-LM, .*axolotl that no other program has: give"):
        read(keys)


def test_keys_of_two_frameworks_are_refused(read):
    with pytest.raises(
        ValueError, match="has train_batch_size of DeepSpeed and sequence_len of axolotl: give a file"
    ):
        read({"train_batch_size": 8, "sequence_len": 2048})


def test_no_key_belongs_to_two_frameworks():
    for name, table in FRAMEWORKS.items():
        for other, of_other in FRAMEWORKS.items():
            shared = set(table["only"].split()) & set(of_other["only"].split())
            assert name == other or not shared
    assert set(FOREIGN["explain"]["keeps"]) >= {
        field for table in FRAMEWORKS.values() for row in table.get("bytes", {}).values() for field in row
    }


def test_programs_that_train_no_decoder_are_refused():
    for program in ("pretrain_bert.py", "pretrain_t5.py", "pretrain_mamba.py", "generate_text.py"):
        with pytest.raises(ValueError, match=f"runs {program}, which trains"):
            read_foreign(["torchrun", "--nproc_per_node", "8", program, *MEGATRON.split()])


# ---- keys that are in no table --------------------------------------------------------------------------------------

SPEAK = """
    --ulysses-parallel-degree=2 --ep=2 --dp=4 --sdp=2 --zero-quantum=3 --shard-degree=2 --lora-rank=8 --peft=ia3
    --hybrid-attention-ratio=0.5 --hybrid-override-pattern=M*M --multi-latent-attention --mtp-num-layers=1
    --moe-layer-freq=2 --bert-no-binary-head --mamba-state-dim=128 --ssm-state=2 --fp8-weights=e4m3 --int4
    --checkpoint-activations --offload-states --weights-4bit --encoder-num-layers=12 --vision-pretraining
"""


@pytest.mark.parametrize("flag", SPEAK.split())
def test_a_key_that_all_numbers_depend_on_is_refused(flag):
    with pytest.raises(ValueError, match="is not (understood|modelled)") as error:
        read_foreign([*MEGATRON.split(), flag])
    assert flag[2:].partition("=")[0] in str(error.value) and "\n" not in str(error.value)


def test_what_does_not_speak_is_named_and_a_degree_of_one_is_none():
    asked = read_foreign([*MEGATRON.split(), "--warp", "9", "--ulysses-parallel-degree", "1", "--ep", "1"])
    assert asked.notes == ["not understood: warp 9"]
    asked = read_foreign([*MEGATRON.split(), "--cool-parallel-mode", "false"])
    assert asked.notes == ["not understood: cool-parallel-mode"], "perhaps it is on where nobody says so"


# ---- keys that change bytes -----------------------------------------------------------------------------------------

BYTES = {
    "": (2, 4, 4, 8),
    "--grad-reduce-in-bf16": (2, 2, 4, 8),
    "--main-grads-dtype bf16": (2, 2, 4, 8),
    "--use-precision-aware-optimizer --main-params-dtype fp16": (2, 4, 2, 8),
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8": (2, 4, 2, 3),
    "--optimizer sgd": (2, 4, 4, 4),
    "--optimizer sgd --sgd-momentum 0.0": (2, 4, 4, 0),
    "--optimizer adam --main-grads-dtype fp32": (2, 4, 4, 8),
    "--fp16": (2, 2, 4, 8),
}


@pytest.mark.parametrize("flags", BYTES)
def test_flags_of_megatron_that_change_bytes(flags, capsys):
    words = MEGATRON.replace("--bf16", "").split() if flags == "--fp16" else MEGATRON.split()
    assert recipe_of(asked := read_foreign([*words, *flags.split()])) == BYTES[flags]
    assert asked.notes == []
    said = answered(capsys, *words, *flags.split(), "--gpus", 64)
    if flags and BYTES[flags] != BYTES[""]:
        assert "bytes of" in said.partition("\n\n")[0] and "without it" in said


@pytest.mark.parametrize(
    ("said", "way"), [("p2p", ""), ("all_gather", "gather"), ("a2a", "ulysses"), ("a2a+p2p", ""), ("", "")]
)
def test_ways_of_attention_in_megatron(said, way, capsys):
    """Its own is a ring; a flag for ranks that are not there says nothing."""
    words = [*MEGATRON.split(), *(["--cp-comm-type", said] if said else []), "--gpus", 8, "--json"]
    plain = json.loads(answered(capsys, *words, "--context-parallel-size", 2))
    assert plain["report"]["layout"]["attention"] == way
    known = ["not modelled: cp-comm-type a2a+p2p; known are p2p, all_gather, allgather, a2a"]
    assert plain["notes"] == known * (said == "a2a+p2p")
    alone = json.loads(answered(capsys, *words))
    assert alone["report"]["layout"] == plain["report"]["layout"] | {"cp": 1, "dp": 8, "attention": ""}


def test_ways_of_attention_in_pytorch():
    for said, way in (("allgather", "gather"), ("alltoall", "ring")):
        words = f"accelerate launch --use_fsdp true --parallelism_config_cp_comm_strategy {said} train.py"
        assert read_foreign(words.split()).found["attention"] == way
        words = f"python -m torchtitan.train --parallelism.context_parallel_rotate_method {said}"
        assert read_foreign(words.split()).found["attention"] == way


def test_what_no_key_says_stands_above_the_flags(capsys):
    words = [*MEGATRON.replace("--bf16", "").split(), "--tensor-model-parallel-size", "2"]
    said = " ".join(answered(capsys, *words, "--gpus", 64).partition("tensor-model-parallel-size 2\n")[0].split())
    assert said.endswith("; no bf16 or fp16, so that it computes in float32, and 16 bit are counted")
    assert read_foreign(words).notes == [] and read_foreign([*words, "--fp16"]).remarks == ()


def test_a_key_that_counts_only_beside_another_is_named():
    words = "--data-parallel-sharding-strategy optim_grads_params".split()
    assert read_foreign([*MEGATRON.split(), "--use-megatron-fsdp", *words]).notes == []
    (note,) = read_foreign([*MEGATRON.split(), *words]).notes
    assert note.startswith("not understood: data-parallel-sharding-strategy without use_megatron_fsdp or use_custom")


def test_attention_that_keeps_its_scores(read):
    pytest.importorskip("yaml")
    for flags, fused in {
        "--transformer-impl local": False,
        "--transformer-impl local --use-flash-attn": True,
        "--transformer-impl transformer_engine": None,
        "--attention-backend unfused": False,
    }.items():
        asked = read_foreign([*MEGATRON.split(), *flags.split()])
        assert (asked.found.get("fused_attention"), asked.notes) == (fused, []), flags
    assert read(AXOLOTL + "attn_implementation: eager").found["fused_attention"] is False


def test_other_optimizers_are_refused_and_8_bit_weights_are_named():
    with pytest.raises(
        ValueError, match="optimizer muon is not modelled: its bytes are not known here, those of adam"
    ):
        read_foreign([*MEGATRON.split(), "--optimizer", "muon"])
    (note,) = read_foreign([*MEGATRON.split(), "--fp8-param-gather"]).notes
    assert note == "not modelled: fp8-param-gather: weights are kept and gathered in 8 bit; 16 are counted"


def test_bytes_of_torchtitan_and_deepspeed(read):
    assert recipe_of(read(TITAN)) == (2, 2, 4, 8)
    assert recipe_of(read(TITAN.replace("[training]", '[training]\ndtype = "bfloat16"'))) == (2, 2, 0, 4)
    for line in ('name = "Muon"', "early_step_in_backward = true"):
        text = TITAN.replace('[optimizer]\nname = "AdamW"', f"[optimizer]\n{line}")
        with pytest.raises(ValueError, match="is not modelled: its bytes are not known here"):
            read(text)
    plain = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    assert recipe_of(read(plain | {"optimizer": {"type": "Lion"}})) == (2, 2, 4, 4)
    assert recipe_of(read(plain | {"data_types": {"grad_accum_dtype": "fp32"}})) == (2, 4, 4, 8)
    with pytest.raises(ValueError, match="DeepSpeed has no ZeRO-2 in a pipeline: choose stage 1, or no pipeline"):
        read(plain | {"zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}})
    assert "so that it computes in float32, and 16 bit are" in read({"train_micro_batch_size_per_gpu": 1}).remarks[0]
    asked = read(TITAN.replace("[training]", '[training]\nmixed_precision_param = "float32"'))
    assert asked.notes[0].startswith("not modelled: training.mixed_precision_param float32: 16 bit are counted")


def test_processors_that_are_not_known_are_refused(read):
    """Further values of Accelerate's `distributed_type` (utils/dataclasses.py at 16cb6eb): none is an H100."""
    pytest.importorskip("yaml")
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: {}\nmixed_precision: bf16\nnum_processes: 8\n{}"
    for kind in ("MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU"):
        with pytest.raises(ValueError, match=f"{kind} is not modelled; the processors that are known here are GPUs"):
            read(text.format(kind, ""))
    with pytest.raises(ValueError, match="use_cpu True is not modelled"):
        read(text.format("MULTI_GPU", "use_cpu: true\n"))
    with pytest.raises(ValueError, match="give its degree as parallelism_config.parallelism_config_tp_size"):
        read(text.format("TP", ""))
    assert read(text.format("MULTI_GPU", "use_cpu: false\n")).found["zero"] == 0


# ---- a file that names another --------------------------------------------------------------------------------------


def test_a_file_that_names_another_asks_for_it(read):
    pytest.importorskip("yaml")
    accelerate = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 8\n"
    cases = {
        accelerate + "deepspeed_config: {deepspeed_config_file: ds.json}": "ds.json",
        AXOLOTL + "deepspeed: deepspeed_configs/zero3_bf16.json": "deepspeed_configs/zero3_bf16.json",
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON.replace(chr(10), ' ')} --yaml-cfg run.yaml": "run.yaml",
        "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file x.toml": "x.toml",
        "deepspeed --num_gpus 8 train.py --deepspeed ds.json": "ds.json",
    }
    for text, other in cases.items():
        with pytest.raises(ValueError, match=f"another file, {other}, .*first, python -m book.explain {other}, and"):
            read(text)
    with pytest.raises(ValueError, match="reads another script, env.sh: write what that one sets into this file"):
        read(f"source env.sh\ntorchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON.replace(chr(10), ' ')}")


# ---- nanotron and axolotl -------------------------------------------------------------------------------------------


def test_yaml_of_nanotron(read, capsys, tmp_path):
    pytest.importorskip("yaml")
    asked = read(NANOTRON)
    assert asked.framework == "nanotron" and asked.notes == []
    assert of(asked, "tp", "pp", "dp", "zero", "rows", "context") == (2, 2, 4, 1, 2, 4096)
    assert asked.found["sequence_parallel"] and recipe_of(asked) == (2, 4, 4, 8)
    said = json.loads(answered(capsys, tmp_path / "file", "--json"))
    assert said["report"]["assumes"]["model"].startswith("1.711 billion parameters")  # SmolLM2's sizes
    assert said["cluster"]["gpus"] == 16 and said["global_batch"] == 64
    assert recipe_of(read(NANOTRON.replace("in_fp32: true", "in_fp32: false"))) == (2, 2, 0, 4)
    assert read(NANOTRON.replace("1f1b", "afab")).notes[0].startswith("not modelled: parallelism.pp_engine afab")


def test_yaml_of_axolotl(read):
    pytest.importorskip("yaml")
    asked = read(AXOLOTL)
    assert asked.framework == "axolotl" and asked.notes == []
    assert of(asked, "model", "zero", "rows", "accumulation", "context") == ("qwen3-8b", 0, 2, 4, 4096)
    assert recipe_of(asked) == (2, 2, 0, 4), "all in 16 bit"
    sharded = AXOLOTL + "dp_shard_size: 2\ntensor_parallel_size: 2\ncontext_parallel_size: 2\nfsdp_version: 2\n"
    asked = read(sharded + "fsdp_config: {reshard_after_forward: true}")
    assert of(asked, "tp", "cp", "shards", "zero") == (2, 2, 2, 3)
    assert recipe_of(asked, gpus=8) == (2, 2, 4, 8), "FSDP keeps parameters in float32"
    assert of(asked, "whole_gradient_bytes") == (2,), "until the last of four microbatches"
    for line in ("adapter: lora", "load_in_4bit: true", "lora_r: 8", "rl: dpo"):
        with pytest.raises(ValueError, match="is not (modelled|understood)"):
            read(AXOLOTL + line)


# ---- who starts it --------------------------------------------------------------------------------------------------


def test_flags_of_the_launcher_are_not_the_programs():
    program = ["pretrain_gpt.py", *MEGATRON.split()]
    for words, gpus in {
        "torchrun --nproc_per_node=8": 8,
        "torchrun --nproc-per-node 8 --nnodes=4 --rdzv_backend c10d --tee 3": 32,
        "python -m torch.distributed.run --nproc_per_node 8 --nnodes 2 --node_rank 0 --master_addr a": 16,
        "torchrun --nproc_per_node=$GPUS": None,
        "srun --nodes 2 --ntasks-per-node 8 python": 16,
    }.items():
        asked = read_foreign([*words.split(), *program])
        assert (asked.framework, asked.found.get("gpus"), asked.notes) == ("Megatron-LM", gpus, []), words
    with pytest.raises(ValueError, match="has no key of"):
        read_foreign("torchrun --nproc_per_node 8 train.py --lr 0.1".split())


def test_a_python_file_is_not_run(tmp_path, monkeypatch):
    (tmp_path / "config.py").write_text("tp = 8")
    with pytest.raises(ValueError, match=r"config.py is Python, which is not run here: give the command that starts"):
        read_foreign([str(tmp_path / "config.py")])
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text(NANOTRON)
    with pytest.raises(ValueError, match="Python needs PyYAML"):
        read_foreign([str(Path(tmp_path / "a.yaml"))])
