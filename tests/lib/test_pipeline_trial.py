"""A few steps in stages and the same in one process: equal where they should be, and far apart where they are not."""

from functools import partial

import pytest
import torch

from lib import cost, run
from lib.cost import sizes
from lib.lab.trial import in_one, in_stages, merged, peak_bytes
from lib.model import GPT, Block, GPTConfig
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.interleaved import interleaved
from lib.verify import largest_difference

CONFIG = GPTConfig(vocab_size=32, context=8, d_model=16, num_layers=4, num_heads=4, tied=False)
SMALL = GPTConfig(context=16, d_model=32, num_heads=4)


def batch(step, rows=5):
    tokens = torch.randint(
        CONFIG.vocab_size, (rows, CONFIG.context + 1), generator=torch.Generator().manual_seed(step)
    )
    return tokens[:, :-1], tokens[:, 1:]


def model(seed=0):
    torch.manual_seed(seed)
    return GPT(CONFIG).double()


def test_stages_learn_what_one_process_learns():
    serial = in_one(model, batch)
    assert len(serial.losses) == 3
    for schedule in (gpipe(2, 3), interleaved(2, 4, 2)):
        staged = merged(run(in_stages, 2, schedule, model, batch))
        assert staged.losses == pytest.approx(serial.losses, rel=1e-12)
        assert largest_difference(staged.gradients, serial.gradients) < 1e-12
        assert largest_difference(staged.weights, serial.weights) < 1e-8


@pytest.mark.thorough("seconds of several processes")
def test_a_batch_of_which_no_token_counts_has_a_loss_of_zero():
    """In the second step; in the others a microbatch of its own has none. It was NaN, and so were all weights."""

    def some_count(step):
        inputs, targets = batch(step)
        targets = targets.clone()
        targets[0 if step == 1 else 4 :] = -100
        return inputs, targets

    serial, staged = in_one(model, some_count), merged(run(in_stages, 2, gpipe(2, 5), model, some_count))
    assert serial.losses[1] == staged.losses[1] == 0 < serial.losses[2]
    assert staged.losses == pytest.approx(serial.losses, rel=1e-12)
    assert largest_difference(staged.weights, serial.weights) < 1e-8


OTHER = {
    "other rows": (model, partial(batch, rows=4), 3),
    "another start": (partial(model, 1), batch, 3),
    "a step less": (model, batch, 2),
}


@pytest.mark.thorough("more ranks, sizes and kinds")
@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_another_training_is_seen(other):
    serial, staged = in_one(model, batch), merged(run(in_stages, 2, gpipe(2, 3), *other))
    assert len(staged.losses) != 3 or abs(staged.losses[2] - serial.losses[2]) > 1e-6
    assert largest_difference(staged.gradients, serial.gradients) > 1e-3
    assert largest_difference(staged.weights, serial.weights) > 1e-3


def test_peak_grows_by_what_a_microbatch_keeps_and_leaves_the_batch_out():
    message, loss = 2 * SMALL.context * SMALL.d_model * 4, 8  # bytes of two rows that travel, and of a reported loss
    kept = cost.block_saved_bytes(sizes.ModelShape.of(SMALL), 2) + message  # and its output
    plain, again = (
        [
            run(peak_bytes, 2, gpipe(2, m), partial(Block, SMALL), torch.zeros(2 * m, 16, 32), recompute)
            for m in (4, 6)
        ]
        for recompute in (False, True)
    )
    assert plain[1][0] - plain[0][0] == 2 * (kept - message + loss)  # the first stage's input is a part of the batch
    assert again[1][0] - again[0][0] == 2 * (message + loss)
