"""Chapter 06, whole heads of a fused projection: exercise 06.3."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lib.check.exercise import Data, Exercise, Mistake, random
from lib.mesh import Group

_E = 6  # width of a head: even where a learner cuts heads, on 4 ranks and on 6
OWN, FEW = slice(0, 2), slice(2, 4)  # of the cases: each rank has heads of keys and values of its own; has not


def _heads_inputs(generator: torch.Generator, n: int) -> list[Data]:
    cases = []
    for heads, kv_heads in ((2 * n, 2 * n), (4 * n, n), (2 * n, 2), (4 * n, n // 2), (n, 1)):
        weight = random(generator, (heads + 2 * kv_heads) * _E, 2 * n)
        cases.append({"weight": weight, "heads": heads, "kv_heads": kv_heads})
    return [{"cases": cases}] * n


def _name(case: Data) -> str:
    return f"{case['heads']} heads of queries, {case['kv_heads']} of keys and values: this rank's part"


def _rows_of_rank(answer: Callable, group: Group, given: Data) -> Data:
    return {
        _name(case): answer(case["weight"].clone(), case["heads"], case["kv_heads"], _E, group)
        for case in given["cases"]
    }


def _rows(of: Callable[[Data, int, int], Tensor], cases: slice = slice(None)) -> Callable:
    """Rank r's rows are of(case, r, n); whatever comes in other cases than these does not count."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        return [{_name(case): of(case, r, len(given)) for case in g["cases"][cases]} for r, g in enumerate(given)]

    return answers


def _sections(case: Data) -> tuple[Tensor, ...]:
    """Queries, keys, values: [heads, width of a head, D] each."""
    heads = case["weight"].unflatten(0, (-1, _E))
    return heads.split([case["heads"], case["kv_heads"], case["kv_heads"]])


Deal = Callable[[int, int, int], Iterable[int]]  # (heads, r, n) to the heads that rank r gets


def _neighbours(heads: int, r: int, n: int) -> range:
    """heads/n that follow each other; one if there are fewer than ranks."""
    first = r * heads // n
    return range(first, first + max(1, heads // n))


def _every_nth(heads: int, r: int, n: int) -> range:
    return range(r % heads, heads, n)


def _dealt(queries: Deal = _neighbours, keys: Deal = _neighbours, order: tuple[int, ...] = (0, 1, 2)) -> Callable:
    def of(case: Data, r: int, n: int) -> Tensor:
        dealt = zip(_sections(case), (queries, keys, keys), strict=True)
        parts = [section[list(deal(len(section), r, n))].flatten(0, 1) for section, deal in dealt]
        return torch.cat([parts[i] for i in order])

    return of


def _head_by_head(case: Data, r: int, n: int) -> Tensor:
    parts = [section.chunk(n)[r] for section in _sections(case)]
    return torch.stack(parts, 1).flatten(0, 2)


def _pieces_of_heads(case: Data, r: int, n: int) -> Tensor:
    return torch.cat([section.flatten(0, 1).chunk(n)[r] for section in _sections(case)])


ROWS_OF_RANK = Exercise(
    id="06.3",
    title="rows_of_rank",
    points=2,
    body=_rows_of_rank,
    inputs=_heads_inputs,
    reference=_rows(_dealt()),
    ranks=(4, 6),  # two heads for n ranks: with 3, as with any prime, there is only one, and every rule gives it
    mistakes=(
        Mistake(
            "You cut the weight in one piece: the first ranks have only queries, the last only values. Cut each of the "
            "three sections separately, and concatenate the shards of this rank.",
            _rows(lambda case, r, n: case["weight"].chunk(n)[r]),
        ),
        Mistake(
            "You cut the columns, the inputs. Cut the outputs: in a weight [out, in] these are the rows.",
            _rows(lambda case, r, n: case["weight"].chunk(n, dim=1)[r]),
        ),
        Mistake(
            "The shards are right, in a wrong order. It is queries, keys, values, as in the full weight.",
            _rows(_dealt(order=(1, 0, 2))),
        ),
        Mistake(
            "Rank r has every n-th head. Give each rank consecutive heads, from r · heads / n on: then its output is "
            "one contiguous shard of the input of the next matrix.",
            _rows(_dealt(_every_nth, _every_nth), OWN),
        ),
        Mistake(
            "Your rows are head by head: query, key and value of one, then of the next. Put all queries first, then "
            "all keys, then all values.",
            _rows(_head_by_head, slice(0, 1)),
        ),
        Mistake(
            "Where there are fewer heads of keys and values than ranks, you give all of them to each rank. It needs "
            "the one that its queries use.",
            _rows(_dealt(keys=lambda heads, r, n: range(heads)), FEW),
        ),
        Mistake(
            "Where there are fewer heads of keys and values than ranks, you chose one by rank % kv_heads. A head "
            "serves queries that are neighbours: rank r needs head r * kv_heads // n.",
            _rows(_dealt(keys=_every_nth), FEW),
        ),
        Mistake(
            "Where there are fewer heads of keys and values than ranks, you cut through a head. Scores need it whole: "
            "the ranks that share it have a copy each.",
            _rows(_pieces_of_heads, FEW),
        ),
    ),
)

EXERCISES = (ROWS_OF_RANK,)
