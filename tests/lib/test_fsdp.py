"""FSDP: what only some ranks use, when units are gathered and freed, and what cannot be a unit."""

import copy
import pickle
import time
import warnings
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from book.trials import exposed
from book.trials.sleep import SleepLayer
from lib import comm, cost, run, trace
from lib.data_parallel.fsdp import FSDP, default_units
from lib.data_parallel.placeholders import ShardedParameter
from lib.data_parallel.zero import ZeRO1
from lib.memory import MemoryTracker
from lib.mesh import Group
from lib.model import GPT, GPTConfig, mean_loss
from tests.lib import zoo
from tests.lib.sharding import (
    Block,
    adamw,
    batch,
    gpt,
    momentum,
    nothing_gathered,
    rows,
    said,
    shards_apart,
    toy,
    trained,
)
from tests.on_time import on_time

ALONE = Group()


def unused_is_zero(twin):
    for p in trained(twin):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad


class Skipping(nn.Module):
    """A call may leave out blocks by number, layers of blocks by letter, and a layer of the root (l)."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        for block in self.blocks:
            block.more = nn.Linear(5, 5)
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 7)
        self.double()

    def forward(self, x, skip=""):
        x = self.first(x)
        for block, number, letter in zip(self.blocks, "0123", "abcd", strict=True):
            block.up.forward = partial(self.up, block, letter in skip)
            x = x if number in skip else block(x)
        return x if "l" in skip else self.last(x)

    @staticmethod
    def up(block, skips, x):
        y = linear(x, block.up.weight, block.up.bias)
        return y if skips else block.more(y)


SKIPS = [  # of each rank, in each step
    ["", "1l", "0123"],
    ["0l", "3l", "l"],
    ["", "d", ""],
    ["abcd", "", "3cb"],
    ["012l", "", "01"],
    ["02", "02", "02"],
]


PATTERNS = {  # of two forwards of one step, which a rank may run through different units
    "one": lambda loss: loss(0).backward(),
    "a forward dropped before": lambda loss: (loss(1), loss(0).backward()),
    "a forward dropped between": lambda loss: (loss(0).backward(), loss(1), loss(2).backward()),
    "each, then each backward": lambda loss: [one.backward() for one in [loss(0), loss(1)]],
    "each, then each backward, last first": lambda loss: [one.backward() for one in [loss(0), loss(1)][::-1]],
    "for the input, then for all": lambda loss: loss(0, create_graph=False)[0].backward(),
    "through a gradient": lambda loss: sum(loss(0, create_graph=True)).backward(),
}


def loss_of(model, x, step, rank, share, k, create_graph=None):
    """Of a rank's row; with `create_graph` also the norm of its gradient for the row."""
    row = (x[rank] / (k + 1)).requires_grad_(create_graph is not None)
    loss = model(row, SKIPS[(step + k) % len(SKIPS)][rank]).square().sum() / share
    if create_graph is None:
        return loss
    (gradient,) = torch.autograd.grad(loss, row, retain_graph=True, create_graph=create_graph)
    return loss, gradient.norm()


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("how", [{}, {"prefetch": False}, {"reshard_after_forward": False}], ids=str)
def test_what_only_some_ranks_use_counts_as_zero_on_the_others(how, pattern):
    """Whole units, one of them frozen, and layers of the root; no rank complains of another one's messages."""

    def steps(world):
        torch.manual_seed(0)
        twin = Skipping()
        twin.blocks[1].requires_grad_("prefetch" not in how)
        model, optimizer, worst = FSDP(copy.deepcopy(twin), world, momentum, **how), momentum(trained(twin)), 0.0
        for step in range(len(SKIPS)):
            x = torch.randn(world.size, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            for rank in range(world.size):
                PATTERNS[pattern](partial(loss_of, twin, x, step, rank, world.size))
            unused_is_zero(twin)
            PATTERNS[pattern](partial(loss_of, model, x, step, world.rank, 1))
            model.finish()
            worst = max(worst, shards_apart(model, twin))
            optimizer.step()
            optimizer.zero_grad()
            model.step()
        return worst, nothing_gathered(model)

    assert all(worst < 1e-12 and nothing for worst, nothing in run(steps, 3))


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("how", [{}, {"reshard_after_forward": False}], ids=str)
def test_an_exception_inside_backward_leaves_a_state_to_start_from(how):
    """Without finish() or zero_grad() by hand: some buckets have been reduced, one is half full, units are whole."""

    def steps(world):
        torch.manual_seed(0)
        twin, out = Skipping(), []
        model = FSDP(copy.deepcopy(twin), world, momentum, **how)
        x = torch.randn(world.size, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        twin(x).square().sum(1).mean().backward()

        def fail(gradient):
            raise ArithmeticError("bad luck")

        for block in model.module.blocks:
            failing = block.up.register_forward_hook(lambda module, args, y: y.register_hook(fail) and None)
            y = model(x[world.rank]).square().sum()
            said(y.backward, ArithmeticError)
            out.append(said(model.step))
            failing.remove()
            model(x[world.rank]).square().sum().backward()
            model.finish()
            out.append(shards_apart(model, twin))
            model.zero_grad()
        return out, nothing_gathered(model)

    for out, nothing in run(steps, 2):
        assert nothing and all("has no averaged gradient" in text for text in out[::2]) and max(out[1::2]) < 1e-12


# ---- bytes ----------------------------------------------------------------------------------------------------------

SMALL = GPTConfig(vocab_size=31, context=6, d_model=14, num_layers=4, num_heads=2)


def test_prefetch_asks_before_the_unit_computes():
    def order(world):
        """What happens in a step: a unit's all-gather that begins ("ask"), and a block that computes."""
        out = []
        for prefetch in (True, False):
            model, log = FSDP(gpt(0, SMALL), world, adamw, prefetch=prefetch), []
            for i, unit in enumerate(model.units):

                def start(unit=unit, i=i, begin=unit.start, log=log):
                    if not (unit.is_whole or unit._coming):
                        log.append(f"ask {i}")
                    begin()

                unit.start = start
                if i:
                    unit.module.norm1.register_forward_pre_hook(lambda *_, i=i, log=log: log.append(f"forward {i}"))
                    unit.module.mlp.register_full_backward_pre_hook(
                        lambda *_, i=i, log=log: log.append(f"backward {i}")
                    )
            x, y = rows(0, 1)
            mean_loss(model(x % 31), y % 31).backward()
            model.finish()
            out.append(log)
        return out

    ahead, late = run(order, 2)[0]
    forward = ["ask 0", *(f"{what} {i}" for i in range(1, 5) for what in ("ask", "forward"))]
    backward = ["ask 0", *(f"{what} {i}" for i in range(4, 0, -1) for what in ("ask", "backward"))]
    assert late == forward + backward
    forward = ["ask 0", "ask 1", "ask 2", "forward 1", "ask 3", "forward 2", "ask 4", "forward 3", "forward 4"]
    backward = ["ask 0", "ask 4", "ask 3", "backward 4", "ask 2", "backward 3", "ask 1", "backward 2", "backward 1"]
    assert ahead == forward + backward


# ---- time -----------------------------------------------------------------------------------------------------------

LAYERS, FORWARD_S, BACKWARD_S, NUMBERS = 4, 0.05, 0.1, 200_000
LINK = {"alpha_s": 2e-3, "bandwidth_Bps": 12e6}


def step_s(world, prefetch):
    """Seconds of a step, the best of two, without and with a slow link."""
    layers = [SleepLayer(NUMBERS, FORWARD_S, BACKWARD_S) for _ in range(LAYERS)]
    model = FSDP(nn.Sequential(*layers), world, partial(torch.optim.SGD, lr=0.1), layers, prefetch=prefetch)
    out = []
    for link in (nullcontext, partial(comm.link, **LINK)):
        taken = []
        for _ in range(2):
            with link():
                comm.barrier(world)
                start_s = time.perf_counter()
                model(torch.ones(1, requires_grad=True)).sum().backward()
                model.finish()
                taken.append(time.perf_counter() - start_s)
            model.step()
        out.append(min(taken))
    return out


@pytest.mark.thorough("steps that are measured")
@pytest.mark.timed("it measures the time of a step on an emulated link")
def test_the_time_of_a_step_and_what_prefetch_hides():
    n = 4
    gather_s = cost.comm_s("all_gather", 4 * NUMBERS, n, **LINK)
    reduce_s = cost.comm_s("reduce_scatter", 4 * NUMBERS, n, **LINK)
    compute_s, comm_s = LAYERS * (FORWARD_S + BACKWARD_S), LAYERS * (2 * gather_s + reduce_s)

    def predicted_s(prefetch):
        lists = [[x] * LAYERS for x in (FORWARD_S, BACKWARD_S, gather_s, reduce_s)]
        return max(end_s for *_, end_s in exposed.sharded_step(*lists, prefetch))

    def differs(prefetch):
        """How far the step's time and the hidden share are from what is predicted."""
        here_s, there_s = (max(times) for times in zip(*run(partial(step_s, prefetch=prefetch), n), strict=True))
        want_s = predicted_s(prefetch)
        hidden = 1 - (there_s - here_s) / comm_s  # against this machine's own time for the same messages
        return there_s / want_s - 1, hidden, 1 - (want_s - compute_s) / comm_s

    assert predicted_s(False) > 1.3 * predicted_s(True), "it must be worth predicting"
    for prefetch in (True, False):
        late, hidden, wanted = differs(prefetch)
        with on_time():
            assert abs(late) <= 0.15, prefetch
            assert hidden == pytest.approx(wanted, abs=0.1), prefetch
            assert (hidden >= 0.6) == prefetch


# ---- activation checkpointing ---------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Blocks (`each`), pairs of blocks, or all of them are computed again in backward."""

    def __init__(self, inner, reentrant, chunk):
        super().__init__()
        self.inner, self.reentrant, self.chunk = inner, reentrant, chunk

    def forward(self, tokens):
        x = self.inner.embed(tokens)
        blocks = list(self.inner.blocks)
        for i in range(0, len(blocks), self.chunk):
            x = checkpoint(nn.Sequential(*blocks[i : i + self.chunk]), x, use_reentrant=self.reentrant)
        if hasattr(self.inner, "scale"):
            return self.inner.head(self.inner.scale * self.inner.back(torch.tanh(x @ self.inner.slanted.t())))
        return self.inner.head(x)


def test_checkpointed_blocks_are_not_gathered_a_third_time():
    def cases(world):
        warnings.filterwarnings("ignore", "grad and param do not obey")
        out = {}
        for letters in ("bbbb", "lfbl"):
            for reentrant in (False, True):
                for chunk in (1, 2):
                    for prefetch in (True, False):
                        units = toy(world.rank, blocks=letters)
                        model = FSDP(Checkpointed(units, reentrant, chunk), world, momentum, prefetch=prefetch)
                        twin = toy(0, blocks=letters)
                        x, y = batch(0, world.size)
                        mean_loss(twin(x), y).backward()
                        unused_is_zero(twin)
                        with trace.record(world.rank) as recorded:
                            mean_loss(model(x[world.rank :][:1]), y[world.rank :][:1]).backward()
                            whole = sum(unit.is_whole for unit in model.units[1:])
                            model.finish()
                        gathers = sum(e.kind == "all_gather" for e in recorded.events)
                        flats = len(model.flats)
                        apart = shards_apart(model, Checkpointed(twin, reentrant, chunk))  # for its names
                        out[letters, reentrant, chunk, prefetch] = apart, gathers, 2 * flats, whole
        return out

    for cases_of_rank in run(cases, 2):
        assert len(cases_of_rank) == 16
        for case, (apart, gathers, wanted, whole) in cases_of_rank.items():
            assert apart < 1e-12 and gathers == wanted and whole == 0, (case, apart, gathers, wanted, whole)


# ---- a unit's life --------------------------------------------------------------------------------------------------


def test_outside_of_forward_and_backward_parameters_are_elsewhere():
    model = FSDP(gpt(0), ALONE, adamw)
    assert nothing_gathered(model)
    assert model.module.blocks[0].mlp.up.weight.shape == (48, 12)
    assert (
        sum(p.untyped_storage().nbytes() for p in {p.data_ptr(): p for p in model.module.parameters()}.values()) == 4
    )
    inputs, targets = rows(0, 2)
    want = gpt(0)(inputs)
    with torch.no_grad():
        assert torch.equal(model(inputs), want)
    assert nothing_gathered(model)
    loss = mean_loss(model(inputs), targets)
    assert nothing_gathered(model)
    with torch.no_grad():
        model(inputs)  # a look in between
    loss.backward()
    model.finish()
    assert nothing_gathered(model)
    with torch.no_grad():
        assert torch.equal(model(inputs), want)
    model.step()
    assert nothing_gathered(model)
    with torch.no_grad():
        assert not torch.equal(model(inputs), want)


class Odd(nn.Module):
    """Keyword arguments, tuples and dicts; the last block in evaluation not at all."""

    def __init__(self):
        super().__init__()

        class Pair(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = Block(), Block()

            def forward(self, x, *, other=None, scale=1.0):
                y = self.a(x) + (0 if other is None else self.b(other))
                return {"y": scale * y, "list": [x.detach(), (torch.ones(2), y.square())]}

        self.blocks = nn.ModuleList([Pair(), Block(), Pair(), Pair()])
        self.fails = False

    def forward(self, x, early=False):
        first = self.blocks[0](x, other=x)
        y = self.blocks[1](first["y"])
        again = self.blocks[2](y, other=first["list"][1][1], scale=0.5)["y"]
        if self.fails:
            raise ArithmeticError("bad luck")
        return again if early else self.blocks[3](again, other=y)["list"][1][1]


def odd(seed):
    torch.manual_seed(seed)
    return Odd().double()


def test_units_with_keywords_and_nested_outputs():
    def steps(world):
        out = []
        for how in ({}, {"prefetch": False}, {"reshard_after_forward": False}):
            model, twin = FSDP(odd(world.rank), world, momentum, **how), odd(0)
            optimizer = momentum(twin.parameters())
            x = torch.linspace(-1, 1, 14 * world.size, dtype=torch.float64).view(-1, 2, 7)
            for step in range(3):
                optimizer.zero_grad()
                (twin(x).mean() + twin(x * 0.5).mean()).backward()
                mine = x[world.rank]
                first, second = model(mine).mean(), model(mine * 0.5).mean()  # two forwards before two backwards
                for one in (second, first) if step == 1 else (first, second):
                    one.backward()
                model.finish()
                out.append(shards_apart(model, twin))
                optimizer.step()
                model.step()
                assert nothing_gathered(model)
        return out

    assert all(max(apart) < 1e-12 for apart in run(steps, 2))


def test_a_forward_that_fails_or_ends_early():
    def steps(world):
        model, twin = FSDP(odd(world.rank), world, momentum), odd(0)
        optimizer, out = momentum(twin.parameters()), []
        x = torch.linspace(-1, 1, 14, dtype=torch.float64).view(2, 7)
        for step in range(3):
            twin(x).mean().backward()
            model(x).mean().backward()
            model.finish()
            model.module.fails = True
            with torch.no_grad():
                said(lambda: model(x), ArithmeticError)  # leaves units whole, with what they hold now
            out.append(shards_apart(model, twin))
            optimizer.step()
            optimizer.zero_grad()
            model.step()
            out.append(0.0 if nothing_gathered(model) else 1.0)
            if step == 1:
                said(lambda: model(x), ArithmeticError)
            model.module.fails = False
            with torch.no_grad():
                out.append((model(x, early=True) - twin(x, early=True)).abs().max().item())
            out.append(0.0 if nothing_gathered(model) else 1.0)
        return out

    assert all(max(apart) < 1e-12 for apart in run(steps, 2))


# ---- units ----------------------------------------------------------------------------------------------------------


def test_units():
    model = gpt(0)
    assert default_units(model) == list(model.blocks)
    nested = nn.ModuleDict({"a": nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))]), "b": nn.ReLU()})
    assert default_units(nested) == list(nested["a"])
    names = [[name for flat in unit.flats for name in flat.names] for unit in FSDP(model, ALONE, adamw).units]
    assert names[0] == ["embed.token.weight", "embed.position.weight", "head.norm.weight", "head.norm.bias"]
    assert all(name.startswith("blocks.1.") for name in names[2]) and len(names) == 4
    shared = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    shared[1].weight = shared[0].weight  # what two units share is the root's
    root, one, two = FSDP(shared, ALONE, adamw).units
    assert [list(u.flats[0].names) for u in (root, one, two)] == [["0.weight"], ["0.bias"], ["1.bias"]]
    tied = gpt(0)  # and so is what a unit shares with a layer outside: the head, here
    root, embed, *_ = FSDP(tied, ALONE, adamw, units=[tied.embed, *tied.blocks]).units
    assert "embed.token.weight" in root.flats[0].names and embed.flats[0].names == ["embed.position.weight"]


def test_a_unit_that_is_resharded_holds_no_memory():
    _, unit = FSDP(nn.ModuleList([nn.Linear(3, 3)]), ALONE, adamw).units
    held = unit.flats[0].whole.untyped_storage()
    for _ in range(2):
        unit.unshard()
        assert held.size() == 12 * 4 and all(p.isfinite().all() for p in unit.flats[0].params)
        unit.reshard()
        assert held.size() == 0 and all(
            isinstance(p, ShardedParameter) for flat in unit.trained_flats for p in flat.params
        )


def in_array(y):
    array = np.empty(1, dtype=object)  # neither pytree nor the garbage collector looks into it
    array[0] = y
    return array


BOXES = {
    name: (zoo.BOXES[name], zoo.opened) for name in ("own dict", "set", "slots", "deque", "closure", "namespace")
} | {
    "array": (in_array, lambda box: box[0]),
    "half": (lambda y: (y.new_ones(1).requires_grad_() * 2, in_array(y)), lambda box: box[1][0]),
}


class Boxed(nn.Module):
    """A frozen layer before a trained one, in an activation checkpoint or not; its output in a container."""

    def __init__(self, box, again):
        super().__init__()
        self.frozen, self.up, self.box, self.again = nn.Linear(4, 4), nn.Linear(4, 4), box, again
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = x if isinstance(x, torch.Tensor) else BOXES[self.box][1](x)
        y = checkpoint(self._inner, x, use_reentrant=False) if self.again else self._inner(x)
        self.kept = self.up(y).sum()  # another output, which no caller gets
        return BOXES[self.box][0](y)

    def _inner(self, x):
        return self.up(torch.tanh(self.frozen(x)))


class Hides(nn.Module):
    def __init__(self, box, again):
        super().__init__()
        self.blocks, self.box = nn.ModuleList(Boxed(box, again) for _ in range(3)), box

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return BOXES[self.box][1](x).square().mean() + self.blocks[1].kept


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("how", [{}, {"reshard_after_forward": False}], ids=str)
def test_outputs_in_any_container_or_hidden(how):
    def steps(world):
        worst = 0.0
        for box in BOXES:
            for again in (False, True):
                torch.manual_seed(0)
                twin, x = Hides(box, again).double(), torch.randn(3, 4, dtype=torch.float64)
                model = FSDP(copy.deepcopy(twin), world, momentum, **how)
                for first in (False, True):  # what the second block hides has its backward first
                    for one in (twin, model):
                        loss = one(x)
                        blocks = getattr(one, "module", one).blocks
                        (blocks[1].kept.square() if first else loss).backward()
                    model.finish()
                    unused_is_zero(twin)
                    worst = max(worst, shards_apart(model, twin))
                    twin.zero_grad()
                    model.zero_grad()
        return worst, nothing_gathered(model)

    assert all(worst < 1e-12 and nothing for worst, nothing in run(steps, 2))


class Chosen(nn.Module):
    """Calls the blocks of these numbers; the weight of block w is also used before all of them."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(4) for _ in range(3)), nn.Linear(4, 4)
        self.double()

    def forward(self, x, numbers=(0, 1, 2), w=None):
        x = x if w is None else linear(linear(x, self.blocks[w].up.weight), self.blocks[w].down.weight)
        for number in numbers:
            x = self.blocks[number](x)
        return self.head(x).square().sum()


def borrow(model, x):
    model(x)  # without reshard_after_forward the weights are still there
    model(x, w=2).backward()


REFUSED = {  # a sentence → loops
    "one backward goes through two forwards of an FSDP model": [
        lambda model, x: (model(x) + model(2 * x)).backward(),
        lambda model, x: (model(x, (0,)) + model(2 * x, (1, 2))).backward(),
        lambda model, x: (model(x[:1]).backward(retain_graph=True), (model(x) + model(x)).backward()),
    ],
    "is called where all ranks do not gather it": [
        lambda model, x: model(x, (0, 1, 0, 2)),
        lambda model, x: model(x, (0, 0)),
        lambda model, x: model(x, (2, 1, 0)),
        lambda model, x: model.module.blocks[1](x),
    ],
}


@pytest.mark.parametrize("how", [{}, {"prefetch": False}, {"reshard_after_forward": False}], ids=str)
def test_what_units_refuse_and_the_model_trains_on(how):
    borrowed = {"backward has passed the unit of blocks.2.up.weight and freed it": [borrow]}
    cases = REFUSED | (borrowed if how == {"reshard_after_forward": False} else {})

    def steps(world):
        torch.manual_seed(0)
        twin, x, worst = Chosen(), torch.randn(world.size, 2, 4, dtype=torch.float64), 0.0
        model = FSDP(copy.deepcopy(twin), world, momentum, **how)
        sum(twin(rows) / world.size for rows in x).backward()
        for sentence, loops in cases.items():
            for loop in loops:
                assert sentence in said(partial(loop, model, x[world.rank]))
                model.zero_grad()
                model(x[world.rank]).backward()
                model.finish()
                worst = max(worst, shards_apart(model, twin))
                model.zero_grad()
        return worst, nothing_gathered(model)

    assert all(worst < 1e-12 and nothing for worst, nothing in run(steps, 2))


def test_a_layer_that_is_called_when_its_unit_is_sharded():
    model = FSDP(gpt(0), ALONE, adamw)
    text = said(lambda: model.module.blocks[0].mlp.up(torch.ones(1, 12)))
    assert "a Linear called alone finds its parameters sharded: call the model" in text


def test_hooks_on_saved_tensors_around_a_model_are_called():
    model, twin = FSDP(gpt(0), ALONE, adamw), gpt(0)
    inputs, _ = rows(0, 2)
    saved = [], []
    for one, seen in zip((twin, model), saved, strict=True):
        with torch.autograd.graph.saved_tensors_hooks(lambda x, seen=seen: seen.append(x.shape) or x, lambda x: x):
            one(inputs).sum().backward()
    model.finish()
    assert 0 < len(saved[1]) < len(saved[0]) and shards_apart(model, twin) < 1e-5
    said(lambda: model(None), Exception)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "none of our own stays"


@torch.no_grad()
def test_parameters_that_are_elsewhere_can_be_described_and_neither_read_nor_written():
    other, plain = FSDP(gpt(1), ALONE, adamw), gpt(0)
    assert sum(p.numel() for p in other.parameters()) == sum(p.numel() for p in plain.parameters())
    assert [(p.shape, p.dtype, p.is_leaf) for p in other.parameters()] == [
        (p.shape, p.dtype, p.is_leaf) for p in plain.parameters()
    ]
    bias, average = other.module.head.norm.bias, torch.ones(12)
    assert repr(bias) == "ShardedParameter(float32[12])"
    inputs, _ = rows(0, 2)
    for call in (
        *(other.state_dict, other.module.state_dict, other.module.blocks[0].state_dict),
        *(partial(one.load_state_dict, plain.state_dict()) for one in (other, other.module)),
        *(lambda: nn.init.constant_(bias, 0.5), lambda: bias.copy_(average), lambda: bias.data.clamp_(-1, 1)),
        *(lambda: bias.mul_(2), lambda: torch._foreach_mul_([bias], 2), lambda: bias.__setitem__(0, 1.0)),
        *(lambda: average.lerp_(bias, 0.1), lambda: bias.norm(), lambda: bias + 1, lambda: bias.numpy()),
        *(lambda: nn.utils.parameters_to_vector(other.parameters()), lambda: bias.detach(), lambda: bias.tolist()),
        lambda: setattr(bias, "data", average),
    ):
        assert "no rank holds the full parameters of this model" in said(call)
    for call in (
        lambda: copy.deepcopy(other),
        lambda: copy.deepcopy(other.module),
        lambda: pickle.dumps(other),
        lambda: pickle.dumps(other.module),
    ):
        text = said(call, (TypeError, RuntimeError))
        assert "wrapped model cannot be copied or pickled" in text or "full_state_dict() gathers them" in text
    other(inputs)


@pytest.mark.thorough("seconds of several processes")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_layers_that_cannot_be_a_unit_or_compute_in_a_dtype():
    inputs, _ = rows(0, 2)
    model, inner, around = gpt(0), FSDP(gpt(0), ALONE, adamw), FSDP(gpt(0), ALONE, adamw)
    model.blocks[1].compile(backend="eager")
    inner.compile(backend="eager")
    whole = torch.compile(lambda x: around(x) + 1, backend="eager")
    for compiled, what in ((FSDP(model, ALONE, adamw), "Block"), (inner, "GPT"), (whole, "GPT")):
        text = said(lambda compiled=compiled: compiled(inputs))
        assert f"torch.compile reached the gather of a {what}: compile only what is inside it" in text
    averages = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for wrap in (FSDP, ZeRO1):
        text = said(lambda wrap=wrap: wrap(averages, ALONE, adamw, dtype=torch.bfloat16), ValueError)
        assert "1 is a BatchNorm1d, whose averages stay float32" in text
        wrap(copy.deepcopy(averages), ALONE, adamw)
    lists = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2)])})
    text = said(lambda: FSDP(lists, ALONE, adamw, units=[lists["a"]]), ValueError)
    assert "unit 'a' is a ModuleList, which is never called: list its children" in text


def test_wrong_units():
    def make(units, module=None):
        return lambda: FSDP(module or gpt(0), ALONE, adamw, units=units)

    model = gpt(0)
    lies_inside = "is listed twice, or is inside another unit"
    assert f"unit 'blocks.0' {lies_inside}" in said(make([model.blocks[0]] * 2, model), ValueError)
    both = [model.blocks[1], model.blocks[1].mlp]
    assert f"unit 'blocks.1.mlp' {lies_inside}" in said(make(both, model), ValueError)
    assert "must be a submodule of the model, but Linear is not" in said(make([nn.Linear(2, 2)]), ValueError)
    assert "but GPT is not" in said(make([model], model), ValueError)
    model.blocks[2].mlp.down.double()
    assert "float64 on cpu (blocks.2.mlp.down.weight, 2 in all)" in said(make(None, model), ValueError)
    make([model.blocks[0], model.blocks[1].mlp, model.blocks[1].attention], gpt(0))  # none of them left a mark


# ---- saving, and models that are born sharded -----------------------------------------------------------------------


def draw(name, tensor):
    nn.init.normal_(tensor, std=0.02) if tensor.dim() > 1 else nn.init.constant_(tensor, 0.5)


@pytest.mark.thorough("seconds of several processes")
def test_a_model_that_no_rank_could_hold():
    config = GPTConfig(vocab_size=31, context=6, d_model=24, num_layers=8, num_heads=2)

    def build(world):
        with torch.device("meta"):
            module = GPT(config)
        torch.manual_seed(world.rank)
        with MemoryTracker(module) as memory:
            model = FSDP(module, world, adamw, init=draw)
        peak = memory.peak["total"]
        torch.manual_seed(0)
        serial = GPT(config)
        torch.manual_seed(0)
        for name, p in serial.named_parameters():
            draw(name, p.data)
        state = model.full_state_dict()
        same = all(torch.equal(state[key], x) for key, x in serial.state_dict().items()) if state else True
        shards = sum(flat.shard.nbytes for flat in model.buckets)
        unit = max(flat.whole.nbytes for flat in model.buckets)
        parameter = max(p.nbytes for p in serial.parameters())
        x, y = rows(0, 2)
        mean_loss(model(x % 31), y % 31).backward()
        mean_loss(serial(x % 31), y % 31).backward()
        model.finish()
        ours = nn.Module.parameters(model.module)
        return peak, shards, unit, parameter, same, shards_apart(model, serial), all(not p.is_meta for p in ours)

    for peak, shards, unit, parameter, same, apart, real in run(build, 4):
        assert same and apart < 1e-5 and real
        # a whole parameter and what a rank receives of it, or a unit's room before it is given back
        assert peak <= shards + max(unit, 2 * parameter) + 64
        assert peak < 4 * config.num_parameters * 0.6


def test_models_on_the_meta_device_need_values():
    with torch.device("meta"):
        model, norm = gpt(0), nn.BatchNorm1d(3)
    assert "give init=" in said(lambda: FSDP(model, ALONE, adamw), ValueError)
    assert "buffer running_mean is on the meta device" in said(
        lambda: FSDP(norm, ALONE, adamw, init=draw), ValueError
    )


def test_buffers_are_equal_whoever_draws():
    def build(world):
        model = FSDP(toy(world.rank), world, adamw, init=draw)
        return model.module.seen.tolist(), model.module.mean.tolist()

    assert run(build, 2) == [(toy(0).seen.tolist(), toy(0).mean.tolist())] * 2
