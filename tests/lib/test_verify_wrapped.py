"""A module in one of torch's wrappers is compared whole; what a careless wrapping does is found, and named."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate as Copy
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from lib import run
from lib.mesh import Group
from lib.placement import Replicate, Shard
from lib.verify import assert_matches_serial

WHOLE, ROWS, TOKENS = Replicate(), Shard(0), Shard(1)


class Net(nn.Module):
    """A norm and two layers, with 5 features between them, which 2 ranks split unevenly."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).tanh())


class Frozen(Net):
    """A weight that is not trained, beside some that are."""

    def __init__(self):
        super().__init__()
        self.up.weight.requires_grad_(False)


class Tied(nn.Module):
    """Tokens in, and one weight twice: 7 rows, which 2 ranks split unevenly."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens).tanh())


def ddp(net, mesh):
    return DistributedDataParallel(net)


def bypassed(net, mesh):
    parallel = DistributedDataParallel(net)
    parallel.forward = parallel.module.forward
    return parallel


def fsdp2(net, mesh):
    fully_shard(net.up, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def fsdp2_around(net, mesh):
    return fully_shard(net, mesh=mesh)


def fsdp2_but_root(net, mesh):
    fully_shard(net.up, mesh=mesh)
    return net


def fsdp1(net, mesh):
    return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp1_of_a_layer(net, mesh):
    net.up = fsdp1(net.up, mesh)
    return net


def in_pair(net, mesh, **row):
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(**row)}
    return parallelize_module(net, mesh, plan)


def as_dtensor(net, mesh):
    return in_pair(net, mesh, use_local_output=False)


def in_sequence(net, mesh, norm=True):
    plan = {
        "up": ColwiseParallel(input_layouts=Cut(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Cut(1)),
    }
    return parallelize_module(net, mesh, plan | ({"norm": SequenceParallel(use_local_output=True)} if norm else {}))


def norm_forgotten(net, mesh):
    return in_sequence(net, mesh, norm=False)


def tie_lost(net, mesh):
    plan = {"embed": RowwiseParallel(input_layouts=Copy()), "head": ColwiseParallel(output_layouts=Copy())}
    return parallelize_module(net, mesh, plan)


def other_weight(wrap, name):
    """A wrapper around a module of which the last element of a weight is another one."""

    def wrapped(net, mesh):
        with torch.no_grad():
            net.get_parameter(name).view(-1)[-1] += 1
        return wrap(net, mesh)

    return wrapped


def more_gradient(wrap, name):
    """A shard of a gradient that rank 1 alone has wrong, after all communication."""

    def wrapped(net, mesh):
        def more(p):
            p.grad.mul_(1.5)

        parallel = wrap(net, mesh)
        if mesh.get_rank():
            parallel.get_parameter(name).register_post_accumulate_grad_hook(more)
        return parallel

    return wrapped


def rank_1_sums(net, mesh):
    """Averages on rank 0 and sums on rank 1."""
    parallel = ddp(net, mesh)
    scale = 1 + mesh.get_rank()
    parallel.register_comm_hook(
        None, lambda _, bucket: allreduce_hook(None, bucket).then(lambda future: future.value() * scale)
    )
    return parallel


RIGHT = {  # name -> module, wrapper, placement of inputs and outputs
    "DDP": (Net, ddp, WHOLE, WHOLE),
    "DDP, rows": (Net, ddp, ROWS, ROWS),
    "DDP, tied": (Tied, ddp, ROWS, ROWS),
    "FSDP2": (Net, fsdp2, WHOLE, WHOLE),
    "FSDP2, rows": (Net, fsdp2, ROWS, ROWS),
    "FSDP2, frozen": (Frozen, fsdp2, ROWS, ROWS),
    "FSDP2, tied": (Tied, fsdp2_around, ROWS, ROWS),
    "FSDP1": (Net, fsdp1, WHOLE, WHOLE),
    "FSDP1, rows": (Net, fsdp1, ROWS, ROWS),
    "FSDP1, frozen": (Frozen, fsdp1, ROWS, ROWS),
    "FSDP1, tied": (Tied, fsdp1, ROWS, ROWS),
    "a pair": (Net, in_pair, WHOLE, WHOLE),
    "a pair, as DTensor": (Net, as_dtensor, WHOLE, WHOLE),
    "sequence": (Net, in_sequence, TOKENS, TOKENS),
}
WRONG = {  # the same, and what is said
    "DDP without its forward": (Net, bypassed, ROWS, ROWS, "gradient of "),
    "DDP, a copy": (Net, rank_1_sums, WHOLE, WHOLE, "gradient of .* is 1 of its norm"),
    "DDP, other weight": (Net, other_weight(ddp, "down.bias"), ROWS, ROWS, "output is "),
    "FSDP2, not the root": (Net, fsdp2_but_root, ROWS, ROWS, "gradient of (down|norm)"),
    "FSDP1, not the root": (Net, fsdp1_of_a_layer, ROWS, ROWS, "gradient of (down|norm)"),
    "FSDP2, a shard": (Net, more_gradient(fsdp2, "up.weight"), WHOLE, WHOLE, "gradient of up.weight is "),
    "pair, a shard": (Net, more_gradient(in_pair, "down.weight"), WHOLE, WHOLE, "gradient of down.weight is "),
    "norm without its sum": (Net, norm_forgotten, TOKENS, TOKENS, "gradient of norm"),
    "tie lost": (Tied, tie_lost, WHOLE, WHOLE, "only in one.*head.weight; head.weight is tied to another parameter"),
}


def compared(world, cases):
    """Case -> what is said on this rank; nothing where all agrees."""
    mesh, said = init_device_mesh("cpu", (world.size,)), {}
    for name, (module, wrap, of, to, *_) in cases.items():
        torch.manual_seed(1)
        serial = module().double()
        inputs = torch.randint(7, (4, 2)) if module is Tied else torch.randn(4, 2, 6, dtype=torch.float64)
        try:
            assert_matches_serial(serial, wrap(copy.deepcopy(serial), mesh), inputs, world, of=of, to=to)
        except (AssertionError, ValueError) as error:
            said[name] = str(error)
    return said


@pytest.fixture(scope="module")
def said():
    """What each rank says of each case; they start once."""
    return run(compared, 2, RIGHT | WRONG)


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_module_is_right(said, case):
    assert [of.get(case) for of in said] == [None, None]


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_found_and_named(said, case):
    found = [of[case] for of in said if case in of]
    assert found
    for text in found:
        assert re.search(WRONG[case][-1], text)


def in_both(world):
    """FSDP2 around a pair: each row on two neighbours, and shards of shards, which are strided."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    serial, x, rows = Net().double(), torch.randn(4, 2, 6, dtype=torch.float64), Shard(0, copies=2)
    parallel = fully_shard(in_pair(copy.deepcopy(serial), mesh["tp"]), mesh=mesh["dp"])
    assert_matches_serial(serial, parallel, x, world, of=rows, to=rows)
    parallel.set_gradient_divide_factor(1.0)  # a sum over dp, no mean
    with pytest.raises(AssertionError, match="gradient of .* is 1 of its norm"):
        assert_matches_serial(serial, parallel, x, world, of=rows, to=rows)


def test_shards_of_shards_on_two_axes():
    run(in_both, 4)


# ---- what is refused ------------------------------------------------------------------------------------------------


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


def frozen(module):
    return module.requires_grad_(False)


def refusals(world):
    """Mistake -> what is said on this rank."""
    mesh, tokens, x = init_device_mesh("cpu", (2,)), torch.ones(4, 2, dtype=torch.int64), torch.ones(5, 6)
    shared, cut = nn.Linear(6, 5), nn.Linear(6, 5)
    wrong = {
        "in place": (cut, fully_shard(cut, mesh=mesh), x, {}),
        "serial wrapped": (ddp(nn.Linear(6, 5), mesh), nn.Linear(6, 5), x, {}),
        "shared": (shared, ddp(shared, mesh), x, {}),
        "tuple": (Pair(6, 5), ddp(Pair(6, 5), mesh), x, {}),
        "no to": (nn.Linear(6, 5), ddp(nn.Linear(6, 5), mesh), x[:4], {"of": ROWS}),
        "uneven rows": (nn.Linear(6, 5), ddp(nn.Linear(6, 5), mesh), x, {"of": ROWS, "to": ROWS}),
        "flat": (Net(), FullyShardedDataParallel(Net(), device_id=torch.device("cpu")), x, {}),
        "frozen": (frozen(nn.Embedding(7, 6)), nn.Embedding(7, 6), tokens, {}),
        "inputs cut": (nn.Linear(6, 5), nn.Linear(6, 5), distribute_tensor(x, mesh), {}),
    }
    said = {}
    for name, (serial, parallel, inputs, placements) in wrong.items():
        with pytest.raises(ValueError) as caught:
            assert_matches_serial(serial, parallel, inputs, world, **placements)
        said[name] = str(caught.value)
    return said


REFUSED = {
    "in place": "the serial module is wrapped, too: .* give them copy.deepcopy",
    "serial wrapped": "the serial module is wrapped, too",
    "shared": "both modules have the same parameter weight, .* wrap copy.deepcopy",
    "tuple": "the serial module returns a tuple: only one tensor is compared",
    "no to": r"returns \[2, 5\] on this rank, where to=Replicate\(\) of \[4, 5\] is \[4, 5\]",
    "uneven rows": "=5 cannot be split over world=2; use a multiple of 2",
    "flat": "wrap with FullyShardedDataParallel.*use_orig_params=True",
    "frozen": "no gradient flows through the serial module",
    "inputs cut": "messages carry plain tensors, but got DTensor",
}


def test_what_cannot_be_compared_is_refused_in_a_sentence():
    said = run(refusals, 2)
    for name, text in REFUSED.items():
        assert [bool(re.search(text, of[name])) for of in said] == [True, True], (name, said[0][name])


def test_a_module_without_parameters():
    assert_matches_serial(nn.Tanh(), nn.Tanh(), torch.randn(4, 3).double(), Group())
    with pytest.raises(AssertionError, match="of its norm away"):
        assert_matches_serial(nn.Tanh(), nn.ReLU(), torch.randn(4, 3).double(), Group())
    with pytest.raises(AssertionError, match="only in one of the two: gradient of bias$"):
        assert_matches_serial(nn.Linear(3, 2), nn.Linear(3, 2, bias=False), torch.randn(4, 3), Group())


def test_a_second_comparison_does_not_see_gradients_of_the_first():
    serial, x = nn.Linear(3, 2).double(), torch.randn(4, 3).double()
    for _ in range(2):
        assert_matches_serial(serial, copy.deepcopy(serial), x, Group())
