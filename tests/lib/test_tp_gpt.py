"""The whole GPT in parts against the serial one: loss, gradients, steps, messages, what it stores, what it says."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from benchmarks.tensor_parallel import parallelized
from lib import cost, run, trace
from lib.model import GPT, Block, GPTConfig, mean_loss
from lib.placement import Shard, parts, unshard
from lib.tensor_parallel.gpt import tensor_parallel
from lib.tensor_parallel.linear import ColumnParallelLinear
from lib.verify import assert_matches_serial, largest_difference
from tests.lib.sharding import InParts, said
from tests.lib.sharding import serial as serial_gpt

SIZES = {"vocab_size": 24, "context": 12, "d_model": 24, "num_layers": 2, "num_heads": 12}
FORMS = [(False, "none"), (False, "selective"), (False, "full"), (True, "none"), (True, "selective"), (True, "full")]


LLAMA = {"llama": True, "d_mlp": 36}


def config_of(**more):
    return GPTConfig(**{**SIZES, **more})


def batch(config, rows=2):
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randint(config.vocab_size, (2, rows, config.context), generator=generator)
    y[0, :3] = -100
    return x, y


def gradients_apart(model, serial, world):
    wanted = {name: p.grad for name, p in serial.named_parameters(remove_duplicate=False)}
    got = {name: unshard(p.grad, how, world) for name, (p, how) in parts(model.model).items()}
    return largest_difference(got, wanted)


def one_step(world, config, sequence_parallel=False, recompute="none"):
    """How far loss, gradients, norm and clipped gradients are from the serial ones; each rank has its own seed."""
    model = InParts(serial_gpt(config, seed=world.rank), world, sequence_parallel, recompute)
    serial, losses = GPT(config).double(), []
    serial.load_state_dict(model.full_state_dict())
    x, y = batch(config)
    for one, loss_of in ((model, model.loss), (serial, mean_loss)):
        losses.append(loss_of(one(x), y))
        losses[-1].backward()
    model.finish()
    apart = [abs(losses[0] - losses[1]).item(), gradients_apart(model, serial, world)]
    norm = nn.utils.clip_grad_norm_(serial.parameters(), 0.01)
    return max(*apart, abs(model.clip_gradients(0.01) / norm - 1).item(), gradients_apart(model, serial, world))


@pytest.mark.thorough("many combinations of ranks and slices", keep=1)
@pytest.mark.parametrize(
    ("n", "kv_heads", "more"),
    [
        *((n, None, {"tied": tied}) for n in (1, 2, 3, 4) for tied in (True, False)),
        *((n, kv_heads, {}) for n, kv_heads in ((2, 4), (4, 4), (2, 2), (4, 2), (2, 1), (3, 1), (4, 1))),
        *((n, kv_heads, LLAMA) for n, kv_heads in ((2, 4), (3, None), (4, 2))),
        (2, 4, LLAMA | {"tied": True}),
    ],
)
def test_loss_and_every_gradient_are_the_serial_ones(n, kv_heads, more):
    """Also clipped by the norm of the whole, where several ranks have the same: norms, biases, keys and values."""

    def apart(world):
        return max(one_step(world, config_of(num_kv_heads=kv_heads, **more), *form) for form in FORMS)

    assert max(run(apart, n)) < 1e-13


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("more", [{}, LLAMA], ids=["GPT-2", "Llama"])
@pytest.mark.parametrize(("sequence_parallel", "again"), [(False, "none"), (True, "none"), (True, "full")])
def test_under_autocast(sequence_parallel, again, more):
    def apart(world):
        serial, (x, y) = serial_gpt(config_of(num_kv_heads=1, **more)).float(), batch(config_of())
        model, losses = InParts(serial, world, sequence_parallel, again), []
        for one, loss_of in ((model, model.loss), (serial, mean_loss)):
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(loss_of(one(x), y))
            losses[-1].backward()
        model.finish()
        return abs(losses[0] - losses[1]).item(), gradients_apart(model, serial, world)

    for loss, gradient in run(apart, 2):
        assert loss < 0.01 and gradient < 0.05


@pytest.mark.thorough("more ranks, sizes and kinds")
@pytest.mark.parametrize("more", [{}, LLAMA], ids=["GPT-2", "Llama"])
def test_a_block_alone_and_the_gradient_of_its_input(more):
    def equal(world):
        torch.manual_seed(0)
        block = Block(config_of(**more)).double()
        x = torch.randn(2, 12, 24).double()
        assert_matches_serial(block, tensor_parallel(copy.deepcopy(block), world), x, world, 1e-13)
        sliced = tensor_parallel(copy.deepcopy(block), world, sequence_parallel=True)
        block.zero_grad()
        assert_matches_serial(block, sliced, x, world, 1e-13, Shard(1), Shard(1))

    for n in (2, 3, 4):
        run(equal, n)


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("more", [{}, LLAMA], ids=["GPT-2", "Llama"])
def test_the_whole_state_comes_back(more):
    def there_and_back(world):
        serial = serial_gpt(config_of(num_kv_heads=2, **more))
        model = InParts(serial, world)
        state, wanted = model.full_state_dict(), serial.state_dict()
        same = list(state) == list(wanted) and all(torch.equal(state[name], wanted[name]) for name in wanted)
        local = sum(p.numel() for p in model.parameters())
        return same, local, sum(p.numel() for p in serial.parameters())

    (same, local, whole), *others = run(there_and_back, 4)
    assert same and local < 0.3 * whole + 2000 and all(ok for ok, *_ in others)


# ---- messages -------------------------------------------------------------------------------------------------------


def block_messages(
    world, sequence_parallel=False, recompute=None, regather=True, early_stop=True, size=(2, 12, 24), **more
):
    """{kind: calls}, and elements sent, of one block forward and backward."""
    rows, tokens, width = size
    torch.manual_seed(0)
    block = Block(config_of(d_model=width, context=tokens, **more))
    parallel = tensor_parallel(
        copy.deepcopy(block), world, sequence_parallel, "selective" if recompute == "selective" else "none"
    )
    for module in parallel.modules():
        if isinstance(module, ColumnParallelLinear):
            module.regather = regather
    length = tokens // world.size if sequence_parallel else tokens
    x = torch.randn(rows, length, width).requires_grad_()
    with trace.record(world.rank) as seen, set_checkpoint_early_stop(early_stop):
        if recompute == "full":
            y = torch.utils.checkpoint.checkpoint(parallel, x, use_reentrant=False)
        else:
            y = parallel(x)
        y.sum().backward()
    return {kind: calls for (kind, _), (calls, _) in seen.traffic().items()}, seen.wire_bytes / 4


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_messages_of_a_block(n):
    unit = (n - 1) / n * 2 * 12 * 24

    def seen(world):
        return [
            block_messages(world),
            block_messages(world, recompute="selective"),
            block_messages(world, recompute="full", early_stop=False),
            block_messages(world, recompute="full"),
            block_messages(world, sequence_parallel=True, regather=False),
            block_messages(world, sequence_parallel=True),
            block_messages(world, sequence_parallel=True, recompute="full", early_stop=False),
        ]

    for rank in run(seen, n):
        plain, selective, full, stops, kept, gathered, full_sliced = rank
        assert plain == selective == ({"all_reduce": 4}, pytest.approx(8 * unit))
        assert full == ({"all_reduce": 6}, pytest.approx(12 * unit))
        assert stops == ({"all_reduce": 5}, pytest.approx(10 * unit)), "nobody needs the last sum a second time"
        assert kept == ({"all_gather": 4, "reduce_scatter": 4}, pytest.approx(8 * unit))
        assert gathered == ({"all_gather": 6, "reduce_scatter": 4}, pytest.approx(10 * unit))
        assert full_sliced == ({"all_gather": 8, "reduce_scatter": 6}, pytest.approx(14 * unit))


def test_a_llama_sends_what_a_gpt2_sends():
    """Gate and up are one column layer, so they share the sum of the gradient of their input."""

    def seen(world):
        forms = ({}, {"sequence_parallel": True}, {"sequence_parallel": True, "recompute": "full"})
        return [[block_messages(world, **form, **more) for form in forms] for more in ({}, LLAMA)]

    gpt2, llama = run(seen, 4)[0]
    assert llama == gpt2


@pytest.mark.thorough("more ranks, sizes and kinds", keep=1)
@pytest.mark.parametrize("more", [{}, LLAMA], ids=["GPT-2", "Llama"])
def test_fewer_heads_of_keys_than_ranks_cost_one_sum_of_their_weight(more):
    def seen(world):
        block = Block(config_of(num_kv_heads=2, **more))
        x = torch.randn(2, 12, 24).requires_grad_()
        parallel = tensor_parallel(copy.deepcopy(block), world)
        with trace.record(world.rank) as seen:
            parallel(x).sum().backward()
        return sorted(e.payload_bytes // 4 for e in seen.events)

    weight, bias, x = 2 * 2 * 2 * 24, 2 * 2 * 2, 2 * 12 * 24  # heads, keys and values, d_head, d_model
    assert run(seen, 4)[0] == sorted([weight, x, x, x, x] + ([] if more else [bias]))
    assert run(seen, 2)[0] == [x] * 4, "where each rank has its own, nothing"


def test_whole_model():
    """Embedding, blocks, head, loss: what a microbatch sends, and what a step adds with slices."""

    def seen(world):
        out = []
        for sequence_parallel in (False, True):
            config = config_of()
            model = InParts(GPT(config), world, sequence_parallel)
            x, y = batch(config)
            with trace.record(world.rank) as seen:
                model.loss(model(x), y).backward()
                model.finish()
            sums = [e for e in seen.events if e.label.startswith("bucket")]
            sent = seen.wire_bytes - sum(e.wire_bytes for e in sums)
            out.append((sent, [(e.kind, e.payload_bytes) for e in sums]))
        return out

    n = 4
    (plain, nothing), (sliced, once) = run(seen, n)[0]
    config = config_of()
    x, tokens = 4 * 2 * 12 * 24, 4 * 2 * 12
    loss = cost.wire_bytes("all_reduce", tokens, n) + cost.wire_bytes("all_reduce", 2 * tokens, n)
    whole = cost.wire_bytes("all_reduce", x, n)
    assert plain == pytest.approx(loss + whole * (4 * config.num_layers + 2)) and nothing == []
    assert sliced == pytest.approx(loss + whole * (5 * config.num_layers + 2 + 0.5))
    norms, biases = 2 * (2 * config.num_layers + 1), 2 * config.num_layers
    assert once == [("all_reduce", 4 * 24 * (norms + biases + config.context))]


# ---- PyTorch's own --------------------------------------------------------------------------------------------------


@pytest.mark.thorough("up to four ranks", keep=1)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parallelize_module_agrees(n, sequence_parallel):
    def apart(world):
        config = config_of(tied=False)
        serial, (x, y) = serial_gpt(config), batch(config)
        ours = InParts(serial, world, sequence_parallel)
        theirs = parallelized(serial, world, sequence_parallel)
        for model, loss_of in ((ours, ours.loss), (theirs, mean_loss)):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                if model is ours:
                    model.finish()
                optimizer.step()
        return largest_difference(ours.full_state_dict(), theirs.full_state_dict())

    assert max(run(apart, n)) < 1e-8


# ---- wrong use ------------------------------------------------------------------------------------------------------

WRONG = {
    "heads": (config_of(num_heads=6), {}, "num_heads=6 cannot be split over tp=4; use a multiple of 4, such as 8"),
    "kv heads": (
        config_of(num_kv_heads=6),
        {},
        "num_kv_heads=6 cannot be split over tp=4, nor 4 ranks over 6 heads; use num_kv_heads=4, or tp=2",
    ),
    "gate and up": (config_of(llama=True, d_mlp=30), {}, "=30 cannot be split over tp=4"),
    "vocabulary": (config_of(vocab_size=26), {}, "vocabulary=26 cannot be split over tp=4"),
    "recompute": (config_of(), {"recompute": "all"}, "recompute='all' must be one of none, selective, full"),
    "sequence": (config_of(context=10), {"sequence_parallel": True}, "=10 cannot be split over tp=4"),
    "context": (config_of(), {}, "24 tokens do not fit context=12"),
}


def test_wrong_use_is_named():
    def wrong(world, case):
        config, options, _ = WRONG[case]
        length = 2 * config.context if case == "context" else config.context
        InParts(GPT(config), world, **options)(torch.zeros(1, length).long())

    texts = run(lambda world: [said(partial(wrong, world, case), ValueError) for case in WRONG], 4)[0]
    for text, (case, (*_, message)) in zip(texts, WRONG.items(), strict=True):
        assert message in text, case


def test_weights_tied_by_hand_stay_tied_and_shared_memory_is_refused():
    def tie(world):
        model = serial_gpt(config_of())
        first, second = model.blocks
        second.mlp.up.weight, second.mlp.down.bias = first.mlp.up.weight, first.mlp.down.bias
        twin, other = copy.deepcopy(model), copy.deepcopy(model)
        tensor_parallel(model, world)
        first, second = model.blocks
        names = [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]
        other.blocks[1].attention.out.weight.data = other.blocks[0].attention.out.weight.data
        shared = said(lambda: tensor_parallel(other, world), ValueError)
        twin.blocks[1].attention.out.bias = twin.blocks[0].attention.qkv.bias
        differs = said(lambda: tensor_parallel(twin, world), ValueError)
        return names and second.mlp.up.weight is first.mlp.up.weight, shared, differs

    for same, shared, differs in run(tie, 2):
        assert same and "attention.out.weight share memory" in shared and "sharded differently" in differs
