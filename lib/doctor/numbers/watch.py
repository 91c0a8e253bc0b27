"""Four lines in any PyTorch program write down what each rank has of every link of a step.

The problem: in a foreign program, tensors are cut by DDP, FSDP, DTensor, pipelines or hand-written layers, and
nothing says how in a common form. The idea: at the right moments of a step (before the clip, before and after the
optimizer) each rank stores its own part of each tensor, with the region of the whole tensor that this part is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lib.doctor.numbers.axes import axes_of, rows_along
from lib.doctor.numbers.buffers import buffer_sums
from lib.doctor.numbers.names import Names
from lib.doctor.numbers.rank_parts import CutFunction, Parts
from lib.doctor.numbers.recorded_numbers import Part, RankNumbers, StepNumbers, read_numbers, write_rank
from lib.doctor.numbers.rows import hashes_of_places, hashes_of_rows, tensors_with_rows
from lib.doctor.numbers.torch_insides import CannotSee, is_dtensor

_NOT_OPTIONS = {"params", "foreach", "fused", "capturable", "differentiable", "initial_lr", "param_names"}
SMALL = 1 << 16  # elements of a buffer that is stored


def watch(
    folder: str | Path | None,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    axes: Any = None,
    rows: Mapping[str, str] | None = None,
    cut: CutFunction | None = None,
    gradient: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad,
    steps: int = 2,
    sketch: bool = False,
    like: str | Path | None = None,
) -> Watch:
    """Record the next steps of this rank into `folder`; call it once on every rank, after the model is cut.

    Args:
        folder: each rank writes `rankN.pt` there. None: nothing is recorded, and no hook is installed.
        model: as it is trained, wrapped or not; or the stages of this rank.
        optimizer: that steps it, or a wrapper with the optimizer as `.optimizer`; or several, which all step once.
        axes: axis → (index of this rank, size), such as {"dp": (0, 2), "tp": (1, 2)}, or a DeviceMesh whose axes have
            names. DDP, FSDP and DTensors say theirs themselves.
        rows: axis → "own", "same" or "parts": which rows of a batch its ranks read. Needed only for axes with unusual
            names: along dp and fsdp they read their own, along tp and pp the same, along cp parts of the same.
        cut: for tensors that do not say themselves how they are cut: name, tensor → (whole name, dim, index, of); dim
            is None for a copy. For shards of several pieces index is a list of (start, stop) along dim, and `of` the
            whole size. It may also rename.
        gradient: where a parameter has its gradient, such as `lambda p: p.main_grad`.
        steps: how many steps are recorded.
        sketch: store 64 sums of each tensor in place of its elements: for models that do not fit into a file.
        like: with `sketch` in one process: the folder of the parallel run, whose cuts are sketched as well.

    Raises:
        CannotSee: something of this program cannot be recorded; it says what, and the way out.

    Example:
        seen = watch("four/", model, optimizer)
        for x, y in batches:
            seen.batch(x, y)
            loss = loss_of(model(x), y)
            loss.backward()
            seen.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    A step is seen when its optimizer has stepped. Where something writes the weights after that, as an outer optimizer
    that gathers them, let the program take one step more than is recorded.
    """
    watching = Watch()
    if folder is not None and steps > 0:
        modules = [model] if isinstance(model, nn.Module) else list(model)
        found = axes_of(axes, modules[0] if len(modules) == 1 else nn.ModuleList(modules))
        read = rows_along(found, rows or {})
        names = Names(modules)
        parts = Parts(names, cut, sketch, read_numbers(like) if like else None)
        watching._start(Path(folder), names, parts, _optimizers(optimizer), gradient, steps, found, read)
    return watching


def _optimizers(given: Any) -> list[Optimizer]:
    """The optimizers themselves, out of the wrappers of frameworks."""
    found = []
    for one in given if isinstance(given, Sequence) else [given]:
        while not isinstance(one, Optimizer) and hasattr(one, "optimizer"):
            one = one.optimizer
        one = getattr(one, "optimizer", one)  # Accelerate's wrapper is an Optimizer whose hooks are never called
        if not isinstance(one, Optimizer):
            raise CannotSee(f"{type(one).__name__} is no torch.optim.Optimizer, and has none as .optimizer")
        found.append(one)
    if not found:
        raise CannotSee("watch() got no optimizer")
    return found


class Watch:
    """What `watch` returns: the calls in a training loop. Without a folder they do nothing."""

    _recording = False
    _asked_for_gradients = False
    _unsettled: StepNumbers | None = None

    def _start(
        self,
        folder: Path,
        names: Names,
        parts: Parts,
        optimizers: list[Optimizer],
        gradient: Callable[[nn.Parameter], Tensor | None],
        steps: int,
        axes: dict[str, tuple[int, int]],
        rows: dict[str, str],
    ) -> None:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._path = folder / f"rank{rank}.pt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise CannotSee(f"{folder} cannot be written: {error.strerror}") from None
        self._names, self._parts, self._optimizers = names, parts, optimizers
        self._gradient, self._wanted = gradient, steps
        first = next(iter(names.parameters.values()))
        self._rank = RankNumbers(
            rank=rank,
            world=world,
            axes=axes,
            rows=rows,
            whole=not parts.sketch,
            aliases={self._whole_name(name): self._whole_name(first) for name, first in names.aliases.items()},
            optimizer=" and ".join(sorted({type(one).__name__ for one in optimizers})),
            device=first.device.type,
            left_out=names.left_out,
            buffers={}
            if parts.sketch
            else {name: b.detach().cpu().clone() for name, b in self._buffers() if _is_small(b)},
            began_s=time.time(),
        )
        self._step, self._stepped, self._depth = StepNumbers(), set(), 0
        self._unsettled = None  # whose weights something may still write after the optimizer
        self._recording = True
        self._hooks = [one.register_step_pre_hook(self._before_one) for one in optimizers]
        self._hooks += [one.register_step_post_hook(self._after_one) for one in optimizers]

    def batch(self, *batch: Any) -> None:
        """A batch or microbatch of this rank, rows along the first dimension; every rank that calls it gives all.

        Args:
            batch: tensors, also in lists and dicts. What has no rows, such as a scalar or a mask [T], is left out.
        """
        self._settle()
        if not self._recording:
            return
        batch = tuple(_local(tensor).detach().cpu().clone() for tensor in tensors_with_rows(batch))
        self._step.row_shapes += [list(batch[0].shape[1:])]
        self._step.rows += hashes_of_rows(batch).tolist()
        self._step.places += hashes_of_places(batch).tolist()
        if not self._parts.sketch:
            self._step.batch.append(batch)

    def backward(self, loss: Tensor | float | None) -> None:
        """Loss and gradients, after the last backward of a step and before the clip; None where there is no loss."""
        self._settle()
        if self._recording:
            self._asked_for_gradients = True
            self._step.loss = None if loss is None else _number(loss)
            self._step.tensors["gradients"] = self._stored(self._gradient)

    def norm(self, norm: Tensor | float) -> None:
        """The norm by which gradients are clipped."""
        if self._recording:
            self._step.norm = _number(norm)

    def _before_one(self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """An optimizer is about to step, or, in a subclass, to call the step of its parent."""
        self._depth += 1
        if self._depth > 1:
            return
        if id(optimizer) in self._stepped:  # once more, before all others have: that is the next step
            self._after()
        if not self._stepped and self._recording:
            closure = args[1] if len(args) > 1 else options.get("closure")
            self._before(bool(closure))

    def _before(self, closure: bool) -> None:
        """The first optimizer is about to step. With a closure, as Lightning's, its step begins with the backward."""
        self._step.tensors["clipped"] = {} if closure else self._stored(self._gradient)
        self._step.tensors["weights"] = weights = self._stored(lambda parameter: parameter)
        self._settle(weights)
        self._step.options, self._step.strangers = dict(self._options()), self._strangers()
        self._step.buffers = {name: buffer_sums(_local(buffer)) for name, buffer in self._buffers()}

    def _after_one(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._recording:
            self._stepped.add(id(optimizer))
            if len(self._stepped) == len(self._optimizers):
                self._after()

    def _after(self) -> None:
        """All optimizers have stepped."""
        tensors = self._step.tensors
        if not tensors["clipped"]:
            tensors["clipped"] = self._stored(self._gradient)
        trained = any(p.requires_grad for p in self._names.parameters.values())
        if self._asked_for_gradients and trained and not tensors["clipped"] and not tensors["gradients"]:
            self._stop()
            raise CannotSee(
                "no parameter has a gradient in .grad: call backward() after the backward and before zero_grad(), or "
                "say where gradients are, as in gradient=lambda p: p.main_grad"
            )
        self._rank.steps.append(self._step)
        self._unsettled, self._step, self._stepped = self._step, StepNumbers(), set()
        self._write_updates(self._stored(lambda parameter: parameter))
        if len(self._rank.steps) == self._wanted:
            self._stop()

    def _settle(self, now: dict[str, Part] | None = None) -> None:
        """Take the weights after the last step once more: an outer optimizer writes them after the inner stepped."""
        if self._unsettled is not None:
            self._unsettled.settled = True
            self._write_updates(now or self._stored(lambda parameter: parameter))
            self._unsettled = None

    def _write_updates(self, now: dict[str, Part]) -> None:
        before = self._unsettled.tensors["weights"]
        self._unsettled.tensors["updates"] = {name: part.minus(before[name]) for name, part in now.items()}
        write_rank(self._path, self._rank)

    def _stop(self) -> None:
        self._recording = False
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _stored(self, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Part]:
        found = {}
        for name, parameter in self._names.parameters.items():
            if (tensor := of(parameter)) is not None:
                whole_name, part = self._parts.part(name, parameter, tensor.detach())
                found[whole_name] = part
        return found

    def _options(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Of each parameter that this rank's optimizers step: the numbers and switches of its group."""
        names = {id(parameter): name for name, parameter in self._names.parameters.items()}
        for one in self._optimizers:
            for group in one.param_groups:
                options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
                plain = {key: _plain(value) for key, value in options.items()}
                for parameter in group["params"]:
                    if name := names.get(id(parameter)):
                        yield self._parts.whole_name(name, parameter), plain

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Those whose names are those of one process: cut() renames parameters only."""
        if all(self._whole_name(name) == name for name in self._names.parameters):
            yield from self._names.buffers.items()

    def _whole_name(self, name: str) -> str:
        """The name in one process, also of the second name of a tied parameter."""
        return self._parts.whole_name(name, self._names.parameters[self._names.aliases.get(name, name)])

    def _strangers(self) -> int:
        """How many tensors the optimizers step that are no parameters of the model."""
        known = {id(parameter) for parameter in self._names.parameters.values()}
        groups = [group for one in self._optimizers for group in one.param_groups]
        return sum(id(tensor) not in known for group in groups for tensor in group["params"])


def _plain(option: Any) -> Any:
    """An option of an optimizer as plain numbers, or its words."""
    if isinstance(option, Tensor):
        return _number(option)
    if isinstance(option, tuple | list):
        return [_plain(one) for one in option]
    return option if isinstance(option, bool | int | float | str | None) else str(option)


def _is_small(buffer: Tensor) -> bool:
    return not is_dtensor(buffer) and buffer.numel() <= SMALL


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _number(value: Tensor | float) -> float:
    """A loss or a norm; of a DTensor, that of all its ranks."""
    if isinstance(value, Tensor):
        value = value.detach()
        return float(value.full_tensor() if is_dtensor(value) else value)
    return float(value)
