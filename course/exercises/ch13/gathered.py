"""Full weights from the shards of ranks, and a number for a weight: for exercise 13.4."""

from dataclasses import replace

import torch

from lib import comm
from lib.placement import Replicate, sections


def mark(x):
    """A number for all elements and their places."""
    return (x.detach().double().flatten() @ torch.arange(x.numel()).double().cos()).item()


def unsharded(facts):
    """The full weights by name: one message has this rank's shards of all."""
    cut = [fact for fact in facts if not isinstance(fact.placement, Replicate)]
    wholes = {fact.name: fact.parameter.detach().clone() for fact in facts}
    pieces = {fact.name: {} for fact in cut}  # by their place in the full weight
    if cut:
        group, shards = cut[0].cut_over, [fact.parameter.detach() for fact in cut]
        everyones = comm.all_gather(torch.cat([x.flatten() for x in shards]), group).chunk(group.size)
        for rank, of_rank in enumerate(everyones):
            for fact, x, part in zip(cut, shards, of_rank.split([x.numel() for x in shards]), strict=True):
                part = part.view(x.shape).to(x.dtype)
                for dim, start, place, size in sections(fact.placement, x.shape, replace(group, rank=rank)):
                    pieces[fact.name][place] = part.narrow(dim, start, size)
    dims = {fact.name: fact.placement.dim for fact in cut}
    return wholes | {name: torch.cat([x for _, x in sorted(of.items())], dims[name]) for name, of in pieces.items()}
