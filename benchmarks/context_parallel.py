"""Attention over ranks: our ring against the one in PyTorch 2.13, which is private, and against our two other ways.

PyTorch's ring sends the gradients of keys and values n times, one hop more than a ring needs, and, unless it is told
otherwise, in float32.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

from benchmarks.table import between_barriers, paired, ratio, show, three
from book.trials import wire_audit
from lib import run
from lib.context_parallel.attention import gather_attention, ulysses_attention
from lib.context_parallel.ring import ring_attention
from lib.mesh import Group

ROWS, HEADS, TOKENS, WIDTH = 1, 8, 1024, 64  # tokens of a rank


@contextmanager
def _options(balanced: bool) -> Iterator[None]:
    before = theirs._cp_options.convert_to_f32, theirs._cp_options.enable_load_balance
    theirs._cp_options.convert_to_f32, theirs._cp_options.enable_load_balance = False, balanced
    theirs.set_rotate_method("alltoall")
    try:
        yield
    finally:
        theirs._cp_options.convert_to_f32, theirs._cp_options.enable_load_balance = before


def torch_ring(q: Tensor, k: Tensor, v: Tensor, group: Group, order: str, gradient: Tensor) -> tuple[Tensor, ...]:
    """y of this rank's tokens and the gradients of q, k and v, [B, H, t, E], by PyTorch's private ring."""
    aten, pg = torch.ops.aten, group.pg or dist.group.WORLD
    with _options(order == "zigzag"):
        there, back = (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        )
        y, lse = theirs._templated_ring_attention(pg, 2, there, q, k, v, is_causal=True, dropout_p=0.0)[:2]
        saved = {"query": q, "key": k, "value": v, "out": y, "logsumexp": lse}
        more = {"grad_out": gradient, "grad_out_name": "grad_out", "is_causal": True, "dropout_p": 0.0}
        gradients = theirs._templated_ring_attention_backward(pg, 2, back, **saved, **more)
    return y, *gradients[:3]


def our_way(attention: Callable, q: Tensor, k: Tensor, v: Tensor, group: Group, order: str, gradient: Tensor):
    """The same by one of ours."""
    mine = [x.detach().requires_grad_() for x in (q, k, v)]
    y = attention(*mine, group, order)
    y.backward(gradient)
    return y.detach(), *(x.grad for x in mine)


SIDES = {
    "ring": partial(our_way, ring_attention),
    "PyTorch's ring": torch_ring,
    "gather": partial(our_way, gather_attention),
    "Ulysses": partial(our_way, ulysses_attention),
}


def _made(name: str, world: Group) -> Callable[[], object]:
    torch.manual_seed(world.rank)
    q, k, v, gradient = (torch.randn(ROWS, HEADS, TOKENS, WIDTH) for _ in range(4))
    return partial(SIDES[name], q, k, v, world, "contiguous" if name == "Ulysses" else "zigzag", gradient)


def _measure(world: Group, rounds: int) -> dict[str, list[float]]:
    sides = {name: partial(between_barriers, world, _made(name, world)) for name in SIDES}
    paired(sides, 3)
    return paired(sides, rounds)


def main(rounds: int = 20) -> None:
    rows = [("ranks", "ours", "ms", "PyTorch's ring / ours, time", "MB sent", "by PyTorch's ring")]
    for n in (2, 4):
        times = run(_measure, n, rounds, timeout_s=600)[0]
        for name in SIDES:
            if name == "PyTorch's ring":
                continue
            sizes = ("Linux only",) * 2
            if wire_audit.available():
                sent = (
                    statistics.mean(wire_audit.sent_in_a_step(partial(_made, side), n))
                    for side in (name, "PyTorch's ring")
                )
                sizes = tuple(f"{each / 1e6:.2f}" for each in sent)
            ms = f"{1e3 * statistics.median(times[name]):.0f}"
            rows.append((f"{n}", name, ms, three(ratio(times[name], times["PyTorch's ring"])), *sizes))
    title = f"Attention over ranks, forward and backward, {TOKENS} tokens a rank, zig-zag ({rounds} pairs)"
    show(title, rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
