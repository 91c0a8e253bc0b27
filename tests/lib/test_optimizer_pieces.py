"""The optimizer of sharded wrappers: it steps its pieces alone, in the groups of parameters, and its states resize."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.nn.functional import normalize

from book.trials.net_of_loops import OPTIMIZERS, Net, rows_of
from lib import run
from lib.data_parallel.check_optimizer import check_groups, check_owned
from lib.data_parallel.ddp import BucketedDDP
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.zero import ZeRO1, ZeRO2
from lib.mesh import Group
from lib.verify import largest_difference
from tests.lib.sharding import adamw, said

ALONE = Group()
SGD = partial(torch.optim.SGD, lr=0.1)


# ---- groups ---------------------------------------------------------------------------------------------------------


def in_groups(is_decayed):
    """A function for the optimizer that decays what `is_decayed(name, p)` says."""

    def make(named):
        groups = {True: [], False: []}
        for name, p in named:
            groups[bool(is_decayed(name, p))].append(p)
        return torch.optim.AdamW([{"params": groups[d], "weight_decay": 0.1 * d} for d in groups], lr=0.1)

    return make


def test_functions_that_look_at_more_than_names_and_attributes_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    norms = {id(p) for p in model[1].parameters()}
    model[0].bias.plain, model[0].weight._optim = True, {"lr": 0.3}
    good = [
        lambda name, p: name.endswith("weight"),
        lambda name, p: not hasattr(p, "plain"),
        lambda name, p: getattr(p, "_optim", {}).get("lr") == 0.3,
        lambda name, p: True,
        lambda name, p: False,
    ]
    bad = [
        lambda name, p: id(p) in norms,
        lambda name, p: p.ndim > 1,
        lambda name, p: any(p is q for q in model[0].parameters()),
        lambda name, p: p.shape == (4, 4),
        lambda name, p: p.numel() > 5,
    ]
    for is_decayed in good:
        check_groups(in_groups(is_decayed), model.named_parameters())
        ZeRO1(copy.deepcopy(model), ALONE, in_groups(is_decayed))
    for is_decayed in bad:
        text = said(partial(check_groups, in_groups(is_decayed), model.named_parameters()), ValueError)
        assert "make groups by name or by attribute, not by id(p), p.ndim or p.shape" in text
    check_groups(in_groups(bad[1]), model.named_parameters(), are_flat=False)  # a shard has the dims of its matrix
    left_out = lambda named: SGD([p for name, p in named if id(p) in norms])  # noqa: E731
    text = said(partial(check_groups, left_out, model.named_parameters()), ValueError)
    assert "it raised: optimizer got an empty parameter list" in text and "make groups by name" in text
    some = lambda named: SGD([p for name, p in named if id(p) in norms or name == "0.bias"])  # noqa: E731
    text = said(partial(check_groups, some, model.named_parameters()), ValueError)
    assert "and None as the piece that a rank steps" in text


@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2, FSDP])
def test_an_optimizer_instead_of_its_function_is_refused(wrap):
    model = nn.Linear(2, 2)
    text = said(partial(wrap, model, ALONE, torch.optim.AdamW(model.parameters())), TypeError)
    assert text.startswith("optimizer must be a function that makes one, but got an object of class AdamW: each rank")
    assert "Pass partial(AdamW, lr=...)" in text


@pytest.mark.parametrize("wrap", [BucketedDDP, partial(ZeRO1, optimizer=SGD), partial(FSDP, optimizer=SGD)])
def test_a_group_of_torch_is_refused(wrap):
    text = said(partial(wrap, nn.Linear(2, 2), group=torch.distributed.ProcessGroup(0, 2)), TypeError)
    assert text.startswith("group must be a Group of mesh.py, but got a process group of torch: pass `world`, which")


@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2, FSDP])
def test_what_a_user_leaves_out_is_not_trained_as_in_one_process(wrap):
    def heads(named):
        return SGD([p for name, p in named if name.startswith("head")])

    def steps(world):
        torch.manual_seed(0)
        twin = Net().double()
        model, optimizer = wrap(copy.deepcopy(twin), world, heads), heads(twin.named_parameters())
        for number in range(2):
            optimizer.zero_grad()
            (sum(twin(rows_of(number, rank)).square().mean() for rank in range(world.size)) / world.size).backward()
            optimizer.step()
            model(rows_of(number, world.rank)).square().mean().backward()
            model.finish()
            model.step()
        state = model.full_state_dict()
        return largest_difference(state, twin.state_dict()) if state else 0.0

    assert max(run(steps, 2)) < 1e-12


@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2, FSDP])
def test_each_step_checks_that_its_optimizer_holds_its_pieces_alone(wrap):
    model = wrap(Net(), ALONE, SGD)
    x = torch.ones(2, 4)

    def average():
        model(x).sum().backward()
        model.finish()

    average()
    model.step()
    kept, model.optimizer = model.optimizer, SGD(nn.Linear(2, 2).parameters())
    average()
    assert "2 of 2 tensors in the optimizer are not what this wrapper steps, such as one of shape [2, 2]" in said(
        model.step, ValueError
    )
    model.optimizer = kept
    model.step()  # nothing is lost
    kept.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    average()
    assert "not what this wrapper steps, such as one of shape [3]" in said(model.step, ValueError)
    check_owned(SGD([p := nn.Parameter(torch.ones(1))]), [p])
    text = said(lambda: wrap(Net(), ALONE, lambda named: SGD([nn.Parameter(torch.ones(1))])), ValueError)
    assert "and not from model.parameters()" in text


def test_a_dtype_that_would_need_a_scaler_is_refused():
    for wrap in (ZeRO1, ZeRO2, FSDP):
        for dtype, small in ((torch.float16, True), (torch.bfloat16, False), (torch.float64, False)):
            if small:
                text = said(partial(wrap, Net(), ALONE, SGD, dtype=dtype), ValueError)
                assert "dtype=float16 needs a GradScaler" in text and "use torch.bfloat16" in text
            else:
                wrap(Net(), ALONE, SGD, dtype=dtype)
        model = wrap(Net(), ALONE, SGD)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        model.finish()
        assert "a GradScaler or optimizer.step()" in said(lambda s=scaler, m=model: s.step(m.optimizer))


# ---- weights that forward writes ------------------------------------------------------------------------------------


class Writing(nn.Linear):
    """Writes its weight in forward."""

    def __init__(self, how):
        super().__init__(4, 4)
        self.how = how

    def forward(self, x):
        with torch.no_grad():
            match self.how:
                case "clamp":
                    self.weight.clamp_(-0.1, 0.1)
                case "copy":
                    self.weight.copy_(normalize(self.weight))
                case "data":
                    self.weight.data.clamp_(-0.1, 0.1)
                case "replaced data":
                    self.weight.data = normalize(self.weight.data)
        return super().forward(x)


@pytest.mark.parametrize("how", ["clamp", "copy", "data", "replaced data"])
def test_a_forward_that_writes_its_weights_is_refused_or_right(how):
    """Through `p.data` no version is counted: then DDP and ZeRO are right, as each rank writes the same."""

    def steps(world):
        out = {}
        for wrap in (BucketedDDP, ZeRO1, ZeRO2, FSDP):
            torch.manual_seed(0)
            twin = nn.Sequential(nn.ModuleList([Writing(how)])[0], nn.Linear(4, 1)).double()
            module = copy.deepcopy(twin)
            model = wrap(module, world) if wrap is BucketedDDP else wrap(module, world, SGD)
            step = SGD(module.parameters()).step if wrap is BucketedDDP else model.step
            optimizer = SGD(twin.parameters())
            try:
                for number in range(2):
                    optimizer.zero_grad()
                    model.zero_grad()
                    losses = [twin(rows_of(number, rank)).square().mean() for rank in range(world.size)]
                    (sum(losses) / world.size).backward()
                    optimizer.step()
                    model(rows_of(number, world.rank)).square().mean().backward()
                    model.finish()
                    step()
                state = module.state_dict() if wrap is BucketedDDP else model.full_state_dict()
                out[wrap.__name__] = largest_difference(state, twin.state_dict()) if state else 0.0
            except RuntimeError as error:
                out[wrap.__name__] = str(error)
        return out

    for of_rank in run(steps, 2):
        for name, found in of_rank.items():
            if isinstance(found, float):
                assert found < 1e-12 and how in ("data", "replaced data") and name != "FSDP", (name, found)
            else:
                assert "0.weight" in found, (name, found)
                assert ("forward of this module writes" in found) != (how == "replaced data" and name != "FSDP")


# ---- another number of ranks ----------------------------------------------------------------------------------------


def train(model, numbers):
    for number in numbers:
        model(rows_of(number, 0)).square().mean().backward()
        model.finish()
        model.step()


def begin(world, wrap, optimizer):
    """Three steps, the states after them, and the weights after three more."""
    torch.manual_seed(0)
    model = wrap(Net().double(), world, OPTIMIZERS[optimizer])
    train(model, range(3))
    states = model.full_state_dict(), model.full_optimizer_state_dict()
    train(model, range(3, 6))
    return *states, model.full_state_dict()


def go_on(world, wrap, optimizer, weights, states):
    torch.manual_seed(5)
    model = wrap(Net().double(), world, OPTIMIZERS[optimizer])
    model.load_full_state_dict(weights)
    model.load_full_optimizer_state_dict(states)
    train(model, range(3, 6))
    return model.full_state_dict()


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
def test_a_run_goes_on_with_its_averages_on_another_number_of_ranks_and_in_one_process(optimizer):
    for wrap, n, others in ((ZeRO1, 3, [(ZeRO2, 2), (FSDP, 1)]), (FSDP, 2, [(FSDP, 3), (ZeRO1, 1)])):
        (weights, states, end), *rest = run(begin, n, wrap, optimizer)
        assert all(one == ({}, {}, {}) for one in rest)
        for other, ranks in others:
            found = run(go_on, ranks, other, optimizer, weights, states)[0]
            assert largest_difference(found, end) < 1e-12, (wrap, n, other, ranks)
        plain = Net().double()
        plain.load_state_dict(weights)
        alone = OPTIMIZERS[optimizer](plain.named_parameters())
        set_optimizer_state_dict(plain, alone, copy.deepcopy(states))
        for number in range(3, 6):
            alone.zero_grad()
            plain(rows_of(number, 0)).square().mean().backward()
            alone.step()
        assert largest_difference(plain.state_dict(), end) < 1e-12


def test_states_that_do_not_fit():
    model = ZeRO1(Net(), ALONE, adamw)
    train(model := ZeRO1(Net().double(), ALONE, adamw), range(1))
    good, load = model.full_optimizer_state_dict(), model.load_full_optimizer_state_dict
    assert good["state"]["head.weight"]["exp_avg"].shape == (2, 4)
    load(good)
    wrong = copy.deepcopy(good)
    wrong["state"]["head.weight"].pop("exp_avg")
    assert "has no head.weight.exp_avg" in said(lambda: load(wrong), KeyError)
    assert "also has other" in said(lambda: load(good | {"state": good["state"] | {"other": {}}}), ValueError)
    assert "has no param_groups" in said(lambda: load({"state": {}}), KeyError)
    fewer = [good["param_groups"][0] | {"params": good["param_groups"][0]["params"][1:]}]
    text = said(lambda: load(good | {"param_groups": fewer}), ValueError)
    assert "group 0 of this state has other parameters than group 0 here, such as" in text
    assert "has 2 groups" in said(lambda: load(good | {"param_groups": good["param_groups"] * 2}), ValueError)
    load(good | {"state": {}})  # of a run before its first step
    assert not model.optimizer.state


# ---- a NaN ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2, FSDP])
def test_a_norm_that_was_nan_does_not_stay_in_the_padding(wrap):
    def norms(world):
        model, found = wrap(nn.Linear(3, 1).double(), world, SGD), []  # 4 elements: two of padding on 3 ranks
        for x in (torch.nan, 1.0):
            model(torch.full((1, 3), x, dtype=torch.float64)).sum().backward()
            model.finish()
            found.append(model.clip_gradients(1.0).item())
            model.optimizer.zero_grad()
        return found

    for nan, norm in run(norms, 3):
        assert nan != nan and norm == pytest.approx(2.0)


# ---- a part of the gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [ZeRO1, ZeRO2, FSDP])
def test_a_step_without_the_gradients_of_a_layer_leaves_it_as_it_is(wrap):
    """As in one process: `p.grad = None`, here of all parameters of a bucket; and a layer that was cleared in part."""

    def steps(world):
        torch.manual_seed(0)
        twin = Net().double()
        module, how = copy.deepcopy(twin), {} if wrap is FSDP else {"bucket_bytes": 1}
        model, optimizer = wrap(module, world, adamw, **how), adamw(twin.parameters())
        for number, layers in enumerate((["blocks"], ["head"], ["blocks", "head"], [])):
            optimizer.zero_grad()
            losses = [twin(rows_of(number, rank)).square().mean() for rank in range(world.size)]
            (sum(losses) / world.size).backward()
            model(rows_of(number, world.rank)).square().mean().backward()
            model.finish()
            for one in (twin, module):
                for name, p in one.named_parameters():
                    if name.split(".")[0] in layers and not (number == 2 and name == "head.weight"):
                        p.grad = None
            optimizer.step()
            model.step()
        state = model.full_state_dict()
        return largest_difference(state, twin.state_dict()) if state else 0.0

    for n in (1, 2):
        assert max(run(steps, n)) < 1e-12
