"""Mixtures as others bring them: own experts, frozen layers, half precision, loops of their own. Right, or refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lib.data_parallel.ddp import BucketedDDP
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.zero import ZeRO1
from lib.lab.certificate import ADAMW
from lib.launch import run
from lib.layout import Layout, nearest
from lib.losses import mean_loss
from lib.mesh import Mesh, MeshShape
from lib.model import GPT, GPTConfig
from lib.moe import ExpertOptions, Experts, MoE, Router, bias_change, update_biases
from lib.parallel import parallelize

CONFIG = GPTConfig(16, 8, 16, 2, 4, experts=4, d_expert=8)
BIASED = replace(CONFIG, bias_rate=0.001)


def on_ranks(world, config, layout, change=lambda model: None, dtype=None, half=False):
    """(the model, on these ranks; the same in one process)."""
    torch.manual_seed(0)
    model, alone = (GPT(config).to(torch.float32 if dtype or half else torch.float64) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    for one in (model, alone):
        change(one)
    mesh = Mesh(MeshShape(**layout.sizes), world)
    return parallelize(model, mesh, layout, ADAMW, dtype=dtype), alone


def batch(rows):
    tokens = torch.randint(16, (rows, 9), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def refused(call, *given):
    """What is said of it."""
    with pytest.raises(ValueError) as error:
        call(*given)
    return str(error.value)


# ---- biases ---------------------------------------------------------------------------------------------------------


def biases_of(world, zero, dtype):
    def high(model):
        for block in model.blocks:
            block.mlp.router.bias.data.fill_(0.9)

    ours, _ = on_ranks(world, BIASED, Layout(dp=2, ep=2, zero=zero), high, dtype, half=True)
    for _ in range(10):
        ours.step(*batch(4))
    return ours.full_state_dict().get("blocks.0.mlp.router.bias")


def test_biases_keep_their_precision_with_every_zero():
    for zero in (1, 3):
        bias = run(biases_of, 2, zero, torch.bfloat16)[0]
        steps = (bias - 0.9) / 0.001
        assert bias.dtype == torch.float32 and torch.allclose(steps, steps.round(), atol=1e-3) and steps.any()


def test_a_bias_in_half_precision_is_refused():
    model = GPT(BIASED).bfloat16()
    mean_loss(model(batch(2)[0]), batch(2)[1]).backward()
    assert "the bias of a router is in bfloat16, which rounds away steps of 0.001" in refused(update_biases, model)


@pytest.mark.parametrize("experts", [3, 49, 98, 99])
def test_even_loads_move_no_bias(experts):
    assert not bias_change(torch.full((experts,), 7.0, dtype=torch.float64), 0.1).any()
    assert not bias_change(torch.full((experts,), 7.0), 0.1).any()


def loop_of_ones_own(world):
    ours, _ = on_ranks(world, BIASED, Layout(dp=2, ep=2))
    same, _ = on_ranks(world, BIASED, Layout(dp=2, ep=2))
    ours.backward(*batch(4))
    ours.update(1.0)
    same.step(*batch(4), 1.0)
    a, b = ours.full_state_dict(), same.full_state_dict()
    return all(torch.equal(a[key], b[key]) for key in a), "blocks.0.mlp.router.bias" in a and any(
        a["blocks.0.mlp.router.bias"]
    )


def test_a_loop_of_ones_own_moves_biases():
    assert run(loop_of_ones_own, 2)[0] == (True, True)


def trained_head(world, layout):
    def freeze(model):
        model.embed.requires_grad_(False)
        model.blocks.requires_grad_(False)

    ours, _ = on_ranks(world, replace(BIASED, tied=False), layout, freeze)
    return ours.step(*batch(4)).item(), any(ours.full_state_dict().get("blocks.0.mlp.router.bias", ()))


def test_no_backward_reaches_a_frozen_router():
    losses = {run(trained_head, 2, layout)[0] for layout in (Layout(dp=2, ep=2), Layout(dp=2, ep=2, zero=3))}
    assert len({round(loss, 12) for loss, _ in losses}) == 1 and not any(moved for _, moved in losses)


# ---- what cannot be right -------------------------------------------------------------------------------------------


def layouts_that_do_not_fit(world):
    def said(config, layout):
        return refused(on_ranks, world, config, layout)

    summed = replace(CONFIG, balance=0.5)
    by_row = replace(summed, balance_over="sequence")
    two = Layout(dp=2, ep=2, microbatches=2)
    ours, _ = on_ranks(world, by_row, two)
    return [
        said(summed, two),
        said(GPTConfig(16, 8, 16, 2, 4), Layout(dp=2, ep=2)),
        said(replace(CONFIG, experts=1, top_k=1, renormalise=False), Layout(dp=2, ep=2)),
        said(replace(CONFIG, d_expert=9), Layout(tp=2)),
        said(CONFIG, Layout(dp=2, ep=2, capacity_over="group")),
        refused(ours.backward, *batch(6)),
        refused(ours.backward, *batch(3)),
    ]


def test_layouts_that_do_not_fit_the_experts_are_refused_by_parallelize():
    wanted = (
        "balance_over=batch compares the loads of all tokens of a step",
        "ep=2 ranks share experts, and experts=0",
        "experts=1 cannot be shared by ep=2",
        "d_expert=9 cannot be split over tp=2",
        "capacity_over=group is of a capacity, and there is none",
        "6 rows are not equally many on dp=2 x microbatches=2, and balance_over=sequence",
        "3 rows are too few for dp=2 x microbatches=2: use 4 or more",
    )
    for said, words in zip(run(layouts_that_do_not_fit, 2)[0], wanted, strict=True):
        assert words in said


def wrapped(world):
    sgd = partial(torch.optim.SGD, lr=0.1)
    wraps = (BucketedDDP, partial(ZeRO1, optimizer=sgd), partial(FSDP, optimizer=sgd))
    for options in ({"balance": 0.1}, {"bias_rate": 0.1}):
        said = {refused(wrap, GPT(replace(CONFIG, **options)), world) for wrap in wraps}
        assert len(said) == 1 and "balances loads over the tokens of all ranks" in said.pop()
    for wrap in wraps:
        wrap(GPT(CONFIG), world)
    return True


def test_wrappers_refuse_experts_that_are_balanced():
    assert all(run(wrapped, 2))


def test_options_are_checked_where_they_are_made():
    for options, words in (
        ({"experts": 4, "top_k": 1}, "the router gets no gradient"),
        ({"experts": 4, "top_k": 9}, "use at most as many"),
        ({"experts": 4, "balance": "0.1"}, "balance='0.1' must be a number"),
        ({"experts": 4, "renormalise": "no"}, "renormalise='no' must be True or False"),
        ({"experts": 4, "balance_over": "sequence"}, "is of a balance loss, and balance=0"),
    ):
        assert words in refused(partial(ExpertOptions, **options))
    assert "experts=0: use an MLP" in refused(MoE, ExpertOptions(), 16, 8, torch.relu)
    moe = MoE(ExpertOptions(experts=4, capacity_factor=1e308), 16, 8, torch.relu)
    assert moe(torch.randn(2, 3, 16)).shape == (2, 3, 16)
    assert "a mixture takes x[B, T, D], and got [3, 16]" in refused(moe, torch.randn(3, 16))


def test_the_nearest_layout_still_shares_experts():
    for wanted, ep in (({"dp": 4, "ep": 3}, 2), ({"dp": 4, "ep": 4}, 4)):
        assert nearest({"zero": 1} | wanted, CONFIG, 8).ep == ep
    assert nearest({"dp": 4, "ep": 4, "zero": 1}, replace(CONFIG, experts=2), 8).ep == 2


def test_autocast_leaves_the_router_in_full_precision():
    router = Router(ExpertOptions(experts=4), 16)
    torch.nn.init.normal_(router.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert router(torch.randn(1, 3, 16)).scores.dtype == torch.float32


# ---- parts of one's own ---------------------------------------------------------------------------------------------


class Twice(Experts):
    def forward(self, rows_RD, sizes):
        return 2 * super().forward(rows_RD, sizes)


class Named(MoE):
    pass


class Doubled(MoE):
    def computed(self, rows_RD, load_E):
        return 2 * super().computed(rows_RD, load_E)


def own_experts(model):
    model.blocks[0].mlp.experts.__class__ = Twice


def own_mixture(model):
    model.blocks[0].mlp.__class__ = Doubled


def own_name(model):
    model.blocks[0].mlp.__class__ = Named


def own_hook(model):
    model.blocks[0].mlp.register_forward_hook(lambda module, inputs, y: 2 * y)


def own_act(model):
    model.blocks[0].mlp.experts.act = partial(torch.softmax, dim=-1)


def one_for_two(model):
    model.blocks[1].mlp = model.blocks[0].mlp


def of_ones_own(world):
    """change → layout → how far from one process, or the sentence."""
    layouts = {"dp": Layout(dp=2), "ep": Layout(dp=2, ep=2), "tp": Layout(tp=2)}
    found = {}
    for change in (own_experts, own_mixture, own_name, own_hook, own_act, one_for_two):
        for name, layout in layouts.items():
            try:
                ours, alone = on_ranks(world, CONFIG, layout, change)
                found[change.__name__, name] = abs(
                    (ours.evaluate(*batch(4)) - mean_loss(alone(batch(4)[0]), batch(4)[1])).item()
                )
            except ValueError as error:
                found[change.__name__, name] = str(error)
    return found


def test_parts_of_ones_own_are_computed_or_refused():
    found = run(of_ones_own, 2)[0]
    refusals = {key: said for key, said in found.items() if isinstance(said, str)}
    lost = {(change, where) for change in ("own_experts", "own_mixture", "own_hook") for where in ("ep", "tp")}
    assert refusals.keys() == {*lost, ("own_act", "tp")}
    assert all("of your own, lost where ranks share or slice experts" in said for said in refusals.values())
    assert all(far < 1e-12 for key, far in found.items() if key not in refusals)
