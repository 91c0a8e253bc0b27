"""Claims: what a chapter says, beside what was measured.

The problem: books on this subject print formulas and numbers that nobody ran, and some of them are wrong by a factor.
The idea: a claim is a line of the chapter's code. It has a prediction, from a formula, and a measurement, from a run.
It prints both, and if they disagree the build of the book fails.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping
from html import escape

import torch
from torch import Tensor, nn

from lib import comm
from lib.layout import Partial, Placement, Replicate, parts, shard, unshard
from lib.mesh import Group

TRIES = 3  # a measurement of time is taken again so often before its claim fails

_WHOLE = Replicate()
_RELATIONS = {
    "=": lambda predicted, measured, slack: abs(predicted - measured) <= slack,
    "<=": lambda predicted, measured, slack: measured <= predicted + slack,
    ">=": lambda predicted, measured, slack: measured >= predicted - slack,
}


class ClaimError(AssertionError):
    """The measurement does not bear out the prediction."""


def claim(
    name: str,
    predicted: float,
    measured: float | Callable[[], float],
    rel: float = 0,
    abs: float = 0,
    unit: str = "",
    relation: str = "=",
) -> None:
    """Show one row, predicted beside measured, and raise if they disagree.

    Args:
        name: what is measured, as a reader would say it.
        predicted: from `lib.cost` or a formula in the same cell.
        measured: from a run, a trace or a memory counter. A function is called, and called again up to three times
            while the claim does not hold: for times, on a machine that does other things too.
        rel, abs: how far apart the two may be: rel · |predicted| + abs. Both 0 means exactly.
        unit: of both, such as `"bytes"`.
        relation: `"="`, or `"<="` and `">="` where the prediction is a bound on the measurement.

    Raises:
        ClaimError: it does not hold. Nothing that is infinite or not a number holds.
        ValueError: unknown relation, or a tolerance that is negative or not finite.
    """
    if relation not in _RELATIONS:
        raise ValueError(f"relation={relation!r} must be one of {', '.join(_RELATIONS)}")
    if not (0 <= rel < math.inf and 0 <= abs < math.inf):
        raise ValueError(f"rel={rel} and abs={abs} must be finite and not below 0")
    predicted = _plain(predicted)
    slack = rel * math.fabs(predicted) + abs
    for _ in range(TRIES if callable(measured) else 1):
        value = _plain(measured() if callable(measured) else measured)
        finite = math.isfinite(predicted) and math.isfinite(value)
        holds = finite and _RELATIONS[relation](predicted, value, slack)
        if holds:
            break
    row = _Row(name, predicted, value, rel, abs, unit, relation, holds)
    _show(row)
    _file(row)
    if not holds:
        raise ClaimError(f"{name}: predicted {row.says_predicted}, measured {row.says_measured} ({row.verdict})")


def _plain(x: float | Tensor) -> float | int:
    """A Python number; a whole one stays whole, as a float would round it beyond 2⁵³."""
    x = x.item() if isinstance(x, Tensor) else x
    return int(x) if isinstance(x, int) else float(x)


class _Row:
    def __init__(self, name, predicted, measured, rel, abs, unit, relation, holds) -> None:
        self.name, self.predicted, self.measured, self.unit = name, predicted, measured, unit
        self.relation, self.holds = relation, holds
        sign = {"=": "", "<=": "≤ ", ">=": "≥ "}[relation]
        texts = number(predicted), number(measured)
        if texts[0] == texts[1] and predicted != measured:  # they differ beyond the digits that we show
            texts = repr(predicted), repr(measured)
        self.says_predicted, self.says_measured = f"{sign}{texts[0]} {unit}".rstrip(), f"{texts[1]} {unit}".rstrip()
        if not holds:
            self.verdict = "fails"
        elif relation != "=":
            self.verdict = "holds"
        elif not rel and not abs:
            self.verdict = "exact"
        else:
            parts = [f"{100 * rel:g}%" if rel >= 1e-4 else f"{rel:g} of it"] * bool(rel) + [f"{abs:g}"] * bool(abs)
            self.verdict = "holds ± " + " + ".join(parts)

    def cells(self) -> tuple[str, str, str, str]:
        return self.name, self.says_predicted, self.says_measured, self.verdict


class _Table:
    """The claims of one cell, as the notebook shows them."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []

    def __repr__(self) -> str:
        rows = [("claim", "predicted", "measured", ""), *(row.cells() for row in self.rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows)

    def _repr_html_(self) -> str:
        head = (
            '<tr><th scope="col">claim</th><th scope="col">predicted</th><th scope="col">measured</th><td></td></tr>'
        )
        body = "".join(
            "<tr>"
            + "".join(f"<td>{escape(text)}</td>" for text in row.cells()[:3])
            + f'<td class="{"ok" if row.holds else "bad"}">{escape(row.verdict)}</td></tr>'
            for row in self.rows
        )
        return f'<table class="claims"><thead>{head}</thead><tbody>{body}</tbody></table>'


_cell: tuple[int, _Table, object] | None = None  # execution count, its table, and the handle to show it again


def _show(row: _Row) -> None:
    global _cell
    ipython = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(ipython, "kernel", None) is None:
        print("  ".join(row.cells()))
        return
    from IPython.display import display

    if _cell is not None and _cell[0] == ipython.execution_count:
        _cell[1].rows.append(row)
        _cell[2].update(_cell[1])
    else:
        table = _Table()
        table.rows.append(row)
        _cell = (ipython.execution_count, table, display(table, display_id=True))


def _file(row: _Row) -> None:
    """Append the claim to the file named by `$BOOK_CLAIMS`, from which the book makes its appendix."""
    path = os.environ.get("BOOK_CLAIMS")
    if not path:
        return
    record = {
        "page": os.environ.get("BOOK_PAGE", ""),
        "claim": row.name,
        "predicted": row.says_predicted,
        "measured": row.says_measured,
        "verdict": row.verdict,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def number(x: float) -> str:
    """A number as the book writes it: whole ones in groups of three, others with four digits that count."""
    if math.isfinite(x) and x == int(x) and math.fabs(x) < 1e15:
        return f"{int(x):,}".replace(",", "\u2009")
    return f"{x:.4g}"


# ---- equality -------------------------------------------------------------------------------------------------------


def largest_difference(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """max over tensors of ‖got − wanted‖ / ‖wanted‖: 0 where all are equal, about 1e-16 where float64 rounds.

    Where a wanted tensor is zero, its difference is counted as it is. NaN where any element is NaN.

    Raises:
        ValueError: the two do not have the same names and shapes, or are empty.
    """
    if not wanted and not got:
        raise ValueError("there is no tensor to compare; was backward() run?")
    if got.keys() != wanted.keys():
        odd = sorted(got.keys() ^ wanted.keys())
        raise ValueError(f"these tensors are in one of the two only: {', '.join(odd)}")
    largest = 0.0
    for name, want in wanted.items():
        if got[name].shape != want.shape:
            raise ValueError(f"{name} has shape {list(got[name].shape)} instead of {list(want.shape)}")
        have, want = got[name].double(), want.double()
        apart = (have - want).norm().item() / (want.norm().item() or 1.0)
        if math.isnan(apart):
            return apart  # max(0, nan) would be 0
        largest = max(largest, apart)
    return largest


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Name → a copy of p.grad, for all parameters that have one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Name → a copy of each parameter."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def replicas_equal(model: nn.Module, group: Group) -> bool:
    """Whether all ranks of the group hold the same weights, bit by bit. All must call it, and all get the answer."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    mine = torch.tensor([int.from_bytes(digest.digest()[:7], "big")])
    device = next(model.parameters()).device
    return comm.all_gather(mine.to(device), group).unique().numel() == 1


# ---- parallel layers ------------------------------------------------------------------------------------------------


def assert_adjoint(
    op: Callable[[Tensor], Tensor], x: Tensor, group: Group, of: Placement, to: Placement, rel: float = 1e-12
) -> None:
    """⟨op(x), y⟩ = ⟨x, op*(y)⟩ over all ranks together, where op* is what backward computes: the two are a pair.

    Args:
        op: linear, on all ranks at once.
        x: what this rank has, for its shape and dtype; the numbers are drawn here.
        of: how x lies on the ranks. What is whole on all of them counts once.
        to: how the output lies: `Replicate()` if all ranks go on to do the same with it, `Partial()` if each does
            something else with it.

    Raises:
        AssertionError: they are not each other's transpose.
    """
    x = _drawn(x, of, group, 1).requires_grad_()
    out = op(x)
    y = _drawn(out, to, group, 2)
    (back,) = torch.autograd.grad(out, x, y)
    forth, back_too = _inner(out, y, to, group), _inner(x, back, of, group)
    scale = math.sqrt(_inner(out, out, to, group) * _inner(y, y, to, group))
    if not abs(forth - back_too) <= rel * scale:
        raise AssertionError(
            f"forward and backward are no pair: ⟨op(x), y⟩ = {forth:.6g}, ⟨x, op*(y)⟩ = {back_too:.6g}"
        )


def _drawn(like: Tensor, placement: Placement, group: Group, seed: int) -> Tensor:
    """Random numbers, the same on all ranks if the tensor is whole on all."""
    place = 0 if placement == _WHOLE else group.rank
    generator = torch.Generator().manual_seed(100 * seed + place)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def _inner(a: Tensor, b: Tensor, placement: Placement, group: Group) -> float:
    """⟨a, b⟩ of the tensors that all ranks have together."""
    total = comm.all_reduce((a.detach() * b.detach()).sum(), group).item()
    return total / group.size if placement == _WHOLE else total


def assert_matches_serial(
    serial: nn.Module,
    parallel: nn.Module,
    inputs: Tensor,
    group: Group,
    rel: float = 1e-12,
    of: Placement = _WHOLE,
    to: Placement = _WHOLE,
) -> None:
    """Output, gradient of the input and of every parameter of a parallel module are those of its serial twin.

    Args:
        inputs: whole, the same on all ranks.
        rel: how far each tensor may be from the serial one, measured by its norm.
        of, to: how the parallel module's input and its output lie on the ranks.

    Raises:
        AssertionError: they are not, or the two have other parameters; it names the tensor that is farthest away.
    """
    x, part = inputs.clone(), shard(inputs, of, group)
    if inputs.is_floating_point():
        x.requires_grad_(), part.requires_grad_()
    out, out_part = serial(x), parallel(part)
    y = _drawn(out, _WHOLE, group, 3)
    out.backward(y)
    out_part.backward(shard(y, to, group))
    wanted = {"output": out.detach()} | {f"gradient of {name}": g for name, g in gradients(serial).items()}
    got = {"output": unshard(out_part, to, group)}
    partial = {id(getattr(m, name)) for m in parallel.modules() for name in getattr(m, "partial_gradients", ())}
    tied = set()
    for name, (p, placement) in parts(parallel).items():
        if p.grad is not None and id(p) not in tied:
            tied.add(id(p))
            got[f"gradient of {name}"] = unshard(p.grad, Partial() if id(p) in partial else placement, group)
    if x.grad is not None:
        wanted["gradient of the input"], got["gradient of the input"] = x.grad, unshard(part.grad, of, group)
    apart = {
        name: largest_difference({name: got[name]}, {name: want}) for name, want in wanted.items() if name in got
    }
    if got.keys() != wanted.keys():
        raise AssertionError(f"in one of the two only: {', '.join(sorted(got.keys() ^ wanted.keys()))}")
    worst = max(apart, key=apart.__getitem__)
    if not apart[worst] <= rel:
        raise AssertionError(f"{worst} is {apart[worst]:.2g} of its norm away from the serial one")
