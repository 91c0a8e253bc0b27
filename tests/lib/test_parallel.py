"""Techniques put together, by hand and in one place: the twin's numbers; and what happens if one group is forgotten."""

import copy
import sys
import time
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn

from lib import comm, run, trace
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.optimizer import ShardedOptimizer
from lib.data_parallel.zero import sharded_gradients
from lib.facts import Fact
from lib.launch import RankError
from lib.layout import Layout
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPTConfig, mean_loss
from lib.parallel import facts_of, parallelize
from lib.pipeline.execute import execute
from lib.pipeline.schedules.action import Action, Op, Schedule, ScheduleError
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.with_reduce import with_reduce
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_v
from lib.pipeline.stage import Stage, stages_of, tie
from lib.placement import parts, shard
from lib.tensor_parallel.gpt import tensor_parallel
from lib.tensor_parallel.vocab import vocab_parallel_loss
from tests.lib.sharding import serial

cloudpickle.register_pickle_by_value(sys.modules[__name__])
CONFIG = GPTConfig(vocab_size=24, context=8, d_model=16, num_layers=4, num_heads=4)
ROWS, STEPS = 8, 3


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def batch(step, config):
    """The first data-parallel rank has few tokens that count, one microbatch of the second has none."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.vocab_size, (ROWS, config.context + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:3, 2:], targets[6] = -100, -100
    return tokens[:, :-1], targets


def by_hand(world, schedule, dp=1, tp=1, sp=False, zero=0, config=CONFIG, forget=None):
    """The largest distance from the twin after some clipped steps: of losses, norms, this rank's parts of weights."""
    mesh = Mesh(MeshShape(dp=dp, pp=schedule.num_ranks, tp=tp), world)
    twin = serial(config)
    optimizer, worst = momentum(twin.parameters()), 0.0
    model = tensor_parallel(copy.deepcopy(twin), mesh.group("tp"), sp)
    stages = stages_of(model, schedule, mesh.group("pp").rank)
    facts = facts_of(stages, mesh, schedule.rank_of)
    if forget in ("slices", "replicas", "other stage"):
        facts = [forgetful(fact, forget, mesh) for fact in facts]
    sums = sharded_gradients(facts, zero) if zero else Gradients(facts)
    ours = ShardedOptimizer(sums, momentum)
    lowered = with_reduce(schedule, each=zero == 2)
    mine = slice(mesh.group("dp").rank * ROWS // dp, (mesh.group("dp").rank + 1) * ROWS // dp)
    for step in range(STEPS):
        inputs, targets = batch(step, config)
        optimizer.zero_grad()
        wanted = mean_loss(twin(inputs), targets)
        wanted.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizer.step()

        count = (targets != -100).sum() if forget != "tokens" else dp * (targets[mine] != -100).sum()
        loss = partial(vocab_parallel_loss, group=mesh.group("tp"), count=count)
        result = execute(lowered, stages, mesh.group("pp"), inputs[mine], targets[mine], loss, sums)
        sums.finish()
        over = mesh.group("dp") if forget == "norm" else world
        clipped = sums.clip(over, 0.1)
        ours.step()
        total = comm.all_reduce(result.loss, mesh.group("dp"))
        worst = max(worst, abs(total - wanted).item(), abs(clipped / norm - 1).item())
    whole = dict(twin.named_parameters())
    for fact in facts:
        right = shard(whole[fact.name].detach(), fact.placement, mesh.group("tp"))
        worst = max(worst, ((fact.parameter - right).norm() / right.norm()).item())
    return worst


def forgetful(fact: Fact, what: str, mesh: Mesh) -> Fact:
    """The fact with one group left out of its sum."""
    dp = mesh.group("dp")
    if what == "slices" and fact.sum_over.size == dp.size * mesh.group("tp").size > dp.size:
        return replace(fact, sum_over=dp)
    if what == "other stage" and fact.name == "embed.token.weight":
        return replace(fact, sum_over=dp)
    if what == "replicas" and fact.sum_over.ranks == dp.ranks:
        return replace(fact, sum_over=Group(ranks=(mesh.world.rank,)))
    return fact


COMPOSED = {
    "slices of the sequence, ZeRO-1": ({"dp": 2, "tp": 2, "sp": True, "zero": 1}, partial(gpipe, 1, 2), "slices"),
    "slices of the sequence, ZeRO-2": ({"dp": 2, "tp": 2, "sp": True, "zero": 2}, partial(gpipe, 1, 2), "slices"),
    "ZeRO-1 under 1F1B": ({"dp": 2, "zero": 1}, partial(one_f_one_b, 2, 4), "replicas"),
    "ZeRO-1 under ZB-V": ({"dp": 2, "zero": 1}, partial(zb_v, 2, 4), "replicas"),
    "ZeRO-2 under ZB-V": ({"dp": 2, "zero": 2}, partial(zb_v, 2, 4), "replicas"),
    "matrices in parts inside stages, tied": ({"tp": 2, "sp": True}, partial(interleaved, 2, 4, 2), "other stage"),
    "clipped over all axes": ({"dp": 2, "tp": 2}, partial(one_f_one_b, 2, 2), "norm"),
    "clipped over all axes, ZeRO-1 and slices": (
        {"dp": 2, "tp": 2, "sp": True, "zero": 1},
        partial(zb_h1, 2, 2),
        "norm",
    ),
    "uneven counts of tokens": ({"dp": 2}, partial(one_f_one_b, 2, 4), "tokens"),
    "heads that ranks share": (
        {"dp": 2, "tp": 4, "sp": True, "zero": 1, "config": replace(CONFIG, num_kv_heads=2)},
        partial(gpipe, 1, 2),
        "slices",
    ),
}


@pytest.mark.thorough("up to eight ranks", keep=1)
@pytest.mark.parametrize("case", COMPOSED)
def test_put_together_by_hand_it_is_the_twin(case):
    axes, make, forgotten = COMPOSED[case]
    schedule = make()
    ranks = axes.get("dp", 1) * axes.get("tp", 1) * schedule.num_ranks
    assert max(run(partial(by_hand, **axes), ranks, schedule)) < 1e-12
    wrong = run(partial(by_hand, forget=forgotten, **axes), ranks, schedule)
    assert max(wrong) > 1e-4, f"nobody would see that {forgotten} was forgotten"


def spread(world, layout, model=None):
    mesh = Mesh(MeshShape(**layout.sizes), world)
    return parallelize(model or serial(CONFIG), mesh, layout, momentum)


def in_one_place(world, layout):
    twin = serial(CONFIG)
    model, worst = spread(world, layout, copy.deepcopy(twin)), 0.0
    optimizer = momentum(twin.parameters())
    for step in range(STEPS):
        inputs, targets = batch(step, CONFIG)
        optimizer.zero_grad()
        wanted = mean_loss(twin(inputs), targets)
        wanted.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizer.step()
        worst = max(worst, abs(model.step(inputs, targets, 0.1) - wanted).item())
    with torch.no_grad():
        for other in (twin, serial(CONFIG)):  # as it is now, and what is loaded from one process
            if other is not twin:
                model.load_full_state_dict(other.state_dict())
            worst = max(worst, abs(model.evaluate(inputs, targets) - mean_loss(other(inputs), targets)).item())
            worst = max(worst, apart(model.full_state_dict(), other, world))
    return worst


def apart(state, twin, world):
    """The largest difference of what rank 0 was given from the twin's state; the others get nothing."""
    assert list(state) == ([] if world.rank else list(twin.state_dict()))
    return max([(x - twin.state_dict()[key]).abs().max().item() for key, x in state.items()], default=0.0)


@pytest.mark.thorough("up to eight ranks", keep=1)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 2, 2, microbatches=4, sequence_parallel=True, zero=1, recompute="selective"),
        Layout(1, 2, 2, schedule="zb-v", stages_per_rank=2, microbatches=4),
        Layout(1, 2, 2, microbatches=4, recompute="full"),
        Layout(2, microbatches=2, zero=3),
        Layout(2, 2, microbatches=4, zero=2),
        Layout(),
    ],
)
def test_in_one_place_it_is_the_twin(layout):
    assert max(run(in_one_place, layout.num_ranks, layout)) < 1e-12


def norms(world, layout):
    """How many ranks the norm of a step's gradients was summed over, for each such sum."""
    model = spread(world, layout)
    with trace.record(world.rank) as recorded:
        model.step(*batch(0, CONFIG), 0.1)
    return [len(e.peers) for e in recorded.events if e.label == "norm"]


def test_a_norm_is_summed_over_no_more_ranks_than_share_the_model():
    assert run(norms, 2, Layout(2, microbatches=2)) == [[], []], "each rank has all of it"
    assert run(norms, 2, Layout(2, microbatches=2, zero=1)) == [[2], [2]]
    assert run(norms, 4, Layout(2, 2, microbatches=2)) == [[2]] * 4, "two stages, and not their replicas"


def test_wrong_state_is_refused_before_anything_is_loaded():
    def load(world):
        model = spread(world, Layout(pp=2, microbatches=2))
        state = serial(CONFIG).state_dict()
        said, before = [], model.evaluate(*batch(0, CONFIG))
        short = {key: torch.zeros_like(x) for key, x in state.items() if key != "head.norm.bias"}
        whole = short | {"head.norm.bias": torch.zeros(16)}
        wrongs = [
            short,
            *({**whole, "head.norm.bias": x} for x in (torch.zeros(3), torch.zeros(16).int(), [0.0] * 16)),
        ]
        for wrong in (*wrongs, whole | {"head.norm.bia": torch.zeros(16)}):
            with pytest.raises((KeyError, ValueError)) as caught:
                model.load_full_state_dict(wrong)
            said.append(str(caught.value))
        return said, before == model.evaluate(*batch(0, CONFIG))

    for said, same in run(load, 2):
        assert "this state has no head.norm.bias: it is of a different model, or incomplete" in said[0] and same
        assert said[1:] == [
            "head.norm.bias has shape [3] instead of [16]",
            "head.norm.bias is int32 instead of float64: convert it first",
            "head.norm.bias is a list instead of a tensor",
            "this state also has head.norm.bia: it is of a different model, or incomplete",
        ]


# ---- stages that train nothing, and stages that share ---------------------------------------------------------------


def half_frozen(frozen):
    """The serial model with some layers frozen."""
    model = serial(CONFIG)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    return model


FIRST, LAST = ("embed", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3", "head")


def fine_tuned(world, layouts):
    """The largest distance from the twin, if half of the layers are frozen."""
    worst = 0.0
    for frozen in (FIRST, LAST):
        twin = half_frozen(frozen)
        optimizer = momentum([p for p in twin.parameters() if p.requires_grad])
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, targets = batch(step, CONFIG)
            mean_loss(twin(inputs), targets).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            optimizer.step()
            decay.step()
        for layout in layouts:
            model = spread(world, layout, half_frozen(frozen))
            decay = torch.optim.lr_scheduler.StepLR(model.optimizer, 1, 0.5)
            for step in range(STEPS):
                model.step(*batch(step, CONFIG), 0.1)
                decay.step()
            for key, got in model.full_state_dict().items():
                worst = max(worst, (got - twin.state_dict()[key]).abs().max().item())
            model.load_full_state_dict(twin.state_dict())
            wanted = mean_loss(twin(inputs), targets)
            worst = max(worst, (model.evaluate(inputs, targets) - wanted).abs().item())
    return worst


@pytest.mark.thorough("seconds of several processes")
def test_a_rank_with_nothing_to_train_takes_part():
    alone = [Layout(pp=2, schedule=name, microbatches=2) for name in ("1f1b", "zb-h1")]
    in_two = [Layout(pp=2, schedule="zb-v", stages_per_rank=2, microbatches=2)]
    assert max(run(fine_tuned, 2, alone + in_two)) < 1e-12
    with_replicas = [Layout(dp=2, pp=2, zero=zero) for zero in (1, 2)]
    assert max(run(fine_tuned, 4, [*with_replicas, Layout(pp=2, tp=2, sequence_parallel=True)])) < 1e-12


def test_a_frozen_model_is_refused():
    for layout in (Layout(pp=2), Layout(dp=2, zero=1), Layout(dp=2, zero=3)):
        with pytest.raises(RankError, match="no parameter of this model requires a gradient, so there is nothing to"):
            run(spread, 2, layout, half_frozen(""))


def test_parameters_that_share_memory_are_refused():
    for layout in (Layout(pp=2), Layout(dp=2, zero=3)):
        with pytest.raises(RankError, match=r"head.linear.weight shares memory .*: tie them, b.weight = a.weight"):
            run(in_shared_memory, 2, layout)


def in_shared_memory(world, layout):
    model = serial(replace(CONFIG, tied=False))
    model.head.linear.weight.data = model.embed.token.weight.data
    spread(world, layout, model)


class Pair(nn.Module):
    """Two square weights, registered in one of two orders."""

    def __init__(self, left, right, swapped):
        super().__init__()
        for name, p in (("right", right), ("left", left)) if swapped else (("left", left), ("right", right)):
            self.register_parameter(name, p)

    def forward(self, x):
        return (x @ self.left).tanh() @ self.right


def own_stages(num_stages, kind):
    """Modules of all stages, which share weights."""
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    pair = [nn.Parameter(torch.randn(8, 8)) for _ in range(2)]
    modules = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_stages)]
    if kind == "a weight at both ends":
        modules[-1][0].weight = modules[0][0].weight
    for i, module in enumerate(modules):
        module.append({"a layer": shared, "two weights": Pair(*pair, i % 2)}.get(kind, nn.Identity()))
    return [module.double() for module in modules]


def in_own_stages(world, schedule, dp, zero, kind, tied=True):
    """The largest distance from one process after some clipped steps in stages that share weights."""
    mesh = Mesh(MeshShape(dp=dp, pp=schedule.num_ranks), world)
    modules = own_stages(schedule.num_stages, kind)
    twin = nn.Sequential(*copy.deepcopy(modules))
    if tied:
        tie(modules)
    stages = {s: Stage(modules[s]) for s in schedule.stages_on(mesh.group("pp").rank)}
    facts = facts_of(stages, mesh, schedule.rank_of)
    sums = sharded_gradients(facts, zero) if zero else Gradients(facts)
    optimizer, ours = momentum(twin.parameters()), ShardedOptimizer(sums, momentum)
    x, target = torch.randn(2, 8, 8).double()
    loss = lambda y, t: (y - t).square().sum() / 64  # noqa: E731
    mine = slice(mesh.group("dp").rank * 8 // dp, (mesh.group("dp").rank + 1) * 8 // dp)
    lowered = with_reduce(schedule, each=zero == 2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(twin(x), target).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizer.step()
        execute(lowered, stages, mesh.group("pp"), x[mine], target[mine], loss, sums)
        sums.finish()
        sums.clip(world, 0.1)
        ours.step()
    pairs = ((a, b) for s in stages for a, b in zip(modules[s].parameters(), twin[s].parameters(), strict=True))
    return max((a - b).abs().max().item() for a, b in pairs)


SHARED = ("nothing", "a weight at both ends", "a layer", "two weights")


def test_own_stages_on_a_rank_may_use_the_same_names():
    def both_stages_of_zero(world, schedule):
        return max(in_own_stages(world, schedule, 2, zero, "nothing") for zero in (1, 2))

    assert max(run(in_own_stages, 2, interleaved(2, 2, 2), 1, 0, "nothing")) < 1e-12
    assert max(run(both_stages_of_zero, 4, interleaved(2, 2, 2))) < 1e-12


@pytest.mark.thorough("seconds of several processes")
def test_own_stages_share_weights():
    def several(world, schedules, dp, zeros):
        return max(in_own_stages(world, s, dp, zero, k) for s in schedules for zero in zeros for k in SHARED)

    assert max(run(several, 2, (zb_h1(2, 4), interleaved(2, 4, 2), zb_v(2, 4)), 1, (0,))) < 1e-12
    assert max(run(several, 3, [one_f_one_b(3, 3)], 1, (0,))) < 1e-12
    assert max(run(several, 4, [one_f_one_b(2, 2)], 2, (0, 1, 2))) < 1e-12


def test_own_stages_that_may_share_a_weight_are_refused():
    assert max(run(in_own_stages, 2, one_f_one_b(2, 2), 1, 0, "nothing", False)) < 1e-12
    for kind in SHARED[1:]:
        with pytest.raises(RankError, match=r"has the values of a weight of stage [01]: if it is one weight, shared"):
            run(in_own_stages, 2, one_f_one_b(2, 2), 1, 0, kind, False)


# ---- facts ----------------------------------------------------------------------------------------------------------


def test_the_two_facts_of_each_parameter():
    def facts(world):
        mesh, schedule = Mesh(MeshShape(dp=2, pp=2, tp=2), world), one_f_one_b(2, 2)
        model = tensor_parallel(serial(CONFIG), mesh.group("tp"), True)
        stages = stages_of(model, schedule, mesh.group("pp").rank)
        return {
            f.name: (f.sum_over.axis, f.sum_over.size, f.copies) for f in facts_of(stages, mesh, schedule.rank_of)
        }

    first, _, last, *_ = run(facts, 8)
    assert first["embed.token.weight"] == last["embed.token.weight"] == ("dp×pp", 4, 4), "tied: both stages"
    assert first["embed.position.weight"] == last["head.norm.bias"] == ("dp×tp", 4, 2), "slices of the sequence"
    assert first["blocks.0.attention.out.bias"] == ("dp×tp", 4, 2)
    assert first["blocks.0.attention.qkv.weight"] == ("dp", 2, 2)
    names = {name for name, _ in serial(CONFIG).named_parameters()}
    assert set(first) | set(last) == names and set(first) & set(last) == {"embed.token.weight"}


# ---- REDUCE is an action --------------------------------------------------------------------------------------------


def left_before(world, schedule, early):
    """Which actions of this rank were still to come when each stage's gradients had begun to leave."""
    mesh = Mesh(MeshShape(dp=2, pp=2), world)
    stages = stages_of(serial(CONFIG), schedule, mesh.group("pp").rank)
    sums, seen = Gradients(facts_of(stages, mesh, schedule.rank_of)), {}
    start, done = sums.start, []

    def noted(stage):
        seen[stage] = len(done)
        return start(stage)

    sums.start = noted
    for stage in stages.values():
        for name in ("forward", "backward"):
            call = getattr(stage, name)
            setattr(stage, name, lambda *args, call=call: (done.append(1), call(*args))[1])
    inputs, targets = batch(0, CONFIG)
    loss = partial(vocab_parallel_loss, group=Group(), count=1)
    execute(with_reduce(schedule), stages, mesh.group("pp"), inputs, targets, loss, sums)
    sums.finish()
    return {stage: len(done) - before for stage, before in seen.items()}


def test_gradients_of_a_stage_leave_when_its_last_backward_is_through():
    """Interleaved: the later of a rank's two stages is through while the earlier one still works."""
    ranks = run(left_before, 4, interleaved(2, 4, 2), True)
    assert ranks[0][2] > 0 == ranks[0][0] and ranks[1][3] > 0 == ranks[1][1]


def slow_sums(world, latency_s, backward_s=0.0):
    """For each REDUCE how long after its last backward's begin it ended, and whether another backward was under way."""
    mesh, schedule = Mesh(MeshShape(dp=2, pp=2), world), interleaved(2, 4, 2)
    stages = stages_of(serial(CONFIG), schedule, mesh.group("pp").rank)
    sums = Gradients(facts_of(stages, mesh, schedule.rank_of))
    loss = partial(vocab_parallel_loss, group=Group(), count=1)
    earlier = stages[min(stages)]
    earlier.backward = lambda *args, call=earlier.backward: (call(*args), time.sleep(backward_s))[0]
    with comm.link(alpha_s=latency_s, bandwidth_Bps=1e12, axis="dp"):
        slots = execute(with_reduce(schedule), stages, mesh.group("pp"), *batch(0, CONFIG), loss, sums).slots
        sums.finish()
    began_s = {slot.action.stage: slot.start for slot in slots if slot.action.op == Op.B}  # its last one
    ends = {slot.action.stage: slot.end for slot in slots if slot.action.op == Op.REDUCE}
    last = max(began_s.values())
    return {stage: (end - began_s[stage], began_s[stage] < last < end) for stage, end in ends.items()}


@pytest.mark.thorough("seconds of several processes")
def test_a_measured_reduce_runs_until_its_sums_are_there():
    latency_s = 0.1  # of one of the two steps of an all-reduce of two ranks
    for rank in run(slow_sums, 4, latency_s):
        first, last = (rank[stage] for stage in sorted(rank)[::-1])
        assert 2 * latency_s < min(first[0], last[0])
        assert first[1] and not last[1], "the first leaves while there is still work, the last when all is done"
    without_head = run(slow_sums, 4, 0.0, 0.2)[::2]  # the tied weight's sum waits for the first stage's backwards
    assert max(rank[2][0] for rank in without_head) < 0.2, "it ends when the sums have arrived, and not when asked"


def test_a_schedule_without_reduce_is_refused_where_there_are_replicas():
    def forgets(world):
        stages = stages_of(serial(CONFIG), gpipe(1, 2), 0)
        sums = Gradients(facts_of(stages, Mesh(MeshShape(dp=2), world)))
        with pytest.raises(ScheduleError, match="GPipe has no REDUCE, so gradients would not be summed"):
            execute(gpipe(1, 2), stages, Group(), *batch(0, CONFIG), mean_loss, sums)
        with pytest.raises(ScheduleError, match="GPipe has a REDUCE but no object to do it: give reduce="):
            execute(with_reduce(gpipe(1, 2)), stages, Group(), *batch(0, CONFIG), mean_loss)

    run(forgets, 2)


def test_what_is_cut_already_is_refused():
    def twice(world):
        model = tensor_parallel(serial(CONFIG), world)
        with pytest.raises(ValueError, match="this model is already sharded"):
            tensor_parallel(model, world)

    run(twice, 2)


def test_a_mesh_that_is_not_the_layouts_is_refused():
    def refused(world):
        said = []
        for shape, layout, dtype in (
            (MeshShape(pp=2, dp=1, tp=1), Layout(pp=2), None),
            (MeshShape(dp=2, pp=1, tp=1), Layout(pp=2), None),
            (MeshShape(dp=2, pp=1, tp=1), Layout(dp=2), torch.bfloat16),
        ):
            with pytest.raises(ValueError) as caught:
                parallelize(serial(CONFIG), Mesh(shape, world), layout, momentum, dtype=dtype)
            said.append(str(caught.value))
        return said

    for other_order, other_axis, mixed in run(refused, 2):
        assert other_order == "the layout needs a mesh of dp=1 x pp=2 x tp=1, but got pp=2 x dp=1 x tp=1"
        assert "but got dp=2 x pp=1 x tp=1" in other_axis and "dtype needs master weights" in mixed


def test_a_model_that_is_no_gpt_is_refused():
    def refused(world):
        model, mesh = nn.Sequential(nn.Linear(8, 8)), Mesh(MeshShape(dp=1, pp=1, tp=2), world)
        with pytest.raises(ValueError) as caught:
            parallelize(model, mesh, Layout(tp=2), momentum)
        return str(caught.value)

    for said in run(refused, 2):
        assert "parallelize takes a GPT of lib/model.py, and Sequential is none: use assemble(), which takes" in said


def test_steps_without_a_number_drop_other_elements():
    def losses(world):
        torch.manual_seed(world.rank)
        model = spread(world, Layout(tp=2), serial(replace(CONFIG, dropout=0.5)))
        numbers = (None, None, 1, None, 0)
        found = [model.backward(*batch(0, CONFIG), *([] if k is None else [k])).item() for k in numbers]
        return found

    first, second, again, third, zero = run(losses, 2)[0]
    assert first == zero and second == again and len({first, second, third}) == 3


def test_axes_in_another_order_are_the_same_model():
    layout = Layout(2, 2, 2, order="tp,dp,pp", microbatches=2, zero=1)
    assert max(run(in_one_place, 8, layout)) < 1e-12


def test_parts_are_named_as_in_the_serial_model():
    def names(world):
        return list(parts(tensor_parallel(serial(CONFIG), world, True))) == list(serial(CONFIG).state_dict())

    assert all(run(names, 2))


def test_reduce_is_written_parsed_and_stands_behind_the_last_backward():
    schedule = with_reduce(one_f_one_b(2, 2))
    assert Schedule.from_text(schedule.to_text()).actions == schedule.actions
    assert [row[-1] for row in schedule.actions] == [Action.parse("0REDUCE"), Action.parse("1REDUCE")]
    each = with_reduce(zb_h1(2, 2), each=True)
    for row in each.actions:
        for before, action in zip(row, row[1:], strict=False):
            if action.op == Op.REDUCE:
                assert before.op in (Op.W, Op.B) and before.microbatch == action.microbatch
    assert sum(action.op == Op.REDUCE for row in each.actions for action in row) == 4
