"""17.1: the inputs, targets and positions of a rank, in zig-zag order."""

import torch

from course.check.edits import exercise
from course.check.exercise import everywhere, kind, several
from lib.context_parallel.tokens import take_tokens

ROWS, CHUNK = 2, 3  # sequences; tokens of a chunk; a rank has two chunks
NAMES = ("inputs", "targets", "positions")


def inputs(generator, n):
    """No token is twice in a sequence: a target can be the next one at one place only."""
    length = 2 * n * CHUNK + 1
    tokens = torch.stack([torch.randperm(4 * length, generator=generator)[:length] for _ in range(ROWS)])
    return everywhere({"tokens": tokens}, [{}] * n)


def body(answer, group, given):
    result = answer(given["tokens"], group)
    *tokens, positions = several(result, 3)
    if isinstance(positions, (list, tuple, range)) and all(isinstance(i, int) for i in positions):
        positions = torch.tensor([*positions])
    found = {"what was returned": kind(result)}
    return found | dict(zip(NAMES, (*tokens, positions), strict=True))


def reference(given):
    n, tokens = len(given), given[0]["tokens"]
    found = []
    for rank in range(n):
        mine = torch.cat([torch.arange(c * CHUNK, (c + 1) * CHUNK) for c in (rank, 2 * n - 1 - rank)])
        found.append({"what was returned": "3 results", "inputs": tokens[:, mine]})
        found[-1] |= {"targets": tokens[:, mine + 1], "positions": mine}
    return found


def take_zigzag(tokens, group):
    size = (tokens.shape[1] - 1) // (2 * group.size)

    def chunk(x, c):
        return x[..., c * size : (c + 1) * size]

    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(inputs.shape[1])
    late = 2 * group.size - 1 - group.rank

    def mine(x):
        return torch.cat([chunk(x, group.rank), chunk(x, late)], dim=-1)

    return mine(inputs), mine(targets), mine(positions)


def by_positions(tokens, group):
    """The positions first, as a list; the target of each is one further."""
    size = (tokens.shape[1] - 1) // (2 * group.size)
    early, late = group.rank * size, (2 * group.size - 1 - group.rank) * size
    positions = [*range(early, early + size), *range(late, late + size)]
    return [tokens[:, positions], tokens[:, [i + 1 for i in positions]], positions]


def by_the_library(tokens, group):
    """Its function takes a dim, and positions are a sequence like any."""
    places = torch.arange(tokens.shape[1] - 1)[None]
    parts = (take_tokens(x, group, "zigzag") for x in (tokens[:, :-1], tokens[:, 1:], places))
    mine, following, (at,) = parts
    return mine, following, at


def shifted_inside(mine, last=-100):
    """The next of the rank's own tokens as the target of each."""
    return torch.cat([mine[:, 1:], torch.full_like(mine[:, :1], last)], 1)


MISTAKES = """
[chunk(x, group.rank), chunk(x, late)] => [chunk(x, 2 * group.rank), chunk(x, 2 * group.rank + 1)]
    Your rank has two neighbouring chunks: consecutive tokens. The last rank then computes almost twice the mean.
        Take chunk r and its mirror image, chunk 2n - 1 - r.
late = 2 * group.size - 1 - group.rank => late = group.rank + group.size
    Your second chunk is n further on. Rank 0 then has both of the chunks with the least work in each half.
        Mirror it: chunk 2n - 1 - r, so that the first rank also has the last chunk.
late = 2 * group.size - 1 - group.rank => late = 2 * group.size - 2 - group.rank
or late = 2 * group.size - 1 - group.rank => late = (2 * group.size - group.rank) % (2 * group.size)
    Your second chunk is next to the right one. Chunks are counted from 0, so the last of 2n is 2n - 1.
        Rank r has the chunks r and 2n - 1 - r.
[chunk(x, group.rank), chunk(x, late)] => [chunk(x, late), chunk(x, group.rank)]
    Your rank has the right tokens, the late chunk first.
        Put the early chunk first, in all three results.
return torch.cat([chunk(x, group.rank), chunk(x, late)], dim=-1) => return x[..., group.rank :: group.size]
    You deal the tokens out, every n-th to a rank: striped order.
        Zig-zag order has two chunks of consecutive tokens.
in targets:
mine(targets) => shifted_inside(mine(inputs))
or mine(targets) => mine(inputs).roll(-1, 1)
or mine(targets) => shifted_inside(mine(inputs), 0)
    Your targets are the rank's own tokens, shifted. The last token of each chunk then has a wrong target, or none: the
    one that follows is on a different rank.
        Shift the full sequence first, tokens[:, :-1] and tokens[:, 1:], and cut both alike.
mine(targets) => mine(inputs)
    Your targets are the inputs: each token is to predict itself.
        The target of a token is the next one: cut tokens[:, 1:].
mine(targets) => mine(tokens[:, :-1].roll(1, 1))
    Your targets are the tokens before, and not those that follow.
        Cut tokens[:, 1:], in the places of tokens[:, :-1].
mine(targets) => targets.chunk(group.size, -1)[group.rank]
    The inputs are in zig-zag order, and the targets are consecutive: they belong to different tokens.
        Cut both by the same places.
in positions:
mine(positions) => torch.arange(mine(positions).numel())
    Your positions count from 0 on each rank. Rotary positions are relative, but queries and keys of different ranks
    meet, each counted from a different start.
        Return the places in the full sequence.
mine(positions) => mine(positions)[0] + torch.arange(mine(positions).numel())
    Your positions run on after the early chunk. The late chunk begins much later in the sequence.
        Count each chunk from its own start.
mine(positions) => positions.chunk(group.size)[group.rank]
    The tokens are in zig-zag order, and the positions are those of consecutive tokens.
        Cut the positions by the same places as the tokens.
mine(positions) => mine(positions) + 1
    Your positions are one too high: they are those of the targets.
        Position 0 is the first token of a sequence.
mine(positions) => mine(positions).expand(len(tokens), -1)
    Your positions have a row for each sequence.
        They are alike for all: return one row, [T/n].
in inputs:
inputs, targets = tokens[:, :-1], tokens[:, 1:] => inputs, targets = tokens[:, 1:], tokens[:, 1:]
    Your inputs are the targets.
        The last token is no input, and the first no target: tokens[:, :-1] and tokens[:, 1:].
in all:
returns result[::-1]
    Your three results are in the reverse order.
        Return inputs, targets, positions.
"""

EXERCISE = exercise(globals(), points=1, right=(take_zigzag, by_positions, by_the_library))
