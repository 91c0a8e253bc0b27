"""The doctor names the fault that was put in, and none where there is none.

Kind, place and strength of a fault are drawn. It is put in from outside: into the environment or the clock of a rank,
its messages (`comm.link`), its processor, or by a rank that never comes.
"""

import functools
import json
import os
import random
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lib import comm, run
from lib.doctor import exam, links, settings
from lib.doctor.__main__ import main
from lib.doctor.links import outliers
from lib.mesh import MeshShape
from lib.runtime.pending import Pending
from lib.torchrun.meeting import Member

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("DOCTOR_SEED", 0))
KINDS = ("link", "slow", "setting", "mismatch", "missing")  # as the doctor calls them
WRONG = ["NCCL_P2P_DISABLE=1", "CUDA_DEVICE_MAX_CONNECTIONS=1", "NCCL_ALGO=Tree", "OMP_NUM_THREADS=7"]
WRONG += ["TORCH_DISTRIBUTED_DEBUG=DETAIL", "GLOO_SOCKET_IFNAME=eth9"]


@dataclass(frozen=True)
class Fault:
    """What is wrong, on which of `size` ranks, and how much."""

    kind: str
    size: int
    ranks: tuple[int, ...] = ()
    strength: float | str = 0.0

    @classmethod
    def drawn(cls, kind, rng):
        size = rng.choice([3, 4])
        ranks = tuple(rng.sample(range(size), 2 if kind == "link" else 1))
        strengths = {
            "link": lambda: ("MB/s", rng.uniform(10, 200)) if rng.random() < 0.5 else ("ms", rng.uniform(3, 30)),
            "slow": lambda: (rng.choice(["computes", "answers"]), rng.uniform(0.002, 0.02)),
            "setting": lambda: rng.choice(WRONG),
            "mismatch": lambda: rng.choice(["float64", "float16", "int32"]),
            "missing": lambda: "",
        }
        return cls(kind, size, ranks, strengths[kind]())

    def is_named(self, findings):
        """Whether something of this kind is found at this place, and nothing elsewhere."""
        here = [one for one in findings if {*self.ranks} <= {*one["ranks"]} or {*one["ranks"]} <= {*self.ranks}]
        kinds = {one["kind"] for one in here if self.kind == "mismatch" or {*one["ranks"]} == {*self.ranks}}
        return self.kind in kinds and here == findings


def ill(fault, world, shape):
    """Examine ranks, one of which has a fault."""
    if world.rank in fault.ranks:
        {"link": slow_link, "slow": laggard, "setting": wrong, "mismatch": another_dtype, "clock": off}[fault.kind](
            fault
        )
    return exam.examined(world, shape)


def slow_link(fault):
    send, (unit, how) = comm.send, fault.strength
    how = {"bandwidth_Bps": how * 1e6} if unit == "MB/s" else {"bandwidth_Bps": 1e12, "alpha_s": how / 1e3}

    def slowed(x, group, dst):
        if {group.rank, dst} != {*fault.ranks}:
            return send(x, group, dst)
        with comm.link(**how):
            pending = send(x, group, dst)

        def finish():
            with comm.link(**how):
                return pending.wait()

        return Pending(finish)

    comm.send = slowed


def laggard(fault):
    does, sleep_s = fault.strength
    owner, name = (torch.Tensor, "__matmul__") if does == "computes" else (comm, "send")
    original = getattr(owner, name)

    def late(*args):
        time.sleep(sleep_s)
        return original(*args)

    setattr(owner, name, late)


def wrong(fault):
    name, value = fault.strength.split("=")
    os.environ[name] = value


def another_dtype(fault):
    original = comm.all_reduce
    comm.all_reduce = lambda x, group: original(x.to(getattr(torch, fault.strength)), group)


def off(fault):
    clock = time.time
    time.time = lambda: clock() + fault.strength


def examine(fault, monkeypatch):
    """The findings for ranks of this machine with this fault."""
    with monkeypatch.context() as patched:
        patched.setattr(exam, "examined", functools.partial(ill, fault))
        return exam.on_this_machine(MeshShape(dp=fault.size)).data()["findings"]


PATIENT = """
import os, sys, time
from lib.doctor import exam
exam.START_S = 10.0
who, does = sys.argv.pop(1), sys.argv.pop(1)
if os.environ["RANK"] == who and does == "missing":
    time.sleep(1000)
if os.environ["RANK"] == who:
    from lib import comm
    comm.barrier = lambda group: time.sleep(1000)
from lib.doctor.__main__ import main
main()
"""


def under_torchrun(fault, folder):
    """The findings for ranks of torchrun with this fault."""
    program, data = folder / "patient.py", folder / "found.json"
    program.write_text(PATIENT)
    command = (
        f"-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0 --nproc-per-node {fault.size}"
    )
    words = [sys.executable, *command.split(), str(program), str(fault.ranks[0]), fault.kind, "--json", str(data)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    return json.loads(data.read_text())["findings"]


def slow_messages(world):
    """Measure four ranks; each message that rank 3 sends is slow."""
    links.ROUNDS = 4
    with comm.link(bandwidth_Bps=60e6) if world.rank == 3 else nullcontext():
        return links.measure(world, MeshShape(dp=2, tp=2))


def test_a_group_is_done_when_its_last_rank_is():
    """The slow rank is the second of its groups, and the time is its time."""
    measured = run(slow_messages, 4)[0]
    seconds = {ranks: s for (_, ranks), s in measured.good("all_reduce").items()}
    slow_s = measured.size / 60e6
    slow, others = ([s for ranks, s in seconds.items() if (3 in ranks) is its] for its in (True, False))
    assert min(slow) > 0.9 * slow_s and max(others) < min(slow), seconds


# ---- a few faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault("link", 4, (1, 3), ("MB/s", 40.0)),
        Fault("slow", 3, (2,), ("computes", 0.01)),
        Fault("mismatch", 3, (1,), "int32"),
        Fault("setting", 2, (1,), "NCCL_P2P_DISABLE=1"),
    ],
    ids=lambda fault: fault.kind,
)
def test_a_fault_is_named(fault, monkeypatch):
    found = examine(fault, monkeypatch)
    assert fault.is_named(found), found


def test_healthy_ranks_and_what_the_page_and_the_file_say(tmp_path, capsys):
    path = tmp_path / "found.json"
    with pytest.raises(SystemExit) as end:
        main(["--ranks", "2", "--axes", "dp=2,tp=1", "--json", str(path)])
    page, data = capsys.readouterr().out, json.loads(path.read_text())
    assert end.value.code == 0 and data["findings"] == [] and "nothing looks wrong" in page
    assert {(one["from"], one["to"]) for one in data["transfer"]} == {(0, 1), (1, 0)}
    assert data["wall_s"] > 0.1, "counted from the start of the ranks"
    assert data["all_reduce"][0]["axis"] == "dp" and data["all_reduce"][0]["ranks"] == [0, 1]
    shown = f"{data['bytes'] / data['transfer'][0]['seconds'] / 1e6:.0f}"
    assert shown in page and f"all-reduce of {data['bytes'] >> 20} MiB" in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--axes", "dp=2,tp=2", "--ranks", "2"], "--axes dp=2,tp=2 needs 4 ranks, and there are 2"),
        (["--axes", "dp"], "--axes dp must be axes and their sizes, such as dp=2,tp=2"),
        (["--ranks", "65"], "must be between 1 and 64"),
    ],
)
def test_what_cannot_be_examined(words, says, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and says in capsys.readouterr().err


# ---- the judgement, without ranks -----------------------------------------------------------------------------------


def member(machine="a", files=None, **said):
    more = {"threads": "1", "cores": "8", "interfaces": "lo eth0"}
    return Member(f"node-{machine}", machine, settings=more | said, files=files or {})


@pytest.mark.parametrize(
    ("other", "kind", "says"),
    [
        (member(torch="2.8"), "setting", "torch is 2.8 on rank 2, and 2.9 on the others"),
        (member("b", {"comm.py": 2}), "code", "on node-b lib/comm.py is another than elsewhere, 1 files in all"),
        (member(cores="4"), "setting", "cores is 4 on rank 2, and 8 on the others"),
        (member(NCCL_IB_DISABLE="1"), "setting", "NCCL_IB_DISABLE=1 on rank 2: hosts then send over TCP"),
        (
            member("b", GLOO_SOCKET_IFNAME="wifi0"),
            "setting",
            "GLOO_SOCKET_IFNAME is wifi0 on rank 2, and node-b has no",
        ),
        (member("b", GLOO_SOCKET_IFNAME="=eth0"), "setting", "GLOO_SOCKET_IFNAME is =eth0 on rank 2"),
        (member("b", GLOO_SOCKET_IFNAME="^docker"), "setting", "GLOO_SOCKET_IFNAME is ^docker on rank 2"),
        (member("b", GLOO_SOCKET_IFNAME="eth"), "setting", "GLOO_SOCKET_IFNAME is eth on rank 2"),
        (member("b", NCCL_SOCKET_IFNAME="eth"), "", ""),
        (member("b", NCCL_SOCKET_IFNAME="=eth0,eth1"), "", ""),
        (member("b", NCCL_SOCKET_IFNAME="^docker"), "", ""),
        (member("b", cores="4"), "", ""),
    ],
)
def test_settings(other, kind, says):
    others = [member(files={"comm.py": 1}), member()]
    if "torch" in other.settings:
        others = [member(torch="2.9")] * 2
    found = settings.judge_settings(dict(enumerate([*others, other])))
    assert [(one.kind, one.ranks) for one in found] == ([(kind, (2,))] if kind else []), found
    assert not kind or says in found[0].text


def test_the_odd_one_may_be_rank_0():
    (found,) = settings.judge_settings(
        dict(enumerate([member(torch="2.8"), member(torch="2.9"), member(torch="2.9")]))
    )
    assert found.ranks == (0,) and found.text.startswith("torch is 2.8 on rank 0, and 2.9 on the others")


def measured(slow_pairs=(), slow_rank=None, ahead_s=None):
    """Made-up rounds of four ranks, two on each of two hosts; links between hosts take ten times as long."""
    seconds = {}
    for a, b in ((a, b) for a in range(4) for b in range(4) if a != b):
        usual_s = 1e-3 if a // 2 == b // 2 else 1e-2
        seconds["transfer", a, b] = [usual_s * (5 if (a, b) in slow_pairs else 1)] * 5
        if a < b:
            seconds["latency", a, b] = [usual_s / 10] * 5
    seconds |= {("compute", rank): [3e-3 if rank == slow_rank else 1e-3] * 5 for rank in range(4)}
    members = [member("ab"[rank // 2]) for rank in range(4)]
    return [(one.kind, one.ranks) for one in links.Measurement(seconds, ahead_s or {}, 2**20).judge(members)]


def test_a_link_is_compared_with_its_likes_and_a_rank_with_slow_links_is_slow():
    assert measured() == [], "links between hosts are slower than those within"
    assert measured([(0, 2)]) == [("link", (0, 2))] == measured([(2, 0), (0, 2)])
    assert measured([(1, 2), (1, 3)]) == [("link", (1, 2)), ("link", (1, 3))], "two of its three links"
    assert measured([(1, 2), (1, 3)], slow_rank=1) == [("slow", (1,))]
    assert measured(slow_rank=2) == [("slow", (2,))]
    assert measured(ahead_s={1: 0.001, 3: -2.0}) == [("clock", (3,))]


def test_threads_that_share_cores():
    busy = settings.judge_settings(dict(enumerate([member(threads="8"), member(threads="8")])))
    assert [one.text for one in busy] == ["16 threads of 2 ranks share the 8 cores of node-a: set OMP_NUM_THREADS=4"]
    assert not settings.judge_settings({rank: member(cores="2") for rank in range(4)}), "one thread each is the least"


def test_an_outlier_is_slow_even_in_its_good_rounds():
    usual = {key: [1.0, 1.1, 1.2, 9.0] for key in "abc"}
    assert outliers(usual | {"d": [1.0, 1.0, 9.0, 9.0, 9.0]}, 2) == {}, "its good rounds are as quick as the others'"
    assert outliers(usual | {"d": [3.0, 3.0, 3.0, 9.0]}, 2) == {"d": "3e+03 ms, and 1.15e+03 ms elsewhere"}
    assert outliers({"a": [1.0] * 4, "b": [9.0] * 4}, 2) == {}, "of two, which one is usual?"


def test_too_many_pairs_are_those_of_the_rings():
    assert len(links._pairs(MeshShape(dp=4, tp=4))) == 120
    assert len(links._pairs(MeshShape(dp=8, tp=4))) == 8 * 4 + 4 * 8
    assert (0, 28) in links._pairs(MeshShape(dp=8, tp=4)) and (0, 3) in links._pairs(MeshShape(dp=8, tp=4))


# ---- ten drawn faults, and ten healthy runs -------------------------------------------------------------------------


@pytest.mark.thorough("ten examinations")
@pytest.mark.slow("ten examinations")
def test_drawn_faults(monkeypatch, tmp_path, say):
    rng, named = random.Random(SEED), 0
    for i in range(10):
        fault = Fault.drawn(KINDS[i % len(KINDS)], rng)
        found = under_torchrun(fault, tmp_path) if fault.kind == "missing" else examine(fault, monkeypatch)
        named += (ok := fault.is_named(found))
        say(
            f"{'named' if ok else 'MISSED'}  {fault}\n"
            + "".join(f"    {one['text'].splitlines()[0]}\n" for one in found)
        )
    say(f"{named} of 10 drawn faults are named (seed {SEED})")
    assert named >= 9


@pytest.mark.thorough("ten examinations")
@pytest.mark.slow("ten examinations")
def test_healthy_runs(monkeypatch, say):
    found = [examine(Fault("none", 3 + i % 2), monkeypatch) for i in range(10)]
    say(f"{sum(map(bool, found))} of 10 healthy runs have a finding: {[one for one in found if one]}")
    assert not any(found)


@pytest.mark.thorough("a torchrun that waits")
def test_a_rank_that_the_others_wait_for(tmp_path):
    (found,) = under_torchrun(Fault("hang", 3, (1,)), tmp_path)
    assert found["kind"] == "hang" and found["ranks"] == [1]
    assert "the limit; the others wait for rank 1." in found["text"] and "rank 1 on " in found["text"]


@pytest.mark.thorough("a rank that is a second off")
def test_a_clock(monkeypatch):
    (found,) = examine(Fault("clock", 2, (1,), 1.5), monkeypatch)
    assert found["kind"] == "clock" and found["ranks"] == (1,) and "+1.50 s" in found["text"]
