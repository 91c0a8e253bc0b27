"""Schedules that are really run: the one-process model's losses, gradients and weights, in the predicted order."""

import re
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from book.trials.trial import in_one, in_stages, merged
from lib import run
from lib.launch import RankError
from lib.mesh import Group
from lib.model import GPT, GPTConfig, loss_term
from lib.pipeline.execute import execute, timeline
from lib.pipeline.schedules.action import Action, Op, Schedule, ScheduleError
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.v_shape import dualpipe_v, v_half, v_min
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v
from lib.pipeline.stage import Stage, cut
from lib.verify import largest_difference

CONFIG = GPTConfig(vocab_size=64, context=8, d_model=16, num_layers=8, num_heads=4, tied=False)
DEEP = replace(CONFIG, num_layers=16)  # for two stages on each of eight ranks
ROWS = 10  # over 4 microbatches: 3, 3, 2, 2
term = partial(loss_term, count=ROWS * CONFIG.context)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(CONFIG.vocab_size, (ROWS, CONFIG.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def model(config=CONFIG, seed=0):
    torch.manual_seed(seed)
    return GPT(config).double()


@cache
def serial(steps=3, config=CONFIG):
    return in_one(partial(model, config), batch, steps)


def apart(schedule, config=CONFIG, make=model, batch=batch, steps=3, wanted=None):
    """Distances of losses, gradients and weights from one process, after some steps on as many ranks."""
    ranks = run(in_stages, schedule.num_ranks, schedule, partial(make, config), batch, steps)
    return distances(ranks, wanted or serial(steps, config))


def distances(ranks, wanted):
    staged = merged(ranks)
    losses = max(abs(a / b - 1) if b else abs(a) for a, b in zip(staged.losses, wanted.losses, strict=True))
    pairs = (staged.gradients, wanted.gradients), (staged.weights, wanted.weights)
    return losses, *(largest_difference(dict(ours), dict(theirs)) for ours, theirs in pairs)


def schedules(n):
    yield from (naive(n, 2), gpipe(n, 4), gpipe(n, 4, last_first=True), one_f_one_b(n, 4), zb_h1(n, 4), zb_h2(n, 4))
    yield from (interleaved(n, max(n, 4), 2), zb_v(n, 4), v_min(n, 4), v_half(n, 4), dualpipe_v(n, 4))


@pytest.mark.thorough("all schedules, on up to eight ranks", keep=1)
@pytest.mark.parametrize("n", [2, 1, 4, 8])
def test_losses_gradients_and_weights_are_the_serial_ones(n):
    cases = [(one, CONFIG if one.num_stages <= CONFIG.num_layers else DEEP) for one in schedules(n)]

    def trained(world):
        return [in_stages(world, schedule, partial(model, config), batch) for schedule, config in cases]

    for (schedule, config), *ranks in zip(cases, *run(trained, n, timeout_s=300), strict=True):
        loss, gradient, weight = distances(ranks, serial(config=config))
        assert loss < 1e-12 and gradient < 1e-12 and weight < 1e-8, schedule.name


def test_another_training_is_seen():
    loss, gradient, weight = apart(gpipe(2, 3), make=partial(model, seed=1))
    assert loss > 1e-6 and gradient > 1e-3 and weight > 1e-3


@pytest.mark.thorough("seconds of several processes")
def test_a_batch_of_which_no_token_counts_has_a_loss_of_zero():
    """In the second step; in the others a microbatch of its own has none. It was NaN, and so were all weights."""

    def some_count(step):
        inputs, targets = batch(step)
        targets = targets.clone()
        targets[0 if step == 1 else ROWS - 1 :] = -100
        return inputs, targets

    wanted = in_one(model, some_count)
    assert wanted.losses[1] == 0 < wanted.losses[2]
    loss, _, weight = apart(gpipe(2, ROWS), batch=some_count, wanted=wanted)
    assert loss < 1e-12 and weight < 1e-8


def test_a_schedule_that_somebody_typed():
    assert apart(Schedule.from_text("0F0 0F1 0I0 0W0 0B1\n1F0 1B0 1F1 1I1 1W1"), steps=1)[0] < 1e-12


def test_halves_give_the_same_bits():
    whole, halves = (merged(run(in_stages, 2, make(2, 4), model, batch, 1)) for make in (one_f_one_b, zb_h1))
    assert all(torch.equal(halves.gradients[name], gradient) for name, gradient in whole.gradients.items())


def evaluates(world, schedule):
    stage = Stage(cut(model(), 2)[world.rank], CONFIG.d_model)
    result = execute(schedule, {world.rank: stage}, world, *batch(0), term)
    return result, stage.microbatches


def test_an_evaluation():
    forward = Schedule.from_text("0F0 0F1\n1F0 1F1")
    ranks = run(evaluates, 2, forward)
    assert ranks[0][0].losses.sum().item() == pytest.approx(serial(1).losses[0], rel=1e-12)
    seen = timeline(forward, [result for result, _ in ranks])
    assert [kept for _, kept in ranks] == [0, 0]
    assert sorted(slot.action for slot in seen.compute) == [Action(s, Op.F, m) for s in (0, 1) for m in (0, 1)]


def misfit(world, schedule, rows, stages):
    stage = Stage(torch.nn.Linear(4, 4), 4)
    try:
        execute(schedule, dict.fromkeys(stages, stage), world, torch.randn(rows, 4), torch.randn(rows, 4), term)
    except ScheduleError as error:
        return str(error)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize(
    ("sizes", "rows", "stages", "message"),
    [
        ((3, 2), 4, [0], "GPipe is for 3 ranks; world has 2: make it for 2"),
        ((2, 2), 4, [5], "has the stages [5]; GPipe gives it [0]"),
        ((2, 8), 4, [0], "4 rows cannot be split into 8 microbatches"),
    ],
)
def test_what_does_not_fit_is_named(sizes, rows, stages, message):
    assert message in run(misfit, 2, gpipe(*sizes), rows, stages)[0]


def hands_on(world, first):
    stage = Stage(torch.nn.Sequential(*(first if world.rank == 0 else [torch.nn.Linear(4, 4)])), 4)
    execute(gpipe(2, 2), {world.rank: stage}, world, torch.randn(4, 3), torch.zeros(4), lambda y, _: y.sum())


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize(
    ("first", "shape"),
    [([torch.nn.Unflatten(1, (3, 1)), torch.nn.Linear(1, 5)], "[2, 3, 5]"), ([torch.nn.Linear(3, 4)], "[2, 4]")],
)
def test_what_does_not_travel_is_named_before_it_is_sent(first, shape):
    """On the rank that made it, while the other waits for something else."""
    with pytest.raises(RankError, match="rank 0 of 2 raised ScheduleError") as failed:
        run(hands_on, 2, first)
    assert f"stage 0 gives float32{shape}, but messages between stages are float32[2, 3, 4]" in str(failed.value)


class Detached(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.detach())


class InPlace(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Conjugate(torch.nn.Linear):
    """Its output and the gradient of its input have the memory of other tensors."""

    def forward(self, x):
        return super().forward(x.conj()).conj()


class Negative(torch.nn.Linear):
    """Its output has the memory of a negative."""

    def forward(self, x):
        y = super().forward(x)
        return torch.complex(y, y).conj().imag


OWN_LAYERS = {"in place": InPlace, "conjugate": Conjugate, "negative": Negative}


def chain(kind):
    """Four modules of width 4, and what they take."""
    torch.manual_seed(0)
    dtype = torch.complex128 if kind in ("complex", "conjugate") else torch.float64
    layers, x = [torch.nn.Linear(4, 4) for _ in range(4)], torch.randn(6, 3, 4, dtype=dtype)
    if kind == "frozen first stages":
        torch.nn.ModuleList(layers[:2]).requires_grad_(False)
    elif kind == "frozen last stages":
        torch.nn.ModuleList(layers[2:]).requires_grad_(False)
    elif kind == "a detached input":
        layers[2] = Detached(4, 4)
    elif kind in OWN_LAYERS:
        layers = [OWN_LAYERS[kind](4, 4) for _ in range(4)]
    else:
        layers[1], layers[3] = torch.nn.Tanh(), torch.nn.Tanh()
    if kind in ("frozen first stages", "no parameters, words"):
        layers[0], x = torch.nn.Embedding(7, 4).requires_grad_(kind[0] == "n"), torch.randint(7, (6, 3))
    return [layer.to(dtype) for layer in layers], x, dtype


def squares(y, target):
    return (y - target).abs().square().sum()


def trains_a_chain(world, schedule, kind, recompute=False):
    """How far the loss and gradients of this rank are from those of one process."""
    layers, x, dtype = chain(kind)
    target = torch.linspace(-1, 1, 72).view(6, 3, 4).double()
    whole = torch.nn.Sequential(*chain(kind)[0])
    wanted = squares(whole(x.clone()), target)
    wanted.backward()
    per, width = 4 // schedule.num_stages, 4 if x.dim() == 2 else None
    stages = {
        s: Stage(torch.nn.Sequential(*layers[per * s : per * s + per]), width, recompute, dtype=dtype)
        for s, rank in enumerate(schedule.rank_of)
        if rank == world.rank
    }
    result = execute(schedule, stages, world, x, target, squares)
    assert not any(stage.microbatches for stage in stages.values())
    worst = abs(result.loss / wanted.detach() - 1).item()
    for s, stage in stages.items():
        for mine, twin in zip(stage.module, whole[per * s : per * s + per], strict=True):
            for p, q in zip(mine.parameters(), twin.parameters(), strict=True):
                got, right = (torch.zeros_like(one) if one.grad is None else one.grad for one in (p, q))
                worst = max(worst, ((got - right).norm() / (right.norm() + (right == 0).all())).item())
    return worst


KINDS = [
    *("frozen first stages", "frozen last stages", "a detached input", "in place", "no parameters"),
    *("no parameters, words", "complex", "conjugate", "negative"),
]


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_stages_of_all_kinds_are_one_process(kind):
    of_two = gpipe(2, 3), one_f_one_b(2, 3), zb_h1(2, 3), zb_h2(2, 3), interleaved(2, 4, 2), zb_v(2, 3)

    def worst(world):
        return {
            (schedule.name, recompute): trains_a_chain(world, schedule, kind, recompute)
            for schedule in of_two
            for recompute in (False, True)[: 1 if kind == "in place" else 2]
        }

    for seen in run(worst, 2, timeout_s=300):
        assert max(seen.values()) < 1e-13, seen


def trains_chains(world, schedule, kinds):
    return {kind: trains_a_chain(world, schedule, kind) for kind in kinds}


def test_a_message_is_the_values_of_what_a_stage_gives():
    """Whatever its memory, forward and backward."""
    for seen in run(trains_chains, 2, one_f_one_b(2, 3), ("conjugate", "negative")):
        assert max(seen.values()) < 1e-13, seen


def test_what_changes_its_input_cannot_be_computed_again():
    with pytest.raises(RankError, match="changes its input in place cannot be recomputed: use recompute=False"):
        run(trains_a_chain, 2, gpipe(2, 3), "in place", True)


def whole_numbers(world, schedule):
    layers = [torch.nn.Identity(), torch.nn.Embedding(7, 4)]
    words = torch.randint(7, (4, 3))
    return execute(schedule, {world.rank: Stage(layers[world.rank])}, world, words, words, lambda y, _: y.sum()).loss


def test_whole_numbers_between_stages_are_refused_in_training():
    with pytest.raises(RankError, match=r"stage 0 gives int64\[2, 3\], and integers have no gradient"):
        run(whole_numbers, 2, gpipe(2, 2))
    assert run(whole_numbers, 2, gpipe(2, 2).forward_only(2))[0].isfinite()


class Gives(torch.nn.Module):
    """A linear layer whose output goes through a function."""

    def __init__(self, give):
        super().__init__()
        self.layer, self.give = torch.nn.Linear(4, 4), give

    def forward(self, x):
        return self.give(self.layer(x))


def in_two_stages(
    give=lambda y: y,
    loss=squares,
    forward_only=False,
    targets=torch.zeros(6, 4),  # noqa: B008
    inputs=torch.ones(6, 4),  # noqa: B008
):
    """Both on one rank."""
    schedule = Schedule.from_text("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1", "here")
    stages = {0: Stage(Gives(give)), 1: Stage(Gives(lambda y: y))}
    return execute(schedule.forward_only() if forward_only else schedule, stages, Group(), inputs, targets, loss)


WRONG_KINDS = {
    "a tuple": (lambda y: (y, None), "stage 0 gives tuple, but messages between stages are float32[3, 4]"),
    "a dict": (lambda y: {"y": y}, "stage 0 gives dict, but messages"),
    "nothing": (lambda y: None, "stage 0 gives NoneType, but messages"),
    "a number": (lambda y: y.sum().item(), "stage 0 gives float, but messages"),
    "a sum": (lambda y: y.sum(), "stage 0 gives float32[], but messages"),
    "fewer rows": (lambda y: y[1:], "stage 0 gives float32[2, 4], but messages"),
    "half": (lambda y: y.half(), "stage 0 gives float16[3, 4], but messages"),
    "sparse": (lambda y: y.to_sparse(), "stage 0 gives sparse_coo float32[3, 4]; use x.to_dense(), because messages"),
    "two": (
        lambda y: TwoTensor(y, y),
        "stage 0 gives TwoTensor, whose values are in other tensors; use the tensors inside, because messages",
    ),
}
WRONG_LOSSES = {
    "per row": (
        lambda y, t: (y - t).square().mean(1),
        "the loss after stage 1 is float32[3]: return",
    ),
    "with the output": (lambda y, t: (squares(y, t), y), "the loss after stage 1 is tuple: return"),
    "a number": (lambda y, t: squares(y, t).item(), "the loss after stage 1 is float: return"),
    "nothing": (lambda y, t: None, "the loss after stage 1 is NoneType: return"),
    "complex": (lambda y, t: (y * 1j).sum(), "the loss after stage 1 is complex64[]: return"),
    "detached": (
        lambda y, t: squares(y, t).detach(),
        "the loss after stage 1 is float32[], without a gradient:",
    ),
    "a count": (lambda y, t: (y > t).sum(), "the loss after stage 1 is int64[], without a gradient:"),
}


def test_wrong_kinds_of_outputs_and_losses_are_named():
    for give, message in WRONG_KINDS.values():
        with pytest.raises(ScheduleError, match=f"^{re.escape(message)}"):
            in_two_stages(give)
    for loss, message in WRONG_LOSSES.values():
        with pytest.raises(ScheduleError, match=f"^{re.escape(message)}"):
            in_two_stages(loss=loss)
    with pytest.raises(ScheduleError, match=r"^the inputs are sparse_coo float32\[6, 4\]; use x.to_dense"):
        in_two_stages(inputs=torch.ones(6, 4).to_sparse())
    assert in_two_stages(loss=lambda y, t: y.sum() if t is None else t, targets=None).loss.isfinite()
    assert in_two_stages(loss=lambda y, t: (y == y).sum(), forward_only=True).loss == 24


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_training_needs_gradients(off):
    with off():
        assert in_two_stages(forward_only=True).loss.isfinite()
        with pytest.raises(ScheduleError, match="here runs backward, but under no_grad: run it outside"):
            in_two_stages()
        stage = Stage(Gives(lambda y: y))
        stage.forward(0, torch.ones(2, 4))
    with pytest.raises(ScheduleError, match="microbatch 0 has no graph here"):
        stage.backward(0, torch.ones(2, 4))
