"""Chapter 08, a chain of stages, forward and backward by hand: exercise 08.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad

from lib.check.exercise import DTYPE, Data, Exercise, Mistake, but, kind, random, several
from lib.check.fsdp.units import AS_NEEDED, MORE, ROWS
from lib.check.listen import listen
from lib.mesh import Group

_D = 5  # width of what travels
_PARAMETERS = ("weight", "bias")
_LOSS, _OF_X, _SENT, _AFTER = "loss", "gradient of what came in", "what was sent", "weights of the stage"
_NO_LOSS, _AS_GIVEN, _CHANGED = "None", "as given", "changed"
_LEAF = """If this is about the gradient of what came in: what comm.recv returns has no history and asks for none.
Declare it a leaf before your stage computes with it."""
_ENDS = """Only the last rank has a loss to begin with. The others begin at their output, with the gradient that came:
y.backward(gradient)."""


def _chain_inputs(generator: torch.Generator, n: int) -> list[Data]:
    alike = {"x": random(generator, ROWS, _D), "wanted": random(generator, ROWS, _D)}
    return [alike | {"weight": random(generator, _D, _D), "bias": random(generator, _D)} for _ in range(n)]


def _stage(given: Data) -> nn.Sequential:
    linear = nn.Linear(_D, _D, dtype=DTYPE)
    linear.load_state_dict({name: given[name] for name in _PARAMETERS})
    return nn.Sequential(linear, nn.Tanh())


def _step(answer: Callable, group: Group, given: Data) -> Data:
    stage, heard = _stage(given), listen()
    x, wanted = given["x"].clone(), given["wanted"].clone()
    try:
        result = answer(stage, x, wanted, group)
    except (AttributeError, RuntimeError) as error:
        if "attribute 'backward'" in str(error):
            error.add_note(_ENDS)
        elif "NoneType" in str(error) or "does not require grad" in str(error):
            error.add_note(_LEAF)
        raise
    loss, of_x = several(result, 2)
    neighbours = (group.rank > 0) + (group.rank < group.size - 1)
    back = sum(n_bytes for dst, n_bytes in heard.sent if dst == group.rank - 1)
    found = {"what was returned": kind(result), _LOSS: _NO_LOSS if loss is None else loss, _OF_X: of_x}
    found |= {_of(name): _gradient(stage[0].get_parameter(name)) for name in _PARAMETERS}
    as_given = all(torch.equal(stage[0].get_parameter(name), given[name]) for name in _PARAMETERS)
    more = heard.sent_bytes(group.size) > neighbours * x.nbytes
    found |= {_AFTER: _AS_GIVEN if as_given else _CHANGED, _SENT: MORE if more else AS_NEEDED}
    return found | {"sent back": back > 0}


def _of(name: str) -> str:
    return f"gradient of the {name}"


def _gradient(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


# ---- all stages, one after the other --------------------------------------------------------------------------------


def _stepped(
    into: Callable[[Tensor, Tensor], Tensor] = lambda came, x: came,
    starts: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda came, y, wanted: came,
    goes: Callable[[Tensor, Tensor], Tensor] = lambda of_x, of_y: of_x,
    times: float = 1,
) -> Callable:
    """What a stage computes with; the gradient of its output with which it starts, and the one that it sends back."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found: list[Data] = [{} for _ in given]
        x, wanted, ends = given[0]["x"], given[0]["wanted"], []
        came = x
        for g in given:
            stage, leaf = _stage(g), into(came, x).detach().requires_grad_()
            y = stage(leaf)
            ends.append((stage, leaf, y))
            came = y
        loss = _loss(y, wanted)
        of_y = grad(loss, y, retain_graph=True)[0]
        for r, (stage, leaf, y) in reversed([*enumerate(ends)]):
            begin = of_y if r == len(given) - 1 else starts(of_y, y, wanted)
            of_x, *of_parameters = grad(y, [leaf, *stage.parameters()], begin)
            found[r][_OF_X] = of_x
            for name, of_p in zip(_PARAMETERS, of_parameters, strict=True):
                found[r][_of(name)] = times * of_p
            of_y = goes(of_x, of_y)
        *others, last = found
        return [*(other | {_LOSS: _NO_LOSS} for other in others), last | {_LOSS: loss.item()}]

    return answers


def _loss(y: Tensor, wanted: Tensor) -> Tensor:
    return (y - wanted).square().mean()


def _of_own_loss(came: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    return grad(_loss(y, wanted), y, retain_graph=True)[0]


def _weights(of: Callable) -> Callable:
    """Only the gradients of parameters in what `of` says; whatever the rest is."""
    names = {_of(name) for name in _PARAMETERS}
    return lambda given, want: [{k: v for k, v in found.items() if k in names} for found in of(given, want)]


_NOWHERE = _weights(_stepped(starts=lambda came, y, wanted: torch.zeros_like(came)))


def _nothing_sent(given: list[Data], want: list[Data]) -> list[Data]:
    return [found | ({"sent back": False} if r else {}) for r, found in enumerate(_NOWHERE(given, want))]


def _without_gradient_of_x(given: list[Data], want: list[Data]) -> list[Data]:
    return [w if r else w | {_OF_X: None} for r, w in enumerate(want)]


def _without_weights(is_without: Callable[[int, int], bool]) -> Callable:
    """All that was returned is right, and on these ranks, by rank and number of ranks, no weight has a gradient."""

    def answers(given: list[Data], want: list[Data]) -> list[Data]:
        none = [{_of(name): torch.zeros_like(g[name]) for name in _PARAMETERS} for g in given]
        return [w | n if is_without(r, len(want)) else w for r, (w, n) in enumerate(zip(want, none, strict=True))]

    return answers


def _loss_everywhere(given: list[Data], want: list[Data]) -> list[Data]:
    """However it came there."""
    return [{k: v for k, v in w.items() if k != _SENT} | {_LOSS: want[-1][_LOSS]} for w in want]


_TWICE = (
    "You go back through the same graph twice, and .grad adds up: the gradients of the weights are exactly twice too "
    "large. One backward gives those and the gradient of what came in."
)

STEP = Exercise(
    id="08.2",
    title="step",
    points=3,
    body=_step,
    inputs=_chain_inputs,
    reference=lambda given: [
        {"what was returned": "2 results"} | found | {_AFTER: _AS_GIVEN, _SENT: AS_NEEDED}
        for found in _stepped()(given)
    ],
    mistakes=(
        *(
            Mistake(
                "What you send back is right, and weights get no gradient: autograd.grad returns gradients and leaves "
                "none in .grad. Let y.backward(gradient) do both, on every rank.",
                _without_weights(is_without),
            )
            for is_without in (
                lambda rank, ranks: True,
                lambda rank, ranks: rank < ranks - 1,
                lambda rank, ranks: 0 < rank < ranks - 1,
            )
        ),
        Mistake(
            "Only the last stage learns, and no gradient is sent back. Autograd does not see a message: the graph ends "
            "where a tensor is sent. Send back the gradient of what came in, and let backward start with it.",
            _nothing_sent,
        ),
        Mistake(
            "Only the last stage learns: zeros go back. What comm.recv returns has no history and asks for no "
            "gradient. Declare it a leaf before your stage computes with it.",
            _NOWHERE,
        ),
        Mistake(
            "Stages before the last begin backward with ones. That is the gradient of the sum of their output. Begin "
            "with the gradient that the stage behind has sent.",
            _weights(_stepped(starts=lambda came, y, wanted: torch.ones_like(came))),
        ),
        Mistake(
            "Every stage compares its own output with `wanted`. Only the last one has a loss; the others begin "
            "backward with the gradient that the stage behind has sent.",
            _weights(_stepped(starts=_of_own_loss)),
        ),
        Mistake(
            "You send back the gradient of your output. The stage before needs the gradient of its own output, and "
            "that is your *input*.",
            _weights(_stepped(goes=lambda of_x, of_y: of_y)),
        ),
        Mistake(
            "What was received is not used: each stage computes with x. Only the first stage takes that; on the others "
            "it shows what form the tensor has that comes.",
            _stepped(into=lambda came, x: x),
        ),
        Mistake(_TWICE, _weights(_stepped(times=2))),
        Mistake(_TWICE, _weights(_stepped(goes=lambda of_x, of_y: 2 * of_x, times=2))),
        Mistake(
            "Rank 0 has no gradient of x. There nothing was received, but x is what came in: declare it a leaf, too.",
            _without_gradient_of_x,
        ),
        Mistake(
            "Every rank returns the loss. Only the last one has it: return None on the others. It need not be sent.",
            _loss_everywhere,
        ),
        Mistake(
            "All gradients are right, but the weights are others than before. Leave them: the step of an optimizer is "
            "no part of this.",
            but(**{_AFTER: _CHANGED}),
        ),
        Mistake(
            "All numbers are right, but you send more than an activation forward and a gradient back. Each rank talks "
            "to its neighbours only.",
            but(**{_SENT: MORE}),
        ),
    ),
)

EXERCISES = (STEP,)
