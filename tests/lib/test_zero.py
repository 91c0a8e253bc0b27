"""ZeRO-1 and ZeRO-2: steps that go another way, what they hold at the peak, what is saved, wrong use."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

from book.trials.unbucketed import NaiveZeRO1, share_out
from lib import run, trace
from lib.clip import clip
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.zero import ZeRO1, ZeRO2
from lib.memory import MemoryTracker
from lib.mesh import Group
from lib.model import GPTConfig, mean_loss
from lib.verify import largest_difference, weights
from tests.lib.sharding import ENGINES, adamw, batch, gpt, momentum, rows, said, shards_apart, toy

ALONE = Group()


def decay_groups(named):
    """Groups of pairs, as people write them; which of them a rank has pieces of depends on where the cuts fall."""
    named = list(named)
    groups = [[x for x in named if x[0].endswith("bias") == bias] for bias in (False, True)]
    decays = [{"params": some, "weight_decay": 0.3 * (not i)} for i, some in enumerate(groups)]
    return torch.optim.AdamW(decays, lr=0.1)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2, FSDP])
def test_groups_of_names_are_the_same_on_all_ranks(wrap):
    def steps(world):
        torch.manual_seed(0)
        twin = nn.Linear(5, 3).double()
        model, optimizer = wrap(copy.deepcopy(twin), world, decay_groups), decay_groups(twin.named_parameters())
        for step in range(3):
            x = torch.full((2, 5), step + 1.0, dtype=torch.float64)
            twin(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            model.finish()
            model.step()
        groups = [len(group["params"]) for group in model.optimizer.param_groups]
        state = model.full_state_dict()
        return groups, largest_difference(state, twin.state_dict()) if state else 0.0

    for groups, apart in run(steps, 3):
        assert groups == [1, 1] and apart < 1e-12


# ---- accumulation, odd days -----------------------------------------------------------------------------------------


def test_gradients_of_no_sync_are_not_forgotten_whatever_the_order():
    def orders(world):
        out = {}
        for wrap in (ZeRO1, ZeRO2):
            for order in ("quiet last", "quiet all", "quiet first"):
                if wrap is ZeRO1 and order == "quiet last":
                    continue  # ends in an error: the first is under way
                model, twin = wrap(toy(world.rank), world, adamw), toy(0)
                for k in range(2):
                    x, y = batch(k, world.size)
                    (mean_loss(twin(x, True), y) / 2).backward()
                    mine = slice(world.rank, world.rank + 1)
                    model.syncs = order == "quiet last" and k == 0 or order == "quiet first" and k == 1
                    if model.syncs:
                        (mean_loss(model(x[mine], True), y[mine]) / 2).backward()
                    else:
                        with model.no_sync():
                            (mean_loss(model(x[mine], True), y[mine]) / 2).backward()
                model.finish()
                first = shards_apart(model, twin)
                model.finish()  # changes nothing
                out[wrap.__name__, order] = max(first, shards_apart(model, twin))
        return out

    for apart in run(orders, 3):
        assert len(apart) == 5 and max(apart.values()) < 1e-12, apart


# ---- bytes ----------------------------------------------------------------------------------------------------------

FLAT = GPTConfig(vocab_size=31, context=6, d_model=14, num_layers=2, num_heads=2)


@pytest.mark.thorough("looks at all tensors after each operation")
def test_zero_2_never_holds_all_gradients():
    """One bucket that fills and one on its way, each with what has arrived; outside no_sync()."""
    deep = GPTConfig(vocab_size=31, context=6, d_model=14, num_layers=8, num_heads=2)

    def peak(world, quiet):
        model = ZeRO2(gpt(0, deep), world, adamw, bucket_bytes=4000)
        x, y = rows(world.rank, 2)
        largest = max(flat.whole.nbytes for flat in model.buckets)
        out, on_their_way = [], []  # those are nobody's gradient any longer

        def noted(send, group):
            pending = send(group)
            on_their_way.append(sum(one._finish is not None for one in (*model.gradients.pending, pending)))
            return pending

        for flat in model.buckets:
            flat.send = partial(noted, flat.send)
        for _ in range(2):
            with MemoryTracker(model, model.optimizer) as memory:
                for k in range(2):
                    model.syncs = k == 1 or not quiet
                    mean_loss(model(x[k : k + 1] % 31), y[k : k + 1] % 31).backward()
                model.finish()
            model.step()
            out.append(memory.peak_by_kind["gradient"])
        assert quiet or len(model.buckets) > 10 and set(on_their_way) == {1}
        return out[1], largest

    for most, largest in run(partial(peak, quiet=False), 2):
        # of the parameters: a shard of all, the bucket that fills, and a tied weight that waits for its other half
        assert largest < 4 * deep.num_parameters / 10
        assert most <= 4 * deep.num_parameters / 2 + 2 * largest + 4 * 31 * 14
    for most, _ in run(partial(peak, quiet=True), 2):
        assert most >= 4 * deep.num_parameters * 0.99


def test_the_naive_form_sends_as_much_and_shares_it_out_unevenly():
    def step(world):
        model = NaiveZeRO1(gpt(0, FLAT), world, adamw)
        x, y = rows(world.rank, 1)
        with trace.record(world.rank) as recorded:
            mean_loss(model(x % 31), y % 31).backward()
            model.finish()
            model.step()
        state = sum(s["exp_avg"].numel() for s in model.optimizer.state.values()) if model.optimizer else 0
        return recorded.wire_bytes, state

    results = run(step, 5)
    assert sum(sent for sent, _ in results) / 5 == pytest.approx(2 * 4 / 5 * 4 * FLAT.num_parameters, rel=1e-12)
    assert sum(state for _, state in results) == FLAT.num_parameters
    assert max(state for _, state in results) > 1.02 * FLAT.num_parameters / 5


@pytest.mark.parametrize(("sizes", "n", "held"), [([5, 9, 2, 4], 2, [11, 9]), ([8, 1, 1], 3, [8, 1, 1]), ([], 2, [])])
def test_the_largest_goes_first_to_whoever_has_least(sizes, n, held):
    owners = share_out(sizes, n)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(n)]
    assert sorted(loads, reverse=True) == (held or [0] * n) and len(owners) == len(sizes)


# ---- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2])
def test_the_full_state_is_a_copy(wrap):
    model = wrap(toy(0), ALONE, adamw)
    state = model.full_state_dict()
    kept = {name: x.clone() for name, x in state.items()}
    model.module.mean.add_(1)  # a buffer, as a norm in training mode would
    model.load_full_state_dict({name: x + 1 for name, x in state.items()})
    assert all(torch.equal(state[name], x) for name, x in kept.items())


class Odd(nn.Module):
    """Extra state, a hook that splits a weight under two names, a buffer that is not saved, a tied and a frozen one."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.frozen = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 1).requires_grad_(False)
        self.two.weight, self.steps = self.one.weight, 0
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_state_dict_post_hook(self.split)
        self.register_load_state_dict_pre_hook(self.join)

    @staticmethod
    def split(module, state, prefix, metadata):
        bias = state.pop(prefix + "one.bias")
        state[prefix + "low"], state[prefix + "high"] = 2 * bias[:2], 2 * bias[2:]

    @staticmethod
    def join(module, state, prefix, *_):
        if prefix + "low" in state:
            state[prefix + "one.bias"] = torch.cat([state.pop(prefix + "low"), state.pop(prefix + "high")]) / 2

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]

    def forward(self, x):
        return self.frozen(torch.tanh(self.one(x)) + self.two(x))


def odd_and_back(world, wrap):
    torch.manual_seed(world.rank)
    model, x = wrap(Odd(), world, adamw), torch.ones(2, 3)
    plain = Odd()
    mean_squares = [model(x).square().mean(), None]
    mean_squares[0].backward()
    model.finish()
    model.step()
    model.module.steps, seen = 7, model.module.seen.fill_(3).clone()
    model.module.scratch.fill_(9)
    full, shards = model.full_state_dict(), model.sharded_state_dict()
    out = [list(full), full.get("_extra_state"), getattr(full, "_metadata", None) is not None]
    if full:
        plain.load_state_dict(full)
        out += [plain.steps, torch.equal(plain.seen, seen), plain(x).tolist()]
    out.append(model(x).tolist())
    again = wrap(Odd(), world, adamw)
    again.load_sharded_state_dict(shards)
    out += [again.module.steps, again.module.seen.tolist(), again.module.scratch.tolist(), again(x).tolist()]
    if world.size == 1:
        third = wrap(Odd(), world, adamw)
        third.load_full_state_dict(full)
        out += [third.module.steps, third(x).tolist()]
    return out


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2, FSDP])
def test_extra_state_and_hooks_are_saved_and_loaded_as_by_torch(wrap):
    for n in (1, 2):
        first, *others = run(odd_and_back, n, wrap)
        keys, extra, versions, steps, seen, plain, ours, *again = first
        assert keys == [*Odd().state_dict()] and extra == {"steps": 7} and versions and steps == 7 and seen
        assert plain == ours and again[:4] == [7, [3, 3], [0, 0], ours]
        assert n == 2 or again[4:] == [7, ours]
        assert all(other[:2] == [[], None] and other[-4:] == [7, [3, 3], [0, 0], ours] for other in others)


def written_and_saved(world, wrap, write, steps):
    """Whether full and sharded state have what was written, as bfloat16 has it; and that steps go on from there."""
    torch.manual_seed(0)
    model, x = wrap(nn.Linear(3, 5), world, adamw, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16)

    def step(model):
        model(x).square().mean().backward()
        model.finish()
        model.step()

    for _ in range(steps):
        step(model)
    before = model.full_state_dict()
    with torch.no_grad():
        write(model.module)
    written = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    shards, full = model.sharded_state_dict(), model.full_state_dict()
    again = wrap(nn.Linear(3, 5), world, adamw, dtype=torch.bfloat16)
    again.load_sharded_state_dict(shards)
    same = [torch.equal(full[name].bfloat16(), written[name]) for name in full]
    kept = [torch.equal(full[name], before[name]) for name in full]
    step(model)
    step(again)
    ours, theirs = model.full_state_dict(), again.full_state_dict()
    return all(same), all(kept), all(torch.equal(ours[name], theirs[name]) for name in ours)


def load_fives(module):
    module.load_state_dict({name: torch.full_like(p, 5) for name, p in module.state_dict().items()})


WRITES = {
    "load_state_dict": load_fives,
    "copy_": lambda module: module.weight.copy_(torch.full((5, 3), 0.3)),
    "clamp_": lambda module: module.weight.clamp_(-0.1, 0.1),
    "init": lambda module: nn.init.ones_(module.bias),
    "data": lambda module: module.weight.data.mul_(3),
    "the same": lambda module: [p.copy_(p.clone()) for p in module.parameters()],
}


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2])
def test_what_was_written_is_saved_and_what_was_not_keeps_its_precision(wrap):
    cases = [(name, steps) for name in WRITES for steps in (0, 2)]

    def all_cases(world):
        return [written_and_saved(world, wrap, WRITES[name], steps) for name, steps in cases]

    for (name, steps), found in zip(cases, run(all_cases, 2)[0], strict=True):
        assert found == (True, name == "the same", True), (name, steps)
    model = wrap(nn.Linear(3, 5), ALONE, adamw)
    model.module.weight.data = torch.ones(5, 3)
    for save in (model.full_state_dict, model.sharded_state_dict):
        assert "weight was converted or replaced" in said(save)


def test_a_parameter_of_fsdp_that_was_replaced_is_not_saved_as_it_was():
    model = FSDP(nn.Linear(3, 5), ALONE, adamw)
    text = said(lambda: setattr(model.module.weight, "data", torch.ones(5, 3)))
    assert "cannot be read or written here (data): full_state_dict() gathers them" in text
    with torch.no_grad():
        model.module.weight.set_(torch.ones(5, 3))  # no Python sees this
    for save in (model.full_state_dict, model.sharded_state_dict, lambda: model(torch.ones(1, 3))):
        assert "weight was written outside the forward" in said(save)


@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2, FSDP])
def test_a_load_between_backward_and_step_leaves_the_gradients(wrap):
    for dtype in (None, torch.bfloat16):
        states = []
        for load in (False, True):
            torch.manual_seed(0)
            model = wrap(nn.Linear(3, 5), ALONE, adamw, dtype=dtype)
            shards = model.sharded_state_dict()
            model(torch.ones(2, 3, dtype=dtype)).square().mean().backward()
            model.finish()
            if load:
                model.load_sharded_state_dict(shards)
            model.step()
            states.append(model.full_state_dict())
        assert all(torch.equal(states[0][name], x) for name, x in states[1].items())


@pytest.mark.parametrize("wrap", [ZeRO1, FSDP])
def test_states_with_keys_and_values_that_do_not_fit(wrap):
    model = wrap(toy(0), ALONE, adamw)
    x, y = batch(0, 1)
    mean_loss(model(x, True), y).backward()
    model.finish()
    model.step()
    full, shards = model.full_state_dict(), model.sharded_state_dict()
    load = model.load_full_state_dict
    assert "also has a, b, c, …: " in said(lambda: load(full | {key: torch.ones(1) for key in "dcba"}), ValueError)
    assert "scale is int64 instead of float64" in said(lambda: load(full | {"scale": torch.tensor(1)}), ValueError)
    assert "scale is a float instead of a tensor" in said(lambda: load(full | {"scale": 1.0}), ValueError)
    load({key: value for key, value in full.items() if key != "head.weight"})  # tied to embed.weight
    load = model.load_sharded_state_dict
    assert "has no names, optimizer, rank, …" in said(lambda: load(full), KeyError)
    assert "also has more: " in said(lambda: load(shards | {"more": 1}), ValueError)
    text = said(lambda: load(shards | {"replicated": {}}), KeyError)
    assert "has no mean, seen" in text if wrap is FSDP else "has no blocks.1.base.bias, " in text
    wide = [torch.zeros(1) for _ in shards["shards"]]
    assert "has shape [1] instead of" in said(lambda: load(shards | {"shards": wide}), ValueError)
    for change, says, kind in (
        (lambda state: state[0].pop("exp_avg"), ".exp_avg", KeyError),
        (lambda state: state[0].update(more=torch.ones(1)), ".more: ", ValueError),
        (lambda state: state[0].update(exp_avg=torch.ones(1)), ".exp_avg has shape [1] instead of", ValueError),
    ):
        wrong = copy.deepcopy(shards)
        change(wrong["optimizer"]["state"])
        assert says in said(lambda wrong=wrong: load(wrong), kind)
    sgd = wrap(toy(0), ALONE, momentum).sharded_state_dict()
    assert "has no betas, eps: " in said(lambda: load(sgd), KeyError)
    load(shards)


# ---- wrong use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [NaiveZeRO1, ZeRO1, ZeRO2])
def test_a_rank_that_owns_nothing_has_an_optimizer_for_a_scheduler(wrap):
    def rates(world):
        model = wrap(nn.Linear(1, 1), world, partial(torch.optim.AdamW, lr=1.0))
        scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 1, 0.5)
        model(torch.ones(1, 1)).sum().backward()
        model.finish()
        model.clip_gradients(1.0)
        model.step()
        scheduler.step()
        model.optimizer.load_state_dict(model.optimizer.state_dict())
        return [group["lr"] for group in model.optimizer.param_groups], model.module.weight.item()

    assert run(rates, 3) == [([0.5], run(rates, 1)[0][1])] * 3


class Own(torch.optim.AdamW):
    """Of a different library: called once per step."""


def stepped(world, wrap, optimizer, hook=False):
    torch.manual_seed(0)
    more = {"units": [], "prefetch": False} if wrap is FSDP else {"bucket_bytes": 100}
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    if wrap is FSDP:
        more["units"] = list(layers)
    model = wrap(layers, world, partial(optimizer, lr=0.1), dtype=torch.bfloat16, **more)
    calls, step = [], model.optimizer.step

    def counted():
        calls.append(sum(p.grad is not None for flat in model.buckets for p in flat.pieces.values()))
        step()

    model.optimizer.step = counted
    if hook:
        model.optimizer.register_step_post_hook(lambda *_: None)
    for i in range(3):
        model(torch.full((2, 6), 1.0 + i + world.rank, dtype=torch.bfloat16)).square().mean().backward()
        model.finish()
        model.clip_gradients(1.0)
        model.step()
    return model.full_state_dict(), calls


@pytest.mark.thorough("more ranks, sizes and kinds")
@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2, FSDP])
def test_masters_are_stepped_a_bucket_at_a_time_with_the_same_result(wrap):
    (apart, calls), (_, there) = run(stepped, 2, wrap, torch.optim.AdamW)
    (together, once), _ = run(stepped, 2, wrap, Own)
    (_, hooked), _ = run(stepped, 2, wrap, torch.optim.AdamW, True)
    assert all(torch.equal(apart[name], x) for name, x in together.items())
    assert len(once) == len(hooked) == 3 and len(calls) == len(there) >= 15
    assert max(calls) <= 2 < min(once), "gradients in float32 are those of one bucket"


@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2, FSDP])
@pytest.mark.parametrize(
    "convert",
    [lambda m: m.to(memory_format=torch.channels_last), lambda m: m.double(), lambda m: m.module.double()],
    ids=["channels last", "double", "double, the module"],
)
def test_a_model_that_is_converted_after_it_was_wrapped_is_refused(wrap, convert):
    """Its parameters would lie where no step reaches them."""
    module = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Flatten(), nn.Linear(8, 4))
    x = torch.ones(2, 2, 2, 2)
    model = wrap(module, ALONE, momentum)
    model(x)  # as it is, it is right
    text = said(lambda: (convert(model), model(x.to(module[2].weight.dtype))))
    assert "converted or replaced after the model was wrapped" in text and "then wrap it" in text


@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2])
def test_what_is_written_into_parameters_holds_in_mixed_precision_too(wrap):
    def loaded(world, dtype):
        core = nn.Linear(4, 4)
        model = wrap(core, world, partial(torch.optim.SGD, lr=0.5), dtype=dtype)
        core.load_state_dict({name: torch.full_like(p, 0.5) for name, p in core.state_dict().items()})
        out = []
        for _ in range(2):
            model(torch.ones(2, 4, dtype=dtype)).sum().backward()
            model.finish()
            model.step()
            out.append(core.weight.detach().clone())
            with torch.no_grad():
                core.weight.clamp_(min=-0.25)
        return out

    for one, two in run(partial(loaded, dtype=torch.bfloat16), 2):
        assert torch.equal(one, torch.full((4, 4), 0.5 - 0.5 * 2).bfloat16())
        assert torch.equal(two, torch.full((4, 4), -0.25 - 0.5 * 2).bfloat16())


def test_wrong_arguments():
    for wrap in (ZeRO1, FSDP):
        text = said(partial(wrap, nn.Linear(2, 2).to(torch.cfloat), ALONE, adamw, dtype=torch.bfloat16), ValueError)
        assert "weight is complex64, and bfloat16 has no imaginary part: omit dtype" in text
    for wrap in (ZeRO2, FSDP):
        adafactor = partial(torch.optim.Adafactor, lr=1)
        assert "cannot work on pieces" in said(partial(wrap, nn.Linear(2, 2), ALONE, adafactor), ValueError)


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, skips):
        return 2 * x if skips else self.layer(x)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize(
    ("wrap", "skips", "give_up"),
    [
        (ZeRO1, (True, False), True),  # the other rank may have sent all by then
        (ZeRO2, (True, False), False),
        (ZeRO2, (True, False), True),
        (ZeRO2, (True, True), False),
        (ZeRO2, (False, True), False),
    ],
)
def test_backwards_in_which_one_rank_has_no_part_at_all(wrap, skips, give_up):
    """Microbatches, or a step that is given up after the first."""

    def works(world):
        torch.manual_seed(0)
        twin = Skipping().double()
        model = wrap(copy.deepcopy(twin), world, partial(torch.optim.SGD, lr=0.1), op="sum")
        x = torch.randn(2, 3, dtype=torch.float64).requires_grad_()
        for skip in skips:
            model(x, skip and world.rank == 1).sum().backward()
            for rank in range(2):
                twin(x, skip and rank == 1).sum().backward()
            if give_up and skip:
                model.zero_grad()
                twin.zero_grad()
        model.finish()
        model.step()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        return largest_difference(weights(model.module), weights(twin))

    assert max(run(works, 2)) < 1e-12


# ---- the norm of complex and mixed gradients ------------------------------------------------------------------------

KINDS = [torch.cdouble, torch.float64, torch.cfloat, torch.float32, torch.bfloat16, torch.float16]


CLIPS = {name: make for name, make in ENGINES.items() if name != "FSDP"}


class ManyKinds(nn.Module):
    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        drawn = (torch.randn(3, dtype=torch.cdouble if kind.is_complex else torch.double) for kind in KINDS)
        self.weights = nn.ParameterList(x.to(kind) for x, kind in zip(drawn, KINDS, strict=True))
        self.frozen, self.factor = nn.Parameter(torch.ones(2), requires_grad=False), factor

    def forward(self, x):
        return sum((w.abs() if w.is_complex() else w).double().square().sum() for w in self.weights) * self.factor * x


def clipped(world, make, factor):
    model = make(ManyKinds(factor), world, momentum)
    model(torch.ones(())).backward()
    model.finish()
    norm = model.clip_gradients(0.5).item()
    return norm, sum(g.abs().double().sum().item() for g, _ in model.gradients._held() if g is not None)


@pytest.mark.thorough("seconds of several processes")
def test_clipping_complex_and_mixed_gradients_is_that_of_one_process():
    cases = list(itertools.product(CLIPS, (1.0, 0.0, math.nan)))
    for n in (1, 2, 3):
        ranks = run(lambda world: [clipped(world, CLIPS[make], factor) for make, factor in cases], n)
        for (make, factor), *found in zip(cases, *ranks, strict=True):
            one = ManyKinds(factor)
            one(torch.ones(())).backward()
            grads = [p.grad.to(torch.cdouble) for p in one.weights]
            norm = torch.stack([g.norm() for g in grads]).norm().item()
            left = sum(g.abs().sum().item() for g in grads) * min(1.0, 0.5 / (norm + 1e-6))
            total = sum(each for _, each in found) / (1 if "ZeRO" in make else n)
            assert [each for each, _ in found] == pytest.approx([norm] * n, rel=1e-3, nan_ok=True), (make, factor, n)
            assert total == pytest.approx(left, rel=1e-2, nan_ok=True), (make, factor, n)


def test_a_clip_computes_where_the_model_is(monkeypatch):
    """A number that is made on the CPU cannot be added to those of a GPU: a meta device shows it."""
    monkeypatch.setattr("lib.clip.device", lambda: torch.device("meta"))
    monkeypatch.setattr("lib.clip.comm.all_reduce", lambda x, group: x)  # no message carries what has no values
    gradient, square = torch.ones(2, device="meta"), torch.ones((), dtype=torch.float64, device="meta")
    assert clip([gradient], [square], ALONE, 1.0).device.type == "meta"


class Fixed(nn.Module):
    """Frozen tensors of all kinds beside a trained layer."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        for name, x in {
            "order": torch.randperm(4),
            "mask": torch.rand(4) > 0.3,
            "small": torch.randint(-9, 9, (4, 4), dtype=torch.int8),
            "tiny": torch.randn(4).to(torch.float8_e4m3fn),
            "wide": torch.randn(4, dtype=torch.float64),
            "wave": torch.randn(4, dtype=torch.complex64),
            "same": torch.randn(4),
        }.items():
            self.register_parameter(name, nn.Parameter(x, requires_grad=False))
        self.register_buffer("steps", torch.arange(4).expand(3, 4))

    def forward(self, x):
        x = x[:, self.order] * self.mask + x @ self.small.to(x.dtype) * 0.01 + self.steps[0]
        return self.up(x * self.tiny.to(x.dtype) + self.wide.to(x.dtype) + self.wave.real.to(x.dtype)) + self.same


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_frozen_indices_and_other_dtypes_stay_as_they_are(dtype):
    def steps(world):
        out = []
        for wrap in (ZeRO1, ZeRO2, FSDP):
            torch.manual_seed(0)
            twin = nn.ModuleList(Fixed() for _ in range(2))
            twin.forward = lambda x, twin=twin: twin[1](twin[0](x))
            torch.manual_seed(world.rank)
            module = nn.ModuleList(Fixed() for _ in range(2))
            module.forward = lambda x, module=module: module[1](module[0](x))
            model = wrap(module, world, partial(torch.optim.SGD, lr=0.1), dtype=dtype)
            x = torch.linspace(-1, 1, 8).view(2, 4)
            twin.forward(x).square().mean().backward()
            torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1).step()
            model(x.to(dtype or x.dtype)).square().mean().backward()
            model.finish()
            model.step()
            got, want = model.full_state_dict(), twin.state_dict()
            same = [
                torch.equal(got[key], x) for key, x in want.items() if key in got and key[2:4] not in ("up", "sa")
            ]
            off = max(((got[key] - want[key]).abs().max().item() for key in got if "up" in key), default=0.0)
            out.append((all(same), off, len(same)))
        return out

    for rank, results in enumerate(run(steps, 2)):
        for same, off, number in results:
            assert same and number == (0 if rank else 14) and off < (1e-6 if dtype is None else 0.05)


@pytest.mark.parametrize("wrap", [NaiveZeRO1, ZeRO1, ZeRO2, FSDP])
def test_weights_that_change_between_a_forward_and_its_backward(wrap):
    """Refused where one process refuses it, and only there: a single layer does not need its own weight."""

    def make(*sizes):
        torch.manual_seed(0)
        net = nn.ModuleList(nn.Linear(n, n) for n in sizes)
        net.forward = lambda x: net[-1](net[0](x)) if len(net) > 1 else net[0](x)
        return wrap(net, ALONE, partial(torch.optim.SGD, lr=0.1)), torch.ones(2, sizes[0])

    def end(model, output):
        output.sum().backward()
        model.finish()
        model.step()

    for sizes, fails in (((3, 3), True), ((3,), False)):
        model, x = make(*sizes)
        first, second = model(x), model(2 * x)
        end(model, first)
        if fails:
            text = said(lambda model=model, second=second: end(model, second))
            assert "modified by an inplace operation" in text or "as it was in forward" in text
            model.zero_grad()
        else:
            end(model, second)
        model(x)  # dropped
        later = model(x)
        with torch.no_grad():
            model(x)
        end(model, later)
    if wrap is NaiveZeRO1:
        return
    for save, load in (
        ("full_state_dict", "load_full_state_dict"),
        ("sharded_state_dict", "load_sharded_state_dict"),
    ):
        model, x = make(3, 3)
        state, output = getattr(model, save)(), model(x)
        getattr(model, load)(state)
        said(lambda model=model, output=output: end(model, output))
        model.zero_grad()
        end(model, model(x))


@pytest.mark.parametrize("wrap", [NaiveZeRO1, ZeRO1, ZeRO2, FSDP])
def test_parameters_that_share_memory_are_refused(wrap):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight.data = net[0].weight.data
    text = said(lambda: wrap(net, ALONE, partial(torch.optim.SGD, lr=0.1)), ValueError)
    assert "0.weight and 1.weight share memory" in text and "module.1.weight = module.0.weight" in text
