"""A mixture of experts on one device: the serial twin.

The problem: a wider MLP holds more, and every token pays for all of it. The idea: E narrower MLPs, the *experts*, in
place of one. A *router*, one small matrix, scores them for each token; the k best compute it, and their outputs are
added, weighted by these scores. Parameters grow with E, computation with k.

A router prefers what it trained, and so trains one expert alone. Two remedies: a *balance loss*, small where loads are
even; or a *bias* per expert, which takes part in the choice but not in the weights, and moves after each step by the
load, without a gradient. With a *capacity*, an expert refuses the tokens that come after it is full; in training only.

Letters: N tokens, E experts, k of them per token, D width of the model, F width inside an expert, R rows: a token and
one of its choices. A batch has B sequences of T tokens.

Source: Shazeer et al., 2017, arXiv 1701.06538, section 2; Fedus et al. (Switch), 2021, arXiv 2101.03961, section 2.2
(balance loss, capacity); Wang et al., 2024, arXiv 2408.15664 (bias without a loss).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

BALANCE_OVER = ("batch", "sequence")
Act = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """The experts of a model, part of `GPTConfig`.

    Args:
        experts: experts of a block, E; 0: none.
        top_k: experts that compute a token, k.
        expert_every: every how many blocks have experts, the last of so many; the others have an MLP.
        d_expert: width inside an expert, F; None: the width of the MLP.
        d_shared: width of an MLP that computes every token, in addition to the experts; 0: none.
        renormalise: divide the k scores of a token by their sum.
        balance: weight of the balance loss, added to the loss once for each block; 0: none. Backward adds it, so where
            a loop multiplies the loss (a mean over microbatches, a GradScaler), multiply the weight too.
        balance_over: the tokens whose loads are balanced: of the whole batch, or of each sequence.
        bias_rate: by how much a step moves the bias of an expert, up if its load is below the mean; 0: no biases.
        capacity_factor: rows that an expert takes in training, as a multiple of the even load of the tokens here, so
            ranks and microbatches drop others than one process; None: all.

    Raises:
        ValueError: more experts per token than experts; a lone score divided by itself; an invalid number.
    """

    experts: int = 0
    top_k: int = 2
    expert_every: int = 1
    d_expert: int | None = None
    d_shared: int = 0
    renormalise: bool = True
    balance: float = 0.0
    balance_over: str = "batch"
    bias_rate: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("experts", 0), ("top_k", 1), ("expert_every", 1), ("d_expert", 1), ("d_shared", 0)):
            size = getattr(self, name)
            if name == "d_expert" and size is None:
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < least:
                raise ValueError(f"{name}={size!r} must be a whole number of at least {least}")
        if self.balance_over not in BALANCE_OVER:
            raise ValueError(f"balance_over={self.balance_over!r} must be one of {', '.join(BALANCE_OVER)}")
        if not isinstance(self.renormalise, bool):
            raise ValueError(f"renormalise={self.renormalise!r} must be True or False")
        for name in ("balance", "bias_rate"):
            if not (_is_number(value := getattr(self, name)) and 0 <= value < math.inf):
                raise ValueError(f"{name}={value!r} must be a number of at least 0, and finite")
        factor = self.capacity_factor
        if factor is not None and not (_is_number(factor) and 0 < factor < math.inf):
            raise ValueError(f"capacity_factor={factor!r} must be a number above 0, or None")
        if not self.experts:
            for setting in fields(ExpertOptions):
                if (value := getattr(self, setting.name)) != setting.default:
                    raise ValueError(f"{setting.name}={value} is for experts, and experts=0: use experts=4, or more")
            return
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} experts per token of experts={self.experts}: use at most as many")
        if self.top_k == 1 and self.renormalise:
            raise ValueError(
                "renormalise=True and top_k=1: a score divided by itself is 1, whatever the router says, so the router "
                "gets no gradient: use renormalise=False"
            )
        if self.balance_over != "batch" and not self.balance:
            raise ValueError(
                f"balance_over={self.balance_over} is of a balance loss, and balance=0: use balance=0.01"
            )

    @property
    def is_balanced(self) -> bool:
        """Whether a loss or a bias compares the loads of the experts."""
        return self.balance > 0 or self.bias_rate > 0

    def has_experts(self, layer: int) -> bool:
        """Whether this block, counted from 0, has experts."""
        return self.experts > 0 and (layer + 1) % self.expert_every == 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Routing(NamedTuple):
    """What a router says of tokens x[…, D].

    Args:
        scores: [..., E], positive, a sum of 1 for each token.
        chosen: [..., k], the numbers of the experts that compute a token, the best first.
        gates: [..., k], the weights of their outputs.
    """

    scores: Tensor
    chosen: Tensor
    gates: Tensor


class Router(nn.Module):
    """x[…, D] → scores, choices and weights of experts, in float32 at least.

    Attributes:
        bias: [E], added to the scores for the choice alone; a parameter without a gradient, so that it is saved. None
            without `bias_rate`.
        load: [E], tokens that chose each expert, of all backward passes since the last step.
    """

    full_precision = ("bias",)  # it moves by steps that half precision rounds away

    def __init__(self, options: ExpertOptions, d_model: int) -> None:
        super().__init__()
        self.top_k, self.renormalise = options.top_k, options.renormalise
        self.weight = nn.Parameter(torch.empty(options.experts, d_model))
        self.bias = nn.Parameter(torch.empty(options.experts), requires_grad=False) if options.bias_rate else None
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> Routing:
        wide = torch.promote_types(x.dtype, torch.float32)
        with _without_autocast(x.device.type):
            scores = linear(x.to(wide), self.weight.to(wide)).softmax(-1)
        preferred = scores if self.bias is None else scores + self.bias.to(wide)
        chosen = preferred.detach().topk(self.top_k, dim=-1).indices
        gates = scores.gather(-1, chosen)
        if self.renormalise:
            gates = gates / gates.sum(-1, keepdim=True)
        return Routing(scores, chosen, gates)

    def note(self, load_E: Tensor) -> None:
        """Add to the load; called in backward, which a step runs once for each token."""
        self.load = load_E if self.load is None else self.load + load_E


def _without_autocast(kind: str) -> AbstractContextManager:
    """Autocast would take the product of a router in half precision, in which near scores are equal."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class Experts(nn.Module):
    """E MLPs without biases, their weights stacked: rows[R, D], sorted by expert → y[R, D].

    Args:
        width, gated, act: F; whether `up` has a gate and F more columns; the function between `up` and `down`.
    """

    def __init__(self, number: int, d_model: int, width: int, gated: bool, act: Act) -> None:
        super().__init__()
        self.act = act
        self.up = nn.Parameter(torch.empty(number, 2 * width if gated else width, d_model))
        self.down = nn.Parameter(torch.empty(number, d_model, width))

    def forward(self, rows_RD: Tensor, sizes: list[int]) -> Tensor:
        """Compute rows by their experts.

        Args:
            sizes: rows of each expert, one after the other; 0 is allowed, and its weights get a gradient of zeros.
        """
        parts = zip(rows_RD.split(sizes), self.up.unbind(), self.down.unbind(), strict=True)
        return torch.cat([linear(self.act(linear(rows, up)), down) for rows, up, down in parts])


class MoE(nn.Module):
    """A router and experts instead of an MLP. x[B, T, D] → y[B, T, D].

    Args:
        width, gated, act: of an expert, as in `Experts`.
        dropout: probability of dropping an element of y.
        shared: an MLP that computes every token, added to the experts; or None.

    Raises:
        ValueError: no experts, or an x without three dims.
    """

    def __init__(
        self,
        options: ExpertOptions,
        d_model: int,
        width: int,
        act: Act,
        *,
        gated: bool = False,
        dropout: float = 0.0,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not options.experts:
            raise ValueError("a mixture needs experts, and experts=0: use an MLP, or experts=4, or more")
        self.options, self.shared = options, shared
        self.balances_alone = options.is_balanced  # it compares the tokens of this process
        self.router = Router(options, d_model)
        self.experts = Experts(options.experts, d_model, width, gated, act)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if x_BTD.dim() != 3:
            raise ValueError(f"a mixture takes x[B, T, D], and got {list(x_BTD.shape)}: x[None] makes a batch of one")
        routing = self.router(x_BTD)
        y_BTD = self.mixture(x_BTD, routing.chosen, routing.gates.to(x_BTD.dtype))
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        if torch.is_grad_enabled():
            y_BTD = self._with_balance(y_BTD, routing)
        return self.dropout(y_BTD)

    def mixture(self, x_BTD: Tensor, chosen_BTk: Tensor, gates_BTk: Tensor) -> Tensor:
        """The outputs of the chosen experts, weighted and added. → y[B, T, D]."""
        k = chosen_BTk.shape[-1]
        x_ND, experts_R, gates_R = x_BTD.flatten(0, 1), chosen_BTk.flatten(), gates_BTk.flatten()
        rows = self.sorted_rows(experts_R)
        load = torch.bincount(experts_R[rows], minlength=self.options.experts)
        y_RD = self.computed(x_ND[rows // k], load) * gates_R[rows, None]
        return torch.zeros_like(x_ND).index_add(0, rows // k, y_RD).view_as(x_BTD)

    def sorted_rows(self, experts_R: Tensor) -> Tensor:
        """The numbers of the rows, sorted by expert, without the rows that find their expert full."""
        order = experts_R.argsort(stable=True)
        if self.options.capacity_factor is None or not self.training:
            return order
        load_E = torch.bincount(experts_R, minlength=self.options.experts)
        room_E = self.room(load_E, len(experts_R) // self.options.top_k)
        return order[places_among(load_E) < room_E.repeat_interleave(load_E)]

    def room(self, load_E: Tensor, tokens: int) -> Tensor:
        """The rows that each expert takes of so many tokens, the even load times the capacity factor; [E]."""
        options = self.options
        room = options.capacity_factor * options.top_k * tokens / options.experts
        return torch.full_like(load_E, math.ceil(min(room, tokens)))  # a token comes to an expert once at most

    def computed(self, rows_RD: Tensor, load_E: Tensor) -> Tensor:
        """Each row by its expert, as `Experts`. → y[R, D]."""
        return self.experts(rows_RD, load_E.tolist())

    def _with_balance(self, y_BTD: Tensor, routing: Routing) -> Tensor:
        """y; its backward also runs the backward of the balance loss, and notes the loads."""
        load_BE = loads(routing)
        loss = y_BTD.new_zeros(())
        if self.options.balance:
            loss = self.options.balance * self.balance_loss(routing.scores, load_BE)
        return _Also.apply(y_BTD, loss, self.router, load_BE.sum(0))

    def balance_loss(self, scores_BTE: Tensor, load_BE: Tensor) -> Tensor:
        """E · Σₑ (share of the choices that are e) · (mean score of e), []: 1 if even, E/k if all choose the same.

        The first has no gradient. With `balance_over="sequence"` it is the mean over the sequences.
        """
        over_batch = self.options.balance_over == "batch"
        load, total = (load_BE.sum(0), scores_BTE.sum((0, 1))) if over_batch else (load_BE, scores_BTE.sum(1))
        load, rows = self.over_ranks(load), 1 if over_batch else self.all_rows(len(load))
        choices = load.sum(-1, keepdim=True)
        share, mean = load / choices, total * (self.options.top_k / choices)
        return self.options.experts * (share * mean).sum() / rows

    def over_ranks(self, load: Tensor) -> Tensor:
        """The loads of all tokens that are balanced together; here these are all."""
        return load

    def all_rows(self, rows: int) -> int:
        """The number of sequences in the batch, if `rows` of them are here."""
        return rows


def loads(routing: Routing) -> Tensor:
    """How often each expert was chosen, by sequence: [B, E], float64."""
    B, _, E = routing.scores.shape
    load_BE = torch.zeros(B, E, dtype=torch.float64, device=routing.chosen.device)
    chosen_Bn = routing.chosen.flatten(1)
    return load_BE.scatter_add_(1, chosen_Bn, torch.ones_like(chosen_Bn, dtype=torch.float64))


def places_among(load_E: Tensor) -> Tensor:
    """The place of each sorted row among the rows of its expert: [2, 3] → 0, 1, 0, 1, 2."""
    starts = load_E.cumsum(0) - load_E
    return torch.arange(int(load_E.sum()), device=load_E.device) - starts.repeat_interleave(load_E)


class _Also(torch.autograd.Function):
    """y; backward gives the loss a gradient of 1, as if it were added to the loss of the model.

    So a pipeline stage, or a wrapper, need not carry it to the end of the model.
    """

    @staticmethod
    def forward(ctx, y: Tensor, loss: Tensor, router: Router, load_E: Tensor) -> Tensor:
        ctx.router, ctx.load_E, ctx.loss = router, load_E, loss.detach()
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        ctx.router.note(ctx.load_E)
        return gradient, torch.ones_like(ctx.loss), None, None


def bias_change(load_E: Tensor, rate: float) -> Tensor:
    """By how much a step moves the biases: up by `rate` below the mean load, down above it. → [E]."""
    return rate * (load_E.sum() - len(load_E) * load_E).sign()  # whole numbers: a quotient may be off by a bit


def move_bias(bias: Tensor, change: Tensor) -> None:
    """Add a change to a bias, or to a part of one, in place.

    Raises:
        ValueError: a bias in half precision, where a small change is lost.
    """
    if bias.element_size() < 4:
        kind = str(bias.dtype)[6:]
        raise ValueError(
            f"the bias of a router is in {kind}, which rounds away steps of {change.abs().max().item():g}: keep it in "
            "float32, router.bias.data = router.bias.data.float()"
        )
    bias += change.to(bias)


@torch.no_grad()
def update_biases(model: nn.Module) -> None:
    """After the backward passes of a step on one device: move the biases of all routers, and forget the loads."""
    for module in model.modules():
        if isinstance(module, MoE):
            router, rate = module.router, module.options.bias_rate
            if router.bias is not None and router.load is not None:
                move_bias(router.bias, bias_change(router.load, rate))
            router.load = None
