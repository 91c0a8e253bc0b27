"""01.3: bytes that parameters, gradients and optimizer state occupy, with shared memory counted once."""

import torch
from torch import nn

from course.check.edits import exercise
from course.check.exercise import whole
from course.exercises.ch01.e01_1_state_bytes import of_kind
from lib.memory import MemoryTracker

KINDS = ("parameter", "gradient", "optimizer")


def inputs(generator, n):
    return [{"sizes": [(whole(generator, 20, 60), whole(generator, 3, 9), whole(generator, 1, 50)) for _ in "12"]}]


def trained(vocab_size, width, padding, is_flat):
    """A model in bfloat16 after a step: a frozen bias, and an embedding whose weight is also that of the head.

    The gradients of the two matrices between are views of one bucket, and the bucket is longer. If the model is flat,
    so are the matrices themselves, and their moments.
    """
    token, head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size, False)
    layers = nn.Linear(width, width), nn.Linear(width, width)
    head.weight = token.weight

    def views(dtype):
        *pieces, _ = torch.zeros(2 * width**2 + padding, dtype=dtype).split([width**2, width**2, padding])
        return [piece.view(width, width) for piece in pieces]

    layers[0].bias.requires_grad_(False)
    model = nn.Sequential(token, *layers, head).bfloat16()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params)
    for layer, gradient in zip(layers, views(torch.bfloat16), strict=True):
        layer.weight.grad = gradient
    for p in params:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        moment, square = (torch.zeros_like(p, dtype=torch.float32) for _ in "12")
        # No tensor at the ends of a list is one that need not count.
        optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": moment,
            "name": "not a tensor",
            "exp_avg_sq": square,
        }
    if is_flat:
        moments = zip(views(torch.float32), views(torch.float32), strict=True)
        for layer, piece, (moment, square) in zip(layers, views(torch.bfloat16), moments, strict=True):
            layer.weight.data = piece
            optimizer.state[layer.weight] |= {"exp_avg": moment, "exp_avg_sq": square}
    return model, optimizer


def body(answer, group, given):
    found = {}
    for i, sizes in enumerate(given["sizes"]):
        result = answer(*trained(*sizes, is_flat=i == 1))
        found |= {f"model {i}: {kind}": of_kind(result, kind) for kind in KINDS}
    return found


def live_bytes(model, optimizer):
    def occupied(tensors):
        sizes = {}
        for t in tensors:
            storage = t.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())

    params = list(model.parameters())
    state = [v for s in optimizer.state.values() for v in s.values()]
    return {
        "parameter": occupied(params),
        "gradient": occupied(p.grad for p in params if p.grad is not None),
        "optimizer": occupied(v for v in state if torch.is_tensor(v)),
    }


def by_the_tracker(model, optimizer):
    return MemoryTracker(model, optimizer).live


def each_one(tensors):
    """As if no tensor shared its memory."""
    return sum(t.nbytes for t in tensors)


def each_storage(tensors):
    """Each in full, as often as tensors share it."""
    return sum(t.untyped_storage().nbytes() for t in tensors)


def tensors_of(optimizer):
    return [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]


MISTAKES = """
sizes[storage.data_ptr()] = storage.nbytes() => sizes[t] = 4 * t.numel()
    You take every element for 4 bytes, and this model is in bfloat16.
        Use element_size(), or nbytes() of the storage.
sizes[storage.data_ptr()] = storage.nbytes() => sizes[storage.data_ptr()] = t.nbytes
or sizes[storage.data_ptr()] = storage.nbytes() => sizes[storage.data_ptr()] = sizes.get(storage.data_ptr(), t.nbytes)
    You count shared memory once, but not in full: one tensor's elements, and the memory is longer.
        Take nbytes() of the storage.
in parameter:
occupied(params) => sum(p.nbytes for _, p in model.named_parameters(remove_duplicate=False))
or occupied(params) => each_storage(p for _, p in model.named_parameters(remove_duplicate=False))
    The tied weight is counted twice. The embedding and the head share one storage.
        Count storages, not names.
occupied(params) => each_one(params)
    You count the elements of each parameter. Some parameters are views of memory that is longer than they are, and all
    of it stays.
        Count its storage.
occupied(params) => each_storage(params)
    Parameters that share their memory are views of one storage, and you count it once for each of them.
        Remember counted storages: two views have the same data_ptr() of theirs.
occupied(params) => occupied(p for p in params if p.requires_grad)
    The frozen parameter is missing.
        It has no gradient and no optimizer state, but it takes memory.
in gradient:
occupied(p.grad for p in params if p.grad is not None) => each_one(p.grad for p in params if p.grad is not None)
    The gradients are views of a bucket that is longer than they are. All of it stays in memory.
        Count its storage.
occupied(p.grad for p in params if p.grad is not None) => each_storage(p.grad for p in params if p.grad is not None)
    You counted the bucket once per gradient.
        Remember counted storages: two views have the same data_ptr() of theirs.
in optimizer:
occupied(v for v in state if torch.is_tensor(v)) => each_one(tensors_of(optimizer))
    You count the elements of each tensor in the optimizer state. Some are views of memory that is longer than they
    are, and all of it stays.
        Count its storage.
occupied(v for v in state if torch.is_tensor(v)) => each_storage(tensors_of(optimizer))
    Moments that share their memory are views of one storage, and you count it once for each of them.
        Remember counted storages: two views have the same data_ptr() of theirs.
torch.is_tensor(v) => torch.is_tensor(v) and v.dim()
    Your optimizer state is 4 bytes short for each parameter that is trained.
        Adam's step count is also a tensor.
"""

EXERCISE = exercise(globals(), points=3, right=(live_bytes, by_the_tracker), ranks=(1,))
