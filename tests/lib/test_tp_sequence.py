"""Chance on several ranks, gradients that are terms of a sum, and slices of a sequence."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lib import comm, run, trace
from lib.data_parallel.bucketed_gradients import Gradients
from lib.mesh import Mesh, MeshShape
from lib.model import GPT, GPTConfig, mean_loss
from lib.parallel import facts_of
from lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from lib.tensor_parallel.sequence import (
    ShardedDropout,
    dropout,
    each_rank_its_own,
    mark_partial,
    slice_of_rank,
)
from tests.lib.sharding import InParts

CONFIG = GPTConfig(vocab_size=24, context=12, d_model=24, num_layers=2, num_heads=12, dropout=0.2)


def test_each_rank_draws_its_own_and_then_goes_on_like_the_others():
    def draws(world):
        torch.manual_seed(0)
        before = torch.rand(3)
        with each_rank_its_own(world):
            inside = torch.rand(3)
        with each_rank_its_own(world):
            again = torch.rand(3)
        return before, inside, again, torch.rand(3)

    first, second = run(draws, 2)
    assert torch.equal(first[0], second[0]) and torch.equal(first[3], second[3])
    assert not torch.equal(first[1], second[1]) and not torch.equal(first[2], second[2])
    assert not torch.equal(first[1], first[2]), "and not the same twice"


def test_recompute_draws_the_same_again():
    def works(world):
        torch.manual_seed(0)
        drop = ShardedDropout(0.5, world)
        x = torch.ones(1000).requires_grad_()
        y = checkpoint(lambda x: drop(x) * 2, x, use_reentrant=False)
        y.sum().backward()
        return torch.equal(x.grad, y.detach()), y.detach()

    (same, first), (same_too, second) = run(works, 2)
    assert same and same_too and not torch.equal(first, second)


@pytest.mark.parametrize(("sequence_parallel", "kind"), [(False, nn.Dropout), (True, ShardedDropout)])
def test_dropout_of_what_is_whole_and_of_slices(sequence_parallel, kind):
    def works(world):
        torch.manual_seed(0)
        drop = dropout(0.25, world, sequence_parallel)
        y = drop(torch.ones(10_000))
        state = torch.get_rng_state()
        drop.eval()(y)
        return type(drop), y, torch.equal(state, torch.get_rng_state())

    (first_kind, first, quiet), (_, second, _) = run(works, 2)
    assert first_kind is kind and quiet, "without dropout nothing is drawn"
    assert torch.equal(first, second) is not sequence_parallel
    for y in (first, second):
        zeros = (y == 0).float().mean()
        assert zeros == pytest.approx(0.25, abs=0.02) and y.unique().tolist() == [0, pytest.approx(4 / 3)]
    if sequence_parallel:
        both = ((first == 0) & (second == 0)).float().mean()
        assert both == pytest.approx(0.25**2, abs=0.02), "and the two are independent"


def losses_with_dropout(world, sequence_parallel, recompute="none", repeats=1):
    torch.manual_seed(0)
    model = InParts(GPT(CONFIG).double(), world, sequence_parallel, recompute)
    x, y = torch.randint(24, (2, 2, 12), generator=torch.Generator().manual_seed(5))
    out = []
    for seed in range(repeats):
        torch.manual_seed(seed)
        loss = model.loss(model(x), y)
        out.append(loss.item())
    loss.backward()
    model.finish()
    return out, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_with_dropout_recomputing_changes_nothing(sequence_parallel, recompute):
    def works(world):
        once = losses_with_dropout(world, sequence_parallel)
        again = losses_with_dropout(world, sequence_parallel, recompute)
        return once[0] == again[0] and all(torch.equal(once[1][name], g) for name, g in again[1].items())

    assert run(works, 2) == [True, True]


def test_replicas_stay_equal_under_dropout():
    """What is whole on each rank has the same gradient on each: masks agree where they must."""

    def works(world):
        out = []
        for sequence_parallel in (False, True):
            _, gradients = losses_with_dropout(world, sequence_parallel)
            named = sorted(
                (name, g.flatten()) for name, g in gradients.items() if "norm" in name or "position" in name
            )
            whole = torch.cat([g for _, g in named])
            all_of_them = comm.all_gather(whole[None], world)
            out.append((all_of_them - all_of_them[0]).abs().max().item())
        return out

    assert run(works, 3) == [[0.0, 0.0]] * 3


@pytest.mark.thorough("many masks")
def test_the_mean_over_many_masks_is_the_serial_one():
    """Statistically: 60 losses under dropout have the serial model's mean, within what chance allows."""

    def serial():
        torch.manual_seed(0)
        model = GPT(CONFIG).double()
        x, y = torch.randint(24, (2, 2, 12), generator=torch.Generator().manual_seed(5))
        out = []
        with torch.no_grad():
            for seed in range(60):
                torch.manual_seed(seed)
                out.append(mean_loss(model(x), y).item())
        return torch.tensor(out)

    wanted = serial()
    for sequence_parallel in (False, True):
        got = torch.tensor(run(losses_with_dropout, 2, sequence_parallel, "none", 60)[0][0])
        error = (wanted.var() / len(wanted) + got.var() / len(got)).sqrt()
        assert abs(got.mean() - wanted.mean()) < 4 * error
        assert 0.7 < got.std() / wanted.std() < 1.4


def replicated(serial, group, sequence_parallel):
    module = copy.deepcopy(serial)
    comm.broadcast_coalesced(module.parameters(), group)
    if sequence_parallel:
        mark_partial(module)
    return module


def sum_partial_gradients(module, world):
    Gradients(facts_of(module, Mesh(MeshShape(tp=world.size), world))).finish()


# ---- gradients that are terms ---------------------------------------------------------------------------------------


def test_a_norm_in_slices_has_a_term_of_its_gradient():
    def works(world):
        torch.manual_seed(world.rank)
        serial = nn.LayerNorm(6).double()
        nn.init.normal_(serial.weight)
        norm = replicated(serial, world, sequence_parallel=True)
        whole = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(1)).double()
        norm(whole[:, slice_of_rank(12, world)]).square().sum().backward()
        own = norm.weight.grad.clone()
        with trace.record(world.rank) as seen:
            sum_partial_gradients(nn.Sequential(norm, nn.Linear(2, 2)), world)
        twin = nn.LayerNorm(6).double()
        twin.weight.data.copy_(comm.broadcast(serial.weight.detach(), world))
        twin(whole).square().sum().backward()
        torch.testing.assert_close(norm.weight.grad, twin.weight.grad, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(norm.bias.grad, twin.bias.grad, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(norm.weight, twin.weight)
        return (own - twin.weight.grad).norm() / twin.weight.grad.norm(), len(seen.events)

    for apart, calls in run(works, 3):
        assert apart > 0.1 and calls == 1, "one message for all of them"


def test_a_module_that_took_no_part_counts_as_zero():
    def works(world):
        norm = replicated(nn.LayerNorm(2), world, sequence_parallel=True)
        frozen = replicated(nn.LayerNorm(2).requires_grad_(False), world, sequence_parallel=True)
        if world.rank == 1:
            norm(torch.ones(1, 2)).sum().backward()
        sum_partial_gradients(nn.Sequential(norm, frozen), world)
        return norm.bias.grad.tolist(), frozen.weight.grad

    assert run(works, 2) == [([1.0, 1.0], None)] * 2


def test_without_slices_nothing_is_sent():
    def works(world):
        norm = replicated(nn.LayerNorm(2), world, sequence_parallel=False)
        with trace.record(world.rank) as seen:
            sum_partial_gradients(norm, world)
        return len(seen.events)

    assert run(works, 2) == [0, 0]


def test_slices():
    def works(world):
        try:
            slice_of_rank(10, world)
        except ValueError as error:
            return slice_of_rank(12, world), str(error)

    (first, message), (second, _), *_ = run(works, 4)
    assert (first, second) == (slice(0, 3), slice(3, 6))
    assert message == "sequence=10 cannot be split over world=4; use a multiple of 4, such as 12"


class ByHand(nn.Module):
    """A pair between which the sequence is sharded, with a norm before it."""

    def __init__(self, world):
        super().__init__()
        self.norm, self.ends = nn.Sequential(nn.Identity(), nn.LayerNorm(6)), nn.Linear(6, 6)
        self.pair = nn.Sequential(
            ColumnParallelLinear(6, 12, world, sequence_dim=1), RowParallelLinear(12, 6, world, sequence_dim=1)
        )


def test_a_forgotten_mark_is_named():
    def works(world):
        mesh = Mesh(MeshShape(tp=world.size), world)
        model, said_of = ByHand(mesh.group("tp")), []
        for mark in (
            lambda: None,
            lambda: mark_partial(model.norm),
            lambda: setattr(model.ends, "partial_gradients", ()),
        ):
            mark()
            try:
                summed = {fact.name: fact.sum_over.size for fact in facts_of(model, mesh)}
            except ValueError as error:
                said_of.append(str(error))
        mark_partial(model)  # the layers of the pair keep their own marks
        return said_of, summed, [layer.partial_gradients for layer in model.pair]

    for (norm, ends), summed, marks in run(works, 2):
        assert (
            "norm.1 (LayerNorm) has parameters, and other layers of this model shard the sequence: call mark_partial"
            in norm
        )
        assert (
            "ends (Linear) has parameters" in ends and "or set module.partial_gradients = () if it gets all" in ends
        )
        assert summed["norm.1.weight"] == summed["pair.1.bias"] == 2 and summed["ends.weight"] == 1
        assert marks == [(), ("bias",)]
    assert run(lambda world: len(facts_of(ByHand(world), Mesh(MeshShape(tp=1), world))), 1) == [8], (
        "one has all tokens"
    )
