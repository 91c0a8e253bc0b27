"""When units become whole, and when they give their memory back.

The problem: a layer's parameters must be there before it computes, in forward and again in backward; and a rank that
skips a layer must take part in its gathers all the same, as the others wait for it.
The idea: hooks around each unit's forward and backward, and one order of units that all ranks keep to.

Read before: `lib/data_parallel/units.py`. Chapter 5.

Source: Zhao et al., PyTorch FSDP, VLDB 2023, arXiv 2304.11277, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, takewhile
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lib.data_parallel.gradient_sums import with_gradient
from lib.data_parallel.units import ELSEWHERE, Unit


class UnitSchedule:
    """When units become whole, and when they give their memory back: hooks around each unit's forward and backward.

    All ranks gather the same units in the same order, also those that one of them does not use.

    Args:
        units: the root, then the others in the order in which forward uses them.
        reshard_after_forward, prefetch: as for `FSDP`.
        passed: called with each unit once in a backward, when no more gradients come for it: its sum can leave even if
            this rank did not use all of it. Other ranks wait for that sum before they go on to the next unit.
    """

    def __init__(
        self, units: Sequence[Unit], reshard_after_forward: bool, prefetch: bool, passed: Callable[[Unit], None]
    ) -> None:
        self.units, self.reshard_after_forward, self.prefetch = units, reshard_after_forward, prefetch
        self.passed = passed
        root, *others = units
        self._order = {"forward": list(units), "backward": [root, *others[::-1]]}
        self._next = {direction: dict(pairwise(order)) for direction, order in self._order.items()}
        self._seen: set[Unit] = set()  # those that this pass has made whole
        self._passed: set[Unit] = set()  # those that backward is through with
        self._trains = False  # the last forward of the root was one that wants gradients
        self._backward = False  # between the first gradient of an output and finish()
        self._has_graph = False  # create_graph: another backward may go through this one, so all that is whole stays
        for unit in units:
            for p in unit.trained:  # behind the hook of whoever sums the gradient
                p.register_post_accumulate_grad_hook(partial(self._gradient_is_there, unit))
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True)
            unit.module.register_forward_hook(lambda _, args, output, unit=unit: self._after_forward(unit, output))

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise TypeError(ELSEWHERE.format("copied"))

    def check_not_compiled(self) -> None:
        """Raises RuntimeError for a unit that was compiled in place, as its hooks would be compiled with it."""
        for unit in self.units:
            if unit.module._compiled_call_impl is not None:
                raise RuntimeError(
                    f"a {type(unit.module).__name__}, which is gathered as a unit, was compiled in place, and "
                    "what gathers it with it: put torch.compile(unit) in its place before the model is wrapped"
                )

    def end_backward(self) -> None:
        """A backward is through, or given up."""
        if self._backward:
            self._has_graph = False
            self._catch_up("backward", may_pass=True)
            self._backward = False
            for unit in self.units:  # what backward did not go through
                unit.inputs_open = 0
                unit.reshard()

    def end_step(self) -> None:
        """No backward of what forward has computed so far comes any more."""
        self.end_backward()
        for unit in self.units:
            unit.calls_open = 0
            unit.reshard()

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if unit is self.units[0]:
            self.end_backward()  # of the microbatch before
        if self._backward:  # an activation checkpoint computes forward again
            self._seen.add(unit)  # in its own order
            self._before_backward(unit)
        else:
            if unit is self.units[0]:
                self._seen.clear()
                self._trains = torch.is_grad_enabled()
            self._make_whole(unit, "forward")
        waits = self._backward and unit.inputs_open  # already, on what was given the first time
        inputs = with_gradient((args, kwargs)) if unit.has_frozen and torch.is_grad_enabled() and not waits else []
        if inputs:
            unit.inputs_open += 1
            register_multi_grad_hook(inputs, partial(self._inputs_are_done, unit), mode="all")

    def _after_forward(self, unit: Unit, output: object) -> None:
        if self._backward:
            return
        if unit is self.units[0]:
            self._catch_up("forward")
        outputs = with_gradient(output)
        unit.calls_open += self._trains
        if outputs:
            when_backward_comes = partial(self._backward_comes, unit)
            register_multi_grad_hook(outputs, when_backward_comes, mode="any")
        if self.reshard_after_forward or not outputs:
            self._let_go(unit)

    def _let_go(self, unit: Unit) -> None:
        """The root takes along what was asked for and not used."""
        for one in self.units if unit is self.units[0] else [unit]:
            one.reshard()

    def _backward_comes(self, unit: Unit, gradient: Tensor) -> None:
        self._has_graph |= torch.is_grad_enabled()
        unit.calls_open -= 1
        self._before_backward(unit, may_pass=True)

    def _before_backward(self, unit: Unit, may_pass: bool = False) -> None:
        if not self._backward:
            self._backward = True
            self._seen.clear()
            self._passed.clear()
            if unit is not self.units[0]:  # its output is the root's, too
                self._before_backward(self.units[0])
        self._make_whole(unit, "backward", may_pass)
        unit.gradients_open = {id(p) for p in unit.trained}

    def _make_whole(
        self,
        unit: Unit,
        direction: str,
        may_pass: bool = False,
    ) -> None:
        if may_pass or unit not in self._seen:
            self._catch_up(direction, unit, may_pass)
        self._seen.add(unit)
        unit.unshard()
        following = self._next[direction].get(unit)
        if self.prefetch and following is not None and following not in self._seen:
            following.start()

    def _catch_up(self, direction: str, until: Unit | None = None, may_pass: bool = False) -> None:
        """Take part in gathers of units that this rank has skipped, and others may not have.

        Args:
            may_pass: backward has come to `until`, or to its end. Units before it get no more gradients if no call of
                theirs is open, as autograd goes from what was computed last to what was computed first. (An activation
                checkpoint that computes forward again is no such sign.)
        """
        for unit in takewhile(lambda one: one is not until, self._order[direction]):
            if unit not in self._seen:
                self._seen.add(unit)
                unit.unshard()
                if direction == "backward" or self.reshard_after_forward or not self._trains:
                    unit.reshard()
            if may_pass and unit is not self.units[0] and not (until and unit.calls_open):
                self._pass(unit)

    def _pass(self, unit: Unit) -> None:
        if unit not in self._passed and not self._has_graph:
            self._passed.add(unit)
            self.passed(unit)
            unit.reshard()

    def _gradient_is_there(self, unit: Unit, p: nn.Parameter) -> None:
        unit.gradients_open.discard(id(p))
        if not unit.gradients_open:
            self._passed.add(unit)
        self._reshard_if_done(unit)

    def _inputs_are_done(self, unit: Unit, gradients: object) -> None:
        unit.inputs_open -= 1
        self._reshard_if_done(unit)

    def _reshard_if_done(self, unit: Unit) -> None:
        """When backward has passed: all gradients of parameters are there, and of inputs where that matters."""
        if unit.is_whole and not unit.gradients_open and not unit.inputs_open and not self._has_graph:
            unit.reshard()
