"""04.2: ZeRO-1 in bfloat16 with float32 master weights, in torch.distributed itself."""

from math import ceil

import torch
from torch import distributed as dist
from torch.nn.functional import pad

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, MORE, everywhere, shards_of
from course.check.kept import kept_bytes
from course.check.listen import Heard, listen, raw

SETTINGS = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1}  # with this eps a factor n shows
STEPS = 4
LEAST = 2e-6  # from a tie: ten times as far as the float32 weights of two right programs may differ
ANEW = "weights after step 1 of another run, with an empty `kept`"
STATE, CALLS = "kept", "calls"  # not judged: they identify mistakes
FACTS = {"memory": AS_NEEDED, "what was sent": AS_NEEDED}


def inputs(generator, n):
    """Numbers with which all right programs agree to the last bit.

    Sums and means of these gradients are exact in bfloat16, in any order. No master weight comes near the middle
    between two numbers of bfloat16, where the last bit of a float32 would determine the rounding. Moments that are
    rounded to bfloat16 change a weight.
    """
    size = 10 * n + 2
    while True:
        weights = torch.randn(size, generator=generator).bfloat16()
        gradients = torch.randint(-15, 16, (n, STEPS, size), generator=generator) * n / 16
        given = [{"weights": weights, "gradients": list(mine)} for mine in gradients.bfloat16()]
        right, rounded = masters(given), masters(given, torch.bfloat16)
        shows = any((a.bfloat16() != b.bfloat16()).any() for a, b in zip(right, rounded, strict=True))
        if shows and all(distance_to_a_tie(w) > LEAST for w in right):
            return given


def distance_to_a_tie(x):
    """Of the nearest element; a weight near zero is near a tie, because numbers of bfloat16 are dense there."""
    spacing = torch.exp2(x.abs().log2().floor() - 7)
    return (((x.abs() / spacing) % 1 - 0.5).abs() * spacing).min().item()


def masters(given, of_moments=torch.float32):
    """The float32 weights after each step of one process, which keeps its moments in this dtype."""
    found, w = [], given[0]["weights"].float()
    m = v = torch.zeros_like(w)
    for t, gradients in enumerate(zip(*(g["gradients"] for g in given), strict=True), 1):
        w, m, v = adamw(w, m, v, t, torch.stack(gradients).float().mean(0), SETTINGS)
        m, v = m.to(of_moments), v.to(of_moments)
        found.append(w)
    return found


def adamw(w, m, v, t, gradient, settings):
    """Weights and moments after step t."""
    lr, (beta1, beta2), eps, decay = settings.values()
    m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
    w = w * (1 - lr * decay)
    return w - lr * m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps), m, v


@raw
def body(answer, group, given):
    heard, weights, kept, found = listen(), given["weights"].clone(), {}, {}
    size = ceil(len(weights) / group.size)
    for k, gradient in enumerate(given["gradients"], 1):
        weights = answer(weights, gradient.clone(), kept, dict(SETTINGS))
        fits = torch.is_tensor(weights) and (weights.shape, weights.dtype) == (gradient.shape, gradient.dtype)
        found |= {f"dtype after step {k}": str(getattr(weights, "dtype", None)), f"weights after step {k}": weights}
        if not fits:  # the next step could not begin
            return found
        found[f"weights after step {k}"] = weights.detach().clone()
    found |= state(kept, size) | sent(heard, size, group.size)
    begun = answer(given["weights"].clone(), given["gradients"][0].clone(), {}, dict(SETTINGS))
    return found | {ANEW: begun.detach().clone() if torch.is_tensor(begun) else begun}


def state(kept, size):
    """In shards, at most 4 of float32: master weights, two moments, and perhaps the gradient."""
    shards = {dtype: round(n_bytes / dtype.itemsize / size) for dtype, n_bytes in kept_bytes(kept).items()}
    float32 = sum(count * dtype.itemsize / 4 for dtype, count in shards.items() if dtype.itemsize >= 4)
    return {"memory": MORE if float32 > 4 else AS_NEEDED, STATE: str(sorted(shards.items(), key=str))}


def sent(heard, size, n):
    """In halves of an all-reduce of the padded gradient."""
    half = 2 * STEPS * (n - 1) * size
    kinds = {kind: Heard(calls=[call for call in heard.calls if call[0] == kind]) for kind, _ in heard.calls}
    calls = [f"{kind} {of.sent_bytes(n) / half:.1f}" for kind, of in kinds.items()]
    return {"what was sent": heard.amount(n, 2.001 * half), CALLS: ", ".join(calls)}


def reference(given):
    right = {}
    for k, weights in enumerate(masters(given), 1):
        right |= {f"weights after step {k}": weights.bfloat16(), f"dtype after step {k}": "torch.bfloat16"}
    return everywhere(right | {ANEW: right["weights after step 1"]}, given)


def zero1_step(weights, gradient, kept, settings):
    n, rank, k = dist.get_world_size(), dist.get_rank(), len(weights)

    def shards(x):
        return list(pad(x, (0, -k % n)).chunk(n))

    if not kept:
        master = torch.nn.Parameter(shards(weights)[rank].float())
        optimizer = torch.optim.AdamW([master], **settings)
        kept.update(master=master, optimizer=optimizer)
    total = torch.empty_like(shards(gradient)[rank])
    dist.reduce_scatter(total, shards(gradient))
    kept["master"].grad = total.float() / n
    kept["optimizer"].step()
    new = kept["master"].detach().bfloat16()
    parts = [torch.empty_like(new) for _ in range(n)]
    dist.all_gather(parts, new)
    return torch.cat(parts)[:k]


def by_owners(weights, gradient, kept, settings):
    """A reduce to each owner, and a broadcast from it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    shards = [shard.clone() for shard in shards_of(gradient, n)]
    for owner, shard in enumerate(shards):
        dist.reduce(shard, dst=owner)
    if not kept:
        kept["master"] = shards_of(weights, n)[rank].float().requires_grad_()
        kept["optimizer"] = torch.optim.AdamW([kept["master"]], **settings)
    kept["master"].grad = shards[rank].float() / n
    kept["optimizer"].step()
    parts = [kept["master"].detach().bfloat16() for _ in shards]
    for owner, part in enumerate(parts):
        dist.broadcast(part, src=owner)
    return torch.cat(parts)[: len(weights)]


def by_hand(keep):
    """AdamW without torch.optim, with what `keep` leaves of its state; gradients are added in float32."""

    def step(weights, gradient, kept, settings):
        n = dist.get_world_size()
        padded = torch.cat(shards_of(gradient, n))
        got = torch.empty_like(padded)
        dist.all_to_all_single(got, padded)
        mine = shards_of(weights, n)[dist.get_rank()].float()
        w, m, v, t = kept.get("state", (mine, 0 * mine, 0 * mine, 0))
        w, m, v = adamw(mine if w is None else w, m, v, t + 1, got.view(n, -1).float().mean(0), settings)
        kept["state"] = keep(w, m, v, t + 1)
        parts = [torch.empty_like(w, dtype=torch.bfloat16) for _ in range(n)]
        dist.all_gather(parts, w.bfloat16())
        return weights.copy_(torch.cat(parts)[: len(weights)])

    return step


def in_another_dict(kept):
    return lambda weights, gradient, _, settings: zero1_step(weights, gradient, kept, settings)


MISTAKES = """
in dtype, weights:
[torch.empty_like(new) for _ in range(n)] => [new if r == rank else old for r, old in enumerate(shards(weights))]
dist.all_gather(parts, new) =>
    Each rank stepped its own shard and has old shards of the others.
        All-gather the stepped shards.
dist.all_gather(parts, new) => dist.all_gather(parts, shards(weights)[rank])
torch.cat(parts)[:k] => torch.cat([*parts[:rank], new, *parts[rank + 1 :]])[:k]
    Each rank has the others' shards of the previous step.
        Gather after the step, so that its result is sent.
torch.cat(parts)[:k] => weights
    You return the old weights.
        Gather the new tensors that the step made.
kept["optimizer"].step() => new = kept["master"].bfloat16().detach()
new = kept["master"].detach().bfloat16() => kept["optimizer"].step()
    The weights are one step behind: you gather the master weights before the step.
        Gather what the step made.
torch.cat(parts)[:k] => new
    You return this rank's shard alone.
        All-gather the shards, and join them.
[torch.empty_like(new) for _ in range(n)] => [torch.empty_like(new)] * n
    All shards are the last rank's. `[t] * n` is n times the same tensor, and each shard overwrites the one before.
        Make n tensors, as with [torch.empty_like(t) for _ in range(n)].
in dtype: .detach().bfloat16() => .detach()
    You return the weights in float32. The model computes in bfloat16.
        Convert the master weights, then gather them.
torch.cat(parts)[:k] => torch.cat(parts)
    You return the padding with the weights.
        Only the first k elements are weights.
pad(x, (0, -k % n)) => x[: k - k % n]
torch.cat(parts)[:k] => torch.cat([*parts, weights[k - k % n :]])
    The last weights never change: you cut k // n elements for each rank, and k % n of them have no owner.
        Pad weights and gradient with zeros until n divides their length.
pad(x, (0, -k % n)) => x[: k - k % n]
    The last weights are missing: you cut k // n elements for each rank, and k % n of them have no owner.
        Pad weights and gradient with zeros until n divides their length, and return the first k elements.
shards(weights)[rank] => weights[rank * (k // n) :][: len(shards(weights)[0])]
    The shard of the weights and the shard of the gradient are different elements: the weights are cut at multiples of k
    // n, the gradient at multiples of ceil(k / n).
        Pad both, then cut both in the same way.
shards(weights)[rank] => shards(weights)[0]
    Every rank stepped the first shard of the weights.
        Rank r owns shard r.
total.float() / n => total.float()
    You stepped with the sum of the gradients over the n ranks. AdamW nearly hides that, but not where eps is large, and
    a clip or a log of the norm does not.
        Divide by n.
total.float() / n => total.float() / n / n
    You divided by n twice.
        ReduceOp.AVG divides already.
total.float() / n => shards(gradient)[rank].float()
    Each rank stepped its shard with its own gradient alone.
        A reduce-scatter gives it the sum over ranks.
in kept:
shards(weights)[rank].float() => shards(weights)[rank].clone()
total.float() / n => total / n
or shards(weights)[rank].float() => shards(weights)[rank]
total.float() / n => total / n
or by_hand(lambda w, m, v, t: (None, m.bfloat16(), v.bfloat16(), t))
    You step in bfloat16, without master weights: an update much smaller than a weight is rounded off.
        In the first step convert this rank's shard to float32. Keep that copy and step it.
by_hand(lambda w, m, v, t: (w, m.bfloat16(), v.bfloat16(), t))
    The moments are in bfloat16, where a small change in a step is rounded off.
        Keep them in float32.
in dtype, weights:
by_hand(lambda w, m, v, t: (None, m, v, t))
    Each step begins at weights that are rounded to bfloat16, and loses the rounding error.
        Convert them to float32 only in the first step; keep that copy in `kept` and step it.
if not kept: => if True:
    Every step is a first step: it begins at the rounded weights, with moments at zero. Fill `kept` in the first step
    alone (`if not kept:`).
        `kept = {...}` makes a different dict, which the next step does not get.
torch.optim.AdamW => torch.optim.Adam
    This is Adam, which adds the weight decay to the gradient.
        AdamW takes it from the weights.
**settings => lr=settings["lr"]
    You take `lr` from `settings` alone.
        Pass all of it: torch.optim.AdamW([master], **settings).
kept["optimizer"].step() => torch.optim.AdamW([kept["master"]], **settings).step()
    The moments begin at zero in each step.
        Make the optimizer in the first step, and keep it in `kept`.
by_hand(lambda w, m, v, t: (w, m, v, 0))
    Every step corrects the moments as if it were the first.
        Keep the number of steps in `kept`.
in all:
in_another_dict({})
    The steps are right, but their state is not in `kept`: another run, which begins with an empty dict, goes on with
    the state of this one.
        Put all that the next step needs into `kept`, and nothing into a global or an attribute of the function.
in memory, dtype, weights, kept:
shards(weights)[rank].float() => weights.float()
torch.empty_like(shards(gradient)[rank]) => gradient
dist.reduce_scatter(total, shards(gradient)) => dist.all_reduce(total)
torch.cat(parts)[:k] => new
    The weights are right, but each rank steps all of them and keeps the full optimizer state: ZeRO-1 then saves
    nothing.
        Keep master weights and moments of this rank's shard alone.
shards(weights)[rank].float() => shards(weights.float())[rank]
    The weights are right, but your float32 shard is a view of all weights in float32, and keeps them.
        Cut first.
in memory, dtype, weights: shards(weights)[rank].float() => shards(weights)[rank].double()
total.float() / n => total.double() / n
    The weights are right, but you keep more than float32 master weights and moments of this shard.
        Look at each tensor in `kept`, and at what it is a view of.
in what was sent, dtype, weights, calls:
total = torch.empty_like(shards(gradient)[rank]) => dist.all_reduce(gradient)
dist.reduce_scatter(total, shards(gradient)) => total = shards(gradient)[rank]
    The step is right, and you send 50% more than you need: an all-reduce gathers gradients that no rank uses.
        A reduce-scatter gives each rank the gradient of its shard.
.detach().bfloat16() => .detach()
torch.cat(parts)[:k] => torch.cat(parts)[:k].bfloat16()
    The step is right, but you gather weights in float32, twice the bytes.
        Convert to bfloat16 first.
torch.empty_like(shards(gradient)[rank]) => torch.empty_like(shards(gradient.float())[rank])
dist.reduce_scatter(total, shards(gradient)) => dist.reduce_scatter(total, shards(gradient.float()))
    The step is right, but you send gradients in float32, twice the bytes.
        Convert the shard that you get.
in what was sent, dtype, weights:
total = torch.empty_like(shards(gradient)[rank]) => of_ranks = [torch.empty_like(gradient) for _ in range(n)]
dist.reduce_scatter(total, shards(gradient)) => dist.all_gather(of_ranks, gradient)
total.float() / n => shards(sum(of_ranks).float() / n)[rank]
    The step is right, but you send more than a reduce-scatter and an all-gather, both in bfloat16.
        Look at the shape and the dtype of each tensor that you send.
"""

EXERCISE = exercise(globals(), points=4, right=(zero1_step, by_owners, by_hand(lambda *state: state)))
