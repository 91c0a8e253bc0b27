"""01.6: repair a checkpointed loop over blocks whose log keeps every recomputed activation."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course.check.edits import exercise
from course.check.exercise import random
from lib.memory import MemoryTracker

BLOCKS, WIDTH = 6, 16


class Block(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(*up.T.shape, False), nn.GELU(), nn.Linear(*down.T.shape, False)
        self.up.weight.data, self.down.weight.data = up.clone(), down.clone()


def inputs(generator, n):
    shapes = (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)
    pairs = [[random(generator, *shape) / 4 for shape in shapes] for _ in range(BLOCKS)]
    return [{"x": random(generator, 8, WIDTH), "weights": pairs, "gradient": random(generator, 8, WIDTH)}]


def body(answer, group, given):
    blocks = nn.ModuleList(Block(*pair) for pair in given["weights"])
    x, log = given["x"].clone().requires_grad_(), []
    with MemoryTracker(blocks) as memory:
        y = answer(list(blocks), x, log)
        if not (torch.is_tensor(y) and y.requires_grad):
            return {"output": y.detach() if torch.is_tensor(y) else y, "graph of the output": "none"}
        after_forward = memory.live["activation"]
        y.backward(given["gradient"])
        after_backward = memory.live["activation"]
    # In tensors of the size of x, a block keeps 9: its input, and two of four times the width. With a checkpoint for
    # each, 9 are alive after forward and 30 to 35 at the peak; all blocks together keep 73, and their peak is 86.
    return {
        "output": y.detach(),
        "graph of the output": "there",
        "gradients of the weights": [block.up.weight.grad for block in blocks],
        "gradient of x": x.grad,
        "activations after forward": few(after_forward < (BLOCKS + 8) * x.nbytes),
        "activations at the peak": few(memory.peak_by_kind["activation"] < 5 * BLOCKS * x.nbytes),
        "activations after backward": few(after_backward < BLOCKS * x.nbytes),
        "values in the log": [v.item() if torch.is_tensor(v) and v.numel() == 1 else v for v in log],
    }


def few(does_fit):
    return "as few as with one checkpoint per block" if does_fit else "those of several blocks"


def run_blocks(blocks, x, log):
    def run(block, x):
        hidden = block.act(block.up(x))
        return x + block.down(hidden), hidden.abs().mean()

    for block in blocks:
        x, mean = checkpoint(run, block, x, use_reentrant=False)
        log.append(mean.item())
    return x


def logs_in_forward(blocks, x, log):
    """Inside of the function that runs again, up to one value per block."""

    def run(block, x):
        hidden = block.act(block.up(x))
        if len(log) < len(blocks):
            log.append(hidden.detach().abs().mean())
        return x + block.down(hidden)

    for block in blocks:
        x = checkpoint(run, block, x, use_reentrant=False)
    return x


def in_one_checkpoint(blocks, x, log):
    def run(x):
        for block in blocks:
            x = x + block.down(block.act(block.up(x)))
        return x

    return checkpoint(run, x, use_reentrant=False)


MISTAKES = """
log.append(mean.item()) =>
hidden = block.act(block.up(x)) => hidden = block.act(block.up(x)); log.append(hidden.abs().mean())
    The log keeps everything. Checkpoint runs your function again in backward, so each block is logged twice, by a
    tensor whose graph holds the block's recomputed activations.
        Log after the checkpoint, and only a number.
log.append(mean.item()) =>
hidden = block.act(block.up(x)) => hidden = block.act(block.up(x)); log.append(hidden.detach().abs().mean())
    The memory is right. But the log has each value twice: checkpoint runs your function again in backward.
        Let the function return the value, and append it outside.
in log, activations: mean.item() => mean
    The log is right, but its values are tensors with a graph, and the graph holds the hidden activations after their
    recomputation.
        Log a number: .item(), or .detach().
in activations: in_one_checkpoint
    You made one checkpoint of all blocks. Few activations are kept after forward, but backward then recomputes all
    blocks together, and the peak is as high as without a checkpoint.
        Give each block a checkpoint.
in after forward: checkpoint(run, block, x, use_reentrant=False) => run(block, x)
    After forward all activations are still alive.
        `up`, `act` and `down` must all run inside the checkpoint.
=> torch.no_grad()(run)(block, x)
    The output has no graph, so backward cannot begin.
        no_grad() gives up gradients; checkpoint only activations.
in gradient: => checkpoint(run, block, x.detach(), use_reentrant=False)
    Only the last block has gradients: you cut the graph between the blocks.
        Hand x on as it is, without detach().
in log: log.append(mean.item()) =>
    The log misses values.
        It needs one per block, in the order of the blocks.
"""

EXERCISE = exercise(globals(), points=3, right=(run_blocks, logs_in_forward), ranks=(1,), timeout_s=20)
