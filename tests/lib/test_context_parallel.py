"""Context parallelism: who computes what, attention over ranks against one process, and a GPT with all other axes."""

import random
import sys
from dataclasses import replace
from functools import partial
from itertools import product

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from book.trials.context_mistakes import CONTEXT_MISTAKES
from book.trials.mistakes import planted
from lib import run, trace
from lib.context_parallel.attention import attend, gather_attention, ulysses_attention
from lib.context_parallel.ring import ring_attention
from lib.context_parallel.tokens import by_ranks, in_sequence, take_tokens
from lib.cost.token_orders import TOKEN_ORDERS, blocks_of, causal_pairs, tokens_of_rank
from lib.lab.certificate import certify
from lib.layout import Layout
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT, GPTConfig, Heads
from lib.parallel import assemble, parallelize
from lib.tensor_parallel.sequence import mark_partial
from lib.tensor_parallel.tokenwise import check_tokenwise
from tests.lib.sharding import CHOICES, STAGES, serial

cloudpickle.register_pickle_by_value(sys.modules[__name__])

KINDS = {"gather": gather_attention, "ring": ring_attention, "ulysses": ulysses_attention}
T, E, ROWS = 24, 8, 2
GOLDEN = {  # pairs of a query and a key in 48 tokens, counted by hand in /FACTS
    2: {"contiguous": [300, 876], "zigzag": [588, 588], "striped": [576, 600]},
    3: {"contiguous": [136, 392, 648], "zigzag": [392, 392, 392], "striped": [376, 392, 408]},
    4: {"contiguous": [78, 222, 366, 510], "zigzag": [294] * 4, "striped": [276, 288, 300, 312]},
}
OF_DOCUMENTS = {
    (36, 12): {"contiguous": [300, 444], "zigzag": [156, 588], "striped": [360, 384]},
    (12, 36): {"contiguous": [156, 588], "zigzag": [444, 300], "striped": [360, 384]},
}


# ---- who has what ---------------------------------------------------------------------------------------------------


def test_pairs_of_each_rank():
    for n, of_order in GOLDEN.items():
        for order, pairs in of_order.items():
            assert [causal_pairs(order, 48, n, rank) for rank in range(n)] == pairs
    for documents, of_order in OF_DOCUMENTS.items():
        for order, pairs in of_order.items():
            assert [causal_pairs(order, 48, 2, rank, documents) for rank in range(2)] == pairs
    with pytest.raises(ValueError, match="47 tokens, and the sequence has 48"):
        causal_pairs("zigzag", 48, 2, 0, (36, 11))


@pytest.mark.parametrize(("order", "n"), [*product(TOKEN_ORDERS, (1, 2, 3, 4))])
def test_blocks_have_each_pair_once(order, n):
    every = [t for rank in range(n) for part in tokens_of_rank(order, 48, n, rank) for t in part]
    assert sorted(every) == list(range(48))
    for rank in range(n):
        seen = [
            (q, k)
            for owner in range(n)
            for block in blocks_of(order, 48, n, rank, owner)
            for q, k in product(block.queries, block.keys)
            if k <= q
        ]
        assert len(seen) == len(set(seen)) == causal_pairs(order, 48, n, rank)
        for owner in range(n):
            mine, theirs = ([t for part in tokens_of_rank(order, 48, n, r) for t in part] for r in (rank, owner))
            for block in blocks_of(order, 48, n, rank, owner):
                assert mine[block.mine] == [*block.queries] and theirs[block.theirs] == [*block.keys]
                assert block.is_whole == all(k <= q for q, k in product(block.queries, block.keys))


def test_tokens_come_back_in_order():
    x = torch.arange(24)[None, :, None].expand(2, 24, 3)
    for order, n in product(TOKEN_ORDERS, (2, 3, 4)):
        groups = [Group("cp", tuple(range(n)), rank) for rank in range(n)]
        rank_after_rank = torch.cat([take_tokens(x, group, order) for group in groups], 1)
        assert torch.equal(in_sequence(rank_after_rank, groups[0], order, 1), x)
        assert torch.equal(by_ranks(x, groups[0], order, 1), rank_after_rank)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"cp": 2, "token_order": "zigzag", "context": 10},
            "split over 2 x cp=2 chunks .zigzag.; use a multiple of 4",
        ),
        (
            {"cp": 4, "context": 10},
            "context=10 cannot be split over cp=4 .contiguous.; use a multiple of 4, such as 12",
        ),
        (
            {"cp": 2, "tp": 4, "sequence_parallel": True, "context": 12},
            "cannot be split over cp=2 x tp=4; use a multiple",
        ),
        ({"cp": 2, "attention": "ulysses", "token_order": "zigzag"}, "each rank has all tokens of its heads"),
        (
            {"cp": 3, "attention": "ulysses", "context": 12},
            "of 8 query heads and 8 of keys and values on a rank it cannot",
        ),
        ({"attention": "ring"}, "attention=ring needs ranks to split the tokens over: use cp=2 or more"),
        ({"token_order": "zigzag"}, "token_order=zigzag needs ranks"),
        ({"cp": 2, "attention": "flash"}, "attention='flash' must be one of gather, ring, ulysses"),
        ({"cp": 2, "order": "dp,tp"}, "must name dp, pp and tp, and may name cp"),
    ],
)
def test_what_cannot_be_split_is_refused(wrong, says):
    model = replace(CONFIG, context=wrong.pop("context", CONFIG.context))
    with pytest.raises(ValueError, match=says):
        Layout(**wrong).check(model, 16)


# ---- attention over ranks -------------------------------------------------------------------------------------------


def bytes_of_layer(kind, n, heads, kv_heads):
    """Forward and backward, as a fraction of all queries; derived in /FACTS."""
    g = kv_heads / heads
    if kind == "ulysses":
        return 4 * (1 + max(g, n / heads)) * (n - 1) / n**2
    return (6 if kind == "ring" else 4) * g * (n - 1) / n


DOCUMENTS = torch.tensor([[0] * 9 + [1] * 15, [0] * 20 + [1, 2, 2, 2]])  # of two rows of 24 tokens


def in_documents(across, documents_BT):
    if across is ring_attention:
        return partial(ring_attention, documents_BT=documents_BT)
    return partial(across, attend=partial(attend, documents_BT=documents_BT))


def compared(world, documents_BT=None):
    """For each kind, order and number of heads: the distance from one process, and the bytes sent."""
    found, n = [], world.size
    for (heads, kv_heads), order, (kind, across) in product(
        [(12, 12), (12, 4), (12, 1)], TOKEN_ORDERS, KINDS.items()
    ):
        if kind == "ulysses" and kv_heads % n and n % kv_heads:
            continue
        torch.manual_seed(0)
        full = [
            torch.randn(ROWS, h, T, E, dtype=torch.float64, requires_grad=True) for h in (heads, kv_heads, kv_heads)
        ]
        y = attend(*full, range(T), range(T), T, documents_BT)
        across = across if documents_BT is None else in_documents(across, documents_BT)
        gradient = torch.randn_like(y)
        y.backward(gradient)
        mine = [take_tokens(x.detach(), world, order, 2).requires_grad_() for x in full]
        with trace.record(world.rank) as recorded:
            out = across(*mine, world, order)
            out.backward(take_tokens(gradient, world, order, 2))
        pairs = [(out, y), *((here.grad, there.grad) for here, there in zip(mine, full, strict=True))]
        far = max((a - take_tokens(b, world, order, 2)).abs().max().item() for a, b in pairs)
        sent = recorded.wire_bytes / (y.numel() * 8)
        found.append((kind, order, heads, kv_heads, far, sent))
    return found


@pytest.mark.thorough("more ranks", keep=3)
@pytest.mark.parametrize("n", [3, 2, 1, 4])
@pytest.mark.parametrize("documents_BT", [None, DOCUMENTS], ids=["one document", "documents"])
def test_attention_and_its_gradients_are_those_of_one_process(n, documents_BT, say):
    """Three ranks first: on two, the next rank is also the one before."""
    for found in run(compared, n, documents_BT):
        assert len(found) >= 21
        say(f"{n} ranks: at most {max(far for *_, far, _ in found):.1g} apart")
        for kind, order, heads, kv_heads, far, sent in found:
            assert far < 1e-13, (kind, order, heads, kv_heads)
            assert sent == pytest.approx(bytes_of_layer(kind, n, heads, kv_heads), rel=1e-12), (kind, heads, kv_heads)


def test_ulysses_sends_less_than_the_ring_from_so_many_ranks_on():
    crossing = {ratio: (2 / 3) * (1 + ratio) for ratio in (1, 4, 8, 16)}
    assert [round(n, 2) for n in crossing.values()] == [1.33, 3.33, 6.0, 11.33]
    for (ratio, crosses), n in product(crossing.items(), (2, 4, 8, 16)):
        if 64 // ratio % n == 0:
            ulysses, ring = (bytes_of_layer(kind, n, 64, 64 // ratio) for kind in ("ulysses", "ring"))
            assert (ulysses < ring) == (n > crosses)


def flops(world):
    from torch.nn.attention import SDPBackend, sdpa_kernel  # here, because it cannot be sent to a rank

    found = {}
    for (kind, across), order in product(list(KINDS.items())[:2], TOKEN_ORDERS):
        q, k, v = (torch.randn(1, 2, T, E, requires_grad=True) for _ in range(3))
        mine = [take_tokens(x, world, order, 2).detach().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.MATH):  # the counter does not know the fused kernel of a CPU
            with FlopCounterMode(display=False) as forward:
                y = across(*mine, world, order)
            with FlopCounterMode(display=False) as backward:
                y.sum().backward()
        unit = 4 * 2 * E * (T // (2 * world.size)) ** 2
        found[kind, order] = forward.get_total_flops() / unit, backward.get_total_flops() / unit
    return found


def test_flops_of_a_rank():
    """In blocks of half a rank's tokens: 4(r + 1), 2n + 1, 4n. The ring's backward has five products, forward two."""
    n = 3
    for rank, found in enumerate(run(flops, n)):
        for kind in ("gather", "ring"):
            wanted = {"contiguous": 4 * (rank + 1), "zigzag": 2 * n + 1, "striped": 4 * n}
            if kind == "gather":  # its one block ends at the last query
                wanted["striped"] *= (T - n + rank + 1) / T
            for order, blocks in wanted.items():
                forward, backward = found[kind, order]
                assert forward == pytest.approx(blocks), (kind, order, rank)
                assert backward == pytest.approx((2.5 if kind == "ring" else 2) * blocks), (
                    "the ring computes the weights again"
                )


def kept(world):
    """Bytes that autograd keeps, in units of a rank's queries, by kind; parameters of the unit: heads of 16."""
    found = {}
    for kind, across in KINDS.items():
        mine = [torch.randn(1, 6, T // world.size, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        tensors = {}

        def note(x, tensors=tensors):
            tensors[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            y = across(*mine, world, "contiguous")
        tensors[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
        found[kind] = sum(tensors.values()) / mine[0].nbytes
    return found


def test_what_stays_for_backward():
    """The ring: q, k, v, the output and one number per query and head, 4 + 1/E, whatever the number of ranks."""
    for n in (1, 2, 3):
        found = run(kept, n)[0]
        assert found["ring"] == 4 + 1 / 16
        assert found["gather"] == 2 + 2 * n + 1 / 16, "also the keys and values of all ranks"
        assert found["ulysses"] == 5 + 1 / 16, "its output twice, before and after the exchange"


def beside_torch(world):
    """How far our ring is from PyTorch's private one, with gradients; imported here, as it cannot be sent."""
    from benchmarks.context_parallel import our_way, torch_ring

    torch.manual_seed(world.rank)
    tensors = [torch.randn(2, 4, 12, 16, dtype=torch.float64) for _ in range(4)]
    found = {}
    for order in ("contiguous", "zigzag"):
        *qkv, gradient = tensors
        ours = our_way(ring_attention, *qkv, world, order, gradient)
        theirs = torch_ring(*qkv, world, order, gradient)
        found[order] = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    return found


def test_our_ring_is_that_of_pytorch():
    for found in run(beside_torch, 3):
        assert len(found) == 2 and max(found.values()) < 1e-13


# ---- a GPT, with all other axes -------------------------------------------------------------------------------------

CONFIG = GPTConfig(vocab_size=16, context=16, d_model=16, num_layers=3, num_heads=8)
LLAMA = replace(CONFIG, llama=True, tied=False, num_kv_heads=4, d_mlp=24)


def possible(ranks):
    """All layouts with cp on so many ranks that are not refused."""
    found = []
    degrees = [d for d in product((1, 2), (1, 2), (2, 4), (1, 2)) if d[0] * d[1] * d[2] * d[3] == ranks]
    for (dp, pp, cp, tp), values in product(degrees, product(*CHOICES.values())):
        chosen = dict(zip(CHOICES, values, strict=True))
        more = {"stages_per_rank": STAGES.get(chosen["schedule"], 1), "microbatches": 2 if pp > 1 else 1}
        try:
            layout = Layout(dp=dp, pp=pp, cp=cp, tp=tp, **more, **chosen)
            layout.check(CONFIG, 8)
        except ValueError:
            continue
        found.append(layout)
    return found


def pairwise(layouts):
    """Some layouts in which every pair of two fields has every pair of values that any layout has."""

    def pairs(layout):
        values = [(name, value) for name, value in vars(layout).items() if name not in ("order", "microbatches")]
        return {(a, b) for a, b in product(values, repeat=2) if a < b}

    layouts, rng = layouts[:], random.Random(0)
    rng.shuffle(layouts)
    of = {layout: pairs(layout) for layout in layouts}
    missing, chosen = set().union(*of.values()), []
    while missing:
        chosen.append(max(layouts, key=lambda layout: len(of[layout] & missing)))
        missing -= of[chosen[-1]]
    return chosen


def batches(config):
    """Many targets do not count, most of these in the second half: the counts of the ranks differ."""
    torch.manual_seed(1)
    for _ in range(2):
        tokens = torch.randint(config.vocab_size, (8, config.context + 1))
        targets = tokens[:, 1:].clone()
        targets[:3, 5:], targets[6] = -100, -100
        yield tokens[:, :-1], targets


def certified(world, layouts, config):
    return certify(world, layouts, serial(config), list(batches(config)), max_norm=0.1)


@pytest.mark.thorough("eight ranks", keep=4)
@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        *((2, config) for config in (CONFIG, replace(LLAMA, document_end=3), replace(CONFIG, dropout=0.2))),
        (4, replace(LLAMA, dropout=0.2, document_end=3)),
        *((4, config) for config in (CONFIG, LLAMA, replace(CONFIG, document_end=3))),
        (8, CONFIG),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "llama" if value.llama else "gpt",
)
def test_every_pair_of_options_is_the_same_training(ranks, config, say):
    which = pairwise(possible(ranks))
    found = run(certified, ranks, which, config, timeout_s=300)[0]
    say(f"{len(which)} layouts of {ranks} ranks: gradient {max(apart.gradient for apart in found):.1g}")
    assert not [(layout, apart) for layout, apart in zip(which, found, strict=True) if not apart.holds()]


class OwnNorm(nn.Module):
    def forward(self, x):
        return x - x.mean(-1, keepdim=True)


class Looking(Heads):
    def attention(self, q, k, v):
        return super().attention(q, k, v)


def test_a_layer_that_may_mix_tokens_is_refused():
    def changed(change):
        model = GPT(CONFIG)
        change(model.blocks[1])
        return model

    def marked(block):
        block.norm1 = OwnNorm()
        mark_partial(block.norm1)

    check_tokenwise(GPT(CONFIG))
    check_tokenwise(GPT(LLAMA))
    check_tokenwise(changed(marked))
    check_tokenwise(changed(lambda block: setattr(block.mlp, "act", nn.ReLU())))
    check_tokenwise(changed(lambda block: setattr(block, "norm2", nn.Identity())))
    wrong = {
        "blocks.1.norm1 .OwnNorm. would get some tokens": lambda block: setattr(block, "norm1", OwnNorm()),
        "blocks.1.attention .Attention with its own heads": lambda block: setattr(
            block.attention, "heads", Looking(block.attention.heads.widths, 2)
        ),
        "mixes the tokens of a sequence": lambda block: setattr(block.mlp, "act", lambda x: x.cumsum(1)),
    }
    for says, change in wrong.items():
        with pytest.raises(ValueError, match=says):
            check_tokenwise(changed(change))


def refuses_own_models(world):
    mesh = Mesh(MeshShape(**Layout(cp=2).sizes), world)
    with pytest.raises(ValueError, match="cp=2 is for a GPT"):
        assemble(nn.Linear(4, 4), mesh, Layout(cp=2), torch.optim.AdamW, loss=lambda targets: None)
    model = GPT(CONFIG)
    model.blocks[0].norm1 = OwnNorm()
    with pytest.raises(ValueError, match="would get some tokens of each sequence"):
        parallelize(model, mesh, Layout(cp=2), torch.optim.AdamW)


def test_what_is_not_a_gpt_is_refused():
    run(refuses_own_models, 2)


def of_three_ranks(world):
    config = replace(LLAMA, context=12, num_heads=6, num_kv_heads=3, d_model=24)
    which = [*product(("gather", "ring"), TOKEN_ORDERS), ("ulysses", "contiguous")]
    layouts = [Layout(cp=3, attention=kind, token_order=order, zero=zero) for kind, order in which for zero in (0, 3)]
    return certified(world, layouts, config)


def test_three_ranks():
    found = run(of_three_ranks, 3)[0]
    assert len(found) == 14 and all(apart.holds() for apart in found)


WITH_RING = [Layout(cp=2, attention="ring", token_order=order) for order in TOKEN_ORDERS]


def with_mistakes(world):
    found = {}
    for mistake in CONTEXT_MISTAKES:
        with planted(mistake, CONTEXT_MISTAKES):
            found[mistake] = certified(world, WITH_RING, LLAMA)
    return found


ATTENTION = "the first module with a different output is blocks.0.attention.heads"
SAYS = {  # of the first step, in each order of tokens
    "positions from 0 on each rank": ("the loss is 2.83509 in one process", ATTENTION, "without a common factor"),
    "targets shifted inside the rank": ("its count of targets is 71 instead of 79: some targets are lost",),
    "loss divided by the count of the rank": ("and on the ranks", "each divides by a count of its own"),
    "gradients averaged over cp": (
        "the loss is right",
        "of the gradients all tensors: one factor, 0.5 (1 / the size of cp): a mean where there should be a sum",
    ),
    "blocks averaged, not merged": ("the loss is 2.83509 in one process", ATTENTION, "without a common factor"),
    "stale keys and values in backward": (
        "the loss is right, so forward is",
        "everything up to blocks.2.attention.qkv.weight, and nothing after it",
        "from blocks.2.attention.out.weight on all are right",
    ),
}


def test_each_classic_mistake_is_seen_and_said(say):
    for mistake, found in run(with_mistakes, 2)[0].items():
        say(f"{mistake}: {min(max(apart) for apart in found):.1g} or more; {found[0].difference}")
        assert not any(apart.holds() for apart in found) and all(max(apart) > 1e-6 for apart in found), mistake
        for apart, words in product(found, ("step 1: ", *SAYS[mistake])):
            assert words in apart.difference, (mistake, apart.difference)
