"""01.6: repair a checkpointed loop over blocks whose log keeps every recomputed activation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course.check.exercise import DTYPE, Data, Exercise, Mistake, random
from lib.memory import MemoryTracker
from lib.mesh import Group

BLOCKS, WIDTH = 6, 16


class Block(nn.Module):
    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.to(DTYPE)
        self.up.weight.data, self.down.weight.data = up.clone(), down.clone()


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    pairs = [
        (random(generator, 4 * WIDTH, WIDTH) / 4, random(generator, WIDTH, 4 * WIDTH) / 4) for _ in range(BLOCKS)
    ]
    return [{"x": random(generator, 8, WIDTH), "weights": pairs, "gradient": random(generator, 8, WIDTH)}]


def body(answer: Callable, group: Group, given: Data) -> Data:
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
    size = x.numel() * x.element_size()
    return {
        "output": y.detach(),
        "graph of the output": "there",
        "gradients of the weights": [block.up.weight.grad for block in blocks],
        "gradient of x": x.grad,
        "activations after forward": few(after_forward < (BLOCKS + 8) * size),
        "activations at the peak": few(memory.peak_by_kind["activation"] < 5 * BLOCKS * size),
        "activations after backward": few(after_backward < BLOCKS * size),
        "values in the log": [v.item() if torch.is_tensor(v) and v.numel() == 1 else v for v in log],
    }


def few(does_fit: bool) -> str:
    return "as few as with one checkpoint per block" if does_fit else "those of several blocks"


# ---- programs -------------------------------------------------------------------------------------------------------


def parts(block, x):
    hidden = block.act(block.up(x))
    return x + block.down(hidden), hidden.abs().mean()


def checkpointed(block, x):
    return checkpoint(parts, block, x, use_reentrant=False)


def each(run: Callable = checkpointed, note: Callable = Tensor.item) -> Callable:
    """A program that logs outside of the function that runs again."""

    def program(blocks, x, log):
        for block in blocks:
            x, value = run(block, x)
            log.append(note(value))
        return x

    return program


def logs_inside(note: Callable, until: Callable = lambda blocks: float("inf")) -> Callable:
    """A program whose log is written by the function that runs again, up to so many values."""

    def program(blocks, x, log):
        def run(block, x):
            hidden = block.act(block.up(x))
            if len(log) < until(blocks):
                log.append(note(hidden).abs().mean())
            return x + block.down(hidden)

        for block in blocks:
            x = checkpoint(run, block, x, use_reentrant=False)
        return x

    return program


def in_one_checkpoint(blocks, x, log):
    def run(x):
        values = []
        return each(parts, Tensor.detach)(blocks, x, values), values

    x, values = checkpoint(run, x, use_reentrant=False)
    log += values
    return x


def without_graph(blocks, x, log):
    with torch.no_grad():
        return each()(blocks, x, log)


EXERCISE = Exercise(
    id="01.6",
    title="run_blocks",
    points=3,
    body=body,
    inputs=inputs,
    right=(each(), logs_inside(Tensor.detach, until=len)),
    ranks=(1,),
    timeout_s=20,
    mistakes=(
        Mistake(
            "The log keeps everything. Checkpoint runs your function again in backward, so it logs each block twice, "
            "and each value is a tensor whose graph holds the recomputed activations of its block. Log after the "
            "checkpoint, and only a number.",
            logs_inside(lambda hidden: hidden),
        ),
        Mistake(
            "The memory is right. But the log has each value twice: checkpoint runs your function again in backward. "
            "Let the function return the value, and append it outside.",
            logs_inside(Tensor.detach),
        ),
        Mistake(
            "The log is right, but its values are tensors with a graph, and the graph holds the hidden activations "
            "after their recomputation. Log a number: .item(), or .detach().",
            each(note=lambda value: value),
            about=("log", "activations"),
        ),
        Mistake(
            "You made one checkpoint of all blocks. Few activations are kept after forward, but backward then "
            "recomputes all blocks together, and the peak is as high as without a checkpoint. Give each block a "
            "checkpoint.",
            in_one_checkpoint,
            about=("activations",),
        ),
        Mistake(
            "After forward the activations of all blocks are still alive: `up`, `act` and `down` must all run inside "
            "the checkpoint.",
            each(parts),
            about=("after forward",),
        ),
        Mistake(
            "The output has no graph, so backward cannot begin. no_grad() saves memory by giving up gradients; "
            "checkpoint gives up only activations.",
            without_graph,
        ),
        Mistake(
            "Only the last block has gradients: you cut the graph between the blocks. Hand x on as it is, without "
            "detach().",
            each(lambda block, x: checkpointed(block, x.detach())),
            about=("gradient",),
        ),
        Mistake(
            "The log misses values: it needs one per block, in the order of the blocks.",
            lambda blocks, x, log: each()(blocks, x, []),
            about=("log",),
        ),
    ),
)
