"""Equality: what differs is seen, down to the last bit; NaN is never overlooked."""

import copy
import math

import pytest
import torch
from torch import nn

from lib import run
from lib.conjugate import identity, pair
from lib.lab.claims import ClaimError, claim
from lib.mesh import Group
from lib.verify import assert_matches_serial, gradients, largest_difference, replicas_equal, weights

NAN, INF = math.nan, math.inf


def test_largest_difference():
    a = {"x": torch.tensor([3.0, 4.0]), "zero": torch.zeros(2), "empty": torch.zeros(0)}
    assert largest_difference(a, a) == 0
    assert largest_difference(a | {"x": torch.tensor([3.0, 4.5])}, a) == pytest.approx(0.1)
    assert largest_difference(a | {"zero": torch.tensor([0.0, 1e-3])}, a) == pytest.approx(1e-3)
    half = {"x": torch.tensor([300.0, 400.0], dtype=torch.float16)}  # its norm, squared, is beyond float16
    assert largest_difference(half, {"x": torch.tensor([300.0, 400.0])}) == 0
    assert largest_difference({"n": torch.tensor([1, 2])}, {"n": torch.tensor([1, 2])}) == 0


def test_largest_difference_does_not_overlook_nan():
    good, bad = {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.tensor([1.0, NAN]), "b": torch.ones(2)}
    for got, wanted in ((bad, good), (good, bad), (bad, bad), ({**good, "a": torch.tensor([INF, 1])}, good)):
        difference = largest_difference(got, wanted)
        assert not difference < 1e300
        with pytest.raises(ClaimError):
            claim("it", 0, difference, abs=1e-12)


def test_assert_matches_serial_does_not_overlook_nan():
    serial, parallel = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    parallel.load_state_dict(serial.state_dict())
    parallel.bias.register_hook(lambda gradient: gradient * NAN)
    with pytest.raises(AssertionError, match="gradient of bias is nan"):
        assert_matches_serial(serial, parallel, torch.ones(4, 3, dtype=torch.float64), Group())


@pytest.mark.parametrize("wrong", ["output", "gradient of weight", "gradient of bias", "gradient of the input"])
def test_assert_matches_serial_names_what_is_off(wrong):
    """What a careless parallel layer does: a bias added twice, a partial gradient, a sum that is done twice."""
    serial = nn.Linear(3, 2).double()
    layer = copy.deepcopy(serial)
    if wrong == "output":
        layer.register_forward_hook(lambda module, args, y: y + module.bias.detach())
    elif wrong == "gradient of the input":
        layer.register_forward_pre_hook(lambda module, args: pair(args[0], identity, lambda gradient: 2 * gradient))
    else:
        layer.get_parameter(wrong.split()[-1]).register_hook(lambda gradient: gradient / 2)
    with pytest.raises(AssertionError, match=f"{wrong} is .* of its norm away from the serial tensor"):
        assert_matches_serial(serial, layer, torch.rand(4, 3, dtype=torch.float64), Group())


def test_largest_difference_of_other_things():
    one = {"a": torch.ones(2)}
    with pytest.raises(ValueError, match="only in one of the two: b"):
        largest_difference(one, one | {"b": torch.ones(1)})
    with pytest.raises(ValueError, match=r"a has shape \[1\] instead of \[2\]"):  # it would broadcast
        largest_difference({"a": torch.ones(1)}, one)
    with pytest.raises(ValueError, match="no tensor to compare"):
        largest_difference({}, {})


def test_gradients_and_weights_are_copies():
    model = nn.Linear(2, 1)
    assert gradients(model) == {}
    model(torch.ones(1, 2)).sum().backward()
    grads, before = gradients(model), weights(model)
    model.weight.grad.zero_()
    model.weight.data.zero_()
    assert grads["weight"].tolist() == [[1, 1]] and before["weight"].any() and not before["weight"].requires_grad


def test_replicas_equal_to_the_last_bit():
    def answers(world):
        torch.manual_seed(0)
        model = nn.Module()
        model.scalar = nn.Parameter(torch.tensor(1.0))
        model.slanted = nn.Parameter(torch.randn(3, 2, dtype=torch.float64).t())
        model.small = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        model.none = nn.Parameter(torch.ones(0))
        out = [replicas_equal(model, world)]
        for p in (model.scalar, model.slanted, model.small):
            kept = p.detach().clone()
            if world.rank == world.size - 1:
                p.data = p.data * 1.01 if p.dtype == torch.bfloat16 else torch.nextafter(p.data, p.data + 1)
            out.append(replicas_equal(model, world))
            p.data = kept
        model.scalar.data = torch.tensor(-0.0 if world.rank else 0.0)
        return [*out, replicas_equal(model, world)]

    assert run(answers, 3) == [[True, False, False, False, False]] * 3
    assert replicas_equal(nn.Linear(1, 1), Group())
