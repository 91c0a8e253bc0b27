"""Dropout by rows replaces layers of a model, and must replace nothing else of what they do."""

import copy

import pytest
import torch
from torch import nn

from lib.documents import see_documents
from lib.masks import HeadsWithMasks, RowDropout, check_rows, drop_by_rows, places_of_shard, row_seed
from lib.model import GPT, GPTConfig, Heads

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


def own_method(heads):
    heads.attention = lambda q, k, v: v


def own_hook(heads):
    heads.register_forward_hook(lambda module, args, y: 2 * y)


@pytest.mark.parametrize("change", [own_method, own_hook])
def test_heads_that_would_lose_their_own_part_are_refused(change):
    model = GPT(GPTConfig(**SIZES))
    check_rows(model, 2)
    change(model.blocks[1].attention.heads)
    with pytest.raises(
        ValueError, match=r"blocks.1.attention.heads \(Heads\) has dropout, which is replaced with all"
    ):
        check_rows(model, 1)
    model.blocks[1].attention.heads.p = 0.0
    check_rows(model, 1)


def test_documents_of_rows_are_refused_where_the_rows_are_split():
    model, documents = GPT(GPTConfig(**SIZES)), torch.zeros(4, 12)
    see_documents(model, documents)
    check_rows(model, 1)
    with pytest.raises(ValueError, match=r"heads \(Heads\) has the documents of 4 rows, and this .* into 2 pieces"):
        check_rows(model, 2)
    see_documents(model, documents[:1])
    check_rows(model, 2)
    model = GPT(GPTConfig(**SIZES, document_end=3))
    model(torch.zeros(4, 12, dtype=torch.int64))  # sets those of its own rows, and will set those of the next
    check_rows(model, 2)


def test_heads_of_an_attention_of_ones_own_drop_by_rows():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Heads([24, 24, 24], 4, 0.5)

    model = nn.Sequential(Scores())
    drop_by_rows(model)
    assert type(model[0].inner) is HeadsWithMasks
    x = torch.randn(4, 12, 72)
    torch.manual_seed(row_seed(0, 7, 0))
    whole = model[0].inner(x)
    torch.manual_seed(row_seed(0, 7, 2))
    torch.testing.assert_close(model[0].inner(x[2:]), whole[2:])
