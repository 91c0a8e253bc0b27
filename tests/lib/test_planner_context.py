"""A ring, a gather and Ulysses in the planner: bytes, what hides, latency, balance, memory, and what cannot be."""

import random
from dataclasses import replace

import pytest

from lib.cost.hardware import GPUS
from lib.layout import ATTENTION
from lib.planner import Cluster, Layout4D, Training, best_layouts, memory_bytes, step_s
from lib.planner.__main__ import main
from lib.planner.choices import usual_choices
from lib.planner.kept_of_block import block_kept_bytes
from lib.planner.messages import BEGIN_S, LINK_STEP_S, NETWORK_STEP_S
from lib.planner.refusals import refusal
from lib.planner.report import report_of_layout
from lib.planner.seconds import block_s, step_and_waits
from lib.planner.stacks import STACKS, stack_for
from lib.planner.training import PRESET_MODELS

H, HEADS = 4096, 32


def run_of(kv_heads=8, context=131_072, gpus=8, stack="megatron", **changed):
    model = replace(PRESET_MODELS["llama3-8b"], num_kv_heads=kv_heads, context=context)
    stack = replace(stack_for(stack, "h100"), **changed)
    return Training(model, Cluster(GPUS["h100"], gpus), stack, max(8, gpus))


def over_cp(run, way, n, how="none", tp=1):
    return block_s(run, tp, n, 1, tp > 1, how, 1, way).cp


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [32, 8, 4])
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_bytes_of_a_block(n, kv_heads):
    """In units of the queries of all tokens; `tests/lib/test_context_parallel.py` counts the same of real ranks."""
    g, sent = kv_heads / HEADS, (n - 1) / n
    of_keys = max(g, n / HEADS)  # that Ulysses sends, with copies
    run, kept = run_of(kv_heads), run_of(kv_heads, keeps_gathered=True)
    x = 2 * run.model.context * H
    by_hand = {
        ("ring", "none"): 6 * g * sent,
        ("ring", "full"): 8 * g * sent,
        ("gather", "none"): 6 * g * sent,
        ("gather", "full"): 8 * g * sent,
        ("ulysses", "none"): 4 * (1 + of_keys) * sent / n,
        ("ulysses", "full"): 6 * (1 + of_keys) * sent / n,
    }
    for (way, how), units in by_hand.items():
        assert over_cp(run, way, n, how).messages.bytes / x == pytest.approx(units), (way, how)
    assert over_cp(kept, "gather", n).messages.bytes / x == pytest.approx(4 * g * sent)
    assert over_cp(kept, "gather", n, "full").messages.bytes / x == pytest.approx(6 * g * sent)
    for how in ("mlp", "ops"):
        assert over_cp(run, "ring", n, how).messages.bytes == over_cp(run, "ring", n).messages.bytes


def test_where_ulysses_sends_less_than_a_ring():
    """From n of (2/3)(1 + H/K) on: with 4 queries on a key from 3.33."""
    for kv_heads, first in ((32, 2), (8, 4), (4, 8)):
        run = run_of(kv_heads)
        ring, ulysses = ({n: over_cp(run, way, n).messages.bytes for n in (2, 4, 8)} for way in ("ring", "ulysses"))
        assert [n for n in ring if ulysses[n] < ring[n]] == [n for n in ring if n >= first]


def test_tensor_parallel_ranks_send_the_keys_of_their_heads():
    """With more ranks than heads of keys each has a whole head."""
    run, x = run_of(8), 2 * 131_072 * H
    assert over_cp(run, "ring", 4, tp=4).messages.bytes / x == pytest.approx(6 * 1 / 4 * 3 / 4 / 4)
    assert over_cp(run, "ring", 4, tp=16).messages.bytes / x == pytest.approx(6 * 1 / 32 * 3 / 4)


# ---- seconds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fused", "times"), [(True, 1.0), (False, 0.5)])
def test_a_ring_hides_from_this_many_tokens_on(fused, times):
    """Of a rank, c = (b/2)·g·F/W with a full mask (Liu et al. 2023, table 2), and twice as many for a causal half."""
    changed = {"fused_attention": fused, "attention_share": 0.5, "matmul_share": 0.5}
    W, F, g, n = 10e9 * 0.95, 989e12 * 0.5, 8 / 32, 4  # so slow that latency is nothing
    least = times * 2 * g * F / W
    for part, hides in ((1.3, True), (0.7, False)):
        run = run_of(8, context=int(part * least * n), **changed)
        run = replace(run, cluster=replace(run.cluster, device=replace(run.cluster.device, link_Bps=10e9)))
        wait = over_cp(run, "ring", n)
        assert (wait.exposed_s == 0) == hides, (part, wait)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("f", [0.5, 1.1, 3.0])
def test_a_hop_waits_for_the_rest_of_its_block(n, f):
    """Forward takes (max(1, f)(n − 1) + 1)/n of its attention; backward has 2.5 times of that, and twice the hops."""
    run = run_of(8, stack="megatron")
    attention_s = block_s(run, 1, n, 1, False, "none", 1, "ring").attention
    block = attention_s / 3.5 / n
    hop_bytes = 2 * 2 * 131_072 / n * H / 4
    slow = replace(run.cluster.device, link_Bps=hop_bytes / 0.95 / (f * block - LINK_STEP_S))
    run = replace(run, cluster=replace(run.cluster, device=slow))
    found = over_cp(run, "ring", n).exposed_s
    late = max(0, f - 1) + max(0, 2 * f - 2.5)  # blocks of forward, for each of n - 1 hops
    assert found == pytest.approx((n - 1) * late * block, rel=1e-9, abs=1e-12)


def test_a_ring_without_balance_begins_with_half_a_block():
    """The last of 4 ranks computes a half and three whole blocks, and each hop is behind one of the first three."""
    run = run_of(8, stack="fsdp")
    even, odd = (
        block_s(replace(run, stack=replace(run.stack, balanced_cp=b)), 1, 4, 1, False, "none", 1, "ring")
        for b in (True, False)
    )
    assert odd.attention == pytest.approx(even.attention * 7 / 4)
    assert odd.cp.beside_s == pytest.approx(odd.attention * 2.5 / 3.5)
    assert even.cp.beside_s == pytest.approx(even.attention * 3 / 4)
    block_forward_s = odd.attention / 3.5 / 3.5
    slow = replace(run.cluster.device, link_Bps=2 * 2 * 131_072 / 4 * H / 4 / 0.95 / (0.75 * block_forward_s))
    wait = over_cp(replace(run, cluster=replace(run.cluster, device=slow)), "ring", 4)
    late = 0.25 + (2 * 0.75 - 0.5 * 2.5)  # only the first hop is longer than its half block
    assert wait.exposed_s == pytest.approx(late * block_forward_s, rel=1e-3)


def test_ulysses_is_balanced_and_waited_for():
    for stack in STACKS:
        run = run_of(8, stack=stack)
        block, plain = (block_s(run, 1, n, 1, False, "none", 1, "ulysses") for n in (8, 1))
        assert block.attention == pytest.approx(plain.attention / 8)
        assert block.cp.hidden_s == 0 < block.cp.exposed_s


def test_a_gather_is_waited_for_unless_the_software_hides_it():
    whole, half = (over_cp(run_of(8, exposed_cp=part), "gather", 8) for part in (1.0, 0.5))
    assert whole.hidden_s == 0 and half.hidden_s == pytest.approx(half.messages.seconds / 2)
    assert over_cp(run_of(8, exposed_cp=1.0), "ring", 8).exposed_s == 0


def test_latency():
    """Three passes of a ring; a swap of 8 calls, each with a message to every rank; across nodes 1 hop of 8 is far."""
    run, two = run_of(8), run_of(8, gpus=16)
    assert over_cp(run, "ring", 8).messages.latency_s == pytest.approx(3 * 7 * LINK_STEP_S)
    assert over_cp(run, "ulysses", 8).messages.latency_s == pytest.approx(8 * (BEGIN_S + 7 * LINK_STEP_S))
    far = 8 * (BEGIN_S + 7 * LINK_STEP_S + 8 * NETWORK_STEP_S)
    assert over_cp(two, "ulysses", 16).messages.latency_s == pytest.approx(far)
    assert over_cp(run, "gather", 8).messages.latency_s == pytest.approx(3 * (BEGIN_S + 7 * LINK_STEP_S))


def test_across_nodes_a_ring_has_one_card_and_ulysses_the_cards_of_all():
    """Each of 16 hops waits for the one that leaves the node; 8 of 15 pieces leave it, from each GPU."""
    run = run_of(8, gpus=16)
    hop = 2 * 2 * 131_072 / 16 * H / 4
    ring, swap = (over_cp(run, way, 16).messages for way in ("ring", "ulysses"))
    assert ring.seconds - ring.latency_s == pytest.approx(3 * 15 * hop / (0.6 * 50e9))
    pieces = 4 * 2 * 131_072 / 16 * H * (1 + 16 / 32) / 16
    assert swap.seconds - swap.latency_s == pytest.approx(8 * pieces / 2 * 2 / (0.9 * 50e9))


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_heads", "n"), [(32, 4), (8, 4), (8, 16)])
def test_what_attention_keeps(kv_heads, n):
    """In units of a rank's queries: queries, keys, values, result. All else of a block is the same."""
    g, copies = kv_heads / HEADS, max(1, n / kv_heads)
    unit = 2 * 131_072 / n * H
    run, kept = run_of(kv_heads), run_of(kv_heads, keeps_gathered=True)

    def more(training, way, how="none"):
        ours, plain = (block_kept_bytes(training, 1, n, 1, False, how, 1, one) for one in (way, "ring"))
        return (ours - plain) / unit

    a_ring, gathered, swapped = 2 + 2 * g, 2 + 2 * g * n, 3 + 2 * g * copies
    assert more(run, "gather") == 0
    assert more(kept, "gather") == pytest.approx(gathered - a_ring)
    assert more(run, "ulysses") == pytest.approx(swapped - a_ring)
    assert more(kept, "gather", "ops") == pytest.approx(g * (n - 1)), "torchtitan's keeps values alone"
    assert more(kept, "gather", "full") == more(run, "ulysses", "full") == 0
    alone = block_kept_bytes(run, 1, 1, 1, False, "none", 1, "ulysses")
    assert block_kept_bytes(run, 1, n, 1, False, "none", 1, "ring") == pytest.approx(alone / n)


def test_a_rank_holds_what_its_blocks_keep():
    run = run_of(8, keeps_gathered=True)
    held = {way: memory_bytes(run, Layout4D(1, 8, 1, 1, attention=way)) for way in ATTENTION}
    unit = 2 * 131_072 / 8 * H
    blocks = run.model.num_layers
    assert held["gather"].activations - held["ring"].activations == pytest.approx(blocks * 2 / 4 * 7 * unit)
    assert held["ulysses"].activations - held["ring"].activations == pytest.approx(blocks * unit)
    one_in_2 = memory_bytes(run, Layout4D(1, 8, 1, 1, recompute="full", every=2, attention="ulysses"))
    plain = memory_bytes(run, Layout4D(1, 8, 1, 1, recompute="full", every=2, attention="ring"))
    assert one_in_2.activations - plain.activations == pytest.approx((blocks / 2 + 1) * unit)


# ---- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stack", "own"), [("megatron", "ring"), ("llama3", "gather"), ("torchtitan", "gather")])
def test_without_a_way_it_is_that_of_the_software(stack, own):
    run = run_of(8, stack=stack)
    layout = Layout4D(1, 8, 1, 1)
    seconds = {way: step_s(run, layout._replace(attention=way)) for way in ATTENTION}
    assert step_s(run, layout) == seconds[own]
    assert len({found.cp for found in seconds.values()}) == 3, "each has its own seconds"


def test_ulysses_needs_heads_for_all():
    run = run_of(8, context=1_048_576, gpus=256)
    for tp, cp, can in ((1, 32, True), (1, 64, False), (8, 4, True), (8, 8, False), (2, 16, True), (4, 2, True)):
        layout = Layout4D(tp, cp, 1, 256 // tp // cp, sequence_parallel=tp > 1, attention="ulysses")
        why = refusal(run, layout)
        assert (why is None) == can, (tp, cp, why)
        assert refusal(run, layout._replace(attention="ring")) is None
    assert refusal(run, Layout4D(8, 8, 1, 4, sequence_parallel=True, attention="ulysses")) == (
        "4 heads of a tensor-parallel rank, 1 of keys and values, cannot be shared by 8 ranks of Ulysses: choose cp "
        "2 or 4, or a ring."
    )
    alone = refusal(run, Layout4D(1, 1, 1, 256, attention="gather"))
    assert alone == "There are no ranks over which attention goes by gather: choose cp 2 or more."


def test_a_search_has_one_way(capsys):
    run = run_of(8, context=65_536, gpus=64)
    for way in ATTENTION:
        for planned in best_layouts(run, replace(usual_choices("megatron-lm"), attention=way), 10):
            assert planned.layout.attention == (way if planned.layout.cp > 1 else "")
            assert refusal(run, planned.layout) is None
    ask = "--model llama3-8b --gpus 8 --seq 131072"
    for options, words in (
        ("--attention ring", "cp 8 ring ·"),
        ("--attention ulysses --stack aleph-alpha", "tokens each, tokens exchanged for heads"),
        ("--attention gather --cp 8", "tokens each, keys and values gathered"),
        ("--cp 8", "tokens each, keys and values passed around a ring"),
        ("--attention ulysses --cp 8", "cp: queries, keys, values, results"),
    ):
        main(f"{ask} {options}".split())
        assert words in capsys.readouterr().out, options
    for options in (
        "--attention ring --no-context-parallel",
        "--attention ring --seq 2048",
        "--attention ring --tp 8",
    ):
        with pytest.raises(SystemExit):
            main(f"{ask} {options}".split())
    assert "leave it out" in capsys.readouterr().err


def test_no_way_is_shorter_than_its_parts():
    """On random wires: what hides is at most the attention; more wire is never slower; a longer step has a reason."""
    rng, hides = random.Random(3), 0
    for _ in range(400):
        n, tp, kv = rng.choice((2, 4, 8, 16)), rng.choice((1, 2, 8)), rng.choice((8, 32))
        run = run_of(
            kv, rng.choice((8192, 32_768, 131_072)), n * tp, rng.choice(list(STACKS)), exposed_cp=rng.random()
        )
        speeds = {name: getattr(GPUS["h100"], name) * 2 ** rng.uniform(-8, 2) for name in ("link_Bps", "network_Bps")}
        run = replace(run, cluster=Cluster(replace(GPUS["h100"], **speeds), n * tp, rng.choice((1, 4, 8))))
        layout = Layout4D(tp, n, 1, 1, attention=rng.choice(ATTENTION), recompute=rng.choice(("none", "full", "mlp")))
        seconds, waits = step_and_waits(run, layout)
        wait = waits["cp"]
        assert 0 <= wait.hidden_s <= min(wait.beside_s * (1 + 1e-9), seconds.attention)
        assert seconds.cp + wait.hidden_s == pytest.approx(wait.messages.seconds)
        hides += wait.hidden_s > 0 < wait.exposed_s
        for name, speed in speeds.items():
            faster = replace(
                run, cluster=replace(run.cluster, device=replace(run.cluster.device, **{name: 2 * speed}))
            )
            assert step_s(faster, layout).total <= seconds.total * (1 + 1e-9)
    assert hides > 40


def test_the_report_says_what_is_sent():
    run = run_of(8)
    for way, what in (("ulysses", "cp: queries, keys, values, results"), ("ring", "cp: keys and values")):
        sends = report_of_layout(run, Layout4D(1, 8, 1, 1, attention=way)).sends
        assert what in [sent["what"] for sent in sends]
