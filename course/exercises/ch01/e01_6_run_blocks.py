"""01.6: repair a checkpointed loop over blocks whose log keeps every recomputed activation."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course.check.edits import exercise
from course.check.exercise import random
from lib.memory import MemoryTracker

BLOCKS, WIDTH = 6, 16
# In tensors of the size of x, a block keeps 9: its input, and two of four times the width. With a checkpoint for each,
# 7, 28 and 4 are alive; without one, 55, 68 and 4.
BOUNDS = {"after forward": (11, 50), "at the peak": (30, 40), "after backward": (6, 6)}

IN_XS = "activations after forward, in tensors like x"


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
    in_xs = [n_bytes / x.nbytes for n_bytes in (after_forward, memory.peak_by_kind["activation"], after_backward)]
    return {
        "output": y.detach(),
        "graph of the output": "there",
        "gradients of the weights": [part.weight.grad for block in blocks for part in (block.up, block.down)],
        "gradient of x": x.grad,
        **{f"activations {when}": words(kept, when) for when, kept in zip(BOUNDS, in_xs, strict=True)},
        IN_XS: round(in_xs[0]),  # tells apart mistakes, and is not part of the answer
        "values in the log": [v.item() if torch.is_tensor(v) and v.numel() == 1 else v for v in log],
    }


def reference(given):
    (found,) = (body(run_blocks, None, g) for g in given)
    found.pop(IN_XS)
    return [found]


def words(kept, when):
    few, some = BOUNDS[when]
    if kept < few:
        return "as few as with one checkpoint per block"
    return "some more than with one checkpoint per block" if kept < some else "those of several blocks"


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


def by_the_mode(blocks, x, log):
    """With `use_reentrant=True` forward runs without gradients, and only then this logs."""

    def run(block, x):
        hidden = block.act(block.up(x))
        if not torch.is_grad_enabled():
            log.append(hidden.abs().mean())
        return x + block.down(hidden)

    for block in blocks:
        x = checkpoint(run, block, x, use_reentrant=True)
    return x


def together(count):
    """One checkpoint for so many blocks."""

    def program(blocks, x, log):
        def run(some, x):
            means = []
            for block in some:
                hidden = block.act(block.up(x))
                means.append(hidden.abs().mean())
                x = x + block.down(hidden)
            return x, *means

        for i in range(0, len(blocks), count):
            x, *means = checkpoint(run, blocks[i : i + count], x, use_reentrant=False)
            log += [mean.item() for mean in means]
        return x

    return program


def only_for_the_log(blocks, x, log):
    """Computes what it logs once more, outside of the checkpoint."""

    def run(block, x):
        return x + block.down(block.act(block.up(x)))

    for block in blocks:
        log.append(block.act(block.up(x)).abs().mean())
        x = checkpoint(run, block, x, use_reentrant=False)
    return x


def down_outside(blocks, x, log):
    def run(block, x):
        hidden = block.act(block.up(x))
        return hidden, hidden.abs().mean()

    for block in blocks:
        hidden, mean = checkpoint(run, block, x, use_reentrant=False)
        x = x + block.down(hidden)
        log.append(mean.item())
    return x


def checkpoint_unless(is_free, run, block, x):
    return run(block, x) if is_free else checkpoint(run, block, x, use_reentrant=False)


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
checkpoint(run, block, x, use_reentrant=False) => checkpoint(run, block, x, use_reentrant=True)
    Only the peak is too high, by a few activations. With use_reentrant=True it is, if the function returns the mean as
    well.
        Use use_reentrant=False, as the program of the task does.
in log, activations: mean.item() => mean
    The log is right, but its values are tensors with a graph, and the graph holds the hidden activations after their
    recomputation.
        Log a number: .item(), or .detach().
only_for_the_log
    You compute the hidden activations once more for the log, outside of the checkpoint, and the logged value holds
    their graph.
        Let the function that checkpoint runs return the value.
in activations:
together(6)
    You made one checkpoint of all blocks. Few activations are kept after forward, but backward then recomputes all
    blocks together, and the peak is as high as without a checkpoint.
        Give each block a checkpoint.
together(2) or together(3)
    A checkpoint of yours has several blocks. Backward recomputes them together, and the peak is higher.
        Give each block a checkpoint.
down_outside
    The checkpoint returns the hidden activations, and `down` keeps those of each block for its backward.
        `up`, `act` and `down` must all run inside the checkpoint.
checkpoint(run, block, x, use_reentrant=False) => checkpoint_unless(block is blocks[-1], run, block, x)
or checkpoint(run, block, x, use_reentrant=False) => checkpoint_unless(block is blocks[0], run, block, x)
    One block runs without a checkpoint, and its activations are alive after forward.
        Give each block a checkpoint.
in after forward: checkpoint(run, block, x, use_reentrant=False) => run(block, x)
    After forward all activations are still alive.
        `up`, `act` and `down` must all run inside the checkpoint.
in output: checkpoint(run, block, x, use_reentrant=False) => torch.no_grad()(run)(block, x)
or checkpoint(run, block, x, use_reentrant=False) => [one.detach() for one in run(block, x)]
    The output has no graph, so backward cannot begin.
        no_grad() gives up gradients; checkpoint only activations.
in gradient: checkpoint(run, block, x, use_reentrant=False) => checkpoint(run, block, x.detach(), use_reentrant=False)
    Only the last block has gradients: you cut the graph between the blocks.
        Hand x on as it is, without detach().
in gradient: block.down(hidden) => nn.functional.linear(hidden, block.down.weight.detach())
    The weights of `down` have no gradients.
        Call the module itself: block.down(hidden).
in gradient: block.up(x) => nn.functional.linear(x, block.up.weight.detach())
    The weights of `up` have no gradients.
        Call the module itself: block.up(x).
in output: returns (result, log)
    You return more than the output.
        Return x alone; the log has its values.
in log:
log.append(mean.item()) =>
    The log misses values.
        It needs one per block, in the order of the blocks.
log.append(mean.item()) => log.insert(0, mean.item())
    The log begins with the last block, as backward does, which runs the blocks again from the last to the first.
        Log what forward computes, in the order of the blocks.
hidden.abs().mean() => hidden.mean()
    The log has the means of `hidden`. It must have those of its absolute values.
        Take hidden.abs().mean().
log.append(mean.item()) => log.append(x.abs().mean().item())
    The log has the means of the outputs of the blocks.
        Log those of the hidden activations, between `act` and `down`.
"""

EXERCISE = exercise(globals(), points=3, right=(run_blocks, logs_in_forward, by_the_mode), ranks=(1,), timeout_s=20)
