"""What people ask `python -m lib.planner`, and what it answers, or in which words it refuses."""

import json
import re
import shlex
from dataclasses import fields, replace

import pytest

from lib.cost.models import PRESETS
from lib.cost.sizes import ModelShape, Recipe
from lib.layout import Layout
from lib.model import GPTConfig
from lib.planner import Choices, Cluster, Layout4D, Plan, Stack, Training, best_layouts, step_traffic
from lib.planner.__main__ import main
from lib.planner.plan_report import report_of_plan
from lib.planner.refusals import refusal
from lib.planner.report import report_of_layout
from lib.planner.search import all_layouts
from lib.planner.seconds import Seconds
from lib.planner.training import GPUS, PRESET_MODELS, stack_for

ON_8, ON_64 = "--model llama-7b --gpus 8", "--model llama-70b --gpus 64"
NO_MODEL = "is not a preset: give its sizes, such as --hidden 4096, or its config.json to python -m book.explain"
FIGURES = "give --peak, --memory, --memory-bandwidth, --link and --network"
NO_PRESET = f"({', '.join(GPUS)}): {FIGURES}"
LONG = "--model llama3-8b --gpus 32 --seq 1048576"

ANSWERED = {  # question → what the answer says
    # a search, and what follows from its seconds
    ON_64: (
        "1. tp ",
        "s per step: matmuls",
        "tokens/s per GPU",
        "bubble: ",
        "fits: ",
        "2. ",
        "slower: ",
    ),
    "--model llama3-405b --gpus 16384 --tokens 15.6e12 --price 2": (
        "15,600 billion tokens: ",
        " days, ",
        " GPU hours, ",
    ),
    # a layout of one's own
    f"{ON_64} --tp 8 --pp 2": ("64 ranks = pp 2 x dp 4 x cp 1 x tp 8", "yours is ", "slower: ", "s more for "),
    f"{ON_64} --tp 4 --pp 4 --stages-per-rank 4": ("pp 4: 16 stages, schedule interleaved 1F1B", "yours is "),
    f"{ON_64} --zero 3 --tp 8 --recompute full": ("zero 3", "recompute full", "gathered", "yours is "),
    f"{ON_64} --tp 2 --replicas 8": ("replicas 8: ZeRO shards over 4 ranks", "zero 3"),
    f"{ON_64} --tp 8 --recompute mlp --every 2": ("recompute mlp, in one block of 2", "yours is "),
    f"{ON_64} --tp 8 --loss-chunks 4": ("the loss in 4 pieces of the sequence",),
    f"{ON_64} --all-choices": ("1. tp ", ", zb-v, "),
    "--model llama-70b --tp 8 --pp 2 --dp 4": ("64 ranks = ", "dp 4: 256 of 1024 sequences each"),
    f"{ON_64} --tp 8 --pp 1 --zero 0": ("does not fit: ", " of 80.0 GB", "yours does not fit"),
    f"{ON_64} --tp 8 --pp 8 --schedule zb-h1": ("schedule ZB-H1", "bubble: "),
    f"{ON_64} --tp 8 --cp 2 --recompute full --microbatch 2": (
        "cp 2: 2048 of 4096 tokens",
        "recompute full",
        "cp: keys",
    ),
    "--model llama-70b --gpus 8 --tp 8": ("does not fit: ", "nothing fits: ", "use 16 GPUs"),
    # models
    "--model meta-llama/Llama-3.2-1B --gpus 8": ("1.236 billion parameters",),
    "--model Qwen/Qwen3-32B --gpus 64": ("32.76 billion parameters", "64 heads of 128 (8 of keys and values)"),
    "--model gemma-2-9b --gpus 64": ("9.241 billion parameters", "biases none, gated MLP", ", tied head"),
    f"{ON_8} --kv-heads 8 --ffn 14336": ("32 heads of 128 (8 of keys and values), MLP 14336",),
    "--hidden 5120 --layers 64 --heads 64 --kv-heads 8 --head-dim 128 --ffn 25600 --vocab 151936 --seq 4096 --gated"
    " --gpus 64": ("32.76 billion parameters", "no tied head"),
    "--hidden 1024 --layers 28 --heads 16 --kv-heads 8 --head-dim 128 --ffn 3072 --vocab 151936 --seq 4096 --gated"
    " --tied --biases qkv --gpus 8": ("0.5962 billion parameters", "biases qkv", ", tied head"),
    # cards
    "--model llama3-8b --gpus 8 --gpu 4090": (
        "165.2 TFLOP/s in 16 bit, 24 GB at 1008 GB/s; one direction: link 31.5 GB/s (a PCIe slot) among 8 GPUs, ",
        "no network",
        "fits: ",
    ),
    f"{ON_64} --gpu mi300x --network 50GB": (
        "1307.4 TFLOP/s in 16 bit, 192 GB at 5300 GB/s; one direction: link 448 GB/s (64 to each) among 8 GPUs",
        "matmul_share calibrated on h100, and 0.64 of it",
    ),
    f"{ON_64} --gpu mi325x --peak 1307TF --memory 256GB --memory-bandwidth 6TB --link 448GB --network 50GB": (
        "1307 TFLOP/s in 16 bit, 256 GB at 6000 GB/s; one direction: link 448 GB/s among 8 GPUs",
        "matmul_share calibrated on h100, bytes",
    ),
    "--model llama-70b --gpus 72 --batch 1080 --gpu gb200": ("link 900 GB/s among 72 GPUs, network 50 GB/s per GPU",),
    "--model llama3-8b --gpus 4 --per-node 4 --gpu gh200": ("link 450 GB/s among 4 GPUs", "no network"),
    "--model llama-13b --gpus 16 --gpu a100 --memory 40GB --memory-bandwidth 1555GB --network 1.25GB": (
        "312 TFLOP/s in 16 bit, 40 GB at 1555 GB/s",
        "network 1.25 GB/s per GPU, 10 GB/s per node",
    ),
    f"{ON_64} --network 400Gb": ("network 50 GB/s per GPU, 400 GB/s per node",),
    f"{ON_64} --network-per-node 400Gb": ("network 6.25 GB/s per GPU, 50 GB/s per node",),
    # matmuls in 8 bit
    f"{ON_64} --tp 4 --pp 4 --fp8": (
        "FP8: the matmuls of the blocks are 1.61 times as fast as in 16 bit, calibrated on FP8 H100 Llama 3 405B",
        "weights, master copy, gradients, activations and messages keep their bytes",
        " published layouts on this GPU and stack; worst ",
    ),
    "--model llama3-70b --gpus 8 --gpu b200 --fp8": (
        "1.60 times as fast as in 16 bit, calibrated on FP8 B200 Llama 3 8B",
        "the error is unknown: calibrated on its only row (FP8 B200 Llama 3 8B), no evidence",
    ),
    f"{ON_64} --gpu gb200 --fp8": ("% (one published row on this GPU and stack, no more)",),
    f"{ON_8} --gpu 4090 --fp8": ("1.61 times", "the error is unknown: no published run on this card (rtx4090)"),
    # utilisation says which attention it counts
    ON_8: ("counting the full s x s matrix of attention",),
    "--model llama3-8b --gpus 128 --seq 1048576 --context-parallel": (
        "counting the full s x s matrix of attention",
        "counting its causal half, all that a fused kernel computes",
    ),
    f"{ON_8} --best 1": ("not modelled: a mixture of experts, keeping weights in FP8, FP4",),
}

REFUSED = {  # question → what the one sentence says
    # ways out that are true
    "--model llama-7b --gpus 1": "GB more than available; use 2 GPUs",
    "--model llama-70b --gpus 8": "; use 16 GPUs",
    "--model llama-405b --gpus 64": "GB more than available; use ",
    "--model llama-13b --gpus 2": "; use 4 GPUs",
    "--model llama-7b --gpus 1 --batch 8 --context-parallel": "; use 2 GPUs",
    **{
        f"--model llama-70b --gpus {gpus}": f"the batch is the reason: 80 layers and 64 heads on {gpus} GPUs need dp "
        f"{dp}, and a batch of 1,024 divides by none of them; use a batch of {batch} sequences"
        for gpus, dp, batch in (
            (24, "3, 6, 12 or 24", "1,032"),
            (72, "9, 18, 36 or 72", "1,080"),
        )
    },
    "--model llama-7b --gpus 7 --batch 1": "need dp 7, and a batch of 1 divides by none of them; use a batch of 7",
    f"{LONG} --no-context-parallel --no-colour": "unrecognized arguments: --no-colour",
    # what is not modelled
    "--model dbrx --gpus 8": "dbrx: a mixture of experts is not modelled",
    "--model deepseek-v2 --gpus 8": "a mixture of experts is not modelled",
    "--model llama-4-maverick --gpus 8": "a mixture of experts is not modelled",
    "--model llama3-8b-fp8 --gpus 8": "keeping weights in FP8 is not modelled",
    f"{ON_8} --fp8 --gpu a100": "the a100 has no FP8: leave it out, or choose a GPU that has it, such as h100",
    f"{ON_8} --fp4": "FP4 is not modelled",
    f"{ON_8} --lora 16 --fp4": "FP4 is not modelled",
    f"{ON_8} --model llama-7b-lora": "LoRA is no part of a name; it is an option of python -m lib.planner",
    f"{ON_8} --offload": "expected one argument",
    f"{ON_8} --experts 8": "a mixture of experts is not modelled",
    # names
    "--model lama-70b --gpus 8": f"'lama-70b' {NO_MODEL}; or did you mean llama-70b",
    "--model nemotron-340b --gpus 8": f"'nemotron-340b' {NO_MODEL}\n",
    f"{ON_8} --gpu tpu-v5": f"GPU 'tpu-v5' is not a preset {NO_PRESET}\n",
    f"{ON_8} --gpu rtx4080": f"GPU 'rtx4080' is not a preset: {FIGURES}; or did you mean rtx4090",
    f"{ON_8} --gpu H100-PCIe --peak 756TF": f"GPU 'h100-pcie' is not a preset {NO_PRESET}",
    f"{ON_8} --peak 1307TF": NO_PRESET,
    f"{ON_8} --stack megatorn": "stack 'megatorn' is not a preset; or did you mean megatron?",
    # sizes
    f"{ON_64} --heads 60": "--heads 60: 60 heads do not divide a width of 8192",
    f"{ON_64} --kv-heads 7": "--kv-heads 7: 7 heads of keys and values do not divide 64 heads",
    "--hidden 4096 --layers 8 --heads 30 --vocab 1000 --seq 128 --gpus 8": "30 heads do not divide a width of 4096",
    "--hidden 4096 --gpus 8": "missing: --layers, --heads, --vocab, --seq",
    # layouts
    f"{ON_64} --tp 3": (
        "64 heads, 8 of keys and values, cannot be shared by 3 tensor-parallel ranks: choose tp 1, 2, 4, 8 or 16."
    ),
    f"{ON_64} --tp 8 --pp 3": "64 GPUs do not divide by tp × cp × pp = 24: choose less, or 24 GPUs.",
    f"{ON_64} --tp 8 --pp 4 --dp 3": "tp × cp × pp × dp = 96, and there are 64 GPUs: choose dp 2.",
    f"{ON_64} --tp 8 --pp 4 --dp 1": "tp × cp × pp × dp = 32, and there are 64 GPUs: choose dp 2.",
    f"{ON_64} --tp 8 --cp 8": (
        "needs 2,048 tokens of a sequence or more: choose cp 1 or 2, or sequences of 16,384 tokens."
    ),
    f"{ON_64} --seq 65537 --cp 8": (
        "65,537 tokens of a sequence cannot be shared evenly by 8 context-parallel ranks: choose cp 1, or sequences of "
        "65,544 tokens."
    ),
    "--model llama3-8b --gpus 48 --seq 131072 --cp 3": (
        "Context parallelism is planned over powers of two, 512 at most: choose cp 1, 2, 4, 8, 16, 32 or 64."
    ),
    f"{ON_64} --pp 64": "80 layers do not cut evenly into 64 stages: choose v 1 and pp 1, 2, 4, 8 or 16.",
    f"{ON_64} --pp 4 --stages-per-rank 7": "80 layers do not cut evenly into 28 stages: choose v 1, 2, 4, 5 or 10.",
    f"{ON_64} --stages-per-rank 2": "Several stages per rank need a pipeline: choose pp 2 or more, or v 1.",
    f"{ON_64} --batch 100 --tp 2": "100 sequences do not divide among 32 data-parallel ranks: choose a batch of 128",
    f"{ON_64} --microbatch 3": "The 16 sequences of a data-parallel rank do not divide by 3: choose b 1, 2, 4 or 8.",
    f"{ON_64} --pp 4 --batch 32 --stages-per-rank 2": "2 microbatches do not divide by pp 4: choose v 1, or batch 64.",
    f"{ON_64} --zero 3 --pp 8": "ZeRO-3 is planned without pipeline parallelism: choose pp 1, or ZeRO stage 1.",
    f"{ON_64} --tp 2 --replicas 3": "planned with ZeRO-3 over the 4 data-parallel ranks of a node: choose 1.",
    f"{ON_64} --schedule zb-v --pp 4": "ZB-V has two stages per rank: choose v 2, or ZB-H1.",
    f"{ON_64} --schedule zb-h1": "A schedule needs a pipeline: choose pp 2 or more, or 1F1B.",
    f"{ON_64} --schedule zb-h1 --pp 4 --batch 16": (
        "1 microbatches cannot fill ZB-H1 on 4 stages: choose 1F1B, or batch 64."
    ),
    f"{ON_64} --schedule zb-h1 --pp 4 --recompute full": "planned without recomputation: choose none, or 1F1B.",
    "--model llama-7b --gpus 8 --tp 8 --zero 1": "there is one: choose ZeRO stage 0, or 16 GPUs.",
    # numbers and units
    "--model llama-7b --gpus 0": "argument --gpus: 0 must be a whole number of at least 1",
    "--model llama-7b": "give --gpus, the number of all GPUs",
    f"{ON_8} --batch -4": "argument --batch: -4 must be a whole number of at least 1",
    f"{ON_8} --memory 80Gb": "argument --memory: 80Gb are gigabits, 10 gigabytes",
    f"{ON_8} --network 400": "argument --network: 400 needs a number and a unit: 50GB or 400Gb",
    f"{ON_8} --peak 989": "argument --peak: 989 needs a number and a unit: 989TF",
    f"{ON_8} --network 50GB --network-per-node 400GB": "--network is per GPU and --network-per-node of a whole node",
    "--model llama-7b --gpus 16 --gpu v100": "16 GPUs of v100 are on several nodes: give --network, such as 25GB",
    "--model llama-7b --gpus 2 --gpu gh200": "2 GPUs of gh200 are on several nodes: give --network, such as 25GB",
    f"{ON_8} --colour red": "unrecognized arguments: --colour red",
}


def ask(question, capsys):
    main(shlex.split(question))
    return capsys.readouterr().out


def refused(question, capsys):
    with pytest.raises(SystemExit) as end:
        main(shlex.split(question))
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and "Traceback" not in said
    return said


@pytest.mark.parametrize("question", ANSWERED)
def test_answered(question, capsys):
    said = ask(question, capsys)
    flat = re.sub(r"\n  (?=\S)", " ", said)  # lines that were wrapped
    assert [words for words in ANSWERED[question] if words not in flat] == []
    assert all(len(line) <= 120 for line in said.splitlines())


@pytest.mark.parametrize("question", REFUSED)
def test_refused(question, capsys):
    assert REFUSED[question] in refused(question, capsys)


@pytest.mark.parametrize("question", [one for one, said in REFUSED.items() if "; use " in said])
def test_ways_out_are_true(question, capsys):
    """Asked again with what was advised, it answers; and no smaller number of GPUs does."""
    advice = refused(question, capsys).replace(",", "")
    if gpus := re.search(r"use (\d+) GPUs", advice):
        assert "fits: " in ask(f"{question} --gpus {gpus[1]}", capsys)
        had = int(re.search(r"--gpus (\d+)", question)[1])
        fewer = {2**k for k in range(20)} | {*range(8, int(gpus[1]), 8)}
        for less in sorted(n for n in fewer if had < n < int(gpus[1])):
            refused(f"{question} --gpus {less}", capsys)
    if batch := re.search(r"a batch of (\d+) sequences", advice):
        assert "fits: " in ask(f"{question} --batch {batch[1]}", capsys)


def test_the_bare_command_splits_sequences_where_the_library_can(capsys):
    """As the page does; unless it is told not to, or the library cannot."""
    said = ask(LONG, capsys)
    assert re.search("^(fits|tight): ", said, re.MULTILINE) and " · cp " in said
    assert said == ask(f"{LONG} --context-parallel", capsys)
    closed = ask(f"{ON_64} --no-context-parallel", capsys)
    assert " · cp " in ask(ON_64, capsys) and " · cp " not in closed
    unable = ask(f"{ON_64} --stack aleph-alpha", capsys).split("the fastest layouts that fit:")[1]
    assert " · cp " not in unable.split("which Aleph Alpha's library")[0].rpartition("with ")[0]
    assert " · cp " in ask(f"{ON_64} --stack aleph-alpha --context-parallel", capsys)
    said = refused("--model llama-7b --gpus 8 --seq 4194304", capsys)
    assert "context parallelism" not in said and "use " in said


def test_a_schedule_that_the_library_lacks_is_found_if_it_is_asked_for(capsys):
    few = f"{ON_64} --batch 64 --network 2GB"
    assert ", zb-" not in ask(few, capsys).split("the fastest")[1].split("which Megatron-LM")[0]
    assert ", zb-" in ask(f"{few} --zero-bubble", capsys)
    pipeline = ask(f"{few} --stack fsdp", capsys)
    assert "with a pipeline and ZB-" in pipeline and "times as fast" in pipeline
    assert " · pp 1 · " in pipeline.split("1. ")[1].splitlines()[0]
    assert "the first needs a pipeline and ZB-" in ask(f"{few} --stack fsdp --zero-bubble", capsys)


def test_what_is_advised_where_no_number_of_gpus_helps():
    """A batch of one sequence on cards that are too small for its logits."""
    small = replace(GPUS["h100"], memory_bytes=4e9)
    run = Training(PRESETS["llama3-8b"], Cluster(small, 1), stack_for("megatron", "h100"), 1)
    with pytest.raises(ValueError, match="nothing fits") as refusal:
        best_layouts(run, Choices())
    said = str(refusal.value)
    if gpus := re.search(r"use ([\d,]+) GPUs", said):
        more = replace(run, cluster=Cluster(small, int(gpus[1].replace(",", ""))))
        assert best_layouts(more)


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_plain_data_says_the_same(capsys):
    question = f"{ON_64} --tp 8 --pp 2 --tokens 12T --price 2.5"
    plain, said = json.loads(ask(f"{question} --json", capsys)), ask(question, capsys)
    report = plain["report"]
    assert set(report["seconds"]) == {*Seconds._fields} and len(plain["layouts"]) == 3
    answers = report["answers"]
    assert answers["step_s"] == pytest.approx(sum(report["seconds"].values()))
    assert answers["tokens_per_s"] * answers["step_s"] == pytest.approx(1024 * 4096)
    assert answers["days"] * 86_400 * answers["tokens_per_s"] == pytest.approx(12e12)
    assert answers["gpu_hours"] == pytest.approx(24 * 64 * answers["days"])
    assert answers["money"] == pytest.approx(2.5 * answers["gpu_hours"])
    for words in (f"{answers['tokens_per_s']:,.0f} tokens/s", f"{answers['days']:,.1f} days"):
        assert words in said
    assert plain["stack"]["matmul_share"] and plain["cluster"]["device"]["link_Bps"] == 450e9
    best = plain["layouts"][0]
    assert best["answers"]["step_s"] < answers["step_s"]
    same = {"tp": "tp", "cp": "cp", "pp": "pp", "zero": "zero", "stages-per-rank": "stages_per_rank"}
    same |= {"microbatch": "rows"}
    options = " ".join(f"--{option} {best['layout'][field]}" for option, field in same.items())
    assert "yours is as fast as the fastest that was found" in ask(f"{ON_64} {options}", capsys)


def test_every_number_that_goes_in_is_said():
    """Another number of any size, figure or constant is another report; what the formulas do not use is no number."""
    shape = ModelShape(4096, 32, 32, 32_000, 4096, 8, 14_336, 128)
    run = Training(shape, Cluster(GPUS["h100"], 64), stack_for("megatron", "h100"), 512)
    layout = Layout4D(2, 1, 2, 16, sequence_parallel=True)

    def said(run):
        return str(report_of_layout(run, layout).assumes)

    def other(value):
        return {bool: lambda: not value, str: lambda: "none", Recipe: lambda: Recipe(4, 4, 0, 8)}.get(
            type(value), lambda: 2 * value or 1
        )()

    seen = [said(run)]
    for part in ("model", "stack"):
        for field in fields(whole := getattr(run, part)):
            seen.append(
                said(replace(run, **{part: replace(whole, **{field.name: other(getattr(whole, field.name))})}))
            )
    for name in ("memory_bytes", "peak_flops", "memory_Bps", "link_Bps", "network_Bps"):
        device = replace(GPUS["h100"], **{name: 1.5 * getattr(GPUS["h100"], name)})
        seen.append(said(replace(run, cluster=Cluster(device, 64))))
    seen.append(said(replace(run, cluster=Cluster(GPUS["h100"], 64, 4))))
    assert len(seen) == len(set(seen)) == 1 + len(fields(ModelShape)) + len(fields(Stack)) + 6


def test_both_reports_agree_on_what_is_sent_and_kept():
    """The formulas leave out the sums of embedding and head, and the norm."""
    model = GPTConfig(vocab_size=1024, context=512, d_model=1024, num_layers=32, num_heads=16)
    layout = Layout(2, 4, 2, order="pp,dp,tp", microbatches=8, sequence_parallel=True)
    plan = Plan(model, layout, 16, itemsize=2)
    stack = replace(stack_for("megatron", "h100"), recipe=Recipe(2, 2, 4, 8))
    run = Training(ModelShape.of(model), Cluster(GPUS["h100"], 16), stack, 16)
    report = report_of_layout(run, Layout4D(2, 1, 4, 2, zero=0, sequence_parallel=True))
    sent = {one["what"].partition(":")[0]: one["bytes"][1] for one in report.sends}
    for formula, exact in zip(report.places, report_of_plan(plan, 8).places, strict=True):
        assert formula["in_flight"] == exact["in_flight"]
        assert formula["ranks"] == exact["ranks"] and formula["held"].keys() >= exact["held"].keys()
        assert formula["parameters"] == pytest.approx(exact["parameters"], rel=0.03)
    exact = step_traffic(plan, 1)
    of_axis = {axis: sum(n for (_, along), (_, n) in exact.items() if along.startswith(axis)) for axis in sent}
    assert set(sent) == {"tp", "dp", "pp"}
    assert sent["tp"] == pytest.approx(of_axis["tp"], rel=0.02)
    assert sent["dp"] == pytest.approx(of_axis["dp"], rel=0.05)
    assert sent["pp"] == pytest.approx(of_axis["pp"], rel=0.01)


def test_the_causal_half_of_attention():
    shape = PRESETS["llama3-8b"]
    run = Training(shape, Cluster(GPUS["h100"], 8), stack_for("megatron", "h100"), 8)
    tokens = 8 * shape.context
    scores = 3 * 4 * tokens * shape.context * shape.d_q * shape.num_layers
    for recompute, passes in (("none", 3), ("full", 4)):
        full, half = (run.utilisation(1, recompute, causal=causal) for causal in (False, True))
        assert (full - half) * 8 * 989e12 == pytest.approx(passes / 3 * scores / 2)


PUBLISHED = {  # parameters of the weights on Hugging Face (`model.safetensors.index.json`, a tied head once)
    **{"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800},
    **{"llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824, "mistral-7b": 7_241_732_096},
    **{"qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096},
    **{"qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264},
    **{"gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320},
    **{"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_of_today_have_their_published_number_of_parameters(name):
    assert PRESETS[name].num_parameters == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_each_preset_is_checked():
    assert set(PRESETS) == set(PUBLISHED) and set(PRESETS) < set(PRESET_MODELS)


# ---- one table of refusals ------------------------------------------------------------------------------------------


def test_what_is_refused_is_what_the_search_leaves_out():
    run = Training(PRESET_MODELS["llama-13b"], Cluster(GPUS["h100"], 24), stack_for("megatron", "h100"), 96)
    possible = set(all_layouts(run, Choices(zero_bubble=True, context_parallel=True)))
    assert {refusal(run, layout) for layout in possible} == {None}
    for layout in sorted(possible)[::7]:
        for other in (
            layout._replace(tp=3 * layout.tp),
            layout._replace(pp=5 * layout.pp),
            layout._replace(stages_per_rank=7),
            layout._replace(rows=64),
            layout._replace(zero=3, pp=2 * layout.pp, dp=layout.dp // 2 or 1),
        ):
            assert other in possible or refusal(run, other).endswith(".")
