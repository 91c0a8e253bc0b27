"""Warmup, decay, weight decay and betas: the numbers of a plain loop with torch's AdamW and nanoGPT's schedule."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from lib import data
from lib.mesh import Group
from lib.model import GPT, GPTConfig
from lib.train import TrainConfig, train
from lib.training.learning_rate import fraction_of_lr, set_learning_rate

pytestmark = pytest.mark.usefixtures("one_thread")


def get_lr(it, learning_rate, warmup_iters, lr_decay_iters, min_lr):
    """As nanoGPT has it."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


@pytest.mark.parametrize("warmup, end", [(0, 0.0), (3, 0.1), (9, 0.5), (4, 1.0)])
def test_the_rate_of_each_step_is_that_of_nanogpt(warmup, end):
    config = TrainConfig(steps=10, lr=0.02, warmup_steps=warmup, lr_end=end)
    rates = [config.lr * fraction_of_lr(step, config) for step in range(13)]
    assert rates == pytest.approx([get_lr(step, 0.02, warmup, 10, 0.02 * end) for step in range(13)], rel=1e-12)
    assert max(rates) == rates[warmup] == 0.02


def test_without_options_the_rate_is_constant():
    assert {fraction_of_lr(step, TrainConfig(steps=5)) for step in range(9)} == {1.0}


def test_groups_keep_the_rates_that_they_were_made_with():
    """A function for the optimizer may give a group a lower rate."""
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], "lr": 0.001}]
    optimizer, config = torch.optim.AdamW(groups, lr=0.1), TrainConfig(steps=4, warmup_steps=1)
    for step, fraction in enumerate((0.5, 1.0, 1.0)):
        set_learning_rate(optimizer, step, config)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 * fraction, 0.001 * fraction]


def test_a_run_is_a_plain_loop_with_torch_s_adamw():
    model = GPTConfig(context=8, d_model=16, num_layers=1, num_heads=2)
    own = {"lr": 0.02, "warmup_steps": 2, "lr_end": 0.1, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.95}
    config = TrainConfig(model, steps=5, global_batch=4, dtype="float64", **own)
    torch.manual_seed(config.seed)
    plain, losses = GPT(model).double(), []
    optimizer = torch.optim.AdamW(plain.parameters(), betas=(0.8, 0.95), weight_decay=0.3)
    for step in range(5):
        inputs, targets = data.batch(data.load().train, step, global_batch=4, context=8, seed=config.seed)
        loss = cross_entropy(plain(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), config.max_norm)
        optimizer.param_groups[0]["lr"] = get_lr(step, 0.02, 2, 5, 0.002)
        optimizer.step()
        losses.append(loss.item())
    assert train(Group(), config, True)["losses"] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        {"warmup_steps": -1}, {"warmup_steps": 1.5}, {"warmup_steps": 100}, {"lr_end": -0.1}, {"lr_end": 2},
        {"lr_end": math.nan}, {"weight_decay": -1}, {"weight_decay": math.inf}, {"beta1": 1.0}, {"beta2": math.nan},
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense(wrong):
    (name, *_) = wrong
    with pytest.raises(ValueError, match=name):
        TrainConfig(**wrong)
