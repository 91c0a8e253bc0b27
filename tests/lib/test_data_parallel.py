"""All forms of data parallelism, from DDP to FSDP, beside one process, beside PyTorch, and beside the formulas.

Ranks start from different seeds on purpose. Many cases share one `run`: each returns what it measured by name.
"""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from book.trials import wire_audit
from lib import cost, data, run, trace
from lib.data_parallel.ddp import global_mean
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.zero import ZeRO1, ZeRO2
from lib.memory import MemoryTracker
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPTConfig, loss_sum_and_count, mean_loss
from lib.verify import largest_difference, weights
from tests.lib.sharding import (
    ENGINES,
    SHARDED,
    WIRE_BYTES,
    adamw,
    batch,
    beside_bfloat16,
    beside_twin,
    end_apart,
    gpt,
    gradients_apart,
    in_buckets,
    momentum,
    nothing_gathered,
    rows,
    said,
    save_and_go_on,
    sent_as_promised,
    some_steps,
    toy,
    trained,
)

ALONE = Group()
CASES = [  # form and its options, blocks, optimizer, op, microbatches, reduced each, tied, steps
    ("NaiveDDP", {}, "blfb", adamw, "mean", 1, False, True, 3),
    ("NaiveDDP", {}, "blfb", momentum, "sum", 3, False, False, 2),
    ("BucketedDDP", {"bucket_bytes": 1}, "blfb", adamw, "mean", 3, False, True, 3),
    ("BucketedDDP", {"bucket_bytes": 300}, "blfb", adamw, "sum", 1, False, True, 3),
    ("BucketedDDP", {"bucket_bytes": 2**40}, "blfb", momentum, "sum", 3, False, False, 2),
    ("NaiveZeRO1", {}, "blfb", adamw, "mean", 1, False, True, 4),
    ("NaiveZeRO1", {}, "blfb", momentum, "sum", 2, False, False, 2),
    ("ZeRO1", {"bucket_bytes": 300}, "blfb", adamw, "mean", 1, False, True, 4),
    ("ZeRO1", {"bucket_bytes": 1}, "blfb", momentum, "sum", 1, False, False, 2),
    ("ZeRO1", {}, "blfb", adamw, "sum", 2, False, True, 2),
    ("ZeRO2", {"bucket_bytes": 300}, "blfb", adamw, "mean", 1, False, True, 4),
    ("ZeRO2", {"bucket_bytes": 1}, "blfb", momentum, "mean", 2, True, False, 2),
    ("ZeRO2", {}, "blfb", adamw, "sum", 2, False, True, 2),
    ("FSDP", {}, "blfb", adamw, "mean", 1, False, True, 4),
    ("FSDP", {"reshard_after_forward": False}, "flb", adamw, "mean", 1, False, False, 2),
    ("FSDP", {"prefetch": False}, "elfb", momentum, "sum", 2, True, False, 2),
    ("FSDP", {}, "eflbl", adamw, "sum", 2, False, False, 2),
    ("FSDP", {"reshard_after_forward": False, "prefetch": False}, "bbb", momentum, "mean", 2, True, True, 2),
]


def all_steps(world):
    warnings.filterwarnings("ignore", "grad and param do not obey")  # torch on the twin's transposed parameter
    out = []
    for name, how, blocks, optimizer, op, K, each, tied, steps in CASES:
        model = ENGINES[name](toy(100 + world.rank, blocks=blocks, tied=tied), world, optimizer, op=op, **how)
        twin = toy(100, blocks=blocks, tied=tied)
        worst = beside_twin(model, twin, optimizer, op, K, each, unused=name != "FSDP", steps=steps)
        out.append((worst, *end_apart(model, twin), name != "FSDP" or nothing_gathered(model)))
    return out


@pytest.mark.thorough("up to five ranks", keep=2)
@pytest.mark.parametrize("n", [3, 1, 2, 4, 5])
def test_steps_equal_one_process(n):
    for rank, cases in enumerate(run(all_steps, n)):
        for case, (worst, apart, equal, nothing) in zip(CASES, cases, strict=True):
            where = f"{case}, rank {rank} of {n}: {worst}, weights {apart}"
            # Of later steps, too: by then weights differ by roundings, how far depends on the processor.
            assert worst["loss"] < 1e-12 and worst["gradient"] < 1e-11 and apart < 1e-8, where
            assert equal and nothing, where


def test_more_ranks_than_numbers():
    """Two numbers for four ranks: some own nothing but padding, and take part in all messages."""

    def steps(world):
        out = []
        for make in ENGINES.values():
            torch.manual_seed(world.rank)
            model = make(nn.Linear(1, 1).double(), world, adamw)
            torch.manual_seed(0)
            twin = nn.Linear(1, 1).double()
            optimizer = adamw(twin.parameters())
            x = torch.arange(1.0, 5, dtype=torch.float64)[:, None]
            for _ in range(3):
                optimizer.zero_grad()
                (twin(x) - 3).square().mean().backward()
                (model(x[world.rank : world.rank + 1]) - 3).square().mean().backward()
                model.finish()
                norm = model.clip_gradients(0.1)
                assert abs(norm / nn.utils.clip_grad_norm_(twin.parameters(), 0.1) - 1) < 1e-12
                optimizer.step()
                model.step()
            if hasattr(model, "flats"):
                model.load_sharded_state_dict(model.sharded_state_dict())
            out.append(end_apart(model, twin))
        return out

    assert all(apart < 1e-12 and equal for rank in run(steps, 4) for apart, equal in rank)


def test_the_mean_over_tokens_with_uneven_and_empty_shares():
    """A rank without rows runs forward and backward on none; or skips them, but for FSDP, whose gathers are shared."""

    def cases(world):
        out = {}
        for name, make in in_buckets(2000).items():
            for shares in ([3, 1, 2], [5, 0, 1], [0, 0, 6]):
                for skips in (False, True)[: 1 if name == "FSDP" else 2]:
                    inputs, targets = rows(7, 6)
                    targets[0, 2:] = -100
                    targets[2] = -100
                    model, twin = make(gpt(world.rank).double(), world, adamw, op="sum"), gpt(0).double()
                    mine = data.rows_of_rank(6, world.rank, 3, shares)
                    if shares[world.rank] or not skips:
                        global_mean(*loss_sum_and_count(model(inputs[mine]), targets[mine]), world).backward()
                    else:
                        global_mean(torch.zeros(()), 0, world)  # takes part in the count
                    model.finish()
                    mean_loss(twin(inputs), targets).backward()
                    out[name, *shares, skips] = gradients_apart(model, twin)
        return out

    for apart in run(cases, 3):
        assert len(apart) == 33 and max(apart.values()) < 1e-12, apart


@pytest.mark.thorough("seconds of several processes")
def test_pytorchs_own_forms_agree():
    def beside(world):
        ddp, again = (nn.parallel.DistributedDataParallel(gpt(world.rank).double()) for _ in range(2))
        shards, mesh = gpt(0).double(), init_device_mesh("cpu", (world.size,))
        for block in (*shards.blocks, shards):
            fully_shard(block, mesh=mesh)
        theirs = [(ddp, adamw(ddp.parameters())), (shards, adamw(shards.parameters()))]
        theirs.append((again, ZeroRedundancyOptimizer(again.parameters(), torch.optim.AdamW, lr=1e-2)))
        ours = [make(gpt(world.rank).double(), world, adamw) for make in ENGINES.values()]
        for step in range(10):
            inputs, targets = rows(10 * step + world.rank, 2)
            for model, optimizer in theirs:
                optimizer.zero_grad()
                mean_loss(model(inputs), targets).backward()
                optimizer.step()
            for model in ours:
                mean_loss(model(inputs), targets).backward()
                model.finish()
                model.step()
        whole = {name: p.full_tensor().detach() for name, p in shards.named_parameters()}
        states = [one.full_state_dict() if hasattr(one, "flats") else weights(one.module) for one in ours]
        return max(
            largest_difference({name: state[name] for name in want}, want)
            for want in (whole, weights(ddp.module), weights(again.module))
            for state in states
            if state
        )

    assert max(run(beside, 3)) < 1e-8


# ---- clipping, axes, dtypes -----------------------------------------------------------------------------------------


def test_clipping_is_by_the_norm_of_the_whole_gradient_on_one_axis_of_a_mesh():
    def clipped(world):
        warnings.filterwarnings("ignore", "grad and param do not obey")
        mesh = Mesh(MeshShape(dp=2, tp=2), world)
        group, seed, out = mesh.group("dp"), 7 * mesh.group("tp").rank, []  # a different model on each tp rank
        for make in in_buckets(300).values():
            with trace.record(world.rank) as recorded:
                model, twin = make(toy(seed + 100 * group.rank), group, momentum), toy(seed)
                worst = beside_twin(model, twin, momentum, steps=4, clip=0.05, unused=False)
                apart, _ = end_apart(model, twin)
                inputs, targets = batch(0, 1)
                mean_loss(model(inputs, True), targets).backward()
                model.finish()
                norm = model.clip_gradients(1e9).item()
            out.append((worst, apart, {(e.axis, e.peers) for e in recorded.events}, norm))
        return out

    results = run(clipped, 4)
    for rank, cases in enumerate(results):
        for (worst, apart, axes, norm), (*_, first) in zip(cases, results[rank % 2], strict=True):
            assert worst["norm"] < 1e-12 and worst["gradient"] < 1e-12 and apart < 1e-8
            assert axes == {("dp", (rank % 2, rank % 2 + 2))}
            assert norm == first  # bit by bit, or ranks would scale by different factors


class Mixed(nn.Module):
    """Layers of two dtypes, sparse gradients, buffers of dtypes that backends do not know."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 4, sparse=True)
        self.narrow, self.wide = nn.Linear(4, 3), nn.Linear(3, 5).double()
        self.register_buffer("short", torch.arange(4, dtype=torch.int16))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, words):
        return self.wide(self.narrow(self.words(words)).double()).square().mean()


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize("name", ["BucketedDDP", "ZeRO1", "NaiveDDP", "NaiveZeRO1", "ZeRO2"])
def test_mixed_dtypes_sparse_gradients_and_odd_buffers(name):
    def steps(world, op):
        sgd, n = partial(torch.optim.SGD, lr=0.1), world.size
        torch.manual_seed(0)
        twin = Mixed()
        torch.manual_seed(world.rank)
        mine = Mixed()
        mine.short += world.rank
        model = ENGINES[name](mine, world, sgd, op)
        optimizer, apart = sgd(twin.parameters()), 0.0
        for step in range(3):
            words = torch.tensor([[0, 1], [2, step]])
            optimizer.zero_grad()
            for some in words:
                (twin(some) / (n if op == "mean" else 1)).backward()
            twin.words.weight.grad = twin.words.weight.grad.to_dense()
            norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
            optimizer.step()
            model(words[world.rank]).backward()
            model.finish()
            model.finish()  # sums once
            apart = max(apart, abs(model.clip_gradients(0.01) / norm - 1).item())
            model.step()
        return apart, largest_difference(weights(model.module), weights(twin)), torch.equal(mine.short, twin.short)

    for op in ("mean", "sum"):
        for apart, differ, same in run(steps, 2, op):
            assert apart < 1e-6 and differ < 1e-6 and same


@pytest.mark.parametrize("wrap", SHARDED)
def test_mixed_precision_is_bfloat16_with_float32_masters(wrap):
    how = {"reshard_after_forward": False} if wrap is FSDP else {"bucket_bytes": 2000}
    for masters, moved, dtypes in run(partial(beside_bfloat16, wrap=partial(wrap, **how)), 2):
        assert masters < 1e-6 < 0.05 < moved and dtypes == {torch.float32}, masters


@pytest.mark.parametrize("wrap", SHARDED)
def test_updates_that_bfloat16_cannot_see_add_up_in_the_masters(wrap):
    model = wrap(nn.Linear(3, 1, bias=False), ALONE, partial(torch.optim.SGD, lr=2**-10), dtype=torch.bfloat16)
    model.load_full_state_dict({"weight": torch.ones(1, 3)})
    seen = []
    for _ in range(8):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        model.finish()
        model.step()
        seen.append(model.flats[0].shard[0].item())
    # 1 - 2^-10 rounds back to 1: bfloat16 has steps of 2^-8 below 1, halves of which round to even.
    assert seen[:2] == [1, 1] and seen[-1] == 1 - 2**-7
    assert model.full_state_dict()["weight"].tolist() == [[1 - 2**-7] * 3]


# ---- odd days -------------------------------------------------------------------------------------------------------


def test_a_step_given_up_leaves_no_trace():
    def steps(world):
        out = []
        for make in ENGINES.values():
            model, twin = make(toy(world.rank), world, adamw), toy(0)
            for give_up in (True, False):
                x, y = batch(give_up, world.size)
                mean_loss(model(x[world.rank :][:1], True), y[world.rank :][:1]).backward()
                model.finish()
                if give_up:
                    model.zero_grad()
            mean_loss(twin(x, True), y).backward()
            out.append(gradients_apart(model, twin))
        return out

    assert all(apart < 1e-12 for rank in run(steps, 2) for apart in rank)


@pytest.mark.parametrize("name", ["NaiveDDP", "BucketedDDP", "NaiveZeRO1", "ZeRO1", "ZeRO2"])
def test_frozen_later_stays_where_it_is(name):
    model = ENGINES[name](toy(0), ALONE, adamw)
    inputs, targets = batch(0, 2)
    for frozen in (False, True):
        model.module.head.bias.requires_grad_(not frozen)
        before = weights(model.module)
        mean_loss(model(inputs, True), targets).backward()
        model.finish()
        assert not frozen or model.module.head.bias.grad is None
        model.step()
        after = weights(model.module)
        assert torch.equal(before["head.bias"], after["head.bias"]) == frozen
        assert not torch.equal(before["embed.weight"], after["embed.weight"])


@pytest.mark.parametrize("name", ["BucketedDDP", "ZeRO1", "ZeRO2"])
def test_an_exception_inside_backward_does_not_pass_for_a_step(name):
    model = in_buckets(1)[name](nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double(), ALONE, adamw)
    twin, x = copy.deepcopy(model.module), torch.ones(2, 3, dtype=torch.float64)
    hidden = model.module[0](x)

    def fail(grad):
        raise ArithmeticError("bad luck")

    hidden.register_hook(fail)
    said(lambda: model.module[1](hidden).sum().backward(), ArithmeticError)
    if name != "BucketedDDP":
        assert "has no averaged gradient" in said(model.step)
    model(x).square().sum().backward()
    model.finish()
    twin(x).square().sum().backward()
    assert gradients_apart(model, twin) < 1e-12


@pytest.mark.parametrize("name", ["NaiveZeRO1", "ZeRO1", "ZeRO2", "FSDP"])
def test_steps_and_clips_without_a_gradient(name):
    model = ENGINES[name](toy(0), ALONE, adamw)
    inputs, targets = batch(0, 1)
    for call in (model.step, lambda: model.clip_gradients(1)):
        assert "no averaged gradient to work on" in said(call)
    mean_loss(model(inputs, True), targets).backward()
    for call in (model.step, lambda: model.clip_gradients(1)):
        assert "finish() first" in said(call)
    model.finish()
    model.clip_gradients(1)
    model.step()
    assert "no averaged gradient" in said(model.step)  # stepping twice
    with torch.no_grad():
        model(inputs)
    mean_loss(model(inputs, True), targets).backward()
    model.finish()
    with torch.no_grad():
        model(inputs)  # a look at the loss takes nothing away
    model.step()
    if name != "NaiveZeRO1":
        mean_loss(model(inputs, True), targets).backward()
        model.finish()
        model(inputs, True)  # another step has begun
        assert "no averaged gradient" in said(model.step)


def test_wrong_arguments():
    for name, make in ENGINES.items():
        layer, nothing = nn.Linear(2, 2), (nn.Linear(2, 2).requires_grad_(False), nn.ReLU())
        wrong = [(layer, {"op": "max"}, "op='max' must be 'mean' or 'sum'")][: name != "FSDP"]
        wrong += [(one, {}, "nothing to average") for one in nothing]
        if name in ("BucketedDDP", "ZeRO1", "ZeRO2"):
            wrong += [(layer, {"bucket_bytes": size}, f"bucket_bytes={size}") for size in (0, -1, 0.5)]
        for module, how, text in wrong:
            assert text in said(partial(make, module, ALONE, adamw, **how), ValueError)
        make(layer, ALONE, adamw)  # none of the failed attempts has left a mark


def test_wrapped_twice():
    engines = [make for name, make in ENGINES.items() if name != "FSDP"]
    for first in engines:
        model = first(nn.Linear(3, 3).double(), ALONE, adamw)
        shares_one = nn.ModuleList([nn.Linear(3, 3).double(), model.module])
        for second in engines:
            for module in (model, model.module, shares_one):
                assert "already" in said(partial(second, module, ALONE, adamw), ValueError)
        again, x = ENGINES["BucketedDDP"](copy.deepcopy(model.module), ALONE, adamw), torch.ones(2, 3).double()
        again(x).sum().backward()
        again.finish()
        assert model.module.weight.grad is None and again.module.weight.grad is not None


@pytest.mark.parametrize("name", ["BucketedDDP", "ZeRO1", "ZeRO2"])
def test_buckets_leave_in_order_while_backward_goes_on(name):
    def step(world):
        model, under_way = in_buckets(2000)[name](gpt(0), world, adamw), []
        # The embedding is tied with the head: its gradient is complete last, and all the blocks' are on their way.
        model.module.embed.register_full_backward_hook(lambda *_: under_way.append(model.gradients._lines[0].next))
        x, y = rows(0, 2)
        with trace.record(world.rank) as recorded:
            with trace.span("backward"):
                mean_loss(model(x), y).backward()
            model.finish()
        end_s, events = recorded.spans[0].end_s, sorted(recorded.events, key=lambda e: e.start_s)
        return under_way, [e.label for e in events], [e.start_s < end_s for e in events], len(model.buckets)

    for under_way, labels, early, buckets in run(step, 2):
        assert buckets > 5 and labels == [f"bucket {i}" for i in range(buckets)] and all(early)
        assert 1 <= under_way[0] < buckets


# ---- bytes ----------------------------------------------------------------------------------------------------------

FLAT = GPTConfig(vocab_size=31, context=6, d_model=14, num_layers=2, num_heads=2)
TRAFFIC = [  # form and its options, stage, microbatches, reduced each
    ("NaiveDDP", {}, 0, 2, False),
    ("BucketedDDP", {"bucket_bytes": 3000}, 0, 3, False),
    *(
        (name, {"bucket_bytes": 3000}, stage, K, each)
        for name, stage, K, each in (
            ("ZeRO1", 1, 1, True),
            ("ZeRO1", 1, 3, False),
            ("ZeRO2", 2, 1, True),
            ("ZeRO2", 2, 3, False),
            ("ZeRO2", 2, 3, True),
        )
    ),
    *(
        ("FSDP", {"reshard_after_forward": reshard, "prefetch": prefetch}, 3, K, each)
        for reshard in (True, False)
        for prefetch in (True, False)
        for K, each in ((1, True), (2, True), (2, False))
    ),
]


def sent(world, name, how, stage, K, each):
    """The bytes of all (padded) parameters; what a step sends by kind, and in all; its messages, and as expected."""
    model = ENGINES[name](gpt(0, FLAT), world, adamw, **how)
    x, y = rows(world.rank, K)
    with trace.record(world.rank) as recorded:
        for k in range(K):
            model.syncs = each or k == K - 1
            mean_loss(model(x[k : k + 1] % 31), y[k : k + 1] % 31).backward()
        model.finish()
        assert stage == 3 or {e.kind for e in recorded.events} <= {"reduce_scatter" if stage else "all_reduce"}
        model.step()
    payload = sum(flat.whole.nbytes for flat in model.buckets) if stage else 4 * FLAT.num_parameters
    by_kind = {kind: 0.0 for kind in ("all_reduce", "reduce_scatter", "all_gather")}
    for e in recorded.events:
        by_kind[e.kind] += e.wire_bytes
    messages = None if stage else len(trained(model) if name == "NaiveDDP" else model.buckets)
    return payload, by_kind, (len(recorded.events), messages)


@pytest.mark.thorough("up to four ranks", keep=2)
@pytest.mark.parametrize("n", [3, 1, 2, 4])
def test_traffic_is_counted_exactly(n):
    for rank in run(lambda world: [sent(world, *case) for case in TRAFFIC], n):
        for (_, how, stage, K, each), (payload, by_kind, (count, messages)) in zip(TRAFFIC, rank, strict=True):
            part, reshard = (n - 1) / n * payload, how.get("reshard_after_forward", True)
            gathers = {0: 0, 3: K * (2 if reshard else 1)}.get(stage, 1)
            reduced = (K if each else 1) if stage else 0
            times = {"all_reduce": 2 * (not stage), "reduce_scatter": reduced, "all_gather": gathers}
            assert by_kind == pytest.approx({kind: some * part for kind, some in times.items()}, rel=1e-12)
            formula = cost.zero_wire_bytes(stage, payload, n, microbatches=K, reduce_each=each, reshard=reshard)
            assert sum(by_kind.values()) == pytest.approx(formula, rel=1e-12)
            assert stage or count == (messages if n > 1 else 0)


def held(world, wrap, dtype, how):
    """Bytes by kind between finish() and step() in the second step, and as they must be; of FSDP also at the peak."""
    model = wrap(gpt(0, FLAT), world, adamw, dtype=dtype, **how)
    x, y = rows(world.rank, 2)
    for _ in range(2):
        with MemoryTracker(model, model.optimizer) as memory:
            loss = mean_loss(model(x % 31), y % 31)
            between = memory.live["parameter"]
            loss.backward()
            model.finish()
            live, most = memory.live, memory.peak_by_kind
        model.step()
    n, size, fsdp = world.size, 4 if dtype is None else 2, wrap is FSDP
    padded = sum(flat.whole.numel() for flat in model.buckets)
    owned = sum(piece.numel() for flat in model.buckets for piece in flat.pieces.values())
    want = {
        "parameter": size * padded // n + size if fsdp else size * padded,  # a stand-in beside the shards
        "gradient": size * padded // (1 if wrap is ZeRO1 else n),
        "optimizer": 8 * owned + 4 * len(model.optimizer.state) + (0 if dtype is None else 4 * padded // n),
    }
    if fsdp:
        root, block, *_ = (sum(flat.whole.nbytes for flat in unit.flats) for unit in model.units)
        assert between == want["parameter"], "between forward and backward nothing is whole"
        assert most["parameter"] == want["parameter"] + root + (2 if how["prefetch"] else 1) * block
        # the shard of all, the block that fills and the one on its way, the tied weight that waits for backward's end
        assert most["gradient"] <= want["gradient"] + 2.5 * block + 4 * 31 * 14
    return {kind: live[kind] for kind in want}, want, padded, owned, len(model.buckets)


@pytest.mark.thorough("up to five ranks", keep=1)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_bytes_that_stay_are_the_formula_to_the_byte(n):
    forms = [(ZeRO1, {"bucket_bytes": 20_000}), (ZeRO2, {"bucket_bytes": 20_000})]
    forms += [(FSDP, {"prefetch": prefetch}) for prefetch in (True, False)]
    cases = [(wrap, dtype, how) for wrap, how in forms for dtype in (None, torch.bfloat16)]
    psi, ranks = FLAT.num_parameters, run(lambda world: [held(world, *case) for case in cases], n)
    for (wrap, dtype, _), *of_ranks in zip(cases, *ranks, strict=True):
        assert sum(owned for *_, owned, _ in of_ranks) == psi, "each number has one owner"
        for have, want, padded, _, buckets in of_ranks:
            assert have == want
            assert psi <= padded <= psi + (n - 1) * buckets and padded % n == 0
            small, master = (4, 0) if dtype is None else (2, 4)  # 4 + 12/N, 2 + 14/N and 16/N in mixed precision
            stays = {ZeRO1: 2 * small, ZeRO2: small, FSDP: 0}[wrap]
            paper = stays * psi + (8 + master + 2 * small - stays) * psi / n
            assert sum(have.values()) == pytest.approx(paper, abs=16 * n * buckets + 4 * 60)


@pytest.mark.skipif(not wire_audit.available(), reason=wire_audit.ELSEWHERE)
@pytest.mark.parametrize(
    ("name", "stage", "reshard"), [("ZeRO1", 1, True), ("ZeRO2", 2, True), ("FSDP", 3, True), ("FSDP", 3, False)]
)
def test_what_the_kernel_counts(name, stage, reshard):
    def make(layers, group):
        how = {"units": list(layers), "reshard_after_forward": reshard} if stage == 3 else {"bucket_bytes": 2**20}
        return ENGINES[name](layers, group, adamw, **how)

    sent_as_promised(make, cost.zero_wire_bytes(stage, WIRE_BYTES, 4, reshard=reshard))


# ---- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", SHARDED)
def test_what_is_saved_goes_on_bit_by_bit_and_fits_the_plain_module_and_any_number_of_ranks(wrap):
    saved = run(partial(save_and_go_on, wrap=wrap), 3)
    state = saved[0][0]
    assert [len(full) for full, _ in saved][1:] == [0, 0], "only rank 0 gets it"
    plain = toy(9)
    plain.load_state_dict(state)  # strict: all names are there, a tied parameter under both
    assert torch.equal(state["head.weight"], state["embed.weight"]) and plain.head.weight is plain.embed.weight

    def load(world):
        model = wrap(toy(world.rank), world, adamw)
        some_steps(model, 1)
        model.load_full_state_dict(state)
        back = model.full_state_dict()
        inputs, _ = batch(0, 2)
        with torch.no_grad():
            apart = (model(inputs, True) - plain(inputs, True)).abs().max().item()
        text = said(lambda: model.load_sharded_state_dict(saved[1][1]), ValueError)
        return all(torch.equal(back[key], state[key]) for key in back), len(back), apart, text

    for n in (1, 2, 4):
        for rank, (same, count, apart, text) in enumerate(run(load, n)):
            assert same and count == (len(state) if rank == 0 else 0) and apart < 1e-15
            assert f"rank 1 of 3, but this is rank {rank} of {n}" in text and "load_full_state_dict" in text
    (exact, _), *_ = run(partial(save_and_go_on, wrap=wrap, dtype=torch.bfloat16), 2)
    assert exact["blocks.0.up.weight"].dtype == torch.float32, "in full precision"
    assert not torch.equal(exact["blocks.0.up.weight"], exact["blocks.0.up.weight"].bfloat16().float())
