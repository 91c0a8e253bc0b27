"""Dropout by rows replaces layers of a model, and must replace nothing else of what they do."""

import copy

import pytest
import torch

from lib.masks import drop_by_rows
from lib.model import GPT, GPTConfig

SIZES = {"vocab_size": 32, "context": 12, "d_model": 24, "num_heads": 6, "num_kv_heads": 2, "dropout": 0.3}


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
