"""04.4: accumulate gradients of microbatches under ZeRO-2, in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

from course.check.exercise import Data, Exercise, Mistake, random, whole
from course.check.listen import listen
from lib import comm
from lib.mesh import Group

M = 5  # microbatches; no number of ranks, so that a factor identifies a mistake
SIZE = 40  # elements of a shard: many compared with a count
EACH = "one reduce-scatter for each microbatch, as it comes"
AFTERWARDS, LATE = "everything after the last microbatch", "a microbatch later than it could"
ALL_REDUCED = "as much as with all-reduces"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    def microbatch() -> tuple[Tensor, int]:
        count = whole(generator, 1, 30)
        return random(generator, SIZE * n) * count, count

    return [{"microbatches": [microbatch() for _ in range(M)]} for _ in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    made = 0  # backwards that have run
    sent_at: set[int] = set()  # how many had run when a gradient, or a shard of one, was sent
    (first, _), known_bytes = given["microbatches"][0], 0.0

    def backward() -> Iterator[tuple[Tensor, int]]:
        nonlocal made
        for gradient, count in given["microbatches"]:
            made += 1
            yield gradient.clone(), count
        made += 1  # the end

    def note() -> None:
        nonlocal known_bytes
        before, known_bytes = known_bytes, heard.sent_bytes(group.size)
        if known_bytes - before > first.nbytes / group.size / 2:  # not a count
            sent_at.add(made)

    heard = listen(on_start=note)
    shard = answer(backward(), group)
    halves = heard.sent_bytes(group.size) / ((group.size - 1) / group.size * first.nbytes)
    return {"shard": shard, "what was sent": describe(sorted(sent_at), halves)}


def describe(sent_at: list[int], halves: float) -> str:
    """From when gradients were sent, and how many halves of an all-reduce that is, with the counts."""
    if sent_at == [M + 1]:
        return AFTERWARDS
    if halves > 1.5 * M:
        return ALL_REDUCED
    if sent_at == list(range(1, M + 1)):
        return EACH
    if sent_at == list(range(2, M + 2)):
        return LATE
    return f"gradients leave after {', '.join(map(str, sent_at)) or 'none'} of {M} microbatches"


def reference(given: list[Data]) -> list[Data]:
    pairs = [pair for g in given for pair in g["microbatches"]]
    mean = sum(gradient for gradient, _ in pairs) / sum(count for _, count in pairs)
    return [{"shard": shard, "what was sent": EACH} for shard in mean.chunk(len(given))]


# ---- programs -------------------------------------------------------------------------------------------------------


def by_all_tokens(shard, counts, group):
    return shard / comm.all_reduce(torch.tensor(sum(counts)), group)


def by_microbatches(shard, counts, group):
    return shard / len(counts)


def accumulate(
    microbatches,
    group,
    scaled=lambda g, count, group: g,
    reduce=comm.reduce_scatter,
    add=torch.add,
    late=False,
    mean=by_all_tokens,
):
    """With `late`, a gradient waits until the next gradient exists."""
    shard, counts, waiting = torch.zeros((), dtype=torch.float64), [], []
    for gradient, count in microbatches:
        waiting.append((gradient, count))
        counts.append(count)
        if len(waiting) > late:
            shard = add(shard, reduce(scaled(*waiting.pop(0), group), group))
    for one in waiting:
        shard = add(shard, reduce(scaled(*one, group), group))
    return mean(shard, counts, group)


def accumulate_in_the_background(microbatches, group):
    in_flight, counts = [], []
    for gradient, count in microbatches:
        in_flight.append(comm.reduce_scatter_start(gradient, group))
        counts.append(count)
    total = comm.all_reduce(torch.tensor(float(sum(counts)), dtype=torch.float64), group)
    return torch.stack([pending.wait() for pending in in_flight]).sum(0) / total


def accumulate_by_torch_distributed(microbatches, group):
    shard, total = 0, torch.zeros((), dtype=torch.int64)
    for gradient, count in microbatches:
        got, count = torch.empty_like(gradient), torch.tensor(count)
        dist.all_to_all_single(got, gradient)
        dist.all_reduce(count)
        shard, total = shard + got.view(group.size, -1).sum(0), total + count
    return shard / total


def accumulate_by_messages(microbatches, group):
    shard, tokens = 0, 0
    for gradient, count in microbatches:
        parts = dict(enumerate(gradient.chunk(group.size)))
        shard, tokens = shard + parts.pop(group.rank), tokens + count
        shard = shard + sum(comm.exchange(parts, parts, group).wait().values())
    return shard / comm.all_reduce(torch.tensor(tokens), group)


def mean_of_the_means_of_ranks(microbatches, group):
    """Each rank divides by its own tokens. It counts them first, so it keeps the list."""
    pairs = list(microbatches)
    own = sum(count for _, count in pairs)
    return sum(comm.reduce_scatter(g / own, group, op="mean") for g, _ in pairs)


def reduced_at_the_end(microbatches, group):
    gradients, counts = zip(*microbatches, strict=True)
    return by_all_tokens(comm.reduce_scatter(torch.stack(gradients).sum(0), group), counts, group)


def all_reduced(gradient, group):
    return comm.all_reduce(gradient, group).chunk(group.size)[group.rank]


EXERCISE = Exercise(
    id="04.4",
    title="accumulate_shard",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(accumulate, accumulate_in_the_background, accumulate_by_messages, accumulate_by_torch_distributed),
    mistakes=(
        Mistake(
            "You divided the sum over all ranks by this rank's own tokens, so the shards differ in scale. All-reduce "
            "the count as well.",
            partial(accumulate, mean=lambda shard, counts, group: shard / sum(counts)),
            about=("shard",),
        ),
        Mistake(
            "You divided each rank's gradients by that rank's tokens and averaged over the ranks. On a rank with few "
            "tokens each counts too much: divide once, by the count of all ranks.",
            mean_of_the_means_of_ranks,
            about=("shard",),
        ),
        Mistake(
            "You return the mean of the means of the microbatches: a token in a short one counts too much. Add up "
            "sums and counts, and divide once, at the end.",
            partial(accumulate, scaled=lambda g, count, group: g / count / group.size, mean=by_microbatches),
            about=("shard",),
        ),
        Mistake(
            "You divided each microbatch by its own tokens on all ranks, and averaged those means: a token in a short "
            "one counts too much. Divide once, after the last, by the count of all.",
            partial(
                accumulate,
                scaled=lambda g, count, group: g / comm.all_reduce(torch.tensor(count), group),
                mean=by_microbatches,
            ),
            about=("shard",),
        ),
        Mistake(
            "Your shard holds the last microbatch alone: you replaced it where you should add to it.",
            partial(accumulate, add=lambda shard, new: new),
            about=("shard",),
        ),
        Mistake(
            "You return the sum over all tokens. Divide it by their number.",
            partial(accumulate, mean=lambda shard, counts, group: shard),
            about=("shard",),
        ),
        Mistake(
            "Your shard is n times too small: the reduce-scatter took the mean over the n ranks. Add up sums here, "
            "and divide by the count.",
            partial(accumulate, reduce=partial(comm.reduce_scatter, op="mean")),
            about=("shard",),
        ),
        Mistake(
            "The shard is right, but you keep full gradients until the last microbatch and reduce then. That sends "
            "fewer bytes, and takes the memory that ZeRO-2 saves.",
            reduced_at_the_end,
        ),
        Mistake(
            "The shard is right, but you send twice the bytes needed: an all-reduce gives every rank the sum of all "
            "shards. A reduce-scatter gives each its own.",
            partial(accumulate, reduce=all_reduced),
        ),
        Mistake(
            "The shard is right, but each gradient is still held when the next one is made. Start its reduce-scatter "
            "before you take more from the iterator.",
            partial(accumulate, late=True),
        ),
    ),
)
