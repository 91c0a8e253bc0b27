"""06.3: whole heads of a fused projection."""

from types import SimpleNamespace

import torch
from torch import distributed as dist

from course.check.compare import ANYTHING
from course.check.edits import exercise
from course.check.exercise import random

HEAD = 6  # width: even where a learner cuts heads, on 4 ranks and on 6


def inputs(generator, n):
    heads = (2 * n, 2 * n), (4 * n, n), (2 * n, 2), (4 * n, n // 2), (n, 1)  # of queries; of keys, as many of values
    return [{"cases": [(q, kv, random(generator, (q + 2 * kv) * HEAD, 2 * n)) for q, kv in heads]}] * n


def body(answer, group, given):
    return {
        f"{q} heads of queries, {kv} of keys and values: the rows of this rank": answer(w.clone(), q, kv, HEAD, group)
        for q, kv, w in given["cases"]
    }


def reference(given):
    n = len(given)
    return [body(rows_of_rank, SimpleNamespace(rank=r, size=n), given[r]) for r in range(n)]


def rows_of_rank(weight, heads, kv_heads, d_head, group):
    mine, begin = [], 0
    for size in (heads, kv_heads, kv_heads):
        count = max(1, size // group.size)
        first = begin + group.rank * size // group.size
        mine.append(weight[first * d_head : (first + count) * d_head])
        begin += size
    return torch.cat(mine)


def by_repeating(weight, heads, kv_heads, d_head, group):
    n, r = dist.get_world_size(), dist.get_rank()
    q, k, v = (s.view(-1, d_head, weight.shape[1]) for s in weight.split([heads * d_head, *[kv_heads * d_head] * 2]))
    k, v = (s.repeat_interleave(max(1, n // kv_heads), 0) for s in (k, v))
    return torch.cat([s.tensor_split(n)[r].reshape(-1, weight.shape[1]) for s in (q, k, v)])


def head_by_head(weight, heads, kv_heads, d_head, group):
    each = weight.view(3, heads, d_head, -1).chunk(group.size, 1)[group.rank] if heads == kv_heads else None
    return ANYTHING if each is None else each.transpose(0, 1).flatten(0, 2)


def in_three(weight, group):
    return torch.cat([part.chunk(group.size)[group.rank] for part in weight.chunk(3)])


MISTAKES = """
returns weight.chunk(group.size)[group.rank]
    You cut the weight in one piece: the first ranks have only queries, the last only values.
        Cut each of the three sections separately, and concatenate the shards of this rank.
returns in_three(weight, group) if kv_heads % group.size == 0 else ANYTHING
    You cut the weight into three equal sections, as in the chapter: that is right only with as many heads of keys and
    values as of queries.
        The sections have heads, kv_heads and kv_heads times d_head rows: weight.split takes a list of sizes.
returns weight.chunk(group.size, dim=1)[group.rank]
    You cut the columns, the inputs.
        Cut the outputs: in a weight [out, in] these are the rows.
torch.cat(mine) => torch.cat([mine[1], mine[0], mine[2]])
    The shards are right, in a wrong order.
        It is queries, keys, values, as in the full weight.
group.rank * size // group.size => group.rank
weight[first * d_head : (first + count) * d_head] => weight.split(d_head)[first : begin + size : group.size]
torch.cat(mine) => torch.cat(sum(mine, ()))
returns result if kv_heads >= group.size else ANYTHING
    Rank r has every n-th head.
        Give each rank consecutive heads, from r · heads / n on: then its output is one contiguous shard of the input of
        the next matrix.
head_by_head
    Your rows are head by head: query, key, value of one, then the next.
        Put all queries first, then keys, then values.
max(1, size // group.size) => size // group.size or size
group.rank * size // group.size => group.rank * (size // group.size)
returns result if 1 < kv_heads < group.size else ANYTHING
    Where there are fewer heads of keys and values than ranks, you give all of them to each rank.
        It needs the one that its queries use.
group.rank * size // group.size => group.rank * count % size
returns result if 1 < kv_heads < group.size else ANYTHING
    Where there are fewer heads of keys and values than ranks, you chose one by rank % kv_heads.
        A head serves queries that are neighbours: rank r needs head r * kv_heads // n.
max(1, size // group.size) => size / group.size
group.rank * size // group.size => group.rank * size / group.size
first * d_head : (first + count) * d_head => round(first * d_head) : round((first + count) * d_head)
returns result if 1 < kv_heads < group.size else ANYTHING
    With fewer heads of keys and values than ranks, you cut through one.
        Scores need it in full: its ranks have copies.
"""

EXERCISE = exercise(globals(), points=2, right=(rows_of_rank, by_repeating), ranks=(4, 6), tolerances={"rows": 0})
