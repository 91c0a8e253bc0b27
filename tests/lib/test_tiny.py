"""tiny.py is short, stands alone, and is the same training as one process in every layout; a mistake in it is seen."""

import ast
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
import types
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import pad

from lib import run, trace
from lib.lab.certificate import Apart, certify
from lib.lab.twin import ADAMW, twin_steps
from lib.launch import HangError, RankError
from lib.layout import Layout
from lib.mesh import Mesh, MeshShape
from lib.model import GPT, GPTConfig
from lib.parallel import parallelize
from tests.lib.sharding import serial
from tests.on_time import on_time

cloudpickle.register_pickle_by_value(sys.modules[__name__])
PATH = Path(__file__).parents[2] / "tiny.py"
TEXT = PATH.read_text(encoding="utf-8")
VOCABULARY, CONTEXT, WIDTH, HEADS, ROWS, STEPS, MAX_NORM = 16, 8, 16, 8, 16, 2, 0.1
IN_LIB = {"qkv": "attention.qkv", "out": "attention.out", "up": "mlp.up", "down": "mlp.down"}
IN_LIB |= {"token": "embed.token", "position": "embed.position", "norm": "head.norm"}


class Here(NamedTuple):
    """A layout."""

    dp: int
    pp: int
    tp: int
    slices: bool = False
    zero: int = 0

    @property
    def microbatches(self):
        """Not a divisor of the rows of a rank, where it can be: microbatches differ by one row."""
        return min(3 if self.pp < 4 else 5, ROWS // self.dp)

    @property
    def num_layers(self):
        """Not a multiple of the stages, up to 4: stages differ by one block."""
        return {1: 3, 2: 3, 4: 5, 8: 8}[self.pp]

    @property
    def in_lib(self):
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
    exec(compile(text, str(PATH), "exec"), made.__dict__)
    return made


def in_lib(name):
    *block, layer, kind = name.split(".")
    return ".".join([*block, IN_LIB.get(layer, layer), kind])


def twin_of(num_layers):
    sizes = {"vocab_size": VOCABULARY, "context": CONTEXT, "d_model": WIDTH, "num_heads": HEADS}
    return serial(GPTConfig(**sizes, num_layers=num_layers))


def certified(world, text, which, with_lib=False):
    """For each layout, how far tiny.py is from one process after steps on the same batches; and how far lib is."""
    tiny, found, twins = module(text), [], {}
    torch.set_default_dtype(torch.float64)
    for here in which:
        if here.num_layers not in twins:
            twin = twin_of(here.num_layers)
            start = {name: p.detach().clone() for name, p in twin.named_parameters()}
            twins[here.num_layers] = start, list(twin_steps(twin, list(batches()), MAX_NORM))
        found.append(_apart(tiny, here, *twins[here.num_layers]))
        if with_lib:
            found += certify(world, [here.in_lib], twin_of(here.num_layers), list(batches()), MAX_NORM)
    return found


def _apart(tiny, here, start, steps):
    mesh = tiny.Mesh(here.dp, here.pp, here.tp, here.slices)
    model = tiny.GPT(mesh, CONTEXT, WIDTH, here.num_layers, HEADS, VOCABULARY)
    names = {p: name for name, p in model.named_parameters()}

    def shard(p, full):
        return tiny.cut(names[p], full[in_lib(names[p])], mesh.tp)

    with torch.no_grad():
        for p in names:
            p.copy_(shard(p, start))
    trainer = tiny.Trainer(model, here.zero, here.microbatches, bucket_size=500)
    trainer.optimizer.param_groups[0]["lr"] = ADAMW.keywords["lr"]

    def farthest(have, full):
        """The largest distance of a bucket from the shards of the twin, each tensor in units of the full norm."""
        distances = [torch.zeros(())]
        for bucket in trainer.buckets:
            right = torch.cat([shard(p, full).flatten() for p in bucket.params])
            norms = torch.cat([full[in_lib(names[p])].norm().expand(p.numel()) for p in bucket.params])
            padding = (0, len(bucket.values) - len(right))
            right, norms, mine = pad(right, padding), pad(norms, padding, value=1.0), have(bucket)
            if len(mine) < len(right):
                right, norms = (x.chunk(bucket.group.size)[bucket.group.rank] for x in (right, norms))
            distances.append(((mine - right) / norms).norm())
        return torch.stack(distances).max()

    gradients, worst = [], torch.zeros(3)
    summed = (lambda bucket: bucket.shard.grad) if here.zero else (lambda bucket: bucket.gradients)
    trainer.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(farthest(summed, steps[len(gradients)].gradients))
    )
    for number, ((inputs, targets), wanted) in enumerate(zip(batches(), steps, strict=True)):
        loss = trainer.step(inputs, targets, MAX_NORM)
        weights = farthest(lambda bucket: bucket.values, wanted.weights)
        apart = torch.stack([(loss - wanted.loss).abs() / wanted.loss, gradients[number], weights])
        worst = torch.maximum(worst, apart.nan_to_num(nan=torch.inf, posinf=torch.inf))
        for habit in (trainer.optimizer, trainer.model):  # of loops in one process; the next step is none the worse
            habit.zero_grad()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Apart(*worst.tolist())


# ---- what it promises -----------------------------------------------------------------------------------------------


def test_it_is_short_and_stands_alone():
    lines = TEXT.splitlines()
    assert len(lines) <= 400 and max(map(len, lines)) <= 118
    trees = [node for node in ast.walk(ast.parse(TEXT)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {
        name
        for node in trees
        for name in ([node.module] if hasattr(node, "module") else [a.name for a in node.names])
    }
    assert {name.split(".")[0] for name in imported} - {"torch"} <= sys.stdlib_module_names


def test_the_page_shows_all_of_it_in_its_order():
    page = PATH.with_name("book").joinpath("tiny.md").read_text(encoding="utf-8")
    starts, ends = re.findall(':start-at: "(.*)"', page), re.findall(":end-at: '(.*)'", page)
    sections = re.split("^(?=# ---- )", TEXT, flags=re.MULTILINE)
    assert page.count("{literalinclude} ../tiny.py") == len(sections)
    assert [start for start, section in zip(starts, sections[1:], strict=True) if not section.startswith(start)] == []
    for end, section in zip(ends, sections[:-1], strict=True):
        assert [n for n, line in enumerate(section.rstrip().splitlines()[::-1]) if end in line] == [0], end
    assert f" in {len(TEXT.splitlines())} lines" in page
    assert f"of {sum(len(layouts(ranks)) for ranks in (1, 2, 4, 8))} layouts" in page


@pytest.mark.thorough("eight ranks, and all that fewer have", keep=1)
@pytest.mark.slow("up to thirty layouts of eight processes")
@pytest.mark.parametrize(
    ("ranks", "which", "with_lib"),
    [
        (4, [Here(2, 1, 2, True, 1), Here(1, 2, 2), Here(2, 2, 1, zero=1)], False),
        *((ranks, layouts(ranks), False) for ranks in (1, 2, 4, 8)),
        (8, [Here(2, 2, 2), Here(2, 2, 2, True, 1)], True),
    ],
    ids=["4, three", "1, all", "2, all", "4, all", "8, all", "8, beside lib"],
)
def test_every_layout_is_the_same_training(ranks, which, with_lib, say):
    found, *others = run(certified, ranks, TEXT, which, with_lib, timeout_s=300)
    assert all(other == found for other in others) and len(found) == len(which) * (1 + with_lib)
    worst = [max(of_kind) for of_kind in zip(*found, strict=True)]
    say(
        "tiny.py, {} layouts of {} ranks: loss {:.1g}, gradient {:.1g}, weight {:.1g}".format(
            len(which), ranks, *worst
        )
    )
    assert max(worst) < 1e-10


# ---- mistakes -------------------------------------------------------------------------------------------------------

WHOLE, SLICES, PLAIN = Here(2, 2, 2, False, 1), Here(2, 2, 2, True, 1), Here(2, 2, 2, False, 0)
MISTAKES = {  # what is wrong: the layout that sees it, the text, and the text in its place
    "the two uses of the embedding are not added": (WHOLE, '"tied": (mesh.dp_ends, 1)', '"tied": (mesh.dp, 1)'),
    "norms are not summed over the tokens": (
        SLICES,
        "group_along(box, 0, 2) if sequence_parallel else self.dp",
        "self.dp",
    ),
    "the clip counts a norm once per rank of tp": (WHOLE, " / bucket.copies", ""),
    "each rank clips by its own norm": (WHOLE, "        dist.all_reduce(square)\n", ""),
    "the loss is a mean of means": (
        WHOLE,
        "mesh.tp) / count",
        "mesh.tp) / (targets[k] != -100).sum().clamp(min=1) / m / mesh.dp.size",
    ),
    "an ignored target counts": (WHOLE, " * (targets_BT != -100)", ""),
    "the gradient of a column layer's input stays partial": (WHOLE, "(identity, all_reduce)", "(identity, identity)"),
    "the sum after a row layer has a sum in backward": (WHOLE, "(all_reduce, identity)", "(all_reduce, all_reduce)"),
    "queries, keys and values are cut as one matrix": (WHOLE, '3 if "qkv" in name else 1', "1"),
    "each rank adds the bias": (
        WHOLE,
        "leave(y_BTd @ self.out.weight.T, self.mesh) + self.out.bias",
        "leave(y_BTd @ self.out.weight.T + self.out.bias, self.mesh)",
    ),
    "entries of other ranks are looked up": (WHOLE, " * is_mine_BT[..., None]", ""),
    "each rank adds the first positions": (SLICES, "[self.mesh.sp.rank]", "[0]"),
    "a bucket leaves after the first microbatch": (WHOLE, "num_microbatches * len(", "len("),
    "gradients of the last step stay": (WHOLE, "        self.gradients.zero_()\n", ""),
    "new parameters are not sent": (WHOLE, "        for bucket in self.buckets:\n            bucket.publish()\n", ""),
    "an all-reduce is not awaited": (
        PLAIN,
        'self.work.wait()\n\n    def publish(self) -> None:\n        """',
        'pass\n\n    def publish(self) -> None:\n        """',
    ),
    "a reduce-scatter is not awaited": (WHOLE, "self.work.wait()\n        torch", "torch"),
    "a message is not awaited": (WHOLE, "work.wait()  # here", "pass  # here"),
}


def with_mistakes(world, mistakes):
    return {name: certified(world, TEXT.replace(*edit), [here])[0] for name, (here, *edit) in mistakes.items()}


@pytest.mark.thorough("eight ranks, and a start for each that may hang")
@pytest.mark.slow("eighteen times two steps of eight processes")
def test_each_mistake_is_seen(say):
    assert [name for name, (_, text, _) in MISTAKES.items() if TEXT.count(text) != 1] == []
    waits = {name: edit for name, edit in MISTAKES.items() if name.endswith("awaited")}
    found = run(
        with_mistakes, 8, {name: edit for name, edit in MISTAKES.items() if name not in waits}, timeout_s=300
    )[0]
    for name, edit in waits.items():
        try:
            found |= run(with_mistakes, 8, {name: edit}, timeout_s=100)[0]
        except (HangError, RankError) as error:
            found[name] = (type(error).__name__,)
    for name, apart in found.items():
        say(f"tiny.py, {name}: {apart[0] if len(apart) == 1 else format(max(apart), '.1g')}")
    assert [name for name, apart in found.items() if len(apart) == 3 and not max(apart) > 1e-6] == []


# ---- messages that NCCL could hang ----------------------------------------------------------------------------------


class InOrder:
    """A process group on one rank, as NCCL has it: messages run in order, and a send ends when it is received."""

    def __init__(self, rank, channels, patience_s):
        self.rank, self.channels, self.patience_s, self.calls = rank, channels, patience_s, queue.SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    def start(self, *call):
        done = threading.Event()
        self.calls.put((*call, done))
        return SimpleNamespace(wait=lambda: self.done(done))

    def done(self, event):
        if not event.wait(timeout=self.patience_s):
            raise TimeoutError

    def work(self):
        while True:
            kind, x, peer, done = self.calls.get()
            pair = (self.rank, peer) if kind == "send" else (peer, self.rank)
            to, back = self.channels.setdefault(pair, (queue.SimpleQueue(), queue.SimpleQueue()))
            if kind == "send":
                to.put(x)
                back.get()
            else:
                x.copy_(to.get())
                back.put(None)
            done.set()


def hangs(p, m, num_groups, patience_s):
    """Whether the pipeline of tiny.py hangs with p stages and m microbatches, if messages wait for each other."""
    tiny, late = module(TEXT), []
    tiny.dist = SimpleNamespace(
        isend=lambda x, target, group: group.start("send", x, target),
        irecv=lambda x, source, group: group.start("recv", x, source),
        ProcessGroup=None,
    )
    tiny.cross_entropy = lambda y, *_: y.sum()
    channels = [
        {(a, b): (queue.SimpleQueue(), queue.SimpleQueue()) for a in range(p) for b in range(p)} for _ in "FB"
    ]

    def stage(rank):
        groups = [InOrder(rank, channels[i], patience_s) for i in range(num_groups)]
        pp, back = (tiny.Group([*range(p)], rank, p, group) for group in (groups[0], groups[-1]))
        weight = torch.nn.Parameter(torch.ones(1))
        model = SimpleNamespace(is_last=rank == p - 1, D=1, parameters=lambda: iter([weight]))
        model.mesh = SimpleNamespace(pp=pp, pp_back=back, tp=None, sp=SimpleNamespace(size=1))
        layer = type("Layer", (), {"__call__": lambda self, x: weight * (x if x.dim() == 3 else x[..., None])})()
        layer.__dict__.update(vars(model))
        tokens = torch.ones(m, 2)
        try:
            tiny.run_pipeline(layer, tokens, tokens, torch.tensor(1.0), m)
            assert weight.grad == 2 * m
        except TimeoutError:
            late.append(rank)

    threads = [threading.Thread(target=stage, args=(rank,)) for rank in range(p)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return bool(late)


def test_no_pipeline_hangs_where_messages_of_a_group_wait_for_each_other():
    assert [(p, m) for p in (1, 2, 3, 4, 7) for m in (1, 2, 5, 9) if hangs(p, m, num_groups=2, patience_s=20)] == []
    assert hangs(2, 5, num_groups=1, patience_s=0.5), "with one group for both directions it does"


# ---- bytes, seconds, command line -----------------------------------------------------------------------------------


def sent_bytes(world, text, which):
    """For each layout, bytes that a rank sends in a step for one block, and in messages of the pipeline."""
    tiny, found = module(text), []
    for here in which:
        mesh, sent = tiny.Mesh(here.dp, here.pp, here.tp, here.slices), []
        for layers in (2, 4):
            trainer = tiny.Trainer(tiny.GPT(mesh, CONTEXT, WIDTH, layers, HEADS), here.zero, num_microbatches=2)
            with trace.record(world.rank) as recorded:
                trainer.step(*next(batches()))
            traffic = recorded.traffic()
            sent.append(sum(sent for _, sent in traffic.values()))
        messages = sum(sent for (kind, _), (_, sent) in traffic.items() if kind == "send")
        found.append(((sent[1] - sent[0]) / 2, messages))
    return found


def test_each_section_sends_its_bytes():
    which = [Here(2, 1, 1), Here(2, 1, 1, zero=1), Here(1, 1, 2), Here(1, 1, 2, True), Here(1, 2, 1)]
    plain, zero, whole, slices, stages = run(sent_bytes, 2, TEXT, which)[0]
    n, x_bytes, block_bytes = 2, 4 * ROWS * CONTEXT * WIDTH, 4 * (12 * WIDTH**2 + 13 * WIDTH)
    assert plain[0] == zero[0] == 2 * (n - 1) / n * block_bytes
    assert whole[0] == 8 * (n - 1) / n * x_bytes
    norms = 2 * (n - 1) / n * 4 * (4 + 2) * WIDTH  # with slices, two norms and two biases are also summed over tp
    assert slices[0] == whole[0] + norms
    assert stages[1] == x_bytes


def drawn(world, text, here):
    """The weights that a rank draws."""
    tiny = module(text)
    model = tiny.GPT(tiny.Mesh(here.dp, here.pp, here.tp), CONTEXT, WIDTH, 2, HEADS, seed=5)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_weights_do_not_depend_on_the_layout():
    tiny, (full,) = module(TEXT), run(drawn, 1, TEXT, Here(1, 1, 1))
    for here in (Here(1, 1, 2), Here(1, 2, 1)):
        ranks = run(drawn, 2, TEXT, here)
        assert {name for rank in ranks for name in rank} == full.keys()
        for number, rank in enumerate(ranks):
            tp = SimpleNamespace(size=here.tp, rank=number % here.tp)
            assert all(torch.equal(p, tiny.cut(name, full[name], tp)) for name, p in rank.items())
    assert len({float(p.flatten()[0]) for p in full.values() if p.dim() == 2}) == 10, "each name has its own"


def times(world, text):
    """Seconds of steps of tiny.py and of lib, alternately, at dp = pp = tp = 2."""
    tiny, config, m = module(text), GPTConfig(num_layers=4), 4
    inputs, targets = (torch.randint(256, (32, config.context)) for _ in range(2))
    model = tiny.GPT(tiny.Mesh(2, 2, 2, True), config.context, config.d_model, config.num_layers, config.num_heads)
    trainer = tiny.Trainer(model, zero=1, num_microbatches=m)
    layout = Layout(2, 2, 2, microbatches=m, sequence_parallel=True, zero=1)
    ours = parallelize(GPT(config), Mesh(MeshShape(dp=2, pp=2, tp=2), world), layout, ADAMW)
    seconds = {trainer: [], ours: []}
    for _ in range(15):
        for one in seconds:
            dist.barrier()
            start_s = time.perf_counter()
            one.step(inputs, targets, 1.0)
            dist.barrier()
            seconds[one].append(time.perf_counter() - start_s)
    return [statistics.median(of_one[3:]) for of_one in seconds.values()]


@pytest.mark.thorough("a time, which says nothing about what is right")
@pytest.mark.timed("two libraries are compared")
def test_it_is_about_as_fast_as_the_library(say):
    tiny_s, lib_s = run(times, 8, TEXT, timeout_s=120)[0]
    say(f"tiny.py: {tiny_s * 1e3:.0f} ms for a step, lib {lib_s * 1e3:.0f} ms: {tiny_s / lib_s:.2f} times as long")
    with on_time():
        assert tiny_s < 1.3 * lib_s


def losses(*command):
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", timeout=120).stdout
    return [line.split()[3] for line in said.splitlines() if line.startswith("step")]


@pytest.mark.thorough("torchrun")
@pytest.mark.slow("torch is imported four times")
@pytest.mark.parametrize("layout", ["--dp 1", "--tp 2 --sequence-parallel --zero 1"])
def test_it_trains_on_its_own_text(layout):
    options = [str(PATH), "--steps", "3", "--batch", "8", "--layers", "2"]
    found = losses(sys.executable, *options)
    assert len(found) == 3 and float(found[0]) > float(found[2])
    if layout != "--dp 1":
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        assert losses(*torchrun, *options, *layout.split()) == found
