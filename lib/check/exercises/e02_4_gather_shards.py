"""02.4: shards of unequal length gathered on all ranks, in torch.distributed itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from lib.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, random, with_variants
from lib.check.listen import listen, raw
from lib.mesh import Group

RESULT, SENT, UNFINISHED = "all shards", "what was sent", "calls that were not waited for"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """One shard is empty, and each of the others has a 0 in it, so the value 0 does not identify padding."""
    lengths = torch.cat([torch.zeros(1), 2 + torch.randperm(6, generator=generator)[: n - 1]]).int()
    lengths = lengths[torch.randperm(n, generator=generator)].tolist()
    shards = [random(generator, length) for length in lengths]
    for shard in shards:
        shard[1:2] = 0
    return [{"x": shard, "longest": max(lengths)} for shard in shards]


@raw
def body(answer: Callable, group: Group, given: Data) -> Data:
    heard = listen()
    result = answer(given["x"].clone())
    # Twice the padded shards and the lengths: an all-reduce is fine, pickled objects are larger.
    most = 2 * (group.size - 1) * (8 * given["longest"] + 16)
    needed = AS_NEEDED if heard.sent_bytes(group.size) <= most else MORE
    return {RESULT: result, SENT: needed, UNFINISHED: heard.unfinished}


# ---- orders of the result -------------------------------------------------------------------------------------------


def last_rank_first(shards: list[Tensor]) -> Tensor:
    return torch.cat(shards[::-1])


def in_turn(shards: list[Tensor]) -> Tensor:
    longest = max(map(len, shards))
    return torch.cat([shard[i : i + 1] for i in range(longest or 1) for shard in shards])


def backwards(shards: list[Tensor]) -> Tensor:
    return torch.cat([shard.flip(0) for shard in shards])


# ---- programs: each returns the shards in order of rank --------------------------------------------------------------


def all_lengths(x: Tensor) -> list[int]:
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([len(x)]))
    return [int(length) for length in found]


def all_rows(padded: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, padded)
    return rows


def one_row_n_times(padded: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(padded)] * dist.get_world_size()
    dist.all_gather(rows, padded)
    return rows


def rows_too_early(padded: Tensor) -> list[Tensor]:
    rows = [torch.zeros_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, padded, async_op=True)
    return rows


def by_padding(x, gather=all_rows, zeros=lambda count: (0, count), cut=lambda row, length, mine: row[:length]):
    """An all-gather of equal shapes, with a place for each mistake."""
    lengths = all_lengths(x)
    rows = gather(pad(x, zeros(max(lengths) - len(x))))
    return [cut(row, length, len(x)) for row, length in zip(rows, lengths, strict=True)]


def by_broadcasts(x):
    shards = [torch.empty(length, dtype=x.dtype) for length in all_lengths(x)]
    shards[dist.get_rank()] = x
    works = [dist.broadcast(shard, src, async_op=True) for src, shard in enumerate(shards)]
    for work in works:
        work.wait()
    return shards


def by_messages(x, order=lambda n, rank: range(n), waits=True):
    n, r = dist.get_world_size(), dist.get_rank()
    shards = [torch.zeros(length, dtype=x.dtype) for length in all_lengths(x)]
    shards[r] = x
    others = [rank for rank in range(n) if rank != r]
    works = [dist.irecv(shards[src], src) for src in others] + [dist.isend(x, dst) for dst in others]
    for work in works if waits else ():
        work.wait()
    return [shards[i] for i in order(n, r)]


def by_all_reduce(x):
    lengths = all_lengths(x)
    full = torch.zeros(sum(lengths), dtype=x.dtype)
    full.split(lengths)[dist.get_rank()][:] = x
    dist.all_reduce(full)
    return list(full.split(lengths))


def by_objects(x):
    shards = [None] * dist.get_world_size()
    dist.all_gather_object(shards, x)
    return shards


def exercise(join: Callable[[list[Tensor]], Tensor] = torch.cat, task: str = "") -> Exercise:
    """The exercise with another order of the result."""

    def joined(program: Callable, **how) -> Callable:
        return lambda x: join(program(x, **how))

    def on_one_rank(x: Tensor) -> Tensor | None:
        full = join(by_padding(x))
        return full if dist.get_rank() == 0 else None

    def reference(given: list[Data]) -> list[Data]:
        return [{RESULT: join([g["x"] for g in given]), SENT: AS_NEEDED, UNFINISHED: 0}] * len(given)

    return Exercise(
        id="02.4",
        title="gather_shards",
        points=3,
        body=body,
        inputs=inputs,
        reference=reference,
        task=task,
        right=tuple(map(joined, (by_padding, by_broadcasts, by_messages, by_all_reduce))),
        mistakes=(
            *(
                Mistake(
                    "A call was started and not waited for. The handle of isend, irecv or async_op=True has a method "
                    "wait(): call it before you read the tensors, and before you return.",
                    wrong,
                    about=(UNFINISHED,),
                )
                for wrong in (joined(by_padding, gather=rows_too_early), joined(by_messages, waits=False))
            ),
            Mistake(
                "The result is right, and you send several times the bytes needed: functions whose names end in "
                "_object pickle the tensor. Send the lengths as one tensor, then the values.",
                joined(by_objects),
            ),
            Mistake(
                "You return the padding too: the result has n times the longest shard. Cut each received tensor to the "
                "length of its shard.",
                joined(by_padding, cut=lambda row, length, mine: row),
            ),
            Mistake(
                "You padded at the front and cut at the end, so zeros remain and numbers are lost. Pad at the end: "
                "pad(x, (0, count)).",
                joined(by_padding, zeros=lambda count: (count, 0)),
            ),
            Mistake(
                "You cut every shard to this rank's own length. Each rank has its own: gather the lengths first, and "
                "cut shard i to length i.",
                joined(by_padding, cut=lambda row, length, mine: row[:mine]),
            ),
            Mistake(
                "You removed zeros to remove the padding. A shard can contain a 0, and loses it: cut by length, not by "
                "value.",
                joined(by_padding, cut=lambda row, length, mine: row[row != 0]),
            ),
            Mistake(
                "Every shard is the last rank's: [t] * n is a list with one tensor n times, and each receive "
                "overwrites the one before. Allocate n tensors.",
                joined(by_padding, gather=one_row_n_times),
            ),
            *(
                Mistake(
                    "You put your own shard before or after all others, so the order differs from rank to rank. A "
                    "shard has the same place on all ranks.",
                    joined(by_messages, order=order),
                )
                for order in (
                    lambda n, r: [(r + i) % n for i in range(n)],
                    lambda n, r: sorted(range(n), key=r.__ne__),
                    lambda n, r: sorted(range(n), key=r.__eq__),
                )
            ),
            Mistake(
                "Your own shard is missing. Ranks send to the others; add your own x in its place.",
                joined(by_messages, order=lambda n, r: [i for i in range(n) if i != r]),
            ),
            Mistake(
                "Only rank 0 returns the shards. All ranks need them: all_gather instead of gather.",
                on_one_rank,
                about=(RESULT,),
            ),
        ),
    )


EXERCISE = with_variants(
    exercise(),
    exercise(
        last_rank_first,
        "Instead of the order of the ranks, join the shards in the reverse order: the shard of the last rank comes "
        "first, the shard of rank 0 last.",
    ),
    exercise(
        in_turn,
        "Instead of one shard after the other, join them element by element: first element 0 of every shard, in the "
        "order of the ranks, then element 1 of every shard that has one, and so on.",
    ),
    exercise(
        backwards,
        "Each shard is reversed: join the shards in the order of the ranks, each from its last element to its first.",
    ),
)
