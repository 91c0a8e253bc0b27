"""Data parallelism beside one process: the twin below is plain torch, on the whole batch, and knows nothing of ranks.

Ranks start from different seeds on purpose. Many cases share one `run`: each returns what it measured by name.
"""

import copy
import gc
import io
import pickle
import warnings
from itertools import groupby

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lib import comm, data, run, trace
from lib.data_parallel.bucketed_gradients import fill_buckets
from lib.data_parallel.ddp import BucketedDDP, NaiveDDP, global_mean
from lib.mesh import Group
from lib.model import GPT, GPTConfig, loss_sum_and_count, mean_loss
from lib.runtime.call_table import MismatchError
from lib.verify import gradients, largest_difference, replicas_equal, weights
from tests.lib.sharding import said

ALONE = Group()


class Toy(nn.Module):
    """What breaks a careless wrapper: tied, frozen, scalar, empty, transposed, odd sizes, two dtypes, buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 7).double()
        self.single = nn.Linear(7, 7)  # float32 in the middle of float64
        self.frozen = nn.Linear(7, 7).double().requires_grad_(False)
        self.sometimes = nn.Linear(7, 7).double()  # only some ranks use it
        self.scale = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.slanted = nn.Parameter(torch.randn(7, 5, dtype=torch.float64).t())
        self.norm = nn.LayerNorm(5).double()
        self.up = nn.Linear(5, 7, bias=False).double()
        self.head = nn.Linear(7, 13).double()
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.randint(100, (3,)))
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("mean", torch.randn(2))

    def forward(self, tokens, sometimes):
        x = self.embed(tokens)
        x = x + self.single(x.detach().float()).double() + self.empty.sum()
        x = x + self.frozen(x)
        if sometimes:
            x = self.sometimes(x)
        x = self.up(self.norm(torch.tanh(x @ self.slanted.t())))
        return self.head(self.scale * x)


def toy(seed):
    torch.manual_seed(seed)
    return Toy()


def batch(step, rows):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(13, (rows, 3), generator=generator), torch.randint(13, (rows, 3), generator=generator)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


WRAPS = {
    "naive": lambda module, group, op: NaiveDDP(module, group, op),
    "each its own bucket": lambda module, group, op: BucketedDDP(module, group, op, bucket_bytes=1),
    "small buckets": lambda module, group, op: BucketedDDP(module, group, op, bucket_bytes=300),
    "one bucket per dtype": lambda module, group, op: BucketedDDP(module, group, op, bucket_bytes=2**40),
}
TENSORS = 12  # trained tensors of a Toy, one of them empty: no message
PSI_BYTES = 8 * (13 * 7 + 56 + 1 + 7 * 5 + 10 + 35 + 13) + 4 * 56


def same_steps(world, name, op, K, to_none, steps=3):
    """Steps of the wrapped Toy beside the twin's on all rows: the worst difference of each kind, and what was sent."""
    n = world.size
    wrapped = WRAPS[name](toy(100 + world.rank), world, op)
    twin = toy(100)
    start_equal = replicas_equal(wrapped, world) and all(
        torch.equal(a, b) for a, b in zip(wrapped.module.buffers(), twin.buffers(), strict=True)
    )
    optimizer, twins = adamw(wrapped), adamw(twin)
    worst = {"float64": 0.0, "float32": 0.0}
    calls, sent = [], []
    for step in range(steps):
        inputs, targets = batch(step, rows=K * n)
        optimizer.zero_grad(set_to_none=to_none)
        twins.zero_grad(set_to_none=to_none)
        for row in range(K * n):  # rank r = row // K; `sometimes` is used by the last rank, in its first microbatch
            logits = twin(inputs[row : row + 1], row == K * n - K)
            (mean_loss(logits, targets[row : row + 1]) / (K * n)).backward()
        with trace.record(world.rank) as recorded:
            for k in range(K):
                row = world.rank * K + k
                ours = inputs[row : row + 1], targets[row : row + 1]
                loss = mean_loss(wrapped(ours[0], row == K * n - K), ours[1]) / K
                loss = loss / n if op == "sum" else loss
                if k < K - 1:
                    with wrapped.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            wrapped.finish()
        calls.append(len(recorded.events))
        sent.append(sum(e.wire_bytes for e in recorded.events))
        have, want = gradients(wrapped.module), gradients(twin)
        for dtype in ("float64", "float32"):
            mine = [k for k, g in want.items() if str(g.dtype) == f"torch.{dtype}"]
            apart = largest_difference({k: have.pop(k) for k in mine}, {k: want[k] for k in mine})
            worst[dtype] = max(worst[dtype], apart)
        assert not have, f"gradients that the twin does not have: {list(have)}"
        optimizer.step()
        twins.step()
        singles = largest_difference(weights(wrapped.module.single), weights(twin.single))
        worst["single weights"] = max(worst.get("single weights", 0), singles)
        twin.single.load_state_dict(wrapped.module.single.state_dict())  # or their rounding would reach the others
    worst["weights"] = largest_difference(weights(wrapped.module), weights(twin))
    replicas = start_equal and replicas_equal(wrapped, world)
    messages = TENSORS - 1 if name == "naive" else sum(bucket.flat.numel() > 0 for bucket in wrapped.buckets)
    return worst, replicas, calls, sent, messages


def all_steps(world):
    warnings.filterwarnings("ignore", "grad and param do not obey")  # torch on the transposed parameter
    return {
        (name, op, K, to_none): same_steps(world, name, op, K, to_none)
        for name in WRAPS
        for op, K, to_none in [("mean", 1, True), ("mean", 3, False), ("sum", 3, True), ("sum", 1, False)]
    }


@pytest.mark.thorough("up to five ranks", keep=2)
@pytest.mark.parametrize("n", [3, 1, 2, 4])
def test_gradients_weights_replicas_and_bytes(n):
    for rank, cases in enumerate(run(all_steps, n)):
        assert len(cases) == 16
        for case, (worst, replicas, calls, sent, expected) in cases.items():
            where = f"{case}, rank {rank} of {n}: {worst}"
            assert worst["float64"] < 1e-12, where
            assert worst["float32"] < 1e-6, where  # float32 rounds at 6e-8
            assert worst["weights"] < 1e-8, where
            assert worst["single weights"] < 1e-5, where
            assert replicas, where
            assert calls == [0 if n == 1 else expected] * 3, where
            assert sent == pytest.approx([2 * (n - 1) / n * PSI_BYTES] * 3, rel=1e-12), where


CONFIG = GPTConfig(vocab_size=32, context=6, d_model=12, num_layers=2, num_heads=2)


def gpt(seed):
    torch.manual_seed(seed)
    return GPT(CONFIG).double()


def rows(step, count):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(32, (count, 6), generator=generator), torch.randint(32, (count, 6), generator=generator)


def beside_pytorch(world, as_view):
    """Five steps of all, clipped, the third and fourth accumulated, the last without zero_grad()."""
    theirs = nn.parallel.DistributedDataParallel(gpt(world.rank), gradient_as_bucket_view=as_view)
    ours = {
        "naive": NaiveDDP(gpt(world.rank), world),
        "bucketed": BucketedDDP(gpt(world.rank), world, bucket_bytes=3000),
    }
    optimizers = {name: adamw(model) for name, model in ours.items()} | {"theirs": adamw(theirs)}
    apart = {}
    for step in range(5):
        inputs, targets = rows(10 * step + world.rank, 2)
        accumulates = step in (2, 3)
        for name, model in (*ours.items(), ("theirs", theirs)):
            if step != 4:
                optimizers[name].zero_grad()
            if accumulates:
                with model.no_sync():
                    mean_loss(model(inputs[:1]), targets[:1]).backward()
            mean_loss(model(inputs[1:]), targets[1:]).backward()
            if name != "theirs":
                model.finish()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        for name, model in ours.items():
            assert norm > 0.2 and abs(model.clip_gradients(0.1) / norm - 1) < 1e-12
            apart[name, step] = largest_difference(gradients(model.module), gradients(theirs.module))
        for optimizer in optimizers.values():
            optimizer.step()
    for name, model in ours.items():
        apart[name, "weights"] = largest_difference(weights(model.module), weights(theirs.module))
    return apart


@pytest.mark.thorough("seconds of several processes")
def test_distributed_data_parallel_agrees():
    def both(world):
        return {(view, *key): x for view in (False, True) for key, x in beside_pytorch(world, view).items()}

    for apart in run(both, 3):
        assert len(apart) == 2 * 2 * 6
        for case, difference in apart.items():
            assert difference < (1e-8 if "weights" in case else 1e-12), case


# ---- uneven batches -------------------------------------------------------------------------------------------------


def uneven(world, shares, wrap, skips):
    """Token-weighted mean: rows by `shares`, some targets ignored, beside one process."""
    inputs, targets = rows(7, sum(shares))
    targets[0, 2:] = -100
    targets[2] = -100
    model = wrap(gpt(world.rank), world)
    mine = data.rows_of_rank(sum(shares), world.rank, world.size, shares)
    if not skips or shares[world.rank]:
        loss_sum, count = loss_sum_and_count(model(inputs[mine]), targets[mine])
        global_mean(loss_sum, count, world).backward()
    else:
        global_mean(torch.zeros(()), 0, world)  # takes part in the count, has nothing to do backward
    model.finish()
    twin = gpt(0)
    mean_loss(twin(inputs), targets).backward()
    return largest_difference(gradients(model.module), gradients(twin))


def test_the_mean_over_tokens_with_uneven_and_empty_shares():
    def cases(world):
        out = {}
        for wrap in (NaiveDDP, lambda m, g, op: BucketedDDP(m, g, op, bucket_bytes=2000)):
            for shares in ([3, 1, 2], [5, 0, 1], [0, 0, 6]):
                for skips in (False, True):
                    out[len(out), *shares] = uneven(world, shares, lambda m, g, w=wrap: w(m, g, "sum"), skips)
        return out

    for apart in run(cases, 3):
        assert len(apart) == 12 and max(apart.values()) < 1e-12, apart


def test_the_mean_may_be_over_weights_and_large_counts():
    """A count in int64 would lose a half, one in float32 the last of 2²⁴ + 1 tokens, one in float16 is infinite."""

    def works(world, shares):
        weight = shares[world.rank]
        dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        return [global_mean(torch.tensor(2.0, dtype=dtype), weight, world).item() for dtype in dtypes]

    for shares in ([2.5, 0, 0.75], [0.25, 0, torch.tensor(0.125)], [2**24, 0, 1], [60_000, 0, 60_000]):
        for means in run(works, 3, shares):
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


def test_the_first_buckets_travel_before_the_first_layer_has_its_gradient():
    def step(world):
        model = BucketedDDP(gpt(0), world, bucket_bytes=2000)
        under_way = []
        inputs, targets = rows(0, 2)
        model.module.embed.register_full_backward_hook(lambda *_: under_way.append(model.gradients._lines[0].next))
        with trace.record(world.rank) as recorded:
            with trace.span("backward"):
                mean_loss(model(inputs), targets).backward()
            model.finish()
        end_s = recorded.spans[0].end_s
        return under_way, len(model.buckets), [e.start_s < end_s for e in recorded.events]

    for under_way, buckets, starts in run(step, 2):
        assert buckets > 5
        # The embedding is tied with the head: its gradient is complete last, and all the blocks' are on their way.
        assert under_way == [buckets - 1] or 1 <= under_way[0] < buckets
        assert starts == [True] * buckets


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
        optimizer = adamw(model)
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


def test_wrong_arguments():
    layer = nn.Linear(2, 2)
    for wrap in (NaiveDDP, BucketedDDP):
        assert "op='max' must be 'mean' or 'sum'" in said(lambda w=wrap: w(layer, ALONE, "max"), ValueError)
        frozen = nn.Linear(2, 2).requires_grad_(False)
        assert "nothing to average" in said(lambda w=wrap, m=frozen: w(m, ALONE), ValueError)
        assert "nothing to average" in said(lambda w=wrap: w(nn.ReLU(), ALONE), ValueError)
    for size in (0, -1, 0.5):
        assert f"bucket_bytes={size}" in said(lambda s=size: BucketedDDP(layer, ALONE, bucket_bytes=s), ValueError)
    NaiveDDP(layer, ALONE)  # none of the failed attempts has left a mark


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


def test_wrapped_twice():
    for first in (NaiveDDP, BucketedDDP):
        model = alone(first)
        assert "already" in said(lambda m=model: BucketedDDP(m, ALONE), ValueError)
        assert "already" in said(lambda m=model: NaiveDDP(m.module, ALONE), ValueError)
        shares_one = nn.ModuleList([nn.Linear(3, 3).double(), model.module])
        assert "already" in said(lambda m=shares_one: BucketedDDP(m, ALONE), ValueError)
        again = BucketedDDP(copy.deepcopy(model.module), ALONE)
        again(X).sum().backward()
        again.finish()
        assert model.module.weight.grad is None and again.module.weight.grad is not None


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
        model(X).sum().backward()
        assert "added or unfrozen" in said(model.finish)


@pytest.mark.parametrize("wrap", [NaiveDDP, BucketedDDP])
def test_frozen_later_stays_where_it_is(wrap):
    model = alone(wrap)
    optimizer = adamw(model)
    model.module.bias.requires_grad_(False)
    before = model.module.bias.clone()
    for _ in range(2):
        optimizer.zero_grad()
        model(X).sum().backward()
        model.finish()
        optimizer.step()
    assert model.module.bias.grad is None and torch.equal(model.module.bias, before)


def test_an_exception_inside_backward_does_not_pass_for_a_step():
    model = BucketedDDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double(), ALONE, bucket_bytes=1)
    hidden = model.module[0](X)

    def fail(grad):
        raise ArithmeticError("bad luck")

    hidden.register_hook(fail)
    said(lambda: model.module[1](hidden).sum().backward(), ArithmeticError)
    model(X).sum().backward()
    model.finish()
    want = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    want.load_state_dict(model.module.state_dict())
    want(X).sum().backward()
    assert largest_difference(gradients(model.module), gradients(want)) < 1e-12


def test_checkpointed_blocks_and_gradients_of_gradients():
    for reentrant in (False, True):
        model, twin = alone(), alone().module
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


def test_sparse_gradients_are_summed_and_finish_twice_sums_once():
    def sums(world, make, op):
        torch.manual_seed(0)
        twin = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 3)).double()
        model = make(copy.deepcopy(twin), world, op=op)
        words = torch.tensor([[0, 1], [2, 1]])
        for rows in words:
            (twin(rows).square().sum() / (2 if op == "mean" else 1)).backward()
        for _ in range(2):
            model(words[world.rank]).square().sum().backward()
            model.finish()
            model.finish()
            apart = largest_difference(
                gradients(model.module), {n: p.grad.to_dense() for n, p in twin.named_parameters()}
            )
            for p in model.module.parameters():
                p.grad = None  # by an optimizer's zero_grad()
        return apart

    for make in (NaiveDDP, BucketedDDP):
        for op in ("mean", "sum"):
            assert max(run(sums, 2, make, op)) < 1e-12


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
