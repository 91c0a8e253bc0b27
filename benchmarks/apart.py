"""A GPT whose queries, keys and values have a layer each: a fused one, `parallelize_module` would cut wrongly."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lib.model import GPT, Attention


class _Apart(nn.Module):
    """An attention with the values of a fused one."""

    def __init__(self, serial: Attention) -> None:
        super().__init__()
        self.d_head, widths, self.out = serial.heads.d_head, serial.heads.widths, serial.out
        self.grouped = widths[0] != widths[1]
        weights, biases = (x.split(widths) for x in (serial.qkv.weight, serial.qkv.bias))
        self.q, self.k, self.v = (_linear(weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.out(y.transpose(1, 2).flatten(2))


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight, made.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
    return made


def apart(model: GPT) -> GPT:
    """The model, changed in place."""
    for block in model.blocks:
        block.attention = _Apart(block.attention)
    return model


def together(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names of the serial GPT."""
    whole = dict(state)
    for name in state:
        if ".attention.q." in name:
            each = [whole.pop(name.replace(".q.", f".{one}.")) for one in "qkv"]
            whole[name.replace(".q.", ".qkv.")] = torch.cat(each)
    return whole
