"""What programs of other people do, and the numbers of a step must bear."""

import torch
from torch import nn

from lib.doctor.numbers import compare_numbers, read_numbers, watch
from lib.doctor.numbers.names import Names


def recorded(folder, mask=None, norm=None):
    """A linear layer takes two steps in one process."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    if mask is not None:
        model.register_buffer("mask", mask)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = watch(folder, model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3).double()).square().mean()
        loss.backward()
        seen.backward(loss)
        if norm is not None:
            seen.norm(norm)
        optimizer.step()
    return read_numbers(folder)


def test_a_wrapper_inside_of_torch_compile_has_the_plain_names():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(3, 2)

    names = Names([torch.compile(Wrapper(), backend="eager")])
    assert list(names.parameters) == ["weight", "bias"]


def test_a_mask_with_infinite_elements_is_compared(tmp_path):
    causal = torch.full((4, 4), -torch.inf).triu(1)
    one = recorded(tmp_path / "one", causal)
    assert not compare_numbers(one, recorded(tmp_path / "same", causal)).findings
    for name, other in (("shifted", causal.roll(1, 0).tril(1)), ("empty", torch.zeros(4, 4))):
        (found,) = compare_numbers(one, recorded(tmp_path / name, other)).findings
        assert (found.link, found.cause) == ("buffers", "buffer")


def test_a_norm_of_zero_is_a_wrong_norm(tmp_path):
    (found,) = compare_numbers(recorded(tmp_path / "one"), recorded(tmp_path / "zero", norm=0.0)).findings
    assert (found.link, found.cause) == ("norm", "norm leaves out shards")
