"""01.3: bytes that parameters, gradients and optimizer state occupy, with shared memory counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from course.check.exercise import Data, Exercise, Mistake, whole
from lib.memory import MemoryTracker
from lib.mesh import Group

KINDS = ("parameter", "gradient", "optimizer")


class Tied(nn.Module):
    """An embedding whose weight is also the weight of the head, a layer between, and a frozen bias."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.token.weight
        self.layer.bias.requires_grad_(False)


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"sizes": [(whole(generator, 20, 60), whole(generator, 3, 9), whole(generator, 1, 50)) for _ in "12"]}]


def trained(vocab_size: int, width: int, padding: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in bfloat16 after a step. Its gradients are views of one bucket, and the bucket is longer."""
    model = Tied(vocab_size, width).bfloat16()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params)
    bucket = torch.zeros(sum(p.numel() for p in params) + padding, dtype=torch.bfloat16)
    start = 0
    for p in params:
        p.grad = bucket[start : start + p.numel()].view_as(p)
        start += p.numel()
        moments = {name: torch.zeros_like(p, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.tensor(3.0), **moments, "name": "not a tensor"}
    return model, optimizer


def body(answer: Callable, group: Group, given: Data) -> Data:
    results = [answer(*trained(*sizes)) for sizes in given["sizes"]]
    return {f"model {i}: {kind}": of_kind(result, kind) for i, result in enumerate(results) for kind in KINDS}


def of_kind(result: Any, kind: str) -> Any:
    return result.get(kind) if isinstance(result, dict) else None


# ---- right programs -------------------------------------------------------------------------------------------------


def by_the_tracker(model, optimizer):
    return MemoryTracker(model, optimizer).live


def of_storages(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def live(**counts: Callable) -> Callable:
    """The bytes of the storages of each kind, unless another way to count the tensors of a kind is given."""

    def program(model, optimizer):
        states = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        params = [p for _, p in model.named_parameters(remove_duplicate=False)]
        tensors = zip(KINDS, (params, grads, states), strict=True)
        return {kind: counts.get(kind, of_storages)(held) for kind, held in tensors}

    return program


# ---- wrong ways to count --------------------------------------------------------------------------------------------


def of_elements(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def four_each(tensors: Iterable[Tensor]) -> int:
    return 4 * sum(t.numel() for t in set(tensors))


EXERCISE = Exercise(
    id="01.3",
    title="live_bytes",
    points=3,
    body=body,
    inputs=inputs,
    right=(by_the_tracker, live()),
    ranks=(1,),
    mistakes=(
        Mistake(
            "You take every element for 4 bytes. This model is in bfloat16, and its moments are not: use "
            "element_size() of each tensor, or nbytes() of its storage.",
            live(parameter=four_each, gradient=four_each),
        ),
        Mistake(
            "The tied weight is counted twice. The embedding and the head share one storage: count storages, not "
            "names.",
            live(parameter=of_elements),
        ),
        Mistake(
            "The gradients are views of a bucket, and the bucket is longer than they are. All of it stays in memory: "
            "count its storage.",
            live(gradient=of_elements),
        ),
        Mistake(
            "You counted the bucket once for each gradient in it. Remember the storages that you counted: two views "
            "have the same untyped_storage().data_ptr().",
            live(gradient=lambda tensors: sum(t.untyped_storage().nbytes() for t in tensors)),
        ),
        Mistake(
            "Adam's step count is also a tensor, 4 bytes for each parameter that is trained.",
            live(optimizer=lambda tensors: of_elements(t for t in tensors if t.dim())),
        ),
        Mistake(
            "The frozen parameter is missing. It has no gradient and no optimizer state, but it takes memory.",
            live(parameter=lambda tensors: of_elements({t for t in tensors if t.requires_grad})),
        ),
    ),
)
