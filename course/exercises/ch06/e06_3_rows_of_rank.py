"""06.3: whole heads of a fused projection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed as dist

from course.check.exercise import ANYTHING, Data, Exercise, Mistake, random
from lib.mesh import Group

HEAD = 6  # width: even where a learner cuts heads, on 4 ranks and on 6


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    cases = []
    for heads, kv_heads in ((2 * n, 2 * n), (4 * n, n), (2 * n, 2), (4 * n, n // 2), (n, 1)):
        weight = random(generator, (heads + 2 * kv_heads) * HEAD, 2 * n)
        cases.append({"weight": weight, "heads": heads, "kv_heads": kv_heads})
    return [{"cases": cases}] * n


def entry(case: Data) -> str:
    return f"{case['heads']} heads of queries, {case['kv_heads']} of keys and values: the rows of this rank"


def body(answer: Callable, group: Group, given: Data) -> Data:
    return {
        entry(case): answer(case["weight"].clone(), case["heads"], case["kv_heads"], HEAD, group)
        for case in given["cases"]
    }


def reference(given: list[Data]) -> list[Data]:
    n = len(given)
    return [{entry(case): dealt(**case, d_head=HEAD, r=r, n=n) for case in given[0]["cases"]} for r in range(n)]


# ---- right programs -------------------------------------------------------------------------------------------------


def neighbours(heads: int, r: int, n: int) -> range:
    """heads/n consecutive heads; one if there are fewer than ranks."""
    first = r * heads // n
    return range(first, first + max(1, heads // n))


def dealt(weight, heads, kv_heads, d_head, r, n, queries=neighbours, keys=neighbours, order=(0, 1, 2)):
    sections = weight.unflatten(0, (-1, d_head)).split([heads, kv_heads, kv_heads])  # [heads, d_head, D] each
    parts = [s[list(deal(len(s), r, n))] for s, deal in zip(sections, (queries, keys, keys), strict=True)]
    return torch.cat([parts[i] for i in order]).flatten(0, 1)


def rows(weight, heads, kv_heads, d_head, group, **wrong):
    return dealt(weight, heads, kv_heads, d_head, group.rank, group.size, **wrong)


def rows_by_repeating(weight, heads, kv_heads, d_head, group):
    n, r = dist.get_world_size(), dist.get_rank()
    q, k, v = (s.view(-1, d_head, weight.shape[1]) for s in weight.split([heads * d_head, *[kv_heads * d_head] * 2]))
    k, v = (s.repeat_interleave(max(1, n // kv_heads), 0) for s in (k, v))
    return torch.cat([s.tensor_split(n)[r].reshape(-1, weight.shape[1]) for s in (q, k, v)])


# ---- wrong programs -------------------------------------------------------------------------------------------------


def but(**wrong) -> Callable:
    return lambda *given: rows(*given, **wrong)


def where(looked_at: Callable[[int, int, int], bool], program: Callable) -> Callable:
    """The program, in the cases (heads, kv_heads, n) that are looked at."""

    def answer(weight, heads, kv_heads, d_head, group):
        looks = looked_at(heads, kv_heads, group.size)
        return program(weight, heads, kv_heads, d_head, group) if looks else ANYTHING

    return answer


def enough(heads: int, kv_heads: int, n: int) -> bool:
    return kv_heads >= n


def few(heads: int, kv_heads: int, n: int) -> bool:
    return 1 < kv_heads < n


def every_nth(heads: int, r: int, n: int) -> range:
    return range(r % heads, heads, n)


def head_by_head(weight, heads, kv_heads, d_head, group):
    each = weight.view(3, heads, d_head, -1).chunk(group.size, 1)[group.rank]
    return each.transpose(0, 1).flatten(0, 2)


def pieces_of_heads(weight, heads, kv_heads, d_head, group):
    sections = weight.split([heads * d_head, kv_heads * d_head, kv_heads * d_head])
    return torch.cat([section.tensor_split(group.size)[group.rank] for section in sections])


EXERCISE = Exercise(
    id="06.3",
    title="rows_of_rank",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(rows, rows_by_repeating),
    ranks=(4, 6),  # two heads for n ranks: with 3, as with any prime, there is only one, and every rule gives it
    mistakes=(
        Mistake(
            "You cut the weight in one piece: the first ranks have only queries, the last only values. Cut each of the "
            "three sections separately, and concatenate the shards of this rank.",
            lambda weight, heads, kv_heads, d_head, group: weight.chunk(group.size)[group.rank],
        ),
        Mistake(
            "You cut the columns, the inputs. Cut the outputs: in a weight [out, in] these are the rows.",
            lambda weight, heads, kv_heads, d_head, group: weight.chunk(group.size, dim=1)[group.rank],
        ),
        Mistake(
            "The shards are right, in a wrong order. It is queries, keys, values, as in the full weight.",
            but(order=(1, 0, 2)),
        ),
        Mistake(
            "Rank r has every n-th head. Give each rank consecutive heads, from r · heads / n on: then its output is "
            "one contiguous shard of the input of the next matrix.",
            where(enough, but(queries=every_nth, keys=every_nth)),
        ),
        Mistake(
            "Your rows are head by head: query, key and value of one, then of the next. Put all queries first, then "
            "all keys, then all values.",
            where(lambda heads, kv_heads, n: heads == kv_heads, head_by_head),
        ),
        Mistake(
            "Where there are fewer heads of keys and values than ranks, you give all of them to each rank. It needs "
            "the one that its queries use.",
            where(few, but(keys=lambda heads, r, n: range(heads))),
        ),
        Mistake(
            "Where there are fewer heads of keys and values than ranks, you chose one by rank % kv_heads. A head "
            "serves queries that are neighbours: rank r needs head r * kv_heads // n.",
            where(few, but(keys=every_nth)),
        ),
        Mistake(
            "Where there are fewer heads of keys and values than ranks, you cut through a head. Scores need the full "
            "head: the ranks that share it have a copy each.",
            where(few, pieces_of_heads),
        ),
    ),
)
