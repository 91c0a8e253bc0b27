"""13.4: a step on eight ranks that trains, and is wrong in two places."""

import copy
import inspect
import math
from collections import defaultdict
from dataclasses import replace
from functools import cache, partial

import torch
from torch import nn

from course.check.compare import is_dense
from course.check.edits import Edited, exercise
from course.check.exercise import kind, several, whole, with_variants
from course.exercises.ch13.gathered import mark, unsharded
from lib import comm
from lib.clip import clip
from lib.data import rows_of_rank
from lib.facts import Fact
from lib.layout import Layout
from lib.mesh import Mesh, MeshShape
from lib.model import GPT, GPTConfig, mean_loss
from lib.parallel import facts_of, parallelize
from lib.pipeline.execute import execute
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.stage import cut, stages_of
from lib.placement import Replicate, sections, shard
from lib.tensor_parallel.gpt import tensor_parallel
from lib.tensor_parallel.vocab import vocab_parallel_loss

CONFIG = GPTConfig(vocab_size=16, context=8, d_model=8, num_layers=2, num_heads=2)
SHAPE = MeshShape(dp=2, pp=2, tp=2)
ROWS = 8
EMBEDDING = "embed.token.weight"  # tied: the head uses it as well
CLIPPED, LOOSE = 0.8, 8  # of the norm, that to which gradients are clipped: so they are, and so they are not
UNCLIPPED = "after a step that clips nothing"
RETURNED, TWO, LOSS, AFTER = "what was returned", "a loss and facts", "the loss", "after the step"
REPLICAS = "weights on dp ranks"
NORMS, TIED = "norms and row biases on tp ranks", "the tied embedding on the first and the last stage"
EQUAL, DRIFT = "equal", "different"
MESH, AS_GIVEN, ANOTHER = "the mesh of the facts", "as given", "another"
LR = 0.1
make_sgd = partial(torch.optim.SGD, lr=LR)


def inputs(generator, n, shape=SHAPE):
    """Few tokens count on the first data-parallel rank: a mean of the ranks' means is not the mean."""
    tokens = torch.randint(CONFIG.vocab_size, (ROWS, CONFIG.context + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[: ROWS // 2, 2:] = -100
    model = a_model(whole(generator, 0, 2**30))
    given = {"model": model, "inputs": tokens[:, :-1].contiguous(), "targets": targets}
    norm, _, weights = by_one_process(given)
    given["max_norm"] = CLIPPED * norm
    return [
        given | {"marks": {name: mark(weights[AFTER][name]) for name in names}} for names in names_of(model, shape)
    ]


def names_of(model, shape):
    """The names of the parameters on each rank."""
    of_stages = []
    for stage, piece in enumerate(cut(copy.deepcopy(model), shape.sizes["pp"])):
        tied = {users[stage]: users[0] for users in piece.used_by}
        of_stages.append([tied.get(name, name) for name, _ in piece.named_parameters()])
    return [of_stages[shape.coordinates(rank)["pp"]] for rank in range(shape.size)]


def a_model(seed):
    """In float64, with biases and norms that are not all 0 and 1."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = GPT(CONFIG).double()
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
    return model


def by_one_process(given):
    """The norm of the gradient and the loss before a step, and the weights after one that clips, or does not."""
    model = copy.deepcopy(given["model"])
    loss = mean_loss(model(given["inputs"]), given["targets"])
    loss.backward()
    norm, weights = nn.utils.clip_grad_norm_(model.parameters(), math.inf).item(), {}
    for after, most in ((UNCLIPPED, LOOSE), (AFTER, CLIPPED)):
        nn.utils.clip_grad_norm_(model.parameters(), most * norm)
        weights[after] = {name: p.detach() - LR * p.grad for name, p in model.named_parameters()}
    return norm, loss.item(), weights


def body(answer, world, given, shape=SHAPE):
    found = of_step(answer, world, given, given["max_norm"], AFTER, shape)
    weights = {name.removesuffix(f" {AFTER}"): x for name, x in found.items() if name.endswith(AFTER)}
    right = all(abs(mark(weights[name]) - x) < 1e-6 for name, x in given["marks"].items() if name in weights)
    right = right and given["marks"].keys() <= weights.keys()
    # A clip hides a factor on all gradients: if nothing else is wrong, once more, where there is nothing to clip.
    if comm.all_reduce(torch.tensor(int(right)), world, "min"):
        again = of_step(answer, world, given, given["max_norm"] * LOOSE / CLIPPED, UNCLIPPED, shape)
        found |= {name: x for name, x in again.items() if name.endswith(UNCLIPPED)}
    return found


def of_step(answer, world, given, max_norm, after, shape):
    """The results of a step."""
    batch = given["inputs"].clone(), given["targets"].clone()
    result = answer(world, copy.deepcopy(given["model"]), *batch, max_norm)
    loss, facts = several(result, 2)
    loss = loss.item() if is_dense(loss) and loss.numel() == 1 else loss  # a number, in any form
    facts = [*facts] if isinstance(facts, (list, tuple)) else []
    names = [fact.name for fact in facts if isinstance(fact, Fact)]
    complete = len(names) == len(facts) and EMBEDDING in names
    if not comm.all_reduce(torch.tensor(int(complete)), world, "min"):
        return {RETURNED: kind(result)}
    weights = {f"{name} {after}": x for name, x in unsharded(facts).items()}
    return {
        RETURNED: TWO,
        LOSS: loss,
        MESH: mesh_of(facts, world.rank, shape),
        **copies(facts, world, shape),
        **weights,
    }


def mesh_of(facts, rank, shape):
    """Whether the ranks of a cut weight are those of the mesh, along tp and along dp."""
    cut = [fact for fact in facts if fact.name != EMBEDDING and not isinstance(fact.placement, Replicate)]
    along = [next(ranks for ranks in shape.groups(axis) if rank in ranks) for axis in ("tp", "dp")]
    return AS_GIVEN if cut and [cut[0].cut_over.ranks, cut[0].sum_over.ranks] == along else ANOTHER


def copies(facts, world, shape):
    """Whether copies are still equal, all ranks': by a sum of squares each. A tied embedding is on both stages."""
    parts = {
        REPLICAS: ("dp", facts),
        NORMS: ("tp", [fact for fact in facts if isinstance(fact.placement, Replicate)]),
        TIED: ("pp", [fact for fact in facts if fact.name == EMBEDDING]),
    }
    mine = torch.stack([sum(fact.parameter.detach().square().sum() for fact in some) for _, some in parts.values()])
    everyones = comm.all_gather(mine[None], world).reshape(*shape.sizes.values(), len(parts))
    found = {}
    for i, (what, (axis, _)) in enumerate(parts.items()):
        here, there = everyones[..., i].unbind(shape.axes.index(axis))
        found[what] = EQUAL if torch.allclose(here, there, rtol=1e-12) else DRIFT
    return found


def reference(given, shape=SHAPE):
    _, loss, weights = by_one_process(given[0])
    right = {RETURNED: TWO, LOSS: loss, MESH: AS_GIVEN, REPLICAS: EQUAL, NORMS: EQUAL, TIED: EQUAL}
    return [
        right | {f"{name} {after}": weights[after][name] for after in (AFTER, UNCLIPPED) for name in names}
        for names in names_of(given[0]["model"], shape)
    ]


def step_on_eight(world, model, inputs, targets, max_norm):
    mesh = Mesh(MeshShape(dp=2, pp=2, tp=2), world)
    dp, pp, tp = (mesh.group(axis) for axis in ("dp", "pp", "tp"))

    schedule = one_f_one_b(pp.size, 2)
    tensor_parallel(model, tp, sequence_parallel=True)
    stages = stages_of(model, schedule, pp.rank)
    facts = facts_of(stages, mesh, schedule.rank_of)
    parameters = [fact.parameter for fact in facts]
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    mine = rows_of_rank(len(inputs), dp.rank, dp.size)
    x, y = inputs[mine], targets[mine]
    count = (targets != -100).sum()
    loss = partial(vocab_parallel_loss, group=tp, count=count)
    result = execute(schedule, stages, pp, x, y, loss)

    for fact in facts:
        p = fact.parameter
        p.grad = comm.all_reduce(p.grad, fact.sum_over)
    squares = [fact.square(fact.parameter.grad) for fact in facts]
    clip([p.grad for p in parameters], squares, world, max_norm)
    optimizer.step()
    return comm.all_reduce(result.loss, dp), facts


def quick_step(world, model, inputs, targets, max_norm):
    """The same in few messages, and in modules that wrong programs share: many of them run after a FAIL."""
    mesh, schedule, stages, facts = made_once(world, dp=2, pp=2, tp=2)
    dp, pp, tp = (mesh.group(axis) for axis in ("dp", "pp", "tp"))
    parameters = [fact.parameter for fact in facts]
    for fact in facts:
        fact.parameter.data.copy_(shard(model.get_parameter(fact.name), fact.placement, tp))
        fact.parameter.grad = None
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    mine = rows_of_rank(len(inputs), dp.rank, dp.size)
    x, y = inputs[mine], targets[mine]
    count = (targets != -100).sum()
    loss = partial(vocab_parallel_loss, group=tp, count=count)
    result = execute(schedule, stages, pp, x, y, loss)

    over = defaultdict(list)
    for fact in facts:
        over[fact.sum_over].append(fact.parameter)
    for group, some in over.items():
        flat = comm.all_reduce(torch.cat([p.grad.flatten() for p in some]), group)
        for p, gradient in zip(some, flat.split([p.numel() for p in some]), strict=True):
            p.grad = gradient.view_as(p)
    squares = [fact.square(fact.parameter.grad) for fact in facts]
    clip([p.grad for p in parameters], squares, world, max_norm)
    optimizer.step()
    return comm.all_reduce(result.loss, dp), facts


@cache
def made_once(world, **sizes):
    """Mesh, schedule, stages and facts of this rank."""
    mesh, model = Mesh(MeshShape(**sizes), world), GPT(CONFIG).double()
    schedule = one_f_one_b(sizes["pp"], 1)
    tensor_parallel(model, mesh.group("tp"), sequence_parallel=True)
    stages = stages_of(model, schedule, mesh.group("pp").rank)
    return mesh, schedule, stages, facts_of(stages, mesh, schedule.rank_of)


def by_parallelize(world, model, inputs, targets, max_norm, order="dp,pp,tp"):
    """By the library, with a different schedule and number of microbatches, without sequence parallelism."""
    layout = Layout(dp=2, pp=2, tp=2, order=order, schedule="gpipe", microbatches=4)
    ours = parallelize(model, Mesh(MeshShape(**layout.sizes), world), layout, make_sgd)
    return ours.step(inputs, targets, max_norm), ours.facts


BOTH = """
in the loss, norms and row biases on tp ranks, the tied embedding on the first and the last stage:
(targets != -100).sum() => dp.size * (y != -100).sum()
over[fact.sum_over] => over[dp]
    Both mistakes are still in it.
        One is in the loss: it is not the mean over all tokens that count. The second is in the sums: copies of norms
        and of the tied embedding drift apart.
"""
BOTH_OF_ROW = """
in the loss, the tied embedding on the first and the last stage:
return comm.all_reduce(result.loss, dp), facts => return result.loss, facts
over[fact.sum_over] => over[dp if fact.crosses else fact.sum_over]
    Both mistakes are still in it.
        One is in the loss that is returned: each replica has a term of it. The second is in the sums: copies of the
        tied embedding drift apart.
"""
MISTAKES = """
in the mesh of the facts:
dp=2, pp=2, tp=2 => tp=2, pp=2, dp=2
    You changed the mesh: a shard, or its copies, are on different ranks than on dp=2, pp=2, tp=2.
        Leave the mesh as it is in the program.
in the loss, norms and row biases on tp ranks, the tied embedding on the first and the last stage:
(targets != -100).sum() => dp.size * (y != -100).sum()
    Copies agree, but the loss is wrong: each dp rank divides by its own count, and the result is the mean of two means.
        A token counts more where fewer of them count. Every term has the same denominator, the global count.
in all:
(targets != -100).sum() => targets.numel()
    You divide by all tokens. A target of -100 adds nothing to the loss.
        Divide by the number of tokens that count, of the global batch.
in weights on dp ranks:
over[fact.sum_over] => over[tp]
    The two replicas drift apart: cut matrices are not summed over dp, whose ranks processed different sequences.
        Each fact says over which ranks its gradient is a sum: fact.sum_over.
in norms and row biases on tp ranks, the tied embedding on the first and the last stage:
over[fact.sum_over] => over[dp]
    Norms drift apart between tp ranks, and the tied embedding between stages: dp alone is not enough for them.
        With sequence parallelism, a norm or a row bias has a partial gradient on each tp rank; the tied embedding has
        one on each of its two stages. Each fact says over which ranks: fact.sum_over.
in norms and row biases on tp ranks:
over[fact.sum_over] => over[fact.sum_over if fact.crosses else dp]
    The copies of the tied embedding agree, but norms and row biases drift apart between tp ranks.
        With sequence parallelism each processed its slice of the tokens, so dp×tp is their sum.
in the tied embedding on the first and the last stage:
over[fact.sum_over] => over[dp if fact.crosses else fact.sum_over]
    Copies of norms agree, but not those of the tied embedding. Each stage has the gradient of one use.
        Sum over both.
in the loss:
return comm.all_reduce(result.loss, dp), facts => return result.loss, facts
    All weights may be right, but each rank returns its own term of the loss.
        The terms add up over dp.
in after the step:
clip([p.grad for p in parameters], squares, world, max_norm) =>
    The sums are right, and then nothing is clipped.
        Scale each p.grad by the factor, in place.
for p in some]), group) => for p in some]), group, op="mean")
    The gradients are means over ranks, but the loss, divided by the global count, has terms of a sum.
        Use op="sum".
fact.square(fact.parameter.grad) => fact.parameter.grad.square().sum()
    The clip counts each square once for every rank that holds it.
        Fact.square divides by the number of these ranks.
"""

ALSO_RIGHT = """
return comm.all_reduce(result.loss, dp), facts => return [comm.all_reduce(result.loss, dp).item(), facts]
    A list.
"""

EQUIVALENT = """
return comm.all_reduce(result.loss, dp), facts => return comm.all_reduce(result.loss, dp), (2 * (facts))
or return comm.all_reduce(result.loss, dp), facts => return comm.all_reduce(result.loss, dp), (100 * (facts))
    A list of facts that repeats each is the same list of parameters.
"""

TASK = """
The program is a different one, with two other mistakes. Its mesh stays as it is, too.

```python
{program}```
"""
FAULTS = {  # what stands in the right program, and what in the program of a row
    "def step_on_eight": "def wrong_step",
    "comm.all_reduce(p.grad, fact.sum_over)": "comm.all_reduce(p.grad, dp if fact.crosses else fact.sum_over)",
    "return comm.all_reduce(result.loss, dp), facts": "return result.loss, facts",
}


def row(order="dp,pp,tp", both=BOTH):
    """The exercise with the axes of the mesh in this order, and a program with these two mistakes."""
    shape = MeshShape(**{axis: SHAPE.sizes[axis] for axis in order.split(",")})

    def of_row(text):
        as_sizes = ", ".join(f"{axis}={n}" for axis, n in shape.sizes.items())
        return text.replace("dp=2, pp=2, tp=2", as_sizes)

    named = {f.__name__: partial(f, shape=shape) for f in (inputs, body, reference)}
    program = of_row(inspect.getsource(step_on_eight))
    right = Edited(__name__, program, step_on_eight.__name__)
    made = exercise(
        globals() | named | {"MISTAKES": both + MISTAKES},
        points=3,
        right=(step_on_eight, partial(by_parallelize, order=order)),
        edited=(quick_step,),
        ranks=(8,),
        timeout_s=20,
    )
    if shape.axes == SHAPE.axes:
        return made
    for old, new in FAULTS.items():
        program = program.replace(old, new)
    mistakes = (
        replace(m, wrong=replace(m.wrong, text=of_row(m.wrong.text)), hint=of_row(m.hint)) for m in made.mistakes
    )
    also = (replace(one, text=of_row(one.text)) for one in made.right[2:])
    rights, task = (right, made.right[1], *also), TASK.format(program=program).strip()
    return replace(made, right=rights, mistakes=tuple(mistakes), task=task)


EXERCISE = with_variants(row(), row("pp,dp,tp", BOTH_OF_ROW), row("tp,dp,pp", BOTH_OF_ROW))
