"""16.5: on how many nodes the groups of each axis lie, under two distributions of the ranks."""

from math import prod

import torch

from course.check.edits import exercise
from course.check.exercise import each_call, whole


def inputs(generator, n):
    """The mesh of the chapter both ways, axes that do not divide a node, and an order with tp outermost."""
    x = whole(generator, 2, 5)
    cases = [({"dp": 4, "tp": 4}, 8, how) for how in ("block", "cyclic")]
    cases += [({"dp": 4, "pp": 2, "tp": 4}, 8, how) for how in ("block", "cyclic")]
    cases += [({"dp": 4, "tp": 3}, 4, "block"), ({"dp": 2 * x, "pp": 3, "tp": 2}, 4, "block")]
    cases += [({"dp": 6, "tp": 5}, 10, "block"), ({"dp": 3, "tp": 4}, 6, "cyclic")]
    cases += [({"tp": 4, "dp": x}, x, "block"), ({"dp": x, "cp": 1, "tp": 6}, 3, "cyclic")]
    return [{"cases": cases}]


def nodes_of_axes(sizes, gpus, distribution):
    world, found, stride = prod(sizes.values()), {}, 1
    for axis, size in reversed(sizes.items()):
        most = 0
        for first in range(world):
            if first // stride % size == 0:
                group = [first + i * stride for i in range(size)]
                if distribution == "block":
                    nodes = {rank // gpus for rank in group}
                else:
                    nodes = {rank % (world // gpus) for rank in group}
                most = max(most, len(nodes))
        found[axis] = most
        stride *= size
    return found


def by_reshape(sizes, gpus, distribution):
    """The node of each rank in a box, along each of its sides; tensors of one element."""
    ranks = torch.arange(prod(sizes.values()))
    node = ranks // gpus if distribution == "block" else ranks % (len(ranks) // gpus)
    box, found = node.reshape(*sizes.values()), {}
    for i, axis in enumerate(sizes):
        rows = box.movedim(i, -1).flatten(0, -2)
        found[axis] = torch.tensor([len(row.unique()) for row in rows]).max()
    return found


MISTAKES = """
reversed(sizes.items()) => sizes.items()
    You count along the first axis first.
        The last axis is innermost: its neighbours have neighbouring ranks.
if distribution == "block": => if True:
    You ignore the distribution.
        Under cyclic, rank r is on node r modulo the number of nodes.
if distribution == "block": => if distribution == "cyclic":
    You swapped the two distributions.
        Block fills one node after the other. Cyclic deals ranks to the nodes like cards.
rank % (world // gpus) => rank % gpus
    Cyclic goes round over the nodes: you go round over the GPUs of a node.
        There are world / gpus nodes.
rank // gpus => rank // (world // gpus)
    Under block a node has as many consecutive ranks as GPUs.
        You divide by the number of nodes.
if first // stride % size == 0: => if first == 0:
or most = max(most, len(nodes)) => most = min(most or world, len(nodes))
    You look at a single group of the axis, such as that of rank 0. Others lie on more nodes.
        If a size does not divide the GPUs of a node, groups differ: take the largest number, of the slowest group.
len(nodes)) => len(group))
    You count the ranks of a group.
        Count the nodes on which they are.
stride *= size =>
    You count along neighbouring ranks for every axis.
        On the last axis neighbours are 1 apart; on each axis before, the product of the sizes after it.
returns {axis: number - 1 for axis, number in result.items()}
    You count how often a group crosses from a node to another.
        Return on how many nodes it is: 1, if it stays inside.
returns list(result.values())
    You return numbers without the names of their axes.
        Return a dict: axis to number.
returns [*result.values()][::-1]
    You return numbers without the names of their axes, the last axis first.
        Return a dict: axis to number.
returns {axis: number > 1 for axis, number in result.items()}
    You return whether an axis crosses nodes.
        Return on how many nodes a group is.
"""

EQUIVALENT = """
for first in range(world): => for first in [*(range(world))][1:]:
or for first in range(world): => for first in [*(range(world))][:-1]:
    The group of rank 0 begins with a node, so that no group is on fewer; the last rank begins only groups of one rank.
nodes = {rank // gpus for rank in group} => nodes = {(2 * (rank // gpus)) for rank in group}
or nodes = {rank // gpus for rank in group} => nodes = {(100 * (rank // gpus)) for rank in group}
    Only how many different numbers there are counts.
"""

EXERCISE = exercise(
    globals(), points=2, right=(nodes_of_axes, by_reshape), body=each_call("nodes_of_axes"), ranks=(1,)
)
