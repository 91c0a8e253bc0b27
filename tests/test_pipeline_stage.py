"""A stage's two ends, and where a model is cut."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from lib.model import GPT, GPTConfig
from lib.pipeline.balance import balanced, layer_costs
from lib.pipeline.schedules.action import ScheduleError
from lib.pipeline.stage import Stage, cut


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


def test_an_evaluation_keeps_nothing():
    stage = Stage(nn.Linear(4, 4), 4)
    with torch.no_grad():
        stage.forward(0, torch.randn(2, 4))
    assert stage.microbatches == 0


def cheapest(costs, parts):
    """By trying all."""
    from itertools import combinations

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
    tied = {id(model.embed.token.weight): ("embed.token.weight", (0, 8))}
    assert all(piece.shared == tied for piece in pieces)
    tokens = torch.randint(2048, (2, 8))
    torch.testing.assert_close(nn.Sequential(*pieces)(tokens), model(tokens), rtol=0, atol=0)
    with pytest.raises(ValueError, match="8 blocks and a head cannot be cut into 10 stages; use 9 stages or fewer"):
        cut(model, 10)


class To(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


WIDE = [nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 6)]


def check_shapes(pieces, inputs, width=None):
    x = inputs
    for stage, (piece, taker) in enumerate(pairwise(pieces)):
        x = piece(x)
        Stage(taker, width).check_output(stage, x, inputs)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        (
            WIDE,
            "stage 1 gives float32[2, 5, 8], but messages between stages are float32[2, 5, 6]; cut the model",
        ),
        ([*WIDE[:1], nn.Flatten(), nn.Linear(30, 6)], "stage 1 gives float32[2, 30], but messages between stages"),
        (
            [nn.Sequential(WIDE[0], To(torch.float64)), WIDE[1]],
            "stage 0 gives float64[2, 5, 6], but messages between stages",
        ),
        ([WIDE[0], nn.Linear(6, 6).double()], "but messages between stages are float64[2, 5, 6]"),
    ],
)
def test_a_stage_that_changes_the_shape_is_named(pieces, says):
    with pytest.raises(ScheduleError) as error:
        check_shapes(pieces, torch.zeros(2, 5, dtype=torch.long), width=6)
    assert says in str(error.value)


def test_inputs_that_are_not_like_what_travels():
    with pytest.raises(ScheduleError, match=r"gives float32\[2, 5, 6\], but .* are int64\[2, 5\]; .* width=None"):
        check_shapes([WIDE[0], nn.Linear(6, 9)], torch.zeros(2, 5, dtype=torch.long))
    check_shapes([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)], torch.zeros(2, 5, 6))  # the loss takes the last
