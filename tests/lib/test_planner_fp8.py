"""Matmuls in 8 bit: one row a GPU calibrates their speed, the other rows test it; bytes stay as they are."""

from dataclasses import replace
from statistics import median

import pytest

from book.explain.configs import read_foreign
from book.published import FP8
from book.published.rows import predict, read_rows
from book.published.steps import fp8_speedup_of
from lib.planner import Cluster, Layout4D, Training, memory_bytes, step_s
from lib.planner.fp8 import CALIBRATED_IN_8_BIT, SPEEDUPS, WITHOUT_FP8, in_8_bit
from lib.planner.report import report_of_layout
from lib.planner.training import GPUS, PRESET_MODELS, gpu_of, stack_for, training_of

ROWS = {row["id"]: row for row in read_rows(FP8)}
MEGATRON = "torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 --bf16".split()


@pytest.mark.parametrize("gpu", SPEEDUPS)
def test_one_row_calibrates_a_gpu(gpu):
    row = ROWS[CALIBRATED_IN_8_BIT[gpu]]
    assert gpu_of(row) == gpu and abs(predict(row).error) < 1e-3
    assert SPEEDUPS[gpu] == pytest.approx(fp8_speedup_of(row), abs=2e-3)


def test_the_other_rows(say):
    errors = {}
    for name, row in ROWS.items():
        if name not in CALIBRATED_IN_8_BIT.values():
            errors.setdefault(gpu_of(row), []).append(abs(predict(row).error))
            say(f"{name}: {predict(row).error:+.1%}")
    assert {gpu: len(of) for gpu, of in errors.items()} == {"h100": 8, "gb200": 1, "gb300": 1}
    assert median(errors["h100"]) < 0.05 and max(errors["h100"]) < 0.15
    assert max(errors["gb200"] + errors["gb300"]) < 0.09
    in_16_bit = [abs(step_s(*plain(row)).total / row["step_s"] - 1) for row in ROWS.values()]
    assert min(in_16_bit) > 0.2, "without the constant every row is missed"


def plain(row):
    return training_of({name: value for name, value in row.items() if name != "fp8"})


def test_only_the_matmuls_of_blocks_are_faster():
    layout = Layout4D(2, 1, 1, 4, sequence_parallel=True)
    run = Training(PRESET_MODELS["llama3-8b"], Cluster(GPUS["h100"], 8), stack_for("megatron", "h100"), 64)
    fast = replace(run, stack=in_8_bit(run.stack, "h100"))
    a, b = step_s(run, layout), step_s(fast, layout)
    head = step_s(replace(run, stack=replace(run.stack, fp8_speedup=1e9)), layout).matmuls
    assert b.matmuls == pytest.approx(head + (a.matmuls - head) / SPEEDUPS["h100"])
    assert 0.05 < head / a.matmuls < 0.1, "the head is not in 8 bit"
    assert (b.attention, b.memory, b.optimizer) == (a.attention, a.memory, a.optimizer)
    assert memory_bytes(fast, layout) == memory_bytes(run, layout)
    assert [sent["bytes"] for sent in report_of_layout(fast, layout).sends] == [
        sent["bytes"] for sent in report_of_layout(run, layout).sends
    ]


def test_who_has_it():
    assert sorted(WITHOUT_FP8) == ["a100", "a100-40gb", "a6000", "v100"]
    for gpu in GPUS:
        stack = stack_for("megatron", gpu)
        if gpu in WITHOUT_FP8:
            with pytest.raises(ValueError, match=f"the {gpu} has no FP8: leave it out, or choose a GPU that has it"):
                in_8_bit(stack, gpu)
        else:
            assert in_8_bit(stack, gpu).fp8_speedup == SPEEDUPS.get(gpu, SPEEDUPS["h100"])


def test_a_row_in_8_bit_on_a_card_without():
    with pytest.raises(ValueError, match="the a100 has no FP8"):
        predict(ROWS["FP8 H100 GPT-3 5B"] | {"gpu": "A100"})


@pytest.mark.parametrize(
    ("flags", "asked"),
    {
        "--fp8-format hybrid": (True, []),
        "--fp8-format e4m3": (True, []),
        "--fp8-format mxfp8": (None, ["not modelled: fp8-format mxfp8; known are e4m3, hybrid"]),
        "--fp8-format hybrid --fp8-recipe delayed": (True, []),
    }.items(),
)
def test_files_of_megatron(flags, asked):
    said = read_foreign([*MEGATRON, *flags.split()])
    assert (said.found.get("fp8"), said.notes) == asked


def test_files_of_accelerate_and_torchtitan():
    words = "--num_processes 8 --distributed_type FSDP --mixed_precision"
    asked = [read_foreign([*words.split(), precision]) for precision in ("fp8", "bf16")]
    assert [one.found.get("fp8") for one in asked] == [True, None] and [one.notes for one in asked] == [[], []]
    titan = "torchrun -m torchtitan.train --training.seq_len 8192 --model.name llama3 --model.flavor 8B".split()
    assert read_foreign([*titan, "--model.converters", "float8"]).found["fp8"] is True
    mx = read_foreign([*titan, "--model.converters", "mx"])
    assert "fp8" not in mx.found and mx.notes[0].startswith("not modelled: model.converters mx; known are float8")
    (gathers,) = read_foreign([*titan, "--float8.enable_fsdp_float8_all_gather", "true"]).notes
    assert gathers.endswith("weights are gathered in 8 bit; 16 are counted")
