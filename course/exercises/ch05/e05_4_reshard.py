"""05.4: a rank's shard, out of the shards that a different number of ranks saved."""

from math import ceil

import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.check.compare import ANYTHING
from course.check.edits import exercise
from course.check.exercise import DTYPE, random, shards_of
from lib import comm

SHARD, READ, HELD = "the shard of this rank", "what was read", "the largest tensor"
NO_MORE, MORE = "no more than it keeps", "more than it keeps"
PART, FULL = "smaller than the full tensor", "as large as the full tensor"


def inputs(generator, n):
    """Fewer ranks and more, old and new shards that are all padding; in one case no number can be made of it."""
    sizes = ((7 - n, 10 * n), (7 - n, 10 * n - 1), (2 * n + 1, 11 * n + 2), (8, 17), (3, n + 1))
    cases = []
    for old_n, size in sizes:
        flat = random(generator, old_n * ceil(size / old_n))  # its padding is not zero: who keeps it fails
        flat[size:] = flat[size:] if old_n < 8 else float("nan")
        cases.append({"size": size, "old_n": old_n, "saved": list(flat.chunk(old_n))})
    return [{"cases": cases}] * n


def entry(case, what):
    return f"{case['size']} elements from {case['old_n']} ranks: {what}"


def body(answer, group, given):
    found = {}
    for case in given["cases"]:
        taken, sizes, saved = [], Sizes(), [shard.tolist() for shard in case["saved"]]

        def read(rank, start, stop, case=case, taken=taken, saved=saved):
            if not 0 <= rank < case["old_n"]:
                raise ValueError(f"read({rank}, {start}, {stop}): there were {case['old_n']} ranks, counted from 0")
            length = len(saved[rank])
            if not 0 <= start <= stop <= length:
                raise ValueError(f"read({rank}, {start}, {stop}): each of the ranks saved {length} elements")
            taken.append(stop - start)
            return torch.tensor(saved[rank][start:stop], dtype=DTYPE)

        with sizes:
            found[entry(case, SHARD)] = answer(read, case["size"], case["old_n"], group)
        found[entry(case, READ)] = MORE if sum(taken) > ceil(case["size"] / group.size) else NO_MORE
        found[entry(case, HELD)] = FULL if sizes.largest >= case["size"] else PART
    return found


class Sizes(TorchDispatchMode):
    """The elements of the largest tensor of numbers that an operation used or made, with the memory that it views."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x) and x.is_floating_point())
        self.largest = max(self.largest, *(x.untyped_storage().nbytes() // x.element_size() for x in tensors), 0)
        return result


def reference(given):
    found = [{} for _ in given]
    for case in given[0]["cases"]:
        shards = shards_of(torch.cat(case["saved"])[: case["size"]], len(given))
        for mine, shard in zip(found, shards, strict=True):
            mine |= {entry(case, SHARD): shard, entry(case, READ): NO_MORE, entry(case, HELD): PART}
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


def in_pieces(read, size, old_n, group):
    """A list of pieces, and zeros after the last one."""
    old_size, new_size = ceil(size / old_n), ceil(size / group.size)
    place, stop = group.rank * new_size, min((group.rank + 1) * new_size, size)
    pieces = [torch.zeros(0, dtype=DTYPE)]
    while place < stop:
        rank, at = divmod(place, old_size)
        pieces.append(read(rank, at, min(old_size, at + stop - place)))
        place += len(pieces[-1])
    shard = torch.cat(pieces)
    return pad(shard, (0, new_size - len(shard)))


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
return shard => return shard[: max(0, stop - first)]
    The last shard is too short. Each shard has ceil(size/n) elements.
        Fill up with zeros.
in all:
returns shards_of(torch.cat(all_saved(read, size, old_n))[:size], group.size)[group.rank]
    The shard is right, but you read more than you keep. The full tensor may not fit on one rank.
        Read from each old rank only the part that overlaps with your shard.
read(rank, low - start, high - start) => read(rank, low - start, min(high - start + 1, old_size))
= piece => = piece[: high - low]
or
read(rank, low - start, high - start) => read(rank, 0, old_size)[low - start : high - start]
    The shard is right, but you read elements around it, which you do not keep: you cut them off afterwards.
        Read each old shard from the first element that you keep to the last.
torch.zeros(new_size, dtype=torch.float64) => torch.zeros(size, dtype=torch.float64)
shard[low - first : high - first] = piece => shard[low:high] = piece
return shard => return pad(shard[first:stop], (0, new_size - max(0, stop - first)))
or
returns comm.all_gather(result, group).split(len(result))[group.rank]
    The shard is right, and you read no more than it, but a tensor as large as the full one is in memory on each rank.
        Allocate ceil(size/n) elements, and count positions from the first of them.
in shard:
dtype=torch.float64) => dtype=torch.float32)
    The shard is float32: the checkpoint is float64, and half of its digits are lost.
        Make the new tensor in the dtype that read returns: it is float32 unless it is told its dtype.
dtype=torch.float64) => dtype=torch.float32)
returns result.double()
    The shard is float64, but its numbers were rounded to float32 on the way, which loses half of their digits.
        Copy what read returns into a float64 tensor: a new tensor is float32 unless it is told its dtype.
min(first + new_size, size) => first + new_size
return shard => return shard * (torch.arange(first, first + new_size) < size)
    You multiply the padding by zero, and it may have any value: NaN times 0 is NaN.
        Do not read it, or write zeros over it.
"""

EXERCISE = exercise(globals(), points=2, right=(reshard, in_pieces), tolerances={SHARD: 0})
