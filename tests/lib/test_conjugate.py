"""Each pair is its own transpose; a wrong pair is not, and the names keep what they promise."""

import pytest
import torch

from lib import conjugate, run, trace
from lib.placement import Partial, Replicate, Shard
from lib.verify import assert_adjoint
from tests.lib import kinds
from tests.lib.sharding import said

WHOLE, TERM = Replicate(), Partial()
PAIRS = {  # how x and the output lie; see the table in lib/conjugate.py
    "identity_all_reduce": (WHOLE, TERM),
    "all_reduce_identity": (TERM, WHOLE),
    "all_gather_reduce_scatter": (Shard(1), TERM),
    "reduce_scatter_all_gather": (TERM, Shard(1)),
    "split_all_gather": (WHOLE, Shard(1)),
    "all_gather_split": (Shard(1), WHOLE),
}
SENDS = {"identity": 0, "split": 0, "all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times (n−1)/n · S


def call(name, x, group, dim=1):
    function = getattr(conjugate, name)
    return function(x, group) if name in ("identity_all_reduce", "all_reduce_identity") else function(x, group, dim)


def halves(name):
    """What a name says: forward, backward."""
    return next((a, b) for a in SENDS for b in SENDS if name == f"{a}_{b}")


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize("n", [3, 1, 2, 4])
def test_backward_is_the_transpose_of_forward(n):
    def adjoint(world):
        for name, (of, to) in PAIRS.items():
            size = (3, 12 // world.size if isinstance(of, Shard) else 12, 2)
            assert_adjoint(lambda x, name=name: call(name, x, world), torch.zeros(size).double(), world, of, to)

    run(adjoint, n)


def test_what_is_no_pair_is_found():
    """Megatron's f without its backward; the differentiable all-reduce, which sums the gradient as well."""

    def adjoint(world):
        f, g, split = conjugate.identity_all_reduce, conjugate.all_reduce_identity, conjugate.split_all_gather
        wrong = {
            "nothing backward": (lambda x: x.view_as(x), WHOLE, TERM),
            "a sum twice": (lambda x: f(g(x, world), world), TERM, WHOLE),
            "rolled": (lambda x: split(x, world, 1).roll(1, 1), WHOLE, Shard(1)),
            "twice as much": (lambda x: x.detach() + f(x, world), WHOLE, TERM),
        }
        found = []
        for name, (op, of, to) in wrong.items():
            try:
                assert_adjoint(op, torch.zeros(3, 12, 2).double(), world, of, to)
            except AssertionError:
                found.append(name)
        return found

    # to roll is linear, and autograd transposes it: that one is a pair, and must not be called wrong
    assert run(adjoint, 2) == [["nothing backward", "a sum twice", "twice as much"]] * 2


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_name_says_what_is_sent(n):
    def sent(world):
        out = {}
        for name, (of, _) in PAIRS.items():
            size = (3, 12 // world.size if isinstance(of, Shard) else 12, 2)
            x = torch.ones(size).double().requires_grad_()
            with trace.record(world.rank) as forward:
                y = call(name, x, world)
            with trace.record(world.rank) as backward:
                y.sum().backward()
            out[name] = [([e.kind for e in seen.events], seen.wire_bytes) for seen in (forward, backward)]
        return out

    whole = 8 * 3 * 12 * 2
    for name, seen in run(sent, n)[0].items():
        for half, (sent_kinds, n_bytes) in zip(halves(name), seen, strict=True):
            assert sent_kinds == ([half] if SENDS[half] else []), name
            assert n_bytes == pytest.approx(SENDS[half] * (n - 1) / n * whole), name


def test_they_can_be_differentiated_twice():
    def works(world):
        x = (torch.arange(12.0).double() / 10 + world.rank).requires_grad_()
        y = call("reduce_scatter_all_gather", x**3, world, 0)
        (first,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return x.detach(), second

    # f(x₀, x₁) = Σ (x₀³ + x₁³)²; what each rank has is the second derivative of f along the ones, its own part
    results = run(works, 2)
    both = torch.stack([x for x, _ in results]).requires_grad_()
    (first,) = torch.autograd.grad(((both**3).sum(0) ** 2).sum(), both, create_graph=True)
    (wanted,) = torch.autograd.grad(first.sum(), both)
    for rank, (_, second) in enumerate(results):
        torch.testing.assert_close(second, wanted[rank])


def test_what_cannot_be_split_is_named():
    def split(world):
        return said(lambda: call("split_all_gather", torch.ones(3, 10), world), ValueError)

    assert "=10 cannot be split over world=4; use a multiple of 4, such as 12" in run(split, 4)[0]


def test_conjugates_in_both_directions_and_what_is_refused():
    """x and the gradient are views whose memory is not their values: x.conj() and y.conj()."""

    def works(world):
        found = []
        for name in PAIRS:
            results = []
            for later in (lambda x: x.conj(), lambda x: x.conj().resolve_conj()):
                x = kinds.numbers(world.rank, torch.complex128).requires_grad_()
                y = call(name, later(x), world, 0)
                later(y).real.square().sum().backward()
                results.append((y.detach().resolve_conj(), x.grad.resolve_conj()))
            same = all(map(torch.equal, *results))
            found += [] if same else [name]
            sparse = kinds.numbers(0).to_sparse()
            found += [name] * (
                "; use x.to_dense()" not in said(lambda n=name, x=sparse: call(n, x, world, 0), ValueError)
            )
        return found

    assert run(works, 2) == [[]] * 2
