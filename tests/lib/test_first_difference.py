"""Where a layout first differs: each link of a step, and silence, or the right words, where nothing does."""

import sys
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn

from lib import comm, run
from lib.lab.certificate import certify
from lib.lab.first_difference import CHANCE
from lib.lab.module_outputs import ModuleOutputs, first_other_output
from lib.lab.twin import ADAMW, twin_steps
from lib.layout import Layout
from lib.mesh import Mesh, MeshShape
from lib.model import GPTConfig
from lib.parallel import assemble, parallelize
from tests.lib.sharding import serial

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CONFIG = GPTConfig(vocab_size=16, context=8, d_model=16, num_layers=3, num_heads=8, dropout=0.2)
LLAMA = replace(CONFIG, llama=True, tied=False, num_kv_heads=2, d_mlp=24)
LAYOUTS = [
    Layout(tp=4),
    Layout(tp=4, sequence_parallel=True, recompute="full"),
    Layout(dp=2, tp=2, sequence_parallel=True, recompute="selective"),
    Layout(pp=2, tp=2, schedule="zb-v", stages_per_rank=2, microbatches=2),
    Layout(dp=2, pp=2, zero=2, microbatches=2),
    Layout(dp=4, zero=3, microbatches=2),
    Layout(cp=2, dp=2, attention="ring", token_order="zigzag"),
    Layout(cp=2, tp=2, attention="ulysses"),
]


def batch_of(config):
    torch.manual_seed(1)
    tokens = torch.randint(config.vocab_size, (8, config.context + 1))
    return tokens[:, :-1], tokens[:, 1:]


def outputs_of_right_layouts(world, config):
    """Of each layout, the first module with a different output, and how many could be compared."""
    batch, found = batch_of(config), []
    (alone,) = twin_steps(serial(config), [batch], 0.1)
    for layout in LAYOUTS:
        mesh = Mesh(MeshShape(**layout.sizes), world)
        ours = parallelize(serial(config), mesh, layout, ADAMW)
        outputs = ModuleOutputs(stage.module for stage in ours.stages.values())
        ours.step(*batch, 0.1, 0)
        found.append(first_other_output(comm.all_gather_object(outputs.take(), world), alone.outputs))
    return found


@pytest.mark.parametrize("config", [pytest.param(CONFIG, marks=pytest.mark.thorough("a second")), LLAMA])
def test_outputs_of_modules_have_one_mean_in_every_layout(config):
    """More can be compared where no rank has a part of the heads, or of the MLP."""
    for layout, (name, compared) in zip(LAYOUTS, run(outputs_of_right_layouts, 4, config)[0], strict=True):
        assert name is None, (layout, name)
        assert compared > (40 if layout.tp == 1 else 30), layout


def changed(change):
    """A function that makes a layout, and does something to it."""

    def make(*args):
        change(ours := parallelize(*args))
        return ours

    return make


def doubled_in_step_2(names):
    """The gradients of some tensors are doubled in the second step."""

    def change(ours):
        steps, clip = [], ours.clip

        def doubling(max_norm):
            steps.append(max_norm)
            for fact, held, _ in ours.pieces() if len(steps) == 2 else ():
                if fact.name.endswith(names):
                    held.grad *= 2
            return clip(max_norm)

        ours.clip = doubling

    return changed(change)


def faster(ours):
    ours.optimizer.param_groups[0]["lr"] *= 2


def faster_the_first_time(calls):
    return changed(lambda ours: faster(ours) if calls.append(1) or len(calls) == 1 else None)


def halved(targets):
    return lambda y, some: (y - some).square().sum() / len(targets)


def doubled(targets):
    return lambda y, some: 2 * halved(targets)(y, some)


def differences(world):
    """Of a right layout, and with a mistake in each link, what is said."""
    batches, found = [batch_of(CONFIG)] * 2, {}
    wrong = {
        "nothing": parallelize,
        "some": doubled_in_step_2(("mlp.up.weight", "mlp.up.bias")),
        "updates": changed(faster),
        "chance": faster_the_first_time([]),
    }
    for name, make in wrong.items():
        (apart,) = certify(world, [Layout(dp=2)], serial(CONFIG), batches, 0.1, make=make)
        found[name] = apart.holds(), apart.difference
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double(), torch.randn(2, 8, 4).double()
    make = partial(assemble, loss=doubled)
    (apart,) = certify(world, [Layout(dp=2)], model, [(batch[0], batch[1, :, :1])], 9.0, make=make, loss=halved)
    return found | {"loss": (apart.holds(), apart.difference)}


def test_the_first_link_that_differs_is_said(say):
    found = run(differences, 2)[0]
    assert found.pop("nothing") == (True, "")
    assert not any(holds for holds, _ in found.values())
    for _, difference in found.values():
        say(difference)
    said = {name: difference for name, (_, difference) in found.items()}
    assert said["some"].startswith("step 2: the loss is right, so forward is, and of the gradients 6 of 40 tensors")
    assert "one factor, 2 (the size of dp or the number of microbatches)" in said["some"]
    assert said["some"].endswith("from blocks.2.mlp.down.weight on all are right")
    assert said["updates"].startswith("step 1: loss, gradients and norm are right, and of the updates all tensors")
    assert "one factor, 2" in said["updates"] and "the learning rate" in said["updates"]
    assert said["chance"] == CHANCE
    assert "the outputs of 2 modules are right, so its targets, or the loss itself, are not" in said["loss"]
    assert "of the gradients all tensors: one factor, 2" in said["loss"]
