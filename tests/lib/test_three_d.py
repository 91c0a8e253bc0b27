"""What the benchmark of all three dimensions compares is the same training: ours, PyTorch's and one process."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.three_d import ADAMW, SIDES
from lib import run
from lib.layout import Layout
from lib.model import GPTConfig, mean_loss
from tests.lib.sharding import serial

CONFIG = GPTConfig(vocab_size=24, context=8, d_model=16, num_layers=2, num_heads=4, tied=False)
STEPS, ROWS, MAX_NORM = 3, 8, 0.5


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(CONFIG.vocab_size, (2, ROWS, CONFIG.context), generator=generator)


def in_one_process(one):
    optimizer, losses = ADAMW(one.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        loss = mean_loss(one(inputs), targets)
        loss.backward()
        assert nn.utils.clip_grad_norm_(one.parameters(), MAX_NORM) > MAX_NORM
        optimizer.step()
        losses.append(loss.item())
    return losses, one.state_dict()


def trained(world, dp, pp, tp):
    """Of each side, losses and the weights that this rank is told."""
    found = {}
    for name, (make, more) in SIDES.items():
        side = make(copy.deepcopy(serial(CONFIG)), world, Layout(dp, pp, tp, microbatches=2, **more))
        losses = [side.step(*batch(step), MAX_NORM).item() for step in range(STEPS)]
        found[name] = losses, side.full_state_dict()
    return found


@pytest.mark.thorough("eight ranks")
@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 1, 2)])
def test_both_sides_train_the_model_of_one_process(sizes):
    losses, weights = in_one_process(serial(CONFIG))
    seen = {name: set() for name in SIDES}
    for rank in run(trained, torch.Size(sizes).numel(), *sizes):
        for name, (got, state) in rank.items():
            assert got == pytest.approx(losses, rel=1e-12, abs=0), name
            for key, x in state.items():
                assert (x - weights[key]).norm() < 1e-8 * weights[key].norm(), (name, key)
            seen[name] |= state.keys()
    assert all(keys == weights.keys() for keys in seen.values())
