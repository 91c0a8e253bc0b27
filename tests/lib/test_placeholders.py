"""Placeholders: what describes a tensor is answered, what clears a gradient is seen, and all else is refused."""

import copy

import pytest
import torch
from torch import nn

from lib.data_parallel.placeholders import (
    GRADIENT_OF_A_SHARD,
    GradientPlaceholder,
    Placeholders,
    ShardedParameter,
    accumulates,
    with_values,
)
from tests.lib.sharding import said

CLEARS = {  # → whether the placeholders are gone, or set to zero
    "model.zero_grad()": (lambda m, o: m.zero_grad(), "gone"),
    "model.zero_grad(set_to_none=False)": (lambda m, o: m.zero_grad(set_to_none=False), "zeroed"),
    "optimizer.zero_grad()": (lambda m, o: o.zero_grad(), "gone"),
    "optimizer.zero_grad(set_to_none=False)": (lambda m, o: o.zero_grad(set_to_none=False), "zeroed"),
    "p.grad = None": (lambda m, o: [setattr(p, "grad", None) for p in m.parameters()], "gone"),
    "p.grad = a tensor": (lambda m, o: [setattr(p, "grad", torch.ones_like(p)) for p in m.parameters()], "gone"),
    "p.grad.zero_()": (lambda m, o: [p.grad.zero_() for p in m.parameters()], "zeroed"),
    "p.grad.data.zero_()": (lambda m, o: [p.grad.data.zero_() for p in m.parameters()], "zeroed"),
    "p.grad.detach_(); zero_()": (lambda m, o: [p.grad.detach_().zero_() for p in m.parameters()], "zeroed"),
    "foreach": (lambda m, o: torch._foreach_zero_([p.grad for p in m.parameters()]), "zeroed"),
}
READS = [
    lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1).step(),
    lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=True).step(),
    lambda m: torch.optim.AdamW(m.parameters(), lr=0.1).step(),
    lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True).step(),
    lambda m: m.weight.grad.norm(),
    lambda m: m.weight.grad.isfinite(),
    lambda m: m.weight.grad.mul_(2),
    lambda m: m.weight.grad.data.mul_(2),
    lambda m: m.weight.grad.clone(),
    lambda m: m.weight.grad.numpy(),
    lambda m: m.weight.grad.add_(m.weight),
    lambda m: m.weight.grad[0],
    lambda m: torch.stack([m.weight.grad]),
    lambda m: copy.deepcopy(m.weight.grad),
]


def placed():
    module = nn.Linear(3, 2)
    params = [*module.parameters()]
    placeholders = Placeholders(params, ["weight", "bias"], GRADIENT_OF_A_SHARD)
    for i in (0, 1):
        placeholders.place(i)
    return module, placeholders


@pytest.mark.parametrize("way", CLEARS)
def test_each_way_of_clearing_is_seen(way):
    module, placeholders = placed()
    clear, result = CLEARS[way]
    assert placeholders.gone() == placeholders.zeroed() == set()
    clear(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert {"gone": placeholders.gone(), "zeroed": placeholders.zeroed()}[result] == {0, 1}
    assert {"gone": placeholders.zeroed(), "zeroed": placeholders.gone()}[result] == set()
    for i in (0, 1):
        placeholders.place(i)
    assert placeholders.gone() == placeholders.zeroed() == set()


@pytest.mark.parametrize("read", READS)
def test_whatever_reads_or_writes_a_gradient_that_is_elsewhere_is_refused(read):
    module, placeholders = placed()
    text = said(lambda: read(module))
    assert "weight has no gradient to read or write here" in text and "clip_gradients(max_norm)" in text
    assert placeholders.gone() == placeholders.zeroed() == set()


def test_a_placeholder_describes_itself_and_holds_no_memory():
    module, placeholders = placed()
    grad, p = module.weight.grad, module.weight
    assert (grad.shape, grad.dtype, grad.device, grad.numel(), grad.is_sparse) == (
        p.shape,
        p.dtype,
        p.device,
        6,
        False,
    )
    assert repr(grad) == "GradientPlaceholder(float32[2, 3])"
    assert grad.untyped_storage().data_ptr() == p.untyped_storage().data_ptr()
    placeholders.remove_all()
    assert p.grad is None and not placeholders.placed
    for empty in (nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(2, 0))):
        empty.grad = GradientPlaceholder.of(empty, empty, "")
        assert empty.grad.shape == empty.shape


def test_a_sharded_parameter_has_its_values_inside_with_values_alone():
    p = nn.Parameter(torch.full((), torch.nan).expand(2, 2))
    p.__class__ = ShardedParameter
    assert "full_state_dict() gathers them" in said(lambda: p + 1)
    with with_values([p], {id(p): torch.ones(2, 2)}):
        assert type(p) is nn.Parameter and p.sum() == 4
    assert isinstance(p, ShardedParameter)
    with with_values([p], {}):
        assert p.isnan().all()
    p.grad = torch.ones(2, 2)
    assert p.requires_grad_(False) is p and p.grad.sum() == 4 and p.new_zeros(3).sum() == 0
    assert torch.zeros_like(p).shape == (2, 2) and hash(p) == id(p)


def test_a_hook_can_tell_whether_backward_adds_to_a_gradient():
    p, seen = nn.Parameter(torch.ones(2)), []
    p.register_hook(lambda gradient: seen.append(accumulates(p)))
    x = torch.ones(2, requires_grad=True)
    (p * x).sum().backward()
    (p * x).sum().backward(inputs=[p])
    torch.autograd.grad((p * x).sum(), [p, x])
    (p * x).sum().backward(inputs=[x])
    assert seen == [True, True, False]
