"""The layout of a training run: ranks along each axis, and the options of each axis.

The problem: a layout is a dozen numbers, and most combinations are impossible. Eight processes would report this after
a minute. The idea: an object that raises one clear error at once, and a search for the nearest possible layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from lib.cost.sizes import ModelShape, check_kv_heads, check_recompute, check_zero, heads_of_rank, shares_heads
from lib.cost.token_orders import TOKEN_ORDERS, check_length
from lib.pipeline.balance import layers_of_stages
from lib.pipeline.schedules.action import Schedule
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.v_shape import dualpipe_v, v_half, v_min
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v

if TYPE_CHECKING:
    from lib.model import GPTConfig
    from lib.moe import ExpertOptions

V_SHAPED = {"zb-v": zb_v, "v-half": v_half, "v-min": v_min, "dualpipe-v": dualpipe_v}  # two stages a rank, in a V
SPLIT = {"zb-h1": zb_h1, "zb-h2": zb_h2, **V_SHAPED}  # schedules with a backward that is split into I and W
SCHEDULES = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, **SPLIT}
AXES = ("dp", "pp", "cp", "tp")
TOKEN_AXES = ("dp", "cp")  # their ranks have different tokens: rows of a batch, or parts of a row
CAPACITY_OVER = ("rank", "group")
ATTENTION = ("gather", "ring", "ulysses")  # how a context-parallel rank sees the keys and values of the others


@dataclass(frozen=True)
class Layout:
    """A layout on dp · pp · cp · tp ranks.

    Args:
        dp: data-parallel ranks: each takes some sequences of the batch; under torchrun, all remaining ranks.
        pp: pipeline ranks: each has some of the layers.
        tp: tensor-parallel ranks: each has a shard of every matrix.
        cp: context-parallel ranks: each takes some tokens of every sequence.
        order: of the axes, outermost first; neighbours on the last axis have consecutive ranks, so they share a node.
            cp is just outside tp unless it is named.
        schedule: of the pipeline.
        stages_per_rank: 2 or more with interleaved, 2 with a V, otherwise 1.
        microbatches: of a step on each data-parallel rank; their gradients are added up. zero=2 and zero=3 send
            gradients of each: more bytes, less memory.
        sequence_parallel: shard the sequence over tensor-parallel ranks between the parallel layers.
        zero: sharded over data-parallel ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        recompute: activations that backward recomputes.
        attention: over context-parallel ranks: gather all keys and values; pass them around a ring; or exchange tokens
            for heads, ulysses.
        token_order: which tokens a context-parallel rank takes: contiguous; zigzag, an early and a late chunk; striped,
            every cp-th.
        ep: ranks that share the experts, of the dp · cp ranks with different tokens; it adds none.
        capacity_over: the tokens that share the capacity of an expert: of a rank, or of the group of ep ranks.

    Raises:
        ValueError: techniques that cannot be combined, or an invalid number.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    order: str = "dp,pp,cp,tp"
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    microbatches: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    recompute: str = "none"
    attention: str = "gather"
    token_order: str = "contiguous"
    ep: int = 1
    capacity_over: str = "rank"

    def __post_init__(self) -> None:
        for name in (*AXES, "ep", "microbatches", "stages_per_rank"):
            whole_number(name, getattr(self, name), 1)
        axes = self.order.split(",")
        if "cp" not in axes and "tp" in axes:
            axes.insert(axes.index("tp"), "cp")
            object.__setattr__(self, "order", ",".join(axes))
        if sorted(axes) != sorted(AXES):
            raise ValueError(f"order={self.order!r} must name dp, pp and tp, and may name cp, each once: dp,pp,cp,tp")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} must be one of {', '.join(SCHEDULES)}")
        check_recompute(self.recompute)
        check_zero(self.zero)
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs ranks to shard the sequence over: use tp=2 or more")
        self._check_pipeline()
        self._check_context()
        self._check_experts()
        if self.zero == 3 and self.pp > 1:
            raise ValueError(
                f"zero=3 and pp={self.pp}: the parameters of a stage would be gathered twice for each microbatch; "
                "use zero=1, or pp=1"
            )
        if self.zero == 3 and self.tp > 1:
            raise ValueError(
                f"zero=3 and tp={self.tp}: parameters are shards of full matrices here; use zero=1 or zero=2, or tp=1"
            )

    def _check_pipeline(self) -> None:
        if self.pp == 1 and (self.schedule != "1f1b" or self.stages_per_rank > 1):
            raise ValueError(
                f"schedule={self.schedule} with stages_per_rank={self.stages_per_rank} needs ranks to split the "
                "layers over: use pp=2 or more"
            )
        per_rank = self.stages_per_rank
        allowed = per_rank > 1 if self.schedule == "interleaved" else per_rank == 1 + (self.schedule in V_SHAPED)
        if not allowed:
            raise ValueError(
                f"schedule={self.schedule} and stages_per_rank={per_rank}: use interleaved with 2 or more, "
                f"{', '.join(V_SHAPED)} with 2, and all others with 1"
            )
        if self.recompute != "none" and self.schedule in SPLIT:
            raise ValueError(
                f"recompute={self.recompute} and schedule={self.schedule}: the activations that I recomputes are freed "
                "before W; use recompute=none, or a schedule with full backwards, such as schedule=1f1b"
            )

    def _check_context(self) -> None:
        for name, known in (("attention", ATTENTION), ("token_order", TOKEN_ORDERS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")
            if self.cp == 1 and value != known[0]:
                raise ValueError(f"{name}={value} needs ranks to split the tokens over: use cp=2 or more")
        if self.attention == "ulysses" and self.token_order != "contiguous":
            raise ValueError(
                f"token_order={self.token_order} balances the causal work of ranks, and with attention=ulysses each "
                "rank has all tokens of its heads, which is balanced already: use token_order=contiguous"
            )

    def _check_experts(self) -> None:
        if self.dp * self.cp % self.ep:
            raise ValueError(
                f"ep={self.ep} must divide dp x cp = {self.dp * self.cp}, the ranks with different tokens, which share "
                f"the experts: use ep={one_of(divisors(self.dp * self.cp))}"
            )
        if self.capacity_over not in CAPACITY_OVER:
            raise ValueError(f"capacity_over={self.capacity_over!r} must be one of {', '.join(CAPACITY_OVER)}")

    @property
    def num_ranks(self) -> int:
        """The number of ranks, dp · pp · cp · tp."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.dp * self.cp // self.ep

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self.pp * self.stages_per_rank

    @property
    def sizes(self) -> dict[str, int]:
        """Axis → its ranks, the outermost axis first: `MeshShape(**layout.sizes)` is its mesh.

        dp, pp and tp are always there, and cp if it has several ranks.
        """
        return {axis: getattr(self, axis) for axis in self.order.split(",") if axis != "cp" or self.cp > 1}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis → the coordinate of a rank on it."""
        here = {}
        for axis, n in reversed(self.sizes.items()):
            rank, here[axis] = divmod(rank, n)
        return here

    def crosses_nodes(self, axis: str, ranks_per_node: int) -> bool:
        """Whether a group along this axis has ranks on more than one node, whose ranks are consecutive."""
        axes = self.order.split(",")
        block = math.prod(getattr(self, name) for name in axes[axes.index(axis) :])  # consecutive ranks, whole groups
        fits = self.num_ranks <= ranks_per_node or ranks_per_node % block == 0
        return getattr(self, axis) > 1 and not fits

    def make_schedule(self) -> Schedule:
        """The actions of each rank of the pipeline, in order."""
        more = (self.stages_per_rank,) if self.schedule == "interleaved" else ()
        return SCHEDULES[self.schedule](self.pp, self.microbatches, *more)

    def check(self, model: GPTConfig, global_batch: int) -> None:
        """Check that the layout can split a model and a batch.

        Raises:
            ValueError: a size does not divide; the message gives the sizes and the nearest that divides.
        """
        sizes = {"num_heads": model.num_heads, "vocab_size": model.vocab_size, "d_mlp": model.mlp_width}
        if model.experts:
            sizes |= {"d_expert": model.expert_width, "d_shared": model.d_shared}
        for name, size in sizes.items():
            if size % self.tp:
                raise ValueError(f"{name}={size} cannot be split over tp={self.tp}; use a multiple of {self.tp}")
        check_kv_heads(model.kv_heads, self.tp)
        self._check_tokens(model)
        self.check_experts(model)
        layers_of_stages(model, self.num_stages)
        self.make_schedule()  # not every number of microbatches fits each
        pieces = self.dp * self.microbatches
        if global_batch % pieces:
            each = f"dp={self.dp}" + (f" x microbatches={self.microbatches}" if self.microbatches > 1 else "")
            fits = (global_batch // pieces + 1) * pieces
            raise ValueError(
                f"global_batch={global_batch} cannot be split over {each}; use a multiple of {pieces}, such as {fits}"
            )

    def check_experts(self, model: ExpertOptions) -> None:
        """Check that each rank gets an expert, and that loads can be balanced over all tokens of a step.

        Raises:
            ValueError: more ranks than experts, a capacity that there is not, or microbatches in the way of a balance.
        """
        if self.ep > 1 and not model.experts:
            raise ValueError(f"ep={self.ep} ranks share experts, and experts=0: use experts={self.ep}, or more")
        if self.ep > max(1, model.experts):
            raise ValueError(
                f"experts={model.experts} cannot be shared by ep={self.ep}: use at most one rank for each"
            )
        if self.capacity_over != "rank" and model.capacity_factor is None:
            raise ValueError(
                f"capacity_over={self.capacity_over} is of a capacity, and there is none: use capacity_factor=1.25, or "
                "leave it out"
            )
        if model.balance and model.balance_over == "batch" and self.microbatches > 1:
            raise ValueError(
                f"balance_over=batch compares the loads of all tokens of a step, and the first of microbatches="
                f"{self.microbatches} is trained before the last is routed: use balance_over=sequence, or one"
            )

    def check_capacity(self, model: GPTConfig) -> None:
        """Check that experts which are full refuse the same tokens in this layout as in one process.

        Raises:
            ValueError: they do not.
        """
        in_one_group = self.ep == self.dp and (self.capacity_over == "group" or self.ep == 1)
        of_one = in_one_group and self.cp == 1 and self.microbatches == 1
        factor = model.capacity_factor
        may_drop = factor is not None and factor * model.top_k < model.experts  # else there is room for all tokens
        if may_drop and not of_one:
            raise ValueError(
                f"capacity_factor={factor} drops tokens that find an expert full, and these ranks and "
                "microbatches drop others than one process: leave it out, or use capacity_over=group, ep as large as "
                "dp, cp=1 and microbatches=1"
            )

    def _check_tokens(self, model: GPTConfig) -> None:
        """Check that the tokens of a sequence, and for Ulysses the heads, can be split."""
        if self.cp > 1:
            check_length(self.token_order, model.context, self.cp)
        shards = self.cp * self.tp if self.sequence_parallel else 1
        if model.context % shards:
            each = f"cp={self.cp} x tp={self.tp}" if self.cp > 1 else f"tp={self.tp}"
            raise ValueError(f"context={model.context} cannot be split over {each}; use a multiple of {shards}")
        if self.attention == "ulysses":
            heads, kv_heads = heads_of_rank(ModelShape.of(model), self.tp)
            if not shares_heads(heads, kv_heads, self.cp):
                raise ValueError(
                    f"attention=ulysses gives each of cp={self.cp} ranks some of the heads, and of {heads} query heads "
                    f"and {kv_heads} of keys and values on a rank it cannot: use a cp that divides {heads}, and that "
                    f"divides {kv_heads} or is a multiple of it; or attention=ring"
                )

    def differs(self, other: Layout) -> dict[str, object]:
        """Field → its value here, for all fields in which the two layouts differ."""
        return {name: value for name, value in vars(self).items() if value != getattr(other, name)}


def whole_number(name: str, value: object, least: int) -> None:
    """Raise a ValueError unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")


def nearest(
    wanted: Mapping[str, object], model: GPTConfig, global_batch: int, num_ranks: int = 0, most: int = 2**20
) -> Layout | None:
    """The layout nearest to the requested layout that this model and batch allow; None if there is none.

    Nearest means the fewest changes; a number multiplied or divided by k counts as log2 k changes.

    Args:
        wanted: fields of a `Layout`, which together may be impossible.
        num_ranks: the required number of ranks; 0: as many as requested, or fewer.
        most: the largest possible number of ranks.
    """
    numbers = (*AXES, "ep", "microbatches")
    counts = {name: max(1, n) if isinstance(n := wanted.get(name, 1), int) else 1 for name in numbers}
    others = {name: value for name, value in wanted.items() if name not in counts}
    world = num_ranks or math.prod(counts[axis] for axis in AXES)

    def changes(layout: Layout) -> float:
        ratios = [getattr(layout, name) / n for name, n in counts.items()] + [layout.num_ranks / world]
        return sum(abs(math.log2(k)) for k in ratios) + sum(getattr(layout, name) != x for name, x in others.items())

    worlds = {world} if num_ranks else {n for n in (world, *(2**k for k in range(world.bit_length()))) if n <= most}
    cps, eps = ({*divisors(n), *(2**k for k in range(n.bit_length()))} for n in (counts["cp"], counts["ep"]))
    possible = _possible(others, {"microbatches": {counts["microbatches"], 1, 2, 4, 8, 16}, "ep": eps}, worlds, cps)
    for layout in sorted(possible, key=lambda layout: (changes(layout), str(layout))):
        with suppress(ValueError):
            layout.check(model, global_batch)
            return layout
    return None


def _possible(
    others: Mapping[str, object], counts: Mapping[str, set[int]], worlds: set[int], cps: set[int]
) -> list[Layout]:
    """All degrees on so many ranks, these of cp, with these counts; all else has its requested or simplest value."""
    simplest = {"schedule": "1f1b", "stages_per_rank": 1, "sequence_parallel": False, "zero": 1, "recompute": "none"}
    simplest |= {"attention": "gather", "token_order": "contiguous", "capacity_over": "rank"}
    choices = {name: {value, simplest.get(name, value)} for name, value in others.items()} | dict(counts)
    layouts = []
    for ranks in worlds:
        for tp, pp, cp in product(divisors(ranks), divisors(ranks), cps):
            degrees = {"pp": pp, "cp": cp, "tp": tp}
            inner = math.prod(degrees.values())
            for values in product(*choices.values()) if ranks % inner == 0 else ():
                fields = {"dp": ranks // inner} | degrees | dict(zip(choices, values, strict=True))
                with suppress(ValueError, TypeError):
                    layouts.append(Layout(**fields))
    return layouts


def one_of(values: Iterable[int | str]) -> str:
    """`1, 2 or 4`; words as they are."""
    *most, last = (value if isinstance(value, str) else f"{value:,}" for value in values)
    return f"{', '.join(most)} or {last}" if most else last


def divisors(n: int) -> list[int]:
    """The numbers that divide n, in order."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})
