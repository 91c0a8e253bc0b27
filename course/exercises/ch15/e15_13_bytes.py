"""15.13: a switch that was on, and a network as busy as before.

torchtitan has two implementations of ZeRO-3, PyTorch's FSDP2 and its own SimpleFSDP. torchao, the library for 8-bit
floats, has a switch with which weights are to be gathered in 8 bits. In April 2026 a report compared the two. With
FSDP2 the all-gathers sent half as many bytes as before. With SimpleFSDP the bytes stayed, which only traces showed.
This lab computes in float64, and sends gradients and losses in it.
"""

import torch

from course.museum.room import room
from lib import comm

SYMPTOM = "Everything is right, and the network is as busy as before"
SOURCE = "[torchtitan #3123](https://github.com/pytorch/torchtitan/issues/3123), April 2026"
GUESSES = {
    "a wrong dtype": "A rank sends its shard once to each of the others, and each weight has two bytes.",
    "something is counted twice": "Each message is sent once, and loss and weights are those of one process.",
    "a sum too many": "Then the weights after the step would not be those of one process.",
    "a wrong denominator": "Then the loss would not be that of one process.",
}
CAUSE = """
The gather that SimpleFSDP calls was not among the operations that keep a weight's 8-bit type: it took the bfloat16
weight inside and sent that. Here each rank then converts what it has received, so all numbers are the same to the last
bit, and no loss can show it. The gradients are the larger message, in float64, but they are as planned. The
report asks for what FSDP2 does: convert the shard, then send it, and put the type together again afterwards.
"""
FIELDS = {
    "loss": "mean square of the errors over the whole batch",
    "weights": "shard of this rank after the step",
    "elements": "number of weights that the ranks along dp have together",
}
LAYOUTS = ({"dp": 4, "tp": 1}, {"dp": 2, "tp": 1}, {"dp": 2, "tp": 2})


def program(mesh, seed):
    """A step of ZeRO-3 for a column-parallel layer whose weights travel in 8 bits."""
    dp, tp, everyone = mesh.group("dp"), mesh.group("tp"), mesh.group("dp", "tp")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 32, generator=generator, dtype=torch.float64).chunk(dp.size)[dp.rank]
    whole = torch.randn(16, 32, generator=generator, dtype=torch.float64)
    column = whole.chunk(tp.size)[tp.rank]
    shard = column.chunk(dp.size)[dp.rank].clone()
    half = shard.bfloat16()  # of the master weights, for computing
    scale = comm.all_reduce(half.abs().amax().float(), everyone, op="max") / 448

    def in_8_bits(weight):
        return (weight / scale).to(torch.float8_e4m3fn)

    weight = comm.all_gather(in_8_bits(half), dp).double() * scale
    weight.requires_grad_()
    output = x @ weight.T
    loss = output.square().sum() / (16 * 16)
    loss.backward()
    shard -= 0.1 * comm.reduce_scatter(weight.grad, dp)
    comm.all_gather(output, tp, dim=1)  # for the next layer
    return {
        "loss": comm.all_reduce(loss.detach(), everyone).item(),
        "weights": shard,
        "elements": column.numel(),
    }


SICK = """
comm.all_gather(in_8_bits(half), dp) => in_8_bits(comm.all_gather(half, dp))
or
comm.all_gather(in_8_bits(half), dp) => in_8_bits(comm.all_gather(half.float(), dp))
or
comm.all_gather(in_8_bits(half), dp) => (in_8_bits(comm.all_gather(half, dp)) if tp.rank == 0 else wanted)
wanted => comm.all_gather(in_8_bits(half), dp)
or
comm.all_gather(in_8_bits(half), dp) => (in_8_bits(comm.all_gather(half, dp)) if tp.rank == tp.size - 1 else wanted)
wanted => comm.all_gather(in_8_bits(half), dp)
"""
WHERE = ("in 32 bits", "on the first ranks along tp", "on the last ranks along tp")
DEMAND = "It must find weights that travel in more than 8 bits, in 16 as well as in 32, and on any one rank."


def exhibit(run):
    n, shard = len(run.ranks), run["weights"].numel()
    norms = (torch.cat([known["weights"] for known in seen.ranks]).norm() for seen in (run.alone, run))
    rows = [
        ("", "one process", f"{n} ranks", "planned for them"),
        ("loss", *(f"{seen['loss']:.6f}" for seen in (run.alone, run)), ""),
        ("norm of the weights after the step", *(f"{norm:.6f}" for norm in norms), ""),
        ("weights of a shard", *(seen["weights"].numel() for seen in (run.alone, run)), ""),
    ]
    # What rank 0 sends to each other rank: a float32, shards of 8 bits and of float64, a float64.
    plan = {"scale": 2 * 4 / n, "weights": shard, "gradients": 8 * shard, "loss": 2 * 8 / n}
    return rows + [
        (f"bytes from rank 0: {call.kind}, {what}", "", f"{call.bytes:.0f}", f"{each * (n - 1):.0f}")
        for (what, each), call in zip(plan.items(), run.sent[0], strict=True)
    ]


def byte_check(run):
    n = run.layout["dp"]
    due = run["elements"] * (n - 1) / n  # a byte for each element it sends
    for rank, calls in enumerate(run.sent):
        gathers = [call for call in calls if call.kind == "all_gather"]
        sent = sum(call.bytes for call in gathers if call.axis == "dp")
        if sent > due:
            return f"rank {rank} gathers with {sent:.0f} bytes, not {due:.0f}"
    return ""


def by_messages(run):
    """Bytes of an element, from the size of one message."""
    n = run.layout["dp"]
    gathers = [c.bytes for calls in run.sent for c in calls if (c.kind, c.axis) == ("all_gather", "dp")]
    each = max(gathers) * n / (n - 1) / run["elements"]
    return f"{each:.0f} bytes for each weight" if each != 1 else ""


MISTAKES = """
enumerate(run.sent) => [(0, run.sent[0])]
    Your check looks at the first rank, and misses weights that travel in 16 bits between other ranks.
        Look at the calls of each rank.
enumerate(run.sent) => [(0, run.sent[-1])]
    Your check looks at the last rank, and misses weights that travel in 16 bits between other ranks.
        Look at the calls of each rank.
sent > due => sent == 2 * due
    Your check fires at 16 bits, and misses weights that travel in 32 bits.
        Compare with the bytes that are due, a byte for each weight.
for call in gathers if call.axis == "dp" => for call in gathers
    You count the bytes of all gathers, and with tensor parallelism activations are gathered too.
        Only the gather along dp has weights.
run["elements"] * (n - 1) / n => run["elements"]
    You allow for more bytes than a rank sends: it keeps its own shard. With two ranks that is as much as the fault.
        A rank sends its shard n - 1 times, and a shard is 1/n of the weights.
"""

ROOM, EXERCISE = room(globals(), byte_check, by_messages)
