"""What ranks print: each its share and the last lines, and a sentence at the cut. No memory or disk fills up."""

import os
import resource
import sys
import time
from pathlib import Path

import cloudpickle
import pytest

from lib.launch import RankError, run
from lib.runtime import output

cloudpickle.register_pickle_by_value(sys.modules[__name__])
MIB = 1 << 20


# ---- the file -------------------------------------------------------------------------------------------------------


def write(folder: Path, *pieces: bytes, most_bytes: int = 30) -> str:
    writer = output.Writer(str(folder / "out0"), most_bytes, "rank 0")
    for piece in pieces:
        assert writer.write(memoryview(piece)) == len(piece)
    writer.finish()
    return (folder / "out0").read_text()


CUT = "... cut here: rank 0 has printed 30 bytes, its share ...\n"


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        ([], ""),
        ([b"a" * 30], "a" * 30),
        ([b"a\n" * 15, b""], "a\n" * 15),
        ([b"a\n" * 15, b"b\n"], "a\n" * 15 + CUT + "... 0 bytes left out; the last lines: ...\nb\n"),
        ([b"a" * 28 + b"\n", b"bcd\n"], "a" * 28 + "\n" + CUT + "... 0 bytes left out; the last lines: ...\nbcd\n"),
        ([b"line\n" * 5 + b"more than fits\n"], "line\n" * 5 + CUT + "... 0 bytes left out; the last lines: ...\n"
         "more than fits\n"),
        ([b"a" * 30, b"b"], "a" * 30 + "\n" + CUT + "... 0 bytes left out; the last lines: ...\nb"),
        ([b"a" * 3000], "a" * 30 + "\n" + CUT + "... 970 bytes left out; the last lines: ...\n" + "a" * 2000),
        ([b"first\n", *[b"x" * 99 + b"\n"] * 100], "first\n" + CUT
         + "... 8.1 kB left out; the last lines: ...\n" + ("x" * 99 + "\n") * 19),
    ],
)  # fmt: skip
def test_the_share_the_sentence_and_the_last_lines(pieces, wanted, tmp_path):
    assert write(tmp_path, *pieces) == wanted


def test_ranks_share_what_a_notebook_can_hold():
    assert [output.shares(n) for n in (1, 4, 64)] == [4_000_000, 1_000_000, 62_500]


# ---- in ranks -------------------------------------------------------------------------------------------------------


def disk_bytes(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.name.startswith(("out", "noise")))


def memory_bytes():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def a_million_lines(world, folder, speakers):
    before = memory_bytes()
    if world.rank in speakers:
        for i in range(1_000_000):
            print("step", i, "loss 0.1234")
    return world.rank, disk_bytes(folder), memory_bytes() - before


def one_endless_line(world, folder, speakers):
    before, piece = memory_bytes(), "x" * MIB
    if world.rank in speakers:
        for _ in range(200):
            print(piece, end="")
    return world.rank, disk_bytes(folder), memory_bytes() - before


def past_python(world, folder, speakers):
    """As a C library does it: nobody sees it, but it must not fill the disk."""
    before, piece, most = memory_bytes(), b"chatter\n" * (MIB // 8), 0
    if world.rank in speakers:
        for _ in range(200):
            os.write(1 + world.rank % 2, piece)
            time.sleep(0.002)
            most = max(most, disk_bytes(folder))
    return world.rank, most, memory_bytes() - before


@pytest.mark.thorough("a million lines", keep=1)
@pytest.mark.timed("it measures memory, and how long much text takes")
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("fault", "within_s"), [(a_million_lines, 45), (one_endless_line, 5), (past_python, 5)])
@pytest.mark.parametrize("speakers", [(1,), (0, 2)])
def test_much_is_cut_and_the_result_still_comes(fault, within_s, speakers, capsys, private_temp_folder):
    import tempfile

    before, began = memory_bytes(), time.monotonic()
    got = run(fault, 3, tempfile.gettempdir(), speakers)
    assert time.monotonic() - began < within_s
    assert [rank for rank, *_ in got] == [0, 1, 2]
    for _, disk, memory in got:
        assert disk < output.MOST_BYTES + (100e6 if fault is past_python else 1e5)
        assert memory < 20e6
    assert memory_bytes() - before < 12 * output.MOST_BYTES
    out = capsys.readouterr().out
    assert len(out) < 1.5 * output.MOST_BYTES
    if fault is past_python:
        assert out == ""
        return
    for rank in speakers:
        assert out.count(f"rank {rank} | ... cut here: rank {rank} has printed 1.33 MB, its share ...\n") == 1
    assert out.count(" left out; the last lines: ...\n") == len(speakers)
    if fault is a_million_lines:
        assert all(f"rank {rank} | step 0 loss" in out and f"rank {rank} | step 999999 " in out for rank in speakers)


@pytest.mark.usefixtures("machine")
def test_the_error_after_many_lines_is_still_the_error(capsys):
    def speaks_and_fails(world):
        for i in range(200_000):
            print("step", i)
        if world.rank == 1:
            raise ValueError("after all that")
        print("the end")

    with pytest.raises(RankError, match="after all that"):
        run(speaks_and_fails, 2)
    out = capsys.readouterr().out
    assert "rank 1 | ... cut here: " in out and "rank 1 | step 199999\n" in out


@pytest.mark.usefixtures("machine")
def test_a_rank_that_is_killed_has_shown_its_share(capsys):
    def speaks_and_dies(world):
        for i in range(500_000):
            print("step", i)
        os.kill(os.getpid(), 9)

    with pytest.raises(RankError, match="rank 0 of 1 was killed by SIGKILL"):
        run(speaks_and_dies, 1)
    assert capsys.readouterr().out.endswith("\nrank 0 | ... cut here: rank 0 has printed 4 MB, its share ...\n")
