"""A random walk: any module, under any technique or composition, must do what one process does.

A case is drawn from its seed alone. `make test` walks for twenty seconds from a new seed, and prints it; `make fuzz`
walks for as long as one likes (FUZZ_S=3600), and FUZZ_SEED=n FUZZ_S=0 tries the one case of that seed.
"""

from __future__ import annotations

import copy
import math
import os
import random
import shutil
import sys
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn

from book.trials.unbucketed import NaiveDDP, NaiveZeRO1
from lib import comm
from lib.checkpoint.storage import Save, restore
from lib.data_parallel.ddp import BucketedDDP
from lib.data_parallel.fsdp import FSDP
from lib.data_parallel.zero import ZeRO1, ZeRO2
from lib.launch import run
from lib.layout import Layout
from lib.mesh import Mesh, MeshShape
from lib.model import GPT, GPTConfig, mean_loss
from lib.parallel import parallelize
from lib.pipeline.execute import execute
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v
from lib.pipeline.stage import Stage
from tests.lib.zoo import D, Stack, draw_frozen, draw_stack, freeze, opened

cloudpickle.register_pickle_by_value(sys.modules[__name__])
WALK_S = float(os.environ.get("FUZZ_S", 10))
SEED = int(os.environ.get("FUZZ_SEED") or random.SystemRandom().randrange(10**9))
EQUAL, EQUAL_IN_BFLOAT16 = 1e-9, 0.1  # of a weight's update over three steps
STEPS = 3


def decay_groups(named, lr=0.02):
    """As people write them: pairs of name and parameter, in two groups."""
    named = list(named)
    groups = [[x for x in named if x[0].endswith("bias") == bias] for bias in (False, True)]
    chosen = [{"params": some, "weight_decay": 0.1 * (i == 0)} for i, some in enumerate(groups) if some]
    return torch.optim.AdamW(chosen, lr=lr, eps=1e-2)


OPTIMIZERS = {  # with an eps that makes no step of the rounding of a gradient that is zero
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.02, eps=1e-2),
    "groups": decay_groups,
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-2),
}
WRAPPERS = {
    "naive": NaiveDDP,
    "ddp": BucketedDDP,
    "naive zero1": NaiveZeRO1,
    "zero1": ZeRO1,
    "zero2": ZeRO2,
    "fsdp": FSDP,
}


def relative(ours, twin, start):
    """The largest distance of a weight from the twin's, in sizes of what the steps have changed."""
    worst = 0.0
    for name, right in twin.items():
        if right.is_floating_point() and right.numel():
            moved = (right - start[name]).norm()
            worst = max(worst, ((ours[name] - right).norm() / (moved + 1e-3)).item())
    return worst


def tensors(model):
    return {name: x.clone() for name, x in model.state_dict().items() if isinstance(x, torch.Tensor)}


# ---- a module and a wrapper -----------------------------------------------------------------------------------------


def draw_wrapped(rng):
    wrapper = rng.choice(list(WRAPPERS))
    model = draw_stack(rng)
    half = wrapper in ("zero1", "zero2", "fsdp") and rng.random() < 0.15
    how = {"op": rng.choice(["mean", "sum"])}
    if wrapper in ("ddp", "zero1", "zero2"):
        how["bucket_bytes"] = rng.choice([1, 100, 1000, 4 * 2**20])
    if wrapper == "fsdp":
        how |= {"reshard_after_forward": rng.random() < 0.7, "prefetch": rng.random() < 0.7}
    if half:
        how["dtype"] = torch.bfloat16
        model |= {"layers": [name for name in model["layers"] if name not in ("odd", "vector", "words")] + ["mlp"]}
    return {
        "wrapper": wrapper,
        "model": model,
        "how": how,
        "optimizer": "sgd" if half else rng.choice(list(OPTIMIZERS)),
        "microbatches": rng.choice([1, 1, 2, 3]),
        "each": wrapper in ("zero2", "fsdp") and rng.random() < 0.5,  # microbatch reduced by itself
        "skips": rng.random() < 0.3 and not half,  # ranks skip a layer, each its own
        "clips": rng.random() < 0.4 and not half,
        "extras": [
            name for name in ("look", "twice", "give up", "save", "load", "write", "dropped") if rng.random() < 0.25
        ],
        "frozen": [] if half else draw_frozen(rng, Stack(**model)),  # or what is left moves by noise alone
    }


def wrapped(world, case, folder):
    """How far from the twin the losses, norms and weights are after some steps."""
    dtype = case["how"].get("dtype")
    wide = torch.float32 if dtype else torch.float64
    torch.manual_seed(0)
    twin = freeze(Stack(**case["model"]), case["frozen"]).to(wide)
    torch.manual_seed(world.rank)  # who starts elsewhere gets the weights of rank 0
    mine = freeze(Stack(**case["model"]), case["frozen"]).to(wide)
    start = tensors(twin)
    make, K, op = OPTIMIZERS[case["optimizer"]], case["microbatches"], case["how"]["op"]
    theirs = make([(name, p) for name, p in twin.named_parameters() if p.requires_grad])
    wraps = WRAPPERS[case["wrapper"]]
    whole = case["wrapper"] in ("naive", "ddp")
    model = wraps(mine, world, **case["how"]) if whole else wraps(mine, world, make, **case["how"])
    ours = make([(name, p) for name, p in mine.named_parameters() if p.requires_grad]) if whole else model
    terms = K * (world.size if op == "sum" else 1)

    def loss(module, step, rank, k, share):
        generator = torch.Generator().manual_seed(1000 * step + 100 * rank + k)
        x = torch.randn(2, 3, D, generator=generator, dtype=wide).requires_grad_(case["skips"])  # so all go back
        skip = (rank + step) % len(case["model"]["layers"]) if case["skips"] else None
        x = x.to(dtype) if dtype and module is model else x
        return (
            opened(module(x, skip=skip)).float().square().mean() / share
            if dtype
            else (opened(module(x, skip=skip)).square().mean() / share)
        )

    def backward(step, k):
        last = k == K - 1
        with nullcontext() if last or case["each"] else model.no_sync():
            one = loss(model, step, world.rank, k, terms)
            if one.requires_grad:
                one.backward()
        return one.detach().double()

    worst = 0.0
    for step in range(STEPS):
        theirs.zero_grad()
        ours.zero_grad()
        wanted = 0.0
        for rank in range(world.size):
            for k in range(K):
                one = loss(twin, step, rank, k, K * world.size)
                if one.requires_grad:
                    one.backward()
                wanted += one.item()
        if "give up" in case["extras"] and step == 1:
            backward(step, 0)
            model.zero_grad()
        if "look" in case["extras"]:
            with torch.no_grad():
                loss(model, step, world.rank, 0, 1)
        if "dropped" in case["extras"]:
            loss(model, step, world.rank, 0, 1)  # a forward that has no backward
        total = sum(backward(step, k) for k in range(K))
        model.finish()
        if "twice" in case["extras"]:
            model.finish()
        got = comm.all_reduce(total, world, op).item()
        worst = max(worst, abs(got - wanted) / (abs(wanted) + 1e-3))
        if case["clips"]:
            moving = [p for p in twin.parameters() if p.grad is not None]
            norm = nn.utils.clip_grad_norm_(moving, 0.1)
            worst = max(worst, abs(model.clip_gradients(0.1) - norm).item() / (norm.item() + 1e-3))
        for p in twin.parameters():  # what no rank uses counts as zero, with decay and all
            p.grad = torch.zeros_like(p) if p.requires_grad and p.grad is None else p.grad
        ours.step()
        theirs.step()
        if "save" in case["extras"] and step == 1 and case["wrapper"] in ("zero1", "zero2", "fsdp"):
            model.load_sharded_state_dict(model.sharded_state_dict())
        if "load" in case["extras"] and case["wrapper"] in ("zero1", "zero2", "fsdp"):
            state = [model.full_state_dict()]
            torch.distributed.broadcast_object_list(state, 0) if world.size > 1 else None
            model.load_full_state_dict(state[0])
        if (
            "write" in case["extras"] and step == 1 and case["wrapper"] != "fsdp"
        ):  # as weights are clamped, or averaged
            with torch.no_grad():
                for p in (*mine.parameters(), *twin.parameters()):
                    p.mul_(0.5) if p.is_floating_point() else None
    plain = case["wrapper"] in ("naive", "ddp", "naive zero1")
    state = mine.state_dict() if plain else model.full_state_dict()
    if not state:
        return worst
    if dtype:  # what is frozen is rounded; what has moved by little only, is more noise than step
        names = [name for name, p in twin.named_parameters() if p.requires_grad]
        apart, moved = (
            sum((x[n] - y[n]).square().sum() for n in names).sqrt()
            for x, y in ((state, twin.state_dict()), (start, twin.state_dict()))
        )
        return max(worst, (apart / (moved + 1e-2)).item())
    return max(worst, relative(state, tensors(twin), start))


# ---- stages of a pipeline -------------------------------------------------------------------------------------------

SCHEDULES = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-h2": zb_h2, "zb-v": zb_v}


def make_schedule(name, ranks, microbatches):
    if name == "interleaved":
        return interleaved(ranks, microbatches * ranks, 2)
    return naive(ranks, microbatches) if name == "naive" else SCHEDULES[name](ranks, microbatches)


def draw_piped(rng):
    ranks = rng.choice([1, 2, 2, 3])
    name = rng.choice([*SCHEDULES, "interleaved"])
    microbatches = rng.randint(1, 3)
    if name == "naive":
        microbatches = 1
    schedule = make_schedule(name, ranks, microbatches)
    stages = [draw_stack(rng, 1, 3) | {"form": "tensor", "nested": False} for _ in range(schedule.num_stages)]
    if name.startswith("zb"):  # where a checkpoint must know of the queue, or is refused
        stages = [stage | {"checkpointed": ()} for stage in stages]
    return {
        "schedule": (name, ranks, microbatches),
        "stages": stages,
        "recompute": rng.random() < 0.2 and name not in ("zb-h1", "zb-h2", "zb-v"),
        "frozen": [draw_frozen(rng, Stack(**stage)) for stage in stages],
        "rows": schedule.num_microbatches + rng.randint(0, 3),
    }


def piped(world, case, folder):
    """How far gradients are from those of all stages in one process."""
    schedule = make_schedule(*case["schedule"])
    torch.manual_seed(0)
    stacks = [
        freeze(Stack(**one), frozen).double() for one, frozen in zip(case["stages"], case["frozen"], strict=True)
    ]
    twin = copy.deepcopy(nn.Sequential(*stacks))
    x = torch.randn(case["rows"], 3, D, dtype=torch.float64)
    wanted = sum((twin(part).square().sum() for part in x.tensor_split(schedule.num_microbatches)), torch.zeros([]))
    if wanted.requires_grad:
        wanted.backward()
    mine = {
        s: Stage(stacks[s], None, case["recompute"]) for s, rank in enumerate(schedule.rank_of) if rank == world.rank
    }
    result = execute(schedule, mine, world, x, x, lambda y, _: y.square().sum())
    worst = abs(result.loss - wanted).item() / abs(wanted).item()
    for s, stage in mine.items():
        pairs = zip(stage.module.parameters(), twin[s].parameters(), strict=True)
        for p, right in pairs:
            if p.requires_grad and p.numel():
                have, want = (torch.zeros_like(q) if q.grad is None else q.grad for q in (p, right))
                worst = max(worst, ((have - want).norm() / (want.norm() + 1e-6)).item())
            assert p.requires_grad or p.grad is None
    return worst


# ---- a GPT on all axes ----------------------------------------------------------------------------------------------


def draw_layout(rng, ranks=None):
    """Any layout, or any of so many ranks."""
    sizes = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1)]
    dp, pp, tp = rng.choice([size for size in sizes if ranks in (None, size[0] * size[1] * size[2])])
    name = "1f1b" if pp == 1 else rng.choice([*SCHEDULES, "interleaved"])
    microbatches = 1 if name == "naive" else rng.randint(1, 3) * (pp if name == "interleaved" else 1)
    return Layout(
        *(dp, pp, tp),
        order=rng.choice(["dp,pp,tp", "pp,dp,tp"]),
        schedule=name,
        stages_per_rank={"zb-v": 2, "interleaved": 2}.get(name, 1),
        microbatches=microbatches,
        sequence_parallel=tp > 1 and rng.random() < 0.5,
        zero=rng.choice([0, 1, 2, 3] if pp == tp == 1 else [0, 1, 2]),
        recompute="none" if name.startswith("zb") else rng.choice(["none", "none", "selective", "full"]),
    )


def draw_composed(rng):
    layout = draw_layout(rng)
    other = draw_layout(rng, layout.num_ranks)
    return {
        "layout": layout,
        "continues": other if rng.random() < 0.4 else None,  # from a checkpoint, under a different layout
        "config": {
            "num_layers": max(rng.randint(1, 3), layout.num_stages - 1, other.num_stages - 1),
            "num_kv_heads": rng.choice([None, 1, 2]),
            "tied": rng.random() < 0.6,
            "llama": rng.random() < 0.5,
            "d_mlp": rng.choice([None, 12]),
        },
        "frozen": rng.choice(["", "", "", "embed", "blocks.0", "head", "norm"]),
        "bucket_bytes": rng.choice([1, 1000, 4 * 2**20]),
        "optimizer": rng.choice(list(OPTIMIZERS)),
        "rows": math.lcm(layout.dp, other.dp) * max(layout.microbatches, other.microbatches) * rng.randint(1, 2),
        "max_norm": rng.choice([0.1, 1e9]),
        "ignored": rng.choice([0.0, 0.3, 0.9]),
        "loads": rng.random() < 0.3,
    }


def composed(world, case, folder):
    """How far losses and weights are from one process."""
    config = GPTConfig(vocab_size=12, context=4, d_model=8, num_heads=4, **case["config"])
    torch.manual_seed(0)
    twin = GPT(config).double()
    for name, p in twin.named_parameters():
        p.requires_grad_(case["frozen"] not in name or not case["frozen"])
    start = {name: x.clone() for name, x in twin.state_dict().items()}
    make = OPTIMIZERS[case["optimizer"]]
    theirs = make([(name, p) for name, p in twin.named_parameters() if p.requires_grad])

    def on(layout):
        mesh = Mesh(MeshShape(**layout.sizes), world)
        return parallelize(copy.deepcopy(twin), mesh, layout, make, bucket_bytes=case["bucket_bytes"])

    model, worst = on(case["layout"]), 0.0
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(12, (case["rows"], 5), generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < case["ignored"]] = -100
        targets[0, 0] = 3  # one counts
        theirs.zero_grad()
        wanted = mean_loss(twin(inputs), targets)
        wanted.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), case["max_norm"])
        theirs.step()
        worst = max(worst, abs(model.step(inputs, targets, case["max_norm"]) - wanted).item())
        if case["loads"] and step == 1:
            model.load_full_state_dict(twin.state_dict())
        if case["continues"] and step == 1:
            assert Save(model, folder).finish() == ""
            model = on(case["continues"])
            restore(model, folder)
        with torch.no_grad():
            worst = max(worst, abs(model.evaluate(inputs, targets) - mean_loss(twin(inputs), targets)).item())
    state = model.full_state_dict()
    return max(worst, relative(state, twin.state_dict(), start)) if state else worst


KINDS = {"wrapped": (draw_wrapped, wrapped), "piped": (draw_piped, piped), "composed": (draw_composed, composed)}


def draw(seed):
    """(kind, ranks, case), from the seed alone."""
    rng = random.Random(seed)
    kind = rng.choice(["wrapped", "wrapped", "wrapped", "piped", "composed"])
    torch.manual_seed(0)
    case = KINDS[kind][0](rng)
    if kind == "wrapped":
        return kind, rng.choice([1, 2, 2, 3]), case
    return kind, case["layout"].num_ranks if kind == "composed" else case["schedule"][1], case


@pytest.mark.thorough("`make fuzz` does it for longer")
@pytest.mark.slow("walks for a while, or as long as FUZZ_S says")
@pytest.mark.filterwarnings("ignore")
def test_whatever_is_put_together_is_the_twin(say, tmp_path):
    end_s, seed, tried = time.monotonic() + WALK_S, SEED, Counter()
    say(f"fuzz: seed {SEED}")
    while not tried or time.monotonic() < end_s:
        kind, ranks, case = draw(seed)
        again = f"FUZZ_SEED={seed} FUZZ_S=0 make fuzz: {kind}, {ranks} ranks, {case}"
        try:
            worst = max(run(KINDS[kind][1], ranks, case, str(tmp_path / str(seed))))
        except Exception as error:
            raise AssertionError(again) from error
        limit = EQUAL_IN_BFLOAT16 if "bfloat16" in str(case) else EQUAL
        assert worst < limit, f"{worst:.1e} from one process; {again}"
        shutil.rmtree(tmp_path / str(seed), ignore_errors=True)
        tried[kind] += 1
        seed += 1
    say(f"fuzz: {sum(tried.values())} cases: " + ", ".join(f"{n} {kind}" for kind, n in tried.items()))
