"""What a block keeps for backward on a rank, to the byte, against the formula."""

import copy
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from book.trials import saved
from lib import comm, run
from lib.cost.sizes import ModelShape
from lib.memory import MemoryTracker
from lib.model import Block, GPTConfig
from lib.tensor_parallel.gpt import tensor_parallel
from lib.tensor_parallel.linear import ColumnParallelLinear

ROWS, SIZES = 2, {"vocab_size": 8, "context": 12, "d_model": 24, "num_heads": 12}
FEW = {**SIZES, "num_heads": 4}
LLAMA = {**SIZES, "llama": True, "d_mlp": 36}
CASES = [
    {"dropout": dropout, "sequence_parallel": sequence_parallel, "recompute": recompute}
    for dropout in (False, True)
    for sequence_parallel in (False, True)
    for recompute in ("none", "selective", "full")
] + [
    {"fused": False},
    {"sequence_parallel": True, "regather": False},
    {"sequence_parallel": True, "regather": False, "dropout": True, "recompute": "selective"},
]
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def kept(
    block, x, group, recompute="none", dropout=False, sequence_parallel=False, itemsize=4, fused=True, regather=True
):
    """Bytes alive after forward without its result, and with the input; counted on rank 0."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # cannot be sent to ranks

    if group is not None:
        again = "selective" if recompute == "selective" else "none"
        block = tensor_parallel(copy.deepcopy(block), group, sequence_parallel, again)
        x = x.chunk(group.size, 1)[group.rank] if sequence_parallel else x
    for module in block.modules():
        if isinstance(module, ColumnParallelLinear):
            module.regather = regather
    block, x = block.to(DTYPES[itemsize]), x.to(DTYPES[itemsize]).clone().requires_grad_()
    memory = MemoryTracker(block)
    with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH), nullcontext() if group and group.rank else memory:
        y = checkpoint(block, x, use_reentrant=False) if recompute == "full" else block(x)
    if group is not None:
        comm.barrier(group)
        time.sleep(0.05)  # gloo's threads let go of a message a moment after it has arrived
    return memory.live["activation"] - y.nbytes


def block_of(config):
    torch.manual_seed(0)
    return Block(config), torch.randn(ROWS, config.context, config.d_model)


def on_ranks(world, itemsize, kv_heads, sizes=SIZES):
    out = []
    for case in CASES:
        config = GPTConfig(**sizes, num_kv_heads=kv_heads, dropout=0.2 if case.get("dropout") else 0.0)
        out.append(kept(*block_of(config), world, itemsize=itemsize, **case))
    return out


@pytest.mark.thorough("more ranks, sizes and kinds", keep=3)
@pytest.mark.parametrize(
    ("sizes", "n", "kv_heads", "itemsize"),
    [
        (SIZES, 1, None, 4),
        (LLAMA, 2, 4, 8),
        (FEW, 4, 2, 2),  # one head on a rank
        (FEW, 4, 2, 4),
        *((SIZES, n, None, 4) for n in (2, 3, 4)),
        *((SIZES, *case) for case in ((2, 4, 4), (4, 2, 4), (2, None, 2), (4, 2, 2), (2, None, 8))),
        *((LLAMA, *case) for case in ((4, 2, 4), (2, 4, 2))),
    ],
)
def test_a_parallel_block_keeps_what_the_formula_says(sizes, n, kv_heads, itemsize):
    shape = ModelShape.of(GPTConfig(**sizes, num_kv_heads=kv_heads))
    measured = run(partial(on_ranks, itemsize=itemsize, kv_heads=kv_heads, sizes=sizes), n)[0]
    predicted = [saved.block_saved_bytes(shape, ROWS, tp=n, itemsize=itemsize, **case) for case in CASES]
    assert dict(enumerate(measured)) == dict(enumerate(predicted)), CASES


@pytest.mark.thorough("more ranks, sizes and kinds", keep=18)
@pytest.mark.parametrize("sizes", [SIZES, LLAMA], ids=["GPT-2", "Llama"])
@pytest.mark.parametrize("kv_heads", [None, 4])
@pytest.mark.parametrize("itemsize", DTYPES)
@pytest.mark.parametrize(
    "case", [c for c in CASES if not c.get("sequence_parallel") and c.get("recompute") != "selective"]
)
def test_the_serial_block_keeps_what_the_formula_says_for_one_rank(case, itemsize, kv_heads, sizes):
    config = GPTConfig(**sizes, num_kv_heads=kv_heads, dropout=0.2 if case.get("dropout") else 0.0)
    measured = kept(*block_of(config), None, itemsize=itemsize, **case)
    assert measured == saved.block_saved_bytes(ModelShape.of(config), ROWS, itemsize=itemsize, **case)


def test_what_cannot_be_split():
    shape = ModelShape.of(GPTConfig(**SIZES))
    with pytest.raises(ValueError, match="12 heads and 12 tokens cannot be split over tp=8"):
        saved.block_saved_bytes(shape, ROWS, tp=8)
