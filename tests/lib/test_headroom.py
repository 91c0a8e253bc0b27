"""Memory and disk that run out: a sentence with the numbers, soon, and the machine goes on."""

import contextlib
import errno
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from lib import comm
from lib.launch import HangError, RankError, RunError, run
from lib.runtime import headroom
from lib.runtime.headroom import MB, Memory
from tests.on_time import on_time

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timed("it measures what is left of memory, fills it, and says how soon that is known")

# ---- what the system tells ------------------------------------------------------------------------------------------

MEMINFO = (
    "MemTotal:       8000000 kB\nMemFree:          100000 kB\nMemAvailable:    6000000 kB\nHugePages_Total:       0\n"
)


def system(folder, groups: str = "", **files: int | str):
    """A /proc and a /sys/fs/cgroup with these files."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text(MEMINFO)
    (folder / "proc" / "self" / "cgroup").write_text(groups)
    for name, value in files.items():
        path = folder / "cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return headroom.system_memory(str(folder / "proc"), str(folder / "cgroup"))


def test_memory_of_a_machine(tmp_path):
    assert system(tmp_path) == Memory(8_192_000_000, 6_144_000_000)
    assert str(system(tmp_path / "again")) == "6.14 GB of 8.19 GB of memory are free"
    assert headroom.system_memory(str(tmp_path / "elsewhere")) is None


def v2(path, limit, used, cache):
    return {
        f"{path}memory_DOT_max": limit,
        f"{path}memory_DOT_current": used,
        f"{path}memory_DOT_stat": f"anon 5\ninactive_file {cache}",
    }


def v1(path, limit, used, cache):
    return {
        f"memory__{path}memory_DOT_limit_in_bytes": limit,
        f"memory__{path}memory_DOT_usage_in_bytes": used,
        f"memory__{path}memory_DOT_stat": f"inactive_file 1\ntotal_inactive_file {cache}",
    }


def test_memory_of_a_container_is_what_the_container_may_use(tmp_path):
    """A file cache is no use: the system would give it back."""
    found = system(tmp_path / "a", "0::/\n", **v2("", 2_000 * MB, 900 * MB, 200 * MB))
    assert found == Memory(2_000 * MB, 1_300 * MB)
    groups = "3:cpu:/x\n2:memory,hugetlb:/docker/7\n0::/\n"
    found = system(tmp_path / "b", groups, **v1("docker__7__", 2_000 * MB, 900 * MB, 0))
    assert found == Memory(2_000 * MB, 1_100 * MB)
    found = system(tmp_path / "c", groups, **v1("", 3_000 * MB, 900 * MB, 0))  # its own path is not to be seen inside
    assert found == Memory(3_000 * MB, 2_100 * MB)


def test_the_tightest_of_nested_containers_counts(tmp_path):
    files = v2("user__app__", "max", 10 * MB, 0) | v2("user__", 2_000 * MB, 500 * MB, 0)
    files |= v2("", 4_000 * MB, 600 * MB, 0)
    assert system(tmp_path / "a", "0::/user/app\n", **files) == Memory(2_000 * MB, 1_500 * MB)
    found = system(tmp_path / "b", "0::/\n", **v2("", 10**15, 600 * MB, 0))
    assert found == Memory(8_192_000_000, 6_144_000_000), "a limit beyond the machine is none"
    assert system(tmp_path / "c", "0::/\n", **v2("", 700 * MB, 800 * MB, 0)).free_bytes == 0


HOLDS = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    shared = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
assert sum(shared[:: mmap.PAGESIZE]) == 0
print("shares", flush=True)
input()
own = mmap.mmap(-1, 100_000_000)
for place in range(0, len(own), mmap.PAGESIZE):
    own[place] = 1
print("holds", flush=True)
input()
"""


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="only Linux tells what memory is left")
def test_a_process_holds_what_it_has_written_and_not_what_it_shares(tmp_path):
    """A process of its own, without torch: what this one's libraries hold changes with every neighbour."""
    memory = headroom.system_memory()
    assert 0 < memory.free_bytes < memory.total_bytes
    with open(tmp_path / "shared", "w+b") as file:
        file.write(bytes(50 * MB))
        file.flush()
        shared = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert sum(shared[:: mmap.PAGESIZE]) == 0  # here too, so that it is the child's alone at no moment
    command = [sys.executable, "-c", HOLDS, file.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "shares\n"
        before = headroom.held_bytes(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "holds\n"
        after = headroom.held_bytes(child.pid)
        child.stdin.write("\n")
    assert MB < before < 40 * MB, "Python's own, without the file"
    assert abs(after - before - 100 * MB) < MB
    assert headroom.held_bytes(child.pid) == 0, "a process that is gone holds nothing"


@pytest.mark.parametrize(
    ("total", "free", "floor"),
    [(24e9, 20e9, 1.2e9), (8e9, 6e9, 512e6), (12.7e9, 1e9, 250e6), (2e9, 1.2e9, 300e6), (8e9, 0, 0)],
)
def test_what_should_stay_free(total, free, floor):
    assert Memory(int(total), int(free)).floor_bytes() == pytest.approx(floor)


WORDS = {0: "0 bytes", 999: "999 bytes", 1000: "1 kB", 12_345_678: "12.3 MB", 123e9: "123 GB", 4e15: "4,000,000 GB"}


@pytest.mark.parametrize(("n", "said"), WORDS.items())
def test_bytes_in_words(n, said):
    assert headroom.size_text(n) == said


def test_which_errors_mean_a_full_disk(tmp_path, monkeypatch):
    assert headroom.is_full(OSError(errno.EFBIG, ""), str(tmp_path))
    assert not headroom.is_full(OSError(errno.ENOSPC, ""), str(tmp_path)), "another disk was full: this one has room"
    assert not headroom.is_full(OSError(errno.EACCES, ""), str(tmp_path))
    monkeypatch.setattr(headroom, "free_disk_bytes", lambda folder: 5)
    assert headroom.is_full(OSError(errno.ENOSPC, ""), str(tmp_path))


# ---- a rank eats memory ---------------------------------------------------------------------------------------------


def eats(world, least_bytes):
    """20 MB at a time, as one who appends to a list; it stops at `least_bytes`: the machine is safe in any case."""
    kept = []
    while world.rank == 1 and 20 * MB * len(kept) < least_bytes:
        kept.append(torch.ones(5 * MB))
        time.sleep(0.003)
    comm.barrier(world)
    return len(kept)


@pytest.fixture
def small_machine(monkeypatch):
    """It is said to have 1.2 GB free now; what is taken of it is really taken."""
    real = headroom.system_memory
    begin = real()
    if begin is None or begin.free_bytes < 6e9:
        pytest.skip("needs /proc/meminfo and 6 GB free")
    lacks = begin.free_bytes - 1200 * MB
    monkeypatch.setattr(headroom, "system_memory", lambda: Memory(8000 * MB, max(0, real().free_bytes - lacks)))


@pytest.mark.usefixtures("machine", "small_machine")
def test_a_rank_that_eats_memory_is_ended_and_named(capfd):
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(eats, 3, 3000 * MB)
    with on_time():
        assert time.monotonic() - began < 5
    said = str(caught.value)
    assert caught.value.rank == 1 and caught.value.error == "MemoryError"
    first, *rows = said.splitlines()
    assert first.startswith("rank 1 of 3 was ended before memory ran out: ")
    assert first.endswith(" MB of 8 GB of memory are free.")
    assert [row.split(" held ")[0] for row in rows[:3]] == ["  rank 0", "  rank 1", "  rank 2"]
    held = float(rows[1].split(" held ")[1].split()[0])
    assert 400 < held < 2500 and rows[1].endswith(" MB") or rows[1].endswith(" GB")
    assert rows[3] == "Use smaller tensors or fewer ranks."
    assert "test_headroom.py" in said and " in eats" in said, "where it was"
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("machine", "small_machine")
def test_a_rank_that_leaves_enough_is_left_alone():
    assert run(eats, 2, 200 * MB)[1] >= 10


@pytest.mark.thorough("each takes a second or more, alone")
@pytest.mark.usefixtures("machine")
def test_another_programs_appetite_ends_no_run(monkeypatch):
    """Ranks that hold little cannot help."""
    answers = iter([Memory(8000 * MB, 4000 * MB)])
    monkeypatch.setattr(headroom, "system_memory", lambda: next(answers, Memory(8000 * MB, 100 * MB)))

    def waits(world):
        time.sleep(0.5)
        return world.rank

    assert run(waits, 2) == [0, 1]


@pytest.mark.thorough("each takes a second or more, alone")
@pytest.mark.usefixtures("machine")
@pytest.mark.skipif(not os.path.exists("/proc/self/oom_score_adj"), reason="Linux only")
def test_if_memory_is_gone_at_once_the_system_ends_a_rank_and_not_the_notebook():
    def score(world):
        with open("/proc/self/oom_score_adj") as file:
            return int(file.read())

    with open("/proc/self/oom_score_adj") as file:
        assert int(file.read()) < 1000
    assert run(score, 2) == [1000, 1000]


# ---- large results --------------------------------------------------------------------------------------------------


@pytest.mark.thorough("each takes a second or more, alone")
@pytest.mark.usefixtures("machine")
def test_200_mb_come_back_bit_for_bit():
    def returns(world, seed):
        generator = torch.Generator().manual_seed(seed + world.rank)
        bits = torch.randint(-(2**63), 2**63 - 1, (25_000_000,), generator=generator)
        return {"bits": bits, "sum": bits.sum().item()}  # among them every kind of NaN, as float64

    began = time.monotonic()
    got = run(returns, 2, 7)
    with on_time():
        assert time.monotonic() - began < 15
    for rank, result in enumerate(got):
        wanted = returns(type("World", (), {"rank": rank}), 7)
        assert result["bits"].nbytes == 200_000_000
        assert torch.equal(result["bits"], wanted["bits"]) and result["sum"] == wanted["sum"]


@pytest.mark.usefixtures("machine")
def test_results_that_do_not_fit_in_memory_are_refused(monkeypatch):
    import lib.launch

    collect = lib.launch._collect

    def in_little_memory(folder, world_size):
        monkeypatch.setattr(headroom, "system_memory", lambda: Memory(8000 * MB, 60 * MB))
        return collect(folder, world_size)

    monkeypatch.setattr(lib.launch, "_collect", in_little_memory)
    says = r"the ranks returned 60 MB in all, too much for this process: 60 MB of 8 GB of .*are free. Return less"
    with pytest.raises(RunError, match=says):
        run(lambda world: torch.ones(10 * MB // 4 * (1 + world.rank)), 3)


# ---- a full disk ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path, monkeypatch, private_temp_folder):
    """A disk of 8 MB for temporary files."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    monkeypatch.undo()
    subprocess.run(["umount", "-l", tmp_path], check=True)  # lazily: a test that failed may hold a file there


SAYS = r"the folder for temporary files, {}, has ([\d.]+ [kM]?B|\d+ bytes) free, and {}. Delete files there, or set"


def returns_bytes(world, n_bytes):
    return torch.ones(n_bytes // 4) if world.rank == 1 else None


def prints_and_writes(world, folder):
    print("I was here")
    if world.rank == 1:
        time.sleep(0.3)  # what the other rank says is written
        with open(os.path.join(folder, "mine"), "wb") as file:
            file.write(bytes(100 * MB))


def fill(folder):
    with contextlib.suppress(OSError), open(os.path.join(folder, "mine"), "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def fills_and_prints(world, folder):
    if world.rank == 1:
        time.sleep(0.3)  # the other rank's result is written
        fill(folder)
        for _ in range(10_000):
            print("x" * 100)


def returns_when_it_is_full(world, folder):
    if world.rank == 1:
        fill(folder)
    while shutil.disk_usage(folder).free:
        time.sleep(0.01)


def fills_and_calls(world, folder):
    """The call table, a file in memory, can no longer grow."""
    if world.rank == 0:
        fill(folder)
    dist.barrier()
    for _ in range(1000):
        comm.all_reduce(torch.ones(2), world)


@pytest.mark.thorough("each takes a second or more, alone", keep=1)
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("fault", "argument", "what"),
    [
        (returns_bytes, 100 * MB, "the result takes 100 MB"),
        (prints_and_writes, None, "a write did not fit"),
        (fills_and_prints, None, "a write did not fit"),
    ],
)
def test_a_rank_fills_the_disk(fault, argument, what, tiny_disk, capsys):
    began = time.monotonic()
    with pytest.raises(RankError, match=SAYS.format(tiny_disk, what)) as caught:
        run(fault, 2, argument or str(tiny_disk))
    with on_time():
        assert time.monotonic() - began < 4
    assert re.match(r"rank 1 of 2 (returned a Tensor that cannot be sent|raised OSError)", str(caught.value))
    capsys.readouterr()
    (tiny_disk / "mine").unlink(missing_ok=True)
    assert not os.listdir(tiny_disk)
    assert run(lambda world: world.rank, 2) == [0, 1]


@pytest.mark.usefixtures("machine")
def test_not_a_byte_of_a_result_fits(tiny_disk, capsys):
    with pytest.raises(RankError, match=SAYS.format(tiny_disk, r"the result takes [\d.]+ (bytes|kB)")) as caught:
        run(returns_when_it_is_full, 2, str(tiny_disk))
    assert re.match(r"rank \d of 2 returned a NoneType that cannot be sent: ", str(caught.value))


@pytest.mark.usefixtures("machine")
def test_the_call_table_finds_no_room(tiny_disk):
    with pytest.raises(RankError, match=rf"killed by SIGBUS; .* in {tiny_disk}: is its disk full\? .* free"):
        run(fills_and_calls, 2, str(tiny_disk))


@pytest.mark.thorough("each takes a second or more, alone")
@pytest.mark.usefixtures("machine")
def test_a_hang_on_a_full_disk(tiny_disk):
    """The report would read parts of the table that nobody has written, and end this process."""

    def fills_and_waits(world, folder):
        if world.rank == 0:
            while not list(
                Path(folder).glob("*/result1")
            ):  # the other rank is through with what it writes, or nearly
                time.sleep(0.05)
            time.sleep(0.2)
            fill(folder)
            comm.recv(torch.ones(2), world, 1).wait()

    with pytest.raises(HangError, match=SAYS.format(tiny_disk, "the table of waiting ranks cannot be read")):
        run(fills_and_waits, 2, str(tiny_disk))


@pytest.mark.usefixtures("machine")
def test_a_disk_that_is_full_before(tiny_disk):
    (tiny_disk / "mine").write_bytes(bytes(7_500_000))
    with pytest.raises(RunError, match=SAYS.format(tiny_disk, "a run of 2 ranks needs 3 MB")):
        run(lambda world: None, 2)
    (tiny_disk / "mine").unlink()
    with pytest.raises(RunError, match=SAYS.format(tiny_disk, "the function and its arguments take 20 MB")):
        run(lambda world, x: None, 2, torch.ones(5 * MB))
    assert not os.listdir(tiny_disk)
    assert run(lambda world: world.rank, 2) == [0, 1]
