"""No step is shorter than its parts: what hides, behind what, and how messages grow with ranks, on random clusters."""

import random
from collections import Counter
from dataclasses import fields, replace

import pytest

from lib.cost.hardware import GPUS, Device
from lib.cost.sizes import LLAMA, PLANNED_RECOMPUTE, ModelShape, Recipe, forward_flops, train_flops
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_v
from lib.pipeline.simulate import Costs, simulate
from lib.planner import Cluster, Layout4D, Training, step_s
from lib.planner.messages import between_stages, of_collective
from lib.planner.seconds import block_s, step_and_waits
from lib.planner.stacks import STACKS, stack_for
from lib.planner.training import PRESET_MODELS

RATES = ("link_Bps", "network_Bps", "memory_Bps")


def random_run(rng):
    """Any model on any cluster, cut in any way: also on slow wires, in huge groups, and with one sequence."""
    h = rng.choice((1024, 2048, 4096, 8192, 16384))
    heads = h // 128
    kind = LLAMA if rng.random() < 0.7 else {}
    shape = ModelShape(
        h,
        rng.choice((16, 32, 48, 96)),
        heads,
        rng.choice((32_000, 128_256)),
        rng.choice((1024, 4096, 8192, 32_768)),
        num_kv_heads=rng.choice((heads, heads // 4)),
        d_mlp=rng.choice((4 * h, 7 * h // 2)),
        tied=rng.random() < 0.3,
        **kind,
    )
    figures = {name: getattr(GPUS["h100"], name) * 2 ** rng.uniform(-8, 2) for name in RATES}
    device = replace(GPUS["h100"], **figures)
    tp, cp, pp = rng.choice((1, 1, 2, 4, 8)), rng.choice((1, 1, 1, 2, 4)), rng.choice((1, 1, 2, 4, 8))
    dp, rows, v, schedule = 2 ** rng.randrange(0, 12), rng.choice((1, 1, 2, 4)), 1, "1f1b"
    m = rng.choice((1, 2, 5, 16, 64))
    if pp > 1 and rng.random() < 0.5:
        v, schedule = rng.choice(((2, "1f1b"), (4, "1f1b"), (1, "zb-h1"), (2, "zb-v")))
        m = 2 * pp * m
    zero = rng.choice((0, 1, 2, 3)) if pp == 1 else rng.choice((0, 1, 2))
    layout = Layout4D(
        tp,
        cp,
        pp,
        dp,
        rows,
        v,
        zero=zero if dp * cp > 1 else 0,
        sequence_parallel=tp > 1 and rng.random() < 0.7,
        recompute=rng.choice(("none", "none", "full", "mlp", "ops")) if schedule == "1f1b" else "none",
        schedule=schedule,
        attention=rng.choice(("", "ring", "gather", "ulysses")),
    )
    cluster = Cluster(device, layout.gpus, rng.choice((1, 2, 4, 8, 8, 72)))
    stack = stack_for(rng.choice(list(STACKS)), rng.choice(("a100", "h100")))
    return Training(shape, cluster, stack, dp * rows * m), layout


@pytest.fixture(scope="module", params=[1000, pytest.param(10_000, marks=pytest.mark.thorough("ten thousand runs"))])
def runs(request):
    rng = random.Random(request.param)
    return [random_run(rng) for _ in range(request.param)]


def total(training, layout):
    return step_s(training, layout).total


def on(training, **figures):
    device = replace(training.cluster.device, **figures)
    return replace(training, cluster=replace(training.cluster, device=device))


def test_no_axis_hides_more_than_the_computation_beside_it(runs, say):
    seen = Counter()
    for training, layout in runs:
        seconds, waits = step_and_waits(training, layout)
        computes_s = seconds.matmuls + seconds.attention + seconds.memory
        for axis, wait in waits.items():
            assert 0 <= wait.hidden_s <= wait.beside_s * (1 + 1e-9), (axis, training, layout)
            assert getattr(seconds, axis) + wait.hidden_s == pytest.approx(wait.messages.seconds, rel=1e-9)
            assert 0 <= wait.messages.latency_s <= wait.messages.seconds
            seen[axis] += wait.hidden_s > 0 and wait.exposed_s > 0
        assert sum(wait.hidden_s for wait in waits.values()) <= computes_s * (1 + 1e-9)
        longest_s = max(wait.messages.seconds for wait in waits.values())
        assert seconds.total >= max(computes_s, longest_s) * (1 - 1e-9), (training, layout)
    say(f"runs of which an axis hides in part: {dict(seen)}")
    assert min(seen.values()) > len(runs) / 20


def test_a_faster_wire_never_lengthens_a_step(runs):
    for training, layout in runs:
        before = total(training, layout)
        for name in RATES:
            faster = on(training, **{name: 2 * getattr(training.cluster.device, name)})
            assert total(faster, layout) <= before * (1 + 1e-9), (name, training, layout)


def test_a_faster_memory_never_lengthens_a_step_whose_stages_are_uneven():
    """28 blocks on 3 ranks: 10 of the middle rank, 9 and the head of the last, and the network hides nothing more."""
    device = replace(GPUS["h100"], network_Bps=1e9)
    run = Training(PRESET_MODELS["qwen3-0.6b"], Cluster(device, 15, 4), stack_for("megatron", "h100"), 480)
    layout = Layout4D(1, 1, 3, 5, 2, 10)
    faster = on(run, memory_Bps=2 * device.memory_Bps)
    assert total(faster, layout) <= total(run, layout)
    seconds, waits = step_and_waits(run, layout)
    assert waits["pp"].hidden_s > 48 * 10 * block_s(run, 1, 1, 2, False, "none").left_s, "behind the head as well"


def test_more_bytes_never_shorten_a_step(runs):
    for training, layout in runs:
        before, stack, model = total(training, layout), training.stack, training.model
        wide = Recipe(2, 4, 4, 8), Recipe(4, 4, 4, 8)
        narrow = replace(training, stack=replace(stack, recipe=Recipe(2, 2, 4, 8)))
        times = [
            total(narrow, layout),
            *(total(replace(narrow, stack=replace(stack, recipe=r)), layout) for r in wide),
        ]
        assert times[1] >= times[0] * (1 - 1e-9) and times[2] >= times[1] * (1 - 1e-9)
        longer = replace(training, model=replace(model, vocab_size=2 * model.vocab_size))
        assert total(longer, layout) >= before * (1 - 1e-9)
        if layout.zero == 3:
            float32 = replace(training, stack=replace(stack, reduced_bytes=stack.reduced_bytes + 2))
            assert total(float32, layout) >= before * (1 - 1e-9)


def test_more_copies_are_never_faster_but_for_their_share_of_the_optimizer(runs, say):
    """At a fixed batch per GPU. ZeRO shards the update, which so becomes shorter: on KempnerForge's H200 7B is 4 %
    faster on each of four GPUs than on each of two (`benchmarks/mfu_scaling`, commit 9f3f03a0)."""
    fell = 0
    for training, layout in runs:
        twice = layout._replace(dp=2 * layout.dp)
        more = Training(
            training.model,
            replace(training.cluster, gpus=twice.gpus),
            training.stack,
            2 * training.global_batch,
        )
        if layout.zero == 0 and layout.dp * layout.cp == 1:
            continue  # nothing was sent
        a, b = step_s(training, layout), step_s(more, twice)
        assert b.total - b.optimizer >= (a.total - a.optimizer) * (1 - 1e-9), (training, layout)
        if a.dp > 0.01 * a.total and layout.dp >= 8:
            fell += 1
            assert b.total - b.optimizer > a.total - a.optimizer, (training, layout)
    say(f"runs in which gradients are waited for, and more copies wait longer: {fell}")
    assert fell > len(runs) / 10


def test_a_cluster_of_thousands_pays_for_its_rings():
    """One sequence a GPU, ZeRO-3: the same on 8 and on 16,384 GPUs, said an earlier planner."""
    per_gpu = {}
    for gpus in (8, 256, 4096, 16_384):
        run = Training(PRESET_MODELS["llama3-8b"], Cluster(GPUS["h100"], gpus), stack_for("fsdp", "h100"), gpus)
        per_gpu[gpus] = 1 / total(run, Layout4D(1, 1, 1, gpus, zero=3))
    assert per_gpu[256] > 0.8 * per_gpu[8] and per_gpu[16_384] < 0.3 * per_gpu[8]
    assert list(per_gpu.values()) == sorted(per_gpu.values(), reverse=True)


def test_two_nodes_on_a_slow_network():
    """8B on two nodes of 8 H100 with 100 Gb/s per node: 129 s of messages beside 26 of computation are no 75 s."""
    device = replace(GPUS["h100"], network_Bps=100e9 / 8 / 8)
    run = Training(PRESET_MODELS["llama3-8b"], Cluster(device, 16), stack_for("megatron", "h100"), 512)
    seconds, waits = step_and_waits(run, Layout4D(1, 1, 1, 16, zero=3))
    assert waits["dp"].messages.seconds == pytest.approx(129, abs=0.5)
    assert waits["dp"].hidden_s <= seconds.matmuls + seconds.attention + seconds.memory < 27
    assert seconds.total > 129


def test_the_sums_of_a_layer_without_sequence_parallelism_hide_at_most_their_backward_half():
    run = Training(PRESET_MODELS["llama-70b"], Cluster(GPUS["h100"], 64), stack_for("megatron", "h100"), 1024)
    for sequence_parallel, part in ((False, 0.5), (True, 0.76)):
        wait = step_and_waits(run, Layout4D(4, 1, 4, 4, sequence_parallel=sequence_parallel))[1]["tp"]
        assert wait.hidden_s / wait.messages.seconds == pytest.approx(part, abs=0.005)


def matmuls_alone(**figures):
    """A run whose step is the matmuls of its blocks: as many seconds as FLOPs, and no head."""
    stack = replace(stack_for("megatron-2021", "a100"), half_width=0, traffic=0.0, launch_s=0.0, **figures)
    model = replace(PRESET_MODELS["llama3-8b"], vocab_size=0)
    return Training(model, Cluster(GPUS["a100"], 4), stack, 4)


@pytest.mark.parametrize("how", PLANNED_RECOMPUTE)
def test_backward_has_the_flops_of_what_it_recomputes(how):
    """Gradients hide there: behind two thirds of a block, and behind three quarters if all of it runs again."""
    run = matmuls_alone(overlaps_dp=True)
    again = 1 - forward_flops(run.model, 1) / train_flops(run.model, 1, how)
    assert {"none": 2 / 3, "full": 3 / 4}.get(how, again) == pytest.approx(again) and 2 / 3 <= again <= 3 / 4
    assert how in ("none", "full") or 0.67 < again < 0.74
    assert block_s(run, 1, 1, 1, False, how).backward_share == pytest.approx(again)
    seconds, waits = step_and_waits(run, Layout4D(1, 1, 1, 4, zero=0, recompute=how))
    assert waits["dp"].beside_s == pytest.approx(again * seconds.matmuls + again * seconds.attention)


def test_of_blocks_that_take_turns_backward_has_the_mean():
    assert block_s(matmuls_alone(), 1, 1, 1, False, "full", 2).backward_share == pytest.approx(1 - 2 / 7)


def test_backward_of_fused_attention_and_of_memory():
    """Two and a half times forward, and one and a half; one more if both run again."""
    run = Training(PRESET_MODELS["llama3-8b"], Cluster(GPUS["h100"], 8), stack_for("megatron", "h100"), 8)
    for how, again in (("none", 0), ("full", 1)):
        block = block_s(run, 1, 1, 1, False, how)
        forward_s = block.matmuls / (3 + again) + block.attention / (3.5 + again)
        rest = (block.forward_s - forward_s) / block.memory
        assert rest == pytest.approx(2 / 5) if how == "none" else 2 / 7 < rest < 2 / 6, "it keeps its input"


@pytest.mark.parametrize(("how", "share"), [("none", 3), ("full", 4)])
def test_sums_hide_behind_the_gradients_of_weights(how, share):
    """A third of the matmuls, and a quarter where forward runs twice."""
    run = Training(PRESET_MODELS["llama-70b"], Cluster(GPUS["h100"], 64), stack_for("megatron", "h100"), 1024)
    for tp, sequence_parallel in ((8, False), (16, True)):  # 16 are two nodes, over which no pieces overlap
        block = block_s(run, tp, 1, 1, sequence_parallel, how)
        assert block.weights_s == block.tp.beside_s == pytest.approx(block.matmuls / share)
    slow = on(run, link_Bps=run.cluster.device.link_Bps / 50)
    hides = block_s(slow, 8, 1, 1, False, how)
    assert hides.tp.hidden_s == pytest.approx(hides.matmuls / share) and hides.tp.exposed_s > 0


def test_keys_and_values_hide_behind_attention_alone():
    run = Training(
        replace(PRESET_MODELS["llama3-8b"], context=131_072),
        Cluster(GPUS["h100"], 8),
        stack_for("megatron", "h100"),
        8,
    )
    wait = step_and_waits(run, Layout4D(1, 8, 1, 1, zero=1))[1]["cp"]
    assert wait.exposed_s == 0 < wait.hidden_s < wait.beside_s
    slow = on(run, link_Bps=run.cluster.device.link_Bps / 1000)
    wait = step_and_waits(slow, Layout4D(1, 8, 1, 1, zero=1))[1]["cp"]
    assert wait.hidden_s == pytest.approx(wait.beside_s) and wait.exposed_s > 0


# ---- pipelines, against the simulator -------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("late", [0.05, 0.2])
def test_messages_of_a_pipeline_as_simulated(p, late):
    """A message that takes a fraction of a forward: what each further microbatch waits, and what fills the pipeline."""

    def each_and_rest(make, microbatches, stages_per_rank=1):
        one = 1 / stages_per_rank
        ends = [
            [simulate(make(m), Costs(one, one, one, latency)).makespan for m in (microbatches, 2 * microbatches)]
            for latency in (late, 0)
        ]
        each = [(b - a) / microbatches for a, b in ends]
        waits = each[0] - each[1]
        return waits, ends[0][1] - ends[1][1] - 2 * microbatches * waits

    hops = (p - 1) * late
    waits, fill = each_and_rest(lambda m: one_f_one_b(p, m), 8 * p)
    assert waits == pytest.approx(2 * hops / p) and fill == pytest.approx(2 * hops, abs=2 * late + 1e-9)
    for make, v, times in ((lambda m: zb_h1(p, m), 1, 4), (lambda m: zb_v(p, m), 2, 5)):
        waits, fill = each_and_rest(make, 8 * p, v)
        assert waits == pytest.approx(0, abs=1e-9) and fill == pytest.approx(times * hops, abs=2 * late + 1e-9)
    waits, fill = each_and_rest(lambda m: interleaved(p, m, 3), 8 * p, 3)
    assert waits == pytest.approx(0, abs=1e-9) and fill == pytest.approx(2 * 3 * hops, abs=4 * late + 1e-9)


def test_one_hop_of_eight_leaves_a_node():
    run = Training(PRESET_MODELS["llama3-8b"], Cluster(GPUS["h100"], 16), stack_for("megatron", "h100"), 64)
    slowest, hops_s = between_stages(run, 1e9, 16, 1)
    link_s = between_stages(replace(run, cluster=Cluster(GPUS["h100"], 8)), 1e9, 8, 1)[0].seconds
    assert slowest.seconds == pytest.approx(1e9 / (0.6 * 50e9), rel=1e-3)
    assert hops_s == pytest.approx(14 * link_s + slowest.seconds)


# ---- latency --------------------------------------------------------------------------------------------------------


def test_steps_of_a_ring_by_hand():
    """An all-gather over two nodes of 8 has 14 steps on links and one over the network, 8.4 µs before the first."""
    run = Training(PRESET_MODELS["llama3-8b"], Cluster(GPUS["h100"], 16), stack_for("megatron", "h100"), 16)
    found = of_collective(run, "all_gather", 16.0, 16, 1, calls=2)
    assert found.latency_s == pytest.approx(2 * (8.4e-6 + 14 * 3.4e-6 + 9.6e-6))
    assert found.bytes == 15


def test_small_sums_over_many_ranks_take_a_tree():
    gpus = 4096
    run = Training(PRESET_MODELS["llama3-8b"], Cluster(GPUS["h100"], gpus), stack_for("megatron", "h100"), gpus)
    small, large = (of_collective(run, "all_reduce", size, gpus, 1) for size in (1e6, 1e12))
    assert small.latency_s == pytest.approx(4.4e-6 + 2 * (7 * 1.2e-6 + 9 * 8.5e-6))
    assert large.latency_s == pytest.approx(8.4e-6 + 2 * ((gpus - 512) * 3.4e-6 + 511 * 9.6e-6))


def test_rates_are_all_that_a_device_has():
    """A new rate of a device has to be doubled above."""
    assert {field.name for field in fields(Device) if field.name.endswith("_Bps")} == set(RATES)
