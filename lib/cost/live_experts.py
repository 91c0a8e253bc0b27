"""Activations of a layer with experts: a dry run of `lib/moe.py` and `lib/expert_parallel`, as in `lib/cost/live.py`.

A row is kept as it arrives at its expert, and as it comes home, before and after its weight; inside an expert as in an
MLP. Each of the orders in which rows are sorted is kept as numbers of 8 bytes. In backward the gradients of all experts
of a matrix wait until they are stacked.

Letters: as in `live.py` and `mixture.py`; R rows of the tokens here, M rows that arrive at the experts here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lib.cost.buffer import Backward, Buffer
from lib.cost.mixture import INDEX, WIDE, Mixture
from lib.cost.sizes import Weight

State = list[Any]  # gradients between the backwards of one layer; a list, so that they can be freed early


@dataclass
class LiveExperts:
    """A layer with experts in the buffers of `model`, on the rank at this place among those that share the experts."""

    model: Any  # a `LiveGPT`
    mixture: Mixture
    rows: int
    place: int

    def __post_init__(self) -> None:
        model, of, itemsize = self.model, self.mixture, self.model.itemsize
        wide, between = max(itemsize, 4), model.tokens // (model.tp if model.slices else 1)  # tokens that are routed
        self.row, self.inner = model.shape.d_model * itemsize, of.width // model.tp * itemsize
        self.scores, self.of_token, self.gates = (
            between * of.num_experts * wide,
            between * wide,
            between * of.top_k * wide,
        )
        self.chosen, self.all_chosen = between * of.top_k * INDEX, model.tokens * of.top_k
        self.sent = round(of.load(self.rows, self.place) * of.num_experts)
        arriving = round(sum(of.rows_to(self.rows, other, self.place) for other in range(of.ranks)))
        each, more = divmod(arriving, here := of.num_here(self.place))
        self.of_experts = [each + (i < more) for i in range(here)]
        self.came = arriving
        self.balanced = WIDE * of.num_experts * {"": 0, "batch": 1, "sequence": self.rows}[of.balance]

    def layer(self, x: Buffer, layer: int) -> tuple:
        """The output of all experts, weighted and added, with that of a shared MLP; and its backwards."""
        router, up, down, routed = self.mixture.layers(layer, self.model.tp, self.place)
        routing, of_router = self._route(x, router)
        y, *backwards = self._mix(x, routing, routed)
        of_shared: list[Backward] = []
        if up:
            size = self.model.tokens * self.mixture.d_shared // self.model.tp * self.model.itemsize
            wide = size * (2 if self.model.shape.gated else 1)
            mlp = (self.model.column, wide, up), (self.model.activation, size), (self.model.row, *down)
            shared, *of_shared = self.model.chain(x, *mlp)
            y = self.model.new(self.model.between)
            del shared
        balance = self.model.new(self.balanced)
        self.model.temporary(self.chosen)

        def of_both(gradient: Buffer, balance: Buffer = balance) -> tuple:
            of_x = self.model.backward(gradient, of_shared) if of_shared else None
            return [gradient, of_x], [], None

        return y, of_router, *backwards, of_both

    # ---- forward ----------------------------------------------------------------------------------------------------

    def _route(self, x: Buffer, weights: list[Weight]) -> tuple:
        """Scores, choices and gates of each token. Kept: scores, choices, and gates before they are divided."""
        new, trained = self.model.new, [one for one in weights if one.is_trained]
        logits, scores = new(self.scores), new(self.scores)
        del logits
        preferred = new(self.scores) if self.mixture.has_bias else None
        values, chosen = new(self.gates), new(self.chosen)
        del values
        gates, saved = new(self.gates), [scores, chosen]
        if self.mixture.renormalise:
            saved += [gates, new(self.of_token)]
            gates = new(self.gates)
        del preferred
        deferred = self.model.deferred

        def backward(state: State, x: Buffer = x) -> tuple:
            """Of what is divided, then of scores, logits and x."""
            of_x, of_gates = state
            state.clear()
            if self.mixture.renormalise:
                self.model.temporary(4 * self.gates)
            of_scores = new(self.scores)
            self.model.temporary(self.scores)
            del of_gates
            saved.clear()
            of_logits = new(self.scores)
            del of_scores
            of_router = new(self.model.between)
            if deferred is None:
                return self._summed(of_x, of_router), trained, self.model.grads(trained)
            deferred.insert(0, self.model.node(None, of_logits, x, weights=trained))
            return self._summed(of_x, of_router), [], None

        return (chosen, gates), backward

    def _summed(self, *of_x: Buffer) -> Buffer:
        return self.model.new(self.model.between)

    def _mix(self, x: Buffer, routing: tuple[Buffer, Buffer], weights: list[Weight]) -> tuple:
        model, new = self.model, self.model.new
        full = model.gather(x)
        gathered = [self._gathered(size) for size in (model.itemsize, INDEX)] if model.slices else []
        order = self._sorted(self.sent, self.all_chosen)
        model.temporary(INDEX * self.sent)
        picked_by, picked = new(INDEX * self.sent), new(self.sent * self.row)
        arrived = new(self.came * self.row)
        order_there = self._sorted_there()
        sorted_rows = new(self.came * self.row)
        del arrived
        inside, results = [], []
        for rows in self.of_experts:
            inside.append(self._expert(rows))
            results.append(new(rows * self.row))
        computed = new(self.came * self.row)
        results.clear()
        again = self._sorted_there()
        model.temporary(INDEX * self.came)
        order_home = new(INDEX * self.came)
        del again
        unsorted = new(self.came * self.row)
        home = new(self.sent * self.row)
        del unsorted, computed, picked
        gates = new(self.sent * model.itemsize)
        weighted = new(self.sent * self.row)
        zeros, added_to = new(model.x), new(INDEX * self.sent)
        added = new(model.x)
        del zeros
        y = model.reduce()
        del added, full
        gathered.clear()
        of_outputs = self._of_outputs([added_to, weighted, home, gates, order, order_home])
        of_experts = self._of_experts(inside, [sorted_rows], *weights)
        return y, self._of_inputs([order_there, picked_by]), self._of_up(weights[0]), of_experts, of_outputs

    def _gathered(self, itemsize: int) -> Buffer:
        """Gates or choices of all tokens, from those of the shards."""
        size = self.all_chosen * itemsize
        full = self.model.new(size)
        self.model.temporary(size * self.model.copied)
        return full

    def _sorted(self, rows: int, of: int) -> Buffer:
        """The order of rows; with a capacity, of `of` rows those that find room."""
        values, order = self.model.new(INDEX * of), self.model.new(INDEX * of)
        del values
        if self.mixture.is_full:
            self.model.temporary(3 * INDEX * of)
            some = self.model.new(INDEX * rows)
            del order
            return some
        return order

    def _sorted_there(self) -> Buffer:
        """The order by expert of the rows as they arrive, by rank."""
        experts = self.model.new(INDEX * self.came)
        self.model.temporary(INDEX * self.came)
        values, order = self.model.new(INDEX * self.came), self.model.new(INDEX * self.came)
        del experts, values
        return order

    def _expert(self, rows: int) -> list[Buffer]:
        """The inside of one expert: what its up matrix returns; of a gate its silu; the input of its down matrix."""
        gated = self.model.shape.gated
        return [self.model.new(rows * self.inner * n) for n in ((2, 1, 1) if gated else (1, 1))]

    # ---- backward ---------------------------------------------------------------------------------------------------

    def _of_outputs(self, saved: list[Buffer]) -> Backward:
        """From y to the rows that the experts returned, and to the gates."""

        def backward(state: State) -> tuple:
            model, new = self.model, self.model.new
            gradient, of_x = state
            full = model.gather(gradient)
            scattered = new(self.sent * self.row)
            del full, saved[:2]
            of_home, products = new(self.sent * self.row), new(self.sent * self.row)
            of_gates = new(self.sent * model.itemsize)
            del scattered, products, saved[:2]
            model.temporary(2 * self.sent * model.itemsize)
            saved.pop(0)
            arrived = new(self.came * self.row)
            del of_home
            sorted_rows = self._put_back(self.came * self.row)
            del arrived
            saved.clear()
            return [sorted_rows, of_gates, of_x], [], None

        return backward

    def _put_back(self, size: int) -> Buffer:
        """The backward of a choice of rows: zeros, and a copy of them to which gradients are added."""
        zeros, result = self.model.new(size), self.model.new(size)
        del zeros
        return result

    def _of_experts(self, inside: list[list[Buffer]], inputs: list[Buffer], up: Weight, down: Weight) -> Backward:
        """Through each expert, the last first; then its down matrices are stacked."""

        def backward(state: State) -> tuple:
            new, of_up, of_down, of_rows = self.model.new, [], [], []
            for i in reversed(range(len(inside))):
                saved, rows = inside.pop(), self.of_experts[i]
                of_down.append(new(down.size // len(self.of_experts) * self.model.itemsize))
                of_inner = [new(rows * self.inner)]
                saved.pop()
                if not inside:
                    state[0] = None  # the gradients of all rows, of which each expert got some
                of_wide = self._of_activation(of_inner, saved)
                of_up.append(new(up.size // len(self.of_experts) * self.model.itemsize))
                of_rows.append(new(rows * self.row))
                del of_wide
            inputs.clear()
            stacked = self.model.grads([down])
            return [of_up, of_rows, *state[1:]], [down], stacked

        return backward

    def _of_activation(self, of_inner: list[Buffer], saved: list[Buffer]) -> Buffer:
        """GELU, or silu(gate) · up, whose gradients are concatenated in the end."""
        new, size = self.model.new, of_inner[0].size
        if not self.model.shape.gated:
            of_wide = new(size)
            of_inner.clear()
            saved.clear()
            return of_wide
        of_silu, _of_linear = new(size), new(size)
        saved.pop()
        of_inner.clear()
        _of_gate = new(size)
        del of_silu
        saved.clear()
        return new(2 * size)

    def _of_up(self, up: Weight) -> Backward:
        def backward(state: State) -> tuple:
            stacked = self.model.grads([up])
            state[0] = None
            return state[1:], [up], stacked

        return backward

    def _of_inputs(self, saved: list[Buffer]) -> Backward:
        """From the rows at the experts to x."""

        def backward(state: State) -> tuple:
            model, new = self.model, self.model.new
            of_rows, of_gates, of_x = state
            state.clear()
            joined = new(self.came * self.row)
            of_rows.clear()
            arrived = self._put_back(self.came * self.row)
            del joined
            saved.pop(0)
            of_picked = new(self.sent * self.row)
            del arrived
            partial = self._put_back(model.x)
            del of_picked
            saved.clear()
            mine = model.reduce()
            del partial
            return [self._summed(of_x, mine) if of_x else mine, of_gates], [], None

        return backward
