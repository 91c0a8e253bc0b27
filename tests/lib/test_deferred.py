"""Backward in halves: the same gradients, the second half when it is asked for."""

import copy
import time
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from book.trials.sleep import SleepLayer
from lib import run
from lib.deferred import DeferWeightGradients, Queue, queue_here
from lib.model import Block, GPTConfig
from lib.tensor_parallel.gpt import tensor_parallel
from lib.verify import gradients, largest_difference
from tests.on_time import on_time


def block(dtype=torch.float32, **more):
    torch.manual_seed(0)
    return Block(GPTConfig(d_model=32, num_heads=4, context=8, **more)).to(dtype)


def both_ways(model, x, forward=lambda model, x: model(x)):
    """(output, gradient of x, weights' gradients) of autograd; and of halves: (output, of x, before, after)."""
    twin, y_gradient = copy.deepcopy(model), torch.randn_like(model(x))
    whole = x.clone().requires_grad_()
    y = model(whole)
    y.backward(y_gradient)
    mine, queue = x.clone().requires_grad_(), Queue()
    with DeferWeightGradients(queue):
        out = forward(twin, mine)
    out.backward(y_gradient)
    early = {name for name, p in twin.named_parameters() if p.grad is not None}
    waiting, of_x = len(queue), mine.grad.clone()  # what is needed now
    queue.run()
    assert len(queue) == 0
    return (y, whole.grad, gradients(model)), (out, of_x, gradients(twin)), early, waiting


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_halves_are_bitwise_the_whole(dtype):
    right, halves, early, waiting = both_ways(block(dtype), torch.randn(2, 8, 32).to(dtype))
    assert waiting == 4
    assert early == {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
    assert torch.equal(halves[0], right[0]) and torch.equal(halves[1], right[1])
    assert halves[2].keys() == right[2].keys()
    for name, gradient in right[2].items():
        assert torch.equal(halves[2][name], gradient), name


def test_a_stage_that_is_computed_again():
    queues = []

    def forward(model, x):
        queue = queue_here()
        queues.append(queue)
        modes = lambda: (DeferWeightGradients(queue), DeferWeightGradients(queue))  # noqa: E731
        return checkpoint(model, x, use_reentrant=False, context_fn=modes)

    right, halves, early, waiting = both_ways(block(torch.float64), torch.randn(2, 8, 32).double(), forward)
    assert waiting == 4 and queues[0] is not None
    for name, gradient in right[2].items():
        torch.testing.assert_close(halves[2][name], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("hidden, frozen", [(8, False), (32, False), (8, True)])
def test_a_checkpoint_that_does_not_defer_is_refused(hidden, frozen):
    """Square matrices fit where others stand: it was a wrong gradient, without a word."""
    model = nn.Sequential(nn.Linear(8, hidden), nn.GELU(), nn.Linear(hidden, 8))
    model[0].weight.requires_grad_(not frozen)
    model[2].weight.requires_grad_(not frozen)
    with DeferWeightGradients(Queue()):
        y = checkpoint(model, torch.randn(4, 8, requires_grad=True), use_reentrant=False)
    with pytest.raises(RuntimeError, match="other tensors than the first time: give it context_fn=lambda"):
        y.sum().backward()


class Part(nn.Module):
    """Some weights, and what is made of them and x."""

    def __init__(self, forward, dtype=torch.float64, **shapes):
        super().__init__()
        torch.manual_seed(0)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=dtype) / 2))
        self.makes = forward

    def forward(self, x):
        return self.makes(self, x)


def twice(x, weight):
    return linear(linear(x, weight).tanh(), weight)


def energy(part, x, create_graph=True):
    """The gradient of something is a layer's output; without `create_graph` only a step that x goes."""
    with torch.enable_grad():
        z = x if x.requires_grad else x.clone().requires_grad_()
        e = linear(linear(z, part.w, part.b).tanh(), part.v).sum()
        (step,) = torch.autograd.grad(e, z, create_graph=create_graph)
    return linear(x + step, part.w, part.b)


def under_autocast(part, x):
    with torch.autocast("cpu", torch.bfloat16):
        return linear(linear(x, part.w).tanh(), part.v)


def implicit(part, x):
    """Goes back through a layer of its own in a hook, as a fixed point does."""
    y = linear(x, part.w)
    z = y.detach().requires_grad_()
    f = linear(z, part.v).tanh()
    y.register_hook(lambda g: g + torch.autograd.grad(f, z, g, retain_graph=True)[0])
    return y


W, V, B = (4, 4), (4, 4), (4,)
PARTS = {  # a part, and how many layers it defers
    "a vector": (Part(lambda p, x: x * linear(linear(p.t, p.w, p.b).tanh(), p.v), t=4, w=W, b=B, v=V), 2),
    "a vector of weights": (Part(lambda p, x: linear(x, p.b), b=B), 0),
    "by name": (Part(lambda p, x: linear(input=x, weight=p.w, bias=p.b), w=W, b=B), 1),
    "used twice": (Part(lambda p, x: twice(x, p.w), w=W), 2),
    "complex": (Part(lambda p, x: linear(x, p.w, p.b), torch.complex128, w=W, b=B), 1),
    "made of others": (Part(lambda p, x: linear(x, p.w + p.v @ p.u), w=W, v=(4, 2), u=(2, 4)), 0),
    "made of others, used twice": (Part(lambda p, x: twice(x, p.w + p.v @ p.u), w=W, v=(4, 2), u=(2, 4)), 0),
    "a weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4).double()), 0),
    "made by a network": (
        Part(lambda p, x: linear(x, (m := linear(p.t, p.w))[:, :4].T, m[0, :4]), t=(4, 4), w=(8, 4)),
        1,
    ),
    "made of the input": (Part(lambda p, x: linear(x, linear(x, p.w)), w=W), 1),
    "the input itself": (Part(lambda p, x: linear(linear(x, p.w), x), w=W), 1),
    "autocast": (Part(under_autocast, torch.float32, w=W, v=V), 0),
    "a gradient of its own": (Part(energy, w=W, b=B, v=(1, 4)), 2),
    "a gradient that ends there": (Part(partial(energy, create_graph=False), w=W, b=B, v=(1, 4)), 1),
    "a gradient asked for in a hook": (Part(implicit, w=W, v=V), 1),
}


@pytest.mark.parametrize("case", PARTS)
def test_what_can_wait_is_deferred_and_all_else_is_done_at_once(case):
    part, deferred = PARTS[case]
    dtype = next(part.parameters()).dtype
    right, halves, _, waiting = both_ways(part, torch.randn(3, 4, dtype=dtype, generator=torch.manual_seed(1)))
    assert waiting == deferred
    torch.testing.assert_close(halves, right, rtol=1e-12, atol=1e-14)


def test_who_asks_for_a_deferred_weight_inside_of_forward_is_told():
    layer = nn.Linear(3, 3)
    with (
        DeferWeightGradients(Queue()),
        pytest.raises(RuntimeError, match="appears to not have been used in the graph"),
    ):
        torch.autograd.grad(layer(torch.randn(2, 3)).sum(), layer.weight)


def test_hooks_see_the_whole_gradient_of_a_weight_that_is_used_twice():
    layer, queue, seen = nn.Linear(3, 3, bias=False), Queue(), []
    layer.weight.register_hook(seen.append)
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with DeferWeightGradients(queue):
        y = layer(layer(torch.randn(4, 3)))
    y.sum().backward()
    assert not seen
    with torch.no_grad():
        queue.run()
    assert len(seen) == 2 and torch.equal(*seen)


def test_gradients_of_microbatches_add_up_and_hooks_run_then():
    layer, queue, ran = nn.Linear(3, 2), Queue(), []
    layer.weight.register_post_accumulate_grad_hook(lambda p: ran.append(p))
    x = torch.randn(4, 3)
    for part in x.split(2):
        with DeferWeightGradients(queue):
            y = layer(part)
        y.sum().backward()
    assert layer.weight.grad is None and not ran
    queue.run()
    assert len(ran) == 1, "with what both have put there"
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(2, 3))
    torch.testing.assert_close(layer.bias.grad, torch.full((2,), 4.0))


def test_frozen_weights_and_evaluation_put_nothing_off():
    layer, queue = nn.Linear(3, 2).requires_grad_(False), Queue()
    with DeferWeightGradients(queue):
        layer(torch.randn(1, 3, requires_grad=True)).sum().backward()
        with torch.no_grad():
            nn.Linear(3, 2)(torch.randn(1, 3))
    assert len(queue) == 0


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_tensor_parallel_layers_put_off_theirs(sequence_parallel, kv_heads):
    def both(world):
        serial = block(torch.float64, num_kv_heads=kv_heads)
        parallel, found = tensor_parallel(serial, world, sequence_parallel), []
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).double()
        x = x.chunk(2, 1)[world.rank] if sequence_parallel else x
        for queue in (None, Queue()):
            parallel.zero_grad()
            mine = x.clone().requires_grad_()
            with nullcontext() if queue is None else DeferWeightGradients(queue):
                y = parallel(mine)
            y.square().sum().backward()
            waiting = len(queue) if queue is not None else 4
            if queue is not None:
                queue.run()
            found.append((mine.grad, gradients(parallel), waiting))
        return found

    for (of_x, wanted, _), (mine, got, waiting) in run(both, 2):
        assert waiting == 4
        torch.testing.assert_close(mine, of_x, rtol=1e-12, atol=1e-14)
        assert largest_difference(got, wanted) < 1e-14


def test_outside_there_is_no_queue():
    assert queue_here() is None
    with torch.device("cpu"):  # another mode of torch's
        assert queue_here() is None
        with DeferWeightGradients(Queue()) as mode:
            assert queue_here() is mode.queue


@pytest.mark.timed("it measures hundredths of a second")
def test_a_layer_that_sleeps_defers_what_its_weight_takes():
    layer, queue = SleepLayer(3, 0, 0.01, weight_s=0.05), Queue()
    x = torch.zeros(2, requires_grad=True)
    with DeferWeightGradients(queue):
        y = layer(x)
    times = []
    for part in (y.sum().backward, queue.run):
        began_s = time.perf_counter()
        part()
        times.append(time.perf_counter() - began_s)
        times.append(layer.weight.grad)
    assert times[1] is None
    with on_time():
        assert times[0] < 0.04 < times[2]
    assert torch.equal(times[3], torch.ones(3)) and torch.equal(x.grad, torch.ones(2))


def test_what_waits_lets_go_of_where_its_input_came_from():
    """Else a stage's input would be kept until W, for nothing."""
    queue, leaf = Queue(), torch.randn(2, 4, requires_grad=True)
    with DeferWeightGradients(queue):
        y = linear(leaf * 2, torch.nn.Parameter(torch.randn(3, 4)))
    gone = weakref.ref(leaf)
    y.sum().backward()
    del y, leaf
    assert len(queue) == 1 and gone() is None
