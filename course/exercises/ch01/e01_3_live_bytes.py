"""01.3: bytes that parameters, gradients and optimizer state occupy, with shared memory counted once."""

import torch
from torch import nn

from course.check.edits import exercise
from course.check.exercise import whole
from lib.memory import MemoryTracker

KINDS = ("parameter", "gradient", "optimizer")


def inputs(generator, n):
    return [{"sizes": [(whole(generator, 20, 60), whole(generator, 3, 9), whole(generator, 1, 50)) for _ in "12"]}]


def trained(vocab_size, width, padding):
    """A model in bfloat16 after a step: a frozen bias, and an embedding whose weight is also that of the head.

    The gradients of the two matrices between are views of one bucket, and the bucket is longer.
    """
    token, head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size, False)
    layers = nn.Linear(width, width), nn.Linear(width, width)
    head.weight = token.weight
    layers[0].bias.requires_grad_(False)
    model = nn.Sequential(token, *layers, head).bfloat16()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params)
    *pieces, _ = torch.zeros(2 * width**2 + padding, dtype=torch.bfloat16).split([width**2, width**2, padding])
    for layer, piece in zip(layers, pieces, strict=True):
        layer.weight.grad = piece.view_as(layer.weight)
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
    return model, optimizer


def body(answer, group, given):
    found = {}
    for i, sizes in enumerate(given["sizes"]):
        result = answer(*trained(*sizes))
        found |= {f"model {i}: {kind}": result.get(kind) if isinstance(result, dict) else None for kind in KINDS}
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


MISTAKES = """
sizes[storage.data_ptr()] = storage.nbytes() => sizes[t] = 4 * t.numel()
    You take every element for 4 bytes, and this model is in bfloat16.
        Use element_size(), or nbytes() of the storage.
occupied(params) => sum(p.nbytes for _, p in model.named_parameters(remove_duplicate=False))
    The tied weight is counted twice. The embedding and the head share one storage.
        Count storages, not names.
sizes[storage.data_ptr()] = storage.nbytes() => sizes[t] = t.nbytes
    The gradients are views of a bucket that is longer than they are. All of it stays in memory.
        Count its storage.
sizes[storage.data_ptr()] = storage.nbytes() => sizes[t] = storage.nbytes()
    You counted the bucket once per gradient.
        Remember counted storages: two views have the same data_ptr() of theirs.
torch.is_tensor(v) => torch.is_tensor(v) and v.dim()
    Your optimizer state is 4 bytes short for each parameter that is trained.
        Adam's step count is also a tensor.
occupied(params) => occupied(p for p in params if p.requires_grad)
    The frozen parameter is missing.
        It has no gradient and no optimizer state, but it takes memory.
"""

EXERCISE = exercise(globals(), points=3, right=(live_bytes, by_the_tracker), ranks=(1,))
