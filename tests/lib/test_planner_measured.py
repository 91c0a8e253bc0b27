"""The planner against eight ranks: the seconds of a virtual cluster's steps; its formulas against exact bytes."""

from dataclasses import replace
from itertools import product
from math import inf

import pytest

from book.published.steps import kendall_tau
from book.trials.virtual import virtual_steps
from lib.cost.hardware import Device
from lib.cost.sizes import ModelShape, Recipe
from lib.layout import Layout
from lib.model import GPTConfig
from lib.planner import Cluster, Layout4D, Plan, Stack, Training, memory_bytes, step_s
from lib.planner.peak import optimizer_bytes, parameter_bytes
from lib.planner.search import layout_text
from lib.planner.training import PRESET_MODELS
from tests.on_time import on_time

FLOAT32 = Recipe(4, 4, 0, 8)
EXACT = Stack(1, 1, 0, 1, 1, 1, 1, overlaps_dp=True, recipe=FLOAT32)  # it reaches all that the data sheet says

# ---- seconds --------------------------------------------------------------------------------------------------------

# So slow that a step lasts a second, and a sum over eight ranks longer than two cores need for it.
SLOW = Device(1e9, 0.33e9, 0.09e9, 5.5e6, 2.5e6, None, "virtual")
# `simulate` hides an interleaved pipeline's messages but for those that fill it: here about half of them.
RUN = Training(ModelShape(64, 4, 8, 384, 64), Cluster(SLOW, 8, per_node=4), replace(EXACT, exposed_pp=0.5), 16)


ROUNDS = 5  # of measurements, until the predictions hold


def cut(dp, pp, tp, rows, v=1):
    return Layout4D(tp, 1, pp, dp, rows, v, zero=0, sequence_parallel=tp > 1)


LAYOUTS = [
    *(cut(8, 1, 1, 1), cut(4, 2, 1, 1, v=2), cut(4, 1, 2, 4), cut(2, 4, 1, 1)),
    *(cut(2, 2, 2, 4, v=2), cut(2, 1, 4, 8), cut(1, 4, 2, 2), cut(1, 1, 8, 16)),
]


def without(kind, factor=0.0):
    return lambda layout: (s := step_s(RUN, layout))._replace(**{kind: factor * getattr(s, kind)}).total


WRONG = {
    "no bubble": without("bubble"),
    "a bubble that stages on a rank do not divide": lambda layout: without("bubble", layout.stages_per_rank)(layout),
    "half of the sums over tp": without("tp", 0.5),
    "no gradients": without("dp"),
    "gradients that nothing hides": lambda layout: (
        step_s(replace(RUN, stack=replace(RUN.stack, overlaps_dp=False)), layout).total
    ),
    "no attention, and no traffic": lambda layout: step_s(RUN, layout).total - sum(step_s(RUN, layout)[1:3]),
}


def holds(errors):
    """Within 10 %; and hardly above what was measured, as ranks can only wake up late."""
    return -0.10 <= min(errors) and max(errors) <= 0.03


@pytest.mark.slow("up to five rounds of eight layouts, one after the other")
@pytest.mark.thorough("eight layouts, measured one after the other")
@pytest.mark.timed("it measures the time of ranks that sleep")
def test_seconds_of_eight_layouts(say):
    measured = [inf] * len(LAYOUTS)

    def errors(predict):
        return [predict(layout) / s - 1 for layout, s in zip(LAYOUTS, measured, strict=True)]

    for _ in range(ROUNDS):  # what else runs here can only make a step longer, so the shortest counts
        measured = [min(two) for two in zip(measured, virtual_steps(RUN, LAYOUTS), strict=True)]
        right = errors(lambda layout: step_s(RUN, layout).total)
        if holds(right):
            break
    for layout, s, error in zip(LAYOUTS, measured, right, strict=True):
        say(f"{layout_text(layout)}: {s:.3f} s measured, predicted {error:+.1%}")
    tau = kendall_tau([step_s(RUN, layout).total for layout in LAYOUTS], measured)
    wrong = {name: errors(predict) for name, predict in WRONG.items()}
    say(f"tau {tau:.2f}; " + "; ".join(f"{name} {min(off):+.0%} to {max(off):+.0%}" for name, off in wrong.items()))
    with on_time():
        assert holds(right)
        assert tau >= 0.8
        assert [name for name, off in wrong.items() if holds(off)] == []


def test_what_is_not_rehearsed():
    for wrong in (LAYOUTS[0]._replace(zero=1), LAYOUTS[2]._replace(sequence_parallel=False), cut(1, 8, 1, 1)):
        with pytest.raises(ValueError, match="use cp=1, zero=0, .* divide 4 blocks evenly"):
            virtual_steps(RUN, [wrong])


# ---- bytes ----------------------------------------------------------------------------------------------------------

CELLS = [
    Layout(
        dp, pp, tp, order="pp,dp,tp", microbatches=max(pp, 2) if pp > 1 else 1, zero=zero, sequence_parallel=tp > 2
    )
    for dp, pp, tp, zero in (
        *((8, 1, 1, 1), (4, 2, 1, 0), (4, 1, 2, 1), (2, 4, 1, 1)),
        *((2, 2, 2, 1), (2, 1, 4, 0), (1, 4, 2, 0), (1, 1, 8, 0)),
    )
]


def planned(model, layout):
    """What the formulas say: one number of each kind, for the fullest rank."""
    rows = layout.dp * layout.microbatches
    training = Training(ModelShape.of(model), Cluster(SLOW, layout.num_ranks), EXACT, rows)
    sizes = layout.tp, 1, layout.pp, layout.dp, 1, 1, layout.zero
    return memory_bytes(training, Layout4D(*sizes, layout.sequence_parallel))[:3]


def test_what_the_formulas_leave_out_is_small_in_a_large_model():
    """Positions, norms and biases that each tensor-parallel rank has whole, padding, stages of unequal size."""
    gpt = GPTConfig(vocab_size=51_200, context=2048, d_model=12_288, num_layers=96, num_heads=96)
    llama = GPTConfig(32_000, 4096, 8192, 80, 64, num_kv_heads=8, d_mlp=28_672, llama=True)
    assert ModelShape.of(llama) == PRESET_MODELS["llama-70b"]
    for large, layout in product((gpt, llama), CELLS):
        plan = Plan(large, layout, layout.dp * layout.microbatches)
        places = range(layout.pp)
        exact = max(parameter_bytes(plan, place) + optimizer_bytes(plan, place, 0, 0) for place in places)
        parameters, _, optimizer = planned(large, layout)
        assert parameters + optimizer == pytest.approx(exact, rel=0.005), layout
