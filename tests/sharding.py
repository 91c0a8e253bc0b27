"""What the tests of flat parameters, ZeRO and FSDP share: a model that breaks careless sharding, and a serial twin."""

import torch
from torch import nn

from lib import comm
from lib.model import GPT, GPTConfig, mean_loss
from lib.verify import largest_difference, replicas_equal

CONFIG = GPTConfig(vocab_size=32, context=6, d_model=12, num_layers=3, num_heads=2)


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
            assert p.grad is None, name
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
        apart = shards_apart(model, twin) if hasattr(model, "buckets") else owners_apart(model, twin)
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
    if not hasattr(model, "buckets"):
        state = model.module.state_dict()
    else:
        state = model.full_state_dict()
    apart = largest_difference(state, twin.state_dict()) if state else 0.0
    held = model.module if not hasattr(model, "units") else nn.ParameterList([comm_whole(model)])
    return apart, replicas_equal(held, model.group)


def comm_whole(model):
    """All numbers of an FSDP model, collected."""
    return nn.Parameter(torch.cat([comm.all_gather(flat.exact, model.group) for flat in model._flats()]))


def said(fn, kind=RuntimeError):
    """The message of the error that `fn` must raise."""
    try:
        fn()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")
