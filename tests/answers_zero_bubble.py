"""Answers to the exercises of chapter 12: right ones, and one for each mistake that has a name."""

import re
from functools import partial

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from lib.pipeline.schedules import zero_bubble
from lib.pipeline.schedules.action import Schedule

# ---- 12.1


def add(tensor, gradient):
    tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient


def replace(tensor, gradient):
    tensor.grad = gradient


def layer(into=add, both=False, bias_at_once=False, bias_too=True, of_x=True, computed=False, twice=False):
    """A `later` for 12.1, with a place for each mistake."""

    class Later(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, hidden, queue):
            ctx.save_for_backward(x, weight)
            ctx.hidden, ctx.queue = hidden, queue
            return linear(x, weight, bias)

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            bias, y, x = ctx.hidden[1], gradient.flatten(0, 1), x.detach().flatten(0, 1)
            finished = y.T @ x if computed else None

            def job():
                into(ctx.hidden[0], y.T @ x if finished is None else finished)
                if bias_too and not bias_at_once:
                    into(bias, y.sum(0))

            ctx.queue.append(job)
            of_bias = y.sum(0) if both or bias_at_once else None
            if twice:
                linear(x, weight, bias)
            return gradient @ weight if of_x else None, y.T @ x if both else None, of_bias, None, None

    return lambda x, weight, bias, queue: Later.apply(x, weight, bias, (weight, bias), queue)


def hooked(keep=lambda x: x.detach(), x_of=None, x_then=None, gradient_of=None, at_once=None):
    """By a hook on y. The functions are told all that has been, and say what is used; `x_then` in backward."""
    seen = {}

    def later(x, weight, bias, queue):
        y, x = linear(x, weight.detach(), bias.detach()), keep(x)
        mine = seen.setdefault(weight.shape, ([], []))
        mine[0].append(x)

        def put_off(gradient):
            mine[1].append(gradient)
            then = x_then(mine[0]) if x_then else x
            finished = at_once(gradient, x) if at_once else None

            def job():
                of_y = gradient_of(mine[1]) if gradient_of else gradient
                its_x = x_of(mine[0]) if x_of else then
                add(weight, torch.einsum("btf,btd->fd", of_y, its_x) if finished is None else finished)
                add(bias, of_y.sum((0, 1)))

            queue.append(job)

        y.register_hook(put_off)
        return y

    return later


def right_later_with_a_hook(x, weight, bias, queue):
    return hooked()(x, weight, bias, queue)


def right_later_with_no_grad(x, weight, bias, queue):
    """x has a history in the function, but what is computed from it has none."""
    y = linear(x, weight.detach(), bias.detach())

    @torch.no_grad()
    def job(gradient):
        add(weight, gradient.flatten(0, 1).T @ x.flatten(0, 1))
        add(bias, gradient.sum((0, 1)))

    y.register_hook(lambda gradient: queue.append(partial(job, gradient)))
    return y


def right_later_by_autograd(x, weight, bias, queue):
    """Two functions for each, and autograd adds them up."""

    class Later(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return linear(x, weight, bias)

        @staticmethod
        @once_differentiable
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            queue.append(lambda: weight.backward((gradient.mT @ x).sum(0)))
            queue.append(partial(bias.backward, gradient.sum((0, 1))))
            return gradient @ weight

    return Later.apply(x)


def plain(x, weight, bias, queue):
    return linear(x, weight, bias)


def throws_away(x, weight, bias, queue):
    return linear(x, weight.detach(), bias.detach())


def asks_twice(x, weight, bias, queue):
    """What is in the queue goes forward again."""
    y, x = linear(x, weight.detach(), bias.detach()), x.detach()
    y.register_hook(lambda gradient: queue.append(lambda: linear(x, weight, bias).backward(gradient)))
    return y


def remembers_the_last(x, weight, bias, queue, last={}):  # noqa: B006
    """The x and ∂y of the layer's last backward."""
    y, x = linear(x, weight.detach(), bias.detach()), x.detach()

    def put_off(gradient):
        last[weight.shape] = gradient, x

        def job():
            of_y, its_x = last[weight.shape]
            add(weight, of_y.flatten(0, 1).T @ its_x.flatten(0, 1))
            add(bias, of_y.sum((0, 1)))

        queue.append(job)

    y.register_hook(put_off)
    return y


def begins_with_zeros(x, weight, bias, queue):
    for parameter in (weight, bias):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return hooked()(x, weight, bias, queue)


def leaves_the_weight_to_autograd_too(x, weight, bias, queue):
    y, x = linear(x, weight, bias.detach()), x.detach()
    y.register_hook(lambda gradient: queue.append(lambda: add(bias, gradient.sum((0, 1)))))
    return y


def is_put_there_by_forward(x, weight, bias, queue):
    """The function waits for ∂y in the queue."""
    y, x, came = linear(x, weight.detach(), bias.detach()), x.detach(), []
    y.register_hook(came.append)

    def job():
        add(weight, torch.einsum("btf,btd->fd", came[0], x))
        add(bias, came[0].sum((0, 1)))

    queue.append(job)
    return y


def reads_saved_tensors_too_late(x, weight, bias, queue):
    class Later(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return linear(x, weight, bias)

        @staticmethod
        def backward(ctx, gradient):
            queue.append(lambda: weight.backward((gradient.mT @ ctx.saved_tensors[0]).sum(0)))
            return gradient @ weight

    return Later.apply(x)


# ---- 12.2


def greedy(limit=8, n=4, M=6):
    """Tick by tick each rank does the first thing of `left` that it can: I before F before W."""
    left = [(s, op, m) for op in "IFW" for m in range(M) for s in range(2 * n)]
    done, rows = set(), [[] for _ in range(n)]

    def can(stage, op, m):
        kept = [action[1] for action in rows[stage % n]]
        if op == "F":
            before = {(stage - 1, "F", m)} - {(-1, "F", m)}
        else:
            before = {(stage, "F", m), (stage + 1, "I", m)} if op == "I" else {(stage, "I", m)}
        has_room = op != "F" or kept.count("F") - kept.count("W") < limit
        return has_room and before - {(2 * n, "I", m)} <= done

    while left:
        now = {}
        for action in left:
            if action[0] % n not in now and can(*action):
                now[action[0] % n] = action
        for rank, action in now.items():
            left.remove(action)
            rows[rank].append("{}{}{}".format(*action))
        done |= {*now.values()}
    return "\n".join(map(" ".join, rows))


def typed(change=lambda text: text, make=zero_bubble.zb_h1, M=6):
    return lambda: change(make(4, M).to_text())


def whole_backwards(text):
    return re.sub(r"I(\d)", r"B\1", re.sub(r" \dW\d", "", text))


RIGHT = {
    "12.1": [layer(), right_later_with_a_hook, right_later_with_no_grad, right_later_by_autograd],
    "12.2": [greedy, lambda: Schedule.from_text(greedy(limit=7))],
}
WRONG = {  # in the order of the exercise's mistakes
    "12.1": [
        plain,
        layer(both=True),
        layer(bias_at_once=True),
        throws_away,
        layer(into=lambda tensor, gradient: None),
        layer(bias_too=False),
        layer(into=replace),
        hooked(x_of=lambda xs: xs[-1]),
        hooked(gradient_of=lambda gradients: gradients[-1]),
        remembers_the_last,
        hooked(x_then=lambda xs: xs.pop(0)),
        hooked(x_of=lambda xs: xs.pop(0)),
        layer(of_x=False),
        begins_with_zeros,
        leaves_the_weight_to_autograd_too,
        is_put_there_by_forward,
        layer(computed=True),
        hooked(at_once=lambda gradient, x: (gradient.unsqueeze(-1) * x.unsqueeze(-2)).sum((0, 1))),
        layer(twice=True),
        asks_twice,
        hooked(keep=lambda x: x),
        hooked(keep=lambda x: x.detach().clone()),
    ],
    "12.2": [
        typed(make=zero_bubble.zb_h2),
        typed(),
        lambda: greedy(limit=6),
        typed(whole_backwards),
        typed(lambda text: text.replace("2I3", "2B3").replace(" 2W3", "")),
        typed(lambda text: text.replace("0F0 0F1", "0F1 0F0")),
        typed(lambda text: re.sub(r" \d[IW]\d", "", text)),
        typed(lambda text: text.replace(" 1W3", "")),
        typed(lambda text: text.replace(" 1I3", "")),
        typed(lambda text: text.replace(" 1W3", "").replace(" 1I3", "")),
        typed(lambda text: re.sub(r" 1[FIW]3", "", text)),
        typed(lambda text: text.replace("0F0 0F1 0F2 0F3 0I0", "0F0 0I0 0F1 0F2 0F3")),
        typed(M=5),
        lambda: None,
    ],
}
