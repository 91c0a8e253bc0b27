"""A `shard=` of one's own that leaves out a sum or a tie: refused in a sentence, which says what to add to it."""

from functools import partial

import pytest
import torch
from torch import nn

from lib.lab.certificate import certify
from lib.launch import RankError, run
from lib.layout import Layout
from lib.mesh import Mesh, MeshShape
from lib.parallel import assemble
from lib.tensor_parallel.linear import ColumnParallelLinear
from tests.lib.test_own_models import ADAMW, CLASSES, IMAGES, mean, shard, squares, vit


def with_normed_heads(world, marks):
    """Queries and keys are normed inside a pair: a rank has the term of its heads in the gradient of that norm."""
    torch.manual_seed(0)
    model = vit()
    for layer in model[1:5]:
        layer.attention.norm = nn.LayerNorm(4)

    def shard_normed(model, tp):
        shard(model, tp)
        for layer in model[1:5]:
            layer.attention.norm.partial_gradients = marks

    make, steps = partial(assemble, loss=mean, shard=shard_normed), [(IMAGES, CLASSES)] * 2
    return certify(world, [Layout(tp=2)], model.double(), steps, 0.5, make=make, loss=mean)[0]


def test_a_norm_inside_a_pair_is_refused_until_its_gradients_are_summed():
    said = r"1\.attention\.norm\.weight is full on all 2 .* set partial_gradients = \('weight',\) on its module"
    with pytest.raises(RankError, match=said):
        run(with_normed_heads, 2, ())
    assert run(with_normed_heads, 2, ("weight", "bias"))[0].holds()


def with_one_weight(world, ties):
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    model[1].weight = model[0].weight

    def shard_both(model, tp):
        model[0], model[1] = (ColumnParallelLinear.from_serial(layer, tp) for layer in model)
        if ties:
            model[1].weight = model[0].weight

    layout = Layout(tp=2)
    assemble(model, Mesh(MeshShape(**layout.sizes), world), layout, ADAMW, loss=squares, shard=shard_both)


def test_two_shards_of_one_weight_are_refused_until_they_are_one():
    said = r"1\.weight was tied to 0\.weight, and shard= made two .* = model\.0\.weight"
    with pytest.raises(RankError, match=said):
        run(with_one_weight, 2, False)
    run(with_one_weight, 2, True)
