"""A pipeline stage: some layers of the model, and the activations of microbatches until their backward.

The problem: autograd runs backward through one graph in one process. In a pipeline the graph of a microbatch is split
over the stages, and several microbatches are in flight. The idea: each stage cuts the graph at its ends. Its input is a
leaf, whose gradient is sent to the previous stage; its backward begins with the gradient from the next stage.

Read before: `lib/pipeline/schedules/action.py`. Chapter 8.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lib import comm
from lib.conjugate import pair
from lib.deferred import DeferWeightGradients, Queue
from lib.model import GPT
from lib.pipeline.balance import layers_of_stages
from lib.pipeline.schedules.action import Schedule, ScheduleError
from lib.recompute import recomputed
from lib.versions import unwritten


@dataclass(eq=False, repr=False)
class Stage:
    """A module that runs microbatches one by one, forward and backward.

    Args:
        module: computes x[b, …] → y[b, …]. In the first stage x are the inputs, in the last stage y is the input of
            `loss`.
        width: D of tensors between stages: for inputs of shape [b, …] they are [b, …, D]. None: they have the shape of
            the inputs.
        recompute: keep only the input of each microbatch, and recompute forward in backward.
        slices: number of shards of these tensors along the last dim of the inputs; one is sent.
        dtype: dtype of tensors between stages, equal for all stages. None: the dtype of the inputs; with `width`, the
            dtype of the parameters, or the default of torch.
        form: what stages send, if it has any other form: a function from the inputs of a microbatch, and the number of
            a stage, to an empty tensor like the output of that stage, equal for all stages of a pipeline. It takes the
            place of `width`, `slices` and `dtype`.

    Raises:
        ScheduleError: `form` beside one of those.

    Attributes:
        before: called with the number of each microbatch before its forward, and again before its backward, which may
            recompute; by default it does nothing.
    """

    module: nn.Module
    width: int | None = None
    recompute: bool = False
    slices: int = 1
    dtype: torch.dtype | None = None
    form: Callable[[Tensor, int], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.form and (self.width, self.slices, self.dtype) != (None, 1, None):
            raise ScheduleError("form= says all that width, slices and dtype say: give it alone")
        self.before: Callable[[int], None] = lambda m: None
        # By microbatch: input and output, with the graph between them; deferred weight gradients.
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}
        self._queues: dict[int, Queue] = {}

    def travels(self, inputs: Tensor, stage: int = 0) -> Tensor:
        """An empty tensor with the form of the message behind a stage, for these inputs of the first stage."""
        shape, dtype = self._form(inputs, stage)
        return torch.empty(shape, dtype=dtype, device=next(self.module.parameters(), inputs).device)

    def check_output(self, stage: int, y: Tensor, inputs: Tensor) -> Tensor:
        """Return y, the output of a stage, if it has the form of messages, for these inputs of the first stage.

        Raises:
            ScheduleError: its type, shape or dtype is not the one that the next stage receives, or has no gradient.
        """
        shape, dtype = self._form(inputs, stage)
        if isinstance(y, Tensor) and (why := comm.why_not_plain(y)):
            raise ScheduleError(f"stage {stage} gives {why}, because messages between stages are plain tensors")
        if not isinstance(y, Tensor) or y.shape != shape or y.dtype != dtype:
            right = comm.spec(torch.empty(shape, dtype=dtype, device="meta"))
            given = "form" if self.form else f"width={self.width} or dtype"
            raise ScheduleError(
                f"stage {stage} gives {comm.spec(y)}, but messages between stages are {right}; cut the model "
                f"where it gives that, or change {given} of the stages"
            )
        if torch.is_grad_enabled() and not _has_gradient(y):
            raise ScheduleError(
                f"stage {stage} gives {comm.spec(y)}, and integers have no gradient: cut the model "
                "where it gives floating-point numbers"
            )
        return y

    def _form(self, inputs: Tensor, stage: int) -> tuple[Sequence[int], torch.dtype]:
        """Shape and dtype of the message behind a stage for these inputs."""
        if self.form:
            like = self.form(inputs, stage)
            if not isinstance(like, Tensor):
                raise ScheduleError(f"form= returned {comm.spec(like)} for stage {stage}: return an empty tensor")
            return like.shape, like.dtype
        if self.width is None:
            return inputs.shape, self.dtype or inputs.dtype
        dtypes = (p.dtype for p in self.module.parameters())
        *rows, length = inputs.shape
        return (*rows, length // self.slices, self.width), self.dtype or next(dtypes, torch.get_default_dtype())

    def forward(
        self, m: int, x: Tensor, then: Callable[[Tensor], Tensor] | None = None, split: bool = False
    ) -> Tensor:
        """y of microbatch m, or its loss; tensors for backward are kept if gradients are on.

        Args:
            x: the input from the previous stage; `backward` returns its gradient.
            then: function from the output to the output or, in the last stage, to the loss.
            split: whether backward will be `backward_input` and `backward_weight`.
        """
        self.before(m)
        x = x.detach().requires_grad_(torch.is_grad_enabled() and _has_gradient(x))  # a leaf
        queue = Queue()
        off = DeferWeightGradients(queue) if split else nullcontext()
        with off:
            y = self._compute(x, off)
            y = then(y) if then else y
        if torch.is_grad_enabled():
            self._ends[m], self._queues[m] = (x, y), queue
        return y.detach()

    def _compute(self, x: Tensor, off: DeferWeightGradients | nullcontext) -> Tensor:
        x = pair(x, torch.detach, torch.detach)  # not a leaf: the module may change it in place
        with unwritten(self.module):
            return self._recomputed(x, off) if self.recompute else self.module(x)

    def _recomputed(self, x: Tensor, off: DeferWeightGradients | nullcontext) -> Tensor:
        before = x._version
        y = recomputed(self.module, self.module, x, off)
        if x._version != before:
            raise ScheduleError("a stage that changes its input in place cannot be recomputed: use recompute=False")
        return y

    def backward(self, m: int, gradient: Tensor | None = None) -> Tensor | None:
        """Run the full backward of microbatch m; return the gradient of its input, None for integers.

        It is zero if the output does not depend on the input, because the previous stage waits for a message.
        """
        of_x = self.backward_input(m, gradient)
        self.backward_weight(m)
        return of_x

    def backward_input(self, m: int, gradient: Tensor | None = None) -> Tensor | None:
        """Run the first half: from the gradient of y, or the loss, to that of x. Weight gradients are deferred."""
        if m not in self._ends:
            raise ScheduleError(f"microbatch {m} has no graph here: run its forward first, and not under no_grad")
        self.before(m)
        x, y = self._ends.pop(m)
        if y.requires_grad or gradient is None:  # else this stage has nothing to train
            torch.autograd.backward(y, gradient)
        if x.requires_grad:
            # It may be sparse, as of gather(sparse_grad=True), and a message is not.
            return torch.zeros_like(x) if x.grad is None else x.grad.to_dense()
        return None

    def backward_weight(self, m: int) -> None:
        """Run the second half: the deferred weight gradients."""
        self._queues.pop(m).run()

    @property
    def microbatches(self) -> int:
        """Number of microbatches in flight here, after forward and before the end of backward."""
        return len(self._queues)


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class GPTStage(nn.Module):
    """Neighbouring layers of a GPT, with their names in the GPT: `blocks.3.mlp.up.weight`.

    Args:
        model: the model that owns the layers.
        layers: numbers of its blocks; the number after the last block is the head.
        first: whether the embedding is in this stage.

    Raises:
        ValueError: the model is not a GPT, has more parts than embedding, blocks and head, or finds its documents.
    """

    def __init__(self, model: GPT, layers: range, first: bool) -> None:
        super().__init__()
        check_cut(model)
        if model.finds_documents and model.config.document_end is not None:
            raise ValueError(
                f"document_end={model.config.document_end} is looked for by the full model, and only its first stage "
                "gets tokens: use parallelize, or set model.finds_documents = False, and call see_documents of "
                "lib/documents.py on each stage before each forward"
            )
        self.embed = model.embed if first else None
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in layers if i < len(model.blocks)})
        self.head = model.head if len(model.blocks) in layers else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.embed, *self.blocks.values(), self.head):
            x = x if layer is None else layer(x)
        return x


def check_cut(model: nn.Module) -> None:
    """Check that the stages of a model together compute the model.

    Raises:
        ValueError: the model is not a GPT, or has a part that no stage would have.
    """
    kind, own_stages = type(model).__name__, "write the stages yourself, as Stage(module) of lib/pipeline/stage.py"
    if not isinstance(model, GPT):
        raise ValueError(f"only a GPT of lib/model.py can be cut into its blocks, and {kind} is none: {own_stages}")
    own = [] if getattr(model.forward, "__func__", None) is GPT.forward else ["forward"]
    own += [name for name, _ in model.named_children() if name not in ("embed", "blocks", "head")]
    own += [*model._parameters, *model._buffers]
    own += [name.strip("_") for name, hooks in vars(model).items() if name.endswith("_hooks") and hooks]
    if own:
        raise ValueError(
            f"{kind} has its own {', '.join(own)}, which no stage would have: move that into embed, blocks or head, or "
            f"{own_stages}"
        )
    if len(model.blocks) != model.config.num_layers:
        raise ValueError(
            f"this GPT has {len(model.blocks)} blocks, but its config says num_layers={model.config.num_layers}: set "
            f"model.config = dataclasses.replace(model.config, num_layers={len(model.blocks)})"
        )


def cut(model: GPT, num_stages: int) -> list[GPTStage]:
    """Split a GPT into stages of about equal cost, the embedding in the first, the head in the last (perhaps alone).

    The stages share the parameters of `model`, with the same names. A tied weight is in two stages (`tie`).

    Raises:
        ValueError: more stages than blocks plus head; or as for `GPTStage`.
    """
    check_cut(model)
    pieces = [GPTStage(model, part, i == 0) for i, part in enumerate(layers_of_stages(model.config, num_stages))]
    tie(pieces)
    return pieces


def tie(modules: Sequence[nn.Module]) -> None:
    """Note the parameters that several stages use, in `used_by` of each module: number of the stage → its name there.

    `lib.parallel.facts_of` sums the gradient of such a weight over all ranks that use it.

    Args:
        modules: those of all stages of one model, in order, on every rank, before `Stage(modules[s])`.

    Raises:
        ValueError: two parameters share memory, so each would have a part of the gradient.
    """
    names: dict[int, dict[int, str]] = {}
    at: dict[int, nn.Parameter] = {}  # by address
    for stage, module in enumerate(modules):
        for name, p in module.named_parameters():
            names.setdefault(id(p), {})[stage] = name
            if p.data_ptr() and at.setdefault(p.data_ptr(), p) is not p:
                raise ValueError(f"{name} shares memory with another parameter: tie them, b.weight = a.weight")
    for module in modules:
        module.used_by = [stages for stages in names.values() if len(stages) > 1]


def stages_of(model: GPT, schedule: Schedule, rank: int) -> dict[int, Stage]:
    """The stages of a GPT on one rank, by number, as `cut` makes them.

    Messages between stages are [b, T, D], or [b, T/n, D] with sequence parallelism.
    """
    pieces, width = cut(model, schedule.num_stages), model.config.d_model
    return {s: Stage(pieces[s], width, slices=model.sequence_slices) for s in schedule.stages_on(rank)}


def parameters_of(stages: Mapping[int, Stage]) -> dict[str, nn.Parameter]:
    """All parameters of these stages, by their names in the model; a shared parameter once."""
    parameters: dict[str, nn.Parameter] = {}
    for stage in stages.values():
        known = {id(p) for p in parameters.values()}
        parameters |= {name: p for name, p in stage.module.named_parameters() if id(p) not in known}
    return parameters
