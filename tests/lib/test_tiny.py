"""tiny.py is short, stands alone, and is the same training as one process in every layout; a mistake in it is seen."""

import ast
import sys
import types
from itertools import product
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from lib import comm, run
from lib.lab.certificate import Apart, _twin_steps, certify
from lib.layout import Layout
from lib.model import GPTConfig
from tests.lib.sharding import serial

cloudpickle.register_pickle_by_value(sys.modules[__name__])
TEXT = (Path(__file__).parents[2] / "tiny.py").read_text(encoding="utf-8")
VOCABULARY, CONTEXT, WIDTH, HEADS, ROWS, STEPS, MAX_NORM = 16, 8, 16, 8, 16, 2, 0.1
SERIAL = {"token.": "embed.token.", "position.": "embed.position.", "norm.": "head.norm."}
SERIAL |= {
    f"{layer}.": f"{of}.{layer}."
    for of, layers in {"attention": "qkv out", "mlp": "up down"}.items()
    for layer in layers.split()
}


class Here(NamedTuple):
    dp: int
    pp: int
    tp: int
    slices: bool = False
    zero: int = 0

    @property
    def microbatches(self):
        """Not a divisor of the rows of a rank: microbatches differ by one row."""
        return min(3 if self.pp < 4 else 5, ROWS // self.dp)

    @property
    def num_layers(self):
        """Not a multiple of the stages, up to 4: stages differ by one block."""
        return {1: 3, 2: 3, 4: 5, 8: 8}[self.pp]

    @property
    def of_lib(self):
        more = {"microbatches": self.microbatches, "sequence_parallel": self.slices, "zero": self.zero}
        return Layout(self.dp, self.pp, self.tp, **more)


def layouts(ranks):
    degrees = [d for d in product((1, 2, 4, 8), repeat=3) if d[0] * d[1] * d[2] == ranks]
    every = (Here(*d, slices, zero) for d, slices, zero in product(degrees, (False, True), (0, 1)))
    return [here for here in every if here.tp > 1 or not here.slices]


def batches():
    """Few tokens count in some rows, and none in one: local means are not the mean."""
    torch.manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (ROWS, CONTEXT + 1))
        targets = tokens[:, 1:].clone()
        targets[: ROWS // 4, 2:], targets[6] = -100, -100
        yield tokens[:, :-1], targets


def module(text):
    made = types.ModuleType("tiny")
    exec(compile(text, "tiny.py", "exec"), made.__dict__)
    return made


def serial_name(name):
    block, rest = (
        ("", name)
        if not name.startswith("blocks.")
        else (name[: name.index(".", 7) + 1], name[name.index(".", 7) + 1 :])
    )
    return block + next(
        (rest.replace(short, long, 1) for short, long in SERIAL.items() if rest.startswith(short)), rest
    )


def the_twin(num_layers):
    sizes = {"vocab_size": VOCABULARY, "context": CONTEXT, "d_model": WIDTH, "num_heads": HEADS}
    return serial(GPTConfig(**sizes, num_layers=num_layers))


def certified(world, text, which):
    """For each layout, how far tiny.py is from one process after steps on the same batches."""
    tiny, found, twins = module(text), [], {}
    torch.set_default_dtype(torch.float64)
    for here in which:
        if here.num_layers not in twins:
            twin = the_twin(here.num_layers)
            start = {name: p.detach().clone() for name, p in twin.named_parameters()}
            twins[here.num_layers] = start, list(_twin_steps(twin, list(batches()), MAX_NORM))
        found.append(_apart(tiny, here, *twins[here.num_layers]))
    return found


def _apart(tiny, here, start, steps):
    mesh = tiny.Mesh(here.dp, here.pp, here.tp, here.slices)
    model = tiny.GPT(tiny.Config(VOCABULARY, CONTEXT, WIDTH, here.num_layers, HEADS), mesh)
    names = {p: name for name, p in model.named_parameters()}
    with torch.no_grad():
        for p, name in names.items():
            p.copy_(tiny.cut(name, start[serial_name(name)], mesh.tp))
    trainer = tiny.Trainer(model, here.zero, here.microbatches, bucket_size=500)
    trainer.optimizer.param_groups[0]["lr"] = 1e-2

    def farthest(wanted, flat_of, sharded):
        """The largest distance of a bucket from the same shards of the twin, with each tensor in units of its norm."""
        distances = [torch.zeros(())]
        for bucket in trainer.buckets:
            whole = [wanted[serial_name(names[p])] for p in bucket.params]
            right = torch.cat(
                [tiny.cut(names[p], x, mesh.tp).flatten() for p, x in zip(bucket.params, whole, strict=True)]
            )
            norms = torch.cat(
                [torch.full((p.numel(),), float(x.norm())) for p, x in zip(bucket.params, whole, strict=True)]
            )
            padding = (0, bucket.values.numel() - right.numel())
            right, norms = (torch.nn.functional.pad(x, padding, value=v) for x, v in ((right, 0.0), (norms, 1.0)))
            if sharded:
                right, norms = (x.chunk(bucket.group.size)[bucket.group.rank] for x in (right, norms))
            distances.append(((flat_of(bucket) - right) / norms).norm())
        return torch.stack(distances).max()

    gradients, worst = [], torch.zeros(3)
    of_step = lambda bucket: bucket.shard.grad if here.zero else bucket.gradients  # noqa: E731
    trainer.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(farthest(steps[len(gradients)].gradients, of_step, here.zero))
    )
    for number, ((inputs, targets), wanted) in enumerate(zip(batches(), steps, strict=True)):
        loss = trainer.step(inputs, targets, MAX_NORM)
        weights = farthest(wanted.weights, lambda bucket: bucket.values, False)
        apart = torch.stack([(loss - wanted.loss).abs() / wanted.loss, gradients[number], weights])
        worst = torch.maximum(worst, apart.nan_to_num(nan=torch.inf, posinf=torch.inf))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Apart(*worst.tolist())
