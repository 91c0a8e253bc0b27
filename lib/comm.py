"""Communication: every message of the library goes through this file.

The problem: `torch.distributed` overwrites its arguments, has different argument names for each collective, counts
nothing, and on gloo hides mistakes: an int32 added to a float32 is silent garbage, and its reduce-scatter is an
all-reduce that sends twice the necessary bytes.
The idea: a few functions that return new tensors, take any dim, count bytes, and compare the calls of all ranks before
a byte moves (`lib.runtime.call_table`). On a group of one rank they move nothing. Gradients do not flow through them.
They send the values of any dense tensor, also of a view such as `x.conj()`, and refuse others, such as a sparse one.

Shapes: `S` is the tensor on this rank, n the size of the group.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor

from lib.runtime.calls import label  # noqa: F401 a caller finds it here
from lib.runtime.emulated_link import link  # noqa: F401 this too
from lib.runtime.gloo import broadcasts, chain, fold_into, is_native
from lib.runtime.group import Group, check_group, check_rank
from lib.runtime.pending import Pending, collective, collective_of_rows, message
from lib.runtime.rows import RowTable
from lib.runtime.shapes import (
    as_bytes,
    check_dim,
    copy_over,
    front,
    join,
    ordered,
    out_like,
    readable,
    reduce_op_of,
    spec,  # noqa: F401 a caller finds it here
    split,
    unordered,
    why_not_plain,  # noqa: F401 this too
    writable,
)

TOGETHER_BYTES = 16 * 2**20  # per message of `broadcast_coalesced`

# Stored now, because `record_torch_calls` replaces them by recorded versions for direct calls of torch.distributed.
_all_reduce, _broadcast, _barrier, _reduce = dist.all_reduce, dist.broadcast, dist.barrier, dist.reduce
_all_to_all, _isend, _irecv = dist.all_to_all_single, dist.isend, dist.irecv
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed both
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ---- collectives ----------------------------------------------------------------------------------------------------


def all_reduce(x: Tensor, group: Group, op: str = "sum", out: Tensor | None = None) -> Tensor:
    """Reduce over the ranks; each gets the full result: x[S] → [S]. Sends 2(n−1)/n · S bytes.

    Args:
        op: `sum`, `mean`, `max` or `min`; the last two return NaN if any rank has NaN, and send 2-byte floats as 4.
        out: tensor that receives the result; `x` itself to work in place.

    Raises:
        ValueError: unknown op, or an `out` of a different shape, dtype or layout.

    Example:
        import torch

        from lib import comm

        assert comm.all_reduce(torch.tensor([float(world.rank)]), world, op="mean") == 0.5
    """
    return all_reduce_start(x, group, op, out).wait()


def all_reduce_start(x: Tensor, group: Group, op: str = "sum", out: Tensor | None = None) -> Pending:
    """Start an `all_reduce` in the background; do not use `x` or `out` before `wait()`."""
    given, in_place = readable(x), out is x
    reduce_op, _ = reduce_op_of(op, given)
    out = out_like(given, given.shape, out)
    body = readable(out)
    if not in_place:
        copy_over(body, given)
    sent = ordered(body, op) if op in ("max", "min") and body.is_floating_point() else body

    def finish() -> Tensor:
        if sent is not body:
            body.copy_(unordered(sent))
        elif op == "mean":
            body.div_(group.size)
        return out

    times = sent.itemsize // body.itemsize
    return collective(f"all_reduce {op}", body, group, finish, _all_reduce, sent, reduce_op, times=times)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, op: str = "sum", out: Tensor | None = None) -> Tensor:
    """Reduce over the ranks; each gets its slice along `dim`: x[S] → [S/n]. Sends (n−1)/n · S bytes.

    The reduce-scatter of gloo is an all-reduce that discards most of its result. Here each rank sends every other rank
    only the slice that this rank keeps, and adds up the slices that it received.

    Args:
        out: tensor that receives the result along dim 0; it may be this rank's own slice of `x`.

    Raises:
        ValueError: unknown op, `dim` cannot be split over the group, or an `out` of a different shape, dtype or layout.
    """
    return reduce_scatter_start(x, group, dim, op, out).wait()


def reduce_scatter_start(
    x: Tensor, group: Group, dim: int = 0, op: str = "sum", out: Tensor | None = None
) -> Pending:
    """Start a `reduce_scatter` in the background; `wait()` computes the sum, and `x` must not change before."""
    check_group(group)
    x = readable(x)
    (reduce_op, add), n = reduce_op_of(op, x), group.size
    parts = split(x, group, dim, "reduce_scatter")  # [n, S/n…]
    body = front(parts, parts.shape[1:], dim, out)
    what = f"reduce_scatter {op}, dim={dim}"

    def finish() -> Tensor:
        if op == "mean":
            body.div_(n)
        return join(body, dim) if out is None else out

    if is_native(group, op):
        return collective(what, x, group, finish, _reduce_scatter, body, parts, reduce_op)
    got = torch.empty_like(parts) if n > 1 else parts

    def folded() -> Tensor:
        fold_into(body, got, add)
        return finish()

    return collective(what, x, group, folded, _all_to_all, got, parts)


def all_gather(x: Tensor, group: Group, dim: int = 0, out: Tensor | None = None) -> Tensor:
    """Concatenate the slices of all ranks along `dim`: x[S] → [n·S], equal on all ranks. Sends (n−1) · S bytes.

    Args:
        out: tensor that receives the result along dim 0; `x` may be this rank's slice of it.

    Raises:
        ValueError: no such dim, or an `out` of a different shape, dtype or layout.
    """
    return all_gather_start(x, group, dim, out).wait()


def all_gather_start(x: Tensor, group: Group, dim: int = 0, out: Tensor | None = None) -> Pending:
    """Start an `all_gather` in the background; do not use `x` or `out` before `wait()`."""
    check_group(group)
    x = readable(x)
    part = x.movedim(check_dim(x, dim), 0).contiguous()
    whole = front(part, (group.size * part.shape[0], *part.shape[1:]), dim, out)
    if group.size == 1:
        copy_over(whole, part)
    what = f"all_gather dim={dim}"

    def finish() -> Tensor:
        return join(whole, dim) if out is None else out

    moved = as_bytes(whole), as_bytes(part)
    if is_native(group):
        return collective(what, x, group, finish, _all_gather, *moved, times=group.size)
    return collective(what, x, group, finish, broadcasts, *moved, group, times=group.size)


def all_gather_object(mine: object, group: Group) -> list:
    """The objects of all ranks, in rank order; pickled, so for small ones."""
    check_group(group)
    every = [mine] * group.size
    if group.size > 1:
        dist.all_gather_object(every, mine, group.pg)
    return every


def all_to_all(x: Tensor, group: Group, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """Send slice j along `split_dim` to rank j, and concatenate the received slices along `concat_dim`.

    Sends (n−1)/n · S bytes.

    Raises:
        ValueError: `split_dim` cannot be split over the group.
    """
    check_group(group)
    x = readable(x)
    check_dim(x, concat_dim)
    parts = split(x, group, split_dim, "all_to_all")
    got = torch.empty_like(parts) if group.size > 1 else parts
    what = f"all_to_all split_dim={split_dim}, concat_dim={concat_dim}"

    def finish() -> Tensor:
        return torch.cat([part.movedim(0, split_dim) for part in got], dim=concat_dim).contiguous()

    return collective(what, x, group, finish, _all_to_all, as_bytes(got), as_bytes(parts)).wait()


def all_to_all_rows(x: Tensor, rows: Sequence[Sequence[int]], group: Group) -> Tensor:
    """Send unequal numbers of rows to the ranks: x[Σⱼ rows[me][j], …] → [Σᵢ rows[i][me], …], in the order of ranks.

    Sends the bytes of its rows for other ranks, and receives those of their rows for it.

    Args:
        x: the rows for rank 0 along dim 0, then those for rank 1, and so on; they come in the same order.
        rows: `rows[i][j]` rows go from group rank i to group rank j: the whole table, equal on all ranks.

    Raises:
        ValueError: `rows` is no such table, or x has not as many rows as its line for this rank.
    """
    return all_to_all_rows_start(x, rows, group).wait()


def all_to_all_rows_start(x: Tensor, rows: Sequence[Sequence[int]], group: Group) -> Pending:
    """Start an `all_to_all_rows` in the background; do not change `x` before `wait()`."""
    check_group(group)
    x = readable(x).contiguous()
    check_dim(x, 0)
    table = RowTable.checked(rows, group.size, group.rank, len(x))
    out = out_like(x, (sum(table.coming), *x.shape[1:]), None)
    return collective_of_rows("all_to_all_rows", out, x, table, group, _all_to_all)


def broadcast(x: Tensor, group: Group, src: int = 0) -> Tensor:
    """Return the tensor of group rank `src` on all ranks: x[S] → [S]. On other ranks `x` gives shape and dtype."""
    check_rank(src, group, "src")
    x = readable(x)
    what, out = f"broadcast src={src}", x.clone(memory_format=torch.contiguous_format)
    return collective(what, x, group, lambda: out, _broadcast, as_bytes(out), group.ranks[src]).wait()


@torch.no_grad()
def broadcast_coalesced(tensors: Iterable[Tensor], group: Group) -> None:
    """Overwrite tensors by the tensors of rank 0 of the group, except tensors on the meta device.

    Small tensors of one dtype and device share a message, because each message costs a latency.

    Raises:
        ValueError: no message can carry a tensor, or it is read-only.
    """
    here = [writable(x) for x in tensors]
    # Of an expanded tensor, the elements that it repeats.
    once = [x[(..., *(slice(None if step else 1) for step in x.stride()))] for x in here if not x.is_meta]
    ends = accumulate(x.nbytes for x in once)
    messages = [(x.dtype, x.device, end // TOGETHER_BYTES) for x, end in zip(once, ends, strict=True)]
    for _, neighbours in groupby(zip(messages, once, strict=True), key=itemgetter(0)):
        some = [x for _, x in neighbours]
        flat = broadcast(torch.cat([x.reshape(-1) for x in some]), group)
        for x, values in zip(some, flat.split([x.numel() for x in some]), strict=True):
            x.copy_(values.view_as(x))


agree = broadcast_coalesced  # its old name, for notebooks that have it


def reduce(x: Tensor, group: Group, dst: int = 0, op: str = "sum") -> Tensor | None:
    """Reduce over the ranks; group rank `dst` gets the result, other ranks None: x[S] → [S]. Other ranks send S bytes.

    The reduce of gloo is a reduce-scatter and a gather, which moves S bytes more. Here the ranks form a chain that ends
    at `dst`.
    """
    x = readable(x)
    reduce_op, add = reduce_op_of(op, x)
    check_rank(dst, group, "dst")
    out = x.clone(memory_format=torch.contiguous_format)

    def finish() -> Tensor | None:
        if group.rank != dst:
            return None
        return out.div_(group.size) if op == "mean" else out

    what = f"reduce {op}, dst={dst}"
    if is_native(group, op):
        return collective(what, x, group, finish, _reduce, out, group.ranks[dst], reduce_op).wait()
    return collective(what, x, group, finish, chain, out, group, dst, add).wait()


def barrier(group: Group) -> None:
    """Return when every rank of the group called it."""
    collective("barrier", None, group, lambda: None, _barrier).wait()


# ---- point-to-point ------------------------------------------------------------------------------------------------


def send(x: Tensor, group: Group, dst: int) -> Pending:
    """Start to send `x` to group rank `dst`; do not change `x` until that rank receives it."""
    check_rank(dst, group, "dst", other=True)
    return message("send", readable(x).contiguous(), group, dst, _isend)


def recv(like: Tensor, group: Group, src: int, out: Tensor | None = None) -> Pending:
    """Start to receive from group rank `src` a tensor of the shape and dtype of `like`; `wait()` returns it.

    Args:
        out: tensor that receives it, or `like` itself; do not use it before `wait()`.

    Raises:
        ValueError: an `out` of a different shape, dtype or layout.
    """
    check_rank(src, group, "src", other=True)
    like = readable(like)
    return message("recv", readable(out_like(like, like.shape, out)), group, src, _irecv)


def exchange(sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], group: Group) -> Pending:
    """Start all sends `{dst: x}` and receives `{src: like}` in one call; `wait()` returns `{src: tensor}`.

    With gloo the order on the peers does not matter. NCCL may need `dist.batch_isend_irecv` where two ranks exchange.
    """
    for name, peers in (("dst", sends), ("src", recvs)):
        for peer in peers:
            check_rank(peer, group, name, other=True)
    sends = {dst: readable(x) for dst, x in sends.items()}
    recvs = {src: readable(like) for src, like in recvs.items()}
    coming = {src: recv(like, group, src) for src, like in recvs.items()}
    going = [send(x, group, dst) for dst, x in sends.items()]

    def finish() -> dict[int, Tensor]:
        for pending in going:
            pending.wait()
        return {src: pending.wait() for src, pending in coming.items()}

    return Pending(finish)


def shift(x: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
    """Send `x` to the next rank of the group, and return the tensor of the rank before: x[S] → [S]. Sends S bytes.

    The ranks form a ring: the next of the last is rank 0.
    """
    return shift_start(x, group, out).wait()


def shift_start(x: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """Start a `shift` in the background; do not change `x`, or use `out`, before `wait()`.

    It is one call, an all-to-all in which all goes to one rank: with NCCL, a receive that waits for a send behind it on
    the same stream would never end.
    """
    check_group(group)
    x, n = readable(x).contiguous(), group.size
    out = out_like(x, x.shape, out)
    if n == 1:
        copy_over(out, x)
    coming, going = as_bytes(out).view(-1), as_bytes(x).view(-1)
    before, after = ([len(going) * (rank == (group.rank + i) % n) for rank in range(n)] for i in (-1, 1))
    return collective("shift", x, group, lambda: out, _all_to_all, coming, going, before, after)
