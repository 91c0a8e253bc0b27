"""Every collective against a formula of one process, at one to four ranks; what is counted; what is refused."""

import functools
import sys
import time
import weakref
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from lib import comm, trace
from lib.deferred import DeferWeightGradients, Queue
from lib.launch import run
from lib.mesh import Group, Mesh, MeshShape
from lib.runtime import calls, gloo, pending
from tests.lib import kinds, sharding

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("machine")

DTYPES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.int64: 0, torch.int32: 0}


def data(rank, n, dtype, empty=False):
    """The same tensor wherever it is made: each dim can be split over n; not contiguous."""
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (2 * n, 0 if empty else n, 3 * n)
    x = torch.randint(-9, 9, shape[::-1], generator=generator).double()
    if dtype.is_floating_point:
        x = x + torch.rand(shape[::-1], generator=generator, dtype=torch.float64)
    return x.to(dtype).permute(2, 1, 0)


# ---- what each collective should give, from the inputs of all ranks -------------------------------------------------


def reduced(xs, op):
    x = torch.stack(xs).double()
    return {"sum": x.sum(0), "mean": x.sum(0) / len(xs), "max": x.amax(0), "min": x.amin(0)}[op]


def cases(n, dtype):
    """(name, the call, the formula, payload and wire as multiples of one rank's bytes)"""
    ring = (n - 1) / n
    for op in ("sum", "mean", "max", "min"):
        if op == "mean" and not dtype.is_floating_point:
            continue

        times = 2 if dtype == torch.bfloat16 and op in ("max", "min") else 1
        call = partial(comm.all_reduce, op=op)
        yield f"all_reduce {op}", call, lambda xs, r, op=op: reduced(xs, op), times, 2 * times * ring
        for dim in (0, 1, 2, -1, -3):

            def part(xs, r, dim=dim, op=op):
                return reduced(xs, op).chunk(len(xs), dim)[r]

            yield f"reduce_scatter {op} {dim}", partial(comm.reduce_scatter, dim=dim, op=op), part, 1, ring
    for dim in (0, 1, 2, -1, -2):
        yield f"all_gather {dim}", partial(comm.all_gather, dim=dim), lambda xs, r, d=dim: torch.cat(xs, d), n, n - 1
    for split in (0, 1, 2, -1):
        for concat in (0, 1, -1):
            swap = partial(comm.all_to_all, split_dim=split, concat_dim=concat)

            def swapped(xs, r, split=split, concat=concat):
                return torch.cat([x.chunk(len(xs), split)[r] for x in xs], concat)

            yield f"all_to_all {split} {concat}", swap, swapped, 1, ring
    for src in range(n):
        yield f"broadcast {src}", partial(comm.broadcast, src=src), lambda xs, r, s=src: xs[s], 1, ring


def reduces(world, xs, op):
    """`reduce` to each rank in turn: what is wrong, in words."""
    n, found = world.size, []
    for dst in range(n):
        x = xs[world.rank].clone(memory_format=torch.preserve_format)
        with trace.record(world.rank) as seen:
            y = comm.reduce(x, world, dst, op)
        want = reduced(xs, op) if world.rank == dst else None
        if (y is None) != (want is None) or y is not None and (y.double() - want.double()).abs().max() > 1e-12:
            found.append(f"reduce {op} to {dst}: {y} for {want}")
        if not torch.equal(x, xs[world.rank]) or y is not None and y.data_ptr() == x.data_ptr():
            found.append(f"reduce {op} to {dst}: argument changed")
        got = [(e.kind, e.peers, e.payload_bytes, e.wire_bytes) for e in seen.events]
        size = x.numel() * x.element_size()
        if got != [("reduce", world.ranks, size, size * (n - 1) / n)][: n - 1]:
            found.append(f"reduce {op} to {dst}: counted {got}")
    return found


def problems(world, group, dtype, tolerance):
    """All cases over a group: what is wrong, in words."""
    n, found = group.size, []
    for empty in (False, True):
        xs = [data(rank, n, dtype, empty) for rank in range(n)]
        x = xs[group.rank].clone(memory_format=torch.preserve_format)
        for name, call, formula, payload, wire in cases(n, dtype):
            with trace.record(world.rank) as seen, comm.label(name):
                y = call(x, group)
            want = formula(xs, group.rank)
            if y.dtype != dtype or y.shape != want.shape or not y.is_contiguous() or y.requires_grad:
                found.append(f"{name}: {comm.spec(y)} for {comm.spec(want)}")
            elif y.numel() and (y.double() - want.double()).abs().max() > tolerance * want.double().abs().max():
                found.append(f"{name}: {y} for {want}")
            if y.numel() and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                found.append(f"{name}: shares memory")
            if not torch.equal(x, xs[group.rank]):
                found.append(f"{name}: argument changed")
            size = x.numel() * x.element_size()
            kind = name.split()[0]
            want = [] if n == 1 or empty else [(kind, group.axis, group.ranks, size * payload, size * wire, name)]
            got = [(e.kind, e.axis, e.peers, e.payload_bytes, e.wire_bytes, e.label) for e in seen.events]
            if got != want or any(e.rank != world.rank or not e.start_s <= e.end_s for e in seen.events):
                found.append(f"{name}: counted {got} for {want}")
    return found


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize("n", [3, 1, 2, 4])
def test_every_collective_is_its_formula(n):
    def every(world):
        wide = [p for dtype, tolerance in DTYPES.items() for p in problems(world, world, dtype, tolerance)]
        alone = Group("tp", (world.rank,), 0)
        return wide + problems(world, alone, torch.float32, 1e-6) + problems(world, alone, torch.int32, 0)

    assert run(every, n) == [[]] * n


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize("n", [3, 1, 2, 4])
def test_reduce_gives_the_result_to_one(n):
    """With pieces so small that every tensor travels in several, the last of them short; among other messages."""

    def every(world):
        gloo._PIECE_BYTES = 40
        right, left = (world.rank + 1) % n, (world.rank - 1) % n
        around = [comm.recv(torch.empty(1), world, left)] if n > 1 else []
        xs = [data(rank, n, torch.float64) for rank in range(n)]
        found = [problem for op in ("sum", "mean", "max", "min") for problem in reduces(world, xs, op)]
        found += reduces(world, [data(rank, n, torch.int32) for rank in range(n)], "sum")
        around += [comm.send(torch.full((1,), float(world.rank)), world, right)] if n > 1 else []
        return found, [p.wait() for p in around][:1] in ([], [torch.tensor([float(left)])])

    assert run(every, n) == [([], True)] * n


NOT_FINITE = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.5, 6e-8, -6e-8]


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize("n", [3, 1, 2])
def test_max_and_min_are_those_of_torch_whichever_rank_holds_nan(n):
    """The max and min of gloo and NCCL drop the NaN of some ranks."""

    def works(world, nccl):
        if nccl:  # what NCCL reduces, gloo would here
            dist.get_backend = lambda pg: "nccl"
        bad = []
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32):
            rows = torch.tensor(NOT_FINITE if dtype.is_floating_point else range(-4, 5)).to(dtype)
            xs = [*torch.cartesian_prod(*[rows] * n).view(-1, n).T]  # each value with each, on each rank
            x = xs[world.rank]
            for op, of_two in (("max", torch.maximum), ("min", torch.minimum)):
                want = functools.reduce(of_two, xs)
                scattered = comm.reduce_scatter(x.repeat(n), world, op=op)
                got = [comm.all_reduce(x, world, op), comm.all_reduce_start(x, world, op).wait(), scattered]
                got += [y for dst in range(n) if (y := comm.reduce(x, world, dst, op)) is not None]
                for y in got:
                    if y.dtype != dtype or not torch.allclose(y, want, rtol=0, atol=0, equal_nan=True):
                        bad.append((op, dtype, y, want))
        return bad

    for nccl in (False, True):
        assert run(works, n, nccl) == [[]] * n


def test_alone_too_each_collective_returns_a_new_tensor():
    for call in (comm.all_reduce, comm.reduce_scatter, comm.all_gather, comm.all_to_all, comm.broadcast, comm.reduce):
        x = torch.arange(4.0)  # contiguous: nothing needs a copy but this promise
        call(x, Group()).fill_(9)
        assert x.tolist() == [0, 1, 2, 3], call


def test_two_axes_at_once():
    """A 2 x 2 mesh: collectives along dp and tp under way at the same time, then a message along each."""

    def works(world):
        mesh = Mesh(MeshShape(dp=2, tp=2), world)
        dp, tp = mesh.group("dp"), mesh.group("tp")
        me = torch.tensor([float(world.rank)])
        with trace.record(world.rank) as seen:
            pending = [
                comm.all_reduce_start(me, dp),
                comm.all_gather_start(me, tp),
                comm.reduce_scatter_start(torch.cat([me, 10 * me]), dp),
                comm.all_reduce_start(me, tp, "max"),
            ]
            got = [p.wait().tolist() for p in reversed(pending)][::-1]
            got += [comm.exchange({1 - g.rank: me}, {1 - g.rank: me}, g).wait()[1 - g.rank].item() for g in (dp, tp)]
        wrong = [problem for group in (dp, tp) for problem in problems(world, group, torch.float64, 1e-14)]
        return got, wrong, seen.traffic()

    for rank, (got, wrong, traffic) in enumerate(run(works, 4)):
        dp, tp = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert wrong == []
        largest = sum(dp) * (10 if rank >= 2 else 1)
        assert got == [[sum(dp)], tp, [largest], [max(tp)], sum(dp) - rank, sum(tp) - rank]
        sent = [("all_reduce", "dp"), ("all_gather", "tp"), ("reduce_scatter", "dp"), ("all_reduce", "tp")]
        sent += [("send", "dp"), ("send", "tp")]
        assert traffic == dict.fromkeys(sent, (1, 4)) | {("recv", axis): (1, 0) for axis in ("dp", "tp")}


def test_out_reuses_memory():
    def works(world):
        x = torch.arange(4.0)
        same = comm.all_reduce(x, world, out=x)
        other = torch.empty(2, 2)
        p = torch.nn.Parameter(torch.ones(3))
        kept = [same is x, comm.all_reduce(torch.ones(2, 2), world, "mean", out=other) is other]
        kept.append(comm.all_reduce(p, world, "mean", out=p) is p)
        return kept, x.tolist(), other.tolist(), p.grad_fn, p.tolist(), comm.all_gather(p, world).requires_grad

    for n in (1, 2):
        want = [True] * 3, [0, n, 2 * n, 3 * n], [[1, 1], [1, 1]], None, [1, 1, 1], False
        assert run(works, n) == [want] * n


def test_out_along_dim_0_may_be_the_slice_itself():
    def works(world):
        n, mine = world.size, slice(2 * world.rank, 2 * world.rank + 2)
        x = torch.arange(2.0 * n) + world.rank
        part = comm.reduce_scatter(x, world, op="mean", out=x[mine])
        others = [i for i in range(2 * n) if not mine.start <= i < mine.stop]
        kept = x[others].tolist() == [i + world.rank for i in others]
        whole = comm.all_gather(part, world, out=x)
        return part.data_ptr() == x[mine].data_ptr(), kept, whole is x, x.tolist()

    for n in (1, 2, 3):
        mean = [i + (n - 1) / 2 for i in range(2 * n)]
        assert run(works, n) == [(True, True, True, mean)] * n


def test_pending_waits_once_and_may_be_forgotten():
    def works(world):
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        with trace.record(world.rank) as seen:
            summed = comm.all_reduce_start(torch.ones(3), world)
            first, again = summed.wait(), summed.wait()
            comm.send(torch.full((1000,), float(world.rank)), world, right)  # nobody waits, and it arrives
            comm.all_gather_start(torch.ones(3), world)
            got = comm.recv(torch.empty(1000), world, left).wait()
            comm.barrier(world)
        return first is again, got.unique().tolist() == [left], [e.kind for e in seen.events], len(pending._works)

    assert run(works, 3) == [(True, True, ["all_reduce", "recv", "barrier", "send"], 2)] * 3


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.uint32, torch.float8_e5m2])
def test_dtypes_that_backends_do_not_know_are_moved_and_not_added_up(dtype):
    def works(world):
        n, said = world.size, []
        xs = [(torch.arange(6 * n) % (2 + rank)).reshape(n, 6).to(dtype) for rank in range(n)]
        x = xs[world.rank]
        moved = [
            comm.all_gather(x, world, 1).tolist() == torch.cat(xs, 1).tolist(),
            comm.all_to_all(x, world).tolist() == torch.cat([y[world.rank :][:1] for y in xs]).tolist(),
            comm.broadcast(x, world, 1).tolist() == xs[1].tolist(),
            comm.broadcast(x[0, 1], world, 1).item() == xs[1][0, 1].item(),
        ]
        for reduce in (comm.all_reduce, comm.reduce_scatter, comm.reduce):
            try:
                got = reduce(x, world)
                right = torch.stack(xs).any(0)
                right = right[world.rank :][:1] if reduce is comm.reduce_scatter else right
                moved.append(got is None or got.view(torch.uint8).tolist() == right.int().tolist())
            except ValueError as error:
                said.append(str(error))
        return moved, said

    name = str(dtype)[6:]
    for moved, said in run(works, 3):
        assert all(moved)
        assert len(said) == (0 if dtype == torch.bool else 3)
        assert all(f"no backend reduces {name}[3, 6]; use x." in text for text in said)


def test_messages():
    """Strided and empty ones, several to the same rank in order, a ring by exchange."""

    def works(world):
        n, me = world.size, world.rank
        right, left = (me + 1) % n, (me - 1) % n
        x = torch.arange(12.0).reshape(3, 4).T + me
        with trace.record(me) as seen:
            got = comm.exchange({right: x}, {left: x}, world).wait()
            pending = [comm.send(torch.full((i,), float(i)), world, right) for i in range(4)]
            sizes = [comm.recv(torch.empty(i), world, left).wait().tolist() for i in range(4)]
            [p.wait() for p in pending]
            nobody = comm.exchange({}, {}, world).wait()
        events = [(e.kind, e.peers, e.payload_bytes, e.wire_bytes) for e in seen.events]
        y = got[left]
        ok = list(got) == [left] and torch.equal(y, x - me + left) and y.is_contiguous() and nobody == {}
        return ok, sizes, [p.wait() for p in pending], events

    for n in (2, 3):
        for rank, (ok, sizes, sent, events) in enumerate(run(works, n)):
            right, left = ((rank + 1) % n,), ((rank - 1) % n,)
            assert ok and sizes == [[float(i)] * i for i in range(4)] and sent == [None] * 4
            assert events == [
                ("send", right, 48, 48.0),
                ("recv", left, 48, 0.0),
                *[("recv", left, 4 * i, 0.0) for i in (1, 2, 3)],
                *[("send", right, 4 * i, 4.0 * i) for i in (1, 2, 3)],
            ]


@pytest.mark.thorough("more ranks", keep=2)
@pytest.mark.parametrize("n", [3, 2, 1, 4])
def test_a_shift_brings_the_tensor_of_the_rank_before(n):
    """Also of a view, of integers, into a given tensor, and of nothing; a rank sends its whole tensor."""

    def works(world):
        found, before = [], (world.rank - 1) % n
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
            mine, wanted = (torch.arange(12).view(3, 4).add(r).to(dtype).T for r in (world.rank, before))
            with trace.record(world.rank) as recorded:
                got, out = comm.shift(mine, world), torch.empty(4, 3, dtype=dtype)
                comm.shift_start(mine, world, out).wait()
            sent = 2 * mine.nbytes * (n > 1)
            found += [torch.equal(got, wanted) and torch.equal(out, wanted), recorded.wire_bytes == sent]
        return found + [comm.shift(torch.empty(0), world).shape == (0,)]

    assert run(works, n) == [[True] * 9] * n


def test_labels_nest_and_belong_to_the_start():
    def works(world):
        with trace.record(world.rank) as seen:
            with comm.label("outer"):
                with comm.label("inner"):
                    pending = comm.all_reduce_start(torch.ones(1), world)
                comm.barrier(world)
            pending.wait()
            comm.barrier(world)
        return [(e.kind, e.label) for e in seen.events]

    assert run(works, 2)[0] == [("barrier", "outer"), ("all_reduce", "inner"), ("barrier", "")]


def test_more_channels_than_places():
    """A new one has the place of the oldest."""

    def works(world):
        for i in range(200):
            calls.table.call(f"channel {i}", (), "a call", "here")
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        return [comm.all_reduce(torch.ones(2), Group("x", (0, 1), world.rank, g)).tolist() for g in groups]

    assert run(works, 2) == [[[2, 2], [2, 2]]] * 2


FOUR = torch.ones(4)
BAD = [
    (lambda g: comm.all_reduce(torch.ones(4), g, "avg"), "unknown op 'avg'; use one of sum, mean, max, min"),
    (lambda g: comm.reduce_scatter(torch.ones(4), g, op="prod"), "unknown op 'prod'"),
    (lambda g: comm.all_reduce(torch.ones(4, dtype=torch.int64), g, "mean"), r"the mean of int64\[4\]"),
    (lambda g: comm.reduce_scatter(torch.ones(4, dtype=torch.int32), g, op="mean"), r"the mean of int32\[4\]"),
    (lambda g: comm.all_reduce(FOUR, g, out=torch.ones(2, 2)), r"contiguous float32\[4\], but is float32\[2, 2\]"),
    (lambda g: comm.all_reduce(FOUR, g, out=FOUR.double()), r"contiguous float32\[4\], but is float64\[4\]"),
    (lambda g: comm.all_reduce(torch.ones(2, 2), g, out=torch.ones(2, 2).T), "not contiguous"),
    (lambda g: comm.all_gather(FOUR, g, out=FOUR), r"contiguous float32\[16\], but is float32\[4\]"),
    (lambda g: comm.all_gather(torch.ones(4, 4), g, 1, out=torch.ones(4, 16)), "along dim 0, .* but dim=1"),
    (lambda g: comm.reduce_scatter(torch.ones(4), g, out=torch.ones(4)), r"contiguous float32\[1\], but is"),
    (lambda g: comm.recv(torch.ones(4), g, (g.rank + 1) % 4, out=torch.ones(8)[::2]), "not contiguous"),
    (lambda g: comm.reduce_scatter(torch.ones(4), g, dim=1), r"dim=1 does not exist in a tensor of shape \[4\]"),
    (lambda g: comm.all_gather(torch.ones(4), g, dim=-2), "dim=-2 does not exist"),
    (lambda g: comm.all_gather(torch.tensor(1.0), g), r"dim=0 does not exist in a tensor of shape \[\]"),
    (lambda g: comm.all_to_all(torch.ones(4), g, concat_dim=3), "dim=3 does not exist"),
    (lambda g: comm.broadcast(torch.ones(4), g, src=4), "src=4 is not in this group of 4 ranks"),
    (lambda g: comm.broadcast(torch.ones(4), g, src=-1), "src=-1 is not in this group of 4 ranks"),
    (lambda g: comm.send(torch.ones(4), g, 9), "dst=9 is not in this group of 4 ranks"),
    (lambda g: comm.all_reduce(FOUR.cfloat(), g, "max"), "complex numbers have no order; use x.abs"),
    (lambda g: comm.recv(torch.ones(4), g, 9), "src=9 is not in this group of 4 ranks"),
    (lambda g: comm.send(torch.ones(4), g, g.rank), "is this rank itself"),
    (lambda g: comm.recv(torch.ones(4), g, g.rank), "is this rank itself"),
    (lambda g: comm.reduce_scatter(torch.ones(10), g), "dim 0 has size 10, which cannot be split over 4 ranks.*of 4"),
    (lambda g: comm.all_to_all(torch.ones(4, 10), g, 1), "dim 1 has size 10, which cannot be split over 4 ranks"),
]


def test_bad_input():
    """Refused before a byte moves, on every rank; then the same group works."""

    def asks(world):
        messages = []
        for call, _ in BAD:
            try:
                messages.append(f"no error: {call(world)}")
            except ValueError as error:
                messages.append(str(error))
        comm.barrier(world)
        return messages

    for messages in run(asks, 4):
        for message, (_, text) in zip(messages, BAD, strict=True):
            with pytest.raises(ValueError, match=text):
                raise ValueError(message)


def test_what_is_sent_is_freed_also_where_a_mode_watches_functions():
    """torch never frees a collective's tensors if it is started under a TorchFunctionMode, as zero bubble's are."""

    def kept(world):
        alive = []
        with DeferWeightGradients(Queue()):
            for _ in range(5):
                alive.append(weakref.ref(comm.all_reduce(torch.ones(1000), world).untyped_storage()))
        time.sleep(0.05)  # gloo's threads let go of a message a moment after it has arrived
        return sum(storage() is not None for storage in alive)

    assert run(kept, 2) == [0, 0]


# ---- tensors whose memory is not their elements ----------------------------------------------------------------------


def every_call(world):
    """(name, call, what it returns for the values of all ranks) of each function of `comm`."""
    n, me = world.size, world.rank
    right, left = (me + 1) % n, (me - 1) % n

    def message(x):
        going = comm.send(x, world, right)
        coming = comm.recv(x, world, left).wait()
        going.wait()
        return coming

    def agree(x):
        comm.broadcast_coalesced([x], world)
        return kinds.values(x)

    def total(xs):
        return torch.stack(xs).sum(0)

    yield "all_reduce", lambda x: comm.all_reduce(x, world), total
    yield "all_reduce_start", lambda x: comm.all_reduce_start(x, world, "mean").wait(), lambda xs: total(xs) / n
    yield "all_reduce out=", lambda x: comm.all_reduce(x, world, out=torch.empty_like(kinds.values(x))), total
    yield "reduce_scatter", lambda x: comm.reduce_scatter(x, world), lambda xs: total(xs).chunk(n)[me]
    yield "all_gather", lambda x: comm.all_gather(x, world), torch.cat
    yield "all_gather 1", lambda x: comm.all_gather(x, world, 1), lambda xs: torch.cat(xs, 1)
    yield "all_to_all", lambda x: comm.all_to_all(x, world), lambda xs: torch.cat([x.chunk(n)[me] for x in xs])
    yield "broadcast", lambda x: comm.broadcast(x, world, n - 1), lambda xs: xs[-1]
    yield "reduce", lambda x: comm.reduce(x, world), lambda xs: None if me else total(xs)
    yield "send", message, lambda xs: xs[left]
    yield "exchange", lambda x: comm.exchange({right: x}, {left: x}, world).wait()[left], lambda xs: xs[left]
    yield "agree", agree, lambda xs: xs[0]  # the last, because it changes x


READ_ONLY = ("conjugate, of an inference", "zeros without memory")  # which `agree` cannot overwrite


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("n", [2, 3])
def test_the_values_of_a_view_arrive_whatever_its_memory(n):
    def works(world):
        found = []
        for kind in kinds.arriving(world.rank):
            x, _ = kinds.arriving(world.rank)[kind]  # afresh, because one kind is a view of another
            for name, call, formula in every_call(world):
                if name == "agree" and kind in READ_ONLY:
                    continue
                if problem := kinds.wrong(call(x), formula(kinds.right_of(world, kind))):
                    found.append(f"{name} of {kind}: {problem}")
        return found

    assert run(works, n) == [[]] * n


def test_what_no_message_can_carry_is_refused_on_every_rank():
    """Before a byte moves: then the same group works."""

    def asks(world):
        messages = {}
        with trace.record(world.rank) as seen:
            for kind, (x, says) in (kinds.refused(world.size) | META).items():
                for name, call, _ in every_call(world):
                    if name.endswith("out=") or kind == "meta" and name == "agree":
                        continue
                    try:
                        messages[kind, name] = f"no error: {call(x)}"
                    except ValueError as error:
                        messages[kind, name] = "" if says in str(error) else str(error)
            for kind in READ_ONLY:
                x, _ = kinds.arriving(world.rank)[kind]
                messages[kind] = sharding.said(
                    lambda x=x: comm.broadcast_coalesced([torch.ones(3), x], world), ValueError
                )
            good, bad = {1 - world.rank: torch.ones(3)}, {1 - world.rank: torch.eye(3).to_sparse()}
            messages["exchange"] = sharding.said(lambda: comm.exchange(good, bad, world), ValueError)
            messages["to 9"] = sharding.said(lambda: comm.exchange(good | {9: torch.ones(3)}, {}, world), ValueError)
        comm.barrier(world)
        return len(seen.events), {name: text for name, text in messages.items() if text}

    for events, messages in run(asks, 2):
        assert events == 0
        assert all("[12, 3] is read-only, and would be overwritten" in messages.pop(kind) for kind in READ_ONLY)
        assert messages.pop("exchange").endswith("got sparse_coo float32[3, 3]; use x.to_dense()")
        assert "dst=9 is not in this group" in messages.pop("to 9")
        assert messages == {}


META = {"meta": (torch.empty(12, 3, device="meta"), "float32[12, 3] on the meta device has none: load it before")}


def test_out_may_be_another_view_of_the_same_memory():
    def works(world):
        n, x, z = world.size, torch.arange(9.0), torch.tensor([[1 + 1j, 2 - 1j], [3 + 0j, 4 + 2j]])
        shifted = comm.all_reduce(x[:-1], world, out=x[1:]).tolist()
        conjugate = comm.all_reduce(z.mH, world, out=z).tolist()
        y = torch.arange(2.0 * n + 1)
        gathered = comm.all_gather(y[1:3], world, out=y[: 2 * n]).tolist()
        w = torch.arange(2.0 * n + 1)
        scattered = comm.reduce_scatter(w[: 2 * n], world, out=w[1:3]).tolist()
        return shifted, conjugate, gathered, scattered

    for n in (1, 2):
        for rank, (shifted, conjugate, gathered, scattered) in enumerate(run(works, n)):
            assert shifted == [float(n * i) for i in range(8)] and gathered == [1, 2] * n
            assert conjugate == [[n * (1 - 1j), n * 3], [n * (2 + 1j), n * (4 - 2j)]]
            assert scattered == [n * 2 * rank, n * (2 * rank + 1)]


def test_an_out_that_cannot_be_filled_is_refused():
    def asks(world):
        ones, bar = torch.ones(12, 3), torch.zeros(12, 3, dtype=torch.complex64).conj()
        with torch.inference_mode():
            of_inference = torch.zeros(12, 3)
        outs = [bar, torch._neg_view(ones), of_inference, META["meta"][0], torch.zeros(12, 3).to_sparse(), [0.0]]
        said_of = [sharding.said(lambda o=o: comm.all_reduce(ones, world, out=o), ValueError) for o in outs]
        in_place = [sharding.said(lambda o=o: comm.all_reduce(o, world, out=o), ValueError) for o in outs[:3]]
        whole, like = torch.zeros(24, 3), torch.zeros(12, 3)
        more = [
            sharding.said(lambda: comm.all_gather(ones, world, out=torch._neg_view(whole)), ValueError),
            sharding.said(lambda: comm.reduce_scatter(whole, world, out=torch._neg_view(like)), ValueError),
            sharding.said(lambda: comm.recv(like, world, 1 - world.rank, out=torch._neg_view(like)), ValueError),
        ]
        own = torch.zeros(12, 3).as_subclass(kinds.Deaf)
        kept = comm.all_reduce(ones, world, out=own) is own and comm.all_reduce(own, world, out=own) is own
        return said_of, in_place, more, kept, kinds.values(own).unique().tolist()

    for said_of, in_place, more, kept, total in run(asks, 2):
        ends = ["complex64[12, 3], a conjugate view", "float32[12, 3], a negative view", "float32[12, 3], read-only"]
        ends += [
            "float32[12, 3], on meta instead of cpu",
            "but is sparse_coo float32[12, 3]; use x.to_dense()",
            "list;",
        ]
        assert all(end in text for end, text in zip(ends, said_of, strict=True)), said_of
        assert all(end in text for end, text in zip(ends, in_place, strict=False)), in_place
        assert all("out must be contiguous float32" in text and "a negative view" in text for text in more), more
        assert kept and total == [4]


@pytest.mark.parametrize("group", [None, dist.ProcessGroup(0, 2)])
def test_what_is_no_group_of_ours_is_refused(group):
    x = torch.ones(4)
    one = {1: x}
    calls = [
        *(
            lambda: comm.all_reduce(x, group),
            lambda: comm.reduce_scatter(x, group),
            lambda: comm.all_gather(x, group),
        ),
        *(lambda: comm.all_to_all(x, group), lambda: comm.broadcast(x, group), lambda: comm.reduce(x, group)),
        *(lambda: comm.barrier(group), lambda: comm.send(x, group, 1), lambda: comm.recv(x, group, 1)),
        *(lambda: comm.exchange(one, one, group), lambda: comm.all_gather_object(x, group)),
        *(lambda: comm.broadcast_coalesced([x], group), lambda: Mesh(MeshShape(dp=2), group)),
    ]
    for call in calls:
        with pytest.raises(
            TypeError, match=f"must be a Group of mesh.py, but got {'None' if group is None else 'a process group'}"
        ):
            call()
