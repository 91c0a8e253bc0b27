"""Models that are no GPT on all axes: `assemble` makes them one process's training, or refuses in a sentence."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from lib.checkpoint.storage import Save, restore
from lib.lab.certificate import certify
from lib.launch import RankError, run
from lib.layout import Layout
from lib.masks import RowDropout
from lib.mesh import Group, Mesh, MeshShape
from lib.parallel import ParallelGPT, assemble
from lib.parallel_model import ParallelModel
from lib.pipeline.schedules.action import ScheduleError
from lib.pipeline.stage import Stage
from lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Attention(nn.Module):
    def __init__(self, width, head_width):
        super().__init__()
        self.head_width = head_width
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.Identity()  # of each head

    def forward(self, x):
        q, k, v = (y(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for y in (self.q, self.k, self.v))
        q, k = self.norm(q), self.norm(k)
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, p=0.0):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, 4)
        self.up, self.down, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(p)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(self.up(self.norm2(x)).relu()))


class Patches(nn.Module):
    """Images [b, 1, 8, 8] → one token for the class and four patches, [b, 5, 16]."""

    def __init__(self, width=16):
        super().__init__()
        self.cut, self.first = nn.Conv2d(1, width, 4, stride=4), nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 5, width))

    def forward(self, images):
        patches = self.cut(images).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(images), -1, -1), patches], 1) + self.place


class ClassOf(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.norm(x[:, 0]))


class Model(nn.Sequential):
    """Layers in a row, cut evenly."""

    @staticmethod
    def cut(model, num_stages):
        ends = [len(model) * i // num_stages for i in range(num_stages + 1)]
        layers = list(model)
        return [nn.Sequential(*layers[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


def shard(model, tp):
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.up, layer.down = ColumnParallelLinear.from_serial(layer.up, tp), row(layer.down, tp)
        elif isinstance(layer, Attention):
            layer.q, layer.k, layer.v = (ColumnParallelLinear.from_serial(x, tp) for x in (layer.q, layer.k, layer.v))
            layer.out = row(layer.out, tp)


def row(linear, tp):
    return RowParallelLinear.from_serial(linear, tp)


def mean(targets):
    return lambda y, t: cross_entropy(y, t, reduction="sum") / len(targets)


def squares(targets):
    return lambda y, t: (y - t).square().sum() / targets.numel()


def vit(p=0.0):
    return Model(Patches(), *(Layer(16, p) for _ in range(4)), ClassOf())


def convolutions():
    """Each layer gives another shape: [b, 4, 8, 8], [b, 8, 4, 4], [b, 16, 2, 2], [b, 10]."""
    sizes = ((1, 4, 1), (4, 8, 2), (8, 16, 2))
    layers = (nn.Sequential(nn.Conv2d(a, b, 3, s, 1), nn.GroupNorm(2, b), nn.ReLU()) for a, b, s in sizes)
    return Model(*layers, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


class Recurrent(nn.Module):
    """An LSTM, x[b, T, 8] → [b, T, 8]: its messages have the shape of its inputs."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return x + self.lstm(x)[0]


class EncoderDecoder(nn.Module):
    """Both sequences travel side by side, [b, 2, T, 8]: an encoder changes the first, a decoder the second."""

    def __init__(self, decodes):
        super().__init__()
        self.decodes, self.q, self.kv = decodes, nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, both):
        source, target = both.unbind(1)
        k, v = self.kv(source).chunk(2, -1)
        y = scaled_dot_product_attention(self.q(target if self.decodes else source), k, v)
        return torch.stack([source, target + y] if self.decodes else [source + y, target], 1)


def form_of_vit(images, stage):
    return images.new_empty(len(images), 5, 16)


def form_of_convolutions(images, stage, num_stages):
    """Of the first 2, or each, of the four layers."""
    shape = [(4, 8, 8), (8, 4, 4), (16, 2, 2)][(stage + 1) * 4 // num_stages - 1]
    return images.new_empty(len(images), *shape)


IMAGES = torch.randn(8, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(8) % 10
ROWS = torch.randn(8, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
PAIRS = torch.stack([ROWS, ROWS.flip(0)], 1)


def of(kind, num_stages=1):
    """Model, batch, and how it is parallelized."""
    if kind.startswith("vit"):
        model = vit(0.3 if "dropout" in kind else 0.0)
        return model, (IMAGES, CLASSES), {"loss": mean, "shard": shard, "stage": partial(Stage, form=form_of_vit)}
    if kind == "convolutions":
        form = partial(form_of_convolutions, num_stages=num_stages)
        return convolutions(), (IMAGES, CLASSES), {"loss": mean, "stage": partial(Stage, form=form)}
    if kind == "LSTM":
        return Model(*(Recurrent() for _ in range(4))), (ROWS, ROWS.roll(1, 1)), {"loss": squares}
    layers = (EncoderDecoder(decodes) for decodes in (False, False, True, True))
    return Model(*layers), (PAIRS, PAIRS.roll(1, 2)), {"loss": squares, "stage": partial(Stage, recompute=True)}


def certified(world, cases):
    found = []
    for kind, layout in cases:
        torch.manual_seed(0)
        model, batch, how = of(kind, layout.num_stages)
        make = partial(assemble, cut=Model.cut, **how)
        found += certify(world, [layout], model.double(), [batch] * 2, 0.5, make=make, loss=how["loss"])
    return found


PIPE = Layout(pp=2, microbatches=4)
CASES = {
    2: [
        ("vit", Layout(tp=2)),
        ("vit with dropout", Layout(dp=2, zero=2)),
        ("vit with dropout", PIPE),
        ("vit", replace(PIPE, schedule="zb-v", stages_per_rank=2)),
        ("convolutions", replace(PIPE, schedule="interleaved", stages_per_rank=2)),
        ("convolutions", Layout(dp=2, zero=3)),
        ("LSTM", PIPE),
        ("LSTM", Layout(dp=2, zero=1, microbatches=2)),
        ("encoder and decoder", PIPE),
    ],
    4: [
        ("vit", Layout(pp=2, tp=2, microbatches=2)),
        ("vit", Layout(dp=2, tp=2, zero=1)),
        ("convolutions", Layout(pp=4, microbatches=4)),
        ("encoder and decoder", Layout(dp=2, pp=2, microbatches=2, zero=2)),
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_a_model_of_ones_own_is_one_process(ranks):
    for case, apart in zip(CASES[ranks], run(certified, ranks, CASES[ranks])[0], strict=True):
        assert apart.holds(), (case, apart)


def made(world, layout, kind="vit", seed=0, **changed):
    torch.manual_seed(seed)
    model, _, how = of(kind, layout.num_stages)
    mesh = Mesh(MeshShape(**layout.sizes), world)
    return assemble(model.double(), mesh, layout, ADAMW, **{"cut": Model.cut} | how | changed)


def losses_behind(world, saved_by, loaded_by, folder):
    """Losses of two steps after a checkpoint in one layout, and in another that was loaded from it."""
    ours = made(world, saved_by)
    for _ in range(2):
        ours.step(IMAGES, CLASSES, 0.5)
    assert Save(ours, folder).finish() == ""
    other = made(world, loaded_by, seed=1)
    restore(other, folder)
    mine, theirs = ([m.step(IMAGES, CLASSES, 0.5).item() for _ in range(2)] for m in (ours, other))
    alone = ours.full_state_dict()
    for rows in (slice(8), slice(1)):  # of one row, a data-parallel rank has none
        mine.append(other.evaluate(IMAGES[rows], CLASSES[rows]).item())
        theirs.append(ours.evaluate(IMAGES[rows], CLASSES[rows]).item())
    return mine, theirs, sorted(alone) == sorted(vit().state_dict()) if world.rank == 0 else True


def test_a_checkpoint_of_ones_own_model_is_loaded_by_any_layout(tmp_path):
    saved_by = Layout(dp=2, pp=2, microbatches=2, zero=1)
    for mine, theirs, has_all in run(losses_behind, 4, saved_by, Layout(pp=2, tp=2, microbatches=4), str(tmp_path)):
        assert mine == pytest.approx(theirs, rel=1e-12) and has_all


def test_the_former_name_is_the_same_object():
    assert ParallelGPT is ParallelModel


def without_the_second(model, num_stages):
    return [model[:1], model[2:]]


def of_copies(model, num_stages):
    return [nn.Sequential(*model[:3]), nn.Sequential(*vit().double()[3:])]


def into_wrong_places(model, tp):
    for layer in model[1:5]:
        layer.up = nn.Sequential(ColumnParallelLinear.from_serial(layer.up, tp))


def without_placements(model, tp):
    shard(model, tp)
    for layer in model[1:5]:
        layer.up.placements = {}


def masks_of_rows(model, tp):
    shard(model, tp)
    for i, layer in enumerate(model[1:5]):
        layer.dropout = RowDropout(layer.dropout.p, f"{i + 1}.dropout")


REFUSED = [
    (Layout(tp=2), {"shard": None}, "tp=2 shards the layers of Model: give shard="),
    (Layout(pp=2), {"cut": None}, "pp=2 cuts Model into stages: give cut="),
    (Layout(tp=2, recompute="full"), {}, "recompute=full is for a GPT: give stage=partial(Stage, recompute=True)"),
    (Layout(tp=2, sequence_parallel=True), {}, "sequence_parallel is for a GPT"),
    (Layout(pp=2), {"cut": without_the_second}, "1.norm1.weight is in no stage, so it would not be trained"),
    (Layout(pp=2), {"cut": of_copies}, "is in no stage"),
    (Layout(pp=2), {"cut": lambda model, n: [model]}, "cut= returned 1 modules, and this layout has 2 stages"),
    (Layout(tp=2), {"shard": into_wrong_places}, "1.up.weight is missing after shard="),
    (
        Layout(tp=2),
        {"shard": without_placements},
        "1.up.weight has shape [16, 16] after shard=",
    ),
    (Layout(tp=2), {"kind": "vit with dropout"}, "1.dropout would drop other elements on 2 tensor-parallel ranks"),
]


def refusals(world):
    found = []
    for layout, changed, _ in REFUSED:
        with pytest.raises(ValueError) as caught:
            made(world, layout, **changed)
        found.append(str(caught.value))
    made(world, Layout(tp=2), "vit with dropout", shard=masks_of_rows)
    return found


def test_what_would_train_otherwise_is_refused():
    for said, (_, _, words) in zip(run(refusals, 2)[0], REFUSED, strict=True):
        assert words in said, said


def wrong_form(world, stage):
    made(world, PIPE, stage=stage).step(IMAGES, CLASSES, 0.5)


def test_a_message_of_another_form_is_refused():
    with pytest.raises(
        RankError, match=r"stage 0 gives float64\[2, 5, 16\], but messages between stages are .*\[2, 4, 16"
    ):
        run(wrong_form, 2, partial(Stage, form=lambda images, stage: images.new_empty(len(images), 4, 16)))
    with pytest.raises(RankError, match=r"form= returned tuple for stage 0: return an empty tensor"):
        run(wrong_form, 2, partial(Stage, form=lambda images, stage: (5, 16)))
    with pytest.raises(ScheduleError, match="form= says all that width, slices and dtype say: give it alone"):
        Stage(nn.Linear(2, 2), 16, form=form_of_vit)


def test_the_model_moves_to_the_device_of_its_rank():
    model, mesh = nn.Linear(4, 1), Mesh(MeshShape(**Layout().sizes), Group())
    with patch("lib.parallel.device", lambda: torch.device("meta")):
        assemble(model, mesh, Layout(), ADAMW, loss=squares)
    assert all(p.is_meta for p in model.parameters())
