"""Chapter 06, a column layer and a row layer behind it, forward and backward: exercises 06.1 and 06.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from lib import cost
from lib.check.exercise import Data, Exercise, Mistake, but, random, summed
from lib.check.fsdp.units import AS_NEEDED, MORE, ROWS
from lib.check.listen import Heard, listen
from lib.conjugate import identity, pair
from lib.mesh import Group

_D, _F = 6, 8  # width of x; hidden numbers of each rank, so many that to collect them is more than a sum of y


def _amount(heard: Heard, all_reduces: int, x: Tensor, n: int) -> str:
    """Whether more was sent than in so many all-reduces of x."""
    most = 1.2 * all_reduces * cost.wire_bytes("all_reduce", x.nbytes, n)
    return MORE if heard.sent_bytes(n) > most else AS_NEEDED


# ---- 06.1 parallel_mlp ----------------------------------------------------------------------------------------------

_ARGUMENTS = ("x", "up", "up_bias", "down", "down_bias")


def _mlp_inputs(generator: torch.Generator, n: int) -> list[Data]:
    whole = {"x": random(generator, ROWS, _D), "down_bias": random(generator, _D)}
    shapes = {"up": (_F, _D), "up_bias": (_F,), "down": (_D, _F)}
    return [whole | {name: random(generator, *shape) for name, shape in shapes.items()} for _ in range(n)]


def _mlp(answer: Callable, group: Group, given: Data) -> Data:
    heard = listen()
    y = answer(*(given[name].clone() for name in _ARGUMENTS), group)
    return {"y": y, "what was sent": _amount(heard, 1, given["x"], group.size)}


def _outputs(
    between: Callable[[Tensor], Tensor] = gelu,
    after: Callable[[Tensor, Tensor, int], Tensor] = lambda terms, bias, r: terms.sum(0) + bias,
    up_bias: bool = True,
) -> Callable:
    """From all ranks' hidden numbers [n, B, F/n] to what is multiplied; from their terms [n, B, D] to rank r's y."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        hidden = torch.stack([g["x"] @ g["up"].T + up_bias * g["up_bias"] for g in given])
        terms = between(hidden) @ torch.stack([g["down"].T for g in given])
        return [{"y": after(terms, g["down_bias"], r)} for r, g in enumerate(given)]

    return answers


def _own_term(terms: Tensor, bias: Tensor, r: int) -> Tensor:
    return terms[r] + bias


def _gelu_of_sum(hidden: Tensor) -> Tensor:
    return gelu(hidden.sum(0, keepdim=True))


MLP = Exercise(
    id="06.1",
    title="parallel_mlp",
    points=2,
    body=_mlp,
    inputs=_mlp_inputs,
    reference=lambda given: [y | {"what was sent": AS_NEEDED} for y in _outputs()(given)],
    mistakes=(
        Mistake(
            "The bias of the second layer is in the sum once per rank. It is replicated: add it once, after the "
            "all-reduce.",
            _outputs(after=lambda terms, bias, r: terms.sum(0) + len(terms) * bias),
        ),
        Mistake(
            "Each rank returns its partial sum, of the right shape: nothing was summed over the ranks. The second "
            "layer ends in an all-reduce.",
            _outputs(after=_own_term),
        ),
        Mistake(
            "You took the mean of the partial sums. They are terms of one long dot product: add them up.",
            _outputs(after=lambda terms, bias, r: terms.mean(0) + bias),
        ),
        Mistake(
            "You summed over the ranks before GELU, and again at the end. After the first layer each rank has "
            "different hidden features, complete: nothing is to be summed there.",
            _outputs(between=_gelu_of_sum),
        ),
        Mistake(
            "Your all-reduce is in the wrong place. Before GELU each rank has different hidden features, complete. "
            "Sum the partial sums after the second layer.",
            _outputs(between=_gelu_of_sum, after=_own_term),
        ),
        Mistake("There is no GELU between the layers.", _outputs(between=lambda hidden: hidden)),
        Mistake("The bias of the second layer is missing.", _outputs(after=lambda terms, bias, r: terms.sum(0))),
        Mistake(
            "The bias of the first layer is missing. Each rank adds its shard, which belongs to its hidden features, "
            "before GELU.",
            _outputs(up_bias=False),
        ),
        Mistake(
            "The output is right, but you send more than one all-reduce of it. No rank needs all hidden features, or "
            "full weights.",
            but(**{"what was sent": MORE}),
        ),
    ),
)

# ---- 06.2 block -----------------------------------------------------------------------------------------------------

_BLOCKS = ("first", "second")


def _blocks_inputs(generator: torch.Generator, n: int) -> list[Data]:
    whole = {"x": random(generator, ROWS, _D), "gradient": random(generator, ROWS, _D)}
    shapes = ((_F, _D), (_D, _F))
    return [whole | {block: [random(generator, *shape) for shape in shapes] for block in _BLOCKS} for _ in range(n)]


def _blocks(answer: Callable, group: Group, given: Data) -> Data:
    x = given["x"].clone().requires_grad_()
    weights = [[w.clone().requires_grad_() for w in given[block]] for block in _BLOCKS]
    heard, y = listen(), x
    for up, down in weights:
        y = answer(y, up, down, group)
        if not torch.is_tensor(y):
            return {"y": y}
    result = y.detach().clone()
    if y.shape != x.shape:
        return {"y": result}
    if not y.requires_grad:
        return {"y": result, "gradient of x": "none: y does not know where it came from"}
    y.backward(given["gradient"])
    found = _named(result, x, weights, _gradient)
    return found | {"what was sent": _amount(heard, 2 * len(_BLOCKS), x, group.size)}


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _named(y: Tensor, x: Tensor, weights: list, gradient_of: Callable[[Tensor], Tensor]) -> Data:
    found = {"y": y, "gradient of x": gradient_of(x)}
    for block, (up, down) in zip(_BLOCKS, weights, strict=True):
        found |= {f"{block} block, gradient of up": gradient_of(up)}
        found |= {f"{block} block, gradient of down": gradient_of(down)}
    return found


# What a communication does to all ranks' tensors, [n, …].


def _mean(x: Tensor) -> Tensor:
    return x.mean(0, keepdim=True).expand_as(x)


_IDENTITY_SUM, _SUM_IDENTITY = (identity, summed), (summed, identity)  # forward, backward
_SUM_SUM, _NEITHER = (summed, summed), (identity, identity)


def _part(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return gelu(x @ up.mT) @ down.mT


def _skip(x: Tensor, before: Callable, after: Callable, up: Tensor, down: Tensor) -> Tensor:
    return x + after(_part(before(x), up, down))


def _skip_from_inside(x: Tensor, before: Callable, after: Callable, up: Tensor, down: Tensor) -> Tensor:
    x = before(x)
    return x + after(_part(x, up, down))


def _skip_to_inside(x: Tensor, before: Callable, after: Callable, up: Tensor, down: Tensor) -> Tensor:
    return after(x + _part(before(x), up, down))


def _two_blocks(
    before: tuple[Callable, Callable] = _IDENTITY_SUM,
    after: tuple[Callable, Callable] = _SUM_IDENTITY,
    block: Callable[..., Tensor] = _skip,
) -> Callable:
    """All ranks at once, with (forward, backward) of the two functions, and a block that is made with them."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        x = torch.stack([g["x"] for g in given]).requires_grad_()
        weights = [[torch.stack([g[name][i] for g in given]).requires_grad_() for i in range(2)] for name in _BLOCKS]
        y = x
        for up, down in weights:
            y = block(y, lambda z: pair(z, *before), lambda z: pair(z, *after), up, down)
        y.backward(torch.stack([g["gradient"] for g in given]))
        result = y.detach()
        return [_named(result[r], x, weights, lambda z, r=r: z.grad[r]) for r in range(len(given))]

    return answers


BLOCK = Exercise(
    id="06.2",
    title="block",
    points=4,
    body=_blocks,
    inputs=_blocks_inputs,
    reference=lambda given: [found | {"what was sent": AS_NEEDED} for found in _two_blocks()(given)],
    mistakes=(
        Mistake(
            "The last block is right, and everything before it is wrong: the gradient of x is only the term of this "
            "rank. In backward, BeforeColumn must sum it over the ranks.",
            _two_blocks(before=_NEITHER),
        ),
        Mistake(
            "All weight gradients are exactly n times too large. You sum in backward of AfterRow, where all ranks "
            "have the same gradient. Sum the gradients of x instead, in BeforeColumn.",
            _two_blocks(before=_NEITHER, after=_SUM_SUM),
        ),
        Mistake(
            "You sum twice in backward. After the row-parallel layer all ranks have the same gradient, and AfterRow "
            "makes it n times too large: it must return it unchanged.",
            _two_blocks(after=_SUM_SUM),
        ),
        Mistake(
            "BeforeColumn averages the gradients of x over the ranks. Each is a term, from different hidden features: "
            "add them up.",
            _two_blocks(before=(identity, _mean)),
        ),
        Mistake(
            "The two functions are swapped. Before the column-parallel layer nothing is summed in forward; after the "
            "row-parallel layer there are partial sums, and these are all-reduced.",
            _two_blocks(before=_SUM_IDENTITY, after=_IDENTITY_SUM),
        ),
        Mistake(
            "BeforeColumn also sums in forward. There x is replicated, so the result is n times x. Sum only its "
            "gradient.",
            _two_blocks(before=_SUM_SUM),
        ),
        Mistake(
            "Backward of BeforeColumn returns no gradient of x, so layers before a block get a gradient only through "
            "the residual path. Return the sum of the gradients over the ranks.",
            _two_blocks(before=(identity, torch.zeros_like)),
        ),
        Mistake(
            "The weights get no gradient. Backward of AfterRow sends nothing, but it must return the gradient "
            "unchanged. (Or you called comm.all_reduce where AfterRow.apply belongs: autograd does not differentiate "
            "it.)",
            _two_blocks(after=(summed, torch.zeros_like)),
        ),
        Mistake(
            "Nothing is summed in forward: each rank continues with its partial sum. AfterRow is an all-reduce.",
            _two_blocks(after=_NEITHER),
        ),
        Mistake(
            "The residual path also goes through BeforeColumn, so its gradient is summed, although it is equal on all "
            "ranks already. Add the x before BeforeColumn.",
            _two_blocks(block=_skip_from_inside),
        ),
        Mistake(
            "The residual path goes through AfterRow, and x is added n times. It is replicated: add it after the "
            "all-reduce.",
            _two_blocks(block=_skip_to_inside),
        ),
        Mistake(
            "The residual path is missing: a block returns x + mlp(x).",
            _two_blocks(block=lambda x, before, after, up, down: after(_part(before(x), up, down))),
        ),
        Mistake(
            "All values are right, but you send more than one all-reduce forward and one backward per block.",
            but(**{"what was sent": MORE}),
        ),
    ),
)

EXERCISES = (MLP, BLOCK)
