"""Column and row layers against nn.Linear: outputs, gradients, messages, and what they say to wrong use."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

from lib import comm, run, trace
from lib.deferred import DeferWeightGradients, Queue
from lib.mesh import Group, Mesh, MeshShape
from lib.placement import Fused, Replicate, Shard, parts, unshard
from lib.tensor_parallel.linear import (
    ColumnParallelLinear,
    NaiveColumnParallelLinear,
    RowParallelLinear,
    column_products,
)
from lib.tensor_parallel.vocab import VocabParallelEmbedding
from lib.verify import assert_matches_serial
from tests.lib.sharding import said

COLUMNS = [NaiveColumnParallelLinear, ColumnParallelLinear]
WHOLE, LAST, TOKENS = Replicate(), Shard(-1), Shard(1)


def twin(world, in_features=12, out_features=24, bias=True, seed=0):
    """The same on all ranks."""
    torch.manual_seed(seed)
    return nn.Linear(in_features, out_features, bias).double()


def x_of(features=12):
    return torch.randn(2, 12, features, generator=torch.Generator().manual_seed(7)).double()


CASES = {  # layer, its options, how its input and its output lie
    **{
        f"{column.__name__} {name}": (column, options, of, to)
        for column in COLUMNS
        for name, options, of, to in (
            ("", {}, WHOLE, LAST),
            ("slices", {"sequence_dim": 1}, TOKENS, LAST),
        )
    },
    "keeps its input": (partial(ColumnParallelLinear, regather=False), {"sequence_dim": 1}, TOKENS, LAST),
    "row": (RowParallelLinear, {}, LAST, WHOLE),
    "row, slices": (RowParallelLinear, {"sequence_dim": 1}, LAST, TOKENS),
}


def made(layer, serial, group, options):
    kind, more = (layer.func, layer.keywords) if isinstance(layer, partial) else (layer, {})
    return kind.from_serial(serial, group, **options, **more)


def all_equal(world, serial, x, rel=1e-14, around=lambda layer: layer, vector=False):
    """Each layer beside its twin, both with something `around` them."""
    for layer, options, of, to in CASES.values():
        if not (vector and "sequence_dim" in options):
            one = serial(world)
            assert_matches_serial(around(one), around(made(layer, one, world, options)), x, world, rel, of, to)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize("n", [3, 1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_each_layer_is_its_twin(n, bias):
    run(all_equal, n, partial(twin, bias=bias), x_of())


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("n", [1, 2])
def test_complex_layers_are_their_twins(n):
    def serial(world):
        layer = twin(world).to(torch.complex128)
        with torch.no_grad():
            for i, p in enumerate(layer.parameters()):
                p.imag.copy_(twin(world, seed=i + 1).weight.flatten()[: p.numel()].view_as(p))
        return layer

    run(all_equal, n, serial, torch.complex(x_of(), x_of().sin()))


def test_vectors_and_what_comes_out_may_be_changed_in_place():
    def both(world):
        all_equal(world, twin, x_of()[0, 0], vector=True)
        all_equal(world, twin, x_of(), around=lambda layer: nn.Sequential(layer, nn.ReLU(inplace=True)))

    run(both, 2)


class UnderAutocast(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(x)
        assert y.dtype == (torch.float64 if x.dtype == torch.float64 else torch.bfloat16), "float64 is left as it is"
        return y


def test_under_autocast():
    def both(world):
        for dtype, rel in ((torch.float32, 0.01), (torch.float64, 1e-14)):
            all_equal(world, lambda group, dtype=dtype: twin(group).to(dtype), x_of().to(dtype), rel, UnderAutocast)

    run(both, 2)


def test_second_derivatives_are_the_twins_or_refused():
    """Of a column layer with its own backward they were left out, without a word, where no nonlinearity came behind."""

    def derivative(layer, x, more):
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((layer(x) * more).sum(), x, create_graph=True)
        (first.square().sum() + layer(x).square().sum()).backward()
        return layer.weight.grad

    def works(world):
        serial, out = twin(world, bias=False), []
        wanted = derivative(serial, x_of(), 2.0)
        for kind, x, dim in (
            (NaiveColumnParallelLinear, x_of(), 0),
            (RowParallelLinear, x_of().chunk(world.size, -1)[world.rank], 1),
        ):
            got = derivative(kind.from_serial(serial, world), x, 2.0)
            out.append((unshard(got, Shard(dim), world) - wanted).norm().item())
        for more in (2.0, torch.ones(1, requires_grad=True)):
            with pytest.raises(RuntimeError, match="has no second derivative, .* use NaiveColumnParallelLinear"):
                derivative(ColumnParallelLinear.from_serial(serial, world), x_of(), more)
        return out

    assert max(max(rank) for rank in run(works, 2)) < 1e-12


def test_a_pair_is_its_twin_with_other_seeds_on_each_rank():
    """What a constructor draws is rank 0's, and each rank has its part of it."""

    class Pair(nn.Module):
        def __init__(self, up, down):
            super().__init__()
            self.up, self.down = up, down

        def forward(self, x):
            return self.down(gelu(self.up(x)))

    def equal(world):
        torch.manual_seed(100 + world.rank)
        pair = Pair(ColumnParallelLinear(12, 24, world), RowParallelLinear(24, 12, world)).double()
        serial = Pair(nn.Linear(12, 24), nn.Linear(24, 12)).double()
        whole = {name: unshard(p, placement, world) for name, (p, placement) in parts(pair).items()}
        serial.load_state_dict(whole)
        assert_matches_serial(serial, pair, x_of(), world, 1e-14)
        pieces = comm.all_gather(pair.up.weight.flatten(0, 1)[None], world)
        return [torch.equal(pieces[0], other) for other in pieces[1:]]

    assert run(equal, 3) == [[False, False]] * 3, "no two ranks have the same rows"


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_messages_of_each_layer(n):
    def seen(world):
        out = {}
        for name, (layer, options, of, _) in CASES.items():
            parallel = made(layer, twin(world), world, options)
            x = x_of().chunk(world.size, of.dim)[world.rank] if of != WHOLE else x_of()
            x.requires_grad_()
            with trace.record(world.rank) as forward:
                y = parallel(x)
            with trace.record(world.rank) as backward:
                y.sum().backward()
            out[name] = [[(e.kind, e.payload_bytes) for e in half.events] for half in (forward, backward)]
        return out

    x, y = 8 * 2 * 12 * 12, 8 * 2 * 12 * 24  # bytes, whole
    slices_x = [("all_gather", x)]
    wanted = {
        **{f"{column.__name__} ": ([], [("all_reduce", x)]) for column in COLUMNS},
        "NaiveColumnParallelLinear slices": (slices_x, [("reduce_scatter", x)]),
        "ColumnParallelLinear slices": (slices_x, [("all_gather", x), ("reduce_scatter", x)]),
        "keeps its input": (slices_x, [("reduce_scatter", x)]),
        "row": ([("all_reduce", y)], []),
        "row, slices": ([("reduce_scatter", y)], [("all_gather", y)]),
    }
    for rank in run(seen, n):
        assert {name: tuple(sorted(half) for half in halves) for name, halves in rank.items()} == wanted


class Heads3(nn.Module):
    """Queries, keys and values in layers of their own, of different widths."""

    def __init__(self, q, k, v, together):
        super().__init__()
        self.q, self.k, self.v, self.together = q, k, v, together

    def forward(self, x):
        layers = self.q, self.k, self.v
        q, k, v = column_products(x, *layers) if self.together else [layer(x) for layer in layers]
        return q * (k + v).repeat_interleave(2, -1)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize("slices", [False, True], ids=["whole", "slices"])
@pytest.mark.parametrize("n", [3, 1, 2])
def test_layers_of_the_same_input_send_what_one_sends(n, slices):
    """And so they do where weight gradients are put off."""
    dim, lies = (1, TOKENS) if slices else (None, WHOLE)

    def seen(world):
        twins = [twin(world, 12, width, bias, seed=width) for width, bias in ((24, True), (12, False), (12, True))]
        parts = [ColumnParallelLinear.from_serial(one, world, sequence_dim=dim) for one in twins]
        together = Heads3(*parts, together=True)
        assert_matches_serial(Heads3(*twins, together=False), together, x_of(), world, 1e-14, lies, LAST)
        out = []
        for queue in (None, Queue()):
            together.zero_grad()
            x = (x_of().chunk(world.size, 1)[world.rank] if slices else x_of()).requires_grad_()
            with trace.record(world.rank) as recorded:
                with DeferWeightGradients(queue) if queue is not None else nullcontext():
                    y = together(x)
                y.sum().backward()
            if queue is not None:
                queue.run()
            out.append((sorted(e.kind for e in recorded.events), [p.grad.clone() for p in together.parameters()]))
        (kinds, now), (kinds_later, later) = out
        return kinds, kinds_later, max((a - b).abs().max().item() for a, b in zip(now, later, strict=True))

    kinds, kinds_later, apart = run(seen, n)[0]
    assert apart < 1e-13
    of_one = ["all_gather", "reduce_scatter"] if slices else ["all_reduce"]
    assert kinds_later == (of_one if n > 1 else [])
    assert kinds == (["all_gather"] * slices + of_one if n > 1 else []), "slices are collected once more in backward"


def test_what_is_frozen_or_first_sends_and_computes_less():
    def seen(world):
        out = []
        for frozen, first in ((False, True), (True, False)):
            layer = ColumnParallelLinear.from_serial(twin(world).requires_grad_(not frozen), world, sequence_dim=1)
            x = x_of().chunk(world.size, 1)[world.rank].requires_grad_(not first)
            y = layer(x)
            with trace.record(world.rank) as backward:
                y.sum().backward()
            has = [p.grad is not None for p in layer.parameters()]
            out.append(([e.kind for e in backward.events], has, x.grad is not None))
        return out

    first, frozen = run(seen, 2)[0]
    assert first == (["all_gather"], [True, True], False), "nobody asks for the gradient of the first input"
    assert frozen == (["reduce_scatter"], [False, False], True), "nor for that of a frozen weight: no input is needed"


@pytest.mark.parametrize(("dim", "sent"), [(None, ["all_reduce"]), (0, ["all_gather", "reduce_scatter"])])
def test_messages_are_on_their_way_while_the_weight_gradient_is_computed(dim, sent):
    def timed(world):
        layer = ColumnParallelLinear.from_serial(nn.Linear(256, 256), world, sequence_dim=dim)
        x = torch.randn(64, 256).requires_grad_()
        with comm.link(alpha_s=0.05, bandwidth_Bps=1e9):
            y = layer(x)
            with trace.record(world.rank) as seen:
                y.sum().backward()
        events, (span,) = sorted(seen.events, key=lambda e: e.start_s), seen.spans
        return [e.kind for e in events], events[-1].start_s <= span.start_s and span.end_s <= events[-1].end_s

    assert run(timed, 2) == [(sent, True)] * 2


def test_a_bias_is_added_once():
    def output(world):
        serial = nn.Linear(6, 2)
        nn.init.zeros_(serial.weight)
        nn.init.ones_(serial.bias)
        row = RowParallelLinear.from_serial(serial, world)
        return row(torch.ones(1, 6 // world.size)).tolist()

    assert run(output, 3) == [[[1.0, 1.0]]] * 3


def test_dtypes_and_meta():
    def works(world):
        half = ColumnParallelLinear.from_serial(nn.Linear(4, 4).bfloat16(), world)
        with torch.device("meta"):
            nowhere = RowParallelLinear(8, 4, world)
        alone = ColumnParallelLinear(4, 6, world, rows=Fused(0, (4, 2), (1, 1)))
        return half(torch.ones(1, 4).bfloat16()).dtype, nowhere.weight.is_meta, list(alone.weight.shape), repr(half)

    dtype, is_meta, shape, text = run(works, 2)[0]
    assert dtype == torch.bfloat16 and is_meta and shape == [3, 4]
    assert text == "ColumnParallelLinear(in_features=4, out_features=4, world, part [2, 4])"


WRONG = {
    "out_features": (
        lambda g: ColumnParallelLinear(4, 10, g),
        "out_features=10 cannot be split over world=4; use a multiple of 4",
    ),
    "in_features": (lambda g: RowParallelLinear(10, 4, g), "in_features=10 cannot be split over world=4"),
    "a part for a whole": (
        lambda g: ColumnParallelLinear(8, 4, g)(torch.ones(1, 2)),
        "x has 2 features, a shard of 8 on 4 ranks, but this layer needs all",
    ),
    "a whole for a part": (
        lambda g: RowParallelLinear(8, 4, g)(torch.ones(1, 8)),
        "x has all 8 features, but this rank works on 2 of them",
    ),
    "something else": (lambda g: ColumnParallelLinear(8, 4, g)(torch.ones(1, 5)), "this layer takes 8 features"),
    "something else for a part": (lambda g: RowParallelLinear(8, 4, g)(torch.ones(1, 5)), "takes 2 of 8 features"),
    "not alike": (
        lambda g: column_products(
            torch.ones(1, 8), ColumnParallelLinear(8, 4, g), ColumnParallelLinear(8, 4, g, sequence_dim=1)
        ),
        "sequence_dim=None, regather=True, and one on ranks (0, 1, 2, 3) with sequence_dim=1, regather=True",
    ),
    "tokens": (
        lambda g: RowParallelLinear(8, 4, g, sequence_dim=1)(torch.ones(1, 6, 2)),
        "sequence=6 cannot be split over world=4",
    ),
}


def test_wrong_use_is_named():
    texts = run(lambda world: [said(lambda call=call: call(world), ValueError) for call, _ in WRONG.values()], 4)[0]
    for text, (name, (_, message)) in zip(texts, WRONG.items(), strict=True):
        assert message in text, name


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding])
@pytest.mark.parametrize(
    ("serial", "says"),
    [
        (nn.Conv2d(4, 4, 1), "but got a Conv2d: keep it full on each rank, or write a layer that shards it"),
        (Scaled(4, 4), "Scaled"),
        (None, "but got a NoneType"),
    ],
)
def test_a_layer_of_another_kind_is_named(kind, serial, says):
    assert says in said(lambda: kind.from_serial(serial, Group()), TypeError)
    if kind is not VocabParallelEmbedding and isinstance(serial, Scaled):
        own = "Scaled is an nn.Linear with a forward of its own, which"
        assert said(lambda: kind.from_serial(serial, Group()), TypeError).startswith(own)


def test_a_group_of_another_axis_is_named():
    def wrong(world):
        mesh = Mesh(MeshShape(dp=2), world)
        for kind in (ColumnParallelLinear, RowParallelLinear):
            with pytest.raises(ValueError, match=r"a group along 'dp': use mesh.group\(\"tp\"\)"):
                kind(4, 4, mesh.group("dp"))
        return True

    assert run(wrong, 2) == [True, True]


def test_a_serial_layer_that_differs_between_ranks_becomes_that_of_rank_0():
    """Each rank may have drawn its own, with a seed of its own."""

    def sharded(world):
        torch.manual_seed(world.rank)
        serial = nn.Linear(4, 6)
        layer = ColumnParallelLinear.from_serial(serial, world)
        return serial.weight.detach(), unshard(layer.weight.detach(), layer.placements["weight"], world)

    (first, found), (second, same) = run(sharded, 2)
    assert not torch.equal(first, second)
    assert torch.equal(found, first) and torch.equal(same, first)
