"""Cut and put together again: each number of a tensor in the place where it was."""

import pytest
import torch
from torch import nn

from lib import comm, run
from lib.placement import (
    Fused,
    Partial,
    Replicate,
    Shard,
    check_apart,
    copies_of,
    distribute,
    parts,
    shard,
    unshard,
)
from tests.lib import kinds
from tests.lib.sharding import said


@pytest.mark.thorough("more ranks, sizes and kinds", keep=6)
@pytest.mark.parametrize(
    ("placement", "n", "times"),  # that all ranks together hold the tensor
    [
        (Replicate(), 3, 3),
        *((Shard(dim), n, 1) for dim in (0, 1, -1) for n in (1, 2, 3, 6)),
        (Shard(0, copies=2), 4, 2),
        (Shard(1, copies=6), 6, 6),
        (Fused(0, (6, 12, 6), (1, 1, 1)), 3, 1),
        (Fused(0, (12, 6, 6), (1, 2, 2)), 6, 1.5),
        (Fused(1, (12, 12), (1, 4)), 4, 2.5),
    ],
)
def test_shard_and_unshard(placement, n, times):
    def there_and_back(world):
        whole = torch.arange(24 * 24.0).reshape(24, 24)
        part = shard(whole, placement, world)
        part_is_its_own = part.untyped_storage().nbytes() == part.nbytes
        return part, part_is_its_own, torch.equal(unshard(part, placement, world), whole)

    results = run(there_and_back, n)
    assert all(own and back for _, own, back in results)
    kept = sum(part.numel() for part, *_ in results) / 24**2
    assert kept == times


def test_shards_are_values_whatever_the_memory_and_what_has_none_is_refused():
    """On the meta device, a model that is not loaded yet is cut, and nothing is sent."""

    def works(world):
        found = []
        for kind, (x, right) in kinds.arriving(world.rank).items():
            for placement in (Shard(0), Replicate()) if "deaf" not in kind else ():
                part = kinds.values(shard(x, placement, world))
                wanted = right.chunk(2)[world.rank] if placement == Shard(0) else right
                back = unshard(x, placement, world)
                all_of = torch.cat(kinds.right_of(world, kind)) if placement == Shard(0) else right
                found += [f"{kind}: {p}" for p in (kinds.wrong(part, wanted), kinds.wrong(back, all_of)) if p]
        p = nn.Parameter(kinds.numbers(world.rank, torch.complex128).conj())
        mine = distribute(p, Shard(0), world)
        found += [kinds.wrong(mine, kinds.values(kinds.numbers(0, torch.complex128).conj()).chunk(2)[world.rank])]
        for kind, (x, says) in kinds.refused(2).items():
            for call in (shard, unshard):
                for placement in (Shard(0), Replicate()):
                    text = said(lambda c=call, x=x, p=placement: c(x, p, world), ValueError)
                    found += [f"{kind}: {text}"] * (says not in text)
        meta = nn.Parameter(torch.empty(12, 3, device="meta"))
        found += [] if distribute(meta, Shard(0), world).shape == (6, 3) else ["meta"]
        found += ["unshard meta"] * ("has none" not in said(lambda: unshard(meta, Replicate(), world), ValueError))
        no_dim = said(lambda: shard(torch.tensor(1.0), Shard(0), world), ValueError)
        return [text for text in found if text], no_dim

    for found, no_dim in run(works, 2):
        assert found == [] and no_dim == "dim=0 does not exist in a tensor of shape []"


def test_a_fused_weight_is_cut_section_by_section():
    def rows(world):
        return shard(torch.arange(8.0), Fused(0, (4, 2, 2), (1, 2, 2)), world).tolist()

    assert run(rows, 2) == [[0, 1, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7]]
    assert run(rows, 4) == [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]


def test_a_sum_is_put_together_by_adding():
    def works(world):
        return unshard(torch.full((2,), float(world.rank + 1)), Partial(), world).tolist()

    assert run(works, 3) == [[6.0, 6.0]] * 3


@pytest.mark.parametrize(
    ("placement", "n"), [(Replicate(), 3), (Shard(0), 2), (Shard(1, 2), 4), (Fused(0, (12, 6, 6), (1, 2, 2)), 4)]
)
def test_what_several_ranks_have_counts_once(placement, n):
    def works(world):
        whole = torch.arange(24 * 24.0).reshape(24, 24)
        part = shard(whole, placement, world)
        return comm.all_reduce((part / copies_of(placement, part.shape, world)).sum(), world).item()

    assert run(works, n) == [sum(range(24 * 24))] * n


def test_distribute_takes_rank_0s_numbers():
    def works(world):
        torch.manual_seed(world.rank)
        frozen = nn.Parameter(torch.randn(4, 2), requires_grad=False)
        frozen.no_decay = "as an optimizer is told"
        part = distribute(frozen, Shard(0), world)
        first = comm.broadcast(frozen, world)
        with torch.device("meta"):
            nowhere = distribute(nn.Parameter(torch.empty(4, 2)), Shard(0), world)
        right = torch.equal(part, first[2 * world.rank : 2 * world.rank + 2]) and vars(part) == vars(frozen)
        return right, part.requires_grad, nowhere.is_meta, list(nowhere.shape), distribute(None, Shard(0), world)

    assert run(works, 2) == [(True, False, True, [2, 2], None)] * 2


def test_parts_names_every_parameter():
    class Cut(nn.Linear):
        placements = {"weight": Shard(0)}

    model = nn.Sequential(Cut(2, 3), nn.Linear(3, 2, bias=False))
    model[1].weight = model[0].weight
    found = parts(model)
    assert {name: placement for name, (_, placement) in found.items()} == {
        "0.weight": Shard(0),
        "0.bias": Replicate(),
        "1.weight": Replicate(),  # as that module says
    }
    assert found["0.weight"][0] is found["1.weight"][0]


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Shard(0), "dim 0 of a tensor [5, 4]=5 cannot be split over world=2; use a multiple of 2, such as 6"),
        (Partial(), "cannot be split into partial sums in a unique way"),
    ],
)
def test_wrong_use_is_named(placement, message):
    def wrong(world):
        return said(lambda: shard(torch.ones(5, 4), placement, world), ValueError)

    assert message in run(wrong, 2)[0]


def two(first, second, **more):
    """A module with two tensors, as parameters a and b, or under the names in `more`."""
    module = nn.Module()
    module.a, module.b = nn.Parameter(first), nn.Parameter(second)
    for name, tensor in more.items():
        setattr(module, name, tensor)
    return module


def test_parameters_that_share_memory():
    flat, square = torch.randn(40), torch.randn(4, 4)
    strips, halves = torch.randn(4, 8), torch.randn(4, dtype=torch.complex64)
    with_buffer = two(square.clone(), torch.ones(3))
    with_buffer.register_buffer("c", with_buffer.a.data[1])
    half_frozen = two(square, square)
    half_frozen.b.requires_grad_(False)
    for module, other in (
        (two(square, square), "b"),
        (two(square, square.t()), "b"),
        (two(flat[:16], flat[15:]), "b"),
        (two(halves, torch.view_as_real(halves)[:, 1]), "b"),
        (with_buffer, "c"),
        (half_frozen, "b"),
    ):
        text = said(lambda module=module: check_apart(module), ValueError)
        assert f"a and {other} share memory" in text and f"module.{other} = module.a" in text
    tied = two(square, flat[:0], c=[square])
    tied.b = tied.a
    frozen = two(square, square).requires_grad_(False)
    for module in (tied, frozen, two(flat[:16], flat[16:]), two(strips[:, :4], strips[:, 4:]), nn.LSTM(3, 4, 2)):
        check_apart(module)
    with torch.device("meta"):
        check_apart(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
