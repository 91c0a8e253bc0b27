"""Dropout by rows replaces layers of a model, and must replace nothing else of what they do."""

import copy

import pytest
import torch

from lib.masks import RowDropout, drop_by_rows, places_of_shard, row_seed
from lib.model import GPT, GPTConfig

SIZES = {"vocab_size": 32, "context": 12, "d_model": 24, "num_heads": 6, "num_kv_heads": 2, "dropout": 0.3}


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("llama", [False, True])
def test_where_nothing_is_dropped_nothing_changes(llama):
    """The same logits and gradients in evaluation, as the twin of a certificate has these layers, too."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES, llama=llama)).double()
    other, tokens = copy.deepcopy(model), torch.randint(32, (3, 12))
    drop_by_rows(other)
    for one in (model.eval(), other.eval()):
        one(tokens).square().sum().backward()
    torch.testing.assert_close(other(tokens), model(tokens), rtol=1e-12, atol=1e-14)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-14)
    assert not torch.equal(other.train()(tokens), model(tokens))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_shards_of_a_mask_are_one_mask_side_by_side(ranks):
    """A tensor-parallel rank drops in its heads, a data-parallel rank in its sequences, as one process does."""
    x = torch.ones(4, 6, 5, 5)
    torch.manual_seed(row_seed(0, 7, 0))
    whole = RowDropout(0.5, "blocks.0")(x)
    shards = [RowDropout(0.5, "blocks.0", places_of_shard(rank, ranks))(x[:, : 6 // ranks]) for rank in range(ranks)]
    assert torch.equal(torch.cat(shards, 1), whole) and not torch.equal(shards[0], shards[1])
    torch.manual_seed(row_seed(0, 7, 2))
    assert torch.equal(RowDropout(0.5, "blocks.0")(x[2:]), whole[2:])
    assert not torch.equal(RowDropout(0.5, "blocks.1")(x[2:]), whole[2:])
