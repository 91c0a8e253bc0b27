"""Parameters side by side, in one tensor that n ranks share out evenly.

The problem: to share a model's state out over n ranks, somebody must own each number. Whole parameters cannot be shared
evenly: one rank gets the embedding, another a bias.
The idea: forget where parameters begin. Lay them side by side in one flat tensor, add zeros until n divides its length,
and cut it into n equal pieces, wherever the cuts may fall:

    whole    [ p0     | p1 | p2           | p3  | 0 0 ]     S numbers, a multiple of n
    shards   [ rank 0     | rank 1      | rank 2      ]     S/n numbers each

What a rank owns of parameter i is the overlap of p_i with its shard: all of it, some of it, or nothing. That suits
every optimizer that treats each number by itself, as SGD and Adam do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lib.clip import scale_to_norm
from lib.mesh import Group

Shards = Sequence[Tensor]
MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]

_ONE = torch.ones([], dtype=torch.float64)


class Flat:
    """Some parameters, and this rank's shard of them.

    To `BucketedDDP` it is a bucket: `take` lays a gradient into its place, `missing` says which have not come.

    Args:
        named: the parameters, by name; of one dtype and device.
        group: the ranks that share them.
        dtype: of `whole`, to compute in. Where it is not the parameters' own, the exact numbers live on in `exact`,
            sharded, for the optimizer to work on: master weights.
        gradients_stay: so that `shard.grad` may be a view into `whole.grad`. Otherwise p.grad ends with `take`.
        whole_stays: so that `shard` is a view into `whole`. Otherwise a rank has no more than its shard, until
            somebody gives `whole` its memory (`lib/data_parallel/fsdp.py`).

    Attributes:
        whole: [S], parameters side by side; `whole.grad` all their gradients, while they are there.
        shard: [S/n], this rank's, in `dtype`; `shard.grad` its gradient, averaged over the ranks.
        exact: [S/n], the same in the parameters' own dtype; the same tensor if that is `dtype`.
        pieces: name → what `exact` holds of that parameter, flat: what the optimizer gets.
        where: name → (slice of the flattened parameter, slice of the shard) of that piece.
        padding: numbers at the end that belong to nobody; always 0.

    Raises:
        ValueError: parameters on different devices or of different dtypes.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        group: Group,
        dtype: torch.dtype | None = None,
        gradients_stay: bool = True,
        whole_stays: bool = True,
    ) -> None:
        _check_alike(named)
        self.names, self.params = list(named), list(named.values())
        first, n = self.params[0], group.size
        self._sizes = [p.numel() for p in self.params]
        size = -(-sum(self._sizes) // n)
        self.mine = slice(group.rank * size, (group.rank + 1) * size)
        self.padding = n * size - sum(self._sizes)
        self.gradients_stay = gradients_stay
        self.missing = set(range(len(self.params)))  # no gradient yet

        like = {"dtype": dtype or first.dtype, "device": first.device}
        make = torch.zeros if whole_stays else torch.empty
        whole = make(n * size, **like)
        shard = whole[self.mine] if whole_stays else torch.zeros(size, **like)
        self.views = self.cut(whole)
        if not whole_stays:
            whole.untyped_storage().resize_(0)
        self.whole = nn.Parameter(whole, requires_grad=False)
        self.shard = nn.Parameter(shard, requires_grad=False)
        own = shard.dtype == first.dtype
        self.exact = shard if own else torch.zeros(size, dtype=first.dtype, device=shard.device)
        self.where = self._overlaps()
        self.pieces = {name: nn.Parameter(self.exact[here]) for name, (_, here) in self.where.items()}
        self._grad_views: list[Tensor] = []

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Views into flat[S], one of each parameter's shape."""
        pieces = flat[: sum(self._sizes)].split(self._sizes)
        return [x.view(p.shape) for p, x in zip(self.params, pieces, strict=True)]

    def _overlaps(self) -> dict[str, tuple[slice, slice]]:
        """Name → what is mine of the parameter, and where in my shard that is."""
        overlaps, start = {}, 0
        for name, size in zip(self.names, self._sizes, strict=True):
            low = max(start, self.mine.start)
            high = min(start + size, self.mine.stop)
            if low < high:
                overlaps[name] = (
                    slice(low - start, high - start),
                    slice(low - self.mine.start, high - self.mine.start),
                )
            start += size
        return overlaps

    @torch.no_grad()
    def load(self, name: str, values: Tensor) -> None:
        """Take what is mine of a whole parameter."""
        if name in self.pieces:
            there, here = self.where[name]
            self.exact[here] = values.reshape(-1)[there]
            self.shard[here] = self.exact[here]

    # ---- gradients --------------------------------------------------------------------------------------------------

    def take(self, i: int, scale: Tensor) -> None:
        """Lay gradient i into its place, scaled on the way."""
        if self.whole.grad is None:
            self.whole.grad = torch.empty_like(self.whole)
            self.whole.grad[len(self.whole) - self.padding :] = 0
            self._grad_views = self.cut(self.whole.grad)
        p, view = self.params[i], self._grad_views[i]
        torch.mul(p.grad, scale, out=view)
        p.grad = view if self.gradients_stay else None

    def keep(self, i: int) -> None:
        """Let gradient i grow further, as more microbatches come."""
        if self.gradients_stay and (not self._grad_views or self.params[i].grad is not self._grad_views[i]):
            self.take(i, _ONE)

    def give_away(self) -> Tensor:
        """All gradients, [S], for whoever sums them over the ranks; nothing here holds them any longer."""
        gradients, self.whole.grad, self._grad_views = self.whole.grad, None, []
        return gradients

    # ---- the optimizer's step ---------------------------------------------------------------------------------------

    def lend(self) -> None:
        """Give each piece its gradient, in the optimizer's precision."""
        gradient = self.shard.grad.to(self.exact.dtype)
        trained = {name for name, p in zip(self.names, self.params, strict=True) if p.requires_grad}
        for name, (_, here) in self.where.items():  # one that was frozen since stays where it is
            self.pieces[name].grad = gradient[here] if name in trained else None

    @torch.no_grad()
    def settle(self) -> None:
        """After the step: the gradients are used up, and the shard follows its exact copy."""
        for p in (*self.params, *self.pieces.values(), self.shard):
            p.grad = None
        if self.exact.dtype != self.shard.dtype:
            self.shard.copy_(self.exact)


def _check_alike(named: dict[str, nn.Parameter]) -> None:
    kinds: dict[str, list[str]] = {}
    for name, p in named.items():
        kinds.setdefault(f"{str(p.dtype)[6:]} on {p.device}", []).append(name)
    if len(kinds) > 1:
        found = "; ".join(f"{kind} ({names[0]}, {len(names)} in all)" for kind, names in kinds.items())
        raise ValueError(
            f"parameters that are sharded together must be of one dtype and on one device, but these are {found}"
        )


# ---- what can be done with pieces ------------------------------------------------------------------------------------


@torch.no_grad()
def clip_shards(shards: Shards, group: Group, max_norm: float) -> Tensor:
    """Scale gradients so that the norm over all ranks is at most `max_norm`.

    The squares are added up over the group, one all-reduce of a single number. Without it each rank would have a norm
    of its own, and scale by another factor.

    Args:
        shards: gradients of which this rank holds some; scaled in place.

    Returns:
        The norm that it was, [].
    """
    mine = torch.stack([_square_of_norm(shard) for shard in shards]).sum()
    return scale_to_norm(shards, mine, group, max_norm)


def _square_of_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) ** 2


def check_elementwise(optimizer: MakeOptimizer, name: str) -> None:
    """Try the optimizer on a small matrix, and on its two halves, flat: the steps must be the same.

    Raises:
        ValueError: they are not, or it refuses: it needs whole parameters.
    """
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 4, 6, generator=generator)
    whole = nn.Parameter(start.clone())
    halves = [nn.Parameter(half.clone()) for half in start.flatten().split(12)]
    try:
        each = [optimizer([(name, one)]) for one in (whole, *halves)]  # halves are on different ranks
        for gradient in gradients:
            whole.grad = gradient
            for half, part in zip(halves, gradient.flatten().split(12), strict=True):
                half.grad = part
            for one in each:
                one.step()
        same = torch.allclose(whole.detach().flatten(), torch.cat([half.detach() for half in halves]), rtol=1e-5)
        why = "its steps on two halves of a matrix are not its step on the matrix"
    except Exception as error:  # whatever another library's optimizer raises
        same, why = False, f"it says: {error}"
    if not same:
        raise ValueError(
            f"this optimizer cannot work on pieces of parameters ({why}); use one that treats each number by itself, "
            "such as SGD, Adam or AdamW"
        )
