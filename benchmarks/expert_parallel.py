"""Experts over ranks: rows travel by all-to-all, ours or PyTorch's, or every rank gathers all tokens.

Each way sends the rows of a layer four times in a step. A gather sends every token to every rank, (n − 1) · N/n of
them; an all-to-all of even loads sends k copies, of which 1/n stay: the ratio is k/n.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import gelu

from benchmarks.table import between_barriers, paired, ratio, show, three
from book.trials import wire_audit
from lib import comm, run
from lib.conjugate import all_gather_reduce_scatter, reduce_scatter_all_gather
from lib.cost.experts import experts_of_rank
from lib.expert_parallel.dispatch import Dispatch
from lib.expert_parallel.layer import ExpertGroups, ParallelMoE
from lib.mesh import Group
from lib.moe import ExpertOptions, MoE

EXPERTS, TOKENS, WIDTH, INNER = 8, 1024, 256, 256  # tokens of a rank


class GatheredMoE(ParallelMoE):
    """Every rank gathers the tokens of all ranks, computes those that chose its experts, and the sums are scattered."""

    def mixture(self, x_BTD: Tensor, chosen_BTk: Tensor, gates_BTk: Tensor) -> Tensor:
        ep = self.groups.ep
        x_ND, gates_Nk = (all_gather_reduce_scatter(x.flatten(0, 1), ep, 0) for x in (x_BTD, gates_BTk))
        chosen_Nk = comm.all_gather(chosen_BTk.flatten(0, 1), ep)
        mine = experts_of_rank(self.options.experts, ep.size, ep.rank)
        tokens, places = ((chosen_Nk >= mine.start) & (chosen_Nk < mine.stop)).nonzero(as_tuple=True)
        experts = chosen_Nk[tokens, places] - mine.start
        order = experts.argsort(stable=True)
        tokens, places = tokens[order], places[order]
        sizes = torch.bincount(experts, minlength=len(mine)).tolist()
        y_RD = self.experts(x_ND[tokens], sizes) * gates_Nk[tokens, places][:, None]
        y_ND = torch.zeros_like(x_ND).index_add(0, tokens, y_RD)
        return reduce_scatter_all_gather(y_ND, ep, 0).view_as(x_BTD)


class TorchMoE(ParallelMoE):
    """Rows travel by `all_to_all_single_autograd` of PyTorch; the order of rows and the table of loads are ours."""

    def computed(self, rows_RD: Tensor, load_E: Tensor) -> Tensor:
        dispatch = Dispatch.of(load_E, self.groups.ep)
        here, order = self.groups.ep.rank, dispatch._order()
        going, coming = dispatch.rows[here], [line[here] for line in dispatch.rows]
        pg = self.groups.ep.pg or dist.group.WORLD
        arrived = all_to_all_single_autograd(rows_RD.contiguous(), coming, going, pg)
        y_RD = self.experts(arrived[order], dispatch.arriving_ne.sum(0).tolist())
        return all_to_all_single_autograd(y_RD[order.argsort()].contiguous(), going, coming, pg)


SIDES: dict[str, type[ParallelMoE]] = {
    "all-to-all": ParallelMoE,
    "PyTorch's all-to-all": TorchMoE,
    "all-gather": GatheredMoE,
}


def layer(name: str, group: Group, serial: MoE) -> ParallelMoE:
    """The layer of one way, on these ranks."""
    groups = ExpertGroups(ep=group, tokens=group, batch_pieces=group.size)
    return SIDES[name](serial, groups)


def _step(moe: nn.Module, x: Tensor, gradient: Tensor) -> None:
    x.grad = None
    moe.zero_grad()
    moe(x).backward(gradient)


def _made(name: str, k: int, world: Group) -> Callable[[], None]:
    torch.manual_seed(0)
    serial = MoE(ExpertOptions(experts=EXPERTS, top_k=k, renormalise=k > 1), WIDTH, INNER, gelu)
    for p in serial.parameters():
        nn.init.normal_(p, std=0.02)
    moe = layer(name, world, serial)
    torch.manual_seed(1 + world.rank)
    x, gradient = (torch.randn(1, TOKENS, WIDTH) for _ in range(2))
    return partial(_step, moe, x.requires_grad_(), gradient)


def _measure(world: Group, k: int, rounds: int) -> dict[str, list[float]]:
    sides = {name: partial(between_barriers, world, _made(name, k, world)) for name in SIDES}
    paired(sides, 3)
    return paired(sides, rounds)


def main(rounds: int = 20) -> None:
    rows = [("ranks", "k", "way", "ms", "its time / all-to-all", "MB sent", "all-to-all / it, bytes", "k/n")]
    for n in (2, 4):
        for k in (1, 2):
            times = run(_measure, n, k, rounds, timeout_s=600)[0]
            sent = {
                name: statistics.mean(wire_audit.sent_in_a_step(partial(_made, name, k), n))
                if wire_audit.available()
                else 0
                for name in SIDES
            }
            for name in SIDES:
                sizes = ("Linux only",) * 2
                if wire_audit.available():
                    sizes = f"{sent[name] / 1e6:.2f}", f"{sent['all-to-all'] / sent[name]:.2f}"
                ms = f"{1e3 * statistics.median(times[name]):.0f}"
                expected = f"{k / n:.2f}" if name == "all-gather" else ""
                rows.append(
                    (f"{n}", f"{k}", name, ms, three(ratio(times["all-to-all"], times[name])), *sizes, expected)
                )
    title = f"A layer of {EXPERTS} experts, forward and backward, {TOKENS} tokens a rank ({rounds} pairs)"
    show(title, rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
