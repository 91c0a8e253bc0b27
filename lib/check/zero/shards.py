"""Chapter 04, shards of one tensor: exercises 04.1 and 04.3."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lib import comm
from lib.check.exercise import Data, Exercise, Mistake, random, several
from lib.mesh import Group

# ---- 04.1 shard -----------------------------------------------------------------------------------------------------

ZEROS, NOT_ZEROS = "zeros", "not zeros"


def _tensors_inputs(generator: torch.Generator, n: int) -> list[Data]:
    # n divides the first; the second needs padding; of the third, the last rank gets nothing but padding.
    shapes = ((2 * n, 3), (5, 7), (n + 1,))
    return [{"tensors": [random(generator, *shape) for shape in shapes]} for _ in range(n)]


def _name(x: Tensor, what: str = "the part") -> str:
    return f"x of shape {list(x.shape)}: {what}"


def _numbers(x: Tensor, rank: int, n: int) -> int:
    """How many of this rank's ceil(S/n) places hold numbers of x."""
    size = ceil(x.numel() / n)
    return min(max(x.numel() - rank * size, 0), size)


def _shard(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for x in given["tensors"]:
        part, unshard = several(answer(x.clone(), group), 2)
        size, numbers = ceil(x.numel() / group.size), _numbers(x, group.rank, group.size)
        fits = torch.is_tensor(part) and part.shape == (size,)
        found[_name(x)] = part[:numbers] if fits else part
        found[_name(x, "its padding")] = ZEROS if fits and not part[numbers:].any() else NOT_ZEROS
        if comm.all_reduce(torch.tensor(int(fits and callable(unshard))), group, "min"):
            # What an optimizer might do to a shard. The padding changes, too, and nobody may see it.
            found[_name(x, "what unshard returns")] = unshard(1 - 2 * part)
    return found


def _parts(cut: Callable[[Tensor, int, int], Tensor], back: Callable | None = None, zeros: str = ZEROS) -> Callable:
    """Each rank's part is cut(x, its number, n); then `back` makes what comes out of all ranks' changed x."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        n, found = len(given), [{} for _ in given]
        for tensors in zip(*(g["tensors"] for g in given), strict=True):
            changed = torch.cat([1 - 2 * _even(x, r, n) for r, x in enumerate(tensors)])
            for r, x in enumerate(tensors):
                found[r][_name(x)] = cut(x, r, n)
                if back is not None:
                    found[r][_name(x, "its padding")] = zeros if len(cut(x, r, n)) < ceil(x.numel() / n) else ZEROS
                    found[r][_name(x, "what unshard returns")] = back(changed, x)
        return found

    return answers


def _even(x: Tensor, r: int, n: int) -> Tensor:
    size = ceil(x.numel() / n)
    return pad(x.flatten(), (0, n * size - x.numel()))[r * size : (r + 1) * size]


def _without_padding(x: Tensor, r: int, n: int) -> Tensor:
    return _even(x, r, n)[: _numbers(x, r, n)]


def _one_more(x: Tensor, r: int, n: int) -> Tensor:
    """Cut after n - S % n zeros, which are n where nothing is left over."""
    part = pad(x.flatten(), (0, n - x.numel() % n)).chunk(n)[r]
    return part[: _numbers(x, r, n)] if x.numel() % n else part


def _shaped(changed: Tensor, x: Tensor) -> Tensor:
    return changed[: x.numel()].view(x.shape)


SHARD = Exercise(
    id="04.1",
    title="shard",
    points=2,
    body=_shard,
    inputs=_tensors_inputs,
    reference=_parts(_without_padding, _shaped),
    mistakes=(
        Mistake(
            "The last elements have no owner: you cut k // n for each rank, and k % n of them are left over. Add "
            "zeros until n divides the size, then cut.",
            _parts(lambda x, r, n: x.flatten()[r * (x.numel() // n) :][: x.numel() // n]),
        ),
        Mistake(
            "Nothing is lost, but the shards have different sizes, and an all-gather needs equal sizes. Add zeros at "
            "the end until n divides the size; each shard then has ceil(k/n) elements.",
            _parts(lambda x, r, n: x.flatten().tensor_split(n)[r]),
        ),
        Mistake(
            "Rank r has every n-th element, beginning with element r. A shard is contiguous: rank r has the elements "
            "from r·k/n on, so that the shards side by side give the tensor.",
            _parts(lambda x, r, n: pad(x.flatten(), (0, -x.numel() % n))[r::n][: _numbers(x, r, n)]),
        ),
        Mistake(
            "The zeros come first. Put them at the end: then all elements keep their positions.",
            _parts(lambda x, r, n: pad(x.flatten(), (-x.numel() % n, 0)).chunk(n)[r][: _numbers(x, r, n)]),
        ),
        Mistake(
            "You add n zeros where n divides the size already. The padding is -k % n, here 0; n - k % n is n.",
            _parts(_one_more),
        ),
        Mistake(
            "The shards are right, but the padding is not zero. It counts in every norm of the shard: use zeros.",
            _parts(_without_padding, _shaped, NOT_ZEROS),
        ),
        Mistake(
            "The shards are right, and unshard returns the padding with the tensor. Only the first k elements belong "
            "to the tensor: cut the rest off, then restore the shape.",
            _parts(_without_padding, lambda changed, x: changed),
        ),
        Mistake(
            "The shards are right, and unshard returns the right elements, flat. Restore the shape of x.",
            _parts(_without_padding, lambda changed, x: changed[: x.numel()].clone()),
        ),
        Mistake(
            "The shards are right, but unshard returns the old x. It must all-gather the shards that it is called "
            "with: the optimizer changed them.",
            _parts(_without_padding, lambda changed, x: x),
        ),
    ),
)

# ---- 04.3 clip ------------------------------------------------------------------------------------------------------

SCALED_UP = (
    "You scale small gradients up. Clipping shortens gradients longer than max_norm and does not change the rest: "
    "the factor is at most 1."
)
NOT_IN_PLACE = (
    "The norm is right, and nothing is scaled. Change the tensors in place, as with x.mul_(factor); x = x * "
    "factor makes a new tensor and leaves the old."
)
_MAX_NORM = 1.5
_CASES = ("a large gradient", "a small one")


def _norms_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Each rank's shards, and what all ranks have alike; the norm is far above _MAX_NORM, then far below it."""
    shapes = ((5,), (3, 2))
    alike = [random(generator, 4), random(generator, 1)]
    # Of other sizes on each rank, as an embedding's gradient is beside a bias's.
    own = [[(r + 1) * random(generator, *shape) for shape in shapes] for r in range(n)]
    return [
        {
            case: {"shards": [scale * x for x in shards], "replicated": [scale * x for x in alike]}
            for case, scale in zip(_CASES, (1, 0.01), strict=True)
        }
        for shards in own
    ]


def _clip(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for case, gradients in given.items():
        shards, replicated = ([x.clone() for x in gradients[name]] for name in ("shards", "replicated"))
        norm = answer(shards, replicated, _MAX_NORM, group)
        found |= {f"{case}: the norm": norm, f"{case}: shards": shards, f"{case}: replicated": replicated}
    return found


def _squares(gradients: list[Tensor]) -> Tensor:
    return torch.stack([(x * x).sum() for x in gradients]).sum()


def _joint(squares: list[Tensor], alike: Tensor, rank: int) -> Tensor:
    """The norm, from each rank's sum of squares and that of what all have."""
    return (torch.stack(squares).sum() + alike).sqrt()


def _at_most(norm: Tensor) -> Tensor:
    return (_MAX_NORM / norm).clamp(max=1)


def _clipped(
    norm_of: Callable[[list[Tensor], Tensor, int], Tensor] = _joint,
    scale: Callable[[Tensor], Tensor] | float = _at_most,
    replicated_too: bool = True,
) -> Callable:
    """What comes of a norm, computed by `norm_of`, and of a factor made of that."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found: list[Data] = [{} for _ in given]
        for case in _CASES:
            squares = [_squares(g[case]["shards"]) for g in given]
            for rank, g in enumerate(given):
                alike = g[case]["replicated"]
                norm = norm_of(squares, _squares(alike), rank)
                factor = scale(norm) if callable(scale) else scale
                found[rank] |= {
                    f"{case}: the norm": norm.item(),
                    f"{case}: shards": [factor * x for x in g[case]["shards"]],
                    f"{case}: replicated": [factor * x if replicated_too else x for x in alike],
                }
        return found

    return answers


CLIP = Exercise(
    id="04.3",
    title="clip",
    points=2,
    body=_clip,
    inputs=_norms_inputs,
    reference=_clipped(),
    mistakes=(
        Mistake(
            "Each rank clips by the norm of its shards alone. Their factors differ, and the gradient changes its "
            "direction. Add the squares up over the ranks, one all-reduce of one number.",
            _clipped(lambda squares, alike, rank: (squares[rank] + alike).sqrt()),
        ),
        Mistake(
            "You added the norms of the ranks. Norms of shards do not add up, their squares do: all-reduce the sum of "
            "the squares, then take the root.",
            _clipped(lambda squares, alike, rank: torch.stack([(s + alike).sqrt() for s in squares]).sum()),
        ),
        Mistake(
            "`replicated` is in your norm n times, once for each rank. Add the squares of the shards up over the "
            "ranks, and then the squares of `replicated` once.",
            _clipped(lambda squares, alike, rank: (torch.stack(squares).sum() + len(squares) * alike).sqrt()),
        ),
        Mistake(
            "`replicated` is not in your norm. It belongs to the same gradient.",
            _clipped(lambda squares, alike, rank: torch.stack(squares).sum().sqrt()),
        ),
        Mistake(
            'You averaged the squares over the ranks, so the norm is too small. Squares add up: op="sum".',
            _clipped(lambda squares, alike, rank: (torch.stack(squares).mean() + alike).sqrt()),
        ),
        Mistake(
            "You return the square of the norm. Take the root.",
            _clipped(lambda squares, alike, rank: torch.stack(squares).sum() + alike),
        ),
        Mistake(
            SCALED_UP,
            _clipped(scale=lambda norm: _MAX_NORM / norm),
        ),
        Mistake(
            NOT_IN_PLACE,
            _clipped(scale=1.0),
        ),
        Mistake(
            "The shards are clipped, `replicated` is not. The same factor scales the full gradient.",
            _clipped(replicated_too=False),
        ),
    ),
)

EXERCISES = (SHARD, CLIP)
