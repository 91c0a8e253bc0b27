"""Answers to the exercises of chapter 08: right ones, and one for each mistake that has a name."""

import math
from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from lib import comm
from lib.model import mean_loss
from lib.pipeline.balance import balanced
from lib.pipeline.schedules import gpipe as gpipes
from lib.pipeline.schedules import one_f_one_b
from lib.pipeline.schedules.action import Action, Op
from lib.pipeline.stage import Stage

# ---- 08.1


def best_by(score):
    """The answer to 08.1, of what is made small."""

    def answer(costs, head, num_stages):
        def stages(borders):
            return [costs[a:b] for a, b in pairwise((0, *borders, len(costs)))]

        cuts = map(stages, combinations(range(1, len(costs)), num_stages - 1))
        return [len(stage) for stage in min(cuts, key=lambda cut: score([sum(s) for s in cut], head))]

    return answer


def with_head(work, head):
    return [*work[:-1], work[-1] + head]


def right_cut_by_dynamic_programming(costs, head, num_stages):
    costs = [*costs[:-1], costs[-1] + head]
    return torch.tensor([len(part) for part in balanced(costs, num_stages)])


def right_cut_by_a_limit(costs, head, num_stages):
    """The smallest limit with which stages can be filled from the end; each keeps a layer for every stage to come."""

    def filled(limit):
        counts, work = [1], costs[-1] + head
        for place, cost in reversed([*enumerate(costs[:-1])]):
            stages_to_come = num_stages - len(counts)
            if stages_to_come and (work + cost > limit or place + 1 == stages_to_come):
                counts, work = [0, *counts], 0
            counts[0] += 1
            work += cost
            if work > limit:
                return None
        return counts if costs[-1] + head <= limit else None

    return next(filter(None, map(filled, range(sum(costs) + head + 1))))


def allows_empty_stages(costs, head, num_stages):
    @cache
    def best(first, stages):
        if stages == 1:
            return sum(costs[first:]) + head, [len(costs) - first]
        ways = []
        for end in range(first, len(costs) + 1):
            most, rest = best(end, stages - 1)
            ways.append((max(sum(costs[first:end]), most), [end - first, *rest]))
        return min(ways)

    return best(0, num_stages)[1]


def by_count(costs, head, num_stages):
    return [len(part) for part in torch.arange(len(costs)).tensor_split(num_stages)]


def last_takes_the_rest(costs, head, num_stages):
    each = len(costs) // num_stages
    return [each] * (num_stages - 1) + [len(costs) - (num_stages - 1) * each]


def filled_to_the_mean(costs, head, num_stages, over=False):
    mean, stages = (sum(costs) + head) / num_stages, [[]]
    for cost in costs:
        full = sum(stages[-1]) >= mean if over else sum(stages[-1]) + cost > mean
        if full and len(stages) < num_stages:
            stages.append([])
        stages[-1].append(cost)
    return [len(stage) for stage in stages]


def ends_of_stages(costs, head, num_stages):
    return torch.tensor(by_count(costs, head, num_stages)).cumsum(0).tolist()


def first_layers(costs, head, num_stages):
    return [0, *ends_of_stages(costs, head, num_stages)[:-1]]


def borders_inside(costs, head, num_stages):
    return ends_of_stages(costs, head, num_stages)[:-1]


def halves_too_many(costs, head, num_stages):
    return [count + 0.5 for count in right_cut_by_a_limit(costs, head, num_stages)]


# ---- 08.2


def step(
    stage, x, wanted, group, into=None, starts=None, goes=None, times=1, comes_back=True, leaf=True, whole=False
):
    """The answer to 08.2, with a place for each mistake."""
    is_first, is_last, loss = group.rank == 0, group.rank == group.size - 1, None
    came = x if is_first else comm.recv(x, group, src=group.rank - 1).wait()
    x = (into(came, x) if into else came).requires_grad_(leaf)
    y = stage(x)
    if is_last:
        loss = (y - wanted).square().mean()
    else:
        comm.send(y, group, dst=group.rank + 1).wait()
    if whole:
        comm.all_gather(torch.cat([p.flatten() for p in stage.parameters()]), group)
    if is_last or comes_back:
        of_y = None if is_last else comm.recv(y, group, src=group.rank + 1).wait()
        of_y = starts(of_y, y, wanted) if starts and not is_last else of_y
        y = loss if is_last else y
        if goes:
            y.register_hook(lambda gradient: setattr(y, "gradient", gradient))
        for i in range(times):
            y.backward(of_y, retain_graph=i < times - 1)
    if comes_back and not is_first:
        of_x = torch.zeros_like(x) if x.grad is None else x.grad
        comm.send(goes(of_x, y) if goes else of_x, group, dst=group.rank - 1).wait()
    return loss, x.grad


def steps(**wrong):
    return lambda *given: step(*given, **wrong)


def of_own_loss(of_y, y, wanted):
    return torch.autograd.grad((y - wanted).square().mean(), y, retain_graph=True)[0]


def right_step_by_torch_distributed(stage, x, wanted, group):
    before, behind = group.rank - 1, group.rank + 1
    came = x.clone()
    if before >= 0:
        dist.recv(came, before)
    came.requires_grad = True
    y = stage(came)
    if behind < group.size:
        dist.send(y.detach(), behind)
        of_y = torch.empty_like(x)
        dist.recv(of_y, behind)
        loss, end = None, (y * of_y).sum()
    else:
        loss = end = nn.functional.mse_loss(y, wanted)
    of_x, *gradients = torch.autograd.grad(end, [came, *stage.parameters()])
    for p, gradient in zip(stage.parameters(), gradients, strict=True):
        p.grad = gradient
    if before >= 0:
        dist.send(of_x, before)
    return loss, of_x


def right_step_by_stages(module, x, wanted, group):
    stage, last = Stage(module), group.rank == group.size - 1
    came = comm.recv(x, group, group.rank - 1).wait() if group.rank else x
    y = stage.forward(0, came, (lambda y: (y - wanted).square().mean()) if last else None)
    going = [] if last else [comm.send(y, group, group.rank + 1)]
    of_x = stage.backward(0, None if last else comm.recv(y, group, group.rank + 1).wait())
    going += [comm.send(of_x, group, group.rank - 1)] if group.rank else []
    for pending in going:
        pending.wait()
    return [y.item() if last else None, of_x]


def sends_back_what_came(stage, x, wanted, group):
    """The gradient of its output."""
    loss = None
    came = (comm.recv(x, group, group.rank - 1).wait() if group.rank else x).detach().requires_grad_()
    y = stage(came)
    y.retain_grad()
    if group.rank == group.size - 1:
        loss = (y - wanted).square().mean()
        loss.backward()
    else:
        comm.send(y, group, group.rank + 1).wait()
        y.backward(comm.recv(y, group, group.rank + 1).wait())
    if group.rank:
        comm.send(y.grad, group, group.rank - 1).wait()
    return loss, came.grad


def goes_back_for_each(stage, x, wanted, group):
    """Once for what is sent back, and once more for the weights."""
    loss = None
    came = (comm.recv(x, group, group.rank - 1).wait() if group.rank else x).detach().requires_grad_()
    y = stage(came)
    if group.rank == group.size - 1:
        loss = end = (y - wanted).square().mean()
        of_y = None
    else:
        comm.send(y, group, group.rank + 1).wait()
        end, of_y = y, comm.recv(y, group, group.rank + 1).wait()
    end.backward(of_y, retain_graph=True)
    of_x = came.grad.clone()
    if group.rank:
        comm.send(of_x, group, group.rank - 1).wait()
    end.backward(of_y)
    return loss, of_x


def without_a_leaf_on_rank_0(stage, x, wanted, group):
    loss, of_x = step(stage, x, wanted, group)
    return loss, of_x if group.rank else None


def by_grad_alone(are_without):
    """autograd.grad on these ranks, by rank and number of ranks: their weights get nothing."""

    def answer(stage, x, wanted, group):
        is_last, loss = group.rank == group.size - 1, None
        came = comm.recv(x, group, group.rank - 1).wait() if group.rank else x
        came.requires_grad_()
        y = stage(came)
        if is_last:
            loss = end = (y - wanted).square().mean()
            of_y = None
        else:
            comm.send(y, group, group.rank + 1).wait()
            end, of_y = y, comm.recv(y, group, group.rank + 1).wait()
        if are_without(group.rank, group.size):
            (of_x,) = torch.autograd.grad(end, came, of_y)
        else:
            end.backward(of_y)
            of_x = came.grad
        if group.rank:
            comm.send(of_x, group, group.rank - 1).wait()
        return loss, of_x

    return answer


def hands_the_loss_round(stage, x, wanted, group):
    loss, of_x = step(stage, x, wanted, group)
    loss = torch.zeros((), dtype=x.dtype) if loss is None else loss.detach()
    dist.broadcast(loss, group.size - 1)
    return loss, of_x


def updates(stage, x, wanted, group):
    found = step(stage, x, wanted, group)
    torch.optim.SGD(stage.parameters(), lr=0.1).step()
    return found


def right_step_in_numpy(stage, x, wanted, group):
    loss, of_x = step(stage, x, wanted, group)
    return None if loss is None else loss.detach().numpy(), of_x


# ---- 08.3


def written(num_ranks, num_microbatches, forth=range, back=range, stage=lambda rank: rank, which=("F", "B")):
    """The answer to 08.3, with a place for each mistake."""
    lines = []
    for rank in range(num_ranks):
        orders = {"F": forth(num_microbatches), "B": back(num_microbatches)}
        lines.append(" ".join(f"{stage(rank)}{op}{m}" for op in which for m in orders[op]))
    return "\n".join(lines)


def writing(**wrong):
    return lambda *case: written(*case, **wrong)


MISREAD = (  # what is made of a line's actions, in the order of `lib.check.pipelines.written.misread`
    lambda row: [a._replace(stage=0) for a in row],
    lambda row: [Action(m, op, s) if op == Op.B else Action(s, op, m) for s, op, m in row],
    lambda row: [a._replace(stage=a.stage + 1) for a in row],
    lambda row: [a._replace(microbatch=a.microbatch + 1) for a in row],
    lambda row: [*row, Action(row[-1].stage, Op.B, max(a.microbatch for a in row) + 1)],
    None,
)


def miswritten(right):
    """A right schedule, each line of which is written in another way; without one, all lines are one."""

    def by(change):
        def answer(*case):
            text = right(*case)
            if change is None:
                return text.replace("\n", " ")
            return [change([*map(Action.parse, line.split())]) for line in text.splitlines()]

        return answer

    return by


def changed(rank, change):
    """A right schedule, of which one rank's actions are others."""

    def answer(num_ranks, num_microbatches):
        rows = list(gpipes.gpipe(num_ranks, num_microbatches).actions)
        rows[rank] = change(rows[rank])
        return rows

    return answer


def right_gpipe_last_first(num_ranks, num_microbatches):
    return gpipes.gpipe(num_ranks, num_microbatches, last_first=True)


def right_gpipe_in_actions(num_ranks, num_microbatches):
    forth = [[Action(rank, Op.F, m) for m in range(num_microbatches)] for rank in range(num_ranks)]
    return [row + [Action(a.stage, Op.B, a.microbatch) for a in row] for row in forth]


def right_gpipe_in_lines(num_ranks, num_microbatches):
    lines = written(num_ranks, num_microbatches, forth=lambda m: range(m)[::-1]).splitlines()
    return [f"rank {rank}: {line}  # {rank}" for rank, line in enumerate(lines)]


# ---- 08.4


def accumulate(
    model,
    microbatches,
    weigh=lambda n, rows, all_n, all_rows, M: n / all_n,
    empty=False,
    loss_of=None,
    counts_if=lambda targets: targets != -100,
):
    """The answer to 08.4, with a place for each mistake."""
    counts = [int(counts_if(targets).sum()) for _, targets in microbatches]
    rows = [len(x) for x, _ in microbatches]
    losses, weights = [], []
    for (x, targets), n, b in zip(microbatches, counts, rows, strict=True):
        if empty:
            model.zero_grad()
        weights.append(weigh(n, b, sum(counts), sum(rows), len(counts)))
        loss = mean_loss(model(x), targets)
        (loss * weights[-1]).backward()
        losses.append(loss.item())
    if loss_of:
        return loss_of(losses)
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True))


def accumulating(**wrong):
    return lambda *given: accumulate(*given, **wrong)


def right_sums_divided_at_the_end(model, microbatches):
    total, count = 0, 0
    for x, targets in microbatches:
        loss = cross_entropy(model(x).flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        total, count = total + loss.detach(), count + (targets != -100).sum()
    for p in model.parameters():
        p.grad /= count
    return total / count


def right_by_autograd_grad(model, microbatches):
    parameters, count = [*model.parameters()], sum((targets >= 0).sum() for _, targets in microbatches)
    total = torch.zeros((), dtype=torch.float64)
    for x, targets in microbatches:
        loss = -model(x).log_softmax(-1)[targets >= 0].gather(-1, targets[targets >= 0][:, None]).sum() / count
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient if p.grad is None else p.grad + gradient
        total += loss.detach()
    return total


def right_with_a_look_before(model, microbatches):
    """All go forward once without a graph, and the loss is computed again behind."""
    with torch.no_grad():
        assert {model(x).shape[-1] for x, _ in microbatches} == {model.out_features}
    accumulate(model, microbatches)
    with torch.no_grad():
        x, targets = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
        return mean_loss(model(x), targets)


def right_by_checkpoint(model, microbatches):
    count = sum((t != -100).sum() for _, t in microbatches)
    losses = []
    for x, t in microbatches:
        logits = checkpoint(model, x.requires_grad_(), use_reentrant=True)
        losses.append(mean_loss(logits, t) * (t != -100).sum() / count)
        losses[-1].backward()
    return sum(losses)


def running_total(model, microbatches, retain=True):
    count = sum((t != -100).sum() for _, t in microbatches)
    total = 0
    for x, t in microbatches:
        total = total + mean_loss(model(x), t) * (t != -100).sum() / count
        total.backward(retain_graph=retain)
    return total


def keeps_each_graph(model, microbatches):
    count = sum((t != -100).sum() for _, t in microbatches)
    losses = []
    for x, t in microbatches:
        losses.append(mean_loss(model(x), t) * (t != -100).sum() / count)
        losses[-1].backward(retain_graph=True)
    return sum(losses).detach()


def back_past_the_module(model, microbatches, forward=lambda model, x: x @ model.weight.T + model.bias):
    count = sum((t != -100).sum() for _, t in microbatches)
    losses = [mean_loss(forward(model, x), t) * (t != -100).sum() / count for x, t in microbatches]
    for loss in losses:
        loss.backward()
    return sum(losses).detach()


def all_at_once(model, microbatches):
    x, targets = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
    loss = mean_loss(model(x), targets)
    loss.backward()
    return loss


def back_at_the_end(model, microbatches):
    """A right gradient, for which all graphs are kept."""
    count = sum((targets != -100).sum() for _, targets in microbatches)
    loss = sum(mean_loss(model(x), t) * (t != -100).sum() / count for x, t in microbatches)
    loss.backward()
    return loss


# ---- 08.5


def plan(
    t_F,
    t_B,
    num_stages,
    num_microbatches,
    part,
    time=lambda t_F, t_B, P, M: (M + P - 1) * (t_F + t_B),
    bubble=lambda P, M: (P - 1) / (M + P - 1),
    enough=lambda P, part: math.floor((P - 1) * (1 - part) / part) + 1,
):
    """The answer to 08.5, with a place for each mistake."""
    P, M = num_stages, num_microbatches
    return time(t_F, t_B, P, M), bubble(P, M), enough(P, part)


def planning(**wrong):
    return lambda *given: plan(*given, **wrong)


def right_plan_by_trying(t_F, t_B, num_stages, num_microbatches, part):
    def bubble(m):
        return Fraction(num_stages - 1, m + num_stages - 1)

    enough = 1
    while bubble(enough) >= part:
        enough += 1
    work = num_microbatches * (t_F + t_B)
    return [work / (1 - bubble(num_microbatches)), bubble(num_microbatches), torch.tensor(enough)]


RIGHT = {
    "08.1": [
        best_by(lambda work, head: max(with_head(work, head))),
        right_cut_by_dynamic_programming,
        right_cut_by_a_limit,
    ],
    "08.2": [step, right_step_by_torch_distributed, right_step_by_stages, right_step_in_numpy],
    "08.3": [written, right_gpipe_last_first, right_gpipe_in_actions, right_gpipe_in_lines],
    "08.4": [
        accumulate,
        right_sums_divided_at_the_end,
        right_by_autograd_grad,
        right_with_a_look_before,
        right_by_checkpoint,
    ],
    "08.5": [plan, right_plan_by_trying],
}
WRONG = {  # in the order of the exercise's mistakes
    "08.1": [
        ends_of_stages,
        allows_empty_stages,
        best_by(lambda work, head: sum(w * w for w in with_head(work, head))),
        by_count,
        last_takes_the_rest,
        filled_to_the_mean,
        lambda *given: filled_to_the_mean(*given, over=True),
        best_by(lambda work, head: max(work)),
        best_by(lambda work, head: max([work[0] + head, *work[1:]])),
        lambda *given: right_cut_by_a_limit(*given)[::-1],
    ],
    "08.2": [
        by_grad_alone(lambda rank, ranks: True),
        by_grad_alone(lambda rank, ranks: rank < ranks - 1),
        by_grad_alone(lambda rank, ranks: 0 < rank < ranks - 1),
        steps(comes_back=False),
        steps(leaf=False),
        steps(starts=lambda of_y, y, wanted: torch.ones_like(y)),
        steps(starts=of_own_loss),
        sends_back_what_came,
        steps(into=lambda came, x: x),
        goes_back_for_each,
        steps(times=2),
        without_a_leaf_on_rank_0,
        hands_the_loss_round,
        updates,
        steps(whole=True),
    ],
    "08.3": [
        changed(-1, lambda row: row[: len(row) // 2]),
        writing(which="F"),
        one_f_one_b.one_f_one_b,
        gpipes.naive,
        changed(-1, lambda row: row[: len(row) // 2] + row[: len(row) // 2 - 1 : -1]),
        lambda ranks, microbatches: written(ranks, microbatches - 1),
        lambda ranks, microbatches: written(ranks, microbatches + 1),
        writing(which="BF"),
        lambda *case: "\n".join(written(*case).splitlines()[::-1]),
        *map(miswritten(written), MISREAD),
    ],
    "08.4": [
        accumulating(weigh=lambda n, rows, all_n, all_rows, M: 1),
        accumulating(weigh=lambda n, rows, all_n, all_rows, M: 1 / M),
        accumulating(weigh=lambda n, rows, all_n, all_rows, M: rows / all_rows),
        accumulating(counts_if=lambda targets: targets > 0),
        accumulating(weigh=lambda n, rows, all_n, all_rows, M: n / all_rows / 6),
        running_total,
        accumulating(weigh=lambda n, rows, all_n, all_rows, M: n / all_n / M),
        accumulating(weigh=lambda n, rows, all_n, all_rows, M: n),
        accumulating(empty=True),
        accumulating(empty=True, weigh=lambda *sizes: 1),
        accumulating(empty=True, weigh=lambda n, rows, all_n, all_rows, M: 1 / M),
        accumulating(loss_of=lambda losses: losses[-1]),
        accumulating(loss_of=lambda losses: sum(losses) / len(losses)),
        all_at_once,
    ],
    "08.5": [
        planning(time=lambda t_F, t_B, P, M: (M + P - 1) * max(t_F, t_B)),
        planning(time=lambda t_F, t_B, P, M: M * (t_F + t_B)),
        planning(time=lambda t_F, t_B, P, M: (M + P) * (t_F + t_B)),
        planning(time=lambda t_F, t_B, P, M: M * P * (t_F + t_B)),
        planning(bubble=lambda P, M: (P - 1) / M),
        planning(bubble=lambda P, M: (P - 1) / (M + P - 1) / P),
        planning(bubble=lambda P, M: M / (M + P - 1)),
        planning(bubble=lambda P, M: (P - 1) / P),
        planning(bubble=lambda P, M: P / (M + P)),
        lambda t_F, t_B, *given: planning(bubble=lambda P, M: (P - 1) * (t_F + t_B))(t_F, t_B, *given),
        planning(bubble=lambda P, M: 100 * (P - 1) / (M + P - 1)),
        planning(enough=lambda P, part: math.ceil((P - 1) * (1 - part) / part)),
        planning(enough=lambda P, part: math.floor((P - 1) * (1 - float(part)) / float(part)) + 1),
        planning(enough=lambda P, part: math.floor((P - 1) * (1 / float(part) - 1)) + 1),
        planning(enough=lambda P, part: math.ceil((P - 1) * (1 - part) / part) + 1),
        planning(enough=lambda P, part: math.floor((P - 1) / part) + 1),
        planning(enough=lambda P, part: 4 * P),
    ],
}
