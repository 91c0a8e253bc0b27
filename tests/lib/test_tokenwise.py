"""Models as others bring them to context parallelism: own layers, activations, hooks, a loss. Right, or refused."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, pad

from lib.context_parallel.gpt import context_parallel
from lib.gradient_hooks import check_linear_hooks
from lib.launch import run
from lib.layout import Layout, nearest
from lib.losses import mean_loss
from lib.mesh import Mesh, MeshShape
from lib.model import GPT, Block, Embed, GPTConfig
from lib.moe import Experts
from lib.parallel import assemble, parallelize
from lib.placement import Shard
from lib.tensor_parallel.custom_layers import alike
from lib.tensor_parallel.sequence import mark_partial
from lib.tensor_parallel.tokenwise import check_expert_rows, check_tokenwise
from lib.verify import assert_matches_serial
from tests.lib.sharding import said

CONFIG = GPTConfig(16, 16, 16, 2, 4, d_mlp=70)
EXPERTS = GPTConfig(16, 16, 16, 2, 4, experts=4, d_expert=8)
SGD = partial(torch.optim.SGD, lr=0.5)


class Computes(nn.Module):
    """A layer of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Gated(nn.Module):
    """x + gate · mixed(x), with a gate that begins at zero."""

    def __init__(self, mixed):
        super().__init__()
        self.gate, self.mixed = nn.Parameter(torch.zeros(())), mixed

    def forward(self, x):
        return x + self.gate * self.mixed(x)


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Scaled(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return (x.float() * self.scale.float()).to(x)


class SideBySide(Block):
    def forward(self, x):
        return x + self.attention(self.norm1(x)) + self.mlp(self.norm2(x))


class OneAfterAll(Embed):
    def forward(self, tokens):
        return 2 * super().forward(tokens)


class Counted(nn.Module):
    """An embedding that counts its tokens."""

    def __init__(self):
        super().__init__()
        self.table, self.position = nn.Embedding(16, 16), nn.Embedding(16, 16)

    def forward(self, tokens):
        return self.table(tokens) + self.position(torch.arange(tokens.shape[1]))


class Centred(Experts):
    def forward(self, rows_RD, sizes):
        y = super().forward(rows_RD, sizes)
        return y - y.mean(0)


def centred(x):
    return x - x.mean(1, keepdim=True)


def little(x):
    return x - x.mean(1, keepdim=True) / 100


def looks_back(x):
    return torch.relu(x) + pad(torch.relu(x), (0, 0, 4, 0))[:, :-4]


def pairs(x):
    if x.shape[1] % 2:
        return torch.relu(x)
    return torch.relu(x).unflatten(1, (-1, 2)).mean(2, keepdim=True).expand(-1, -1, 2, -1).flatten(1, 2)


def put(where, make, marks=True):
    """The change of a layer of the model, and its mark."""

    def change(model):
        model.set_submodule(where, make())
        if marks:
            mark_partial(model.get_submodule(where))

    return change


def act(function):
    return lambda model: setattr(model.blocks[0].mlp, "act", function)


def marked(where, change=lambda model: None):
    def both(model):
        change(model)
        mark_partial(model.get_submodule(where))

    return both


def without_gradients(model):
    model.blocks[0].norm1 = Computes(centred)
    model.blocks[0].norm1.partial_gradients = ()


def hooked(where):
    return marked(where, lambda model: model.get_submodule(where).register_forward_hook(lambda m, x, y: centred(y)))


def on_gradient(name, hook):
    return lambda model: model.get_parameter(name).register_hook(hook)


MASK = on_gradient("blocks.0.norm1.weight", lambda g: g * (torch.arange(16) < 9))
CLAMP = on_gradient("embed.token.weight", lambda g: g.clamp(-1e-3, 1e-3))
RIGHT = {
    "a function": act(lambda x: gelu(x)),
    "a module": act(nn.GELU()),
    "in float32": act(lambda x: gelu(x.float()).to(x)),
    "squared": act(lambda x: torch.relu(x) ** 2),
    "a parameter": marked("blocks.0.mlp", act(nn.PReLU())),
    "a norm": put("blocks.0.norm1", Scaled),
    "a gate at zero": put("blocks.0.norm1", lambda: Gated(nn.Sequential(nn.Linear(16, 16), nn.Dropout()))),
    "narrow inside": put("blocks.1.mlp", lambda: nn.Sequential(nn.Linear(16, 4), Scaled(4), nn.Linear(4, 16))),
    "side by side": put("blocks.0", lambda: SideBySide(CONFIG)),
    "an embedding": put("embed", lambda: OneAfterAll(CONFIG)),
    "a mask of gradients": marked("blocks.0.norm1", MASK),
}
WRONG = [
    ("blocks.0.mlp.act", act(looks_back)),
    ("blocks.0.mlp.act", act(little)),
    ("blocks.0.mlp.act", act(pairs)),
    ("blocks.0.norm1 (Computes)", without_gradients),
    ("blocks.0.norm1 (Gated)", put("blocks.0.norm1", lambda: Gated(Computes(centred)))),
    ("blocks.0.norm1 (Sequential)", put("blocks.0.norm1", lambda: nn.Sequential(Scaled(), Computes(little)))),
    ("blocks.0.norm1 (BatchNorm)", put("blocks.0.norm1", BatchNorm)),
    ("blocks.1 (Block with its own hook)", hooked("blocks.1")),
    ("the model (GPT with its own hook)", hooked("")),
    ("embed (Counted)", put("embed", Counted)),
    ("blocks.0.norm1 (Computes)", put("blocks.0.norm1", lambda: Computes(partial(nn.functional.dropout, p=0.1)))),
]


def changed(change, config=CONFIG, dtype=torch.float64):
    torch.manual_seed(0)
    model = GPT(config)
    change(model)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_layer_that_treats_tokens_alone_is_right(dtype):
    for change in RIGHT.values():
        check_tokenwise(changed(change, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_mark_does_not_excuse_a_layer_that_mixes_tokens(dtype):
    for what, change in WRONG:
        words = said(lambda change=change: check_tokenwise(changed(change, dtype=dtype)), ValueError)
        assert words.startswith(f"{what} mixes the tokens of a sequence"), words


def test_rounding_is_no_mixing():
    x = torch.tensor([-1e-12, 1.0])
    assert alike(x, x + 1e-6) and not alike(x, x + 1e-4) and not alike(x, x[:1])
    check_tokenwise(changed(act(partial(nn.functional.prelu, weight=torch.ones(1))), dtype=torch.float32))
    rounds = Computes(lambda x: x * (1 + torch.finfo(x.dtype).eps * x.shape[1]))  # as kernels of different lengths do
    change = put("blocks.0.norm1", lambda: nn.Sequential(Scaled(), rounds))
    check_tokenwise(changed(change, dtype=torch.bfloat16))


def test_a_layer_that_cannot_be_tried_is_refused():
    for function in (lambda x: x[:, :4] + x, lambda x: x * torch.nan, lambda x: None):
        change = put("blocks.0.norm1", partial(Computes, function))
        words = said(lambda change=change: check_tokenwise(changed(change)), ValueError)
        assert "so whether it mixes tokens is not seen: use cp=1" in words
    change = hooked("blocks.0.attention")
    assert "use an Attention of lib/model.py as it is" in said(lambda: check_tokenwise(changed(change)), ValueError)


def test_a_trial_changes_nothing():
    dropping, model = changed(WRONG[-1][1]), changed(RIGHT["side by side"])
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    said(lambda: check_tokenwise(dropping), ValueError)
    check_tokenwise(model)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and all(m.training for m in model.modules())


def test_experts_compute_each_row_alone():
    check_tokenwise(changed(marked("blocks.0.mlp", HALVED), replace(EXPERTS, capacity_factor=0.5)))
    for change in (mixed_rows, lambda m: setattr(m.blocks[0].mlp.experts, "act", lambda x: looks_back(x[None])[0])):
        words = said(lambda change=change: check_expert_rows(changed(change, EXPERTS)), ValueError)
        assert words.startswith("blocks.0.mlp.experts.act mixes the rows of an expert")
    model = changed(lambda m: setattr(m.blocks[0].mlp.experts, "__class__", Centred), EXPERTS)
    assert "mixes the sequences of a batch" in said(lambda: check_expert_rows(model), ValueError)
    check_expert_rows(changed(lambda m: setattr(m.blocks[0].mlp.experts, "act", nn.GELU()), EXPERTS))


# ---- on ranks -------------------------------------------------------------------------------------------------------


def batch():
    tokens = torch.randint(16, (4, 17), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def apart(world, layout, change, config=CONFIG):
    """How far one step of a changed model is from the same step in one process; or what is said."""
    model = changed(change, config)
    alone = copy.deepcopy(model)
    for name, p in model.named_parameters():  # a copy has no hooks
        for hook in (p._backward_hooks or {}).values():
            alone.get_parameter(name).register_hook(hook)
    try:
        ours = parallelize(model, Mesh(MeshShape(**layout.sizes), world), layout, SGD)
    except ValueError as error:
        return str(error)
    optimizer, (x, y) = SGD(alone.parameters()), batch()
    mean_loss(alone(x), y).backward()
    optimizer.step()
    ours.step(x, y)
    after = alone.state_dict()
    return max((float((x - after[key]).abs().max()) for key, x in ours.full_state_dict().items()), default=0.0)


def shared_attention(model):
    model.blocks[1].attention = model.blocks[0].attention


def shared_block(model):
    model.blocks[1] = model.blocks[0]


def after_accumulation(model):
    model.head.norm.weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1e-3, 1e-3))


def mixed_rows(model):
    model.blocks[0].mlp.experts.act = lambda x: gelu(x) - gelu(x).mean(0)


HALVED = on_gradient("blocks.0.mlp.experts.up", lambda g: g / 2)
CP, DP = Layout(cp=2, attention="ring", token_order="striped"), Layout(dp=2)
NOT_LINEAR = "embed.token.weight has a hook that is not linear, and here would get a term of the gradient"
ON_RANKS = [  # layout, change, config, and what is said
    *(
        (CP, RIGHT[name], CONFIG, "")
        for name in ("a parameter", "side by side", "an embedding", "a mask of gradients")
    ),
    (DP, MASK, CONFIG, ""),
    (DP, CLAMP, CONFIG, NOT_LINEAR),
    (CP, CLAMP, CONFIG, NOT_LINEAR),
    (DP, after_accumulation, CONFIG, "head.norm.weight has a hook on p.grad"),
    (Layout(tp=2), on_gradient("blocks.0.norm1.weight", torch.sign), CONFIG, ""),  # each rank has the whole gradient
    (DP, HALVED, EXPERTS, ""),
    (CP, marked("blocks.0.mlp", HALVED), EXPERTS, ""),
    (Layout(dp=2, ep=2), HALVED, EXPERTS, "blocks.0.mlp has gradient hooks on experts of your own, lost"),
    (Layout(tp=2), HALVED, EXPERTS, "blocks.0.mlp has gradient hooks on experts of your own, lost"),
    (DP, mixed_rows, EXPERTS, "blocks.0.mlp.experts.act mixes the rows"),
    *((layout, shared_attention, CONFIG, "") for layout in (Layout(dp=2, zero=3), Layout(cp=2, zero=3))),
    (Layout(dp=2, zero=3), shared_block, CONFIG, ""),
]


def brought(world):
    found = [apart(world, *one[:3]) for one in ON_RANKS]
    mesh, config = Mesh(MeshShape(**CP.sizes), world), GPTConfig(16, 16, 16, 2, 4)

    model = changed(lambda model: None, config)
    ours = parallelize(model, mesh, CP, SGD)
    ours.loss = lambda targets: lambda y, rows: y.sum()
    sentences = [said(lambda: ours.step(*batch()), ValueError), said(lambda: ours.evaluate(*batch()), ValueError)]
    sentences.append(said(lambda: parallelize(model, mesh, CP, SGD), ValueError))

    serial = changed(lambda model: None, config)
    of_tokens = context_parallel(copy.deepcopy(serial), world)
    compare = partial(assert_matches_serial, serial, of_tokens, batch()[0], world, of=Shard(1), to=Shard(1))
    sentences.append(said(compare, AssertionError))
    mark_partial(of_tokens)
    compare()

    layer = nn.Linear(4, 1)
    layer.weight.register_hook(torch.sign)
    two = Mesh(MeshShape(**DP.sizes), world)
    sentences.append(said(lambda: assemble(layer, two, DP, SGD, loss=lambda targets: torch.dist), ValueError))
    return found, sentences


def test_a_model_of_ones_own_is_right_or_refused_on_ranks():
    for found, sentences in run(brought, 2):
        for (layout, _, _, words), got in zip(ON_RANKS, found, strict=True):
            assert words in str(got) and (words or float(got) < 1e-12), (layout, got)
        wanted = (
            "model.loss was replaced, and on cp=2 ranks it would get some tokens of each row",
            "model.loss was replaced",
            "this model is already sharded",
            "summed over the ranks it is right: the ranks' gradients are terms of a sum",
            "weight has a hook that is not linear",
        )
        for words, got in zip(wanted, sentences, strict=True):
            assert words in got


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_clamp_of_any_size_is_not_linear(size):
    model = changed(on_gradient("head.norm.weight", lambda g: g.clamp(-size, size)))
    assert "not linear" in said(lambda: check_linear_hooks(model, DP), ValueError)
    check_linear_hooks(model, Layout())
    check_linear_hooks(model, Layout(tp=2))


# ---- layouts --------------------------------------------------------------------------------------------------------


def test_the_nearest_layout_splits_sequences_over_fewer_ranks():
    for wanted, cp in (({"cp": 3}, 2), ({"cp": 5, "attention": "ring", "token_order": "zigzag"}, 4)):
        found = nearest(wanted, CONFIG, 4)
        assert (found.cp, found.num_ranks) == (cp, cp)


def test_a_capacity_with_room_for_all_tokens_drops_none():
    CP.check_capacity(replace(EXPERTS, capacity_factor=2.0))
    less = replace(EXPERTS, capacity_factor=1.99)
    assert "capacity_factor=1.99 drops tokens" in said(lambda: CP.check_capacity(less), ValueError)
