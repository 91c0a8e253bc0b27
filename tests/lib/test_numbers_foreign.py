"""What programs of other people do, and the numbers of a step must bear."""

from functools import partial

import pytest
import torch
from torch import nn

from lib.doctor.numbers import CannotSee, compare_numbers, read_numbers, start_from, watch
from lib.doctor.numbers.names import Names
from lib.doctor.numbers.recorded_numbers import check_sum
from lib.doctor.numbers.rows import hashes_of_rows


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


# ---- programs of two layers, of which one run does something else ----------------------------------------------------


class Two(nn.Module):
    """Two layers whose gradients may be of very different sizes."""

    def __init__(self, small=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.small = small

    def forward(self, x):
        return self.second(self.small * self.first(x).tanh() + 1)


def trained(folder, model=None, steps=2, change=None, optimizer=None, dtype=torch.float64, after=None, **options):
    """Some steps of AdamW; `change(model)` before each optimizer step, `after(model, step)` behind it."""
    model = (model or Two()).to(dtype)
    optimizer = (optimizer or partial(torch.optim.AdamW, lr=0.01))(model.parameters())
    seen = watch(folder, model, optimizer, steps=steps, **options)
    x = torch.linspace(-1, 1, 12).view(4, 3).to(dtype)
    for step in range(steps + 1):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if change:
            change(model)
        seen.backward(loss)
        optimizer.step()
        if after:
            after(model, step)
    return read_numbers(folder)


def causes(tmp_path, one, two):
    found = compare_numbers(trained(tmp_path / "one", **one), trained(tmp_path / "two", **two))
    return [finding.cause for finding in found.findings], found


def test_a_small_gradient_of_the_wrong_sign_is_no_rounding(tmp_path):
    """Of float32 nobody says how large rounding is; but two roundings have no common factor."""

    def wrong(model):
        model.first.weight.grad.neg_()

    float32 = {"dtype": torch.float32}
    said, _ = causes(tmp_path, float32 | {"model": Two(1e-4)}, float32 | {"model": Two(1e-4), "change": wrong})
    assert said == ["counted twice"]


def test_a_small_gradient_without_a_factor_is_named_as_doubtful(tmp_path):
    def noise(model):
        model.first.weight.grad.copy_(model.first.weight.grad.flip(0))

    float32 = {"dtype": torch.float32}
    said, found = causes(tmp_path, float32 | {"model": Two(1e-4)}, float32 | {"model": Two(1e-4), "change": noise})
    assert said == [] and found.exit_code == 2, "one of four tensors is too much"
    assert any("first.weight" in sentence and "rounding may be the reason" in sentence for sentence in found.not_seen)


def test_a_narrow_tensor_does_not_excuse_the_others(tmp_path):
    def three_percent(model):
        for p in model.parameters():
            p.grad.mul_(1.03)

    float32 = {"gradient": lambda p: p.grad.float()}
    said, _ = causes(tmp_path, {}, float32)
    assert said == [], "rounded to float32 as they were stored"
    said, _ = causes(tmp_path, {}, float32 | {"change": three_percent})
    assert said == ["one factor"]


def test_zeros_in_one_run_and_no_gradient_in_the_other_differ_where_the_optimizer_moves_them(tmp_path):
    def zeros(model):
        model.first.weight.grad.zero_()

    def none(model):
        model.first.weight.grad = None

    said, found = causes(tmp_path, {"change": zeros}, {"change": none})
    assert said == ["not in the optimizer"] and found.findings[0].link == "updates", "AdamW decays the one"
    plain = {"optimizer": partial(torch.optim.SGD, lr=0.01)}
    assert causes(tmp_path, plain | {"change": zeros}, plain | {"change": none})[0] == []


def test_weights_that_are_written_after_the_optimizer_count(tmp_path):
    """An outer optimizer, as Megatron's: the inner steps a flat copy, and the weights follow."""

    class Outer:
        def __init__(self, parameters):
            self.parameters = list(parameters)
            self.main = [nn.Parameter(p.detach().clone()) for p in self.parameters]
            self.optimizer = torch.optim.AdamW(self.main, lr=0.01)

        def zero_grad(self):
            for p in self.parameters:
                p.grad = None

        @torch.no_grad()
        def step(self):
            for main, p in zip(self.main, self.parameters, strict=True):
                main.grad = p.grad.clone()
            self.optimizer.step()
            for main, p in zip(self.main, self.parameters, strict=True):
                p.copy_(main)

    said, found = causes(tmp_path, {}, {"optimizer": Outer})
    assert said == [] and found.exit_code == 0 and found.looked_at["updates"] == (4, 0)
    said, found = causes(
        tmp_path, {}, {"optimizer": Outer, "after": lambda model, step: model.first.weight.data.zero_()}
    )
    assert said and found.findings[0].link == "updates"


def test_a_tie_has_one_name_whichever_comes_first(tmp_path):
    class Tied(nn.Module):
        def __init__(self, first, second):
            super().__init__()
            torch.manual_seed(0)
            layers = {"embed": nn.Linear(3, 3, bias=False)}
            layers["head"] = nn.Linear(3, 3, bias=False)
            layers["head"].weight = layers["embed"].weight
            self.layers = nn.ModuleDict({name: layers[name] for name in (first, second)})

        def forward(self, x):
            return self.layers["head"](self.layers["embed"](x).tanh())

    said, found = causes(tmp_path, {"model": Tied("embed", "head")}, {"model": Tied("head", "embed")})
    assert said == [] and found.exit_code == 0

    untied = Tied("embed", "head")
    untied.layers["head"].weight = nn.Parameter(untied.layers["embed"].weight.detach().clone())
    said, _ = causes(tmp_path, {"model": Tied("embed", "head")}, {"model": untied})
    assert said == ["untied"]


def test_batches_come_in_many_forms(tmp_path):
    x, mask = torch.arange(6).view(2, 3), torch.ones(3)
    wanted = hashes_of_rows([x, x + 1]).tolist()
    model = nn.Linear(1, 1)
    for batch in ((x, x + 1), ({"b": x + 1, "a": x},), ([x, [x + 1]], None, 3.0, torch.tensor(2.0), mask)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = watch(tmp_path, model, optimizer, steps=1)
        seen.batch(*batch)
        optimizer.step()
        assert read_numbers(tmp_path).ranks[0].steps[0].rows == wanted
    with pytest.raises(CannotSee, match="batch\\(\\) got no tensor with rows"):
        watch(tmp_path, model, optimizer).batch(None, {"n": 3})


def test_rows_that_are_padded_differently_are_not_called_missing(tmp_path):
    model = nn.Linear(1, 1)
    for name, length in (("one", 4), ("two", 6)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = watch(tmp_path / name, model, optimizer, steps=1)
        seen.batch(nn.functional.pad(torch.ones(2, 3), (0, length - 3)))
        optimizer.step()
    with pytest.raises(ValueError, match=r"have shapes \[6\] in .*two, and \[4\] in .*one: pad them"):
        compare_numbers(read_numbers(tmp_path / "one"), read_numbers(tmp_path / "two"))


def test_sparse_gradients_and_frozen_integers(tmp_path):
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 2, sparse=True)
            self.packed = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)

    model = Quantized()
    optimizer = torch.optim.SparseAdam(list(model.embed.parameters()))
    seen = watch(tmp_path, model, optimizer, steps=1)
    model.embed(torch.tensor([1, 3])).sum().backward()
    seen.backward(None)
    optimizer.step()
    found = compare_numbers(read_numbers(tmp_path), read_numbers(tmp_path))
    assert found.exit_code == 0 and "1 frozen parameter of integers (packed)" in found.not_seen


def test_one_process_gets_the_buffers_too(tmp_path):
    def statistics():
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()

    trained_before = statistics()
    trained_before[0].running_mean.fill_(0.5)
    optimizer = torch.optim.SGD(trained_before.parameters(), lr=0.1)
    seen = watch(tmp_path, trained_before, optimizer, steps=1)
    seen.batch(torch.randn(4, 3).double())
    optimizer.step()
    model = statistics()
    start_from(tmp_path, model)
    assert (model[0].running_mean == 0.5).all()


# ---- optimizers that do more than step -------------------------------------------------------------------------------


class ClearsGradients(torch.optim.SGD):
    """Its step calls that of its parent, and then empties the gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


def test_an_optimizer_may_call_its_parent_and_clear_the_gradients(tmp_path):
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)  # now the parent's step has hooks as well
    clears = {"optimizer": partial(ClearsGradients, lr=0.01)}
    said, found = causes(tmp_path, {"optimizer": partial(torch.optim.SGD, lr=0.01)}, clears)
    assert said == [] and found.exit_code == 0 and found.looked_at["clipped"] == (4, 0)


def test_several_optimizers_may_step_in_any_order(tmp_path):
    class Both:
        def __init__(self, parameters, turn):
            parameters = list(parameters)
            both = [torch.optim.AdamW(parameters[:2], lr=0.01), torch.optim.SGD(parameters[2:], lr=0.1)]
            self.listed, self.order = both, both[::turn]

    def recorded_in(folder, turn):
        model = Two().double()
        both = Both(model.parameters(), turn)
        seen = watch(folder, model, both.listed)
        for _ in range(2):
            loss = model(torch.ones(2, 3).double()).square().mean()
            model.zero_grad()
            loss.backward()
            seen.backward(loss)
            for one in both.order:
                one.step()
        return read_numbers(folder)

    found = compare_numbers(recorded_in(tmp_path / "one", 1), recorded_in(tmp_path / "two", -1))
    assert found.exit_code == 0 and found.looked_at["updates"] == (4, 0)


def test_a_small_bias_that_was_drawn_differently_is_found(tmp_path):
    other = Two().float()
    with torch.no_grad():
        other.first.bias.mul_(1e-4)
    wrong = Two().float()
    with torch.no_grad():
        wrong.first.bias.mul_(-1e-4)
    float32 = {"dtype": torch.float32}
    assert causes(tmp_path, float32 | {"model": other}, float32 | {"model": wrong})[0] == ["different weights"]


def test_two_replicas_that_read_the_same_rows_are_found_even_if_one_process_reads_them_twice(tmp_path):
    """`start_from` gives one process what the ranks read: a forgotten sampler as well."""
    folder = tmp_path / "two"
    trained(folder, axes={"dp": (0, 2)})
    plain = torch.load(folder / "rank0.pt") | {"world": 2}
    for step in plain["steps"]:
        step["rows"], step["row_shapes"] = [1, 2], [[3]]
    for rank in (0, 1):
        torch.save(plain | {"rank": rank, "axes": {"dp": (rank, 2)}}, folder / f"rank{rank}.pt")
    alone = plain | {"world": 1, "axes": {}}
    alone["rows"] = {}
    alone["steps"] = [step | {"rows": [1, 2, 1, 2]} for step in plain["steps"]]
    (tmp_path / "one").mkdir()
    torch.save(alone, tmp_path / "one" / "rank0.pt")
    (found,) = compare_numbers(read_numbers(tmp_path / "one"), read_numbers(folder)).findings
    assert found.cause == "data not divided"


def test_sums_do_not_depend_on_which_name_of_a_tie_comes_first(tmp_path):
    class Tied(nn.Module):
        def __init__(self, *names):
            super().__init__()
            torch.manual_seed(0)
            weight = nn.Parameter(torch.randn(5, 3))
            for name in names:
                self.register_parameter(name, weight)

        def forward(self, x):
            return x @ next(self.parameters()).T

    one, two = ({"model": Tied(*names), "sketch": True} for names in (("a", "b"), ("b", "a")))
    said, found = causes(tmp_path, one, two)
    assert said == [] and found.exit_code == 0


def test_copies_that_differ_are_found(tmp_path):
    """In the last bit of one element, on one of two ranks."""
    one = trained(tmp_path / "one")
    trained(tmp_path / "two", axes={"dp": (0, 2)})
    plain = torch.load(tmp_path / "two" / "rank0.pt") | {"world": 2}
    torch.save(plain, tmp_path / "two" / "rank0.pt")
    gradient = plain["steps"][0]["tensors"]["gradients"]["first.weight"]
    gradient["values"][0] = torch.nextafter(gradient["values"][0], torch.tensor(9.0).double())
    gradient["bits"] = check_sum(gradient["values"])
    torch.save(plain | {"rank": 1, "axes": {"dp": (1, 2)}}, tmp_path / "two" / "rank1.pt")
    (found,) = compare_numbers(one, read_numbers(tmp_path / "two")).findings
    assert (found.link, found.cause) == ("gradients", "missing sum")
