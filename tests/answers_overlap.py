"""Answers to the exercises of `overlap`: right ones, and one for each mistake that has a name."""

import torch
import torch.distributed as dist

from lib import comm


def in_buckets(
    gradients,
    bucket_bytes,
    group,
    op="mean",
    last="sent",
    when="full",
    wait="end",
    room=None,
    start=comm.all_reduce_start,
):
    """The answer to 03.3, with a place for each mistake."""
    if when == "end":
        gradients = iter(list(gradients))
    room = bucket_bytes if room is None else room
    done, bucket, held = [], [], 0

    def send():
        nonlocal bucket, held
        pending = start(torch.cat([g.flatten() for g in bucket]), group, op=op)
        if wait == "at once":
            pending.wait()
        done.append((bucket, pending))
        bucket, held = [], 0

    for g in gradients:
        size = g.numel() * 8
        if bucket and held + size > room and when != "overrun":
            send()
        bucket.append(g)
        held += size
        if held >= room and when != "lazy":
            send()
    if bucket and last == "sent":
        send()
    out = []
    for sent, pending in done:
        out += [x.view_as(g) for x, g in zip(pending.wait().split([g.numel() for g in sent]), sent, strict=True)]
    return out + (bucket if last == "own" else [])


def right_buckets(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group)


def right_buckets_lazily(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, when="lazy")


def right_buckets_by_torch_distributed(gradients, bucket_bytes, group):
    class Started:
        def __init__(self, flat):
            self.flat, self.work = flat, dist.all_reduce(flat, async_op=True)

        def wait(self):
            self.work.wait()
            return self.flat / dist.get_world_size()

    return in_buckets(gradients, bucket_bytes, group, start=lambda flat, group, op: Started(flat))


def at_the_end(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, when="end")


def waits_at_once(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, wait="at once")


def one_each(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, room=1)


def overruns(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, when="overrun")


def forgets_to_return(gradients, bucket_bytes, group):
    in_buckets(gradients, bucket_bytes, group)


def starts_each_a_bucket_late(gradients, bucket_bytes, group):
    full = []

    class Started:
        def __init__(self, flat):
            self.flat, self.pending = flat, None
            for other in full:
                other.begin()
            full.append(self)

        def begin(self):
            self.pending = self.pending or comm.all_reduce_start(self.flat, group, op="mean")

        def wait(self):
            self.begin()
            return self.pending.wait()

    return in_buckets(gradients, bucket_bytes, group, start=lambda flat, group, op: Started(flat))


def fills_buckets_too_little(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, room=bucket_bytes * 5 // 6)


def drops_the_last(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, last="dropped")


def keeps_the_last(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, last="own")


def sums_buckets(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group, op="sum")


def reverses(gradients, bucket_bytes, group):
    return in_buckets(gradients, bucket_bytes, group)[::-1]


def accumulate(model, microbatches, loss_fn, group, divide=1.0, op="mean", each_time=False):
    for i, (x, y) in enumerate(microbatches):
        (loss_fn(model(x), y) / divide).backward()
        if each_time or i == len(microbatches) - 1:
            for p in model.parameters():
                p.grad = comm.all_reduce(p.grad, group, op=op)


def right_accumulate(model, microbatches, loss_fn, group):
    accumulate(model, microbatches, loss_fn, group, divide=len(microbatches))


def right_accumulate_in_one_message(model, microbatches, loss_fn, group):
    grads = None
    for x, y in microbatches:
        new = torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()))
        grads = new if grads is None else [a + b for a, b in zip(grads, new, strict=True)]
    flat = comm.all_reduce(torch.cat([g.flatten() for g in grads]), group, op="mean") / len(microbatches)
    for p, piece in zip(model.parameters(), flat.split([g.numel() for g in grads]), strict=True):
        p.grad = piece.view_as(p)


def forgets_microbatches(model, microbatches, loss_fn, group):
    accumulate(model, microbatches, loss_fn, group)


def sums_ranks(model, microbatches, loss_fn, group):
    accumulate(model, microbatches, loss_fn, group, divide=len(microbatches), op="sum")


def divides_by_microbatches_twice(model, microbatches, loss_fn, group):
    accumulate(model, microbatches, loss_fn, group, divide=len(microbatches) ** 2)


def divides_by_nothing(model, microbatches, loss_fn, group):
    accumulate(model, microbatches, loss_fn, group, op="sum")


def sends_each_time(model, microbatches, loss_fn, group):
    accumulate(model, microbatches, loss_fn, group, divide=len(microbatches), each_time=True)


def sends_one_flat_message_each_time(model, microbatches, loss_fn, group):
    params = list(model.parameters())
    for x, y in microbatches:
        (loss_fn(model(x), y) / len(microbatches)).backward()
        flat = comm.all_reduce(torch.cat([p.grad.flatten() for p in params]), group, op="mean")
        for p, piece in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = piece.view_as(p)


RIGHT = {
    "03.3": [right_buckets, right_buckets_lazily, right_buckets_by_torch_distributed],
    "03.4": [right_accumulate, right_accumulate_in_one_message],
}
WRONG = {  # in the order of the exercise's mistakes
    "03.3": [
        *(at_the_end, waits_at_once, one_each, overruns, starts_each_a_bucket_late),
        *(drops_the_last, keeps_the_last, sums_buckets, reverses),
    ],
    "03.4": [
        *(forgets_microbatches, sums_ranks, divides_by_microbatches_twice),
        *(divides_by_nothing, sends_each_time),
    ],
}
