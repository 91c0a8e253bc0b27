"""DDP: means over uneven ranks, the order of buckets, memory, and wrong use; `test_data_parallel.py` has the steps."""

import copy
import gc
import io
import pickle
import warnings
from itertools import groupby
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from book.trials.unbucketed import NaiveDDP
from lib import comm, run, trace
from lib.data_parallel.bucketed_gradients import fill_buckets
from lib.data_parallel.ddp import BucketedDDP, global_mean
from lib.mesh import Group
from lib.model import mean_loss
from lib.runtime.call_table import MismatchError
from lib.verify import gradients, largest_difference
from tests.lib.sharding import adamw, gpt, rows, said

ALONE = Group()


# ---- uneven batches -------------------------------------------------------------------------------------------------


def test_the_mean_may_be_over_weights_and_large_counts():
    """A count in int64 would lose a half, one in float32 the last of 2²⁴ + 1 tokens, one in float16 is infinite."""

    cases = [2.5, 0, 0.75], [0.25, 0, torch.tensor(0.125)], [2**24, 0, 1], [60_000, 0, 60_000]
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def works(world):
        twos = [torch.tensor(2.0, dtype=dtype) for dtype in dtypes]
        return [[global_mean(two, shares[world.rank], world).item() for two in twos] for shares in cases]

    for of_rank in run(works, 3):
        for shares, means in zip(cases, of_rank, strict=True):
            assert means == pytest.approx([2 / float(sum(shares))] * 4, rel=1e-7)
            assert means[0] == pytest.approx(2 / float(sum(shares)), rel=1e-15)


def test_no_token_at_all_is_an_error_on_every_rank():
    def nothing(world):
        try:
            global_mean(torch.zeros(()), torch.tensor(0), world)
        except ValueError as error:
            return str(error)

    assert run(nothing, 2) == ["no rank has a token that counts, so there is no mean"] * 2


# ---- order and overlap ----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Three branches of different size, joined in an order that the caller chooses, so gradients come in another."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, width, bias=False).double() for width in (2, 3, 4))

    def forward(self, x, order):
        total = 0
        for i in order:
            total = total * 0.5 ** (i + 1) + self.parts[i](x).sum() * torch.exp(-0.1 * torch.as_tensor(total))
        return total


def test_buckets_leave_in_one_order_whatever_the_order_of_gradients():
    orders = [(0, 1, 2), (2, 0, 1), (1, 2, 0), (1,)]

    def step(world):
        torch.manual_seed(world.rank)
        model = BucketedDDP(Branches(), world, bucket_bytes=1)
        arrived = []
        for i, part in enumerate(model.module.parts):
            part.weight.register_post_accumulate_grad_hook(lambda p, i=i: arrived.append(i))
        x = torch.linspace(-1, 1, 6, dtype=torch.float64) * (world.rank + 1)
        with trace.record(world.rank) as recorded:
            model(x, orders[world.rank]).backward()
            model.finish()
        torch.manual_seed(0)
        twin = Branches()
        for rank, order in enumerate(orders):
            (twin(torch.linspace(-1, 1, 6, dtype=torch.float64) * (rank + 1), order) / world.size).backward()
        sent = [e.label for e in sorted(recorded.events, key=lambda e: e.start_s)]
        return arrived, sent, largest_difference(gradients(model.module), gradients(twin))

    results = run(step, 4)
    assert len({tuple(arrived) for arrived, _, _ in results}) > 1, "the orders must differ for this test to mean much"
    for _, sent, apart in results:
        assert sent == ["bucket 0", "bucket 1", "bucket 2"]
        assert apart < 1e-12


@pytest.mark.parametrize("bucket_bytes", [1, 8, 20, 64, 100, 1000, 2**40])
def test_fill_buckets(bucket_bytes):
    params = [nn.Parameter(torch.zeros(size)) for size in (3, 2, 5, 1, 1, 40, 1, 0, 7, 9, 30, 2, 2)]
    params[6] = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    buckets = fill_buckets(params, bucket_bytes)
    assert [id(p) for bucket in buckets for p in bucket] == [id(p) for p in params]
    for dtype, alike in groupby(buckets, key=lambda bucket: bucket[0].dtype):
        filled = [[p.nbytes for p in bucket] for bucket in alike]
        total = sum(map(sum, filled))
        count = max(1, round(total / bucket_bytes))
        share = total / count
        assert all(p.dtype == dtype for bucket in buckets for p in bucket if bucket[0].dtype == dtype)
        assert len(filled) <= count
        assert all(sum(sizes[:-1]) < share for sizes in filled)  # its last tensor was still needed,
        assert all(sum(sizes) >= share for sizes in filled[:-1])  # and none after it
    assert fill_buckets([], bucket_bytes) == []


# ---- memory ---------------------------------------------------------------------------------------------------------


def tensors_alive():
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def test_memory_does_not_grow_and_accumulation_needs_no_second_gradient():
    def steps(world):
        model = BucketedDDP(gpt(0), world, bucket_bytes=3000)
        optimizer = adamw(model.parameters())
        alive, own = [], []
        for step in range(8):
            inputs, targets = rows(step, 2)
            optimizer.zero_grad()
            with model.no_sync():
                mean_loss(model(inputs[:1]), targets[:1]).backward()
            flats = {b.flat.untyped_storage().data_ptr() for b in model.buckets}
            own.append(sum(p.grad.untyped_storage().data_ptr() not in flats for p in model.trained))
            mean_loss(model(inputs[1:]), targets[1:]).backward()
            model.finish()
            optimizer.step()
            if step in (1, 7):
                alive.append((tensors_alive(), len(model.gradients.pending)))
        return alive, own

    for alive, own in run(steps, 2):
        assert alive[0] == alive[1]
        assert own == [0] * 8  # p.grad is the bucket's own memory from the first microbatch on


# ---- wrong use: right, or a clear error -----------------------------------------------------------------------------


def alone(wrap=BucketedDDP, **more):
    torch.manual_seed(0)
    return wrap(nn.Linear(3, 3).double(), ALONE, **more)


X = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)


@pytest.mark.parametrize("wrap", [NaiveDDP, BucketedDDP])
def test_finish_forgotten(wrap):
    model = alone(wrap)
    model(X).sum().backward()
    with torch.no_grad():
        model(X)  # a look at the loss is no step
    assert "not followed by finish()" in said(lambda: model(X))
    with model.no_sync():
        assert "not followed by finish()" in said(lambda: model(X))
    model.finish()
    model(X)
    assert model.syncs


@pytest.mark.parametrize("wrap", [NaiveDDP, BucketedDDP])
def test_clipping_before_the_average(wrap):
    model = alone(wrap)
    model(X).sum().backward()
    assert "own gradient" in said(lambda: model.clip_gradients(1))
    model.finish()
    model.clip_gradients(1)
    model.zero_grad()
    with model.no_sync():
        model(X).sum().backward()
    assert "own gradient" in said(lambda: model.clip_gradients(1))  # these are not averaged either


def test_two_backwards_before_finish():
    twin = nn.Linear(3, 3).double()
    naive, bucketed = alone(NaiveDDP), alone()
    twin.load_state_dict(naive.module.state_dict())
    losses = [model(X).square().sum() for model in (twin, naive, bucketed)]
    for loss in losses:
        loss.backward(retain_graph=True)
    losses[0].backward()
    losses[1].backward()
    naive.finish()
    assert largest_difference(gradients(naive.module), gradients(twin)) < 1e-12
    assert "a second gradient" in said(losses[2].backward)
    with bucketed.no_sync():  # too late: the first is under way
        assert "a second gradient" in said(lambda: bucketed.module(X).sum().backward())

    first, second = (bucketed := alone())(X).square().sum(), bucketed(X).sum()  # both forwards first
    first.backward()
    assert "a second gradient" in said(second.backward)


def test_two_losses_on_disjoint_parameters_are_one_backward_in_two_parts():
    model = BucketedDDP(nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]).double(), ALONE)
    a, b = (part(X).sum() for part in model.module)
    b.backward()
    a.backward()
    model.finish()
    for part in model.module:
        assert torch.equal(part.weight.grad, X.sum(0, keepdim=True))


@pytest.mark.parametrize("wrap", [NaiveDDP, BucketedDDP])
def test_a_copy_of_a_wrapper_is_refused(wrap):
    """Nobody would sum its gradients."""
    model = wrap(nn.Linear(2, 2), ALONE)
    for act in (copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        text = said(lambda act=act: act(model), TypeError)
        assert "cannot be copied or pickled" in text and "copy.deepcopy(model.module)" in text
    wrap(copy.deepcopy(model.module), ALONE)


@pytest.mark.parametrize("wrap", [NaiveDDP, BucketedDDP])
def test_unfrozen_or_added_later(wrap):
    for added in (False, True):
        layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
        layers(X).sum().backward()
        layers[1].requires_grad_(False)  # what its gradients hold matters to nobody now
        model = wrap(layers, ALONE)
        model(X).sum().backward()
        model.finish()
        if added:
            model.module.append(nn.Linear(3, 3).double())
        else:
            model.module[1].bias.requires_grad_(True)
        model.zero_grad()
        model(X).sum().backward()
        assert "added or unfrozen" in said(model.finish)


def test_a_model_that_is_converted_after_it_was_wrapped_is_refused():
    """Its gradients would not fit into the buckets."""
    for convert in (lambda model: model.double(), lambda model: model.module.double()):
        model = BucketedDDP(nn.Linear(3, 3), ALONE)
        model(X.float())
        convert(model)
        text = said(lambda model=model: model(X))
        assert "bias was converted or replaced after the model was wrapped" in text and "then wrap it" in text


def test_a_model_that_was_left_on_the_cpu_is_refused_where_ranks_have_gpus():
    with patch("lib.data_parallel.ddp.device", lambda: torch.device("cuda", 0)):
        text = said(lambda: BucketedDDP(nn.Linear(3, 3), ALONE), ValueError)
    assert "weight is on the CPU, and NCCL sends from GPUs: call module.to(device()) first" in text


def test_checkpointed_blocks_and_gradients_of_gradients():
    for reentrant in (False, True):
        model, twin = alone(), copy.deepcopy(alone().module)
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()
        model.finish()
        twin(X).square().sum().backward()
        assert largest_difference(gradients(model.module), gradients(twin)) < 1e-12
    model = alone()
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)  # a penalty on the input's gradient
    slope.square().sum().backward()
    model.finish()
    assert model.module.weight.grad.norm() > 0
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle that this makes
        with pytest.raises(RuntimeError, match="a graph, which a sum over ranks would cut off"):
            model(X).square().sum().backward(create_graph=True)


def test_a_rank_without_data_takes_part_after_an_optimizer_has_cleared_gradients():
    def steps(world):
        model = BucketedDDP(nn.Linear(3, 3), world, op="sum")
        optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            optimizer.zero_grad(set_to_none=step == 1)
            if not (world.rank and step):
                model(torch.ones(2, 3)).sum().backward()
            model.finish()
            norms.append(model.clip_gradients(1e9).item())
            optimizer.step()
        return norms

    first, second = run(steps, 2)
    assert first == second and first[0] == pytest.approx(2 * first[1]) and first[1] == pytest.approx(first[2])


def test_gradients_given_by_hand_and_a_finish_without_backward():
    def cases(world):
        torch.manual_seed(world.rank)
        model = BucketedDDP(nn.Linear(3, 3).double(), world)
        loss = model(X * (world.rank + 1)).sum()
        for p, g in zip(model.trained, torch.autograd.grad(loss, model.trained), strict=True):
            p.grad = g
        model.finish()
        by_hand = model.module.weight.grad.clone()
        model.finish()  # the mean of the mean is the mean
        again = model.module.weight.grad.clone()
        model.zero_grad()
        model.finish()
        return by_hand, again, model.module.weight.grad

    want = 1.5 * X.sum(0).expand(3, 3)
    for by_hand, again, nothing in run(cases, 2):
        assert torch.equal(by_hand, want) and torch.equal(again, want)
        assert not nothing.any()


def test_a_message_between_backward_and_finish_is_named_where_ranks_differ():
    def early(world):
        model = BucketedDDP(nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]).double(), world, bucket_bytes=1)
        parts = model.module if world.rank else model.module[:1]
        loss = sum(part(X).sum() for part in parts)
        loss.backward()
        comm.all_reduce(loss.detach(), world)
        model.finish()

    with pytest.raises(MismatchError, match="all_reduce"):
        run(early, 2)
