"""A piece of the model on its rank, and what microbatches leave behind in it until they come back.

The problem: autograd goes back through one graph, in one process. Here a microbatch's graph is in pieces, one in each
stage, and several microbatches are under way at once. The idea: each stage cuts the graph at its own ends. Its input is
a leaf, whose gradient is what the stage before wants; its backward begins with the gradient that the stage behind has
sent.

Read before: `lib/pipeline/schedules/action.py`. Chapter 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib import comm
from lib.conjugate import pair
from lib.deferred import DeferWeightGradients, Queue
from lib.model import GPT
from lib.pipeline.balance import layers_of_stages
from lib.pipeline.schedules.action import Schedule, ScheduleError


class Stage:
    """A module that works on microbatches one by one, forward and back.

    Args:
        module: from the output of the stage before to this one's, x[b, …, D] → y[b, …, D]. The first one's gets the
            inputs, the last one's gives what `loss` takes.
        width: D of what travels between stages: for inputs of shape [b, …] it is [b, …, D]. None: what travels is like
            the inputs.
        recompute: keep only the input of each microbatch, and compute forward again in backward.
        slices: of what travels, one of so many parts along the inputs' last dim.
        dtype: of what travels. None: like the inputs without `width`; with it, that of the module's parameters, and
            torch's default where it has none. All stages must come to the same.
    """

    def __init__(
        self,
        module: nn.Module,
        width: int | None = None,
        recompute: bool = False,
        slices: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.module, self.width, self.recompute = module, width, recompute
        self.slices, self.dtype = slices, dtype
        self.before: Callable[[int], None] = lambda m: None  # called with each microbatch that is to go forward
        # By microbatch: input and output, with the graph between them; weight gradients that were put off.
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}
        self._queues: dict[int, Queue] = {}

    def travels(self, inputs: Tensor) -> Tensor:
        """An empty tensor like what goes to the next stage for these inputs of the first one, and back again."""
        shape, dtype = self._form(inputs)
        return torch.empty(shape, dtype=dtype, device=next(self.module.parameters(), inputs).device)

    def check_output(self, stage: int, y: Tensor, inputs: Tensor) -> None:
        """Whether y, made by a stage of that number from these inputs of the first one, is what travels.

        Raises:
            ScheduleError: it has another shape or dtype, so that whoever receives it would wait for something else; or
                no gradient can come back for it.
        """
        shape, dtype = self._form(inputs)
        if y.shape != shape or y.dtype != dtype:
            right = comm.spec(torch.empty(shape, dtype=dtype, device="meta"))
            raise ScheduleError(
                f"stage {stage} gives {comm.spec(y)}, but what travels from stage to stage is {right}; cut the model "
                f"where it gives that, or change the stages' width={self.width} or dtype"
            )
        if torch.is_grad_enabled() and not _has_gradient(y):
            raise ScheduleError(
                f"stage {stage} gives {comm.spec(y)}, and no gradient comes back through whole numbers: cut the model "
                "where it gives floating-point ones"
            )

    def _form(self, inputs: Tensor) -> tuple[Sequence[int], torch.dtype]:
        """Shape and dtype of what travels for these inputs."""
        if self.width is None:
            return inputs.shape, self.dtype or inputs.dtype
        dtypes = (p.dtype for p in self.module.parameters())
        *rows, length = inputs.shape
        return (*rows, length // self.slices, self.width), self.dtype or next(dtypes, torch.get_default_dtype())

    def forward(
        self,
        m: int,
        x: Tensor,
        loss: Callable[[Tensor], Tensor] | None = None,
        split: bool = False,
    ) -> Tensor:
        """y of microbatch m, or its loss.

        What backward needs is kept if gradients are on.

        Args:
            x: what came from the stage before; its gradient is what `backward` returns.
            loss: of the last stage: from its output to a number.
            split: backward will come in halves.
        """
        self.before(m)
        wants_gradient = torch.is_grad_enabled() and _has_gradient(x)
        x = x.detach().requires_grad_(wants_gradient)  # a leaf
        queue = Queue()
        off = DeferWeightGradients(queue) if split else nullcontext()
        with off:
            y = self._compute(x, off)
            y = loss(y) if loss else y
        if torch.is_grad_enabled():
            self._ends[m], self._queues[m] = (x, y), queue
        return y.detach()

    def _compute(self, x: Tensor, off: DeferWeightGradients | nullcontext) -> Tensor:
        x = pair(x, torch.detach, torch.detach)  # the same memory, but no leaf: a module may begin in place
        if not self.recompute:
            return self.module(x)
        before = x._version
        y = checkpoint(self.module, x, use_reentrant=False, context_fn=lambda: (nullcontext(), off))
        if x._version != before:
            raise ScheduleError(
                "a stage that changes its input in place cannot be computed again: use recompute=False"
            )
        return y

    def backward(self, m: int, gradient: Tensor | None = None) -> Tensor | None:
        """Both halves for microbatch m; the gradient of its input, None where that were whole numbers.

        Zeros where it had no part in the output: the stage before waits for something.
        """
        of_x = self.backward_input(m, gradient)
        self.backward_weight(m)
        return of_x

    def backward_input(
        self,
        m: int,
        gradient: Tensor | None = None,
    ) -> Tensor | None:
        """From the gradient of y, or from the loss, to that of x.

        What was split off for the weights is put off.
        """
        x, y = self._ends.pop(m)
        if y.requires_grad or gradient is None:  # else nothing here is trained
            torch.autograd.backward(y, gradient)
        if x.requires_grad and x.grad is None:
            return torch.zeros_like(x)
        return x.grad

    def backward_weight(self, m: int) -> None:
        """What was put off."""
        self._queues.pop(m).run()

    @property
    def microbatches(self) -> int:
        """How many are under way here: forward has been, and backward, or its second half, has not."""
        return len(self._queues)


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class GPTStage(nn.Module):
    """Neighbouring layers of a GPT, under their names in it: `blocks.3.mlp.up.weight`.

    Args:
        model: whose layers they are; it keeps them.
        layers: which of its blocks; one more is the head.
        first: the embedding is in it.

    Attributes:
        shared: id of a parameter that several stages use → (its name in the model, those stages); on every stage of
            the model alike, also where it is none of its own.
    """

    def __init__(self, model: GPT, layers: range, first: bool) -> None:
        super().__init__()
        self.shared: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.embed = model.embed if first else None
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in layers if i < len(model.blocks)})
        self.head = model.head if len(model.blocks) in layers else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.embed, *self.blocks.values(), self.head):
            x = x if layer is None else layer(x)
        return x


def cut(model: GPT, num_stages: int) -> list[GPTStage]:
    """A GPT in stages of about equal cost.

    The embedding is with the first blocks. The head is with the last, or alone, if it is as expensive as several.

    The stages' parameters are those of `model`, by the same names. A tied weight is on two of them.

    Raises:
        ValueError: more stages than blocks and a head.
    """
    parts = layers_of_stages(model.config, num_stages)
    pieces = [GPTStage(model, part, first=i == 0) for i, part in enumerate(parts)]
    held = [{id(p) for p in piece.parameters()} for piece in pieces]
    for name, p in model.named_parameters():
        users = tuple(i for i, ids in enumerate(held) if id(p) in ids)
        if len(users) > 1:
            for piece in pieces:
                piece.shared[id(p)] = name, users
    return pieces


def stages_of(model: GPT, schedule: Schedule, rank: int) -> dict[int, Stage]:
    """A rank's stages of a GPT, by number.

    What leaves them is [b, T, D], or [b, T/n, D] where tensor-parallel ranks have slices of the sequence.

    Raises:
        ValueError: as `cut`.
    """
    return {
        s: Stage(piece, model.config.d_model, slices=model.sequence_slices)
        for s, piece in enumerate(cut(model, schedule.num_stages))
        if schedule.rank_of[s] == rank
    }


def parameters_of(stages: Mapping[int, Stage]) -> dict[str, nn.Parameter]:
    """All parameters of a rank's stages, by their names in the model; one that two stages share comes once."""
    found: dict[str, nn.Parameter] = {}
    for stage in stages.values():
        known = {id(p) for p in found.values()}
        found |= {name: p for name, p in stage.module.named_parameters() if id(p) not in known}
    return found
