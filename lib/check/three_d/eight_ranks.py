"""Chapter 13, a program that trains on eight ranks, with mistakes in it: exercise 13.4."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lib import comm
from lib.check.exercise import Data, Exercise, Mistake, everywhere, kind, several, whole
from lib.check.three_d.whose_sum import TIED
from lib.facts import Fact
from lib.mesh import Group, MeshShape
from lib.model import GPT, GPTConfig, loss_term, mean_loss
from lib.pipeline.stage import cut
from lib.placement import Replicate, unshard

_NAME = "step_on_eight"
_CONFIG = GPTConfig(vocab_size=16, context=8, d_model=8, num_layers=2, num_heads=2)
_SHAPE = MeshShape(dp=2, pp=2, tp=2)
_LR, _ROWS = 0.1, 8
_EMBEDDING = "embed.token.weight"  # tied: the head's, too
_RETURNED, _TWO = "what was returned", "a loss and facts"
_LOSS = "the loss"
_REPLICAS = "weights on dp ranks"
_NORMS, _TIED = "norms and row biases on tp ranks", f"the tied {TIED} on the first and the last stage"
_EQUAL, _DRIFT = "equal", "different"


def _step_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Few tokens count on the first data-parallel rank: a mean of the ranks' means is not the mean."""
    tokens = torch.randint(_CONFIG.vocab_size, (_ROWS, _CONFIG.context + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[: _ROWS // 2, 2:] = -100
    given = {"seed": whole(generator, 0, 2**30), "inputs": tokens[:, :-1].contiguous(), "targets": targets}
    norm = _norm(_gradients(given), _same)
    return [given | {"max_norm": 0.8 * norm.item()} for _ in range(n)]


def _model(seed: int) -> GPT:
    """In float64, with biases and norms that are not all 0 and 1."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = GPT(_CONFIG).double()
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
    return model


def _step_on_eight(answer: Callable, world: Group, given: Data) -> Data:
    inputs, targets = given["inputs"].clone(), given["targets"].clone()
    result = answer(world, _model(given["seed"]), inputs, targets, given["max_norm"])
    loss, facts = several(result, 2)
    facts = [*facts] if isinstance(facts, (list, tuple)) else []
    names = [fact.name for fact in facts if isinstance(fact, Fact)]
    complete = len(names) == len(facts) and _EMBEDDING in names
    if comm.all_reduce(torch.tensor(int(complete)), world, "min"):
        return {_RETURNED: _TWO, _LOSS: loss, **_copies(facts, world), **_weights(facts)}
    return {_RETURNED: kind(result)}


def _weights(facts: list[Fact]) -> Data:
    """This rank's, made whole again, by serial name."""
    return {f"{fact.name} after the step": unshard(fact.parameter, fact.placement, fact.cut_over) for fact in facts}


def _copies(facts: list[Fact], world: Group) -> Data:
    """Whether copies are still equal, all ranks': by a sum of squares each. A tied embedding is on both stages."""
    parts = {
        _REPLICAS: ("dp", facts),
        _NORMS: ("tp", [fact for fact in facts if isinstance(fact.placement, Replicate)]),
        _TIED: ("pp", [fact for fact in facts if fact.name == _EMBEDDING]),
    }
    mine = torch.stack([sum(fact.parameter.detach().square().sum() for fact in some) for _, some in parts.values()])
    everyones = comm.all_gather(mine[None], world).reshape(*_SHAPE.sizes.values(), len(parts))
    found = {}
    for i, (what, (axis, _)) in enumerate(parts.items()):
        here, there = everyones[..., i].unbind(_SHAPE.axes.index(axis))
        found[what] = _EQUAL if torch.allclose(here, there, rtol=1e-12) else _DRIFT
    return found


# ---- one process ----------------------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and targets of all rows
Weigh = Callable[[str], float]  # a factor for each parameter, by its name


def _mean_of_means(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([mean_loss(*rows) for rows in zip(logits.chunk(2), targets.chunk(2), strict=True)]).mean()


def _term(dp: int) -> Loss:
    """What the rows of one data-parallel rank add to the mean over all."""
    return lambda logits, targets: loss_term(logits.chunk(2)[dp], targets.chunk(2)[dp], (targets != -100).sum())


def _loss(given: Data, loss: Loss) -> float:
    return loss(_model(given["seed"])(given["inputs"]), given["targets"]).item()


def _gradients(given: Data) -> dict[str, Tensor]:
    model = _model(given["seed"])
    mean_loss(model(given["inputs"]), given["targets"]).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _norm(gradients: dict[str, Tensor], copies: Weigh) -> Tensor:
    return sum(g.square().sum() * copies(name) for name, g in gradients.items()).sqrt()


def _same(name: str) -> float:
    return 1


def _copies_of(name: str) -> int:
    """Ranks that hold each element, and over which its gradient is a sum."""
    return 2 if any(part in name for part in ("qkv", "up.", "out.weight", "down.weight")) else 4


@cache
def _names(pp: int) -> tuple[str, ...]:
    """The parameters of a stage."""
    piece = cut(_model(0), 2)[pp]
    return tuple(piece.shared.get(id(p), (name, ()))[0] for name, p in piece.named_parameters())


def _after(times: Weigh = _same, copies: Weigh = _same, clips: bool = True) -> Callable:
    """The weights after a step, if gradients come out so many times too large, and the clip counts such copies."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        gradients = {name: times(name) * g for name, g in _gradients(given[0]).items()}
        factor = (given[0]["max_norm"] / _norm(gradients, copies)).clamp(max=1) if clips else 1
        before = _model(given[0]["seed"]).state_dict()
        after = {name: before[name] - _LR * factor * g for name, g in gradients.items()}
        stages = [_names(_SHAPE.coordinates(rank)["pp"]) for rank in range(len(given))]
        return [{f"{name} after the step": after[name] for name in names} for names in stages]

    return answers


def _reference(given: list[Data]) -> list[Data]:
    right = {_RETURNED: _TWO, _LOSS: _loss(given[0], mean_loss)} | dict.fromkeys((_REPLICAS, _NORMS, _TIED), _EQUAL)
    return [right | weights for weights in _after()(given)]


def _seen(loss: Loss | None = None, **copies: str) -> Callable:
    """The same on every rank: which copies agree, and perhaps what was returned as the loss."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        return everywhere(copies if loss is None else copies | {_LOSS: _loss(given[0], loss)}, given)

    return answers


def _own_loss(given: list[Data], want: Any) -> list[Data]:
    terms = [_loss(given[0], _term(dp)) for dp in range(_SHAPE.sizes["dp"])]
    return [{_LOSS: terms[_SHAPE.coordinates(rank)["dp"]]} for rank in range(len(given))]


STEP_ON_EIGHT = Exercise(
    id="13.4",
    title=_NAME,
    points=3,
    body=_step_on_eight,
    inputs=_step_inputs,
    reference=_reference,
    ranks=(8,),
    timeout_s=20,
    mistakes=(
        Mistake(
            "Both mistakes are still in it. One is in the loss: it is not the mean over all tokens that count. The "
            "second is in the sums: copies of norms and of the tied embedding have drifted apart.",
            _seen(_mean_of_means, **{_NORMS: _DRIFT, _TIED: _DRIFT}),
        ),
        Mistake(
            "Copies agree, but the loss is wrong: each dp rank's tokens are divided by that rank's own count, and the "
            "result is the mean of two means. A token counts more where fewer of them count. Every term has the same "
            "denominator: the count over the global batch.",
            _seen(_mean_of_means, **{_NORMS: _EQUAL, _TIED: _EQUAL}),
        ),
        Mistake(
            "The two replicas have drifted apart: cut matrices are not summed over dp, whose ranks saw different rows. "
            "Each fact says over which ranks its gradient is a sum: fact.sum_over.",
            _seen(**{_REPLICAS: _DRIFT}),
        ),
        Mistake(
            "Norms have drifted apart between tp ranks, and the tied embedding between stages: dp alone is not enough "
            "for them. With sequence parallelism, a norm or a row bias has a partial gradient on each tp rank; the "
            "tied embedding has one on each of its two stages. Each fact says over which ranks: fact.sum_over.",
            _seen(**{_NORMS: _DRIFT, _TIED: _DRIFT}),
        ),
        Mistake(
            "The copies of the tied embedding agree, but norms and row biases have drifted apart between tp ranks: "
            "with sequence parallelism each saw its slice of the tokens, so dp×tp is their sum.",
            _seen(**{_NORMS: _DRIFT}),
        ),
        Mistake(
            "The copies of norms agree, but the tied embedding is no longer the same on the first and the last stage. "
            "Each has the gradient of one use: sum over both.",
            _seen(**{_TIED: _DRIFT}),
        ),
        Mistake(
            "All weights may be right, but each rank returns its own term of the loss. The terms add up over dp.",
            _own_loss,
        ),
        Mistake(
            "The sums are right, and then nothing is clipped.",
            _after(clips=False),
        ),
        Mistake(
            "The gradients are means over the ranks that hold them, but the loss is divided by the global count "
            'already: they are terms of a sum. Use op="sum".',
            _after(times=lambda name: 1 / _copies_of(name)),
        ),
        Mistake(
            "The clip counts copies: each square once for every rank that holds it. fact.square divides by the number "
            "of ranks that do.",
            _after(copies=_copies_of),
        ),
    ),
)

EXERCISES = (STEP_ON_EIGHT,)
