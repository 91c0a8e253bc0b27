"""A GPT in stages: a step is tested where it trains (`test_train.py`); here what else it does and refuses."""

import gc
import weakref

import pytest
import torch
from torch import nn

from lib import run
from lib.mesh import Group
from lib.model import GPT, GPTConfig, loss_sum_and_count, mean_loss
from lib.pipeline.action import ScheduleError
from lib.pipeline.gpt import PipelineGPT
from lib.pipeline.interleaved import interleaved
from lib.pipeline.one_f_one_b import one_f_one_b
from lib.pipeline.zero_bubble import zb_h1

CONFIG = GPTConfig(vocab_size=32, context=8, d_model=16, num_layers=4, num_heads=2)


def model():
    torch.manual_seed(0)
    return GPT(CONFIG).double()


def rows(count):
    tokens = torch.randint(32, (count, 9), generator=torch.Generator().manual_seed(count))
    targets = tokens[:, 1:].clone()
    targets[:1, :5] = -100  # do not count
    return tokens[:, :-1], targets


def evaluations(world, schedule, counts):
    mine = PipelineGPT(model(), schedule, world)
    results = [mine.evaluate(*rows(count)) for count in counts]
    assert all(stage.microbatches == 0 for stage in mine.stages.values())
    assert all(p.grad is None for p in mine.parameters())
    return results


def a_step(world, schedule, tokens, targets):
    mine = PipelineGPT(model(), schedule, world)
    loss = mine.forward_backward(tokens, targets)
    mine.finish()
    return loss, mine.clip_gradients(1e9)


@pytest.mark.parametrize("schedule", [one_f_one_b(2, 3), zb_h1(2, 3)], ids=lambda s: s.name)
def test_a_step_weighs_microbatches_by_the_tokens_that_count(schedule):
    tokens, targets = rows(7)
    targets[3:5] = -100  # all of the second microbatch
    serial = model()
    loss = mean_loss(serial(tokens), targets)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in serial.parameters()])
    for of_rank in run(a_step, 2, schedule, tokens, targets):
        assert [x.item() for x in of_rank] == pytest.approx([loss.item(), norm.item()], rel=1e-12)
    none = torch.full_like(targets, -100)
    assert [x.item() for x in run(a_step, 2, schedule, tokens, none)[0]] == [0, 0]


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), zb_h1(2, 4), interleaved(2, 4, 2)], ids=lambda s: s.name)
def test_an_evaluation_of_any_number_of_rows(schedule):
    counts = (0, 1, 3, 7)
    for of_rank in run(evaluations, schedule.num_ranks, schedule, counts):
        for (loss_sum, count), wanted in zip(of_rank, counts, strict=True):
            tokens, targets = rows(wanted)
            right, right_count = loss_sum_and_count(model()(tokens), targets)
            assert count == right_count and loss_sum.item() == pytest.approx(right.item(), rel=1e-12)


def test_what_other_ranks_have_is_let_go():
    serial = model()
    blocks = [weakref.ref(block) for block in serial.blocks]
    mine = PipelineGPT(serial, one_f_one_b(2, 2), Group("pp", (0, 1), 1))
    del serial
    gc.collect()
    assert [block() is not None for block in blocks] == [False, False, True, True]
    assert len(list(mine.parameters())) == 2 * 12 + 3


def test_a_block_that_changes_the_shape_is_refused_before_anything_is_sent():
    wide = model()
    wide.blocks[1] = nn.Linear(16, 24).double()
    with pytest.raises(ScheduleError, match=r"stage 1 gives float64\[1, 8, 24\], but .* float64\[1, 8, 16\]"):
        PipelineGPT(wide, one_f_one_b(4, 2), Group("pp", (0, 1, 2, 3), 0))
    with pytest.raises(ValueError, match="4 blocks and a head cannot be cut into 6 stages; use 5 stages or fewer"):
        PipelineGPT(model(), one_f_one_b(6, 2), Group("pp", (0, 1, 2, 3, 4, 5), 0))
