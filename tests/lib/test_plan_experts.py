"""A run of a model with experts: what a rank sends and holds, predicted for even routing, and then measured."""

import dataclasses
import sys

import cloudpickle
import pytest
import torch

from lib import run
from lib.cost.experts import ExpertShape, dispatch_bytes
from lib.cost.hardware import GPUS
from lib.cost.sizes import RECIPES, ModelShape
from lib.expert_parallel.dispatch import Dispatch
from lib.layout import Layout
from lib.moe import Router, Routing
from lib.planner import Plan, step_traffic
from lib.planner.experts import ExpertLayout, ExpertTraining, exchanged_bytes, rank_bytes
from lib.planner.peak import optimizer_bytes, parameter_bytes
from lib.planner.plan_messages import bytes_out_of_a_node
from lib.planner.plan_report import report_of_plan
from lib.planner.training import Cluster, Training, stack_for
from tests.lib.test_plan import LLAMA, SMALL, TINY, differences, on_meshes, wrong_peaks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

EXPERTS = dataclasses.replace(TINY, num_layers=3, experts=4, d_expert=8)
FULL = dataclasses.replace(EXPERTS, d_shared=8, balance=0.01, balance_over="sequence", bias_rate=0.1)
OF_LLAMA = dataclasses.replace(FULL, **LLAMA)


def in_turn(router, x):
    """One expert after the other, so that loads are even; scores and gates are those of the router."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = torch.nn.functional.linear(x.to(wide), router.weight.to(wide)).softmax(-1)
    rows = torch.arange(x[..., 0].numel() * router.top_k, device=x.device)
    chosen = (rows % scores.shape[-1]).view(*x.shape[:-1], router.top_k)
    gates = scores.gather(-1, chosen)
    return Routing(scores, chosen, gates / gates.sum(-1, keepdim=True) if router.renormalise else gates)


def evenly(*of_step):
    Router.forward = in_turn
    return on_meshes(*of_step)


# ---- what is sent ---------------------------------------------------------------------------------------------------

OF_TWO = [Layout(2, ep=2, microbatches=2, zero=zero) for zero in range(4)]
OF_TWO += [Layout(2, zero=3), Layout(2), Layout(2, ep=2, recompute="full"), Layout(cp=2, ep=2, recompute="selective")]
OF_TWO += [Layout(1, 2, microbatches=2), Layout(1, tp=2, recompute="full")]
OF_TWO += [Layout(1, tp=2, sequence_parallel=True, recompute="full", zero=1)]
OF_FOUR = [Layout(4, ep=2, zero=zero) for zero in range(4)]
OF_FOUR += [Layout(2, cp=2, ep=4), Layout(2, cp=2, ep=2, order="cp,dp,pp,tp", zero=1, attention="ring")]
OF_FOUR += [Layout(2, tp=2, ep=2, sequence_parallel=sp, recompute=how) for sp in (0, 1) for how in ("none", "full")]
OF_FOUR += [Layout(2, 2, ep=2, microbatches=4, zero=zero) for zero in (0, 2)]
OF_FOUR += [Layout(2, 2, ep=2, microbatches=2, schedule="zb-h1")]
OF_FOUR += [Layout(1, 2, tp=2, microbatches=2, sequence_parallel=True)]


@pytest.mark.thorough("each kind of model on two and on four ranks", keep=1)
@pytest.mark.slow("ranks on two cores take a step in each of many layouts")
@pytest.mark.parametrize(
    "model", [FULL, EXPERTS, OF_LLAMA, dataclasses.replace(EXPERTS, expert_every=2, balance=0.1)]
)
@pytest.mark.parametrize("cells", [OF_TWO, OF_FOUR])
def test_a_step_sends_what_its_plan_says(cells, model):
    fits = [one for one in cells if not (model.balance and model.balance_over == "batch" and one.microbatches > 1)]
    assert not differences(fits, model, on=evenly)


def test_experts_that_ranks_cannot_share_evenly_and_those_that_are_full():
    """The first of two ranks has three experts of five; with half the capacity of the group, all room too."""
    uneven = dataclasses.replace(EXPERTS, experts=5, context=10)
    assert not differences([Layout(2, ep=2), Layout(2, ep=2, zero=1, recompute="full")], uneven, on=evenly)
    full = dataclasses.replace(uneven, capacity_factor=0.5)
    assert not differences([Layout(2, ep=2, capacity_over=over) for over in ("rank", "group")], full, on=evenly)


def real_rows(world, layout, model):
    """Of each layer, how many rows a rank sent to each, and the traffic of the step."""
    tables, there = [], Dispatch.there

    def noted(dispatch, rows):
        tables.append(dispatch.rows[dispatch.group.rank])
        return there(dispatch, rows)

    Dispatch.there = noted
    (traffic,) = on_meshes(world, [layout], model, 1, "first step", None)
    return tables, traffic["all_to_all_rows", "ep"]


def test_all_rows_of_real_routing_are_as_many_as_planned():
    """Some stay on their rank, and more or fewer travel than with even routing; the sum is k for each token."""
    layout = Layout(4, ep=2)
    of_ranks = run(real_rows, 4, layout, EXPERTS)
    plan = Plan(EXPERTS, layout, 4)
    mixture, row_bytes = plan.mixture, EXPERTS.d_model * 4
    even = 2 * sum(mixture.rows_to(plan.rows, i, j) for i in range(2) for j in range(2))  # of two groups
    for layer in range(EXPERTS.num_layers):
        assert sum(sum(tables[layer]) for tables, _ in of_ranks) == even == 2 * 4 * EXPERTS.context
    for rank, (_, (calls, sent)) in enumerate(of_ranks):
        group = of_ranks[rank // 2 * 2 : rank // 2 * 2 + 2]
        away = [group[rank % 2][0][layer][1 - rank % 2] for layer in range(EXPERTS.num_layers)]
        home = [group[1 - rank % 2][0][layer][rank % 2] for layer in range(EXPERTS.num_layers)]
        assert sent == 2 * row_bytes * (sum(away) + sum(home))
        assert calls == step_traffic(plan, 0)["all_to_all_rows", "ep"][0]
    assert any(sent != step_traffic(plan, 0)["all_to_all_rows", "ep"][1] for _, (_, sent) in of_ranks)


# ---- what is held ---------------------------------------------------------------------------------------------------

HELD = dataclasses.replace(SMALL, num_layers=2, experts=4, d_expert=96, d_shared=64, expert_every=2)
HELD_OF_LLAMA = dataclasses.replace(
    HELD, **LLAMA, balance=0.01, balance_over="sequence", bias_rate=0.1, expert_every=1
)
PEAKS = {
    1: [Layout(), Layout(microbatches=2, zero=1)],
    2: [
        *(Layout(2, ep=2, zero=zero) for zero in range(3)),
        Layout(cp=2, ep=2),
        Layout(tp=2),
        Layout(tp=2, sequence_parallel=True),
        Layout(pp=2, microbatches=2),
        Layout(pp=2, microbatches=2, schedule="zb-h1"),
    ],
    4: [
        *(Layout(4, ep=2, zero=zero) for zero in range(3)),
        Layout(2, cp=2, ep=4),
        *(Layout(2, tp=2, ep=2, sequence_parallel=sliced, order="tp,dp,pp") for sliced in (False, True)),
        *(Layout(2, pp=2, ep=2, microbatches=4, zero=zero) for zero in (0, 2)),
    ],
}


@pytest.mark.thorough("a watched step looks at all tensors", keep=1)
@pytest.mark.slow("a watched step looks at all tensors after each operation")
@pytest.mark.parametrize("n", PEAKS)
@pytest.mark.parametrize("model", [HELD, HELD_OF_LLAMA])
def test_the_peak_of_a_step(n, model):
    assert not wrong_peaks(model, PEAKS[n], on=evenly)


@pytest.mark.thorough("a watched step looks at all tensors")
def test_the_peak_where_ranks_hold_and_compute_different_numbers():
    """The first of two ranks has three experts of five; or its rows fill the experts first."""
    uneven = dataclasses.replace(HELD_OF_LLAMA, experts=5, context=40, top_k=1, renormalise=False)
    assert not wrong_peaks(uneven, [Layout(2, ep=2, zero=1)], on=evenly)
    full = dataclasses.replace(HELD, capacity_factor=0.5)
    assert not wrong_peaks(full, [Layout(2, ep=2, capacity_over=over) for over in ("rank", "group")], on=evenly)


# ---- as the planner of models of any size counts ---------------------------------------------------------------------

SIZES = dataclasses.replace(HELD_OF_LLAMA, num_layers=4, expert_every=2, d_shared=32, bias_rate=0.0)
SHAPE = ExpertShape(ModelShape.of(SIZES), 4, 2, SIZES.d_expert, 32, dense=(0, 2))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_planner_has_the_same_states_of_experts_and_of_all_else(zero):
    stack = dataclasses.replace(stack_for("megatron", "h100"), recipe=RECIPES["fp32 Adam"])
    of = ExpertTraining(SHAPE, Training(SHAPE.base, Cluster(GPUS["h100"], 4, 8), stack, 4))
    planned = rank_bytes(of, ExpertLayout(tp=1, pp=1, dp=4, ep=2, zero=zero), 0)
    plan, ours = Plan(SIZES, Layout(4, ep=2, zero=zero), 4), {"experts": 0.0, "replicated": 0.0}
    for bucket in plan.buckets(0):
        of_gradient = bucket.shards if zero == 2 else 1  # parameters, gradients, and two moments, in float32
        kind = "experts" if bucket.axes == ("edp",) else "replicated"
        ours[kind] += 4 * bucket.size * (1 + 1 / of_gradient + 2 / bucket.shards)
    assert ours["experts"] == planned.experts and ours["replicated"] == pytest.approx(planned.replicated, rel=1e-4)
    states = parameter_bytes(plan, 0) + sum(optimizer_bytes(plan, 0, rank, 0) for rank in range(4)) / 4
    gradients = sum(4 * one.size / (one.shards if zero == 2 else 1) for one in plan.buckets(0))
    assert states + gradients == pytest.approx(planned.experts + planned.replicated, rel=1e-3)  # counts of steps


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_planner_sends_as_many_bytes_of_rows(recompute, tp):
    """Along tp it counts as Megatron-LM sends: each rank the rows of its shard. The library gathers shards first."""
    layout = Layout(4, tp=tp, ep=2, sequence_parallel=tp > 1, microbatches=2, recompute=recompute)
    plan = Plan(SIZES, layout, 8)
    sends, tokens = 6 if recompute == "full" else 4, plan.rows * SIZES.context
    of_layer = dispatch_bytes(SHAPE, tokens, 2, sends=sends, itemsize=4)
    calls, sent = step_traffic(plan, 0)["all_to_all_rows", "ep"]
    assert (calls, sent) == (sends * 2 * 2, 2 * 2 * of_layer)  # two layers, two microbatches
    of = ExpertTraining(
        SHAPE, Training(SHAPE.base, Cluster(GPUS["h100"], 4 * tp, 8), stack_for("megatron", "h100"), 8)
    )
    planned = exchanged_bytes(of, ExpertLayout(tp=tp, pp=1, dp=4, ep=2, recompute=recompute)).total
    assert sent / 4 == tp * 2 * planned / 2  # float32 instead of bfloat16, in two blocks


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_the_report_says_how_experts_are_shared_and_how_rows_are_counted():
    said = str(report_of_plan(Plan(dataclasses.replace(EXPERTS, experts=5), Layout(2, ep=2), 2), 8))
    assert (
        "ep 2: 3 (on the last ranks 2; the first are counted) of 5 experts of a block, 2 for each token; edp" in said
    )
    assert "rows of experts are counted for even routing; a hot expert makes its rank receive" in said
    assert "experts" not in str(report_of_plan(Plan(TINY, Layout(2), 2), 8))


def test_rows_leave_a_node_where_their_experts_are():
    """Neighbours share the experts: of two ranks on one node nothing leaves it, of four on two nodes two thirds do."""
    for ep, leaves in ((2, 0), (4, 2 / 3)):
        plan = Plan(EXPERTS, Layout(4, ep=ep), 4)
        sent = step_traffic(plan, 0)["all_to_all_rows", "ep"][1]
        assert bytes_out_of_a_node(plan, 2)["all_to_all_rows", "ep"] == pytest.approx(2 * sent * leaves)
