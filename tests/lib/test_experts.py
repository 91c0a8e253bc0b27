"""Models with experts: parameters as published, memory and messages by hand, and the layouts that are refused."""

import json
import math
import re
from dataclasses import replace
from itertools import combinations

import pytest

from lib.cost.expert_models import EXPERT_MODELS
from lib.cost.experts import ExpertShape, attention_kept_bytes, dispatch_bytes, distinct_groups
from lib.cost.hardware import GPUS
from lib.cost.held import activation_bytes
from lib.cost.sizes import OPTIMIZERS, ModelShape, recipe_of_optimizer
from lib.planner.__main__ import main
from lib.planner.expert_report import report_of_experts
from lib.planner.experts import (
    ExpertLayout,
    ExpertTraining,
    exchanged_bytes,
    expert_refusal,
    layouts_by_ep,
    rank_bytes,
    rank_bytes_most,
    stage_blocks,
)
from lib.planner.training import Cluster, Training, stack_for

MIXTRAL, DEEPSEEK, QWEN = (EXPERT_MODELS[name] for name in ("mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"))
# Publishers' own counts in billions: Mistral AI 2023 (46.7, 12.9); mistral.ai, Mixtral 8x22B (141, 39); Qwen3 2025,
# table 2 (30.5, 3.3; 235, 22); gpt-oss model card 2025, table 1 (20.91, 3.61; 116.83, 5.13: without the token
# embedding); DeepSeek-V3 2024, abstract (671, 37); Kimi K2 2025, table 2 (1,040, 32.6; 1,026.4 is the count of
# transformers).
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "gpt-oss-20b": (20.91, 3.61),
    "gpt-oss-120b": (116.83, 5.13),
    "deepseek-v3": (671, 37),
    "kimi-k2": (1026.4, 32.6),
}


def run(shape=MIXTRAL, gpus=64, batch=1024, stack="megatron", per_node=8):
    training = Training(shape.base, Cluster(GPUS["h100"], gpus, per_node), stack_for(stack, "h100"), batch)
    return ExpertTraining(shape, training)


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_as_many_parameters_as_published(name):
    shape, (total, active) = EXPERT_MODELS[name], PUBLISHED[name]
    assert shape.num_parameters / 1e9 == pytest.approx(total, rel=5e-3)
    found = shape.num_active_parameters - (shape.end_parameters if "gpt-oss" in name else 0)
    assert found / 1e9 == pytest.approx(active, rel=0.02)  # published in two digits


def test_to_the_parameter():
    """As transformers counts them; of gpt-oss without 64 sinks in each of 24 blocks."""
    assert MIXTRAL.num_parameters == 46_702_792_704 and MIXTRAL.num_active_parameters == 12_879_925_248
    assert DEEPSEEK.num_parameters == 671_026_404_352
    assert EXPERT_MODELS["gpt-oss-20b"].num_parameters == 20_914_757_184 - 24 * 64


def test_one_expert_of_one_is_a_dense_model_with_a_router():
    base = ModelShape(
        64, 3, 4, 100, 32, num_kv_heads=2, d_mlp=96, gated=True, rms_norm=True, rotary=True, biases="none"
    )
    for tied in (True, False):
        one = ExpertShape(replace(base, tied=tied), 1, 1, 96)
        assert one.num_parameters == one.base.num_parameters + 3 * 64 == one.num_active_parameters


def test_stages_have_all_parameters_once():
    for pp in (1, 2, 3, 4, 16, 61):
        stages = stage_blocks(61, pp)
        assert [place for stage in stages for place in stage] == list(range(61)) and all(stages)
        assert sum(map(DEEPSEEK.routed_parameters, stages)) == DEEPSEEK.routed_parameters(DEEPSEEK.blocks)
        assert sum(map(DEEPSEEK.replicated_parameters, stages)) == DEEPSEEK.replicated_parameters(DEEPSEEK.blocks)
    assert [len(stage) for stage in stage_blocks(94, 4)] == [23, 24, 24, 23], "embedding and head count as blocks"
    assert [len(stage) for stage in stage_blocks(32, 4)] == [8] * 4
    assert DEEPSEEK.num_dense(range(2, 5)) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 9}, "9 experts per token of 8; use 1 to 8"),
        ({"dense": (32,)}, "block 32 is none of the 32 blocks; use places from 0 to 31"),
        ({"dense": tuple(range(32))}, "none of the 32 blocks has experts; count it as a dense model"),
        ({"base": replace(MIXTRAL.base, gated=False)}, "use a base with gated=True"),
    ],
)
def test_sizes_that_cannot_be(change, words):
    with pytest.raises(ValueError) as error:
        replace(MIXTRAL, **change)
    assert words in str(error.value)


# ---- activations and messages ---------------------------------------------------------------------------------------


def test_attention_keeps_as_much_as_in_a_dense_block():
    for tp in (1, 2, 4, 8):
        whole = activation_bytes(MIXTRAL.base, 1, tp=tp, sequence_parallel=tp > 1, fused_attention=True)
        mlp = 6 * MIXTRAL.base.mlp_width / tp
        assert attention_kept_bytes(MIXTRAL, tp) == pytest.approx(whole / MIXTRAL.base.context - mlp)


def test_a_choice_of_experts_is_in_so_many_groups():
    """By going through all choices; and the three of FACTS: 8 experts on 4 ranks, 256 on 64, on 8 nodes."""
    for experts, k, groups in ((8, 2, 4), (6, 3, 2), (12, 4, 3)):
        choices = list(combinations(range(experts), k))
        found = sum(len({one * groups // experts for one in choice}) for choice in choices) / len(choices)
        assert distinct_groups(experts, k, groups) == pytest.approx(found)
    assert [round(distinct_groups(*of), 3) for of in ((8, 2, 4), (256, 8, 64), (256, 8, 8))] == [1.857, 7.676, 5.295]
    with pytest.raises(ValueError, match="8 experts cannot be in 3 equal groups"):
        distinct_groups(8, 2, 3)


def test_bytes_of_the_all_to_alls():
    """An even exchange, copy by copy: each rank sends k copies of its tokens, 1/n of them to each rank."""
    n, tokens, k, width = 4, 48, MIXTRAL.top_k, MIXTRAL.base.d_model
    sent = sum(tokens * k / n * width * 2 for peer in range(n) if peer != 0)
    assert dispatch_bytes(MIXTRAL, tokens, n) == 4 * sent and dispatch_bytes(MIXTRAL, tokens, 1) == 0
    step = 1024 * 4096 / 64  # tokens of a rank
    inside = exchanged_bytes(run(), ExpertLayout(1, 1, 64, 8))
    assert inside == (4 * 2 * step * 4096 * 2 * 7 / 8, 0, 0)
    assert exchanged_bytes(run(), ExpertLayout(1, 1, 64, 8, recompute="full")).inside == 1.5 * inside.inside
    # Two ranks along tp share the tokens, and four of the eight ranks of a group are on a node.
    here, across, once = exchanged_bytes(run(), ExpertLayout(2, 1, 32, 8))
    assert here == pytest.approx(4 * 2 * step * 4096 * 2 * 3 / 8) and across == pytest.approx(here * 4 / 3)
    assert once == pytest.approx(across * distinct_groups(8, 2, 2) / 2)
    assert exchanged_bytes(run(), ExpertLayout(1, 1, 64, 1)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("gpus", "per_node", "ep"), [(64, 72, 64), (6, 8, 6), (144, 72, 48), (144, 72, 16), (96, 6, 4)]
)
def test_what_crosses_nodes_is_counted_rank_by_rank(gpus, per_node, ep):
    """Where a group does not begin with a node, too: the rank that sends most across, copy by copy."""
    shape = replace(MIXTRAL, num_experts=2 * ep, top_k=2)
    pairs, across, once = [*combinations(range(2 * ep), 2)], 0.0, 0.0
    for rank in range(gpus):
        first, home = rank // ep * ep, rank // per_node
        away = [peer for peer in range(first, first + ep) if peer // per_node != home]
        nodes = {
            (peer - first) * 2 + i: peer // per_node for peer in away for i in (0, 1)
        }  # of experts that are away
        met = sum(len({nodes[one] for one in pair if one in nodes}) for pair in pairs)
        if len(away) / ep > across:
            across, once = len(away) / ep, met / len(pairs) / 2
    copy = 4 * 2 * (gpus * 4096 / gpus) * 4096 * 2  # of a rank with one sequence, to itself as well
    found = exchanged_bytes(run(shape, gpus, gpus, per_node=per_node), ExpertLayout(1, 1, gpus, ep))
    assert found.total == pytest.approx(copy * (ep - 1) / ep)
    assert found.across == pytest.approx(copy * across) and found.across_once == pytest.approx(copy * once)
    assert (found.across == 0) == (gpus <= per_node)


# ---- memory, by hand ------------------------------------------------------------------------------------------------


def test_mixtral_on_64_gpus_by_hand():
    """NEMO's 4 + 10 bytes per parameter; dp 64, of which 8 share the experts, and 8 hold the same."""
    held = rank_bytes(run(), ExpertLayout(1, 1, 64, 8), 0)
    block = 4096 * (4096 + 1024 + 1024 + 4096) + 2 * 4096 + 8 * 4096
    rest = 32 * block + 2 * 32_000 * 4096 + 4096
    experts = 32 * 3 * 4096 * 14_336  # one of the eight
    assert held.replicated == pytest.approx(4 * rest + 10 * rest / 64)
    assert held.experts == pytest.approx(4 * experts + 10 * experts / 8)
    assert held.activations == 32 * 4096 * (8 * 4096 + 2 * (4096 + 2048) + 2 * 4096)
    assert held.routed == 32 * 4096 * 2 * (2 * 4096 + 6 * 14_336)
    assert held.logits == 14 * 4096 * 32_000 and held.gathered == 0
    assert held.total == pytest.approx(69.78e9, rel=1e-4)


def test_deepseek_in_a_pipeline_by_hand():
    """tp 2, pp 3, ep 4, two sequences: 20, 21 and 20 blocks; the first stage has the dense ones, and is the fullest."""
    layout = ExpertLayout(2, 3, 16, 4, 2)
    of = run(DEEPSEEK, 96, 512)
    first, middle, last = (rank_bytes(of, layout, place) for place in range(3))
    latent = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168 + 2 * 7168
    routers, shared, dense = 7168 * 256, 3 * 7168 * 2048, 3 * 7168 * 18_432
    expert = 3 * 7168 * 2048
    rest = (21 * (latent + routers + shared)) / 2
    assert middle.replicated == pytest.approx(4 * rest + 10 * rest / 16)
    assert middle.experts == pytest.approx((4 + 10 / 4) * 21 * 64 * expert / 2)
    rest = (20 * latent + 17 * (routers + shared) + 3 * dense + 129_280 * 7168) / 2
    assert first.replicated == pytest.approx(4 * rest + 10 * rest / 16)
    assert first.experts == pytest.approx((4 + 10 / 4) * 17 * 64 * expert / 2)
    tokens = 2 * 4096
    attention = (8 * 7168 + 4 * (1536 + 512) + 2 * 128 * (192 + 192 + 128 + 128)) / 2
    assert first.activations == pytest.approx(3 * tokens * (20 * attention + (17 * 2048 + 3 * 18_432) * 6 / 2))
    assert middle.activations == pytest.approx(2 * tokens * 21 * (attention + 2048 * 6 / 2))
    assert last.routed == pytest.approx(tokens * 20 * 8 * (2 * 7168 + 6 * 2048 / 2))
    assert last.logits == 14 * tokens * 129_280 / 2 and first.logits == middle.logits == 0
    assert rank_bytes_most(of, layout) == first


def test_recomputation_keeps_inputs_and_one_block():
    plain, full = (rank_bytes(run(), ExpertLayout(1, 1, 64, 8, recompute=how), 0) for how in ("none", "full"))
    assert full.routed == plain.routed / 32
    assert full.activations == pytest.approx(plain.activations / 32 + 32 * 4096 * 2 * 4096)
    first, second = (rank_bytes(run(), ExpertLayout(1, 2, 32, 8, recompute="full"), place) for place in (0, 1))
    assert first.activations - second.activations == 16 * 4096 * 2 * 4096, "a microbatch more in flight"
    dense_first = rank_bytes(run(DEEPSEEK, 64, 64), ExpertLayout(1, 61, 1, 1, zero=0, recompute="full"), 0)
    assert dense_first.routed == 0, "its one block is dense"


def test_zero_shards_experts_over_the_ranks_that_hold_them():
    """Stage by stage; with one copy of the experts, ZeRO divides nothing of them and gathers none."""
    few = {zero: rank_bytes(run(), ExpertLayout(1, 1, 64, 8, zero=zero), 0) for zero in range(4)}
    ratio = [few[zero].experts / few[0].experts for zero in range(4)]
    assert ratio == pytest.approx([1, (4 + 10 / 8) / 14, (2 + 12 / 8) / 14, 1 / 8])
    assert few[3].replicated == pytest.approx(few[0].replicated / 64)
    block = MIXTRAL.replicated_parameters(range(1))
    assert few[3].gathered == 2 * 4 * (block + 3 * 4096 * 14_336)
    alone = rank_bytes(run(gpus=8), ExpertLayout(1, 1, 8, 8, zero=3), 0)
    assert alone.gathered == 4 * 32_000 * 4096 > 2 * 4 * block, "the head is larger than two blocks without experts"
    assert alone.experts == few[0].experts


def test_a_stack_counts_for_experts_as_for_a_dense_model():
    """Gradients that stay whole in 32 bit until the last microbatch, and a vocabulary that tp does not cut."""
    at, of = ExpertLayout(1, 1, 64, 8, zero=3), stack_for("kempner-forge", "h100")
    each, others = of.recipe.bytes_per_parameter, of.recipe.bytes_per_parameter - of.recipe.gradient_bytes
    few = {batch: rank_bytes(run(batch=batch, stack="kempner-forge"), at, 0) for batch in (64, 128)}
    experts = MIXTRAL.routed_parameters(MIXTRAL.blocks)
    rest, words = MIXTRAL.num_parameters - experts, 32_000 * 4096
    assert few[64].replicated == pytest.approx(rest * each / 64), "one microbatch: in shards"
    assert few[128].replicated == pytest.approx(rest * (others / 64 + 4))
    assert few[128].experts == pytest.approx(experts / 8 * (others / 8 + 4))
    along_tp = rank_bytes(run(stack="kempner-forge"), ExpertLayout(8, 1, 8, 8, zero=0), 0)
    assert along_tp.logits == of.logits_bytes * 4096 * 32_000
    assert along_tp.replicated == pytest.approx(each * ((rest - words) / 8 + words)), "the embedding is whole"


@pytest.mark.parametrize("optimizer", ["muon", "adam-8bit"])
def test_an_optimizer_keeps_other_states_of_embedding_and_head(optimizer):
    of = run(gpus=8)
    recipe = recipe_of_optimizer(of.training.stack.recipe, optimizer)
    training = replace(of.training, optimizer=optimizer, stack=replace(of.training.stack, recipe=recipe))
    held = rank_bytes(replace(of, training=training), ExpertLayout(1, 1, 8, 8, zero=0), 0)
    block, embedding, head = OPTIMIZERS[optimizer]
    words = 32_000 * 4096
    rest = MIXTRAL.num_parameters - MIXTRAL.routed_parameters(MIXTRAL.blocks)
    more = (embedding - block + head - block) * words
    assert held.replicated == pytest.approx(rest * recipe.bytes_per_parameter + more) and more > 0


def test_all_ranks_together_hold_the_model_once():
    for layout in (
        ExpertLayout(1, 2, 4, 4, zero=0),
        ExpertLayout(2, 2, 2, 2, zero=0),
        ExpertLayout(1, 4, 2, 1, zero=0),
    ):
        of = run(QWEN, layout.tp * layout.pp * layout.dp)
        states = [rank_bytes(of, layout, place) for place in range(layout.pp)]
        held = layout.tp * sum(one.replicated + layout.ep * one.experts for one in states)
        assert held == pytest.approx(14 * QWEN.num_parameters, rel=1e-9)


# ---- layouts and answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_gb", [10, 12, 14, 16, 28, 34, 42, 50, 60, 80])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_for_each_ep_the_least_cut_layout_that_fits(memory_gb, recompute):
    """With recomputation and 151,936 logits a pipeline holds less than tensor parallelism does."""
    shape = MIXTRAL if recompute == "none" else QWEN
    card = replace(GPUS["h100"], memory_bytes=memory_gb * 1e9)
    of = ExpertTraining(shape, replace(run(shape).training, cluster=Cluster(card, 64)))
    found = layouts_by_ep(of, 1, None, recompute)
    assert [one.ep for one in found] == [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= shape.num_experts]
    for one in found:
        held = {
            (tp * pp, pp): rank_bytes_most(of, other).total
            for tp in (1, 2, 4, 8)
            for pp in (1, 2, 4, 8, 16, 32, 64)
            for dp in [64 // (tp * pp)]
            if dp
            and (other := ExpertLayout(tp, pp, dp, one.ep, 1, int(dp > 1), recompute))
            and expert_refusal(of, other) is None
        }
        fitting = [cut for cut, n in held.items() if n <= of.training.room_bytes]
        easy = [cut for cut in fitting if held[cut] <= 0.9 * of.training.room_bytes]
        least = min(held, key=held.get)
        assert (one.tp * one.pp, one.pp) == min(easy or fitting, default=least)
    small = layouts_by_ep(run(gpus=8), 1, None, "none")
    assert (small[0].tp, small[0].ep) == (8, 1), "nothing fits, and this is the smallest"


REFUSED = {
    "--model mixtral-8x7b --gpus 64 --fp8": "--fp8 is not modelled for a model with experts: leave it out",
    "--model mixtral-8x7b --gpus 64 --lora 16": "--lora is not modelled for a model with experts",
    "--model mixtral-8x7b --gpus 64 --offload optimizer": "--offload is not modelled for a model with experts",
    "--model mixtral-8x7b --gpus 64 --ep 3": "8 experts and dp 64 do not both divide by ep 3: choose ep 1, 2, 4 or 8.",
    "--model mixtral-8x7b --gpus 64 --ep 16": "choose ep 1, 2, 4 or 8.",
    "--model mixtral-8x7b --gpus 64 --tp 16": "Heads and experts cannot be shared by 16 ranks of a node along tp",
    "--model qwen3-30b-a3b --gpus 64 --pp 64": "48 blocks do not fill 64 stages: choose pp 48 or less.",
    "--model mixtral-8x7b --gpus 64 --pp 3": "64 GPUs do not divide by tp × pp = 3",
    "--model mixtral-8x7b --gpus 64 --dp 8": "tp × pp × dp = 8, and there are 64 GPUs: choose dp 64.",
    "--model mixtral-8x7b --gpus 64 --ep 8 --batch 96": "do not divide among dp 64: choose a batch of 128.",
    "--model mixtral-8x7b --gpus 64 --batch 96 --tp 2 --microbatch 2": "of a data-parallel rank do not divide by 2",
    "--model mixtral-8x7b --gpus 64 --zero 3 --pp 2": "ZeRO-3 is planned without pipeline parallelism: choose pp 1",
    "--model mixtral-8x7b --gpus 8 --tp 8 --zero 1": "there is one: choose ZeRO stage 0, or 16 GPUs.",
    "--model mixtral-8x7b --gpus 64 --ep 8 --recompute selective": "Recomputation selective is not counted",
    "--model mixtral-8x7b --gpus 64 --stack megatron-2021": "this stack keeps the scores: choose the stack megatron",
    "--model mixtral-8x7b --gpus 64 --cp 2": "cp 2 is not counted with experts",
    "--model mixtral-8x7b --gpus 64 --schedule zb-v": "schedule zb-v is not counted with experts",
    "--model mixtral-8x7b --gpus 64 --zero-bubble": "leave out wider choices",
    "--model mixtral-8x7b --gpus 64 --heads 8": "--heads cannot be changed in a model with experts",
    "--model mixtral-8x7b --gpus 64 --tokens 1T": "--tokens needs seconds, and a model with experts has no "
    "seconds: with the active parameters as a dense model",
    "--model mixtral-8x7b --gpus 64 --sweep gpus": "--sweep needs seconds, and a model with experts has no seconds",
    "--model mixtral-8x7b --gpus 64 --price 2": "--price needs seconds, and a model with experts has no seconds",
    "--model mixtral-8x7b": "give --gpus, the number of all GPUs",
    "--model llama-70b --gpus 64 --ep 2": "--ep 2 divides experts, and this model has none: leave it out",
}


@pytest.mark.parametrize("question", REFUSED)
def test_refused_in_a_sentence(question, capsys):
    with pytest.raises(SystemExit) as end:
        main(question.split())
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and REFUSED[question] in said


def answer(question, capsys):
    main(question.split())
    return capsys.readouterr().out


def test_the_command_answers_by_memory_and_says_why_no_seconds(capsys):
    said = answer("--model mistralai/Mixtral-8x7B --gpus 64", capsys)
    assert "46.7 billion parameters, 12.88 billion active for a token (12.75 without" in said
    assert "8     8   1   1  64       36.3            33.5      69.8  87%  fits       3.758   0.000" in said
    assert "no seconds: with the active parameters as a dense model" in said and "s per step" not in said
    one = answer("--model mixtral-8x7b --gpus 64 --ep 8", capsys)
    assert (
        "0-63       32        6.67    29.60         6.98   24.70    1.84  69.78" in one
        and "fits: 69.8 of 80.0" in one
    )
    share = "of 46 published layouts planned at 80 to 90% of the memory (A100), 30 ran: 65%"
    assert f"ep 8: {share}" in said and f"GB\n{share}" in one and "the error of the memory is unknown" in said
    assert "inside a node                                                   3.758           120.26" in one
    assert said.partition("for each ep")[2] == one.partition("for each ep")[2]
    assert max(map(len, one.splitlines())) <= 100
    longer = answer("--model mixtral-8x7b --gpus 64 --ep 8 --seq 8192 --zero 3 --microbatch 2", capsys)
    assert "sequences of 8192 tokens" in longer and "microbatches of 2, zero 3" in longer.replace("\n  ", " ")


def test_a_verdict_of_three_values(capsys):
    """73.4 of 80 GB are tight. A headroom that is given counts: of no headroom no layout is tight."""
    question = "--model mixtral-8x7b --gpus 64 --tp 2 --ep 2"
    tight = answer(question, capsys)
    assert "GB; tight: 73.4 of 80.0 GB\nof 31 published layouts planned at 90 to 100% of" in tight
    assert "GB; fits: 73.4 of 80.0 GB" in answer(f"{question} --headroom 0", capsys)
    table = answer("--model mixtral-8x7b --gpus 8 --memory 100GB", capsys).partition("GB sent")[2]
    assert re.findall(r" (fits|tight|does not fit) ", table) == ["fits", "tight", "does not fit", "does not fit"]
    assert "ep 1: of 46 published" in table and "ep 4, 8: of 399 published" in table
    plain = json.loads(answer(f"{question} --json --headroom 0", capsys))
    assert {row["verdict"] for row in plain["by_ep"]} == {"fits"} and plain["headroom"] == 0


def test_plain_data_has_the_same_numbers(capsys):
    plain = json.loads(answer("--model deepseek-v3 --gpus 256 --pp 4 --ep 64 --json --batch 512", capsys))
    of = run(DEEPSEEK, 256, 512)
    report = report_of_experts(of, {"pp": 4, "ep": 64})
    assert plain["asked"] == ExpertLayout(1, 4, 64, 64)._asdict()
    assert [place["held"]["total"] for place in plain["places"]] == [
        rank_bytes(of, report.asked, place).total for place in range(4)
    ]
    assert [place["with_experts"] for place in plain["places"]] == [12, 15, 15, 16]
    assert plain["no_seconds"].startswith("no seconds") and math.isclose(plain["room_bytes"], 80e9)
