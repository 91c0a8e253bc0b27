"""05.4: a rank's shard, out of the shards that a different number of ranks saved."""

from math import ceil

import torch

from course.check.compare import ANYTHING
from course.check.edits import exercise
from course.check.exercise import random, shards_of

NO_MORE, MORE = "no more than it keeps", "more than it keeps"


def inputs(generator, n):
    """Different numbers of ranks; the padding is not zero, so that an answer which keeps it fails."""
    sizes = ((7 - n, 10 * n), (7 - n, 10 * n - 1), (2 * n + 1, 11 * n + 2))
    cases = [
        {"size": size, "old_n": old_n, "saved": list(random(generator, old_n * ceil(size / old_n)).chunk(old_n))}
        for old_n, size in sizes
    ]
    return [{"cases": cases}] * n


def entry(case, what):
    return f"{case['size']} elements from {case['old_n']} ranks: {what}"


def body(answer, group, given):
    found = {}
    for case in given["cases"]:
        taken = []

        def read(rank, start, stop, case=case, taken=taken):
            if not 0 <= rank < case["old_n"]:
                raise ValueError(f"read({rank}, {start}, {stop}): there were {case['old_n']} ranks, counted from 0")
            length = len(case["saved"][rank])
            if not 0 <= start <= stop <= length:
                raise ValueError(f"read({rank}, {start}, {stop}): each of the ranks saved {length} elements")
            taken.append(stop - start)
            return case["saved"][rank][start:stop].clone()

        found[entry(case, "the shard of this rank")] = answer(read, case["size"], case["old_n"], group)
        found[entry(case, "what was read")] = MORE if sum(taken) > ceil(case["size"] / group.size) else NO_MORE
    return found


def reference(given):
    found = [{} for _ in given]
    for case in given[0]["cases"]:
        shards = shards_of(torch.cat(case["saved"])[: case["size"]], len(given))
        for mine, shard in zip(found, shards, strict=True):
            mine |= {entry(case, "the shard of this rank"): shard, entry(case, "what was read"): NO_MORE}
    return found


def reshard(read, size, old_n, group):
    old_size = -(-size // old_n)
    new_size = -(-size // group.size)
    first = group.rank * new_size
    stop = min(first + new_size, size)
    shard = torch.zeros(new_size, dtype=torch.float64)
    for rank in range(old_n):
        start = rank * old_size  # of this old rank's shard
        low, high = max(first, start), min(stop, start + old_size)
        if low < high:
            piece = read(rank, low - start, high - start)
            shard[low - first : high - first] = piece
    return shard


def all_saved(read, size, old_n):
    return [read(rank, 0, ceil(size / old_n)) for rank in range(old_n)]


ALSO_RIGHT = """
read(rank, low - start, high - start) => torch.cat([read(rank, i - start, i - start + 1) for i in range(low, high)])
    Element by element.
"""

MISTAKES = """
in shard:
old_size = -(-size // old_n) => old_size = -(-size // old_n); size = old_n * old_size
    You cut the tensor of the old ranks with its padding.
        Elements after the first `size` are no parameters, and they move every cut: the new shards have ceil(size/n)
        elements.
min(first + new_size, size) => first + new_size
    The cuts are right, but the last shard ends in the padding of the old ranks.
        Stop at `size`, and fill up with zeros.
returns all_saved(read, size, old_n)[group.rank] if group.rank < old_n else ANYTHING
    You took over the shard of the old rank with the same number.
        For n ranks, rank r begins at r · ceil(size/n).
returns torch.cat([old.tensor_split(group.size)[group.rank] for old in all_saved(read, size, old_n)])
    You took one of n pieces of each old shard, in wrong order.
        A new shard is one contiguous piece of the flat tensor.
return shard => return shard[: stop - first]
    The last shard is too short. Each shard has ceil(size/n) elements.
        Fill up with zeros.
in all: returns shards_of(torch.cat(all_saved(read, size, old_n))[:size], group.size)[group.rank]
    The shard is right, but you read more than you keep. The full tensor may not fit on one rank.
        Read from each old rank only the part that overlaps with your shard.
"""

EXERCISE = exercise(globals(), points=2, right=(reshard,))
