"""One tensor for many parameters: where each number lies, who owns it, and which optimizers do not mind."""

from functools import partial

import pytest
import torch
from torch import nn

from lib import run
from lib.clip import clip
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.check_optimizer import check_elementwise
from lib.data_parallel.flat import Flat
from lib.data_parallel.optimizer import ShardedOptimizer
from lib.facts import Fact
from lib.mesh import Group
from lib.placement import Fused, Replicate, Shard, shard
from tests.lib.sharding import said


def group(rank, n):
    return Group("world", tuple(range(n)), rank)


def some(sizes):
    generator = torch.Generator().manual_seed(0)
    return {f"p{i}": nn.Parameter(torch.randn(size, generator=generator)) for i, size in enumerate(sizes)}


SHAPES = [
    [(3, 4), (4,), (4, 3), (3,)],
    [(), (5,), (0,), (2, 3, 2), ()],
    [(1,)],
    [(0,), (0, 3)],
    [(2,), (0,), (30,), (1,)],
]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("shapes", SHAPES)
def test_each_number_has_one_owner_and_one_place(shapes, n):
    named = some(shapes)
    wanted = torch.cat([p.detach().flatten() for p in named.values()])
    size = -(-len(wanted) // n)
    seen = {name: torch.zeros(p.numel()) for name, p in named.items()}
    for rank in range(n):
        flat = Flat(named, group(rank, n))
        for name, p in named.items():
            flat.load(name, p)
        assert flat.padding == n * size - len(wanted) < n
        assert len(flat.whole) == n * size and len(flat.shard) == size
        assert flat.mine == slice(rank * size, rank * size + size)
        part = wanted[flat.mine]
        assert torch.equal(flat.shard.detach(), torch.cat([part, torch.zeros(size - len(part))]))
        assert flat.pieces.keys() == flat.where.keys()
        for name, (there, here) in flat.where.items():
            assert len(flat.pieces[name]) > 0
            assert torch.equal(flat.pieces[name], named[name].flatten()[there])
            assert torch.equal(flat.pieces[name], flat.master[here])
            seen[name][there] += 1
        assert [x.shape for x in flat.views] == [p.shape for p in named.values()]
    assert all((count == 1).all() for count in seen.values())


def test_whole_shard_and_pieces_are_one_memory():
    flat = Flat(some([(3,), (4,)]), group(1, 2))
    memory = {x.untyped_storage().data_ptr() for x in (flat.whole, flat.shard, *flat.views, *flat.pieces.values())}
    assert len(memory) == 1
    with torch.no_grad():
        flat.pieces["p1"].fill_(7)
    assert flat.whole.tolist() == [0] * 4 + [7, 7, 7, 0]
    alone = Flat(some([(3,), (4,)]), group(1, 2), whole_stays=False)
    assert alone.whole.untyped_storage().nbytes() == 0 and alone.whole.shape == (8,)
    assert alone.shard.untyped_storage().nbytes() == 16


def test_masters_are_exact_and_the_shard_is_their_rounding():
    named = some([(5,), (6,)])
    flat = Flat(named, group(0, 2), torch.bfloat16)
    for name, p in named.items():
        flat.load(name, p)
    assert (flat.master.dtype, flat.shard.dtype, flat.whole.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert torch.equal(flat.pieces["p0"], named["p0"])
    assert torch.equal(flat.shard, flat.master.bfloat16()) and not torch.equal(flat.shard.float(), flat.master)
    named["p0"].data = flat.views[0]
    flat.take_nothing(0)
    flat.shard.grad = torch.full((6,), 2.0**-12, dtype=torch.bfloat16)
    flat.gradients_to_pieces()
    assert flat.pieces["p0"].grad.dtype == torch.float32
    with torch.no_grad():
        flat.pieces["p0"].fill_(1 + 2**-12)
    flat.after_step()
    assert flat.shard[:5].tolist() == [1] * 5 and flat.master[:5].tolist() == [1 + 2**-12] * 5
    assert flat.shard.grad is None and flat.pieces["p0"].grad is None


def test_gradients_go_in_scaled_and_out_whole():
    half = torch.tensor(0.5, dtype=torch.float64)
    for stay in (True, False):
        named = some([(2, 2), (3,)])
        flat = Flat(named, group(0, 3), gradients_stay=stay)
        first, second = named.values()
        first.grad, second.grad = torch.full((2, 2), 4.0), torch.full((3,), 6.0)
        flat.keep(0)
        assert first.grad.tolist() == [[4, 4], [4, 4]], "a gradient that grows is not scaled yet"
        first.grad += 2
        flat.take(0, half)
        flat.take(1, half)
        assert flat.whole.grad.tolist() == [3] * 7 + [0, 0]
        for p in (first, second):
            text = said(lambda p=p: p.grad + 1)
            assert "has no gradient to read or write here: it is in a bucket" in text and text.endswith("(add)")
        given = flat.release_gradients()
        assert given.tolist() == [3] * 7 + [0, 0] and flat.whole.grad is None
        first.grad = torch.ones(2, 2)
        flat.take(0, half)
        assert given.tolist() == [3] * 7 + [0, 0], "what was given away is not written to"
        assert flat.whole.grad[:4].tolist() == [0.5] * 4


def test_a_piece_that_was_frozen_gets_no_gradient():
    named = some([(2,), (2,)])
    flat = Flat(named, group(0, 1))
    named["p1"].requires_grad_(False)
    for i, p in enumerate(named.values()):
        flat.take_nothing(i, p.requires_grad)
    flat.shard.grad = torch.ones(4)
    flat.gradients_to_pieces()
    assert flat.pieces["p0"].grad.tolist() == [1, 1] and flat.pieces["p1"].grad is None


def test_what_cannot_be_one_tensor():
    named = some([(2,), (3,)])
    named["p1"].data = named["p1"].data.double()
    said_dtype = said(lambda: Flat(named, group(0, 2)), ValueError)
    assert "float32 on cpu (p0, 1 in all); float64 on cpu (p1, 1 in all)" in said_dtype
    named["p1"] = nn.Parameter(torch.empty(3, device="meta"))
    assert "float32 on meta (p1, 1 in all)" in said(lambda: Flat(named, group(0, 2)), ValueError)


# ---- clipping -------------------------------------------------------------------------------------------------------


def test_the_norm_is_that_of_all_shards():
    def clipped(world):
        numbers, fact = torch.arange(1.0, 13), Fact("p", nn.Parameter(torch.ones(3)), world)
        squares, out = (lambda gradients: [fact.square(g) for g in gradients]), []
        for dtype in (torch.float64, torch.bfloat16):
            shards = [x.clone() for x in numbers.to(dtype).view(world.size, -1)[world.rank].split(1)]
            norm = clip(shards, squares(shards), world, 5.0)
            out.append((norm.dtype, norm.item(), torch.cat(shards)))
        shards = [numbers.clone()]
        clip(shards, squares(shards), world, 1e9)
        return out, torch.equal(shards[0], numbers)

    whole = torch.arange(1.0, 13, dtype=torch.float64)
    want = whole.clone().requires_grad_()
    want.grad = whole.clone()
    norm = nn.utils.clip_grad_norm_([want], 5.0)
    for rank, (((kind, value, mine), (small_kind, small, rounded)), untouched) in enumerate(run(clipped, 4)):
        assert kind == torch.float64 and value == pytest.approx(norm.item(), rel=1e-14)
        assert torch.allclose(mine, want.grad.view(4, 3)[rank], rtol=1e-14)
        # squares of bfloat16 numbers are added up in float32, or 650 would be 648
        assert small_kind == torch.float32 and small == pytest.approx(norm.item(), rel=1e-6)
        assert rounded.dtype == torch.bfloat16 and torch.allclose(rounded.double(), mine, rtol=2**-7)
        assert untouched


@pytest.mark.parametrize(
    "placement", [Replicate(), Shard(0), Shard(1, 2), Fused(0, (4, 2, 2), (1, 2, 2)), Fused(0, (4, 4), (2, 2))]
)
def test_each_number_counts_once_in_the_norm(placement):
    """Four tensor-parallel ranks, and two data-parallel ranks that both hold a gradient, or each its half of it."""
    whole, held, halved = torch.arange(1.0, 33, dtype=torch.float64).view(8, 4), 0.0, 0.0
    for rank in range(4):
        tp = Group("tp", (0, 1, 2, 3), rank)
        part = shard(whole, placement, tp)
        fact = Fact("p", nn.Parameter(part), Group(), placement, tp, copies=2)
        held += 2 * fact.square(part)
        halves = slice(0, part.numel() // 2), slice(part.numel() // 2, None)
        halved += sum(fact.square(part.view(-1)[half], half, owners=2) for half in halves)
    assert held.item() == pytest.approx(halved.item()) == pytest.approx(whole.square().sum().item())


# ---- optimizers -----------------------------------------------------------------------------------------------------


class TrustRatio(torch.optim.Optimizer):
    """As in LAMB: a step as long as the parameter's own norm says."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                p -= g["lr"] * p.norm() / p.grad.norm() * p.grad


class OneNorm(torch.optim.Optimizer):
    """Scales by the norm of all it has been given: other ranks would be given something else."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        params = [p for g in self.param_groups for p in g["params"]]
        norm = torch.cat([p.grad.flatten() for p in params]).norm()
        for p in params:
            p -= self.defaults["lr"] / norm * p.grad


class Replaces(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__([p for _, p in params], {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


GOOD = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "groups of pairs": lambda named: torch.optim.AdamW(
        [
            {"params": [x for x in named if x[0].endswith("bias") == flat], "weight_decay": 0.1}
            for flat in (True, False)
        ]
    ),
    "a rate that is a tensor": partial(torch.optim.AdamW, lr=torch.tensor(1e-3)),
    "groups by name": lambda named: torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.0 if name.endswith("bias") else 0.1} for name, p in named], lr=0.1
    ),
}
BAD = {
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "LBFGS": lambda named: torch.optim.LBFGS([p for _, p in named]),
    "trust ratio": partial(TrustRatio, lr=0.1),
    "one norm": partial(OneNorm, lr=0.1),
    "replaces p.data": Replaces,
}
if hasattr(torch.optim, "Muon"):
    BAD["Muon"] = partial(torch.optim.Muon, lr=0.1)


MODEL = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 4), nn.Conv1d(1, 2, 3))
MODEL.add_module("norm", nn.LayerNorm(3))
MODEL.register_parameter("scale", nn.Parameter(torch.ones([])))


@pytest.mark.parametrize("name", GOOD)
def test_optimizers_that_treat_each_number_by_itself(name):
    check_elementwise(GOOD[name], MODEL.named_parameters())


@pytest.mark.parametrize("name", BAD)
def test_optimizers_that_need_whole_parameters(name):
    text = said(lambda: check_elementwise(BAD[name], MODEL.named_parameters()), ValueError)
    assert "cannot work on pieces of parameters" in text and "AdamW" in text
    own = "it raised: " in text
    assert own == (name in ("LBFGS", "Muon")) or name == "Adafactor", text


@pytest.mark.parametrize("name", ["trust ratio", "decay by dims", "vectors of one name"])
def test_they_are_refused_at_small_learning_rates_too(name):
    """Where the step is far below the rounding of a float32 weight."""
    small = {
        "trust ratio": partial(TrustRatio, lr=1e-9),
        "decay by dims": by_dims,
        "vectors of one name": lambda named: (TrustRatio if "norm.weight" in dict(named) else torch.optim.SGD)(
            [p for _, p in named], lr=1e-6
        ),
    }[name]
    text = said(lambda: check_elementwise(small, MODEL.named_parameters()), ValueError)
    assert "its steps on two halves of" in text and "groups by name" in text


def by_dims(named, lr=1e-5):
    named = list(named)
    groups = [([p for _, p in named if (p.dim() > 1) == many], 0.1 * many) for many in (True, False)]
    return torch.optim.AdamW([{"params": ps, "weight_decay": decay} for ps, decay in groups], lr=lr)


def test_the_rate_that_was_given_stays_what_it_was():
    rate = torch.tensor(1e-3)
    check_elementwise(partial(torch.optim.AdamW, lr=rate), MODEL.named_parameters())
    assert rate == torch.tensor(1e-3)


@pytest.mark.parametrize("name", ["Adafactor", "trust ratio"])
def test_they_are_refused_by_hand_too_but_may_step_what_is_whole(name):
    """A `ShardedOptimizer` knows from its buckets whether pieces are parts of parameters."""
    for shares, refused in ((False, False), (True, True)):
        facts = [Fact("weight", nn.Parameter(torch.ones(2, 3)), Group())]
        sums = Gradients(facts, make=partial(Flat.around, dtype=None, gradients_stay=True) if shares else None)
        if refused:
            assert "cannot work on pieces" in said(lambda sums=sums: ShardedOptimizer(sums, BAD[name]), ValueError)
        else:
            ShardedOptimizer(sums, BAD[name])


def test_the_check_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    check_elementwise(GOOD["AdamW"], MODEL.named_parameters())
    assert torch.equal(torch.rand(2), want)
