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

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lib import comm
from lib.data_parallel.buckets import ONE
from lib.facts import Fact
from lib.mesh import Group

CONVERTED = (
    "{} converted or replaced after the model was wrapped (.to(), .double(), p.data = ...), so no step would reach it: "
    "convert the model first, then wrap it"
)
MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]


class Flat:
    """Some parameters, and this rank's shard of them.

    To `Gradients` it is a bucket: `take` lays a gradient into its place, `missing` says which have not come, `send`
    starts a reduce-scatter.

    Args:
        named: the parameters, by name; of one dtype and device.
        group: the ranks that share them.
        dtype: of `whole`, to compute in. Where it is not the parameters' own, the optimizer works on `master`, sharded,
            in their own precision: master weights.
        gradients_stay: so that `shard.grad` may be a view into `whole.grad`. Otherwise p.grad ends with `take`, and
            sums are added to `shard.grad` as they come.
        whole_stays: so that `shard` is a view into `whole`. Otherwise a rank has no more than its shard, until
            somebody gives `whole` its memory (`lib/data_parallel/fsdp.py`).

    Attributes:
        whole: [S], parameters side by side; `whole.grad` all their gradients, while they are there.
        shard: [S/n], this rank's, in `dtype`; `shard.grad` its gradient, summed over the ranks.
        master: [S/n], the same in the parameters' own dtype; the same tensor if that is `dtype`.
        pieces: name → what `master` holds of that parameter, flat: what the optimizer gets.
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
        self.names, self.params, self.group = list(named), list(named.values()), group
        first, n = self.params[0], group.size
        self._sizes = [p.numel() for p in self.params]
        size = -(-sum(self._sizes) // n)
        self.mine = slice(group.rank * size, (group.rank + 1) * size)
        self.padding = n * size - sum(self._sizes)
        self.gradients_stay, self.whole_stays = gradients_stay, whole_stays
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
        self.master = shard if own else torch.zeros(size, dtype=first.dtype, device=shard.device)
        self.where = self._overlaps()
        self.pieces = {name: nn.Parameter(self.master[here]) for name, (_, here) in self.where.items()}
        self._grad_views: list[Tensor] = []

    @classmethod
    @torch.no_grad()
    def around(cls, facts: Sequence[Fact], dtype: torch.dtype | None, gradients_stay: bool) -> Flat:
        """Parameters that stay where they are used, as views into one flat tensor."""
        named = {fact.name: fact.parameter for fact in facts}
        flat = cls(named, facts[0].sum_over, dtype, gradients_stay)
        for name, p, view in zip(flat.names, flat.params, flat.views, strict=True):
            flat.load(name, p)
            p.data = view.copy_(p)
        return flat

    def check_in_place(self) -> None:
        """Raises RuntimeError where a parameter is no longer the one that lies here."""
        for name, p, view in zip(self.names, self.params, self.views, strict=True):
            if p.dtype != view.dtype or self.whole_stays and p.data_ptr() != view.data_ptr():
                raise RuntimeError(CONVERTED.format(f"{name} was"))

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
            self.master[here] = values.reshape(-1)[there]
            self.shard[here] = self.master[here]

    def collect(self) -> dict[str, Tensor]:
        """The parameters, whole and in full precision; all ranks of the group must call it."""
        return dict(zip(self.names, self.cut(comm.all_gather(self.master, self.group)), strict=True))

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
            self.take(i, ONE)

    def send(self, group: Group) -> comm.Pending:
        """Start the sum: this rank's part of it.

        Where gradients stay, it ends in its own place.
        """
        if self.gradients_stay:
            gradients, mine = self.whole.grad, self.whole.grad[self.mine]
            return comm.reduce_scatter_start(gradients, group, out=mine)
        released = self.release_gradients()
        reduced = comm.reduce_scatter_start(released, group)

        def add() -> None:
            part, so_far = reduced.wait(), self.shard.grad
            both = part if so_far is None else so_far.add_(part)
            self.shard.grad = both

        return comm.Pending(add, reduced.record)

    def release_gradients(self) -> Tensor:
        """All gradients, [S], for whoever sums them over the ranks; nothing here holds them any longer."""
        gradients, self.whole.grad, self._grad_views = self.whole.grad, None, []
        return gradients

    def summed(self) -> None:
        """The sum is there: `shard.grad`."""
        if self.gradients_stay:
            self.shard.grad = self.whole.grad[self.mine]
            for p in self.params:
                p.grad = None

    def has_sum(self) -> bool:
        """After `summed`: whether the sum is there still; a step, or giving up, ends that state."""
        return True

    def drop(self) -> None:
        """The step is given up."""
        self.shard.grad = None
        if not self.gradients_stay:
            self.release_gradients()

    def held(self, facts: dict[int, Fact]) -> Iterator[tuple[Tensor | None, Callable[[], Tensor]]]:
        """This rank's part of the gradients, and how its square is counted."""
        own, owners = [facts[id(p)] for p in self.params], self.group.size
        if all(isinstance(fact.held_by, int) and fact.held_by == own[0].held_by for fact in own):
            yield self.shard.grad, lambda: own[0].square(self.shard.grad, owners=owners)
            return
        for name, fact in zip(self.names, own, strict=True):
            if name in self.where:
                there, here = self.where[name]
                g = self.shard.grad[here]
                yield g, lambda fact=fact, g=g, there=there: fact.square(g, there, owners)

    # ---- the optimizer's step ---------------------------------------------------------------------------------------

    def named_pieces(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer gets of each parameter: an empty piece where nothing is mine.

        So groups of parameters are the same on all ranks, and none is empty because of where the cuts fell.
        """
        for name in self.names:
            yield name, self.pieces[name] if name in self.pieces else nn.Parameter(self.master[:0])

    def gradients_to_pieces(self) -> None:
        """Before the step: each piece gets its gradient, in the optimizer's precision."""
        if self.master.dtype != self.shard.dtype:
            self._take_over_what_was_written()
        gradient = self.shard.grad.to(self.master.dtype)
        trained = {name for name, p in zip(self.names, self.params, strict=True) if p.requires_grad}
        for name, (_, here) in self.where.items():  # one that was frozen since stays where it is
            self.pieces[name].grad = gradient[here] if name in trained else None

    @torch.no_grad()
    def _take_over_what_was_written(self) -> None:
        """Whoever has loaded or clamped parameters since the last step means the master copy, too."""
        written = self.shard != self.master.to(self.shard.dtype)
        self.master[written] = self.shard[written].to(self.master.dtype)

    @torch.no_grad()
    def after_step(self) -> None:
        """The gradients are used up, and the shard follows its master copy."""
        for p in (*self.params, *self.pieces.values(), self.shard):
            p.grad = None
        if self.master.dtype != self.shard.dtype:
            self.shard.copy_(self.master)

    def gather(self) -> comm.Pending:
        """Start to fill `whole` with everybody's shards."""
        return comm.all_gather_start(self.shard, self.group, out=self.whole)

    def publish(self) -> comm.Pending | None:
        """Let every rank see the new parameters; where no rank keeps them, whoever needs them gathers them."""
        return self.gather() if self.whole_stays else None


def _check_alike(named: dict[str, nn.Parameter]) -> None:
    kinds: dict[str, list[str]] = {}
    for name, p in named.items():
        kinds.setdefault(f"{str(p.dtype)[6:]} on {p.device}", []).append(name)
    if len(kinds) > 1:
        found = "; ".join(f"{kind} ({names[0]}, {len(names)} in all)" for kind, names in kinds.items())
        raise ValueError(
            f"parameters that are sharded together must be of one dtype and on one device, but these are {found}"
        )
