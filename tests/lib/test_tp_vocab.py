"""Embedding and loss over a vocabulary in parts, against torch's own over a whole one."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lib import run, trace
from lib.placement import Replicate, Shard
from lib.tensor_parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy, vocab_parallel_loss
from lib.verify import assert_matches_serial
from tests.lib.sharding import said

V = 24


def drawn(dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(3)
    logits = scale * torch.randn(2, 5, V, generator=generator).to(dtype)
    targets = torch.randint(V, (2, 5), generator=generator)
    return logits, targets


def both(world, logits, targets):
    """(losses, gradient of this rank's logits) of torch and of ours, under the same gradient of each loss."""
    weights = torch.arange(1.0, 11).reshape(2, 5).to(logits.dtype)
    whole = logits.clone().requires_grad_()
    wanted = cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
    (wanted * weights).sum().backward()
    mine = logits.chunk(world.size, -1)[world.rank].clone().requires_grad_()
    got = vocab_parallel_cross_entropy(mine, targets, world)
    (got * weights).sum().backward()
    return (wanted.detach(), whole.grad.chunk(world.size, -1)[world.rank]), (got.detach(), mine.grad)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize("n", [3, 1, 2, 4])
def test_loss_and_gradient_are_torchs(n):
    def works(world):
        logits, targets = drawn()
        targets[0, :2], targets[1, 4] = -100, V - 1
        wanted, got = both(world, logits, targets)
        for one, other in zip(wanted, got, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)
        assert got[0][0, :2].tolist() == [0, 0] and got[1][0, :2].abs().max() == 0

    run(works, n)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize("n", [3, 1, 2])
def test_ignored_tokens_may_have_logits_that_are_not_finite(n):
    """Zero times NaN is NaN; torch's own gradient of such a token is NaN too, and ours is the zero that it means."""

    def works(world):
        for dtype, index in itertools.product(
            (torch.float64, torch.float32, torch.bfloat16, torch.float16), (-100, 7)
        ):
            logits, targets = drawn(dtype)
            targets[targets == 7], targets[0, 1:4] = 8, index
            ignored = targets == index
            whole = logits.clone().requires_grad_()
            wide = whole.flatten(0, 1).to(torch.promote_types(dtype, torch.float32))
            wanted = cross_entropy(wide, targets.flatten(), ignore_index=index)
            wanted.backward()
            logits[0, 1], logits[0, 2], logits[0, 3, 1:] = float("nan"), float("inf"), -float("inf")
            mine = logits.chunk(world.size, -1)[world.rank].clone().requires_grad_()
            losses = vocab_parallel_cross_entropy(mine, targets, world, index)
            weights = torch.where(ignored, float("nan"), 1.0 / (~ignored).sum())
            losses.backward(weights.to(losses.dtype))
            for loss in (losses.sum() / (~ignored).sum(), vocab_parallel_loss(mine, targets, world, None, index)):
                torch.testing.assert_close(loss, wanted, rtol=1e-6 if dtype != torch.float64 else 1e-12, atol=0)
            torch.testing.assert_close(mine.grad, whole.grad.chunk(world.size, -1)[world.rank])

    run(works, n)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)])
def test_where_no_token_counts_the_loss_is_zero(count):
    def works(world):
        logits, targets = drawn()
        mine = logits.chunk(world.size, -1)[world.rank].clone().requires_grad_()
        loss = vocab_parallel_loss(mine, targets.fill_(-100), world, count)
        loss.backward()
        return loss.item(), mine.grad.abs().max().item()

    assert run(works, 2) == [(0, 0)] * 2


def test_the_count_may_be_a_sum_of_weights():
    def works(world):
        logits, targets = drawn()
        mine = logits.chunk(world.size, -1)[world.rank]
        total = vocab_parallel_loss(mine, targets, world, 1)
        return [(vocab_parallel_loss(mine, targets, world, count) * count / total).item() for count in (0.25, 2.5)]

    for ratios in run(works, 2):
        assert ratios == pytest.approx([1, 1], rel=1e-12)


def test_a_second_derivative_is_refused():
    """It was a zero: the gradient was taken for a constant."""

    def works(world):
        logits, targets = drawn()
        mine = logits.chunk(world.size, -1)[world.rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, targets, world).sum()
        with pytest.raises(RuntimeError, match="vocab_parallel_cross_entropy has no second derivative"):
            torch.autograd.grad(loss, mine, create_graph=True)

    run(works, 2)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_extreme_logits(scale):
    def works(world):
        logits, targets = drawn(torch.float32, scale)
        logits[0, 0], logits[0, 1] = -scale, scale  # all the same
        wanted, got = both(world, logits, targets)
        assert got[0].isfinite().all() and got[1].isfinite().all()
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-4 * max(1, scale / 1e4))
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-4, atol=1e-5)

    run(works, 3)


def test_all_words_but_one_may_be_impossible():
    def works(world):
        logits, targets = drawn()
        logits[..., 1:] = -torch.inf  # so that a rank has no possible word at all
        targets[:] = 0
        losses = vocab_parallel_cross_entropy(logits.chunk(world.size, -1)[world.rank], targets, world)
        return losses.abs().max().item()

    assert run(works, 4) == [0] * 4


def test_half_precision_is_widened():
    def works(world):
        logits, targets = drawn(torch.bfloat16)
        mine = logits.chunk(world.size, -1)[world.rank].clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(mine, targets, world)
        losses.sum().backward()
        wanted = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5)
        return losses.dtype, mine.grad.dtype

    assert run(works, 2) == [(torch.float32, torch.bfloat16)] * 2


def test_it_never_collects_the_logits():
    def seen(world):
        logits, targets = drawn(torch.float32)
        mine = logits.chunk(world.size, -1)[world.rank].requires_grad_()
        with trace.record(world.rank) as forward:
            losses = vocab_parallel_cross_entropy(mine, targets, world)
        with trace.record(world.rank) as backward:
            losses.sum().backward()
        return [(e.kind, e.payload_bytes) for e in forward.events], len(backward.events)

    tokens = 10 * 4  # bytes of a number for each
    assert run(seen, 4) == [([("all_reduce", tokens), ("all_reduce", 2 * tokens)], 0)] * 4


@pytest.mark.thorough("more ranks, sizes and kinds", keep=4)
@pytest.mark.parametrize("n", [3, 1, 2, 4])
@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_embedding_is_its_twin(n, sequence_dim):
    def equal(world):
        torch.manual_seed(0)
        serial = nn.Embedding(V, 6).double()
        parallel = VocabParallelEmbedding.from_serial(serial, world, sequence_dim=sequence_dim)
        tokens = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(1))
        to = Replicate() if sequence_dim is None else Shard(1)
        assert_matches_serial(serial, parallel, tokens, world, 1e-14, to=to)

    run(equal, n)


def test_embedding_drawn_with_other_seeds():
    def rows(world):
        torch.manual_seed(world.rank)
        return VocabParallelEmbedding(V, 6, world).weight.detach()

    torch.manual_seed(0)
    assert torch.equal(torch.cat(run(rows, 3)), nn.Embedding(V, 6).weight.detach())


WRONG = {
    "vocabulary": (
        lambda g: VocabParallelEmbedding(10, 4, g),
        "vocabulary=10 cannot be split over world=4; use a multiple",
    ),
    "max_norm": (
        lambda g: VocabParallelEmbedding.from_serial(nn.Embedding(V, 4, max_norm=1.0), g),
        "this embedding has max_norm=1.0, which shards cannot have",
    ),
    "padding word": (
        lambda g: VocabParallelEmbedding.from_serial(nn.Embedding(V, 4, padding_idx=0), g),
        "this embedding has padding_idx=0, which shards cannot have",
    ),
    "word": (
        lambda g: VocabParallelEmbedding(V, 4, g)(torch.tensor([3, V])),
        "token 24 is not in a vocabulary of 24",
    ),
    "negative word": (
        lambda g: VocabParallelEmbedding(V, 4, g)(torch.tensor([-1])),
        "token -1 is not in a vocabulary",
    ),
    "shapes": (
        lambda g: vocab_parallel_cross_entropy(torch.ones(2, 6), torch.zeros(3).long(), g),
        "logits [2, 6] and targets [3] must be",
    ),
    "target": (
        lambda g: vocab_parallel_cross_entropy(torch.ones(2, 6), torch.tensor([0, V]), g),
        "target 24 is not in a vocabulary of 24",
    ),
    "full logits": (
        lambda g: vocab_parallel_loss(*drawn(torch.float32), g),
        "all 4 ranks gave the same logits of 24 vocabulary entries, so these are no shards of 96: use lib.model",
    ),
}


def test_wrong_use_is_named():
    texts = run(lambda world: [said(lambda call=call: call(world), ValueError) for call, _ in WRONG.values()], 4)[0]
    for text, (name, (_, message)) in zip(texts, WRONG.items(), strict=True):
        assert message in text, name


def test_equal_logits_are_not_taken_for_full_ones():
    """A head of zeros gives each rank the same; so do shards of one entry, and batches without a counted token."""

    def works(world):
        targets = torch.tensor([[3, 5, 1]])
        losses = [vocab_parallel_loss(torch.zeros(1, 3, size), targets % (4 * size), world) for size in (6, 1)]
        none = vocab_parallel_loss(torch.full((1, 3, 6), torch.nan), torch.full((1, 3), -100), world)
        return [loss.item() for loss in (*losses, none)]

    assert run(works, 4)[0] == pytest.approx([math.log(24), math.log(4), 0])


def test_no_tokens_at_all():
    def works(world):
        x = VocabParallelEmbedding(V, 4, world)(torch.zeros(0, 3).long())
        losses = vocab_parallel_cross_entropy(torch.zeros(0, V // world.size), torch.zeros(0).long(), world)
        return list(x.shape), list(losses.shape)

    assert run(works, 2) == [([0, 3, 4], [0])] * 2
