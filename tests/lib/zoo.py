"""A zoo of layers x[b, T, D] → x[b, T, D], drawn at random: what people build, and what breaks careless wrappers."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear
from torch.utils.checkpoint import checkpoint

D = 6


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, 9), nn.GELU(), nn.Linear(9, D))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D, bias=False)

    def forward(self, x):
        h = self.one(x)
        h += 0.5
        return x + self.two(torch.relu_(h)).mul_(0.5)


class Twice(nn.Module):
    """One layer used two times, and one that is not used."""

    def __init__(self):
        super().__init__()
        self.layer, self.idle = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return x + self.layer(torch.tanh(self.layer(x)))


class Odd(nn.Module):
    """A number, an empty parameter, a transposed one, a buffer of whole numbers."""

    def __init__(self):
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.randn(())), nn.Parameter(torch.empty(0))
        self.slanted = nn.Parameter(0.3 * torch.randn(D, D).t())
        self.register_buffer("shift", torch.arange(D, dtype=torch.int16))

    def forward(self, x):
        return x * self.scale + linear(x, self.slanted) + 0.01 * self.shift + self.empty.sum()


class Adapted(nn.Module):
    """A frozen weight, and a sum of products beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.down, self.up = nn.Parameter(0.3 * torch.randn(2, D)), nn.Parameter(0.3 * torch.randn(D, 2))

    def forward(self, x):
        return gelu(linear(x, self.base.weight + self.up @ self.down, self.base.bias))


class Words(nn.Module):
    """Looks words up by what is largest: no gradient goes to its input."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(D, D, padding_idx=1)

    def forward(self, x):
        return x + self.table(x.argmax(-1))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(D), nn.utils.parametrizations.weight_norm(nn.Linear(D, D))

    def forward(self, x):
        return x + self.layer(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(D, D, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(D, D, 3, padding=1), nn.GroupNorm(2, D)

    def forward(self, x):
        return x + self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)


class Vector(nn.Module):
    """A layer of a vector, and a weight that is made by a layer."""

    def __init__(self):
        super().__init__()
        self.vector, self.make, self.scale = nn.Parameter(torch.randn(3)), nn.Linear(3, D * D), nn.Linear(3, D)

    def forward(self, x):
        return x * torch.sigmoid(self.scale(self.vector)) + 0.1 * linear(x, self.make(self.vector).view(D, D))


class Permuted(nn.Module):
    """Frozen parameters that are no floats: an order, and a mask."""

    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.randperm(D), requires_grad=False)
        self.kept = nn.Parameter(torch.arange(D) % 3 > 0, requires_grad=False)
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return x + self.layer(x[..., self.order] * self.kept)


class Counting(nn.Module):
    """State that is no tensor."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(D, D), 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.layer(x))


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


LAYERS = {
    "linear": lambda: nn.Linear(D, D),
    "mlp": MLP,
    "in place": InPlace,
    "twice": Twice,
    "odd": Odd,
    "adapted": Adapted,
    "words": Words,
    "normed": Normed,
    "recurrent": Recurrent,
    "convolution": Convolution,
    "vector": Vector,
    "attention": lambda: nn.TransformerEncoderLayer(D, 2, 8, 0.0, batch_first=True),
    "permuted": Permuted,
    "counting": Counting,
    "gelu": nn.GELU,
}


# ---- what layers return -------------------------------------------------------------------------------------------


@dataclass
class Output:
    y: Tensor
    beside: tuple = ()


@dataclass
class WithList:
    states: list = field(default_factory=list)


class OwnDict(dict):
    pass


class OwnList(list):
    pass


class OwnTuple(tuple):
    pass


class Slotted:
    __slots__ = ("y",)

    def __init__(self, y):
        self.y = y


Named = namedtuple("Named", "y cache")
BOXES = {
    "dict": lambda y: {"y": y, "n": 1},
    "own dict": lambda y: OwnDict(y=y),
    "ordered": lambda y: OrderedDict(y=y),
    "user dict": lambda y: UserDict(y=y),
    "proxy": lambda y: MappingProxyType({"y": y}),
    "list": lambda y: [None, y],
    "own list": lambda y: OwnList([y]),
    "tuple": lambda y: (y, None),
    "own tuple": lambda y: OwnTuple([y]),
    "named": lambda y: Named(y, None),
    "set": lambda y: {y},
    "frozen set": lambda y: frozenset([y]),
    "deque": lambda y: deque([y]),
    "dataclass": lambda y: Output(y, (y.detach(),)),
    "dataclass in a dict": lambda y: {"out": Output(y)},
    "list in a dataclass": lambda y: WithList([y]),
    "slots": Slotted,
    "slots in a list": lambda y: [Slotted(y)],
    "namespace": lambda y: SimpleNamespace(inner=SimpleNamespace(y=y)),
    "closure": lambda y: lambda: y,
}


def opened(box) -> Tensor:
    """The tensor in a box, which may be the output of a Stack."""
    match box:
        case Tensor():
            return box
        case dict() | UserDict() | MappingProxyType():
            return opened(box.get("y", box.get("out")))
        case list() | tuple() | set() | frozenset() | deque():
            return opened(next(x for x in box if x is not None))
        case WithList():
            return opened(box.states)
        case SimpleNamespace():
            return box.inner.y
        case Output() | Slotted():
            return box.y
    return box()


class Boxed(nn.Module):
    def __init__(self, inner, box):
        super().__init__()
        self.inner, self.box = inner, box

    def forward(self, x):
        return BOXES[self.box](self.inner(x))


# ---- layers in a row ----------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Layers in a list or in lists of lists; its output is a tensor, or hidden in an object.

    Args:
        layers: names in `LAYERS`.
        nested: two layers to a list.
        form: of the output: "tensor", or a name in `BOXES`.
        tied: the first and the last `linear` share their weight.
        checkpointed: indices of layers that are computed again in backward.
        boxes: index of a layer → name in `BOXES` of what holds its output.
    """

    def __init__(self, layers, nested=False, form="tensor", tied=False, checkpointed=(), boxes=None):
        super().__init__()
        made = [LAYERS[name]() for name in layers]
        linears = [layer for layer in made if type(layer) is nn.Linear]
        if tied and len(linears) > 1:
            linears[-1].weight = linears[0].weight
        made = [Checkpointed(layer) if i in checkpointed else layer for i, layer in enumerate(made)]
        made = [Boxed(layer, boxes[i]) if boxes and i in boxes else layer for i, layer in enumerate(made)]
        pairs = [nn.ModuleList(made[i : i + 2]) for i in range(0, len(made), 2)]
        self.layers, self.form = nn.ModuleList(pairs if nested else made), form

    def flat(self):
        return [one for some in self.layers for one in (some if isinstance(some, nn.ModuleList) else [some])]

    def forward(self, x, skip=None):
        for i, layer in enumerate(self.flat()):
            x = x if i == skip else opened(layer(x))
        return x if self.form == "tensor" else BOXES[self.form](x)


def draw_stack(rng: random.Random, least: int = 1, most: int = 5) -> dict:
    names = [rng.choice(list(LAYERS)) for _ in range(rng.randint(least, most))]
    if not any(name != "gelu" for name in names):
        names[0] = "linear"
    return {
        "layers": names,
        "nested": rng.random() < 0.3,
        "form": rng.choice(["tensor"] * 4 + ["dict", "tuple", "dataclass", "namespace"]),
        "tied": rng.random() < 0.3,
        "checkpointed": tuple(i for i in range(len(names)) if rng.random() < 0.2),
        "boxes": {i: rng.choice(list(BOXES)) for i in range(len(names)) if rng.random() < 0.3},
    }


def draw_frozen(rng: random.Random, model: nn.Module) -> list[str]:
    """Names of parameters to freeze; at least one is left."""
    names = [name for name, p in model.named_parameters() if p.requires_grad and p.numel()]
    share = rng.choice([0, 0, 0.2, 0.6])
    frozen = [name for name in names if rng.random() < share]
    return frozen[: len(names) - 1]


def freeze(model: nn.Module, frozen: list[str]) -> nn.Module:
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model
