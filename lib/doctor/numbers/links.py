"""The links of a step that are not tensors of every parameter: data, loss, norm, options, buffers; and the weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from lib.doctor.numbers.patterns import Said
from lib.doctor.numbers.recorded_numbers import Numbers, RankNumbers, StepNumbers
from lib.doctor.numbers.share import Share, Sides
from lib.runtime.hang import named_ranks
from lib.runtime.words import counted, few

NORM = {torch.float64: 1e-6, torch.float32: 1e-3}  # how exact a norm is; in narrower types 1e-2
LOSS_WIDE, LOSS = 1e-6, 3e-3
BUFFER_WIDE, BUFFER = 1e-6, 1e-3


def of_weights(sides: Sides, shares: list[Share]) -> Iterator[Said]:
    """Weights before a step. After the first they are the weights and updates before, except for copies."""
    sick = [share for share in shares if share.is_sick]
    if sides.step:
        if differ := [share for share in sick if share.copies_differ]:
            share, axes = differ[0], ", ".join(differ[0].copies_differ)
            yield (
                "copies step apart",
                f"after step {sides.step} ranks along {axes} have different weights, in {share.name}",
            )
        return
    if not sick:
        return
    share = next((one for one in sick if not one.is_finite), sick[0])
    if not share.is_finite:
        yield "not finite", f"{share.own_name} has infinite values or NaN on rank {share.rank}"
        return
    text = f"{counted(len({share.name for share in sick}), 'tensor')}, such as {share.name} on rank {share.rank}"
    if twins := _same_numbers(sides, sick):
        name, ranks = twins
        yield (
            "same seed on shards",
            f"{name}: the shards of {named_ranks(ranks)} have the same numbers: drawn with one seed",
        )
    elif any(share.copies_differ for share in sick):
        yield "own weights", f"{text}: ranks drew their own: load or broadcast the weights"
    elif _moved(sides, share.name):
        yield (
            "shards of several pieces",
            f"{text}: all its numbers are there, in different places: a fused matrix whose shards are several pieces? "
            "Let cut return them, as a list of (start, stop)",
        )
    else:
        yield (
            "different weights",
            f"{text}: different weights were loaded, or their elements are not where the layer reads them",
        )


def _same_numbers(sides: Sides, sick: list[Share]) -> tuple[str, list[int]] | None:
    """A wrong tensor, and two ranks that have different regions of it, with the same elements."""
    names, seen = {share.name for share in sick}, {}
    for held in sides.ours.held("weights"):
        part = held.part
        is_constant = math.isclose(part.square, part.largest**2 * part.region.numel, rel_tol=1e-6)
        if held.name not in names or not part.region.numel or is_constant:
            continue
        other = seen.setdefault((held.name, part.bits), held)
        if other.part.region != part.region:
            return held.name, [other.rank, held.rank]
    return None


def _moved(sides: Sides, name: str) -> bool:
    """Whether a wrong tensor has the right elements in different places."""
    if not sides.ours.run.whole:
        return False
    ours, right = (side.vectors("weights")[name].sort().values for side in (sides.ours, sides.right))
    return torch.allclose(ours, right, rtol=1e-6, atol=0)


def own_place(rank: RankNumbers) -> tuple[int, ...]:
    """The place of a rank along the axes whose ranks read their own rows."""
    return tuple(index for axis, (index, _) in rank.axes.items() if rank.rows[axis] == "own")


def has_parts(rank: RankNumbers) -> bool:
    return any(rank.rows[axis] == "parts" and size > 1 for axis, (_, size) in rank.axes.items())


def has_cut_rows(sides: Sides) -> bool:
    """Whether ranks of a run read parts of rows: then the places in rows are compared."""
    return any(has_parts(rank) for side in (sides.ours, sides.right) for rank in side.run.ranks)


def rows_read(run: Numbers, steps: list[StepNumbers], what: str) -> dict[tuple[int, ...], list[Counter[int]]]:
    """The rows, or places in rows, that each replica read, as each of its ranks did; its parts of rows are together."""
    found: dict[tuple[int, ...], list[Counter[int]]] = {}
    together: dict[tuple, Counter[int]] = {}
    for rank, step in zip(run.ranks, steps, strict=True):
        if not step.rows:
            continue
        if not has_parts(rank):
            found.setdefault(own_place(rank), []).append(Counter(getattr(step, what)))
            continue
        same = tuple(index for axis, (index, _) in rank.axes.items() if rank.rows[axis] == "same")
        together.setdefault((own_place(rank), same), Counter()).update(getattr(step, what))
    for (place, _), rows in together.items():
        found.setdefault(place, []).append(rows)
    return found


def of_data(sides: Sides) -> Iterator[Said]:
    """The rows of all replicas, compared with the rows of one process; where a run cuts rows, the places in them.

    Raises:
        ValueError: no row is in both.
    """
    is_cut = has_cut_rows(sides)
    what, unit = ("places", "place") if is_cut else ("rows", "row")
    ours = rows_read(sides.ours.run, sides.ours.steps, what)
    lengths = [
        sorted({str(shape) for step in side.steps for shape in step.row_shapes}) for side in (sides.ours, sides.right)
    ]
    if not is_cut and lengths[0] != lengths[1]:
        raise ValueError(
            f"the rows of step {sides.step + 1} have shapes {', '.join(lengths[0])} in {sides.ours.run.folder}, and "
            f"{', '.join(lengths[1])} in {sides.right.run.folder}: pad them to the same length in both"
        )
    wanted: Counter[int] = Counter()
    for first, *_ in rows_read(sides.right.run, sides.right.steps, what).values():
        wanted += first
    if not wanted or not ours:
        return
    read: Counter[int] = Counter()
    for first, *_ in ours.values():
        read += first
    if not wanted & read:
        raise ValueError(
            f"{sides.ours.run.folder} and {sides.right.run.folder} have no row of step {sides.step + 1} in common: "
            "they read different batches, or step in a different order; start_from() gives one process "
            "the batch of a run"
        )
    often, missing = read - wanted, wanted - read
    if any(other != first for first, *rest in ours.values() for other in rest):
        yield "a replica reads different rows", f"ranks of one replica read different {unit}s"
        return
    firsts = [first for first, *_ in ours.values()]
    if any(first == second for i, first in enumerate(firsts) for second in firsts[:i]):
        yield (
            "data not divided",
            f"replicas read the same {unit}s: the data are not divided. (If these ranks should read "
            "the same, name them with axes=.)",
        )
        return
    known = Counter({row: n for row, n in often.items() if row in wanted})
    total, missed = sum(wanted.values()), sum(missing.values())
    if known:
        text = f"{sum(known.values())} of {total} {unit}s are read once too often"
        text += f", and {missed} not at all" if missing else ""
        yield "data not divided", f"{text}: the data are not divided, or not along this axis"
    elif missing:
        text = f"{missed} of {total} {unit}s are read by no rank"
        extra = sum(often.values())
        text += f", and {counted(extra, unit)} that one process does not read" if extra else ""
        why = "different rows, or a different order" if extra else "divided twice, as by a sampler and a loader"
        yield "rows missing", f"{text}: {why}"


def loss_differs(sides: Sides) -> str | None:
    """What the ranks said of the loss, if neither it nor their sum or mean equals the loss of one process."""
    said = [step.loss for step in sides.ours.steps if step.loss is not None]
    right = [step.loss for step in sides.right.steps if step.loss is not None]
    if not said or not right:
        return None
    near = LOSS_WIDE if sides.is_wide else LOSS
    if any(abs(a - b) <= near * abs(b) for a in _meant(said) for b in _meant(right)):
        return None
    wanted = (
        f"{sum(right) / len(right):.6g} in one process" if len(right) == 1 else f"{_listed(right)} on other ranks"
    )
    mean = f", with the mean {sum(said) / len(said):.6g}" if len({*said}) > 1 else ""
    return f"the loss is {wanted}, and on the ranks {_listed(said)}{mean}"


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values[:8]) + ", …" * (len(values) > 8)


def _meant(losses: list[float]) -> list[float]:
    """Each rank may have the loss, or a term of it, or a mean of its own."""
    total = sum(losses)
    return [*losses, *(total / n for n in range(1, len(losses) + 1))]


def of_norm(sides: Sides) -> Iterator[Said]:
    """The norm by which ranks clip, and the norm of the gradients that they hold: this needs no second run."""
    gradients = sides.ours.held("gradients")
    said = [step.norm for step in sides.ours.steps if step.norm is not None]
    squares, largest = {}, 0.0
    for held in gradients:
        squares[held.name, held.part.region] = held.part.square
        largest = max(largest, held.part.largest)
    held_norm = math.sqrt(sum(squares.values()))
    if not said or not held_norm:
        return
    dtypes = {held.part.torch_dtype for held in gradients}
    near = max(NORM.get(dtype, 1e-2) for dtype in dtypes)
    if all(abs(norm - held_norm) <= near * held_norm or abs(norm - largest) <= near * largest for norm in said):
        return  # the second is the norm of the largest element
    text = f"the ranks hold gradients of norm {held_norm:.6g} and clip by {_listed(sorted({*said}))}"
    if max(said) > min(said) * (1 + near):
        yield "local norm", f"{text}: each takes the norm of its shards"
    elif said[0] > held_norm:
        yield "norm counts copies", f"{text}: tensors that several ranks hold are counted several times"
    else:
        yield "norm leaves out shards", f"{text}: some shards are left out"


def of_options(sides: Sides) -> Iterator[Said]:
    """Learning rate, decay and all further options of each parameter."""
    wanted: dict[str, dict[str, Any]] = {}
    for step in sides.right.steps:
        wanted |= step.options
    ours = [step.options for step in sides.ours.steps]
    known = {held.own_name: held.name for held in (*sides.ours.held("weights"), *sides.right.held("weights"))}
    right = {known.get(name, name): options for name, options in wanted.items()}
    if not right or not any(ours):
        return
    stepped = {
        (held.name, held.part.region) for held in sides.ours.held("weights") if held.own_name in ours[held.rank]
    }
    missing = [
        held
        for held in sides.ours.held("weights")
        if held.name in right and held.part.region.numel and (held.name, held.part.region) not in stepped
    ]
    if missing:
        names = list(dict.fromkeys(held.name for held in missing))
        where = named_ranks(sorted({held.rank for held in missing}))
        yield (
            "not in the optimizer",
            f"{counted(len(names), 'tensor')} ({few(names)}): no optimizer has what {where} hold of it",
        )
    for key in dict.fromkeys(key for options in right.values() for key in options):
        off = {}
        for rank, options in enumerate(ours):
            for name, values in options.items():
                expected = right.get(known.get(name, name), {})
                if key in expected and key in values and not _equal(values[key], expected[key]):
                    off[name, rank] = values[key], expected[key]
        if off:
            (name, rank), (value, expected) = next(iter(off.items()))
            tensors, ranks = {name for name, _ in off}, sorted({rank for _, rank in off})
            yield (
                "options",
                f"{key} is {_said(value)} for {name} on rank {rank}, and {_said(expected)} in one process: "
                f"{counted(len(tensors), 'tensor')}, {named_ranks(ranks)}",
            )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


def _said(value: Any) -> str:
    if isinstance(value, list):
        return "(" + ", ".join(map(_said, value)) + ")"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def of_buffers(sides: Sides) -> Iterator[Said]:
    """Running statistics, tables, masks: their sums. Integers may say which shard a rank has, so they may differ."""
    near = BUFFER_WIDE if sides.is_wide else BUFFER
    right: dict[str, dict[str, Any]] = {}
    for step in reversed(sides.right.steps):
        right |= step.buffers
    for name, wanted in right.items():
        found = [step.buffers[name] for step in sides.ours.steps if name in step.buffers]
        if not wanted["floating"] or any(buffer["shape"] != wanted["shape"] for buffer in found):
            continue  # the second is cut, in a way that the program did not tell
        margin = near * max(wanted["size"], 1e-6)
        if any(not abs(one[key] - wanted[key]) <= margin for one in found for key in ("sum", "signed")):
            sums = ", ".join(f"{one['sum']:.6g}" for one in found)
            yield (
                "buffer",
                f"{name} adds up to {wanted['sum']:.6g} in one process, and to {sums} on the ranks: of a rank's own "
                "batch, cast, never filled, or in a different order",
            )
            return


def buffers_not_compared(sides: Sides) -> list[str]:
    """Buffers that only one of the runs has, that are cut, or whose integers differ."""
    ours = {name: buffer for step in sides.ours.steps for name, buffer in step.buffers.items()}
    right = {name: buffer for step in sides.right.steps for name, buffer in step.buffers.items()}
    found = sorted(ours.keys() ^ right.keys())
    for name in sorted(ours.keys() & right.keys()):
        integers = not right[name]["floating"] and ours[name]["signed"] != right[name]["signed"]
        if integers or ours[name]["shape"] != right[name]["shape"]:
            found.append(name)
    return found
