"""Chapter 01, bytes that are really there: exercises 01.3 and 01.6."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lib.check.exercise import DTYPE, Data, Exercise, Mistake, random, whole
from lib.memory import MemoryTracker
from lib.mesh import Group

_KINDS = ("parameter", "gradient", "optimizer")

# ---- 01.3 live_bytes ------------------------------------------------------------------------------------------------


class _Tied(nn.Module):
    """An embedding whose weight is also the head's, a layer between, and a bias that is not trained."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.token.weight
        self.layer.bias.requires_grad_(False)


def _live_inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"sizes": [(whole(generator, 20, 60), whole(generator, 3, 9), whole(generator, 1, 50)) for _ in "12"]}]


def _trained(vocab_size: int, width: int, padding: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in bfloat16 after a step: its gradients are views of one bucket, which is longer than they are."""
    model = _Tied(vocab_size, width).bfloat16()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    bucket = torch.zeros(sum(p.numel() for p in trained) + padding, dtype=torch.bfloat16)
    start = 0
    for p in trained:
        p.grad = bucket[start : start + p.numel()].view_as(p)
        start += p.numel()
        optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.zeros_like(p, dtype=torch.float32),
            "exp_avg_sq": torch.zeros_like(p, dtype=torch.float32),
            "name": "not a tensor",
        }
    return model, optimizer


def _live_bytes(answer: Callable, group: Group, given: Data) -> Data:
    results = [(f"model {i}", answer(*_trained(*sizes))) for i, sizes in enumerate(given["sizes"])]
    return {f"{name}: {k}": v for name, result in results for k, v in _held(result).items()}


def _held(result: Any) -> Data:
    return {kind: result.get(kind) if isinstance(result, dict) else None for kind in _KINDS}


def _live(count: Callable[[nn.Module, torch.optim.Optimizer], dict[str, int]]) -> Callable:
    """What somebody would return who counts like this; kinds that are not given are counted rightly."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found = {}
        for i, sizes in enumerate(given[0]["sizes"]):
            model, optimizer = _trained(*sizes)
            counted = {**MemoryTracker(model, optimizer).live, **count(model, optimizer)}
            found |= {f"model {i}: {kind}": counted[kind] for kind in _KINDS}
        return [found]

    return answers


def _numel_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]


def _grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


LIVE = Exercise(
    id="01.3",
    title="live_bytes",
    points=3,
    body=_live_bytes,
    inputs=_live_inputs,
    reference=_live(lambda model, optimizer: {}),
    ranks=(1,),
    mistakes=(
        Mistake(
            "You take every number for 4 bytes. This model is in bfloat16, and its averages are not: ask each tensor "
            "for its element_size(), or its storage for nbytes().",
            _live(
                lambda model, optimizer: {
                    "parameter": 4 * sum(p.numel() for p in model.parameters()),
                    "gradient": 4 * sum(g.numel() for g in _grads(model)),
                }
            ),
        ),
        Mistake(
            "The tied weight is counted twice. The embedding and the head look at one storage: count storages, not "
            "names.",
            _live(lambda model, optimizer: {"parameter": _numel_bytes(list(model.state_dict().values()))}),
        ),
        Mistake(
            "The gradients are views of a bucket, and the bucket is longer than they are. It stays in memory as a "
            "whole: count its storage.",
            _live(lambda model, optimizer: {"gradient": _numel_bytes(_grads(model))}),
        ),
        Mistake(
            "You counted the bucket once for each gradient that looks at it. Remember which storages you have seen: "
            "two views have the same untyped_storage().data_ptr().",
            _live(lambda model, optimizer: {"gradient": sum(g.untyped_storage().nbytes() for g in _grads(model))}),
        ),
        Mistake(
            "Adam's count of steps is a tensor too, 4 bytes for each parameter that is trained.",
            _live(
                lambda model, optimizer: {"optimizer": _numel_bytes([t for t in _states(optimizer) if t.dim() > 0])}
            ),
        ),
        Mistake(
            "The frozen parameter is missing. It is not trained, has no gradient and no state, and takes memory all "
            "the same.",
            _live(
                lambda model, optimizer: {
                    "parameter": _numel_bytes([p for p in model.parameters() if p.requires_grad])
                }
            ),
        ),
    ),
)

# ---- 01.6 run_blocks ------------------------------------------------------------------------------------------------

_BLOCKS, _WIDTH = 6, 16
KEEPS_LITTLE, KEEPS_ALL = "about one tensor for each block", "what each block would have kept anyway"
ONE_BY_ONE, ALL_AT_ONCE = "about one block at a time", "all blocks at once"


def _blocks_inputs(generator: torch.Generator, n: int) -> list[Data]:
    shapes = ((4 * _WIDTH, _WIDTH), (4 * _WIDTH,), (_WIDTH, 4 * _WIDTH), (_WIDTH,)) * _BLOCKS
    weights = [random(generator, *shape) / 4 for shape in shapes]
    return [{"x": random(generator, 8, _WIDTH), "weights": weights, "gradient": random(generator, 8, _WIDTH)}]


def _blocks(given: Data) -> nn.Sequential:
    blocks = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
            for _ in range(_BLOCKS)
        )
    ).to(DTYPE)
    with torch.no_grad():
        for p, value in zip(blocks.parameters(), given["weights"], strict=True):
            p.copy_(value)
    return blocks


def _run_blocks(answer: Callable, group: Group, given: Data) -> Data:
    blocks, x = _blocks(given), given["x"].clone().requires_grad_()
    one = x.numel() * x.element_size()
    with MemoryTracker(blocks) as memory:
        y = answer(list(blocks), x)
        if not (torch.is_tensor(y) and y.requires_grad):
            return {"the output": y.detach() if torch.is_tensor(y) else y, "its history": "none"}
        kept = memory.live["activation"]
        y.backward(given["gradient"])
    # In such tensors: a block by itself keeps 9, its input and two of four times the width, so all keep 55. With a
    # checkpoint for each it is 7 after forward and 28 to 31 at the peak; the peak of all blocks at once is 68.
    return {
        "the output": y.detach(),
        "its history": "there",
        "gradients of the weights": [p.grad for p in blocks.parameters()],
        "gradient of x": x.grad,
        "kept after forward": KEEPS_LITTLE if kept < (_BLOCKS + 12) * one else KEEPS_ALL,
        "recomputed": ONE_BY_ONE if memory.peak_by_kind["activation"] < 8 * _BLOCKS * one else ALL_AT_ONCE,
    }


def _blocks_reference(given: list[Data]) -> list[Data]:
    blocks, x = _blocks(given[0]), given[0]["x"].clone().requires_grad_()
    y = blocks(x)
    y.backward(given[0]["gradient"])
    return [
        {
            "the output": y.detach(),
            "its history": "there",
            "gradients of the weights": [p.grad for p in blocks.parameters()],
            "gradient of x": x.grad,
            "kept after forward": KEEPS_LITTLE,
            "recomputed": ONE_BY_ONE,
        }
    ]


def _only_the_last(given: list[Data], want: list[Data]) -> list[Data]:
    grads = want[0]["gradients of the weights"]
    return [{"gradients of the weights": [None] * (len(grads) - 4) + grads[-4:], "gradient of x": None}]


RUN = Exercise(
    id="01.6",
    title="run_blocks",
    points=3,
    body=_run_blocks,
    inputs=_blocks_inputs,
    reference=_blocks_reference,
    ranks=(1,),
    timeout_s=20,
    mistakes=(
        Mistake(
            "Output and gradients are right, and nothing is saved: after forward everything is still there that the "
            "blocks keep by themselves. Call each block through checkpoint(block, x, use_reentrant=False).",
            lambda given, want: [{**want[0], "kept after forward": KEEPS_ALL, "recomputed": ALL_AT_ONCE}],
        ),
        Mistake(
            "You made one checkpoint of all blocks. Little is kept, but backward then recomputes all of them at "
            "once, and the peak is where it was: give each block its own.",
            lambda given, want: [{**want[0], "recomputed": ALL_AT_ONCE}],
        ),
        Mistake(
            "The output has no history, so there is nothing to go back through. no_grad() saves memory by giving up "
            "the gradient; checkpoint gives up the activations only.",
            lambda given, want: [{"the output": want[0]["the output"], "its history": "none"}],
        ),
        Mistake(
            "Only the last block has gradients: you cut the graph between the blocks. Hand x on as it is, without "
            "detach().",
            _only_the_last,
        ),
    ),
)

EXERCISES = (LIVE, RUN)
