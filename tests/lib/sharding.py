"""What tests of several axes share: all forms of data parallelism, a model that breaks careless sharding, a twin."""

import copy
from functools import partial

import torch
from torch import nn

from book.trials import wire_audit
from book.trials.unbucketed import NaiveDDP, NaiveZeRO1
from lib import comm, data
from lib.cost.token_orders import TOKEN_ORDERS
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.ddp import BucketedDDP
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.placeholders import GradientPlaceholder, ShardedParameter
from lib.data_parallel.zero import ZeRO1, ZeRO2
from lib.mesh import Mesh, MeshShape
from lib.model import GPT, GPTConfig, mean_loss
from lib.parallel import facts_of
from lib.tensor_parallel.gpt import full_state_dict, tensor_parallel
from lib.tensor_parallel.vocab import vocab_parallel_loss
from lib.verify import gradients, largest_difference, replicas_equal, weights

# Of layouts that are drawn pairwise: the options of every axis, and the stages of a rank that a schedule needs.
CHOICES = {
    "attention": ("gather", "ring", "ulysses"),
    "token_order": TOKEN_ORDERS,
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"),
    "recompute": ("none", "selective", "full"),
}
STAGES = {"interleaved": 2, "zb-v": 2}

CONFIG = GPTConfig(vocab_size=32, context=6, d_model=12, num_layers=3, num_heads=2)


def serial(config, seed=0):
    """A GPT in float64, with biases and norms that are not all 0 and 1."""
    torch.manual_seed(seed)
    model = GPT(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


class InParts:
    """A tensor-parallel copy of a model with the sums of its gradients, put together as `lib.parallel` does."""

    def __init__(self, serial, world, sequence_parallel=False, recompute="none"):
        mesh = Mesh(MeshShape(tp=world.size), world)
        self.world, self.group = world, mesh.group("tp")
        self.model = tensor_parallel(copy.deepcopy(serial), self.group, sequence_parallel, recompute)
        self.sums = Gradients(facts_of(self.model, mesh))
        self.parameters, self.named_parameters = self.model.parameters, self.model.named_parameters

    def __call__(self, x):
        return self.model(x)

    def loss(self, logits, targets):
        return vocab_parallel_loss(logits, targets, self.group)

    def finish(self):
        self.sums.finish()

    def clip_gradients(self, max_norm):
        return self.sums.clip(self.world, max_norm)

    def full_state_dict(self):
        return full_state_dict(self.model, self.group)


class Block(nn.Module):
    def __init__(self, width=7):
        super().__init__()
        self.up, self.down = nn.Linear(width, 5), nn.Linear(5, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it (LoRA)."""

    def __init__(self, width=7):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.small = nn.Sequential(nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False))

    def forward(self, x):
        return torch.tanh(self.base(x)) + self.small(x)


class Toy(nn.Module):
    """Tied or not, scalar, empty, transposed, odd sizes, buffers, one layer that only some ranks use.

    Blocks by letter: b trained, f frozen, l both. "e" in front freezes the embedding, so that the first block's input
    needs no gradient.
    """

    def __init__(self, blocks="blfb", tied=True):
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0))
        self.slanted = nn.Parameter(torch.randn(7, 5).t())
        self.sometimes = nn.Linear(7, 7)
        kinds = {"b": Block, "f": lambda: Block().requires_grad_(False), "l": Adapted}
        self.blocks = nn.ModuleList(kinds[letter]() for letter in blocks.strip("e"))
        self.back = nn.Linear(5, 7, bias=False)
        self.head = nn.Linear(7, 13)
        if tied:
            self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_("e" not in blocks)
        self.register_buffer("seen", torch.randint(100, (3,)))
        self.register_buffer("mean", torch.randn(2))
        self.double()

    def forward(self, tokens, sometimes=False):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if sometimes:
            x = x + self.sometimes(x)
        x = self.back(torch.tanh(x @ self.slanted.t()))
        return self.head(self.scale * x) + self.empty.sum()


def toy(seed, **more):
    torch.manual_seed(seed)
    return Toy(**more)


def gpt(seed, config=CONFIG):
    torch.manual_seed(seed)
    return GPT(config)


def batch(step, rows):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(13, (rows, 3), generator=generator), torch.randint(13, (rows, 3), generator=generator)


def rows(step, count):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(32, (count, 6), generator=generator), torch.randint(32, (count, 6), generator=generator)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def momentum(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)


def trained(module):
    return [p for p in module.parameters() if p.requires_grad]


def stepping(kind, module, group, optimizer, op="mean", **how):
    """A form of DDP that steps as the sharded forms do."""
    model = kind(module, group, op, **how)
    model.optimizer = optimizer([(name, p) for name, p in module.named_parameters() if p.requires_grad])
    model.step = lambda: (model.optimizer.step(), model.zero_grad())
    return model


ENGINES = {  # each called with a module, a group, an optimizer, op, and options of its own
    "NaiveDDP": partial(stepping, NaiveDDP),
    "BucketedDDP": partial(stepping, BucketedDDP),
    "NaiveZeRO1": NaiveZeRO1,
    "ZeRO1": ZeRO1,
    "ZeRO2": ZeRO2,
    "FSDP": FSDP,
}
SHARDED = [ZeRO1, ZeRO2, FSDP]


def in_buckets(bucket_bytes):
    """All forms, with buckets of this size where they have buckets."""
    return {
        name: partial(make, bucket_bytes=bucket_bytes) if name in ("BucketedDDP", "ZeRO1", "ZeRO2") else make
        for name, make in ENGINES.items()
    }


def gradients_apart(model, twin):
    """The largest distance of the gradients from the twin's, in norms of the whole."""
    if hasattr(model, "flats"):
        return shards_apart(model, twin)
    if hasattr(model, "owners"):
        return owners_apart(model, twin)
    return largest_difference(gradients(model.module), gradients(twin))


def nothing_gathered(model):
    """Of FSDP: no rank holds a full parameter."""
    return all(
        flat.whole.untyped_storage().nbytes() == 0 and isinstance(p, ShardedParameter)
        for flat in model.flats
        for p in flat.params
    )


def shards_apart(model, twin):
    """The largest distance of a gradient piece from its part of the twin's, in norms of the whole; NaN if the padding
    is not zero, or if a number belongs to nobody."""
    want, worst = {name: p.grad for name, p in twin.named_parameters()}, 0.0
    for flat in model.buckets:
        have = flat.shard.grad.detach().clone()
        for name, (there, here) in flat.where.items():
            g = want[name].reshape(-1)
            worst = max(worst, ((have[here] - g[there]).norm() / g.norm().clamp(min=1e-300)).item())
            have[here] = 0
        if have.any():
            return float("nan")
    return worst


def owners_apart(model, twin):
    """The same for whole parameters; the others must hold nothing."""
    want, worst = dict(twin.named_parameters()), 0.0
    owner = dict(zip(map(id, model.trained), model.owners, strict=True))
    for name, p in model.module.named_parameters():
        if not p.requires_grad or owner[id(p)] != model.group.rank:
            assert p.grad is None or isinstance(p.grad, GradientPlaceholder), name
            continue
        worst = max(worst, ((p.grad - want[name].grad).norm() / want[name].grad.norm().clamp(min=1e-300)).item())
    return worst


def beside_twin(model, twin, optimizer, op="mean", microbatches=1, each=False, unused=True, steps=10, clip=None):
    """Steps of the wrapped toy on this rank's rows beside the twin's on all rows: what differs most, by kind.

    Rank r has rows rK to rK + K - 1. The layer `sometimes` is used by rank 0's last microbatch, or by all.
    """
    world, K = model.group, microbatches
    n, worst = world.size, {"loss": 0.0, "gradient": 0.0, "norm": 0.0}
    twins = optimizer(trained(twin))

    def uses(row):
        return row == K - 1 or not unused

    for step in range(steps):
        inputs, targets = batch(step, rows=K * n)
        twins.zero_grad()
        wanted = torch.zeros((), dtype=torch.float64)
        for some in ([i for i in range(K * n) if uses(i) == use] for use in (True, False)):
            if some:
                loss = mean_loss(twin(inputs[some], uses(some[0])), targets[some]) * len(some) / (K * n)
                loss.backward()
                wanted += loss.detach()
        ours = torch.zeros((), dtype=torch.float64)
        for k in range(K):
            row = world.rank * K + k
            loss = mean_loss(model(inputs[row : row + 1], uses(row)), targets[row : row + 1]) / (K * n)
            ours += loss.detach()
            if each or k == K - 1:
                (loss if op == "sum" else loss * n).backward()
            else:
                with model.no_sync():
                    (loss if op == "sum" else loss * n).backward()
        model.finish()
        apart = gradients_apart(model, twin)
        worst["gradient"] = max(worst["gradient"], apart) if apart == apart else apart
        worst["loss"] = max(worst["loss"], abs(comm.all_reduce(ours, world) - wanted).item())
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(trained(twin), clip)
            assert norm > clip
            worst["norm"] = max(worst["norm"], abs(model.clip_gradients(clip) / norm - 1).item())
        twins.step()
        model.step()
    return worst


def end_apart(model, twin):
    """Distance of the weights from the twin's on rank 0, 0 elsewhere, and whether replicas are equal."""
    state = model.full_state_dict() if hasattr(model, "flats") else model.module.state_dict()
    apart = largest_difference(state, twin.state_dict()) if state else 0.0
    held = model.module if not hasattr(model, "units") else nn.ParameterList([all_numbers(model)])
    return apart, replicas_equal(held, model.group)


def all_numbers(model):
    """All numbers of an FSDP model, collected."""
    return nn.Parameter(torch.cat([comm.all_gather(flat.master, model.group) for flat in model.flats]))


def beside_bfloat16(world, wrap):
    """Steps in bfloat16 beside a bfloat16 copy of a float32 model, with gradients rounded and added as ranks do it.

    Returns the distance of the masters, how far they have moved, and the dtypes of the full state.
    """
    model, exact = wrap(gpt(world.rank), world, adamw, dtype=torch.bfloat16), gpt(0)
    optimizer, working = adamw(exact.parameters()), copy.deepcopy(exact).to(torch.bfloat16)
    for step in range(5):
        inputs, targets = rows(step, 2 * world.size)
        total = [torch.zeros_like(p) for p in working.parameters()]
        for x, y in zip(inputs.split(2), targets.split(2), strict=True):
            own = torch.autograd.grad(mean_loss(working(x), y), list(working.parameters()))
            total = [a + b / world.size for a, b in zip(total, own, strict=True)]
        for p, g in zip(exact.parameters(), total, strict=True):
            p.grad = g.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(working.parameters(), exact.parameters(), strict=True):
                p.copy_(master)
        mine = slice(2 * world.rank, 2 * world.rank + 2)
        mean_loss(model(inputs[mine]), targets[mine]).backward()
        model.finish()
        assert {flat.shard.grad.dtype for flat in model.buckets} == {torch.bfloat16}
        model.step()
        assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
        assert all(torch.equal(flat.shard, flat.master.bfloat16()) for flat in model.buckets)
    state = model.full_state_dict()
    apart = largest_difference(state, exact.state_dict()) if state else 0.0
    return (
        apart,
        largest_difference(weights(exact), weights(gpt(0))),
        {x.dtype for x in state.values()} or {torch.float32},
    )


def some_steps(model, count, start=0):
    world = model.group
    for step in range(start, start + count):
        inputs, targets = batch(step, 12)
        mine = data.rows_of_rank(12, world.rank, world.size)
        mean_loss(model(inputs[mine], True), targets[mine]).backward()
        model.finish()
        model.step()


def save_and_go_on(world, wrap, dtype=None):
    """Steps 0 to 3, saved after the second; a fresh model, with other weights and buffers, does the last two again."""
    model = wrap(toy(world.rank).to(torch.float32) if dtype else toy(world.rank), world, adamw, dtype=dtype)
    some_steps(model, 2)
    model.module.mean.fill_(world.rank + 5.0)  # a buffer that each rank has changed for itself
    saved, full = model.sharded_state_dict(), model.full_state_dict()
    some_steps(model, 2, start=2)
    again = wrap(toy(50).to(torch.float32) if dtype else toy(50), world, adamw, dtype=dtype)
    some_steps(again, 1)
    again.load_sharded_state_dict(saved)
    some_steps(again, 2, start=2)
    again_from_the_same = wrap(toy(51).to(torch.float32) if dtype else toy(51), world, adamw, dtype=dtype)
    again_from_the_same.load_sharded_state_dict(saved)  # training has not changed what was saved
    some_steps(again_from_the_same, 2, start=2)
    for one in (again, again_from_the_same):
        for a, b in zip(model.flats, one.flats, strict=True):
            assert torch.equal(a.master, b.master) and torch.equal(a.shard, b.shard)
        assert torch.equal(one.module.mean, model.module.mean)
    return full, saved


WIRE_BYTES = 4 * 512 * 512 * 4  # four layers in float32


def sent_as_promised(make, want):
    """The kernel counts what 4 ranks send in a step of make(layers, group): `want` bytes each, and gloo's headers."""

    def a_step(group):
        torch.manual_seed(0)
        model = make(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))), group)

        def step():
            model(torch.ones(512)).sum().backward()
            model.finish()
            model.step()

        return step

    sent = wire_audit.sent_in_a_step(a_step, 4)
    assert sent == 4 * sent[:1] and 0 < sent[0] - want < 0.001 * want and (sent[0] - want) % 48 == 0, (sent, want)


def said(fn, kind=RuntimeError):
    """The message of the error that `fn` must raise."""
    try:
        fn()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")
