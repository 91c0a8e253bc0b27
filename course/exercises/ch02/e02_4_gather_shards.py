"""02.4: shards of unequal length gathered on all ranks, in torch.distributed itself."""

import sys
from dataclasses import replace
from functools import partial

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import everywhere, random, whole, with_variants
from course.check.listen import listen, raw

RESULT, LONG, SENT_AS, WAITED = "all shards", "all shards, some longer", "sent as", "waited for"
TENSORS, PICKLED = "tensors", "pickled objects"
ALL, SOME = "every call", "not every call"
FACTS = {SENT_AS: TENSORS, WAITED: ALL}


def inputs(generator, n):
    """One shard is empty, and each of the others has a 0 in it, so the value 0 does not identify padding."""
    lengths = torch.cat([torch.zeros(1), 2 + torch.randperm(6, generator=generator)[: n - 1]]).int()
    lengths = lengths[torch.randperm(n, generator=generator)].tolist()
    shards = [random(generator, length) for length in lengths]
    for shard in shards:
        shard[1:2] = 0
    # No fixed length will do for these, and no value that stands for padding: each ends with NaN.
    longer = [random(generator, whole(generator, 1, 3000)) for _ in shards]
    for shard in longer:
        shard[-1] = torch.nan
    return [{RESULT: shard, LONG: long} for shard, long in zip(shards, longer, strict=True)]


@raw
def body(answer, group, given):
    sent_as = {TENSORS}
    heard = listen(lambda call: sent_as.add(PICKLED if is_pickled() else TENSORS))
    found = {name: answer(x.clone()) for name, x in given.items()}
    return found | {SENT_AS: PICKLED if PICKLED in sent_as else TENSORS, WAITED: SOME if heard.unfinished else ALL}


def is_pickled():
    """Whether torch sends this in a function such as `all_gather_object` or `broadcast_object_list`."""
    frame = sys._getframe()
    while frame:
        if "_object" in frame.f_code.co_name and frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            return True
        frame = frame.f_back
    return False


def last_rank_first(shards):
    return torch.cat(shards[::-1])


def in_turn(shards):
    longest = max(map(len, shards))
    return torch.cat([shard[i : i + 1] for i in range(longest or 1) for shard in shards])


def backwards(shards):
    return torch.cat([shard.flip(0) for shard in shards])


def gather_shards(x):
    n = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(n)]
    dist.all_gather(lengths, torch.tensor([len(x)]))
    longest = int(max(lengths))
    padded = torch.zeros(longest, dtype=x.dtype)
    padded[: len(x)] = x
    rows = [torch.empty_like(padded) for _ in range(n)]
    dist.all_gather(rows, padded)
    return torch.cat([rows[i][: lengths[i]] for i in range(n)])


def all_lengths(x):
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([len(x)]))
    return [int(length) for length in found]


def all_at_once(start, x):
    shards = [x.new_empty(length) for length in all_lengths(x)]
    shards[dist.get_rank()] = x
    for work in start(x, shards):
        work.wait()
    return torch.cat(shards)


def broadcasting(x, shards):
    return [dist.broadcast(shard, src, async_op=True) for src, shard in enumerate(shards)]


def exchanging(x, shards):
    """The handles of messages from each rank to each other one."""
    shards[dist.get_rank()] = x
    others = [rank for rank in range(len(shards)) if rank != dist.get_rank()]
    return [dist.irecv(shards[src], src) for src in others] + [dist.isend(x, dst) for dst in others]


def by_all_reduce(x):
    lengths = all_lengths(x)
    full = x.new_zeros(sum(lengths))
    full.split(lengths)[dist.get_rank()][:] = x
    dist.all_reduce(full)
    return full


MISTAKES = """
in waited for: dist.all_gather(rows, padded) => dist.all_gather(rows, padded, async_op=True)
or rows = [torch.empty_like(padded) for _ in range(n)] => rows = [x.new_zeros(int(k)) for k in lengths]
dist.all_gather(rows, padded) => exchanging(x, rows)
    A call was started and not waited for. The handle of isend, irecv or async_op=True has a method wait().
        Call it before you read the tensors, and before you return.
in all shards, sent as: dist.all_gather(rows, padded) => dist.all_gather_object(rows, x)
or dist.all_gather(lengths, torch.tensor([len(x)])) => dist.all_gather_object(lengths, len(x))
    The result is right, and something is sent by a function with _object in its name. It pickles, which multiplies the
    bytes of a small tensor.
        Send the lengths as one tensor, then the values.
in all shards:
rows[i][: lengths[i]] => rows[i]
    You return the padding too: n times the longest shard.
        Cut each received tensor to the length of its shard.
padded[: len(x)] = x => padded[longest - len(x) :] = x
    You padded at the front and cut at the end: zeros remain, numbers are lost.
        Pad at the end: pad(x, (0, count)).
rows[i][: lengths[i]] => rows[i][: len(x)]
    You cut every shard to this rank's own length. Each has its own.
        Gather the lengths, and cut shard i to length i.
rows[i][: lengths[i]] => rows[i][rows[i] != 0]
    You removed zeros to remove the padding. A shard can contain a 0, and loses it.
        Cut by length, not by value.
torch.zeros(longest, dtype=x.dtype) => torch.full((longest,), torch.nan, dtype=x.dtype)
rows[i][: lengths[i]] => rows[i][~rows[i].isnan()]
    You removed NaN to remove the padding. A shard can contain a NaN, and loses it.
        Cut by length, not by value.
[torch.empty_like(padded) for _ in range(n)] => [torch.empty_like(padded)] * n
    Every shard is the last rank's: [t] * n is one tensor n times, and each receive overwrites it.
        Allocate n tensors.
for i in range(n) => for i in [*range(dist.get_rank(), n), *range(dist.get_rank())]
or for i in range(n) => for i in sorted(range(n), key=dist.get_rank().__ne__)
or for i in range(n) => for i in sorted(range(n), key=dist.get_rank().__eq__)
    You put your own shard before or after all others.
        A shard has the same place on all ranks.
for i in range(n) => for i in range(n) if i != dist.get_rank()
    Your own shard is missing. Ranks send to the others.
        Add your own x in its place.
return torch.cat([rows[i][: lengths[i]] for i in range(n)]) => return [rows[i][: lengths[i]] for i in range(n)]
    You return the shards in a list.
        Join them to one flat tensor, with torch.cat.
return torch.cat => return None if dist.get_rank() else torch.cat
    Only rank 0 returns the shards.
        All ranks need them: all_gather instead of gather.
"""


def row(join=torch.cat, task=""):
    """The exercise with another order of the result."""
    by_works = (partial(all_at_once, start) for start in (broadcasting, exchanging))

    def in_order(program):
        return lambda x: join(program(x).split(all_lengths(x)))

    def wrong_in_order(mistake):
        text = mistake.wrong.text.replace("torch.cat", "torch.cat" if join is torch.cat else join.__name__)
        return replace(mistake, wrong=replace(mistake.wrong, text=text))

    def reference(given):
        return everywhere({name: join([g[name] for g in given]) for name in (RESULT, LONG)}, given)

    right, as_given = (gather_shards, *by_works, by_all_reduce), {RESULT: 0}
    one = exercise(globals() | {"reference": reference}, points=3, right=right, tolerances=as_given, task=task)
    return replace(one, right=tuple(map(in_order, one.right)), mistakes=tuple(map(wrong_in_order, one.mistakes)))


EXERCISE = with_variants(
    row(),
    row(
        last_rank_first,
        "Instead of the order of the ranks, join the shards in the reverse order: the shard of the last rank comes "
        "first, the shard of rank 0 last.",
    ),
    row(
        in_turn,
        "Instead of one shard after the other, join them element by element: first element 0 of every shard, in the "
        "order of the ranks, then element 1 of every shard that has one, and so on.",
    ),
    row(
        backwards,
        "Each shard is reversed: join the shards in the order of the ranks, each from its last element to its first.",
    ),
)
