"""Parameters side by side in one flat tensor, which n ranks shard.

The problem: full parameters cannot be distributed evenly over n ranks: one gets the embedding, another a bias.
The idea: ignore their boundaries. Put them side by side in one flat tensor, add zeros until n divides its length, and
cut it into n equal shards:

    whole    [ p0     | p1 | p2           | p3  | 0 0 ]     S elements, a multiple of n
    shards   [ rank 0     | rank 1      | rank 2      ]     S/n elements each

A rank owns the overlap of parameter i with its shard: all of it, some of it, or nothing. This suits every elementwise
optimizer, such as SGD and Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lib import comm
from lib.data_parallel.placeholders import CONVERTED, GRADIENT_OF_A_SHARD, Placeholders
from lib.facts import Fact
from lib.mesh import Group
from lib.placement import parameter_like

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]


class Flat:
    """Some parameters, and this rank's shard of them; for `Gradients` a bucket, whose `send` is a reduce-scatter.

    Args:
        named: the parameters, by name; of one dtype and device.
        group: the ranks that shard them.
        dtype: dtype of `whole`, for computing; complex parameters keep theirs. If it differs from the parameters'
            dtype, the optimizer steps `master`, a shard in the original precision: master weights.
        gradients_stay: keep all gradients, with `shard.grad` a view into `whole.grad`. Otherwise `take` frees p.grad,
            and sums are added to `shard.grad`.
        whole_stays: keep all parameters, with `shard` a view into `whole`. Otherwise a rank holds only its shard until
            `whole` is unsharded (`lib/data_parallel/fsdp.py`).

    Attributes:
        whole: [S], parameters side by side; `whole.grad` their gradients, while they are allocated.
        shard: [S/n], this rank's shard in `dtype`; `shard.grad` its gradient, summed over the ranks.
        master: [S/n], the shard in the parameters' original dtype; the same tensor as `shard` if that is `dtype`.
        stepped: name → the part of that parameter in `master`, flat, for the optimizer; perhaps empty, so that groups
            are the same on all ranks. It has the attributes that the user set on the parameter.
        pieces: those of them that are not empty.
        where: name → (slice of the flattened parameter, slice of the shard) of that piece.
        padding: elements at the end that belong to no parameter; always 0.

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
        self._used = slice(0, min(size, max(0, sum(self._sizes) - self.mine.start)))  # of the shard, without padding
        self.gradients_stay, self.whole_stays = gradients_stay, whole_stays
        self.missing = set(range(len(self.params)))  # no gradient yet

        like = {"dtype": dtype if dtype and not first.is_complex() else first.dtype, "device": first.device}
        make = torch.zeros if whole_stays else torch.empty
        whole = make(n * size, **like)
        shard = whole[self.mine] if whole_stays else torch.zeros(size, **like)
        self.views = self.cut(whole)
        if not whole_stays:
            whole.untyped_storage().resize_(0)
        self.whole = nn.Parameter(whole, requires_grad=False)
        self.shard = nn.Parameter(shard, requires_grad=False)
        self.has_master = shard.dtype != first.dtype
        self.master = torch.zeros(size, dtype=first.dtype, device=shard.device) if self.has_master else shard
        self.where = self._overlaps()
        self.stepped = {name: self._piece(name, p) for name, p in named.items()}
        self.pieces = {name: self.stepped[name] for name in self.where}
        self._grad_views: list[Tensor] = []
        self.away = Placeholders(self.params, self.names, GRADIENT_OF_A_SHARD, self.shard)
        # An optimizer clears gradients that are still in p.grad through these.
        memory = self.master.new_empty(1)
        self._of_pieces = Placeholders([*self.stepped.values()], self.names, GRADIENT_OF_A_SHARD, memory)
        memory.untyped_storage().resize_(0)  # autograd never adds to them

    @classmethod
    @torch.no_grad()
    def around(cls, facts: Sequence[Fact], dtype: torch.dtype | None, gradients_stay: bool) -> Flat:
        """A flat whose parameters stay in the module, as views into one flat tensor."""
        named = {fact.name: fact.parameter for fact in facts}
        flat = cls(named, facts[0].sum_over, dtype, gradients_stay)
        for name, p, view in zip(flat.names, flat.params, flat.views, strict=True):
            flat.load(name, p)
            p.data = view.copy_(p)
        return flat

    def _piece(self, name: str, p: nn.Parameter) -> nn.Parameter:
        """The part of a parameter that this rank steps."""
        _, here = self.where.get(name, (None, slice(0)))
        return parameter_like(p, self.master[here])

    def check_in_place(self) -> None:
        """Raise RuntimeError if a parameter was replaced and is no longer a view of this flat."""
        for name, p, view in zip(self.names, self.params, self.views, strict=True):
            if p.dtype != view.dtype or self.whole_stays and p.data_ptr() != view.data_ptr():
                raise RuntimeError(CONVERTED.format(f"{name} was"))

    def written(self) -> str:
        """Of gathered parameters: the name of one that is no longer as its shard, or ""."""
        for name, p, view in zip(self.names, self.params, self.views, strict=True):
            if p.data_ptr() != view.data_ptr():
                return name
        if self.shard.device.type != "cpu":  # reading values on a GPU would wait for it
            return ""
        gathered, own = self.whole[self.mine], self.shard.detach()
        for name, (_, here) in self.where.items():
            if not torch.equal(gathered[here].view(torch.uint8), own[here].view(torch.uint8)):  # a NaN is not equal
                return name
        return ""

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Views into flat[S], one per parameter, in its shape."""
        pieces = flat[: sum(self._sizes)].split(self._sizes)
        return [x.view(p.shape) for p, x in zip(self.params, pieces, strict=True)]

    def _overlaps(self) -> dict[str, tuple[slice, slice]]:
        """Name → this rank's slice of the flattened parameter, and its slice of the shard."""
        overlaps, ends, mine = {}, accumulate(self._sizes), self.mine
        for name, size, end in zip(self.names, self._sizes, ends, strict=True):
            start, low, high = end - size, max(end - size, mine.start), min(end, mine.stop)
            if low < high:
                overlaps[name] = slice(low - start, high - start), slice(low - mine.start, high - mine.start)
        return overlaps

    @torch.no_grad()
    def load(self, name: str, values: Tensor) -> None:
        """Copy this rank's slice of a full parameter into the shard."""
        if name in self.pieces:
            there, here = self.where[name]
            self.master[here] = values.reshape(-1)[there]
            self.shard[here] = self.master[here]
        increment_version(self.params[self.names.index(name)])  # as in after_step

    def collect(self) -> dict[str, Tensor]:
        """All-gather the parameters in full precision; all ranks of the group must call it."""
        return dict(zip(self.names, self.cut(comm.all_gather(self.master, self.group)), strict=True))

    # ---- gradients --------------------------------------------------------------------------------------------------

    def holds_sum(self, i: int) -> bool:
        """Whether gradient i was summed, or is in flight, and was neither used nor cleared."""
        return i in self.away.placed

    def reopen(self, i: int, scale: Tensor, is_kept: bool) -> None:
        """Prepare for further gradients of a parameter; they will be multiplied by `scale` and summed.

        The sum can wait in `shard.grad` if further gradients are sent immediately. If not, this rank's piece of it
        returns to p.grad: clearing p.grad then clears all of it.

        Args:
            is_kept: the next gradient stays in p.grad.
        """
        self.away.remove(i)
        if not (is_kept or self.gradients_stay):
            return
        p, name = self.params[i], self.names[i]
        p.grad = self.shard.new_zeros(p.shape)
        if name in self.where:
            there, here = self.where[name]
            p.grad.view(-1)[there] = self.shard.grad[here] / scale.to(p.grad.dtype)
            self.shard.grad[here] = 0

    def take(self, i: int, scale: Tensor) -> None:
        """Copy gradient i to its place, multiplied by `scale`."""
        torch.mul(self.params[i].grad, scale, out=self._place_of(i))
        self._leaves(i)

    def take_nothing(self, i: int, counts: bool = True) -> None:
        """Send zeros for gradient i: the parameter is not used on this rank, and perhaps on others.

        If no rank `counts` them, the parameter has no gradient.
        """
        self._place_of(i).zero_()
        if counts:
            self._leaves(i)

    def keep(self, i: int) -> None:
        """Keep gradient i, to which later microbatches add."""
        p = self.params[i]
        if self.gradients_stay and p.grad is not self._place_of(i):
            p.grad = self._place_of(i).copy_(p.grad)
        self._of_pieces.place(i)

    def _leaves(self, i: int) -> None:
        """Gradient i is no longer in p.grad."""
        self.away.place(i)
        self._of_pieces.place(i)

    def _place_of(self, i: int) -> Tensor:
        """The place of gradient i in `whole.grad`, which is allocated if needed."""
        if self.whole.grad is None:
            self.whole.grad = torch.empty_like(self.whole)
            self.whole.grad[len(self.whole) - self.padding :] = 0
            self._grad_views = self.cut(self.whole.grad)
        return self._grad_views[i]

    def send(self, group: Group) -> comm.Pending:
        """Start the reduce-scatter of the gradients; if they stay, its result is a slice of them."""
        stay, own = self.gradients_stay, self.whole.grad[self.mine] if self.gradients_stay else None
        reduced = comm.reduce_scatter_start(self.whole.grad if stay else self.release_gradients(), group, out=own)

        def arrive() -> None:
            part, so_far = reduced.wait(), self.shard.grad
            self.shard.grad = part if stay or so_far is None else so_far.add_(part)

        return comm.Pending(arrive, reduced.record)

    def release_gradients(self) -> Tensor:
        """Return all gradients, [S], and drop the reference to them."""
        gradients, self.whole.grad, self._grad_views = self.whole.grad, None, []
        return gradients

    def has_sum(self) -> bool:
        return True  # forget_cleared() drops what was cleared

    def held(self) -> set[int]:
        """Gradients that have a placeholder, in p.grad or in the optimizer."""
        return self.away.placed | self._of_pieces.placed

    def gone(self) -> set[int]:
        """Those that the user dropped, by `p.grad = None` or through the optimizer."""
        return self.away.gone() | self._of_pieces.gone()

    def zeroed(self) -> set[int]:
        """Those that the user set to zero, in p.grad or through the optimizer."""
        return (self.away.zeroed() | self._of_pieces.zeroed()) - self.gone()

    def zero(self, some: set[int]) -> None:
        """Set some gradients to zero, and what was summed of them."""
        for i in some:
            if i in self.away.placed:
                self.away.place(i)
            elif self.params[i].grad is not None:
                self.params[i].grad.zero_()
            self._of_pieces.place(i)
            self._zero_sum(i)

    def _zero_sum(self, i: int) -> None:
        if self.shard.grad is not None and self.names[i] in self.where:
            _, here = self.where[self.names[i]]
            self.shard.grad[here] = 0  # also a NaN

    def drop(self, some: set[int]) -> None:
        """Drop some gradients."""
        for i in list(some):
            if i not in self.away.placed:
                self.params[i].grad = None  # it was still here
            self.away.remove(i)
            self._of_pieces.remove(i)
            self._zero_sum(i)
        if not self.held():
            self.shard.grad = None
            if not self.gradients_stay:
                self.release_gradients()

    def squares(self, facts: dict[int, Fact]) -> Iterator[tuple[Tensor, Tensor]]:
        own, owners = [facts[id(p)] for p in self.params], self.group.size
        if self.shard.grad is None:
            return
        gradient = self.shard.grad[self._used]  # scaled by NaN, the padding would not be 0
        if all(isinstance(fact.held_by, int) and fact.held_by == own[0].held_by for fact in own):
            yield gradient, own[0].square(gradient, owners=owners)
            return
        for name, fact in zip(self.names, own, strict=True):
            if name in self.where:
                there, here = self.where[name]
                yield gradient[here], fact.square(gradient[here], there, owners)

    # ---- the optimizer's step ---------------------------------------------------------------------------------------

    def gradients_to_pieces(self) -> None:
        """Give each piece its gradient, in the precision of the optimizer, before the step."""
        self.settle()
        self.hide_pieces()
        if self.shard.grad is None:  # all were cleared
            return
        gradient = self.shard.grad.to(self.master.dtype)
        for i, name in enumerate(self.names):
            if i in self.away.placed and name in self.where:  # a parameter that was frozen since keeps its value
                _, here = self.where[name]
                self.pieces[name].grad = gradient[here]

    def hide_pieces(self) -> None:
        """Take the placeholders away: the optimizer skips pieces without a gradient."""
        self._of_pieces.remove_all()

    @torch.no_grad()
    def settle(self) -> None:
        """Copy parameters that were loaded or clamped since the last step to the master weights.

        An element that equals its rounded master was not written: the master keeps its precision.
        """
        if self.has_master:
            written = self.shard != self.master.to(self.shard.dtype)
            self.master[written] = self.shard[written].to(self.master.dtype)

    def after_step(self) -> None:
        """Free the used gradients, and copy the master weights to the shard."""
        self.away.remove_all()
        for p in (*self.params, *self.pieces.values(), self.shard):
            p.grad = None
        self.copy_master()

    @torch.no_grad()
    def copy_master(self) -> None:
        """Copy the master weights to the shard, rounded."""
        if self.has_master:
            self.shard.copy_(self.master)
        # Autograd does not see what an all-gather writes: a backward through the old values shall fail.
        increment_version([p for p in self.params if p.requires_grad])

    def publish(self) -> comm.Pending:
        """Start to all-gather the shards into `whole`, which is allocated."""
        return comm.all_gather_start(self.shard, self.group, out=self.whole)


def _check_alike(named: dict[str, nn.Parameter]) -> None:
    kinds: dict[str, list[str]] = {}
    for name, p in named.items():
        kinds.setdefault(f"{str(p.dtype)[6:]} on {p.device}", []).append(name)
    if len(kinds) > 1:
        listed = "; ".join(f"{kind} ({names[0]}, {len(names)} in all)" for kind, names in kinds.items())
        raise ValueError(f"parameters sharded together must have one dtype and one device, but these are {listed}")
