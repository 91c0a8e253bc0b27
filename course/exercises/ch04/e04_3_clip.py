"""04.3: clip a gradient that is sharded in part."""

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, DTYPE, random, without_eps
from course.check.listen import listen
from lib import comm

MAX_NORM = 1.5
# The norm in units of MAX_NORM: also close to it, on both sides.
CASES = {"a large gradient": 20.0, "one slightly too long": 1.01, "one almost too long": 0.99, "a small one": 0.01}
FACTS = {"what was sent": AS_NEEDED}


def inputs(generator, n):
    replicated = [random(generator, 4), random(generator, 1)]
    # Larger on each rank than on the rank before it: gradients of an embedding and of a bias differ as much.
    shards = [[(r + 1) * random(generator, *shape) for shape in ((15,), (6, 5))] for r in range(n)]

    norm = sum(x.square().sum().item() for x in [*replicated, *sum(shards, [])]) ** 0.5

    def scaled(to, own):
        by = to * MAX_NORM / norm
        return {"shards": [by * x for x in own], "replicated": [by * x for x in replicated]}

    return [{case: scaled(to, own) for case, to in CASES.items()} for own in shards]


def body(answer, group, given):
    found, heard = {}, listen()
    for case, gradients in given.items():
        shards, replicated = ([x.clone() for x in gradients[name]] for name in ("shards", "replicated"))
        norm = one_number(answer(shards[:], replicated[:], MAX_NORM, group))
        found[f"{case}: the norm"] = norm
        for name, scaled in (("shards", shards), ("replicated", replicated)):
            factor = without_eps(scaled, gradients[name], norm, MAX_NORM)
            found[f"{case}: {name}"] = [factor * x for x in scaled]
    to_gather = (group.size - 1) * min(x.nbytes for one in given.values() for x in one["shards"])
    return found | {"what was sent": heard.amount(group.size, len(given) * to_gather / 2)}


def one_number(norm):
    """A tensor of one element in any shape counts as a number."""
    return norm.reshape(()) if torch.is_tensor(norm) and norm.numel() == 1 else norm


def reference(given):
    found = [{} for _ in given]
    for case in CASES:
        full = [*given[0][case]["replicated"], *(x for g in given for x in g[case]["shards"])]
        norm = sum(x.square().sum().item() for x in full) ** 0.5
        factor = min(1, MAX_NORM / norm)
        for of_rank, g in zip(found, given, strict=True):
            of_rank |= {f"{case}: {name}": [factor * x for x in xs] for name, xs in g[case].items()}
            of_rank[f"{case}: the norm"] = torch.tensor(norm, dtype=DTYPE)
    return found


def clip(shards, replicated, max_norm, group):
    squares = sum((x * x).sum() for x in shards)
    squares = comm.all_reduce(squares, group)
    squares = squares + sum((x * x).sum() for x in replicated)
    norm = squares.sqrt()
    if norm > max_norm:
        for x in (*shards, *replicated):
            x.mul_(max_norm / norm)
    return norm


def by_one_long_tensor(shards, replicated, max_norm, group):
    own = torch.cat([x.flatten() for x in shards])
    if group.rank == 0:  # replicated tensors are counted by one rank
        own = torch.cat([own, *(x.flatten() for x in replicated)])
    squares = own @ own
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    for x in (*shards, *replicated):
        x *= min(1, max_norm / norm)
    return norm


ALSO_RIGHT = """
max_norm / norm => max_norm / (norm + 1e-6)
    As torch.nn.utils.clip_grad_norm_ does.
norm = squares.sqrt() => norm = torch.stack([squares.sqrt()])
    A tensor of one element.
"""

MISTAKES = """
comm.all_reduce(squares, group) => squares
    Each rank clips by the norm of its shards alone. The factors differ, and the gradient changes its direction.
        Add the squares up over the ranks: comm.all_reduce returns the sum of all, and does not change its argument.
squares = comm.all_reduce(squares, group) =>
norm = squares.sqrt() => norm = comm.all_reduce(squares.sqrt(), group)
or squares = comm.all_reduce(squares, group) => norm = comm.all_reduce(squares.sqrt(), group)
norm = squares.sqrt() =>
or comm.all_reduce(squares, group) => comm.all_reduce(squares.sqrt(), group)
sum((x * x).sum() for x in replicated) => sum((x * x).sum() for x in replicated).sqrt()
norm = squares.sqrt() => norm = squares
or comm.all_reduce(squares, group) => comm.all_reduce(squares, group).sqrt()
sum((x * x).sum() for x in replicated) => sum((x * x).sum() for x in replicated).sqrt()
norm = squares.sqrt() => norm = squares
or comm.all_reduce(squares, group) => comm.all_reduce(squares.sqrt(), group) ** 2
    You added norms.
        Norms of parts do not add up, their squares do: all-reduce the sum of the squares of the shards, add the squares
        of `replicated`, then take the root.
squares = comm.all_reduce(squares, group) =>
norm = squares.sqrt() => norm = comm.all_reduce(squares, group).sqrt()
    `replicated` is in your norm n times, once per rank.
        Add up the shards' squares over the ranks, then its own once.
squares = squares + sum((x * x).sum() for x in replicated) =>
    `replicated` is not in your norm.
        It belongs to the same gradient.
comm.all_reduce(squares, group) => comm.all_reduce(squares, group, op="mean")
    You averaged the squares over the ranks, so the norm is too small.
        Squares add up: op="sum".
in the norm: norm = squares.sqrt() => norm = squares
    You return the square of the norm.
        Take the root.
if norm > max_norm: => if True:
    You scale small gradients up.
        Clipping only shortens gradients longer than max_norm: the factor is at most 1.
x.mul_(max_norm / norm) => x = x * max_norm / norm
or
for x in (*shards, *replicated): => for xs in (shards, replicated):
x.mul_(max_norm / norm) => xs[:] = [x * max_norm / norm for x in xs]
    The norm is right, and nothing is scaled: the given tensors are as before.
        Change tensors in place, x.mul_(factor); x = x * factor makes a new one, and so does a new entry of a list.
max_norm / norm => max_norm / squares
    You divided by the square of the norm: the gradients are then shorter than max_norm.
        The factor is max_norm / norm.
returns comm.all_reduce(sum((x * x).sum() for x in shards), group).add(sum((x * x).sum() for x in replicated)).sqrt()
    You return the norm after scaling.
        Keep the norm that you compare with max_norm.
=> (1 / norm)
    You scale to norm 1.
        Scale to max_norm: the factor is max_norm / norm.
for x in (*shards, *replicated): => for x in shards:
    The shards are clipped, `replicated` is not.
        The same factor scales the full gradient.
comm.all_reduce(squares, group) => sum(comm.all_gather(x.flatten(), group).square().sum() for x in shards)
    The norm is right, but you send far more than a few numbers: as many as a shard has, or more.
        One number is enough: the sum of squares.
"""

EXERCISE = exercise(globals(), points=2, right=(clip, by_one_long_tensor))
