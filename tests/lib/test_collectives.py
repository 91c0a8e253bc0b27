"""Collectives from send and receive: the numbers of a plain sum, the moves of `lib.cost.steps`, the bytes of theory."""

from collections import Counter
from functools import partial

import pytest
import torch

from lib import collectives, comm, run, trace
from lib.cost import steps
from tests.lib import kinds
from tests.lib.sharding import said

RANKS = (1, 2, 3, 4, 5, 7, 8)
SHAPES = ((), (0,), (1,), (3, 5), (2, 3, 4), (80,))  # fewer numbers than ranks, none at all, not divisible
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
ALL_REDUCE = {name: getattr(collectives, f"{name}_all_reduce") for name in steps.ALL_REDUCE}


def numbers(rank, shape, dtype):
    """Small whole numbers: their sums are exact in each dtype, so that no order of adding can differ."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def summed(n, shape, dtype):
    return sum((numbers(rank, shape, dtype) for rank in range(n)), torch.zeros(shape, dtype=dtype))


def same(got, wanted):
    return got.shape == wanted.shape and got.dtype == wanted.dtype and torch.equal(got, wanted)


def all_cases(world):
    wrong = []

    def expect(what, got, wanted):
        if (got is None) is not (wanted is None) or (got is not None and not same(got, wanted)):
            wrong.append((what, shape, dtype, got, wanted))

    for shape in SHAPES:
        for dtype in DTYPES:
            x, total = numbers(world.rank, shape, dtype), summed(world.size, shape, dtype)
            before = x.clone()
            for name, all_reduce in ALL_REDUCE.items():
                expect(name, all_reduce(x, world), total)
            parts = collectives.chunks_of(total, world.size)
            expect("scatter", collectives.ring_reduce_scatter(x, world), parts[world.rank])
            gathered = collectives.ring_all_gather(parts[world.rank], world, torch.empty_like(total.flatten()))
            expect("gather", gathered, total.flatten())
            for end in {0, world.size // 2, world.size - 1}:
                for name in ("naive", "tree"):
                    reduce, broadcast = (getattr(collectives, f"{name}_{k}") for k in ("reduce", "broadcast"))
                    expect(f"{name}_reduce", reduce(x, world, end), total if world.rank == end else None)
                    expect(f"{name}_broadcast", broadcast(x, world, end), numbers(end, shape, dtype))
            expect("the argument", x, before)
    return wrong


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("n", RANKS)
def test_any_ranks_sizes_and_dtypes(n):
    for rank, wrong in enumerate(run(all_cases, n, timeout_s=600)):
        assert not wrong, (rank, wrong[0])


def edges(world):
    """Whether results own their memory, take what is not contiguous or wants gradients, and have the same bits."""
    x = numbers(world.rank, (4, 6), torch.float64).t().requires_grad_()
    alone, bits = [], []
    wanted = summed(world.size, (4, 6), torch.float64).t()
    rough = torch.randn(1001, generator=torch.Generator().manual_seed(world.rank))
    for all_reduce in ALL_REDUCE.values():
        out = all_reduce(x, world)
        assert torch.equal(out, wanted) and not out.requires_grad
        alone.append(out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr())
        bits.append(comm.all_gather(all_reduce(rough, world)[None], world))
    before = rough.clone()
    collectives.ring_reduce_scatter(rough, world).zero_()
    collectives.ring_all_gather(rough, world).zero_()
    alone.append(torch.equal(rough, before))
    collectives.naive_broadcast(x, world).zero_()
    collectives.tree_broadcast(x, world).zero_()
    alone.append(torch.equal(x, numbers(world.rank, (4, 6), torch.float64).t()))
    gathered = collectives.ring_all_gather(torch.full((2,), float(world.rank)), world)
    assert gathered.tolist() == [float(rank) for rank in range(world.size) for _ in range(2)]
    return all(alone), all(torch.equal(rows[0], row) for rows in bits for row in rows)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize("n", [3, 1, 4])
def test_results_are_new_tensors_and_equal_bit_by_bit(n):
    assert list(run(edges, n)) == [(True, True)] * n


def by_hand(world):
    """(name, collective, what it returns for the values of all ranks)"""

    def total(xs):
        return torch.stack(xs).sum(0)

    for name, all_reduce in ALL_REDUCE.items():
        yield name, all_reduce, total
    for name in ("naive", "tree"):
        yield f"{name}_broadcast", getattr(collectives, f"{name}_broadcast"), lambda xs: xs[0]
        yield f"{name}_reduce", getattr(collectives, f"{name}_reduce"), lambda xs: None if world.rank else total(xs)
    yield "gather", collectives.ring_all_gather, lambda xs: torch.cat([x.reshape(-1) for x in xs])


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("n", [2, 1, 3])
def test_values_are_sent_whatever_the_memory_and_what_has_none_is_refused(n):
    def works(world):
        found = []
        for name, collective, formula in by_hand(world):
            for kind, (x, _) in kinds.arriving(world.rank).items():
                if problem := kinds.wrong(collective(x, world), formula(kinds.right_of(world, kind))):
                    found.append(f"{name} of {kind}: {problem}")
            for kind, (x, says) in kinds.refused(n).items():
                if not (problem := said(lambda x=x: collective(x, world), ValueError)).count(says):  # noqa: B023
                    found.append(f"{name} of {kind}: {problem}")
        out = torch.zeros(6 * n, dtype=torch.complex64).conj()
        found.append(said(lambda: collectives.ring_all_gather(out[:6].clone(), world, out), ValueError))
        out = torch.zeros(2 * n, 3).T
        found.append(said(lambda: collectives.ring_all_gather(torch.ones(6), world, out), ValueError))
        return found

    for found in run(works, n):
        assert len(found) == 2, found[:-2]
        assert found[0].endswith("a conjugate view") and found[1].endswith("not contiguous")


# ---- the moves of all ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", steps.ALL_REDUCE)
@pytest.mark.parametrize("n", range(1, 17))
def test_the_moves_reach_the_sum(name, n):
    moves = steps.ALL_REDUCE[name](n)
    everyone = frozenset(range(n))
    assert steps.after(moves, n) == [[everyone] * n] * n
    if n > 1:
        assert steps.after(moves[:-1], n) != [[everyone] * n] * n
    for step in moves:  # one link each way for each rank
        for end in ("src", "dst"):
            assert max(Counter(getattr(move, end) for move in step).values()) == 1
        assert all(move.src != move.dst for move in step)
    for k, step in enumerate(moves):  # no number is added twice
        held = steps.after(moves[:k], n)
        assert not any(held[m.src][c] & held[m.dst][c] for m in step if m.adds for c in m.chunks)


def moved(name, world, chunk):
    """(source, destination, numbers) of each message of this rank, in order."""
    x = torch.ones(chunk * world.size)
    with trace.record(world.rank) as recorded:
        ALL_REDUCE[name](x, world)
    return [(e.rank, *e.peers, e.payload_bytes // 4) for e in recorded.events if e.kind == "send"]


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("name", steps.ALL_REDUCE)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_the_ranks_do_these_moves(name, n):
    moves = steps.ALL_REDUCE[name](n)
    for rank, sent in enumerate(run(partial(moved, name), n, 10)):
        listed = [(m.src, m.dst, 10 * len(m.chunks)) for step in moves for m in step if m.src == rank]
        assert sent == listed


@pytest.mark.parametrize("name", steps.ALL_REDUCE)
@pytest.mark.parametrize("n", range(1, 17))
def test_bytes_and_seconds_follow_from_the_moves(name, n):
    moves = steps.ALL_REDUCE[name](n)
    sent = [chunks / n for chunks in steps.chunks_sent(moves, n)]
    assert steps.all_reduce_bytes(name, 100, n) == pytest.approx((100 * max(sent), 100 * sum(sent)))
    seconds = sum(7 + 3 * max(len(m.chunks) for m in step) / n for step in moves)
    assert steps.all_reduce_s(name, 300, n, alpha_s=7, bandwidth_Bps=100) == pytest.approx(seconds)


def received(world):
    with trace.record(world.rank) as recorded:
        collectives.ring_all_reduce(torch.ones(80), world)
    sums = {kind: sum(e.payload_bytes // 4 for e in recorded.events if e.kind == kind) for kind in ("send", "recv")}
    return len([e for e in recorded.events if e.kind == "send"]), *sums.values()


def test_eight_ranks_eighty_numbers():
    assert list(run(received, 8)) == [(14, 140, 140)] * 8


def test_unknown_algorithm():
    for call in (partial(steps.all_reduce_bytes), partial(steps.all_reduce_s, alpha_s=0, bandwidth_Bps=1)):
        with pytest.raises(ValueError, match="unknown algorithm 'butterfly'; known are naive, tree, ring"):
            call("butterfly", 1, 2)
