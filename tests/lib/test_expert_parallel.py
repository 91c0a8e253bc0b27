"""Experts on several ranks: which rows go where, a mixture against one process, and a GPT with all other axes."""

import math
import random
import sys
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, product
from unittest.mock import patch

import cloudpickle
import pytest
import torch

from book.trials.expert_mistakes import EXPERT_MISTAKES
from book.trials.mistakes import planted
from lib import comm, run, trace
from lib.checkpoint.storage import Save, restore
from lib.cost.experts import experts_of_rank
from lib.cost.token_orders import TOKEN_ORDERS
from lib.expert_parallel.dispatch import Dispatch
from lib.expert_parallel.layer import ExpertGroups, expert_parallel
from lib.lab.certificate import ADAMW, certify
from lib.layout import Layout
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPTConfig, mean_loss
from lib.moe import ExpertOptions, MoE
from lib.parallel import assemble, parallelize
from tests.lib.sharding import serial

cloudpickle.register_pickle_by_value(sys.modules[__name__])

D, WIDTH = 16, 32
GENTLE = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)  # does not divide rounding by tiny numbers

# ---- which rows go where --------------------------------------------------------------------------------------------


def sent(table):
    """Rows that each rank sends to the others, and back."""
    n = len(table)
    there = [sum(table[i][j] for j in range(n) if j != i) for i in range(n)]
    back = [sum(table[i][j] for i in range(n) if j != i) for j in range(n)]
    return there, back


def table_of(loads_nE):
    n = len(loads_nE)
    return Dispatch(torch.tensor(loads_nE), Group("ep", tuple(range(n)), 0)).rows


def test_rows_of_forced_loads():
    """Skewed: all tokens of all ranks choose the two experts of rank 0. Even: a quarter stays at home."""
    assert sent(table_of([[12, 12, 0, 0, 0, 0, 0, 0]] * 4)) == ([0, 24, 24, 24], [72, 0, 0, 0])
    assert sent(table_of([[3] * 8] * 4)) == ([18] * 4, [18] * 4)
    assert sent(table_of([[6] * 8] * 2)) == ([24] * 2, [24] * 2)
    uneven = [[4, 3, 1, 2, 5], [0, 0, 0, 0, 9], [1, 1, 1, 1, 1]]  # five experts on three ranks: 2, 2, 1
    assert table_of(uneven) == [[7, 3, 5], [0, 0, 9], [2, 2, 1]]
    assert sent(table_of(uneven)) == ([8, 9, 4], [2, 5, 14])


def mixture(experts, k, far=False, **options):
    """With large weights, in float64; `far`: no token chooses an expert but the first k."""
    torch.manual_seed(0)
    balance = {"balance": 0.01, "bias_rate": 0.1}
    moe = MoE(ExpertOptions(experts=experts, top_k=k, renormalise=k > 1, **balance | options), D, WIDTH, torch.tanh)
    with torch.no_grad():
        for p in moe.double().parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float64) / 2)
        if moe.router.bias is not None:
            moe.router.bias.zero_()
        if far:
            moe.router.bias[k:] = -10
    return moe


def data_of(moe):
    x = torch.randn(12, 4, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = torch.randn(12, 4, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x.requires_grad_(), weights


CASES = [*product((8, 5, 6), (1, 2), (False, True), ("batch", "sequence"))]


def beside_serial(world):
    """Of each case: distances of output, gradients and loads; rows of the table; bytes forward, and backward."""
    found = []
    for experts, k, far, over in CASES:
        if experts < world.size:
            continue
        twin, ours = (mixture(experts, k, far, balance_over=over) for _ in range(2))
        x, weights = data_of(twin)
        mine = slice(12 // world.size * world.rank, 12 // world.size * (world.rank + 1))
        wanted = twin(x)
        (wanted * weights).sum().backward()
        here = x.detach()[mine].requires_grad_()
        groups = ExpertGroups(ep=world, tokens=world, batch_pieces=world.size)
        ours = expert_parallel(torch.nn.Sequential(ours), groups)[0]
        with trace.record(world.rank) as forward:
            y = ours(here)
        with trace.record(world.rank) as backward:
            (y * weights[mine]).sum().backward()
        held = experts_of_rank(experts, world.size, world.rank)
        some = slice(held.start, held.stop)
        pairs = {
            "y": (y, wanted[mine]),
            "x": (here.grad, x.grad[mine]),
            "router": (comm.all_reduce(ours.router.weight.grad, world), twin.router.weight.grad),
            "up": (ours.experts.up.grad, twin.experts.up.grad[some]),
            "down": (ours.experts.down.grad, twin.experts.down.grad[some]),
            "load": (comm.all_reduce(ours.router.load, world), twin.router.load),
        }
        far_apart = {name: (a - b).abs().max().item() if a.numel() else 0.0 for name, (a, b) in pairs.items()}
        chosen = twin.router(x[mine]).chosen.flatten()
        load_nE = comm.all_gather(torch.bincount(chosen, minlength=experts)[None], world)
        moved = [sum(e.wire_bytes for e in r.events if e.kind == "all_to_all_rows") for r in (forward, backward)]
        found.append((far_apart, load_nE.tolist(), moved))
    return found


@pytest.mark.parametrize("n", [3, 1, 2, 4])
def test_a_mixture_and_its_gradients_are_those_of_one_process(n, say):
    """Also where ranks get no row at all; the bytes are those of the table: rows × D × 8, both ways."""
    found = run(beside_serial, n)
    worst = defaultdict(float)
    for rank, of_rank in enumerate(found):
        assert len(of_rank) == len(CASES)
        for case, (far_apart, loads_nE, moved) in zip(CASES, of_rank, strict=True):
            for name, distance in far_apart.items():
                worst[name] = max(worst[name], distance)
                assert distance < 1e-12, (name, case)
            table = table_of(loads_nE)
            if case[2] and n > 1 and case[0] == 8:
                assert any(sum(column) == 0 for column in zip(*table, strict=True)), "no row"
            there, back = sent(table)
            assert moved == [(there[rank] + back[rank]) * D * 8] * 2, case
    say(f"{n} ranks: " + ", ".join(f"{name} {distance:.1g}" for name, distance in worst.items()))


def inner_products(world):
    loads_nE = torch.tensor([[4, 3, 1, 2, 5], [0, 0, 0, 0, 9], [1, 1, 1, 1, 1]])
    dispatch = Dispatch(loads_nE, world)
    torch.manual_seed(world.rank)
    x = torch.randn(int(loads_nE[world.rank].sum()), D, dtype=torch.float64)
    y = torch.randn(int(dispatch.arriving_ne.sum()), D, dtype=torch.float64)
    there, home = dispatch.there(x), dispatch.home(y)
    each = comm.all_reduce(torch.stack([(there * y).sum(), (x * home).sum()]), world)
    return each.tolist(), (dispatch.home(there) - x).abs().max().item()


def test_the_way_home_is_the_way_there_transposed_and_its_inverse():
    for (forth, back), apart in run(inner_products, 3):
        assert forth == pytest.approx(back, rel=1e-13) and apart == 0


def three_ways(world):
    """Distances of a mixture by PyTorch's all-to-all, and by a gather of all tokens, from ours; imported here."""
    from benchmarks.expert_parallel import SIDES, layer

    results = {}
    for name in SIDES:
        moe = layer(name, world, mixture(8, 2))
        x, weights = (one[4 * world.rank : 4 * world.rank + 4].detach() for one in data_of(moe))
        y = moe(x.requires_grad_())
        with trace.record(world.rank) as backward:
            (y * weights).sum().backward()
        sent = sum(event.wire_bytes for event in backward.events if event.kind != "all_reduce")
        grads = {name: p.grad for name, p in moe.named_parameters() if p.requires_grad}
        results[name] = {"y": y.detach(), "x": x.grad, **grads}, sent
    ours, sent = results.pop("all-to-all")
    apart = {
        name: max((there[key] - x).abs().max().item() for key, x in ours.items())
        for name, (there, _) in results.items()
    }
    return apart, sent, results["all-gather"][1]


def test_pytorchs_all_to_all_and_a_gather_give_the_same():
    """A gather sends all tokens, 2 · 32 of them and their weights; the all-to-all k/n of that, if loads are even."""
    found = run(three_ways, 3)
    for apart, _, gathered in found:
        assert len(apart) == 2 and max(apart.values()) < 1e-13
        assert gathered == 2 * 32 * D * 8 + 32 * 2 * 8
    assert sum(sent for _, sent, _ in found) == pytest.approx(3 * 2 * 32 * D * 8 * 2 / 3, rel=0.2)


# ---- a GPT, with all other axes -------------------------------------------------------------------------------------

SIZES = {"vocab_size": 16, "context": 16, "d_model": 16, "num_layers": 3, "num_heads": 8}
CHOICES = {  # of a layout
    "ep": (1, 2, 4),
    "attention": ("gather", "ring", "ulysses"),
    "token_order": TOKEN_ORDERS,
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"),
    "recompute": ("none", "selective", "full"),
    "microbatches": (1, 2),
}
OPTIONS = {  # of a model; the first is in every model that is not drawn
    "experts": (8, 5),
    "top_k": (2, 1, 3),
    "renormalise": (True, False),
    "balance_over": ("none", "batch", "sequence"),
    "bias_rate": (0.0, 0.01),
    "dropout": (0.0, 0.1),
    "d_shared": (0, 8),
    "expert_every": (1, 2),
    "llama": (False, True),
}
STAGES = {"interleaved": 2, "zb-v": 2}
DEGREES = ("dp", "pp", "cp", "tp")


def config_of(values):
    """The model of these options, in the order of `OPTIONS`; ValueError if they do not fit together."""
    options = dict(zip(OPTIONS, values, strict=True))
    if options["balance_over"] == "none":
        del options["balance_over"]
    else:
        options["balance"] = 0.05
    more = {"num_kv_heads": 4, "tied": False, "d_mlp": 24} if options["llama"] else {}
    return GPTConfig(**SIZES, **more, **options)


PLACED, NAMES = (*DEGREES, *CHOICES), (*DEGREES, *CHOICES, *OPTIONS)
PLAIN = config_of([values[0] for values in OPTIONS.values()])


def layout_of(place, config):
    """The layout with these values of `PLACED`, or why it is refused."""
    chosen = dict(zip(PLACED, place, strict=True))
    try:
        layout = Layout(stages_per_rank=STAGES.get(chosen["schedule"], 1), **chosen)
        layout.check(config, 8)
    except ValueError as error:
        return str(error)
    return layout


@cache
def tried(ranks):
    """All places on so many ranks → the layout, or why it is refused, for a model without a balance loss."""
    every = product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2), *CHOICES.values())
    return {one: layout_of(one, PLAIN) for one in every if one[0] * one[1] * one[2] * one[3] == ranks}


@cache
def models():
    """All values of `OPTIONS` without a lone score that is divided by itself."""
    return [one for one in product(*OPTIONS.values()) if one[1] > 1 or not one[2]]


def pairs_of(names, values):
    return set(combinations(sorted(zip(names, values, strict=True)), 2))


def drawn(rng, places, wanted, times=60):
    """Places and models with these two choices, the rest by chance. Balance over the batch needs all its tokens."""
    mine = [(PLACED.index(name), value) for name, value in wanted.items() if name in PLACED]
    places = [one for one in places if all(one[i] == value for i, value in mine)]
    unsplit = [one for one in places if one[-1] == 1]
    asked = [wanted.get(name) for name in OPTIONS]
    options = [one for one in models() if all(a in (None, v) for a, v in zip(asked, one, strict=True))]
    for model in rng.choices(options, k=times) if options else ():
        if some := unsplit if model[3] == "batch" else places:
            yield rng.choice(some), model


@cache
def pairwise(ranks):
    """Some models and layouts, {model: layouts}, with every pair of two choices that any has; and impossible pairs."""
    rng, places = random.Random(0), [one for one, layout in tried(ranks).items() if isinstance(layout, Layout)]
    values = [{*zip(NAMES, (*place, *models()[0]), strict=True)} for place in places]
    values += [{*zip(NAMES, (*places[0], *model), strict=True)} for model in models()]
    missing = {(a, b) for a, b in combinations(sorted(set().union(*values), key=str), 2) if a[0] != b[0]}
    missing = {tuple(sorted(pair)) for pair in missing}
    chosen, impossible = defaultdict(list), set()
    while missing:
        wanted = min(missing, key=str)
        if not (found := [*drawn(rng, places, dict(wanted))]):
            impossible.add(wanted)
            missing.remove(wanted)
            continue
        place, model = max(found, key=lambda one: len(pairs_of(NAMES, (*one[0], *one[1])) & missing))
        missing -= pairs_of(NAMES, (*place, *model))
        config = config_of(model)
        chosen[config].append(layout_of(place, config))
    return dict(chosen), impossible


# Of 8 ranks: a sentence → the pairs that it refuses.
REFUSED = {
    "needs ranks to split the tokens over: use cp=2 or more": [
        *(({"cp": 1} | {name: value}) for name in ("attention", "token_order") for value in CHOICES[name][1:])
    ],
    "is balanced already: use token_order=contiguous": [
        {"attention": "ulysses", "token_order": order} for order in ("zigzag", "striped")
    ],
    "needs ranks to split the layers over: use pp=2 or more": [
        {"pp": 1, "schedule": name} for name in CHOICES["schedule"][1:]
    ],
    "the activations that I recomputes are freed before W": [
        {"recompute": how, "schedule": name} for how in ("selective", "full") for name in ("zb-h1", "zb-v")
    ],
    "sequence_parallel needs ranks to shard the sequence over": [{"sequence_parallel": True, "tp": 1}],
    "zero=3 and pp=2: the parameters of a stage would be gathered twice": [
        *({"zero": 3} | more for more in ({"pp": 2}, {"cp": 1}, {"dp": 1})),  # 8 ranks need pp or tp then
        *({"zero": 3, "schedule": name} for name in CHOICES["schedule"][1:]),
    ],
    "zero=3 and tp=2: parameters are shards of full matrices here": [
        *({"zero": 3} | more for more in ({"tp": 2}, {"sequence_parallel": True}))
    ],
    "num_microbatches=1 must be a multiple of the 2 ranks": [{"microbatches": 1, "schedule": "interleaved"}],
    "balance_over=batch compares the loads of all tokens of a step": [
        {"balance_over": "batch", "microbatches": 2},
        {"balance_over": "batch", "schedule": "interleaved"},  # which needs several microbatches
    ],
}


@pytest.mark.thorough("all layouts of eight ranks")
def test_impossible_pairs_are_refused_in_a_sentence():
    """All layouts with such a pair are refused, and the sentence is among the reasons."""
    balanced = config_of([{"balance_over": "batch"}.get(name, values[0]) for name, values in OPTIONS.items()])
    unknown = {pair for pair in pairwise(8)[1] if not set(dict(pair)) <= set(DEGREES)}  # too many ranks, or too few
    for says, pairs in REFUSED.items():
        for pair in pairs:
            unknown.remove(tuple(sorted(pair.items())))
            wanted = [(PLACED.index(name), value) for name, value in pair.items() if name in PLACED]
            fits = [one for one in tried(8) if all(one[i] == value for i, value in wanted)]
            if "balance_over" in pair:
                fits = [one for one in fits if isinstance(tried(8)[one], Layout)]
            answers = {layout_of(one, balanced) if "balance_over" in pair else tried(8)[one] for one in fits}
            assert all(isinstance(answer, str) for answer in answers), pair
            assert any(says in answer for answer in answers), pair
    assert unknown == {(("renormalise", True), ("top_k", 1))}
    with pytest.raises(ValueError, match="ep=3 must divide dp x cp = 4, the ranks with different tokens"):
        Layout(dp=2, cp=2, ep=3)
    with pytest.raises(ValueError, match="experts=5 cannot be shared by ep=8"):
        Layout(dp=8, ep=8).check(replace(PLAIN, experts=5), 8)


def batches(config, rows=8):
    """Many targets do not count, most of these in the second half: the counts of the ranks differ."""
    torch.manual_seed(1)
    for _ in range(2):
        tokens = torch.randint(config.vocab_size, (rows, config.context + 1))
        targets = tokens[:, 1:].clone()
        targets[:3, 5:], targets[6:7] = -100, -100
        yield tokens[:, :-1], targets


def certified(world, of_models):
    """Of each model and its layouts: how far from one process."""
    return [
        certify(world, layouts, serial(config), list(batches(config)), 0.1, GENTLE)
        for config, layouts in of_models.items()
    ]


@pytest.mark.thorough("all pairs", keep=1)
@pytest.mark.parametrize(("ranks", "most"), [(4, 14), (2, 99), (4, 99), (8, 99)])
def test_every_pair_of_options_is_the_same_training(ranks, most, say):
    """The first layouts have the most pairs."""
    of_models = dict(list(pairwise(ranks)[0].items())[:most])
    found = run(certified, ranks, of_models, timeout_s=600)[0]
    say(f"{sum(map(len, found))} layouts of {ranks} ranks: gradient {max(a.gradient for s in found for a in s):.1g}")
    wrong = [
        (layout.differs(Layout()), config, apart)
        for (config, layouts), some in zip(of_models.items(), found, strict=True)
        for layout, apart in zip(layouts, some, strict=True)
        if not apart.holds()
    ]
    assert not wrong


# ---- evaluation, saving, loading ------------------------------------------------------------------------------------

CONFIG = replace(PLAIN, experts=5, d_shared=8, bias_rate=0.01, balance=0.05, balance_over="sequence")


def evaluated(world):
    """Of each layout and number of rows: the loss; and what one process says."""
    limited = replace(CONFIG, capacity_factor=0.5)
    found = []
    for layout, config in (
        (Layout(dp=2, ep=2, microbatches=2), CONFIG),
        (Layout(dp=2, ep=2, zero=2), limited),  # in training alone
        (Layout(cp=2, ep=2, microbatches=2, attention="ring", token_order="zigzag"), CONFIG),
    ):
        model = serial(config)
        ours = parallelize(serial(config), Mesh(MeshShape(**layout.sizes), world), layout, ADAMW)
        for rows in (3, 1, 2, 5):
            x, y = next(batches(CONFIG, rows))
            with torch.no_grad():
                wanted = mean_loss(model.eval()(x), y).item()
            found.append((layout.differs(Layout()), rows, ours.evaluate(x, y).item(), wanted))
    return found


def test_any_number_of_rows_is_evaluated_as_in_one_process():
    """A rank without a row takes part in the exchange, with a row that does not count."""
    for layout, rows, loss, wanted in run(evaluated, 2)[0]:
        assert loss == pytest.approx(wanted, abs=1e-13), (layout, rows)


def skipped(world):
    """A step that is skipped, and a step: the biases moved, by the second alone; and the loads after."""
    layout, found = Layout(dp=2, ep=2, zero=1), []
    for skips in (False, True):
        for rate in (0.01, 0.0):
            config = replace(CONFIG, bias_rate=rate)
            model = parallelize(serial(config), Mesh(MeshShape(**layout.sizes), world), layout, GENTLE)
            first, second = batches(config)
            if skips:
                model.backward(*first, 0)
                model.zero_grad()
            model.step(*second, 0.1, 1)
            loads = [
                m.router.load for stage in model.stages.values() for m in stage.module.modules() if isinstance(m, MoE)
            ]
            found.append((comm.all_gather_object(model.full_state_dict(), world)[0], loads))
    return found


def test_a_skipped_step_leaves_no_load():
    for plain, again in [run(skipped, 2)[0][rate::2] for rate in (0, 1)]:
        assert all(torch.equal(again[0][name], x) for name, x in plain[0].items())
        assert not any(load is not None for load in (*plain[1], *again[1]))


LAYOUTS = [
    Layout(dp=4, ep=4, zero=1),
    Layout(dp=2, tp=2, ep=2, sequence_parallel=True),
    Layout(dp=2, cp=2, ep=4, zero=2),
    Layout(dp=2, pp=2, ep=2, zero=1),
    Layout(dp=4),
]


def continued(world, folder):
    """Two steps in each layout; then its weights, and its checkpoint, go on in all others as in itself."""
    steps = [*batches(CONFIG), *batches(CONFIG)]
    made = [parallelize(serial(CONFIG), Mesh(MeshShape(**layout.sizes), world), layout, GENTLE) for layout in LAYOUTS]
    worst = [0.0, 0.0]
    first = made[0]
    for number in (0, 1):
        first.step(*steps[number], 0.1, number)
    state = comm.all_gather_object(first.full_state_dict(), world)[0]
    assert list(state) == list(serial(CONFIG).state_dict())
    assert Save(first, folder).finish() == ""
    wanted = [first.step(*steps[number], 0.1, number).item() for number in (2, 3)]
    end = comm.all_gather_object(first.full_state_dict(), world)[0]
    for model in made[1:]:
        model.load_full_state_dict(state)
        again = comm.all_gather_object(model.full_state_dict(), world)[0]
        assert all(torch.equal(again[name], x) for name, x in state.items())
        worst[0] = max(worst[0], abs(model.evaluate(*steps[2]).item() - wanted[0]))
        restore(model, folder)
        losses = [model.step(*steps[number], 0.1, number).item() for number in (2, 3)]
        there = comm.all_gather_object(model.full_state_dict(), world)[0]
        apart = max((there[name] - x).abs().max().item() for name, x in end.items())
        worst[1] = max(worst[1], apart, *(abs(a - b) for a, b in zip(losses, wanted, strict=True)))
    return worst


def test_weights_and_checkpoints_go_on_in_any_layout(say):
    """Five experts on four ranks and on two: no rank has as many in both."""
    with tempfile.TemporaryDirectory() as folder:
        for loss, weights in run(continued, 4, folder, timeout_s=300):
            assert loss < 1e-13 and weights < 1e-11
    say(f"apart by {loss:.1g}, and after two steps by {weights:.1g}")


def refuses_own_models(world):
    def assembled(layout, **options):
        mesh = Mesh(MeshShape(**layout.sizes), world)
        model = torch.nn.Sequential(mixture(8, 2, **options))
        return assemble(model, mesh, layout, GENTLE, loss=lambda targets: lambda y, some: y.sum())

    with pytest.raises(ValueError, match="ep=2 is for a GPT"):
        assembled(Layout(dp=2, ep=2), balance=0, bias_rate=0)
    for options in ({"bias_rate": 0}, {"balance": 0}):
        with pytest.raises(ValueError, match="0 balances loads over the tokens of all ranks, and only parallelize"):
            assembled(Layout(dp=2), **options)
    x = torch.ones(4, 2, D, dtype=torch.float64)
    return assembled(Layout(dp=2), balance=0, bias_rate=0).step(x, x).item()


def test_balanced_experts_in_a_model_that_is_no_gpt_are_refused():
    assert len({*run(refuses_own_models, 2)}) == 1


# ---- capacity -------------------------------------------------------------------------------------------------------

LIMITED = replace(PLAIN, capacity_factor=1.0, bias_rate=0.01)
GROUP = {"capacity_over": "group"}
AS_ONE = [  # all tokens of a batch are in one group, in the order of one process
    Layout(dp=4, ep=4, **GROUP),
    Layout(dp=4, ep=4, zero=2, recompute="full", **GROUP),
    Layout(dp=2, tp=2, ep=2, **GROUP),
    Layout(dp=2, tp=2, ep=2, sequence_parallel=True, zero=1, **GROUP),
    Layout(dp=2, pp=2, ep=2, **GROUP),
    Layout(pp=2, tp=2, sequence_parallel=True),
]
OTHERS = [
    Layout(dp=4, ep=4),
    Layout(dp=4, ep=2, **GROUP),
    Layout(dp=2, cp=2, ep=4, **GROUP),
    Layout(dp=2, pp=2, ep=2, microbatches=2, **GROUP),
]


def limited(world):
    given = serial(LIMITED), list(batches(LIMITED)), 0.1, GENTLE
    found = certify(world, AS_ONE, *given)
    for layout in OTHERS:
        with pytest.raises(
            ValueError, match="drops tokens that find an expert full, and these ranks and microbatches"
        ):
            certify(world, [layout], *given)
    with patch.object(Layout, "check_capacity", lambda *_: None):
        found += certify(world, OTHERS, *given)
        return found, certify(world, OTHERS, serial(replace(LIMITED, capacity_factor=8.0)), *given[1:])


def test_capacity_of_the_group_is_that_of_one_process_and_of_a_rank_is_not():
    """The certificate refuses exactly the layouts in which full experts refuse different tokens."""
    Layout().check_capacity(LIMITED)
    with pytest.raises(ValueError, match="these ranks and microbatches drop others than one process"):
        Layout(microbatches=2).check_capacity(LIMITED)
    found, ample = run(limited, 4, timeout_s=200)[0]
    for layout, apart in zip(AS_ONE, found, strict=False):
        assert apart.holds(), (layout.differs(Layout()), apart)
    assert all(apart.loss > 1e-6 and apart.gradient > 1e-3 for apart in found[len(AS_ONE) :])
    assert all(apart.holds() for apart in ample), "without a row too many, all are one training"


def rows_kept(world):
    """Rows that are computed, of 96, by what shares a capacity; and the numbers of the ranks."""
    kept = {}
    for over in ("rank", "group"):
        moe = mixture(8, 2, capacity_factor=1.0)
        x = data_of(moe)[0].detach()
        groups = ExpertGroups(ep=world, tokens=world, capacity_over=over)
        ours = expert_parallel(torch.nn.Sequential(moe), groups)[0]
        rank, each = world.rank, 12 // world.size
        experts_R = moe.router(x[rank * each : (rank + 1) * each]).chosen.flatten()
        kept[over] = ours.sorted_rows(experts_R) + rank * len(experts_R)
    return kept


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_which_rows_an_expert_refuses(n):
    """Of a group: those of one process, whatever the number of ranks. Of a rank: as many or more."""
    moe = mixture(8, 2, capacity_factor=1.0)
    wanted = set(moe.sorted_rows(moe.router(data_of(moe)[0]).chosen.flatten()).tolist())
    found = run(rows_kept, n)
    group, of_ranks = ({row for kept in found for row in kept[over].tolist()} for over in ("group", "rank"))
    assert len(wanted) < 96 and group == wanted
    assert len(of_ranks) <= len(group) and (n > 1) == (of_ranks != group)


# ---- mistakes -------------------------------------------------------------------------------------------------------

# Each mistake matters; without biases, as the gradient of a bias of keys is rounding, which Adam makes large.
PRONE = replace(PLAIN, balance=0.1, capacity_factor=1.0, d_expert=16, llama=True, tied=False)
OF_DP, OF_TP = Layout(dp=4, ep=4, **GROUP), Layout(dp=2, tp=2, ep=2, **GROUP)
OPTIMIZERS = partial(torch.optim.Adam, lr=1e-2, eps=1e-15), partial(torch.optim.SGD, lr=0.1)


def with_mistakes(world):
    """Of each mistake, and of None in two layouts: distances with Adam and with SGD, not clipped."""
    cases = [(None, OF_DP), (None, OF_TP), *((name, OF_TP if "tp" in name else OF_DP) for name in EXPERT_MISTAKES)]
    found = []
    for mistake, layout in cases:
        with planted(mistake, EXPERT_MISTAKES) if mistake else nullcontext():
            given = serial(PRONE), list(batches(PRONE))[:1], math.inf
            found.append((mistake, *(certify(world, [layout], *given, optimizer)[0] for optimizer in OPTIMIZERS)))
    return found


def test_each_classic_mistake_is_seen(say):
    """Gradients that are ep times too large show in the gradients and in the weights of SGD; Adam divides them out."""
    for mistake, adam, sgd in run(with_mistakes, 4, timeout_s=300)[0]:
        if mistake is None:
            assert adam.holds() and sgd.holds()
            continue
        weights = f"weights {adam.weight:.1g} with Adam, {sgd.weight:.1g} with SGD"
        say(f"{mistake}: loss {adam.loss:.1g}, gradient {adam.gradient:.2g}, {weights}")
        assert not adam.holds() and adam.gradient > 0.1 and sgd.weight > 1e-4, mistake
        assert (adam.weight < 1e-9) == (mistake == "experts' gradients ep times too large"), mistake
