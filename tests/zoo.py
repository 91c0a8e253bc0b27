"""A zoo of layers x[b, T, D] → x[b, T, D], drawn at random: what people build, and what breaks careless wrappers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace

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
    "gelu": nn.GELU,
}


@dataclass
class Output:
    y: Tensor
    beside: tuple


class Stack(nn.Module):
    """Layers in a list or in lists of lists; its output is a tensor, or hidden in an object.

    Args:
        layers: names in `LAYERS`.
        nested: two layers to a list.
        form: of the output: tensor, dict, tuple, dataclass, namespace.
        tied: the first and the last `linear` share their weight.
    """

    def __init__(self, layers, nested=False, form="tensor", tied=False, checkpointed=()):
        super().__init__()
        made = [LAYERS[name]() for name in layers]
        linears = [layer for layer in made if type(layer) is nn.Linear]
        if tied and len(linears) > 1:
            linears[-1].weight = linears[0].weight
        made = [Checkpointed(layer) if i in checkpointed else layer for i, layer in enumerate(made)]
        pairs = [nn.ModuleList(made[i : i + 2]) for i in range(0, len(made), 2)]
        self.layers, self.form = nn.ModuleList(pairs if nested else made), form

    def flat(self):
        return [one for some in self.layers for one in (some if isinstance(some, nn.ModuleList) else [some])]

    def forward(self, x, skip=None):
        for i, layer in enumerate(self.flat()):
            x = x if i == skip else layer(x)
        match self.form:
            case "dict":
                return {"y": x, "n": 1}
            case "tuple":
                return x, None
            case "dataclass":
                return Output(x, (x.detach(),))
            case "namespace":
                return SimpleNamespace(inner=SimpleNamespace(y=x))
        return x


def tensor_of(output) -> Tensor:
    match output:
        case Tensor():
            return output
        case dict():
            return output["y"]
        case tuple():
            return output[0]
        case SimpleNamespace():
            return output.inner.y
    return output.y


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
