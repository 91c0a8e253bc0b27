"""Bytes worked out by hand, and PyTorch's own tracker as oracle. E is the size of an element in bytes."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from lib.data_parallel.zero import ZeRO1
from lib.memory import KINDS, MemoryTracker
from lib.mesh import Group
from lib.model import GPT, GPTConfig, loss_sum_and_count, mean_loss

DTYPES = [torch.float32, torch.float64]


pytestmark = pytest.mark.usefixtures("one_thread")


def usage(parameter=0, gradient=0, optimizer=0, activation=0) -> dict[str, int]:
    total = parameter + gradient + optimizer + activation
    return {
        "parameter": parameter, "gradient": gradient, "optimizer": optimizer, "activation": activation, "total": total
    }  # fmt: skip


def parameter_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_step_of_an_mlp_by_hand(dtype):
    E = dtype.itemsize
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    weights = (5 * 7 + 7 + 7 * 3 + 3) * E
    x = torch.randn(4, 5, dtype=dtype)
    with MemoryTracker(model, optimizer) as memory:
        assert memory.live == usage(parameter=weights)
        y = model(x)
        # x and relu(…) are saved for the weight gradients, relu(…) also for its own backward; y is held by us. What
        # goes into the relu is not needed again.
        assert memory.live == usage(weights, activation=(4 * 5 + 4 * 7 + 4 * 3) * E)
        loss = y.sum()
        loss.backward()
        assert memory.live == usage(weights, weights, activation=(4 * 5 + 4 * 3 + 1) * E)
        optimizer.step()
        states = 2 * weights + 4 * 4  # two moments, and a float32 step count for each of four tensors
        assert memory.live == usage(weights, weights, states, (4 * 5 + 4 * 3 + 1) * E)
        optimizer.zero_grad()
        del x, y, loss
        assert memory.live == usage(weights, 0, states, 0)
    assert memory.live == usage(weights, 0, states, 0)
    assert memory.peak_by_kind["gradient"] == weights
    assert memory.peak_by_kind["optimizer"] == states


def test_the_optimizer_of_a_wrapper_is_counted_with_it():
    model = ZeRO1(nn.Linear(5, 7), Group(), torch.optim.AdamW)
    weights = (5 * 7 + 7) * 4
    model(torch.ones(2, 5)).sum().backward()
    model.finish()
    model.step()
    alone = MemoryTracker(model).live
    assert alone == MemoryTracker(model, model.optimizer).live == MemoryTracker(nn.Sequential(model)).live
    assert alone == usage(weights, weights, 2 * weights + 2 * 4), "two moments, and a step count of each tensor"


def test_peak_and_timeline_by_hand():
    with MemoryTracker() as memory:
        a = torch.zeros(100, dtype=torch.uint8)
        b = torch.zeros(30, dtype=torch.uint8)
        del a
        c = torch.zeros(50, dtype=torch.uint8)
        d = b.double()  # 240
        del b
        e = c + 1
        del c, d
    assert [usage["total"] for _, usage in memory.timeline] == [0, 100, 130, 80, 320, 340, 50]
    assert memory.peak == usage(activation=340)
    times = [time_s for time_s, _ in memory.timeline]
    assert times == sorted(times) and 0 <= times[0] and times[-1] < 60
    del e
    assert memory.live == usage()


def gpt_and_batch(config: GPTConfig, dtype: torch.dtype, batch: int):
    torch.manual_seed(0)
    model = GPT(config).to(dtype)
    tokens, targets = torch.randint(config.vocab_size, (2, batch, config.context)).unbind()
    return model, tokens.clone(), targets.clone()


def block_activation_elements(config: GPTConfig, B: int) -> int:
    """What one block keeps for backward. All [B, T, D] unless said."""
    T, D, H = config.context, config.d_model, config.num_heads
    norm1 = 1 + 1  # its input, which is the block's; its output, for qkv's weight gradient
    attention = 3 + 1  # q, k, v; the attention's output, which is also the input of `out`
    norm2 = 1 + 1
    mlp = 4 + 4  # before and after the GELU, [B, T, 4·D]
    statistics = 2 * 2 * B * T + B * H * T  # mean and 1/std of each norm; log-sum-exp of each attention row
    return (norm1 + attention + norm2 + mlp) * B * T * D + statistics


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_activations_of_the_gpt_by_hand(dtype, tied, num_layers):
    E, B = dtype.itemsize, 3
    config = GPTConfig(vocab_size=101, context=12, d_model=24, num_layers=num_layers, num_heads=3, tied=tied)
    T, D, V = config.context, config.d_model, config.vocab_size
    model, tokens, targets = gpt_and_batch(config, dtype, B)
    with MemoryTracker(model) as memory:
        logits = model(tokens)
        tokens_and_positions = (B * T + T) * 8
        head = (2 * B * T * D + 2 * B * T) * E  # input and output of the last norm, its statistics
        saved = tokens_and_positions + num_layers * block_activation_elements(config, B) * E + head
        assert memory.live == usage(config.num_parameters * E, activation=saved + B * T * V * E)
        total, _ = loss_sum_and_count(logits, targets)
        del logits, _  # its log-softmax is as large, and saved; with it the summed weights and the loss, one element
        assert memory.live == usage(config.num_parameters * E, activation=saved + (B * T * V + 2) * E + B * T * 8)
        total.backward()
        weights = config.num_parameters * E
        assert memory.live == usage(weights, weights, activation=2 * B * T * 8 + E)


def test_checkpointing_keeps_only_the_blocks_inputs():
    config, B = GPTConfig(vocab_size=16, context=8, d_model=16, num_layers=4, num_heads=2), 2
    T, D = config.context, config.d_model
    model, tokens, _ = gpt_and_batch(config, torch.float32, B)
    x = model.embed(tokens)
    with MemoryTracker(model) as memory:
        y = x
        for block in model.blocks:
            y = checkpoint(block, y, use_reentrant=False, preserve_rng_state=False)
        assert memory.live["activation"] == (config.num_layers + 1) * B * T * D * 4
        y.sum().backward()
        del x, y, tokens
    assert memory.live == usage(parameter_bytes(model), memory.live["gradient"], 0, 0)


def oracle_kinds(snapshot: dict) -> dict[str, int]:
    by_name = {getattr(kind, "name", kind): size for kind, size in snapshot[torch.device("cpu")].items()}
    return {
        "parameter": by_name["PARAM"] + by_name["BUFFER"],
        "gradient": by_name["GRAD"],
        "optimizer": by_name["OPT"],
        "activation": by_name["ACT"] + by_name["TEMP"] + by_name["OTH"],
        "total": by_name["Total"],
    }


def two_steps(model: GPT, optimizer, tokens: torch.Tensor, targets: torch.Tensor, between) -> None:
    for _ in range(2):
        between()
        optimizer.zero_grad()
        loss = mean_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        del loss


@pytest.mark.thorough("more ranks, sizes and kinds", keep=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("batch", [1, 6])
def test_equals_pytorchs_own_tracker(dtype, tied, batch):
    config = GPTConfig(context=16, d_model=32, num_layers=2, tied=tied)
    model, tokens, targets = gpt_and_batch(config, dtype, batch)
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTracker(model, optimizer) as memory:
        two_steps(model, optimizer, tokens, targets, between=lambda: None)
    live = memory.live

    model, tokens, targets = gpt_and_batch(config, dtype, batch)
    optimizer = torch.optim.AdamW(model.parameters())
    oracle = MemTracker()
    oracle.track_external(model, optimizer, tokens, targets)
    with oracle:
        two_steps(model, optimizer, tokens, targets, between=oracle.reset_mod_stats)
    assert live == oracle_kinds(oracle.get_tracker_snapshot("current"))
    theirs = oracle_kinds(oracle.get_tracker_snapshot("peak"))
    assert memory.peak["total"] == theirs["total"]
    if batch == 6 or tied:  # the peak is in backward
        assert memory.peak == theirs
        assert min(memory.peak[kind] for kind in ("parameter", "optimizer", "activation")) > 0
    else:  # the peak is in the optimizer's step, whose temporaries the oracle counts as its state and we do not
        assert memory.peak["optimizer"] == live["optimizer"] < theirs["optimizer"]
        moved = theirs["optimizer"] - memory.peak["optimizer"]
        assert memory.peak == {**theirs, "optimizer": live["optimizer"], "activation": theirs["activation"] + moved}


def test_gradients_that_are_views_of_one_bucket():
    model = nn.Linear(5, 3)
    bucket = torch.zeros(20)  # 18 used, 2 of padding
    with MemoryTracker(model) as memory:
        model.weight.grad = bucket[:15].view(3, 5)
        model.bias.grad = bucket[15:18]
        assert memory.live == usage(18 * 4, 20 * 4)
        model(torch.ones(2, 5)).sum().backward()  # adds into the bucket
        assert memory.live == usage(18 * 4, 20 * 4)
        assert bucket[:18].all()
        model.zero_grad()
        assert memory.live == usage(18 * 4, activation=20 * 4)  # nobody's gradient any more, yet still there


def test_parameters_that_are_views_of_a_flat_buffer_that_comes_and_goes():
    model = nn.Linear(5, 3)
    shard = torch.arange(10.0)
    with MemoryTracker(model) as memory:
        memory.count_as("parameter", shard)
        optimizer = torch.optim.SGD([nn.Parameter(shard[:6])])
        memory.watch(optimizer)  # the first kind that fits counts
        assert memory.live == usage(18 * 4 + 10 * 4)
        flat = torch.zeros(20)
        model.weight.data, model.bias.data = flat[:15].view(3, 5), flat[15:18]
        assert memory.live == usage(20 * 4 + 10 * 4)
        flat.untyped_storage().resize_(0)
        assert memory.live == usage(10 * 4)
        flat.untyped_storage().resize_(80)
        assert memory.live == usage(20 * 4 + 10 * 4)
        nobodys = torch.zeros(7)
        nobodys.untyped_storage().resize_(0)
        assert memory.live == usage(20 * 4 + 10 * 4)
    assert memory.peak["total"] == 18 * 4 + 10 * 4 + 20 * 4  # as the flat buffer came, before the old weights went


def test_a_parameter_stays_one_while_another_stands_in_for_it():
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters())
    with MemoryTracker(model, optimizer) as memory:
        shard, model.weight = model.weight, nn.Parameter(torch.zeros(3, 5))
        assert memory.live == usage(2 * 15 * 4 + 3 * 4)
        shard.grad = torch.zeros(3, 5)
        assert memory.live == usage(2 * 15 * 4 + 3 * 4, 15 * 4)
        model.weight = shard
        assert memory.live == usage(15 * 4 + 3 * 4, 15 * 4)


def test_told_kinds_end_with_their_storage():
    tracker = MemoryTracker()
    with tracker as memory:
        for _ in range(20):  # an id that comes again must not inherit what was said of the one before
            mine = torch.zeros(6)
            memory.count_as("gradient", mine, mine[2:])
            assert memory.live == usage(gradient=24)
            del mine
            other = torch.zeros(6)
            assert memory.live == usage(activation=24)
            del other
    with pytest.raises(ValueError, match="no kind 'weights'; use one of parameter, gradient, optimizer, activation"):
        memory.count_as("weights", torch.zeros(1))


def test_tied_frozen_and_buffers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight
            self.norm = nn.BatchNorm1d(4)
            self.norm.weight.requires_grad_(False)

    model = Net()
    with MemoryTracker(model) as memory:
        buffers = (4 + 4) * 4 + 8  # running mean and variance, and the number of batches
        weights = (7 * 4 + 4 + 4) * 4 + buffers
        assert memory.live == usage(weights)
        model.head(model.norm(model.embed(torch.arange(7)))).sum().backward()
        assert memory.live == usage(weights, (7 * 4 + 4) * 4)


def test_master_weights_that_only_the_optimizer_holds():
    model = nn.Linear(5, 3).bfloat16()
    master = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(master, momentum=0.9)
    with MemoryTracker(model, optimizer) as memory:
        assert memory.live == usage(18 * 2, optimizer=18 * 4)
        for p in master:
            p.grad = torch.ones_like(p)
        assert memory.live == usage(18 * 2, 18 * 4, 18 * 4)
        optimizer.step()
        assert memory.live == usage(18 * 2, 18 * 4, 2 * 18 * 4)


def test_state_in_lists():
    model = nn.Linear(10, 10)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 10)).square().sum()
        loss.backward()
        return loss

    with MemoryTracker(model, optimizer) as memory:
        for _ in range(3):
            optimizer.step(closure)
    lists = [x for value in optimizer.state[model.weight].values() if isinstance(value, list) for x in value]
    kept = [x for x in lists if isinstance(x, torch.Tensor) and x.numel() > 1]
    assert len(kept) >= 2 and memory.live["optimizer"] >= sum(x.nbytes for x in kept)


def test_gradients_of_plain_sgd_are_seen_though_nothing_is_allocated_after_them():
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryTracker(model, optimizer) as memory:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
    assert memory.peak_by_kind["gradient"] == 18 * 4
    assert memory.peak_by_kind["optimizer"] == 0


def test_accumulation_keeps_one_gradient_and_a_passing_one():
    model = nn.Linear(500, 3, bias=False)
    x = torch.ones(1, 500)
    with MemoryTracker(model) as memory:
        model(x).sum().backward()
        memory.reset_peak()
        assert memory.peak["total"] == 3 * 500 * 4 * 2 + 500 * 4
        model(x).sum().backward()
        assert memory.live["gradient"] == 3 * 500 * 4
    assert memory.peak["total"] >= 3 * 500 * 4 * 3 + 500 * 4
    assert memory.peak_by_kind["gradient"] == 3 * 500 * 4


def test_views_and_in_place_operations_cost_nothing():
    x = torch.zeros(10, 10)
    with MemoryTracker() as memory:
        y = x.t()[2:, 3].view(-1).detach()
        x.add_(1).relu_()
        y.mul_(2)
        assert memory.live == usage(activation=400)
        z = y + 0
        assert memory.live == usage(activation=400 + 8 * 4)
        del x, y
        assert memory.live == usage(activation=8 * 4)
        del z
        assert memory.live == usage()


def test_the_tracker_keeps_nothing_alive():
    model = GPT(GPTConfig(context=8, d_model=16, num_layers=1))
    optimizer = torch.optim.AdamW(model.parameters())
    memory = MemoryTracker(model, optimizer)
    with memory:
        activation = model.embed(torch.zeros(1, 8, dtype=torch.long))
        activation.sum().backward()
        optimizer.step()
    dying = [
        weakref.ref(thing) for thing in (model, optimizer, activation, model.embed.token.weight.untyped_storage())
    ]
    del model, optimizer, activation
    gc.collect()
    assert [ref() for ref in dying] == [None] * 4
    assert memory.live == usage()
    assert memory.peak["parameter"] > 0


def test_phases_have_their_own_peaks():
    with MemoryTracker() as memory:
        kept = torch.zeros(10)
        with memory.phase("first"):
            torch.zeros(100)
            with memory.phase("inner") as inner:
                torch.zeros(5)
        with memory.phase("second"):
            torch.zeros(20)
        del kept
    assert [phase.name for phase in memory.phases] == ["inner", "first", "second"]
    assert [phase.peak["activation"] for phase in memory.phases] == [15 * 4, 110 * 4, 30 * 4]
    assert memory.phases[0] is inner
    first, second = memory.phases[1:]
    assert first.start_s <= inner.start_s <= inner.end_s <= first.end_s <= second.start_s <= second.end_s
    assert memory.peak["total"] == 110 * 4


def test_it_can_be_entered_again_and_left_by_an_error():
    memory = MemoryTracker()
    with pytest.raises(KeyError), memory:
        a = torch.zeros(10)
        with memory.phase("fails"):
            raise KeyError
    assert [phase.name for phase in memory.phases] == ["fails"]
    b = torch.zeros(1000)
    assert memory.live == usage(activation=40)  # b was made outside
    with memory:
        memory.reset_peak()
        a.add_(b[:10])
        assert memory.live == usage(activation=4040)
    assert memory.peak == usage(activation=4040)


def test_models_made_inside():
    with MemoryTracker() as memory:
        model = nn.Linear(5, 3)
        assert memory.live == usage(activation=72)
        memory.watch(model, torch.optim.SGD(model.parameters()))
        assert memory.live == usage(parameter=72)
    with pytest.raises(TypeError, match="Tensor is neither a model nor an optimizer; for tensors use count_as"):
        memory.watch(torch.zeros(1))


def test_wrappers_count_what_they_wrap_and_sparse_gradients_do_no_harm():
    with MemoryTracker() as memory:
        pair = TwoTensor(torch.zeros(10), torch.zeros(10))
        assert memory.live == usage(activation=80)
        double = pair * 2
        assert memory.live == usage(activation=160)
        assert memory.timeline[-2][1] == usage(activation=120)  # after the first of the two operations inside
        del pair, double
        model = nn.Module()
        model.weight = nn.Parameter(TwoTensor(torch.zeros(10), torch.zeros(10)))
        memory.watch(model)
        assert memory.live == usage(parameter=80)
        (model.weight * 2).sum().backward()
        assert memory.live == usage(80, 80)
        del model
        model = nn.Embedding(4, 2, sparse=True)
        memory.watch(model)
        model(torch.tensor([1])).sum().backward()
        assert model.weight.grad.is_sparse and memory.live["parameter"] == 32


def test_tensors_without_memory_are_not_counted():
    with MemoryTracker() as memory:
        x = torch.zeros(10, device="meta")
        assert (x + 1).shape == (10,)
        with FakeTensorMode():
            y = torch.zeros(10) + 1
        assert y.shape == (10,) and (y + y).shape == (10,)
        assert memory.live == memory.peak == usage()


def test_kinds_add_up_to_the_total_at_every_moment():
    model, tokens, targets = gpt_and_batch(GPTConfig(context=8, d_model=16, num_layers=1), torch.float32, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTracker(model, optimizer) as memory:
        two_steps(model, optimizer, tokens, targets, between=lambda: None)
    for _, moment in memory.timeline:
        assert sum(moment[kind] for kind in KINDS) == moment["total"]
        assert min(moment.values()) >= 0
    assert memory.peak["total"] == max(moment["total"] for _, moment in memory.timeline)
    assert memory.peak_by_kind == {k: max(moment[k] for _, moment in memory.timeline) for k in (*KINDS, "total")}
