"""A stage's two ends, and where a model is cut."""

import operator
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lib.memory import MemoryTracker
from lib.model import GPT, GPTConfig
from lib.pipeline.balance import balanced, layer_costs
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.stage import GPTStage, Stage, cut, stages_of
from tests.lib.sharding import said


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_two_stages_are_one_model(split, recompute):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6).double() for _ in range(2)]
    whole = nn.Sequential(*layers)
    x = torch.randn(3, 6).double()
    wanted = torch.autograd.grad(whole(x).square().mean(), list(whole.parameters()))
    first, second = (Stage(layer, 6, recompute) for layer in layers)
    y = first.forward(0, x, split=split)
    loss = second.forward(0, y, lambda z: z.square().mean(), split)
    assert loss.dim() == 0 and not loss.requires_grad and second.microbatches == 1
    back = second.backward_input(0) if split else second.backward(0)
    (first.backward_input if split else first.backward)(0, back)
    if split:
        assert all(p.grad is None for p in whole.parameters())
        second.backward_weight(0)
        first.backward_weight(0)
    assert first.microbatches == second.microbatches == 0
    for p, gradient in zip(whole.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-15)


class Picks(nn.Module):
    """Its input in another order; the gradient of the input is sparse."""

    def forward(self, x):
        return x.gather(-1, torch.arange(6).flip(0).expand_as(x), sparse_grad=True)


def test_the_gradient_that_a_stage_gives_back_is_dense():
    stage, x = Stage(Picks(), 6), torch.randn(3, 6)
    stage.forward(0, x, lambda y: (y * torch.arange(6.0)).sum())
    assert torch.equal(stage.backward(0), torch.arange(6.0).flip(0).expand(3, 6))


class Mean(nn.Module):
    """Subtracts a moving average, which begins as None and is replaced in each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)
        self.register_buffer("alike", torch.eye(6))

    def forward(self, x):
        own = x.detach().mean(0)
        self.mean = own if self.mean is None else (self.mean + own) / 2
        return (x - self.mean).tanh() @ self.alike


CHANGED_BY_FORWARD = {
    "batch norm": lambda: nn.BatchNorm1d(6, momentum=None),
    "spectral norm": lambda: spectral_norm(nn.Linear(6, 6)),
    "the older spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "a buffer that is replaced": Mean,
    "one module twice": lambda: nn.Sequential(*2 * [nn.Sequential(nn.BatchNorm1d(6), nn.Dropout())]),
}


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize("kind", CHANGED_BY_FORWARD)
def test_recomputation_starts_from_the_same_buffers_and_leaves_them(kind):
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 6), CHANGED_BY_FORWARD[kind](), nn.Tanh()).double()
        stage, x = Stage(module, recompute=recompute), torch.randn(3, 4, 6).double()
        for m in range(3):
            stage.forward(m, x[m])
        for m in range(3):
            stage.backward(m, torch.ones(4, 6).double())
        found.append([*module.buffers(), *(p.grad for p in module.parameters())])
    assert all(map(torch.equal, *found))


def test_buffers_stay_when_recomputation_fails():
    norm = nn.BatchNorm1d(6)
    stage = Stage(nn.Sequential(norm, Failing()), recompute=True)
    stage.forward(0, torch.randn(4, 6))
    before = [*norm.buffers()]
    values = [b.clone() for b in before]
    with pytest.raises(KeyError):
        stage.backward(0, torch.ones(4, 6))
    assert all(map(operator.is_, before, norm.buffers())) and all(map(torch.equal, before, values))


class Failing(nn.Module):
    """Fails in its second forward."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return {1: x}[self.calls].sin()


def test_an_evaluation_keeps_nothing():
    stage = Stage(nn.Linear(4, 4), 4)
    with torch.no_grad():
        stage.forward(0, torch.randn(2, 4))
    assert stage.microbatches == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_after_its_backward_nothing_of_a_microbatch_is_left(recompute):
    stage = Stage(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 4, recompute)
    with MemoryTracker(stage.module) as memory:
        for m in range(2):
            stage.forward(m, torch.ones(2, 4))
        for m in range(2):
            assert memory.live["activation"] > 0
            stage.backward(m, torch.ones(2, 4))
        assert memory.live["activation"] == 0


def cheapest(costs, parts):
    """By trying all."""
    ways = combinations(range(1, len(costs)), parts - 1)
    return min(max(sum(costs[a:b]) for a, b in zip((0, *w), (*w, len(costs)), strict=True)) for w in ways)


def test_parts_are_as_equal_as_can_be():
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 9):
        costs = torch.randint(1, 9, (count,), generator=generator).tolist()
        for parts in range(1, count + 1):
            found = balanced(costs, parts)
            assert [i for part in found for i in part] == list(range(count)) and all(found)
            assert max(sum(costs[i] for i in part) for part in found) == cheapest(costs, parts)


def test_a_gpt_is_cut_by_cost():
    config = GPTConfig(vocab_size=2048, d_model=32, num_layers=8, num_heads=4)
    costs = layer_costs(config)
    assert costs[-1] == 4 * costs[0], "a head of so many words weighs as much as four blocks"
    model = GPT(config)
    for num_stages, lengths in ((2, [7, 3]), (3, [5, 4, 1]), (9, [2] + [1] * 8)):  # with embedding and head
        pieces = cut(model, num_stages)
        layers = [(piece.embed, *piece.blocks.values(), piece.head) for piece in pieces]
        assert [sum(layer is not None for layer in of_piece) for of_piece in layers] == lengths
    names = [name for piece in pieces for name, _ in piece.named_parameters()]
    assert set(names) == {"head.linear.weight", *(name for name, _ in model.named_parameters())}, "the serial names"
    tied = [{0: "embed.token.weight", 8: "head.linear.weight"}]
    assert all(piece.used_by == tied for piece in pieces)
    tokens = torch.randint(2048, (2, 8))
    torch.testing.assert_close(nn.Sequential(*pieces)(tokens), model(tokens), rtol=0, atol=0)
    with pytest.raises(ValueError, match="8 blocks and a head cannot be cut into 10 stages; use 9 stages or fewer"):
        cut(model, 10)


def refused(change):
    """What is said of a GPT with something of its own."""
    model = GPT(GPTConfig(d_model=8, num_layers=2, num_heads=2))
    change(model)
    texts = {said(partial(cut, model, n), ValueError) for n in (1, 2)}
    texts |= {said(partial(stages_of, model, gpipe(2, 2), 0), ValueError)}
    (text,) = texts | {said(partial(GPTStage, model, range(1), True), ValueError)}
    return text


class Doubled(GPT):
    def forward(self, tokens):
        return 2 * super().forward(tokens)


def test_a_model_that_stages_would_not_compute_is_refused():
    for make in (lambda: nn.Sequential(nn.Linear(8, 8)), lambda: nn.Linear(8, 8)):
        for call in (
            lambda m: cut(m, 2),
            lambda m: stages_of(m, gpipe(2, 2), 0),
            lambda m: GPTStage(m, range(1), True),
        ):
            text = said(lambda call=call, make=make: call(make()), ValueError)
            assert "only a GPT of lib/model.py can be cut into its blocks" in text and "as Stage(module)" in text

    def end(model):
        model.__class__ = Doubled

    own = ", which no stage would have: move that into embed, blocks or head, or write the stages yourself"
    assert f"Doubled has its own forward{own}" in refused(end)
    assert f"GPT has its own norm{own}" in refused(lambda model: setattr(model, "norm", nn.LayerNorm(8)))
    assert f"GPT has its own scale{own}" in refused(
        lambda model: setattr(model, "scale", nn.Parameter(torch.ones(1)))
    )
    assert f"GPT has its own mean{own}" in refused(lambda model: model.register_buffer("mean", torch.ones(1)))
    assert f"GPT has its own forward_hooks{own}" in refused(lambda model: model.register_forward_hook(print))
    assert f"GPT has its own forward{own}" in refused(lambda model: setattr(model, "forward", lambda tokens: tokens))
    assert "this GPT has 3 blocks, but its config says num_layers=2" in refused(
        lambda model: model.blocks.append(model.blocks[0])
    )
    assert "document_end=3 is looked for by the full model, and only its first stage gets tokens" in refused(
        lambda model: setattr(model, "config", replace(model.config, document_end=3))
    )


def test_a_stage_that_writes_its_weights_in_forward_is_refused():
    """Each microbatch would write them; in one process the full batch does, once."""
    for recompute in (False, True):
        stage = Stage(nn.Sequential(nn.Embedding(4, 2, max_norm=0.1)), 2, recompute)
        with pytest.raises(RuntimeError, match=r"writes into its parameter 0.weight, as nn.Embedding\(max_norm"):
            stage.forward(0, torch.arange(4)[None])
