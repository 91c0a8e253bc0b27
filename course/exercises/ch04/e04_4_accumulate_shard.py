"""04.4: accumulate gradients of microbatches under ZeRO-2, in shards."""

import gc
import time
from itertools import chain, pairwise

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import random, whole
from course.check.listen import listen
from lib import comm

M = 5  # microbatches; no number of ranks, so that a factor identifies a mistake
SIZE = 40  # elements of a shard: many compared with a count
NEVER = M + 2  # no backward: a message is not waited for
EACH = "one reduce-scatter for each microbatch, as it comes"
KEPT, CONSTANT = "what is kept from pair to pair", "as much after the last as after the second"
FACTS = {"what was sent": EACH, KEPT: CONSTANT}


def inputs(generator, n):
    counts = [[whole(generator, 1, 30) for _ in range(M)] for _ in range(n)]
    return [{"microbatches": [(random(generator, SIZE * n) * count, count) for count in mine]} for mine in counts]


def body(answer, group, given):
    made = 0  # backwards that have run
    sent_at = set()  # how many had run when a gradient, or a shard of one, was sent
    (first, _), known_bytes = given["microbatches"][0], 0.0

    kept = []  # after each backward, when the next is asked for: the bytes of tensors, and how many calls are in flight

    def backward():
        nonlocal made
        for gradient, count in given["microbatches"]:
            made += 1
            yield gradient.clone(), count
            kept.append((new_bytes(kept[-1][0] if kept else 0), heard.unfinished))
        made += 1  # the end

    def note(call):
        nonlocal known_bytes
        before, known_bytes = known_bytes, heard.sent_bytes(group.size)
        if known_bytes - before > first.nbytes / group.size / 2:  # not a count
            sent_at.add(made)

    heard = listen(on_start=note)
    gc.freeze()  # what is there already is not searched
    try:
        shard = answer(backward(), group)
    finally:
        gc.unfreeze()
    if heard.unfinished > 0:
        sent_at.add(NEVER)
    halves = heard.sent_bytes(group.size) / ((group.size - 1) / group.size * first.nbytes)
    return {
        "shard": shard,
        "what was sent": describe(sorted(sent_at), halves),
        KEPT: growth(kept, first.nbytes // group.size, group.size),
    }


def new_bytes(expected):
    """Of the tensors that were made since the answer began. gloo may hold one for a moment after its wait."""
    found = []
    while len(found) < 10 and min(found, default=expected + 1) > expected:
        gc.collect()
        storages = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        found.append(sum({one.data_ptr(): one.nbytes() for one in storages}.values()))
        del storages
        time.sleep(0.003)
    return min(found)


def growth(kept, size, n_shards):
    """How much more is kept after the last pair than after the second; `size` is the bytes of a shard."""
    if len(kept) < M:
        return "not all pairs were taken"
    (before, in_flight), (after, still) = kept[1], kept[-1]
    if still - in_flight == M - 2:
        return "each reduce-scatter stays in flight"
    if after - before > (M - 2.5) * n_shards * size:
        return "a full gradient more after each pair"
    return "a shard more after each pair" if after - before > (M - 2.5) * size else CONSTANT


def describe(sent_at, halves):
    """From when gradients were sent, and how many halves of an all-reduce that is, with the counts."""
    if NEVER in sent_at:
        return "not every message is waited for"
    if sent_at == [M + 1]:
        return "everything after the last microbatch"
    if halves > 1.5 * M:
        return f"{halves / M:.0f} times the bytes of a reduce-scatter for each microbatch"
    if sent_at == list(range(1, M + 1)):
        return EACH
    if sent_at == list(range(2, M + 2)):
        return "a microbatch later than it could"
    return f"gradients leave after {', '.join(map(str, sent_at)) or 'none'} of {M} microbatches"


def reference(given):
    pairs = [pair for g in given for pair in g["microbatches"]]
    mean = sum(gradient for gradient, _ in pairs) / sum(count for _, count in pairs)
    return [{"shard": shard} for shard in mean.chunk(len(given))]


def accumulate_shard(microbatches, group):
    shard, tokens = 0, 0
    for gradient_of_sum, count in microbatches:
        shard = shard + comm.reduce_scatter(gradient_of_sum, group)
        tokens += count
    return shard / comm.all_reduce(torch.tensor(tokens), group)


def shard_of(whole):
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def of_an_all_reduce(gradient):
    dist.all_reduce(gradient, async_op=True)
    return shard_of(gradient)


def in_the_background(microbatches, group, most=1):
    in_flight, counts, shard = [], [], 0
    for gradient, count in microbatches:
        in_flight.append(comm.reduce_scatter_start(gradient, group))
        if len(in_flight) > most:
            shard = shard + in_flight.pop(0).wait()
        counts.append(count)
    total = comm.all_reduce(torch.tensor(float(sum(counts)), dtype=torch.float64), group)
    return (shard + sum(pending.wait() for pending in in_flight)) / total


def all_in_the_background(microbatches, group):
    return in_the_background(microbatches, group, most=M)


def with_a_list_of_shards(microbatches, group):
    shards, counts = zip(*((comm.reduce_scatter(g, group), count) for g, count in microbatches), strict=True)
    return sum(shards) / comm.all_reduce(torch.tensor(sum(counts)), group)


def with_a_list_of_gradients(microbatches, group):
    gradients = []

    def noted():
        for gradient, count in microbatches:
            gradients.append(gradient)
            yield gradient, count

    return accumulate_shard(noted(), group)


def by_torch_distributed(microbatches, group):
    shard, total = 0, torch.zeros((), dtype=torch.int64)
    for gradient, count in microbatches:
        got, count = torch.empty_like(gradient), torch.tensor(count)
        dist.all_to_all_single(got, gradient)
        dist.all_reduce(count)
        shard, total = shard + got.view(group.size, -1).sum(0), total + count
    return shard / total


def by_messages(microbatches, group):
    shard, tokens = 0, 0
    for gradient, count in microbatches:
        parts = dict(enumerate(gradient.chunk(group.size)))
        shard, tokens = shard + parts.pop(group.rank), tokens + count
        shard = shard + sum(comm.exchange(parts, parts, group).wait().values())
    return shard / comm.all_reduce(torch.tensor(tokens), group)


MISTAKES = """
in shard:
comm.all_reduce(torch.tensor(tokens), group) => tokens
    You divided the sum over all ranks by this rank's own tokens: shards differ in scale.
        All-reduce the count as well.
comm.reduce_scatter(gradient_of_sum, group) => gradient_of_sum
shard / comm.all_reduce(torch.tensor(tokens), group) => comm.reduce_scatter(shard / tokens, group, op="mean")
    You divided each rank's gradients by that rank's tokens and averaged over the ranks. On a rank with few tokens each
    counts too much.
        Divide once, by the count of all ranks.
(gradient_of_sum, group) => (gradient_of_sum / count, group, op="mean")
tokens += count => tokens += 1
comm.all_reduce(torch.tensor(tokens), group) => tokens
    You return the mean of the microbatches' means: few tokens count too much.
        Add up sums and counts, and divide once.
(gradient_of_sum, group) => (gradient_of_sum / comm.all_reduce(torch.tensor(count), group), group)
tokens += count => tokens += 1
comm.all_reduce(torch.tensor(tokens), group) => tokens
    You divided each microbatch by its own tokens on all ranks, and averaged those means: a token in a short one counts
    too much.
        Divide once, after the last, by the count of all.
shard = shard + comm => shard = comm
    Your shard holds the last microbatch alone.
        You replaced it where you should add to it.
shard / comm.all_reduce(torch.tensor(tokens), group) => shard
    You return the sum over all tokens.
        Divide it by their number.
comm.reduce_scatter(gradient_of_sum, group) => comm.reduce_scatter(gradient_of_sum, group, op="mean")
    Your shard is n times too small: the reduce-scatter took a mean.
        Add up sums here, and divide by the count.
comm.all_reduce(torch.tensor(tokens), group) => (comm.all_reduce(torch.tensor(tokens), group) / group.size)
    Your shard is n times too large: you divided by the mean of the ranks' counts.
        Divide by their sum.
returns comm.all_gather(result, group)
    You return the full gradient: under ZeRO-2 each rank keeps its shard alone.
        Return the [k/n] elements of this rank.
in what was sent:
comm.reduce_scatter(gradient_of_sum, group) => of_an_all_reduce(gradient_of_sum)
    Not every message is waited for: its tensor may be read while bytes still arrive.
        Call wait() before you add the shard.
in all:
comm.reduce_scatter(gradient_of_sum, group) => gradient_of_sum
return shard => return comm.reduce_scatter(shard, group)
    The shard is right, but you keep full gradients until the last microbatch and reduce then.
        That sends fewer bytes, and takes the memory that ZeRO-2 saves.
comm.reduce_scatter(gradient_of_sum, group) => comm.all_reduce(gradient_of_sum, group).chunk(group.size)[group.rank]
    The shard is right, but you send twice the bytes, as an all-reduce does: it gives every rank every sum.
        Use a reduce-scatter.
comm.reduce_scatter(gradient_of_sum, group) => shard_of(comm.all_gather(gradient_of_sum[None], group).sum(0))
    The shard is right, but you send n times the bytes: an all-gather gives every rank every full gradient.
        Use a reduce-scatter.
all_in_the_background
    The shard is right, but you wait for all reduce-scatters at the end. Until its wait, each needs its full gradient
    and its result: that takes the memory that ZeRO-2 saves.
        Wait for one when you have started the next, and add its shard to the sum.
with_a_list_of_shards
    The shard is right, but you keep the shards of all microbatches until the end: m shards of k/n elements, more than a
    full gradient if m is above n.
        Add each to the sum when it comes.
with_a_list_of_gradients
    The shard is right, but you keep the full gradients of all microbatches, although each has been sent.
        Keep nothing of a gradient but this rank's shard of the sum.
in microbatches => in (pair for pair, _ in pairwise(chain(microbatches, [None])))
    The shard is right, but each gradient is held when the next is made.
        Reduce-scatter it before you take more.
"""

EXERCISE = exercise(
    globals(), points=3, right=(accumulate_shard, in_the_background, by_messages, by_torch_distributed)
)
