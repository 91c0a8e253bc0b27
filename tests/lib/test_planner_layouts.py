"""Layouts of other libraries in the planner, by hand; and what it says of runs and blocks that came later."""

import time
from dataclasses import replace

import pytest

from book.published import LATER, RUNS
from book.published.one_card import blocks_on_one_card
from book.published.rows import distinct, predict, read_rows, rows_json, rows_text
from book.published.steps import calibrated, matmul_share_of
from book.trials.saved import block_saved_bytes
from lib.cost import activation_bytes, train_flops
from lib.cost.sizes import LLAMA, ModelShape
from lib.planner import Choices, Cluster, Layout4D, Training, best_layouts, memory_bytes, step_s
from lib.planner.search import ALL_OPEN, all_layouts, layout_text
from lib.planner.seconds import step_and_waits
from lib.planner.training import GPUS, PRESET_MODELS, SHARES, stack_for, training_of

LATER_ROWS = {row["id"]: row for row in read_rows(LATER)}
LLAMA_8B = ModelShape(4096, 32, 32, 128_256, 8192, num_kv_heads=8, d_mlp=14_336, tied=False, **LLAMA)
H, KV, F, TOKENS = 4096, 1024, 14_336, 2 * 8192
WEIGHTS = 2 * H * (H + KV) + 3 * H * F  # of a block


def training(gpus=64, stack="fsdp", model=LLAMA_8B, batch=256):
    return Training(model, Cluster(GPUS["h100"], gpus), stack_for(stack, "h100"), batch)


# ---- bytes and seconds by hand --------------------------------------------------------------------------------------

KEPT = {  # bytes of a token and block, in 16 bit
    "none": 8 * H + 2 * H + 2 * (H + 2 * KV) + 6 * F,
    "mlp": 8 * H + 2 * H + 2 * (H + 2 * KV),
    "ops": 2 * H + 2 * H + 2 * KV + 2 * H + 2 * F + 2 * H,  # input, queries, values, attention, gate, the block's MLP
    "full": 2 * H,
}
AGAIN = {"none": 0, "mlp": 3 * H * F, "ops": H * (H + KV + F), "full": WEIGHTS}


@pytest.mark.parametrize("how", KEPT)
def test_recomputation_by_kind(how):
    run = training()
    layout = Layout4D(1, 1, 1, 64, rows=2, zero=3, recompute=how)
    assert activation_bytes(LLAMA_8B, 2, how, fused_attention=True) == TOKENS * KEPT[how]
    again = KEPT["none"] - KEPT[how]  # what one block recomputes is there while its backward runs
    beside = again + (KEPT["full"] if how == "full" else 0)  # its input twice
    assert memory_bytes(run, layout).activations == pytest.approx(TOKENS * (32 * KEPT[how] + beside))
    found, plain = step_s(run, layout), step_s(run, layout._replace(recompute="none"))
    m, narrow = 2, 1 + 100 / TOKENS + 100 / H
    last = H * F * (how in ("mlp", "full"))  # PyTorch does not compute the last matmul of a block again
    more = m * 32 * 2 * (AGAIN[how] - last) * TOKENS * narrow / (989e12 * SHARES["h100"][0])
    assert found.matmuls - plain.matmuls == pytest.approx(more)
    assert found.memory - plain.memory == pytest.approx(m * 32 * 2 * again * TOKENS / (0.7 * 3.35e12))
    assert found.attention == pytest.approx(plain.attention * (4.5 / 3.5 if how == "full" else 1))
    attention = 2 * 8192 * H if how == "full" else 0
    extra = train_flops(LLAMA_8B, 1, how) - train_flops(LLAMA_8B, 1)
    assert extra == 2 * 8192 * 32 * (AGAIN[how] + attention)


def test_every_second_block():
    run, layout = training(), Layout4D(2, 1, 1, 32, rows=2, zero=1, sequence_parallel=True, recompute="full")
    plain, full = layout._replace(recompute="none"), layout
    half = layout._replace(every=2)
    for kind in ("matmuls", "attention", "memory", "tp"):
        ends = [getattr(step_s(run, one), kind) for one in (plain, full)]
        assert getattr(step_s(run, half), kind) == pytest.approx(sum(ends) / 2)
    again = TOKENS * KEPT["none"] / 2
    kept = [memory_bytes(run, one).activations for one in (plain, full, half)]
    assert kept[2] - again == pytest.approx((kept[0] + kept[1] - again) / 2)
    took = step_s(run, half).total
    assert run.utilisation(took, "full", 2) == pytest.approx(
        (run.utilisation(took) + run.utilisation(took, "full")) / 2
    )


def test_zero_3_with_tensor_parallelism():
    """Each rank gathers its part of a block: a tp-th of the bytes, from a tp-th of the ranks."""
    run = training()
    alone, both = (Layout4D(tp, 1, 1, 64 // tp, rows=1, zero=3, sequence_parallel=tp > 1) for tp in (1, 8))
    held = [memory_bytes(run, one) for one in (alone, both)]
    assert held[0].parameters == pytest.approx(held[1].parameters) and held[0].gathered == 8 * held[1].gathered
    assert held[1].gathered == (2 + 2) * 128_256 * H / 8, "the head, parameters and gradients in 16 bit"
    assert 2.4 < 128_256 * H / LLAMA_8B.num_block_parameters < 2.5
    few = replace(run, model=replace(LLAMA_8B, vocab_size=32_000))  # a head of less than two blocks
    assert memory_bytes(few, both).gathered == 2 * (2 + 2) * LLAMA_8B.num_block_parameters / 8
    mine = (32 * LLAMA_8B.num_block_parameters + 2 * 128_256 * H) / 8
    sent = (2 + 2 + 4) * mine * 7 / 8  # two gathers in 16 bit, and gradients in float32
    m = 256 / 8
    over_dp = step_and_waits(run, both)[1]["dp"]
    assert over_dp.messages.bytes == pytest.approx(m * sent)
    ring_s = 8.4e-6 + 7 * 9.6e-6  # 8 ranks, one on each node
    assert over_dp.messages.seconds == pytest.approx(m * (sent / (50e9 * 0.9) + 3 * 33 * ring_s))
    assert over_dp.exposed_s == pytest.approx(0.5 * over_dp.messages.seconds)


def test_copies_of_a_model_that_a_node_shards():
    """HSDP: gathers stay on NVLink, a shard's gradients are reduced over the copies. Zhao et al. 2023"""
    run, whole = training(), Layout4D(1, 1, 1, 64, rows=1, zero=3)
    copies = whole._replace(replicas=8)
    assert copies.shards == 8
    held = [memory_bytes(run, one) for one in (whole, copies)]
    assert held[1].parameters == 8 * held[0].parameters and held[1].optimizer == 8 * held[0].optimizer
    mine = 32 * LLAMA_8B.num_block_parameters + 2 * 128_256 * H
    inside = (2 + 2 + 4) * mine * 7 / 8 / (450e9 * 0.95)
    across = 2 * 4 * mine / 8 * 7 / 8 / (50e9 * 0.9)
    assert step_s(run, copies).dp == pytest.approx(0.5 * 4 * (inside + across), rel=0.05), "and latency"
    one = whole._replace(zero=1)
    hidden = replace(run, stack=replace(run.stack, overlaps_dp=False))
    took = step_s(hidden, one._replace(replicas=8)).dp
    in_16_bit = 2 * 2 * mine / 8 * 7 / 8 / (50e9 * 0.9)
    rings_s = 2 * (8.4e-6 + 7 * 3.4e-6) + 8.4e-6 + 14 * 9.6e-6  # of a bucket: a reduction, a gather, and over copies
    latency_s = mine / 40e6 * rings_s
    assert took == pytest.approx((2 + 2) * mine * 7 / 8 / (450e9 * 0.95) + in_16_bit + latency_s)


def test_a_loss_in_pieces():
    run, layout = training(), Layout4D(1, 1, 1, 64, rows=1, zero=3)
    pieces = layout._replace(loss_chunks=8)
    assert memory_bytes(run, layout).logits == 14 * 8192 * 128_256 == 8 * memory_bytes(run, pieces).logits
    assert 0 < step_s(run, pieces).total / step_s(run, layout).total - 1 < 0.02, "a narrower head"


def test_a_ring_that_is_not_balanced():
    """The last of c ranks has (2c - 1)/c² of causal attention's halves, instead of 1/c."""
    even, odd = training(stack="megatron"), training(stack="fsdp")
    share = 0.35 / 0.5
    for cp, more in ((1, 1), (2, 1.5), (8, 15 / 8)):
        layout = Layout4D(1, cp, 1, 64 // cp)
        assert step_s(odd, layout).attention == pytest.approx(step_s(even, layout).attention * more / share)


@pytest.mark.parametrize("llama", [False, True])
def test_the_books_own_model_keeps_what_the_plan_says(llama):
    """8f with a SwiGLU of separate operations. A CPU's RMSNorm also keeps normalised inputs."""
    gpt = ModelShape(4096, 1, 32, 50_257, 2048, dropout_masks=False)
    shape = replace(LLAMA_8B, context=2048) if llama else gpt
    for tp in (1, 4):
        how = {"tp": tp, "sequence_parallel": tp > 1}
        ours = activation_bytes(shape, 1, fused_attention=True, fused_swiglu=False, **how)
        exact = block_saved_bytes(shape, 1, itemsize=2, **how)
        if llama:
            # Each norm: input and normalised input in float32, instead of the input in 16 bit; its root; angles.
            exact -= 2 * (8 - 2) * H * 2048 // tp + 2 * H * 2048 // tp + 4 * 2048 * 128
        assert ours == pytest.approx(exact, rel=0.003)
    assert activation_bytes(LLAMA_8B, 1, fused_swiglu=False) - activation_bytes(LLAMA_8B, 1) == 2 * F * 8192


def test_all_choices_open(say, million_s):
    """In a blink for the largest; never slower than with fewer choices; and what is not necessary is not tried."""
    run = Training(PRESET_MODELS["llama-405b"], Cluster(GPUS["h100"], 16_384), stack_for("megatron", "h100"), 2048)
    times = []
    for _ in range(3):
        began = time.process_time()
        best_layouts(run, ALL_OPEN)
        times.append(time.process_time() - began)
    say(f"405B on 16,384 GPUs, all choices open: {min(times):.3f} s, {min(times) / million_s:.1f} million additions")
    assert min(times) <= 15 * million_s
    small = Training(PRESET_MODELS["llama-70b"], Cluster(GPUS["h100"], 16), stack_for("fsdp", "h100"), 256)
    every = Choices(headroom=0), replace(ALL_OPEN, headroom=0)  # the fastest are tight
    few, many = (best_layouts(small, choices, best=20) for choices in every)
    assert many[0].seconds.total < few[0].seconds.total
    sharded = [one for one in all_layouts(small, ALL_OPEN) if one.zero == 3]
    assert {one.pp for one in sharded} == {1} and {(one.tp > 1, one.replicas > 1) for one in sharded} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    assert {one.shards * one.tp for one in sharded if one.replicas > 1} == {8}, "a node"
    for layout in (one.layout for one in best_layouts(training(), ALL_OPEN, best=50)):
        if layout.recompute != "none" or layout.loss_chunks > 1:
            plain = layout._replace(recompute="none", every=1, loss_chunks=1)
            assert memory_bytes(training(), plain).total > 0.9 * training().room_bytes, layout_text(layout)


# ---- runs that came later -------------------------------------------------------------------------------------------


def test_fsdp_on_h100(say):
    """Calibrated on one row; the other row of the same kind then follows, and from that one the first."""
    eager, compiled = (LATER_ROWS[f"TT-H100 8B {name}"] for name in ("eager", "compiled"))
    assert SHARES["h100-500w"][0] == pytest.approx(calibrated(compiled), abs=1e-4)
    assert abs(predict(eager).error) < 0.02
    run, layout = training_of(compiled)
    other = replace(run.stack, matmul_share=matmul_share_of(*training_of(eager), eager["step_s"]))
    error = step_s(replace(run, stack=other), layout).total / compiled["step_s"] - 1
    say(f"calibrated on the eager row, the compiled one is off by {error:+.1%}")
    assert abs(error) < 0.02
    assert 0.9 < SHARES["h100-500w"][0] / SHARES["h100"][0] / (500 / 700) < 1.12, "power explains most of it"
    assert 77 <= memory_bytes(*training_of(eager)).total / 2**30 + 1 <= 82


@pytest.mark.parametrize(("cp", "most"), [(1, 0.2), (2, 0.1), (4, 0.06), (8, 0.03)])
def test_long_sequences_of_fsdp(cp, most):
    """In FP8, of which no run of this stack calibrates the speed: with one rank it is a fifth too fast."""
    row = LATER_ROWS[f"TT-H100 8B FP8 cp{cp}"]
    assert abs(predict(row).error) < most
    assert memory_bytes(*training_of(row)).total / 2**30 == pytest.approx(row["memory_gib"], rel=0.015)


@pytest.mark.parametrize("name", ["DGXC L405B/576", "DGXC N340B/128"])
def test_runs_of_megatron_that_were_refused(name):
    run, layout = training_of(LATER_ROWS[name])
    assert abs(predict(LATER_ROWS[name]).error) < 0.05
    assert memory_bytes(run, layout).total <= run.room_bytes
    wide = replace(run, stack=stack_for("megatron-lm", "h100"))
    assert memory_bytes(wide, layout).total > run.room_bytes, "18 bytes per parameter"


def test_blocks_on_one_card():
    for one in blocks_on_one_card():
        least = 0.9 if one.d_model >= 4096 else 0.7
        assert least < one.predicted_s / one.measured_s < 1.13, one
        assert one.predicted_bytes == pytest.approx(one.measured_bytes, rel=0.01), one


def test_medians_count_a_configuration_once():
    predictions = [predict(row) for row in read_rows(RUNS)]
    cloud = [one for one in predictions if one.group == "DGX Cloud H100"]
    assert len(cloud) == 15 and len(distinct(cloud)) == 3
    said = rows_json(predictions)
    assert {name: (of["runs"], of["configurations"]) for name, of in said["stacks"].items()} == {
        "megatron-2021, A100": (74, 74),
        "llama3, H100": (3, 3),
        "megatron, H100": (15, 3),
        "fsdp, A100": (7, 7),
        "fsdp1-eager, A100": (9, 9),
        "aleph-alpha, A100": (78, 75),
        "all": (186, 171),
    }
    assert {name: of["runs"] for name, of in said["evidence"].items()} == {
        "in view": 121,
        "calibrated": 2,
        "later": 63,
        "all": 186,
    }
    words = rows_text([predict(row) for row in LATER_ROWS.values()])
    assert "fsdp, H100-500W, FP8" in words and "calibrated" in words and "configurations" in words


@pytest.mark.parametrize(
    ("row", "other"),
    [
        ("eager", {"traffic": 1.0}),
        ("FP8 cp4", {"balanced_cp": True}),
        ("FP8 cp8", {"balanced_cp": True}),
        ("FP8 cp8", {"attention_share": 0.5}),
    ],
)
def test_each_constant_of_fsdp_is_needed(row, other):
    """Without it, calibrated again on the same row, another row is worse."""
    stack = {name: value for name, value in other.items() if name != "traffic"}
    run, layout = training_of(LATER_ROWS["TT-H100 8B compiled"])
    run = replace(run, stack=replace(run.stack, **stack))
    share = matmul_share_of(run, layout, LATER_ROWS["TT-H100 8B compiled"]["step_s"])
    judged, its_layout = training_of(LATER_ROWS[f"TT-H100 8B {row}"])
    judged = replace(judged, stack=replace(judged.stack, matmul_share=share, **other))
    error = step_s(judged, its_layout).total / LATER_ROWS[f"TT-H100 8B {row}"]["step_s"] - 1
    assert abs(error) > 3 * abs(predict(LATER_ROWS[f"TT-H100 8B {row}"]).error)
