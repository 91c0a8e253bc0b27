"""Layouts that cannot be, the nearest that can, and which axes cross nodes."""

from dataclasses import replace

import pytest

from lib.layout import Layout, nearest
from lib.mesh import MeshShape
from lib.model import GPTConfig

CONFIG = GPTConfig(num_layers=4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dp": 0}, {"dp": 1.0}, {"pp": 0}, {"tp": True}, {"microbatches": 0}, {"stages_per_rank": 0},
        {"schedule": "dualpipe"}, {"schedule": "gpipe"}, {"stages_per_rank": 2, "pp": 2}, {"zero": 4}, {"zero": -1},
        {"zero": "1"}, {"zero": 3, "pp": 2}, {"zero": 3, "tp": 2}, {"recompute": "all"}, {"order": "dp,tp"},
        {"order": "dp,pp,pp"}, {"sequence_parallel": True}, {"recompute": "full", "pp": 2, "schedule": "zb-h1"},
    ],
)  # fmt: skip
def test_layouts_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Layout(**wrong)


GROUPED = GPTConfig(num_heads=12, d_model=48, num_kv_heads=6, vocab_size=240, d_mlp=100, llama=True)


@pytest.mark.parametrize(
    ("tp", "says"),
    [
        (4, "num_kv_heads=6 cannot be split over tp=4, nor 4 ranks over 6 heads; use num_kv_heads=4, or tp=2"),
        (12, "d_mlp=100 cannot be split over tp=12; use a multiple of 12"),
        (2, ""),
    ],
)
def test_a_model_that_ranks_cannot_share(tp, says):
    if says:
        with pytest.raises(ValueError, match=says):
            Layout(tp=tp).check(GROUPED, 16)
        assert nearest({"tp": tp}, GROUPED, 16) == Layout(tp=2)
    else:
        Layout(tp=tp).check(GROUPED, 16)
    Layout(tp=12).check(replace(GROUPED, d_mlp=96), 16)  # two ranks for each head of keys and values


@pytest.mark.parametrize(
    "wanted, batch, options, fits",
    [
        ({"tp": 3}, 16, {}, Layout(tp=2)),
        ({"dp": 3}, 4, {}, Layout(dp=2)),
        ({"dp": 3, "tp": 2}, 12, {"num_ranks": 8}, Layout(dp=4, tp=2)),
        ({"pp": 2, "zero": 3}, 16, {}, Layout(pp=2, zero=1)),
        ({"dp": 2, "pp": 2, "tp": 2, "microbatches": 3}, 16, {}, Layout(2, 2, 2, microbatches=4)),
        ({"pp": 2, "schedule": "interleaved"}, 16, {}, Layout(pp=2)),
        ({"dp": 1000}, 1000, {"most": 64}, Layout(dp=8)),
        ({"dp": 2}, 16, {}, Layout(dp=2)),
        ({"dp": 7}, 3, {"num_ranks": 7}, None),
    ],
)
def test_the_nearest_that_can_be(wanted, batch, options, fits):
    assert nearest(wanted, CONFIG, batch, **options) == fits


@pytest.mark.parametrize("order", ["dp,pp,tp", "tp,dp,pp"])
@pytest.mark.parametrize("degrees", [(2, 2, 2), (3, 1, 2), (2, 4, 3), (1, 1, 5)])
@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 8, 100])
def test_which_axes_cross_nodes(order, degrees, per_node):
    layout = Layout(*degrees, order=order)
    mesh = MeshShape(**layout.sizes)
    assert mesh.size == layout.num_ranks and ",".join(mesh.axes) == order
    for axis in mesh.axes:
        nodes = [{rank // per_node for rank in group} for group in mesh.groups(axis)]
        assert layout.crosses_nodes(axis, per_node) == any(len(one) > 1 for one in nodes), axis
