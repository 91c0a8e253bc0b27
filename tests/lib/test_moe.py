"""Experts in one process, against every expert on every token; the balance of loads; capacity; what is refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import linear

from lib.model import GPT, GPTConfig, mean_loss
from lib.moe import ExpertOptions, MoE, Routing, bias_change, loads, places_among, update_biases
from lib.recompute import recomputed
from tests.lib.sharding import serial

CONFIG = GPTConfig(vocab_size=16, context=12, d_model=16, num_layers=2, num_heads=2, experts=8)
LLAMA = {"llama": True, "num_kv_heads": 1, "d_mlp": 24}


def made(seed=0, width=24, **options):
    """A mixture of 16 wide tokens with large weights, in float64."""
    torch.manual_seed(seed)
    moe = MoE(ExpertOptions(**{"experts": 8} | options), 16, width, torch.tanh).double()
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float64) / 2)
        if moe.router.bias is not None:
            moe.router.bias.zero_()
    return moe


class EveryExpert(MoE):
    """All experts compute all tokens, and a mask keeps the k best; the balance loss, weighted, is in `aux`."""

    def forward(self, x_BTD):
        options, router = self.options, self.router
        scores = linear(x_BTD, router.weight).softmax(-1)
        preferred = scores.detach() if router.bias is None else scores.detach() + router.bias
        chosen = preferred >= preferred.sort(-1, descending=True).values[..., options.top_k - 1, None]
        gates = scores * chosen
        if options.renormalise:
            gates = gates / gates.sum(-1, keepdim=True)
        each = zip(gates.unbind(-1), self.experts.up, self.experts.down, strict=True)
        y_BTD = sum(g[..., None] * linear(self.experts.act(linear(x_BTD, up)), down) for g, up, down in each)
        over = (1,) if options.balance_over == "sequence" else (0, 1)
        share = chosen.double().mean(over) / options.top_k
        self.aux = options.balance * options.experts * (share * scores.mean(over)).sum(-1).mean()
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def apart(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def tokens(rows=3):
    torch.manual_seed(1)
    return torch.randint(16, (rows, 12)), torch.randint(16, (rows, 12))


# ---- against brute force --------------------------------------------------------------------------------------------

MODELS = [
    {"top_k": 1, "renormalise": False},
    {"top_k": 2},
    {"top_k": 3, "renormalise": False, "balance": 0.1},
    {"top_k": 2, "d_shared": 8, "d_expert": 6, "balance": 0.3, "balance_over": "sequence"},
    {"top_k": 3, "num_layers": 3, "expert_every": 2, "balance": 0.2},
    {"top_k": 5, "experts": 5, "bias_rate": 0.01},
    {"top_k": 1, "renormalise": False, "experts": 1},
]


@pytest.mark.parametrize("options", MODELS, ids=str)
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt", "llama"])
def test_a_gpt_with_experts_is_every_expert_on_every_token_masked(family, options):
    """Loss, and gradients of all parameters, also of the balance loss, which nobody adds to the loss here."""
    model, (x, y) = serial(replace(CONFIG, **family, **options)), tokens()
    loss = mean_loss(model(x), y)
    ours = gradients_of(model, loss)
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    assert len(mixtures) == (1 if options.get("expert_every") else 2)
    for mixture in mixtures:
        mixture.__class__ = EveryExpert
    brute = mean_loss(model(x), y)
    theirs = gradients_of(model, brute + sum(mixture.aux for mixture in mixtures))
    assert abs(loss - brute) < 1e-13 and apart(ours, theirs) < 1e-13


def test_an_expert_without_a_token_has_gradients_of_zeros():
    moe = made(bias_rate=0.01)
    with torch.no_grad():
        moe.router.bias[3] = -10
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    found = gradients_of(moe, moe(x).square().sum())
    assert moe.router.load[3] == 0 and moe.router.load.sum() == 24 and moe.router.bias.grad is None
    for name in ("experts.up", "experts.down"):
        assert not found[name][3].any() and found[name][[0, 1, 2, 4, 5, 6, 7]].flatten(1).any(1).all()


def test_a_bias_chooses_and_does_not_weigh():
    moe, x = made(bias_rate=0.01), torch.randn(1, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        moe.router.bias[6] = 10
    scores, chosen, gates = moe.router(x)
    assert (chosen[..., 0] == 6).all() and torch.allclose(gates.sum(-1), torch.ones(1, 5, dtype=torch.float64))
    assert torch.allclose(gates[..., 0] / gates[..., 1], scores[..., 6] / scores.gather(-1, chosen[..., 1:])[..., 0])


def test_the_router_of_a_half_precision_model_computes_in_float32():
    moe = made().to(torch.bfloat16)
    x = torch.randn(2, 3, 16, dtype=torch.bfloat16, requires_grad=True)
    y = moe(x)
    y.sum().backward()
    assert moe.router(x).scores.dtype == torch.float32 and y.dtype == x.grad.dtype == torch.bfloat16
    assert torch.equal(moe.router(x).scores, linear(x.float(), moe.router.weight.float()).softmax(-1))


def test_a_lone_score_divided_by_itself_trains_no_router():
    """The reason for a refusal: of k = 1 the renormalised weight is 1, whatever the scores."""
    x = torch.randn(4, 6, 16, dtype=torch.float64)
    norms = []
    for divided in (True, False):
        moe = made(top_k=1, renormalise=False)
        moe.router.renormalise = divided
        norms.append(gradients_of(moe, moe(x).square().sum())["router.weight"].norm().item())
    assert norms[0] < 1e-12 < 1 < norms[1]


# ---- balance --------------------------------------------------------------------------------------------------------


def routing_of(choices, scores=None):
    """Choices of tokens, as a list of sequences; scores: those of the choices, equal."""
    chosen = torch.tensor(choices)
    if scores is None:
        scores = torch.zeros(*chosen.shape[:2], 8, dtype=torch.float64)
        scores.scatter_(-1, chosen, 1 / chosen.shape[-1])
    return Routing(scores, chosen, scores.gather(-1, chosen))


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_the_balance_loss_is_1_if_even_and_experts_over_k_if_all_choose_the_same(k, over):
    moe = made(top_k=k, renormalise=False, balance=1.0, balance_over=over)
    even = routing_of([[[(k * t + i) % 8 for i in range(k)] for t in range(16)]] * 2)
    same = routing_of([[list(range(k))] * 16] * 2)
    assert moe.balance_loss(even.scores, loads(even)).item() == pytest.approx(1, abs=1e-15)
    assert moe.balance_loss(same.scores, loads(same)).item() == pytest.approx(8 / k, abs=1e-14)


def test_loads_are_balanced_over_the_batch_or_in_each_sequence():
    """Two sequences, each of which sends all its tokens to its own expert: as a batch half as bad."""
    split = routing_of([[[0]] * 4, [[5]] * 4])
    found = {
        over: made(top_k=1, renormalise=False, balance=1.0, balance_over=over)
        .balance_loss(split.scores, loads(split))
        .item()
        for over in ("batch", "sequence")
    }
    assert found == {"batch": 4, "sequence": 8}


def test_the_balance_loss_is_added_once_to_a_sum_of_losses():
    """Also if y is used twice, or the loss is not a mean; its gradient has no factor of the loss."""
    x = torch.randn(3, 6, 16, dtype=torch.float64)
    plain, with_loss = made(), made(balance=0.5)
    brute = made(balance=0.5)
    brute.__class__ = EveryExpert
    brute(x)
    aux = gradients_of(brute.router, brute.aux)["weight"]
    assert aux.norm() > 1e-4
    for loss_of in (
        lambda y: y.square().sum() + 3 * y.sin().sum(),
        lambda y: y.square().mean() / 1000,
        lambda y: y[:1].sum() + y[1:].square().sum(),
    ):
        ours, without = (gradients_of(moe, loss_of(moe(x))) for moe in (with_loss, plain))
        assert apart(ours | {"router.weight": ours["router.weight"] - aux}, without) < 1e-12


def test_evaluation_and_a_forward_without_backward_leave_no_trace():
    moe, x = made(balance=0.5, bias_rate=0.01), torch.randn(2, 6, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = moe(x)
    assert torch.equal(moe(x), expected) and moe.router.load is None
    moe(x).sum().backward()
    assert moe.router.load.sum() == 24


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_counts_each_token_once(recompute):
    """Two backward passes add up; an activation checkpoint runs forward twice, and backward once."""
    config = replace(CONFIG, balance=0.1, bias_rate=0.01)
    model, (x, y) = serial(config), tokens(4)
    plain = gradients_of(model, mean_loss(model(x), y))
    load = [block.mlp.router.load for block in model.blocks]
    for block in model.blocks:
        block.mlp.router.load, block.recompute = None, recomputed if recompute else None
    again = gradients_of(model, mean_loss(model(x), y))
    assert apart(again, plain) < 1e-15
    assert all(torch.equal(block.mlp.router.load, one) for block, one in zip(model.blocks, load, strict=True))
    assert [one.sum() for one in load] == [4 * 12 * 2] * 2
    mean_loss(model(x[:1]), y[:1]).backward()
    assert model.blocks[1].mlp.router.load.sum() == 5 * 12 * 2
    update_biases(model)
    assert all(block.mlp.router.load is None for block in model.blocks)


def test_a_bias_moves_against_the_load():
    change = bias_change(torch.tensor([4.0, 2, 1, 1, 2]), 0.5)
    assert change.tolist() == [-0.5, 0, 0.5, 0.5, 0]
    moe, x = made(bias_rate=0.25), torch.randn(2, 6, 16, dtype=torch.float64)
    moe(x).sum().backward()
    load = moe.router.load
    update_biases(moe)
    assert torch.equal(moe.router.bias, 0.25 * torch.sign(3 - load)) and moe.router.load is None
    update_biases(moe)  # nothing new
    assert torch.equal(moe.router.bias, 0.25 * torch.sign(3 - load))


def violations(rate, steps=(0, 10, 50, 100, 200)):
    """MaxVio, the load of the busiest expert over the mean, minus 1, of 512 tokens that prefer some experts."""
    torch.manual_seed(0)
    scores = (torch.randn(512, 8) + torch.linspace(0, 1, 8)).double().softmax(-1)
    bias, found = torch.zeros(8, dtype=torch.float64), []
    for step in range(max(steps) + 1):
        load = torch.bincount((scores + bias).topk(2).indices.flatten(), minlength=8).double()
        if step in steps:
            found.append((load.max() / load.mean() - 1).item())
        bias += bias_change(load, rate)
    return found


def test_a_slow_bias_balances_well_and_a_fast_one_swings(say):
    found = {rate: violations(rate) for rate in (0.001, 0.01, 0.1)}
    for rate, each in found.items():
        say(f"rate {rate}: MaxVio {' '.join(f'{one:.3f}' for one in each)}")
    slow, middle, fast = found.values()
    assert slow == sorted(slow, reverse=True) and slow[0] > 0.5 and slow[-1] < 0.02
    assert middle[1] < slow[1] / 4 and max(middle[1:]) < 0.15 and middle[-1] > slow[-1]
    assert min(fast) >= 0.5, "it never comes to rest"


# ---- capacity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.01, 0.5, 1.0, 1.25, 8.0])
def test_a_full_expert_refuses_the_later_tokens(factor):
    """Counted one by one, in the order of the tokens; a refused row counts as 0, and gives no gradient."""
    moe, x = made(capacity_factor=factor), torch.randn(3, 8, 16, dtype=torch.float64)
    _, chosen, gates = moe.router(x)
    room = torch.full((8,), -(-factor * 2 * 24 // 8))
    load = torch.bincount(chosen.flatten(), minlength=8)
    wanted = torch.zeros(24, 16, dtype=torch.float64)
    taken = 0
    rows = zip(x.flatten(0, 1), chosen.flatten(0, 1).tolist(), gates.flatten(0, 1), strict=True)
    for token, (row, experts, weights) in enumerate(rows):
        for expert, weight in zip(experts, weights, strict=True):
            if room[expert] > 0:
                room[expert] -= 1
                taken += 1
                up, down = moe.experts.up[expert], moe.experts.down[expert]
                wanted[token] += weight * linear(torch.tanh(linear(row, up)), down)
    y = moe(x)
    assert torch.allclose(y, wanted.view_as(y), rtol=0, atol=1e-13)
    kept = len(moe.sorted_rows(chosen.flatten()))
    assert kept == taken == load.clamp(max=-(-factor * 2 * 24 // 8)).sum()
    assert (kept == 48) == (factor == 8)
    whole = wanted.square().sum()
    names = [name for name, _ in moe.named_parameters()]
    theirs = dict(zip(names, torch.autograd.grad(whole, list(moe.parameters())), strict=True))
    assert apart(gradients_of(moe, moe(x).square().sum()), theirs) < 1e-12


def test_each_rank_alone_refuses_more_tokens_than_the_group():
    """Of 1024 choices; how many depends on the number of ranks: capacity is not a property of the model."""
    torch.manual_seed(0)
    x = torch.randn(1, 512, 16, dtype=torch.float64)

    def dropped(factor, n):
        moe = made(capacity_factor=factor)
        each = (moe.sorted_rows(moe.router(part).chosen.flatten()) for part in x.chunk(n, 1))
        return 1024 - sum(map(len, each))

    table = {factor: [dropped(factor, n) for n in (1, 2, 4, 8)] for factor in (1.0, 1.25, 1.5)}
    for counts in table.values():
        assert counts == sorted(counts)
    assert table[1.0] > table[1.25] > table[1.5] and table[1.0][0] > 0 and len(set(table[1.0])) == 4


def test_places_among_the_rows_of_an_expert():
    assert places_among(torch.tensor([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
    assert places_among(torch.tensor([0, 0])).tolist() == []


# ---- options, sizes, initial weights --------------------------------------------------------------------------------

REFUSED = {
    "top_k=9 experts per token of experts=8: use at most as many": {"top_k": 9},
    "the router gets no gradient: use renormalise=False": {"top_k": 1},
    "expert_every=3 leaves num_layers=2 without experts: use 2 or less": {"expert_every": 3},
    "experts=-1 must be a whole number of at least 0": {"experts": -1},
    "top_k=0 must be a whole number of at least 1": {"top_k": 0},
    "top_k=True must be a whole number": {"top_k": True},
    "d_shared=1.5 must be a whole number": {"d_shared": 1.5},
    "balance_over='token' must be one of batch, sequence": {"balance_over": "token"},
    "balance=-1 must be a number of at least 0, and finite": {"balance": -1},
    "bias_rate=nan must be a number of at least 0, and finite": {"bias_rate": float("nan")},
    "capacity_factor=0 must be a number above 0, or None": {"capacity_factor": 0},
    "capacity_factor=inf must be a number above 0, or None": {"capacity_factor": float("inf")},
    "balance=0.1 is for experts, and experts=0: use experts=4, or more": {"experts": 0, "balance": 0.1},
    "d_expert=0 must be a whole number of at least 1": {"d_expert": 0},
    "d_expert='8' must be a whole number of at least 1": {"d_expert": "8"},
}


@pytest.mark.parametrize("says", REFUSED)
def test_options_that_do_not_fit_are_refused(says):
    with pytest.raises(ValueError) as error:
        replace(CONFIG, **REFUSED[says])
    assert says in str(error.value)


@pytest.mark.parametrize(("family", "matrices"), [({}, 2), (LLAMA, 3)], ids=["gpt", "llama"])
def test_parameters_are_counted(family, matrices):
    def sizes(**more):
        return replace(CONFIG, **family | {"d_mlp": 24} | more).num_parameters

    dense, without_mlp = sizes(experts=0), 2 * (matrices * 16 * 24 + (0 if family else 24 + 16))
    experts = 2 * (8 * matrices * 16 * 10 + 8 * 16)
    assert sizes(d_expert=10) == dense - without_mlp + experts
    assert sizes(d_expert=10, bias_rate=0.1) == dense - without_mlp + experts + 2 * 8
    assert sizes(d_expert=10, expert_every=2) == dense + (experts - without_mlp) // 2
    shared = 2 * (matrices * 16 * 6 + (0 if family else 6 + 16))
    assert sizes(d_expert=10, d_shared=6) == dense - without_mlp + experts + shared


def test_initial_weights_depend_on_seed_and_name_alone():
    torch.manual_seed(0)
    config = replace(CONFIG, bias_rate=0.1, d_shared=8)
    model = GPT(config)
    again = GPT(config)
    again.seed = model.seed
    for name, p in reversed(list(again.named_parameters())):
        again.initialise(name, p)
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
    experts = model.blocks[0].mlp.experts
    assert not torch.equal(experts.up[0], experts.up[1])
    large = partial(torch.std, unbiased=False)
    assert large(experts.up).item() == pytest.approx(0.02, rel=0.05)
    assert large(experts.down).item() == pytest.approx(0.01, rel=0.05), "it writes to the residual stream: / √(2·l)"
    assert not model.blocks[0].mlp.router.bias.any() and large(model.blocks[0].mlp.router.weight) > 0.015
