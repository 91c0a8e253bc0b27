"""The numbers of a foreign program on two hosts: each writes to its own disk, and the files are compared together.

The two hosts are those of `hosts.py`.
"""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from lib.doctor.numbers import compare_numbers, read_numbers, start_from, watch
from tests.lib.hosts import ADDRESSES, ROOT

pytestmark = [
    pytest.mark.thorough("a torchrun on each of two hosts"),
    pytest.mark.slow("two torchruns, whose four processes import torch on two cores"),
]
# DDP over both hosts; with "sick" each rank divides by its own count of tokens.
PROGRAM = """
import socket, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from lib.doctor.numbers import watch

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
folder, sick = f"{sys.argv[1]}/disk-{socket.gethostname()}/{sys.argv[2]}", sys.argv[2] == "sick"
torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double()
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
seen = watch(folder, model, optimizer)
for step in range(2):
    tokens = torch.randint(9, (8, 6), generator=torch.Generator().manual_seed(step))
    tokens[:3, 2:] = 0  # padding, in some rows
    targets = torch.where(tokens == 0, -100, tokens)
    mine, count = slice(2 * rank, 2 * rank + 2), (targets != -100).sum()
    if sick:
        count = world * (targets[mine] != -100).sum()
    seen.batch(tokens[mine], targets[mine])
    logits = model(tokens[mine]).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, targets[mine].flatten(), reduction="sum") * world / count.double()
    optimizer.zero_grad()
    loss.backward()
    seen.backward(loss)
    optimizer.step()
dist.destroy_process_group()
"""


def of_one_process(folder, four):
    """The same steps in one process, from the recorded weights and batches."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double()
    batches = start_from(four, model, steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = watch(folder, model, optimizer)
    for x, y in batches:
        seen.batch(x, y)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        seen.backward(loss)
        optimizer.step()
    return read_numbers(folder)


@pytest.mark.hosts("a foreign program")
def test_a_foreign_program_on_two_hosts(hosts, tmp_path):
    (tmp_path / "foreign.py").write_text(PROGRAM)
    for kind in ("healthy", "sick"):
        both = [
            hosts.torchrun(host, f"{tmp_path}/foreign.py {tmp_path} {kind}", ranks=2, OMP_NUM_THREADS="1")
            for host in ADDRESSES
        ]
        assert [one.wait(180) for one in both] == [0, 0], hosts.said("node0")
        with pytest.raises(ValueError, match=r"has no file of rank \d: 2 of 4 ranks are there"):
            read_numbers(tmp_path / "disk-node0" / kind)
        for host in ADDRESSES:
            shutil.copytree(tmp_path / f"disk-{host}" / kind, tmp_path / kind, dirs_exist_ok=True)
    one = of_one_process(tmp_path / "one", tmp_path / "healthy")
    same = compare_numbers(one, read_numbers(tmp_path / "healthy"))
    assert same.exit_code == 0 and same.looked_at["updates"] == (3, 0)
    command = [sys.executable, "-m", "lib.doctor", "numbers", tmp_path / "one", tmp_path / "sick"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 1 and "the first link that differs is the loss" in said.stdout, said.stdout
    (found,) = compare_numbers(one, read_numbers(tmp_path / "sick")).findings
    assert found.cause == "wrong terms"
