"""Custom layers in a GPT: on every layout the model trains as in one process, or is refused with the layer's name."""

import copy
import sys
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.functional import pad
from torch.nn.utils import parametrizations

from lib import run
from lib.layout import Layout
from lib.masks import drop_by_rows, row_seed
from lib.mesh import Mesh, MeshShape
from lib.model import GPT, MLP, Attention, Block, GPTConfig, Head, Heads, mean_loss
from lib.parallel import parallelize
from lib.placement import parts
from lib.tensor_parallel.gpt import tensor_parallel
from lib.tensor_parallel.linear import ColumnParallelLinear
from lib.tensor_parallel.sequence import ShardedDropout, mark_partial
from tests.lib.sharding import momentum, said

cloudpickle.register_pickle_by_value(sys.modules[__name__])
D, V = 16, 24
CONFIG = GPTConfig(vocab_size=V, context=8, d_model=D, num_layers=2, num_heads=4, tied=False)
STEPS = 2


# ---- what people build ----------------------------------------------------------------------------------------------


class OwnMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(D, 20), nn.Linear(20, D)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x):
        return x * self.scale / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


class Inside(nn.Module):
    """A layer with a name of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class OverTokens(nn.Module):
    """A batch norm, which looks at all tokens."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(D, track_running_stats=False)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Shift(nn.Module):
    """Mixes neighbouring tokens, without a parameter."""

    def forward(self, x):
        return x + pad(x, (0, 0, 1, 0))[:, :-1]


class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(D, D)

    def forward(self, x):
        return (self.q(x) @ x.transpose(1, 2)).tril().softmax(-1) @ x


class Adapted(nn.Linear):
    """A layer of torch with a sum of products beside it (LoRA), as a subclass."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features)
        self.a, self.b = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T


class ScaledHeads(Heads):
    def __init__(self, old):
        super().__init__(old.widths, old.d_head)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def attention(self, q, k, v):
        return super().attention(q * self.scale, k, v)


class ScaledBlock(Block):
    def __init__(self):
        super().__init__(CONFIG)
        self.scale = nn.Parameter(torch.rand(D) + 0.5)

    def _add(self, x):
        return x * self.scale + super()._add(x)


class SideBySide(Block):
    def forward(self, x):
        return x + self.attention(self.norm1(x)) + self.mlp(self.norm2(x))


class OwnBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.attention = nn.Linear(D, D), Attention(CONFIG)

    def forward(self, x):
        return x + self.attention(torch.tanh(self.layer(x)))


class GatedMLP(MLP):
    def __init__(self):
        super().__init__(CONFIG)
        self.gate = nn.Linear(D, 4 * D)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)) * self.gate(x))


class Swish(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class Waves(nn.Module):
    """Positions without parameters."""

    def forward(self, positions):
        return torch.sin(positions[:, None] * torch.arange(1, D + 1) * 0.3).double()


class OwnEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(V, D)

    def forward(self, tokens):
        return self.table(tokens)


class DoubledHead(Head):
    def forward(self, x):
        return 2 * self.linear(self.norm(x))


class ScaledGPT(GPT):
    def __init__(self):
        super().__init__(CONFIG)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


def places(where):
    """A name of a layer, or its name in each block."""
    return [where] if where.startswith(("head", "embed", "blocks")) else [f"blocks.{i}.{where}" for i in range(2)]


def put(where, make):
    def change(model):
        for place in places(where):
            model.set_submodule(place, make())

    return change


def wrap(where, make):
    """As `put`, but the layer is made of the old one."""

    def change(model):
        for place in places(where):
            model.set_submodule(place, make(model.get_submodule(place)))

    return change


def act(function):
    def change(model):
        for block in model.blocks:
            block.mlp.act = function() if isinstance(function, type) else function

    return change


def marked(change, *where):
    """The change, and the word of its owner that it treats each token by itself."""

    def both(model):
        change(model)
        for place in where:
            mark_partial(model.get_submodule(place))

    return both


def hooked(where):
    return lambda model: model.get_submodule(where).register_forward_hook(lambda module, args, y: 1.5 * y)


def pulled(model):
    model.blocks[0].mlp.up.weight.register_hook(lambda gradient: 2 * gradient)


def shared(model):
    model.blocks[1] = model.blocks[0]


def shared_mlp(model):
    model.blocks[1].mlp = model.blocks[0].mlp


def own_gpt(model):
    return ScaledGPT()


def own_gpt_marked(model):
    model = ScaledGPT()
    model.partial_gradients = ("scale",)
    return model


def dropping(model):
    model.blocks[0].mlp.dropout, model.blocks[0].attention.heads.p = nn.Dropout(0.3), 0.2
    model.blocks[1].mlp = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.2), nn.ReLU(), nn.Dropout(0.5))


def plain_mlp():
    return nn.Sequential(nn.Linear(D, 20), nn.ReLU(), nn.Linear(20, D))


OWN_MLP, OWN_NORM = put("mlp", OwnMLP), put("norm1", OwnNorm)
ADAPTED = wrap("attention.qkv", Adapted)
BOTH_MLPS = ("blocks.0.mlp", "blocks.1.mlp")
SLICE, TOKENS = "would get a shard of the sequence", "mixes tokens, and would get"
LOGITS, STAGES = "may get shards of the logits", "which no stage would have"

# The change; then what is said, if anything: of slices of the sequence, of full tensors, of stages.
CASES = {
    "nothing": (lambda model: None, "", "", ""),
    "layers of torch": (put("mlp", plain_mlp), "", "", ""),
    "one that torch has and we do not know": (
        put("mlp", lambda: nn.Sequential(nn.Linear(D, D), nn.PReLU())),
        "blocks.0.mlp.1 (PReLU) " + SLICE,
        "",
        "",
    ),
    "own MLP": (OWN_MLP, "blocks.0.mlp (OwnMLP) " + SLICE, "", ""),
    "own MLP, marked": (
        marked(OWN_MLP, *BOTH_MLPS),
        "",
        "blocks.0.mlp.one (Linear) is marked by mark_partial, but",
        "",
    ),
    "frozen": (put("mlp", lambda: OwnMLP().requires_grad_(False)), "blocks.0.mlp (OwnMLP) " + SLICE, "", ""),
    "own norm": (OWN_NORM, "blocks.0.norm1 (OwnNorm) " + SLICE, "", ""),
    "own norm, marked": (
        marked(OWN_NORM, "blocks.0.norm1", "blocks.1.norm1"),
        "",
        "is marked by mark_partial",
        "",
    ),
    "a norm inside": (put("norm2", lambda: Inside(nn.LayerNorm(D))), "blocks.0.norm2 (Inside) " + SLICE, "", ""),
    "a norm inside, marked": (
        marked(put("blocks.1.norm2", lambda: Inside(nn.LayerNorm(D))), "blocks.1.norm2"),
        "",
        "blocks.1.norm2.inner (LayerNorm) is marked by mark_partial",
        "",
    ),
    "a norm over tokens": (put("norm1", lambda: nn.LayerNorm((8, D))), "blocks.0.norm1 (LayerNorm) " + SLICE, "", ""),
    "a batch norm": (put("norm1", OverTokens), "blocks.0.norm1 (OverTokens) " + SLICE, "", ""),
    "a shift": (put("norm1", Shift), "blocks.0.norm1 (Shift) " + SLICE, "", ""),
    "another norm": (put("head.norm", lambda: nn.RMSNorm(D)), "", "", ""),
    "own final norm": (put("head.norm", OwnNorm), "head.norm (OwnNorm) " + SLICE, "", ""),
    "own attention": (put("attention", OwnAttention), "blocks.0.attention (OwnAttention) " + SLICE, "", ""),
    "adapted queries": (ADAPTED, "blocks.0.attention (Attention with its own qkv) " + TOKENS, "", ""),
    "adapted queries, marked": (
        marked(ADAPTED, "blocks.0"),
        "(Attention with its own qkv) " + TOKENS,
        "is marked",
        "",
    ),
    "adapted up": (wrap("mlp.up", Adapted), "blocks.0.mlp (MLP with its own up) " + SLICE, "", ""),
    "own heads": (wrap("attention.heads", ScaledHeads), "(Attention with its own heads) " + TOKENS, "", ""),
    "weight norm": (wrap("mlp.up", parametrizations.weight_norm), "(MLP with its own up) " + SLICE, "", ""),
    "old weight norm": (wrap("mlp.down", nn.utils.weight_norm), "(MLP with its own down) " + SLICE, "", ""),
    "own MLP of ours": (put("mlp", GatedMLP), "blocks.0.mlp (GatedMLP with its own forward) " + SLICE, "", ""),
    "own MLP of ours, marked": (
        marked(put("mlp", GatedMLP), *BOTH_MLPS),
        "",
        "is marked by mark_partial",
        "",
    ),
    "scaled block": (put("blocks.1", ScaledBlock), "blocks.1 (ScaledBlock with its own forward) " + SLICE, "", ""),
    "scaled block, marked": (
        marked(put("blocks.1", ScaledBlock), "blocks.1"),
        "",
        "is marked by mark_partial",
        "",
    ),
    "side by side": (put("blocks.0", lambda: SideBySide(CONFIG)), "blocks.0 (SideBySide with its", "", ""),
    "own block": (put("blocks.1", OwnBlock), "blocks.1 (OwnBlock) " + SLICE, "", ""),
    "own block, marked": (
        marked(put("blocks.1", OwnBlock), "blocks.1"),
        "",
        "is marked by mark_partial",
        "",
    ),
    "shared block": (shared, "", "", ""),
    "shared MLP": (shared_mlp, "", "", ""),
    "squared relu": (act(lambda x: torch.relu(x).square()), "", "", ""),
    "activation of torch": (act(nn.ReLU), "", "", ""),
    "activation that mixes": (act(lambda x: x.softmax(-1)), "blocks.0.mlp (MLP with its own act) " + SLICE, "", ""),
    "activation with a parameter": (act(Swish), "blocks.0.mlp (MLP with its own act) " + SLICE, "", ""),
    "marked for its activation": (marked(act(nn.PReLU), *BOTH_MLPS), "", "is marked by mark_partial", ""),
    "own positions": (put("embed.position", Waves), "embed.position (Waves) " + SLICE, "", ""),
    "own embedding": (put("embed", OwnEmbed), "embed (OwnEmbed) " + SLICE, "", ""),
    "own head": (put("head", lambda: nn.Linear(D, V)), "head (Linear) " + LOGITS, "head (Linear) " + LOGITS, ""),
    "own head of ours": (put("head", lambda: DoubledHead(CONFIG)), "head (DoubledHead with its", "(DoubledHead", ""),
    "adapted head": (wrap("head.linear", Adapted), "head (Head with its own linear) ", "head (Head with its own", ""),
    "own GPT": (
        own_gpt,
        "the model (ScaledGPT with its own forward) " + LOGITS,
        "(ScaledGPT with",
        "ScaledGPT has its own forward",
    ),
    "own GPT, marked": (own_gpt_marked, "", "", "ScaledGPT has its own forward, scale, " + STAGES),
    "a second head": (
        lambda model: setattr(model, "value", nn.Linear(D, 1)),
        "value (Linear) " + LOGITS,
        "value (Linear) " + LOGITS,
        "GPT has its own value, " + STAGES,
    ),
    "hook on a sharded layer": (hooked("blocks.0.mlp.up"), "(MLP with its own up) " + SLICE, "", ""),
    "hook between": (hooked("blocks.0.mlp"), "blocks.0.mlp (MLP with its own hook) " + SLICE, "", ""),
    "hook on the head": (hooked("head"), "head (Head with its own hook) ", "head (Head with its own hook) ", ""),
    "hook on the model": (
        hooked(""),
        "the model (GPT with its own hook)",
        "(GPT with its own hook)",
        "GPT has its own forward_hooks",
    ),
    "hook on a parameter": (pulled, "blocks.0.mlp (MLP with its own up) " + SLICE, "", ""),
    "nothing dropped": (put("mlp.dropout", nn.Identity), "", "", ""),
    "dropping": (dropping, "", "", ""),
}


def made(case):
    torch.manual_seed(0)
    model = GPT(CONFIG)
    changed = CASES[case][0](model)
    model = (changed if isinstance(changed, GPT) else model).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def batch(step):
    tokens = torch.randint(V, (4, CONFIG.context + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def in_one_process(case):
    """Losses of some steps, and the state after them."""
    model, losses = made(case), []
    drop_by_rows(model)
    optimizer = momentum([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        with torch.random.fork_rng():
            torch.manual_seed(row_seed(0, step, 0))
            loss = mean_loss(model(inputs), targets)
            loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def beside_one_process(world, layout, cases):
    """Case → what it says, or how far losses and weights are from one process; each rank has its own seed."""
    mesh, found = Mesh(MeshShape(**layout.sizes), world), {}
    for case in cases:
        losses, state = in_one_process(case)
        model = made(case)
        torch.manual_seed(world.rank)
        try:
            ours = parallelize(model, mesh, layout, momentum)
        except ValueError as error:
            found[case] = str(error)
            continue
        apart = [abs(ours.step(*batch(step), 0.5).item() - losses[step]) for step in range(STEPS)]
        apart += [(x - state[key]).abs().max().item() for key, x in ours.full_state_dict().items()]
        found[case] = max(apart)
    return found


LAYOUTS = {
    1: Layout(tp=2, sequence_parallel=True),
    2: Layout(tp=2),
    3: Layout(pp=2),
    0: Layout(dp=2, microbatches=2),
}


@pytest.mark.thorough("many layers on more layouts", keep=2)
@pytest.mark.parametrize("says", LAYOUTS)
def test_a_custom_layer_is_right_or_named(says):
    cases = [case for case in CASES if says or case != "a batch norm"]
    for rank in run(beside_one_process, 2, LAYOUTS[says], cases):
        for case, found in rank.items():
            wanted = CASES[case][says] if says else ""
            assert wanted in found if wanted else found < 1e-12, (case, found)


@pytest.mark.thorough("several layouts of four ranks", keep=1)
@pytest.mark.parametrize("more", [{"pp": 2, "sequence_parallel": True}, {"dp": 2, "zero": 2}, {"pp": 2, "zero": 1}])
def test_layers_that_stages_and_shards_share(more):
    """A norm in two stages has partial gradients in both: their sum is over the stages and the shards of each."""
    layout = Layout(tp=2, microbatches=2, **more)
    cases = ["nothing", "layers of torch", "shared block", "shared MLP", "dropping"]
    assert all(apart < 1e-12 for rank in run(beside_one_process, 4, layout, cases) for apart in rank.values())


# ---- a model that is not ours ---------------------------------------------------------------------------------------


def refused(world):
    layer, wrapped = nn.Linear(8, 8), Inside(GPT(CONFIG))
    trained = copy.deepcopy(wrapped)
    trained.partial_gradients = ()
    tensor_parallel(trained, world)
    sharded = Block(CONFIG)
    sharded.mlp = ColumnParallelLinear(D, D, world)
    return [
        isinstance(trained.inner.blocks[0].mlp.up, ColumnParallelLinear),
        said(lambda: tensor_parallel(nn.Sequential(layer, nn.ReLU()), world), ValueError),
        said(lambda: tensor_parallel(wrapped, world), ValueError),
        said(lambda: tensor_parallel(sharded, world), ValueError),
    ]


def test_a_model_without_our_layers_is_refused():
    for taken, nothing, around, twice in run(refused, 2):
        assert taken, "a wrapper, whose owner says that it is right around shards of the logits"
        assert "Sequential has no layer that tensor_parallel can shard: use Embed, Attention, MLP or Head" in nothing
        assert "the model (Inside) may get shards of the logits, [B, T, V/n], or should return them" in around
        assert "this model is already sharded" in twice


class Noisy(nn.Module):
    """A constant that each rank draws for itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("constant", torch.randn(D))

    def forward(self, x):
        return x + self.constant


def kept(world):
    """What stays of a model besides its values: attributes, evaluation mode; and what becomes equal."""
    torch.manual_seed(world.rank)
    model = GPT(GPTConfig(vocab_size=V, context=8, d_model=D, num_heads=4, dropout=0.5)).eval()
    model.blocks[0].norm1 = Noisy()
    mark_partial(model.blocks[0].norm1)
    for p in model.parameters():
        p.no_decay = True
    tensor_parallel(model, world, sequence_parallel=True)
    drops = [one for one in model.modules() if isinstance(one, ShardedDropout)]
    modes = {one.training for one in (*drops, *(block.attention.heads for block in model.blocks))}
    return len(drops), modes, all(p.no_decay for p, _ in parts(model).values()), model.blocks[0].norm1.constant


def test_attributes_modes_and_buffers_are_kept():
    (drops, modes, attributes, constant), (*_, other) = run(kept, 2)
    assert drops == 5 and modes == {False}, "a model in evaluation drops nothing"
    assert attributes and torch.equal(constant, other), "what each rank drew is that of rank 0"


def replaced(world):
    """The layers that a squared relu, tried on random numbers, leaves to be sharded; those of a softmax stay full."""
    found = []
    for function in (
        lambda x: torch.relu(x).square(),
        lambda x: x.softmax(-1),
        lambda x: x - x.mean(1, keepdim=True),
    ):
        block = Block(CONFIG)
        block.mlp.act = function
        found.append(tensor_parallel(block, world).mlp.up.weight.shape[0])
    return found


def test_an_activation_is_tried():
    assert run(replaced, 2)[0] == [2 * D, 4 * D, 2 * D], "the last mixes tokens, which are full inside a pair"


def stopped(world, change, layout):
    model = GPT(CONFIG)
    change(model)
    return said(partial(parallelize, model, Mesh(MeshShape(**layout.sizes), world), layout, momentum), ValueError)


def test_what_depends_on_rows_or_is_not_saved_is_refused():
    def several(world):
        two = Layout(dp=2)
        return [
            stopped(world, put("norm1", OverTokens), two),
            stopped(world, put("norm1", Noisy), two),
            stopped(world, put("mlp", lambda: nn.Sequential(nn.AlphaDropout(0.2))), two),
            stopped(world, lambda model: (wrap("attention.heads", ScaledHeads)(model), dropping(model)), two),
        ]

    rows, buffer, stream, heads = run(several, 2)[0]
    assert "blocks.0.norm1.norm (BatchNorm1d) takes its mean over all sequences, and this layout splits" in rows
    assert "blocks.0.norm1.constant is in the state of this model, but is no parameter" in buffer
    assert "blocks.0.mlp.0 (AlphaDropout) draws from a stream" in stream
    assert "blocks.0.attention.heads (ScaledHeads) has dropout, which is replaced with all that it adds" in heads
