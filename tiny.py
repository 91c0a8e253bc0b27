"""A GPT trained by many processes: the techniques of *Parallel by Hand* in one file of plain PyTorch.

    python tiny.py
    torchrun --nproc-per-node 8 tiny.py --dp 2 --pp 2 --tp 2 --zero 1 --sequence-parallel

It trains on its own text, or on a file. Losses are the same in every layout, to rounding: each rank draws the full
weights and the full batch, and keeps its part. A group of one rank is the serial case, with the same code.

Shapes are suffixes of names: B sequences of T tokens, D model width, F width in the MLP, H heads of width E, V
entries of the vocabulary. A capital is the full size, a lower-case letter the part on this rank: x_BTf is a shard.
Bytes are sent by each rank, for a tensor of S bytes and a group of n ranks.
"""

import argparse
import math
import os
import time
import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


# ---- mesh ----------------------------------------------------------------------------------------------------------
# A rank is a point in a box of dp x pp x tp ranks. A group is a line through it: all ranks that differ from it only
# along some axes. tp communicates in every layer, so it is innermost: its ranks are neighbours, on one machine.
# rank = (i_dp · pp + i_pp) · tp + i_tp
class Group(NamedTuple):
    """The ranks that one collective spans, and the place of this rank among them."""

    ranks: list[int]
    rank: int
    size: int
    pg: dist.ProcessGroup


def group_along(box: Tensor, *axes: int) -> Group | None:
    """The group of this rank along these axes. Each rank makes all groups, in one order, as torch requires."""
    rest, mine = [axis for axis in range(3) if axis not in axes], None
    for ranks in box.permute(*rest, *axes).reshape(-1, math.prod(box.shape[axis] for axis in axes)).tolist():
        pg = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = Group(ranks, ranks.index(dist.get_rank()), len(ranks), pg)
    return mine


class Mesh:
    def __init__(self, dp: int, pp: int, tp: int, sequence_parallel: bool = False) -> None:
        box = torch.arange(dist.get_world_size()).view(dp, pp, tp)
        self.dp, self.tp = group_along(box, 0), group_along(box, 2)
        self.pp, self.pp_back = group_along(box, 1), group_along(box, 1)  # one for each direction of messages
        # Outside of the matrices each rank of sp has T/n tokens: sp is tp, or a group of one with all T.
        self.sequence_parallel, self.sp = sequence_parallel, self.tp if sequence_parallel else group_along(box)
        # Each gradient is a sum over dp. The gradient of a norm is also a sum over tokens, and the gradient of the
        # embedding over its two uses: the first stage and, because it is also the head, the last.
        self.dp_sp = group_along(box, 0, 2) if sequence_parallel else self.dp
        self.dp_ends = group_along(box[:, sorted({0, pp - 1})], 0, 1)  # None on a stage between the two


# ---- collectives ---------------------------------------------------------------------------------------------------
# An all-reduce is a reduce-scatter, (n−1)/n · S bytes, and an all-gather, the same; together 2(n−1)/n · S.
def identity(x: Tensor, group: Group) -> Tensor:
    return x


def all_reduce(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)  # torch works in place, and autograd may keep x
    dist.all_reduce(total, group=group.pg)
    return total


def all_gather(x_BtD: Tensor, group: Group) -> Tensor:
    parts = list(x_BtD.new_empty(group.size, *x_BtD.shape))
    dist.all_gather(parts, x_BtD.contiguous(), group=group.pg)
    return torch.cat(parts, dim=1)


def reduce_scatter(x_BTD: Tensor, group: Group) -> Tensor:
    """Each rank sends every rank the tokens that it keeps. The reduce-scatter of gloo would send twice the bytes."""
    parts = torch.stack(x_BTD.chunk(group.size, dim=1))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group.pg)
    return received.sum(0)


# ---- model ---------------------------------------------------------------------------------------------------------
# A GPT-2. Read `enter` and `leave` as the identity, and it is the model of one process. A stage of the pipeline has
# some of its blocks, under the names of the full model, and each rank of tp has a shard of every matrix.
# Parameters: 12 · D² + 13 · D for each block, and V · D for the embedding. The same weight is the head.
class Block(nn.Module):
    def __init__(self, D: int, heads: int, mesh: Mesh) -> None:
        super().__init__()
        self.mesh, self.d_head, n = mesh, D // heads, mesh.tp.size
        self.norm1, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D // n), nn.Linear(D // n, D)
        self.norm2, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D // n), nn.Linear(4 * D // n, D)

    def forward(self, x_BtD: Tensor) -> Tensor:
        q_k_v = self.qkv(enter(self.norm1(x_BtD), self.mesh)).chunk(3, dim=-1)
        q_BhTE, k_BhTE, v_BhTE = (part.unflatten(-1, (-1, self.d_head)).transpose(1, 2) for part in q_k_v)
        y_BTd = scaled_dot_product_attention(q_BhTE, k_BhTE, v_BhTE, is_causal=True).transpose(1, 2).flatten(2)
        x_BtD = x_BtD + leave(y_BTd @ self.out.weight.T, self.mesh) + self.out.bias
        y_BTf = gelu(self.up(enter(self.norm2(x_BtD), self.mesh)))
        return x_BtD + leave(y_BTf @ self.down.weight.T, self.mesh) + self.down.bias


class GPT(nn.Module):
    """One stage. The first takes tokens[B, T], the others x[B, t, D]; the last gives logits[B, T, v]."""

    def __init__(self, mesh: Mesh, T: int, D: int, layers: int, heads: int, V: int = 256, seed: int = 0) -> None:
        super().__init__()
        pp, self.mesh, self.D = mesh.pp, mesh, D
        self.is_first, self.is_last = pp.rank == 0, pp.rank == pp.size - 1
        self.token = nn.Embedding(V // mesh.tp.size, D) if self.is_first or self.is_last else None
        self.position = nn.Embedding(T, D) if self.is_first else None
        mine = torch.arange(layers).tensor_split(pp.size)[pp.rank].tolist()
        self.blocks = nn.ModuleDict({str(i): Block(D, heads, mesh) for i in mine})
        self.norm = nn.LayerNorm(D) if self.is_last else None
        self.draw(seed, 0.02 / math.sqrt(2 * layers))

    @torch.no_grad()
    def draw(self, seed: int, std_of_residual: float) -> None:
        """A full matrix depends only on the seed and its name; this rank keeps its shard. A new norm is 1 and 0."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                generator = torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(name.encode()))
                shape = [size * self.mesh.tp.size if i == cut_dim(name) else size for i, size in enumerate(p.shape)]
                std = std_of_residual if cut_dim(name) == 1 else 0.02
                p.copy_(cut(name, torch.empty(shape).normal_(std=std, generator=generator), self.mesh.tp))
            elif name.endswith("bias"):
                p.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            here_BT, is_mine_BT = find(x, len(self.token.weight), self.mesh.tp)
            positions_t = torch.arange(x.shape[1], device=x.device).chunk(self.mesh.sp.size)[self.mesh.sp.rank]
            x = leave(self.token(here_BT) * is_mine_BT[..., None], self.mesh) + self.position(positions_t)
        for block in self.blocks.values():
            x = block(x)
        return enter(self.norm(x), self.mesh) @ self.token.weight.T if self.is_last else x


# ---- tensor parallelism --------------------------------------------------------------------------------------------
# Each rank has some columns of the first matrix of a pair and the same rows of the second. Their product is a partial
# sum: forward needs an all-reduce after each pair, backward one before it. With sequence parallelism the two halves
# of the all-reduce are in two places, a reduce-scatter after a pair and an all-gather before the next. Between them a
# rank computes T/n tokens. Bytes of a block: four all-reduces, 8(n−1)/n · B·T·D elements, in both forms.

CUT = {"qkv.weight": 0, "qkv.bias": 0, "up.weight": 0, "up.bias": 0, "out.weight": 1, "down.weight": 1}
CUT["token.weight"] = 0  # the dim of each parameter that is sharded; norms, positions and two biases are not


def cut_dim(name: str) -> int | None:
    return CUT.get(".".join(name.split(".")[-2:]))


def cut(name: str, whole: Tensor, tp: Group) -> Tensor:
    """The shard of this rank. Queries, keys and values are three matrices; cutting each gives a rank full heads."""
    if (dim := cut_dim(name)) is None:
        return whole
    matrices = whole.chunk(3 if "qkv" in name else 1, dim)
    return torch.cat([matrix.chunk(tp.size, dim)[tp.rank] for matrix in matrices], dim)


class Pair(torch.autograd.Function):
    """A collective in forward, and its transpose, also a collective, in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, there, back, group: Group) -> Tensor:
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return ctx.back(gradient, ctx.group), None, None, None


def enter(x_BtD: Tensor, mesh: Mesh) -> Tensor:
    """→ x[B, T, D]. Each rank multiplies it by a different shard, so its gradient is a sum over the ranks."""
    there, back = (all_gather, reduce_scatter) if mesh.sequence_parallel else (identity, all_reduce)
    return Pair.apply(x_BtD, there, back, mesh.tp)


def leave(y_BTD: Tensor, mesh: Mesh) -> Tensor:
    """→ y[B, t, D], the sum of the partial sums y[B, T, D]: `enter` with forward and backward exchanged."""
    there, back = (reduce_scatter, all_gather) if mesh.sequence_parallel else (all_reduce, identity)
    return Pair.apply(y_BTD, there, back, mesh.tp)


def find(tokens_BT: Tensor, v: int, tp: Group) -> tuple[Tensor, Tensor]:
    """The place of each token among the v entries of this rank, and whether it has one; if not, the place is 0."""
    here_BT = tokens_BT - tp.rank * v
    is_mine_BT = (here_BT >= 0) & (here_BT < v)
    return here_BT * is_mine_BT, is_mine_BT


def cross_entropy(z_BTv: Tensor, targets_BT: Tensor, tp: Group) -> Tensor:
    """Σ (log Σᵥ exp zᵥ − z_target) over all targets except -100, by reducing three numbers of each token."""
    largest_BT = z_BTv.detach().amax(-1)
    dist.all_reduce(largest_BT, dist.ReduceOp.MAX, group=tp.pg)
    z_BTv = z_BTv - largest_BT[..., None]  # exp cannot overflow
    here_BT, is_mine_BT = find(targets_BT, z_BTv.shape[-1], tp)
    of_target_BT = z_BTv.gather(-1, here_BT[..., None])[..., 0] * is_mine_BT
    sums_BT, of_target_BT = Pair.apply(torch.stack([z_BTv.exp().sum(-1), of_target_BT]), all_reduce, identity, tp)
    return ((sums_BT.log() - of_target_BT) * (targets_BT != -100)).sum()


# ---- data parallelism ----------------------------------------------------------------------------------------------
# Each rank of dp processes some sequences, and gradients are summed over the ranks. They are side by side in buckets:
# a bucket is sent when backward has filled it, and travels while backward fills the next.
# Bytes of a step: an all-reduce of the gradients, 2(n−1)/n · Ψ, with Ψ the bytes of the parameters of this rank.
class Bucket:
    """Parameters side by side, and gradients, summed over the ranks of `group`; `copies` groups have equal sums."""

    def __init__(self, params: list[nn.Parameter], group: Group, copies: int) -> None:
        self.params, self.group, self.copies = params, group, copies
        sizes = [p.numel() for p in params]
        sizes.append(-sum(sizes) % group.size)  # padding, so that ZeRO can cut the bucket into n equal shards
        self.values, self.gradients = params[0].new_zeros(2, sum(sizes))
        self.views = self.gradients.split(sizes)
        for p, value in zip(params, self.values.split(sizes), strict=False):
            p.data = value.view_as(p).copy_(p.data)
            p.register_post_accumulate_grad_hook(self.count)
        self.whole, self.shard = nn.Parameter(self.values), nn.Parameter(self.values.chunk(group.size)[group.rank])

    def begin(self, num_microbatches: int) -> None:
        self.gradients.zero_()
        for p, view in zip(self.params, self.views, strict=False):
            p.grad = view.view_as(p)  # backward adds to it in place
        self.whole.grad, self.shard.grad = self.gradients, self.gradients.chunk(self.group.size)[self.group.rank]
        self.missing = num_microbatches * len(self.params)

    def count(self, p: nn.Parameter) -> None:
        """Backward calls this after each gradient; after the last gradient of the step the bucket is sent."""
        self.missing -= 1
        if self.missing == 0:
            self.start()

    def start(self) -> None:
        self.work = dist.all_reduce(self.gradients, group=self.group.pg, async_op=True)

    def finish(self) -> None:
        self.work.wait()

    def publish(self) -> None:
        """Nothing to send: each rank stepped all parameters."""


# ---- ZeRO-1 --------------------------------------------------------------------------------------------------------
# AdamW keeps two moments of each parameter, 8 of 16 bytes, and n ranks would keep n copies. With ZeRO a rank receives
# the sum of its shard of the gradients, steps its shard of the parameters, and sends it: the two halves of the
# all-reduce, one before the step and one after it. Bytes of a step: 2(n−1)/n · Ψ, the same.
class ShardedBucket(Bucket):
    def start(self) -> None:
        self.received = torch.empty_like(self.gradients)
        self.work = dist.all_to_all_single(self.received, self.gradients, group=self.group.pg, async_op=True)

    def finish(self) -> None:
        self.work.wait()
        torch.sum(self.received.view(self.group.size, -1), 0, out=self.shard.grad)

    def publish(self) -> None:
        dist.all_gather(list(self.values.chunk(self.group.size)), self.shard.detach(), group=self.group.pg)


# ---- pipeline ------------------------------------------------------------------------------------------------------
# Each stage has some blocks, and the batch passes through in m microbatches. 1F1B: after a warmup a stage alternates
# between forward and backward, so it keeps activations of at most pp microbatches. It is idle (pp−1)/(m+pp−1) of the
# time. Bytes of a step: B·t·D elements to each neighbour.
def one_f_one_b(pp: Group, m: int) -> list[tuple[str, int]]:
    """The actions of this stage in order: ("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), …"""
    warmup = min(pp.size - pp.rank - 1, m)
    pairs = [action for k in range(warmup, m) for action in (("F", k), ("B", k - warmup))]
    return [("F", k) for k in range(warmup)] + pairs + [("B", k) for k in range(m - warmup, m)]


def run_pipeline(model: GPT, inputs_BT: Tensor, targets_BT: Tensor, count: Tensor, m: int) -> Tensor:
    """Forward and backward of m microbatches. → Their loss on the last stage, 0 on the others."""
    mesh, pp, inputs, targets = model.mesh, model.mesh.pp, inputs_BT.tensor_split(m), targets_BT.tensor_split(m)
    # NCCL executes the messages of a group in order: two neighbours that both send first would wait for each other.
    # With a group for each direction, all ranks follow the order of the microbatches.
    lanes, like = {"F": (mesh.pp.pg, 1), "B": (mesh.pp_back.pg, -1)}, next(model.parameters())
    arriving, sent, alive, loss = {}, [], {}, torch.zeros((), device=inputs_BT.device)

    def expect(op: str, k: int) -> None:
        """Start to receive the input of an action, if it comes from a stage."""
        pg, step = lanes[op]
        if 0 <= pp.rank - step < pp.size:
            x_btD = like.new_empty(len(inputs[k]), inputs_BT.shape[1] // mesh.sp.size, model.D)
            arriving[op, k] = dist.irecv(x_btD, pp.ranks[pp.rank - step], group=pg), x_btD

    def send(op: str, x_btD: Tensor) -> None:
        pg, step = lanes[op]
        if 0 <= pp.rank + step < pp.size:  # the tensor must exist until it was sent
            sent.append((dist.isend(x_btD, pp.ranks[pp.rank + step], group=pg), x_btD))

    actions = one_f_one_b(mesh.pp, m)
    expect(*actions[0])
    for (op, k), following in zip(actions, [*actions[1:], None], strict=True):
        if following:
            expect(*following)  # arrives while this action computes
        work, came = arriving.pop((op, k), (None, None))
        if work:
            work.wait()  # here, where the tensor is used
        if op == "F":
            x = inputs[k] if came is None else came.requires_grad_()
            y = model(x)
            send("F", y.detach())
            if model.is_last:
                y = cross_entropy(y, targets[k], mesh.tp) / count
                loss += y.detach()
            alive[k] = x, y
        else:
            x, y = alive.pop(k)
            y.backward(came)  # None on the last stage, where backward begins at the loss
            send("B", x.grad)
    for work, _ in sent:
        work.wait()
    return loss


# ---- step ----------------------------------------------------------------------------------------------------------
# All of it is one sum, over tokens, microbatches and ranks: the loss of each token is divided by the number of tokens
# of the global batch, before backward. A mean of means would be wrong, because ranks may count different numbers.
class Trainer:
    def __init__(self, model: GPT, zero: int = 0, num_microbatches: int = 1, bucket_size: int = 2**20) -> None:
        mesh, self.model, self.m = model.mesh, model, num_microbatches
        groups = {"tied": (mesh.dp_ends, 1), "cut": (mesh.dp, 1), "full": (mesh.dp_sp, mesh.tp.size // mesh.sp.size)}
        lists = {kind: [[]] for kind in groups}
        for name, p in reversed(list(model.named_parameters())):  # about the order of backward
            kind = "tied" if name == "token.weight" else "full" if cut_dim(name) is None else "cut"
            if sum(q.numel() for q in lists[kind][-1]) >= bucket_size:
                lists[kind].append([])
            lists[kind][-1].append(p)
        make = ShardedBucket if zero else Bucket
        self.buckets = [make(params, *groups[kind]) for kind in lists for params in lists[kind] if params]
        stepped = [bucket.shard if zero else bucket.whole for bucket in self.buckets]  # flat: AdamW is elementwise
        self.optimizer = torch.optim.AdamW(stepped, lr=1e-3)

    def step(self, inputs_BT: Tensor, targets_BT: Tensor, max_norm: float = 1.0) -> Tensor:
        """A step on the global batch, from which this rank takes its sequences. → The mean loss before it."""
        count, dp, tp = (targets_BT != -100).sum().clamp(min=1), self.model.mesh.dp, self.model.mesh.tp
        for bucket in self.buckets:
            bucket.begin(self.m)
        mine = (x_BT.chunk(dp.size)[dp.rank] for x_BT in (inputs_BT, targets_BT))
        loss = run_pipeline(self.model, *mine, count, self.m)
        for bucket in self.buckets:
            bucket.finish()
        # The norm of the full model counts each element once: a rank squares its shards, and copies share the square.
        square = sum(bucket.shard.grad.square().sum() / bucket.copies for bucket in self.buckets)
        dist.all_reduce(square)
        for bucket in self.buckets:
            bucket.gradients *= (max_norm / (square.sqrt() + 1e-6)).clamp(max=1)
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.publish()
        dist.all_reduce(loss)
        return loss / tp.size  # each rank of tp has the same


# ---- main ----------------------------------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT on the bytes of a text.")
    options = {"dp": 1, "pp": 1, "tp": 1, "zero": 0, "microbatches": 4, "batch": 16, "steps": 100, "seed": 0}
    for name, default in (options | {"context": 64, "width": 64, "layers": 4, "heads": 4}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--file", default=__file__)
    args = parser.parse_args()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update(alone | os.environ)  # torchrun sets them
    if args.dp * args.pp * args.tp != int(os.environ["WORLD_SIZE"]):
        parser.error(f"dp · pp · tp must be {os.environ['WORLD_SIZE']}, the number of ranks that torchrun started")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)  # connect now: at the first message two ranks might wait
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    mesh = Mesh(args.dp, args.pp, args.tp, args.sequence_parallel)
    model = GPT(mesh, args.context, args.width, args.layers, args.heads, seed=args.seed).to(device)
    trainer = Trainer(model, args.zero, args.microbatches)
    text_N = torch.from_file(args.file, size=os.path.getsize(args.file), dtype=torch.uint8)
    for step in range(args.steps):
        start_s = time.perf_counter()
        generator = torch.Generator().manual_seed(args.seed * 2**32 + step)  # the same batch on each rank
        starts_B1 = torch.randint(len(text_N) - args.context, (args.batch, 1), generator=generator)
        rows_BT = text_N[starts_B1 + torch.arange(args.context + 1)].long().to(device)
        loss = trainer.step(rows_BT[:, :-1], rows_BT[:, 1:]).item()
        if dist.get_rank() == 0:
            speed = args.batch * args.context / (time.perf_counter() - start_s)
            print(f"step {step:3d}   loss {loss:.4f}   {speed:,.0f} tokens/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
