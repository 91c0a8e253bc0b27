"""What is brought to context parallelism: own positions and documents are right, and what does not fit is refused."""

import copy
import sys
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn

from lib import run
from lib.context_parallel.attention import attend, gather_attention, ulysses_attention
from lib.context_parallel.gpt import context_parallel
from lib.context_parallel.ring import ring_attention
from lib.context_parallel.tokens import take_tokens
from lib.documents import see_documents
from lib.lab.certificate import certify
from lib.lab.twin import ADAMW
from lib.layout import Layout
from lib.masks import drop_by_rows
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT, GPTConfig, Heads
from lib.parallel import parallelize
from lib.tensor_parallel.sequence import mark_partial

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CONFIG = GPTConfig(vocab_size=16, context=16, d_model=16, num_layers=2, num_heads=4)
LLAMA = replace(CONFIG, llama=True, tied=False, num_kv_heads=2, d_mlp=24)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 12 + [1] * 4, [0] * 16, [0, 1] + [2] * 14])
KINDS = {"gather": gather_attention, "ring": ring_attention, "ulysses": ulysses_attention}
WAYS = [  # each kind and each order
    Layout(cp=2),
    Layout(cp=2, token_order="striped"),
    Layout(cp=2, attention="ring", token_order="zigzag"),
    Layout(cp=2, attention="ulysses"),
]


def batch(rows=4, length=16):
    torch.manual_seed(1)
    tokens = torch.randint(16, (rows, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def interpolated(model):
    """The first layer sees positions 4 times as near, as when a longer context is tried."""
    model.blocks[0].attention.heads.positions = lambda n, device=None: torch.arange(n, device=device) / 4


def from_the_end(model):
    model.embed.positions = lambda n, device=None: torch.arange(n, device=device).flip(0)


class Squeezed(nn.Module):
    def forward(self, length, device=None):
        return torch.arange(length, device=device) // 2


def by_a_layer(model):
    model.embed.positions = Squeezed()
    mark_partial(model.embed.positions)


def by_a_layer_of_heads(model):
    model.blocks[1].attention.heads.positions = Squeezed()


def documents_of_rows(model):
    see_documents(model, DOCUMENTS)


def documents_of_all(model):
    see_documents(model, DOCUMENTS[1:2])


def documents_instead_of_those_it_finds(model):
    model.finds_documents = False
    documents_of_all(model)


OWN = [(LLAMA, interpolated), (CONFIG, from_the_end), (CONFIG, documents_of_rows), (LLAMA, documents_of_all)]
OWN += [(CONFIG, by_a_layer), (LLAMA, by_a_layer_of_heads)]
OWN += [(replace(CONFIG, document_end=3), documents_instead_of_those_it_finds)]


def made(config, change=lambda model: None):
    torch.manual_seed(0)
    model = GPT(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p *= 3  # so that attention attends
    change(model)
    return model


# ---- positions and documents of one's own ---------------------------------------------------------------------------


def with_own(world):
    """Each in all ways, in half of them with dropout."""
    found = {}
    for i, (config, change) in enumerate(OWN):
        for j, drops in enumerate((0.0, 0.2)):
            model, ways = made(replace(config, dropout=drops), change), WAYS[(i + j) % 2 :: 2]
            found[change.__name__, drops] = certify(world, ways, model, [batch()], 0.5)
    return found


def test_own_positions_and_documents_are_those_of_one_process():
    found = run(with_own, 2)[0]
    assert len(found) == 2 * len(OWN)
    assert not [(what, apart) for what, of_ways in found.items() for apart in of_ways if not apart.holds()]


@pytest.mark.parametrize(("config", "change"), OWN, ids=[change.__name__ for _, change in OWN])
def test_dropout_by_rows_keeps_them(config, change):
    """The twin above has this dropout, too, and so could lose them as well."""
    model, tokens = made(replace(config, dropout=0.2), change).eval(), batch()[0]
    other, plain = copy.deepcopy(model), made(replace(config, dropout=0.2)).eval()
    drop_by_rows(other)
    torch.testing.assert_close(other(tokens), model(tokens), rtol=1e-12, atol=1e-14)
    assert (plain(tokens) - model(tokens)).abs().max() > 1e-2, "they matter"


# ---- lengths --------------------------------------------------------------------------------------------------------

LENGTHS = {
    32: "32 tokens do not fit context=16; use fewer, or context=32",
    18: "18 tokens do not fit context=16; use fewer, or context=18",
    9: "9 tokens cannot be split over cp=2 (contiguous); use a multiple of 2, such as 10",
}


def said_by(function, *args):
    try:
        return function(*args)
    except ValueError as error:
        return str(error)


def of_lengths(world):
    """What training and evaluation say of a sequence of so many tokens, or their loss."""
    found, mesh = {}, Mesh(MeshShape(**Layout(cp=2).sizes), world)
    for config in (CONFIG, LLAMA, replace(CONFIG, document_end=3)):
        model = parallelize(made(config), mesh, Layout(cp=2), ADAMW)
        for length in LENGTHS:
            found[config, length] = [said_by(way, *batch(length=length)) for way in (model.evaluate, model.step)]
        tokens, targets = batch()
        found[config, "one row"] = [said_by(model.evaluate, tokens[0], targets[0])]
        found[config, "targets of rows"] = [said_by(model.evaluate, tokens, targets[:, 0])]
    for layout in WAYS:
        model = parallelize(made(CONFIG), mesh, layout, ADAMW)
        found[layout] = [model.step(*batch(length=0)).item(), model.evaluate(*batch(length=0)).item()]
    return found


def test_a_length_that_does_not_fit_is_refused():
    for found in run(of_lengths, 2):
        for config in (CONFIG, LLAMA, replace(CONFIG, document_end=3)):
            assert all(found[config, length] == [says] * 2 for length, says in LENGTHS.items()), found
            assert found[config, "one row"] == ["a tensor of shape [16] has no dim 1 of tokens to split: give [B, T]"]
            assert found[config, "targets of rows"][0].startswith("a tensor of shape [4] has no dim 1"), found
        assert all(found[layout] == [0, 0] for layout in WAYS), "no tokens, as in one process"


# ---- a direct call --------------------------------------------------------------------------------------------------


class Both(Heads):
    """A token attends to later ones, too."""

    def attention(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)


class FromZero(nn.Module):
    def __init__(self, embed):
        super().__init__()
        self.embed = embed

    def forward(self, tokens):
        return self.embed.token(tokens) + self.embed.position(torch.arange(tokens.shape[1]))


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(1, keepdim=True)


def both_ways(model):
    model.blocks[1].attention.heads = Both([16] * 3, 4)


def both_ways_after_sharding(model):
    both_ways(model)
    drop_by_rows(model)


def lambda_heads(model):
    model.blocks[1].attention.heads.attention = lambda q, k, v: v
    drop_by_rows(model)


def dropping(model):
    model.blocks[1].attention.heads.p = 0.5


def own_embedding(model):
    model.embed = FromZero(model.embed)


def centred(model):
    model.blocks[0].norm1 = Centred()


def nothing(model):
    pass


def twice(model):
    context_parallel(model, Group("cp", (0, 1), 0))


MIXES = " would get some tokens of each sequence, with context parallelism"
DIRECT = [
    ({}, dropping, {}, "blocks.1.attention.heads (Heads) would drop other elements than in one process"),
    ({"dropout": 0.1}, nothing, {}, "embed.dropout (Dropout) would drop other elements than in one process"),
    ({}, both_ways, {}, "blocks.1.attention (Attention with its own heads)" + MIXES),
    ({}, both_ways_after_sharding, {}, "blocks.1.attention (Attention) has heads of its own"),
    ({}, lambda_heads, {}, "blocks.1.attention (Attention) has heads of its own"),
    ({}, own_embedding, {}, "embed (FromZero)" + MIXES),
    ({}, centred, {}, "blocks.0.norm1 (Centred)" + MIXES),
    ({}, nothing, {"attention": "flash"}, "attention='flash' must be one of gather, ring, ulysses"),
    ({}, nothing, {"order": "zig"}, "order='zig' must be one of contiguous, zigzag, striped"),
    ({}, twice, {}, "this model already gets some tokens of each sequence"),
    ({"document_end": 3}, nothing, {}, "document_end=3 would be looked for in this rank's tokens alone"),
    ({"experts": 4, "balance": 0.1}, nothing, {}, "blocks.0.mlp (MoE) would count the loads of this rank's tokens"),
]


@pytest.mark.parametrize(("sizes", "change", "how", "says"), DIRECT, ids=[case[3][:40] for case in DIRECT])
def test_a_direct_call_refuses_what_would_be_different(sizes, change, how, says):
    model = made(replace(CONFIG, **sizes), change)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError) as caught:
        context_parallel(model, Group("cp", (0, 1), 0), **how)
    assert str(caught.value).startswith(says)
    assert [type(module) for module in model.modules()] == before


def direct(world):
    """Logits of a rank's tokens, beside those of one process: with the documents of all tokens, set by hand."""
    model = made(replace(LLAMA, document_end=3, experts=4, d_expert=8), interpolated)
    alone, tokens = copy.deepcopy(model), batch()[0]
    model.finds_documents = alone.finds_documents = False
    context_parallel(model, world, "ring", "zigzag")
    for one in (model, alone):
        see_documents(one, DOCUMENTS)
    apart = model(take_tokens(tokens, world, "zigzag")) - take_tokens(alone(tokens), world, "zigzag")
    return apart.abs().max().item()


def test_a_direct_call_is_one_process():
    assert max(run(direct, 2)) < 1e-12


# ---- the functions --------------------------------------------------------------------------------------------------

Q, K = (2, 4, 8, 8), (2, 2, 8, 8)
FITS = "attention over ranks takes [B, H, t, E] and twice [B, K, t, E], of the same t tokens"
SHAPES = [
    ((Q, (2, 4, 16, 8), (2, 4, 16, 8)), FITS),
    ((Q, (2, 4, 4, 8), (2, 4, 4, 8)), FITS),
    ((Q, K, Q), FITS),
    ((Q, Q, (2, 4, 8, 12)), FITS),
    ((Q, (1, 4, 8, 8), (1, 4, 8, 8)), FITS),
    ((Q, (2, 4, 8, 16), (2, 4, 8, 16)), FITS),
    (((4, 8, 8),) * 3, FITS),
    (((2, 4, 8),) * 3, FITS),
    ((Q, (2, 3, 8, 8), (2, 3, 8, 8)), "4 query heads cannot share 3 of keys and values"),
    ((Q, (2, 8, 8, 8), (2, 8, 8, 8)), "4 query heads cannot share 8 of keys and values"),
    ((Q, (2, 0, 8, 8), (2, 0, 8, 8)), "4 query heads cannot share 0 of keys and values"),
]


@pytest.mark.parametrize("across", KINDS.values(), ids=KINDS)
def test_tensors_that_do_not_fit_together_are_refused(across):
    group = Group("cp", (0, 1), 0)
    for shapes, says in SHAPES:
        with pytest.raises(ValueError) as caught:
            across(*(torch.zeros(shape) for shape in shapes), group)
        assert says in str(caught.value) and (says != FITS or str(list(shapes[2])) in str(caught.value))
    for half in range(3):
        mixed = [torch.zeros(Q).to(torch.bfloat16 if i == half else torch.float32) for i in range(3)]
        with pytest.raises(ValueError, match=r"queries are torch\..*, keys torch\..* and values .*: use one dtype"):
            across(*mixed, group)


def with_documents(world):
    torch.manual_seed(0)
    full, found = [torch.randn(4, 4, 16, 8, dtype=torch.float64) for _ in range(3)], {}
    right = attend(*full, range(16), range(16), 16, DOCUMENTS[:1])
    mine = [take_tokens(x, world, "contiguous", 2) for x in full]
    wrong = {
        "part": take_tokens(DOCUMENTS, world),
        "longer": torch.cat([DOCUMENTS, DOCUMENTS + 5], 1),
        "1-d": DOCUMENTS[0],
        "two rows": DOCUMENTS[:2],
    }
    for kind, across in KINDS.items():
        for name, documents in ({"for all": DOCUMENTS[:1]} | wrong).items():
            seen = {"documents_BT": documents}
            how = seen if kind == "ring" else {"attend": partial(attend, **seen)}
            y = said_by(partial(across, **how), *mine, world)
            far = y if isinstance(y, str) else (y - take_tokens(right, world, dim=2)).abs().max().item()
            found[kind, name] = far
    return found


def test_documents_are_those_of_all_tokens():
    shapes = {"part": [4, 8], "longer": [4, 32], "1-d": [16], "two rows": [2, 16]}
    for found in run(with_documents, 2):
        for kind in KINDS:
            assert found[kind, "for all"] < 1e-13
            for name, shape in shapes.items():
                says = f"documents have shape {shape}, and attention is over [4, 16] tokens: number all tokens"
                assert str(found[kind, name]).startswith(says), (kind, name, found)
