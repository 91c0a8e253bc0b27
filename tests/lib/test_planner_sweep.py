"""Sweeps: the best layout of each value, and the reason why throughput per GPU falls."""

import json
import re
from dataclasses import replace

import pytest

from lib.planner import Cluster, Layout4D, Training, best_layouts, step_s
from lib.planner.__main__ import main
from lib.planner.seconds import Seconds, step_and_waits
from lib.planner.sweep import NODES_SWEPT, SWEPT, TIMES_BATCH, TIMES_NETWORK, sweep
from lib.planner.training import GPUS, PRESET_MODELS, stack_for
from lib.planner.why_fell import PlacedTraining, why_it_fell


def training(gpus=64, batch=256, network_Bps=5e9, model="llama3-8b", stack="megatron"):
    device = replace(GPUS["h100"], network_Bps=network_Bps)
    return Training(PRESET_MODELS[model], Cluster(device, gpus), stack_for(stack, "h100"), batch)


@pytest.mark.parametrize("what", SWEPT)
def test_each_row_is_the_best_of_its_value(what):
    run = training()
    rows = sweep(run, what)
    base = {"batch": 256, "gpus": 8, "network": 5e9}[what]
    times = {"batch": TIMES_BATCH, "gpus": NODES_SWEPT, "network": TIMES_NETWORK}[what]
    assert [row.value for row in rows] == [base * n for n in times]
    of = {
        "batch": lambda one: one.global_batch,
        "gpus": lambda one: one.cluster.gpus,
        "network": lambda one: one.cluster.device.network_Bps,
    }[what]
    for row in rows:
        assert of(row.training) == row.value and row.planned == best_layouts(row.training, best=1)[0]
        tokens = row.training.global_batch * run.model.context
        assert row.tokens_per_s_per_gpu == pytest.approx(
            tokens / row.planned.seconds.total / row.training.cluster.gpus
        )
    for before, row in zip(rows, rows[1:], strict=False):
        fell = row.tokens_per_s_per_gpu < 0.995 * before.tokens_per_s_per_gpu
        assert bool(row.reason) == fell
        if fell:
            less, more, kind = re.match(r"([\d.]+)% less per GPU: ([\d.]+) s more for (\w+): .", row.reason).groups()
            ratio = row.tokens_per_s_per_gpu / before.tokens_per_s_per_gpu
            assert float(less) / 100 == pytest.approx(1 - ratio, abs=1e-3)
            assert kind in Seconds._fields and 0 < float(more) < row.planned.seconds.total
    assert any(row.reason for row in rows)


def fell(before, now, *layouts):
    return why_it_fell(*(PlacedTraining(*one) for one in zip((before, now), layouts, strict=True)))


def test_the_reason_is_the_kind_that_grew():
    run, layout = training(64), Layout4D(1, 1, 1, 64)
    slower = training(64, network_Bps=1e9)
    assert "s more for dp: " in fell(run, slower, layout, layout) and " GB between nodes at 7.2 GB/s, " in fell(
        run, slower, layout, layout
    )
    # 1,024 ranks with bandwidth for all: the latency of their ring.
    fast = 1e15
    few, many = training(64, 1024, fast), training(1024, 1024 * 16, fast)
    wide = Layout4D(1, 1, 1, 1024, zero=3)
    said = fell(few, many, layout._replace(zero=3), wide)
    latency = step_and_waits(many, wide)[1]["dp"].messages.latency_s
    assert f"for dp: latency of 1,023 steps between nodes, {latency:.3g} s" in said
    # As many microbatches less, and the same pipeline.
    piped = Layout4D(1, 1, 8, 8)
    said = fell(training(64, 512), training(64, 64), piped, piped)
    assert said.endswith("s more for bubble: pp 8 with 8 microbatches, after pp 8 with 64")
    # Recomputation.
    said = fell(run, run, layout, layout._replace(recompute="full"))
    assert "s more for matmuls: tp 1 · pp 1 · dp 64, b 1, ZeRO-1, recompute full, after tp 1" in said


def test_the_surplus_is_for_as_many_tokens_per_gpu():
    """Twice the GPUs for the same batch take half of the time: of the rest, the largest kind is told."""
    before, now = training(64, 256), training(128, 256, 2e9)
    layouts = Layout4D(1, 1, 1, 64), Layout4D(1, 1, 1, 128)
    then, after = step_s(before, layouts[0]), step_s(now, layouts[1])
    said = fell(before, now, *layouts)
    assert f"{1 - then.total / 2 / after.total:.1%} less per GPU: {after.dp - then.dp / 2:.3g} s more for dp" in said


def test_where_nothing_fits_a_row_says_why():
    rows = sweep(training(model="llama3-70b", network_Bps=50e9), "gpus")
    assert (
        rows[0].planned is None and rows[0].nothing.startswith("nothing fits: ") and not rows[0].tokens_per_s_per_gpu
    )
    assert rows[1].planned and not rows[1].reason, "there is nothing with which to compare it"


ON_64 = "--model llama3-8b --gpus 64 --network 5GB --batch 256"


@pytest.mark.parametrize("what", SWEPT)
def test_the_command_prints_a_table(what, capsys):
    main([*ON_64.split(), "--sweep", what])
    said = capsys.readouterr().out
    table, *reasons = said.split("\n\n")
    assert "tokens/s/GPU" in table.splitlines()[0] and "layout" in table.splitlines()[0]
    assert len(table.splitlines()) >= 7 and all("tp " in line for line in table.splitlines()[1:])
    assert "less per GPU: " in reasons[0] and all(len(line) <= 120 for line in said.splitlines())
    main([*ON_64.split(), "--sweep", what, "--json"])
    plain = json.loads(capsys.readouterr().out)
    assert len(plain["rows"]) == len(table.splitlines()) - 1 and plain["sweep"] == what
    assert {"value", "layout", "step_s", "mfu", "memory_bytes", "reason"} <= set(plain["rows"][0])


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (f"{ON_64} --sweep layers", "invalid choice: 'layers' (choose from"),
        (f"{ON_64} --sweep batch --tp 8", "--sweep searches a layout for each value: leave out --tp"),
        ("--model llama3-8b --gpus 8 --sweep network", "8 GPUs of one node send nothing over a network"),
        ("--model llama3-8b --gpus 8 --gpu rtx4090 --sweep gpus", "give --network"),
        ("--model llama3-8b --gpus 8 --lora 16 --sweep batch", "seconds are not modelled"),
        ("--model mixtral-8x7b --gpus 64 --sweep batch", "seconds"),
    ],
)
def test_a_sweep_that_cannot_be_is_a_sentence(question, words, capsys):
    with pytest.raises(SystemExit) as end:
        main(question.split())
    said = capsys.readouterr().err
    assert end.value.code == 2 and words in said and said.count("\n") == 1
