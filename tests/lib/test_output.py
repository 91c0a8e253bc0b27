"""What ranks print: the first and the last lines, and a sentence between. No memory, disk or notebook fills up."""

import os
import re
import resource
import sys
import tempfile
import time
from pathlib import Path

import cloudpickle
import pytest

from lib.launch import RankError, run
from lib.runtime import output
from tests.on_time import on_time

cloudpickle.register_pickle_by_value(sys.modules[__name__])
MIB = 1 << 20
MOST_BYTES = 20_200  # that are shown of a rank


# ---- the files ------------------------------------------------------------------------------------------------------


def shown(folder: Path, *pieces: bytes, rank: int = 1) -> str:
    """What a run shows, in which only this rank has printed."""
    writer = output.Writer(str(folder / f"out{rank}"), rank)
    for piece in pieces:
        assert writer.write(memoryview(piece)) == len(piece)
    return "".join((folder / f"out{rank}{part}").read_bytes().decode() for part in ("", "end"))


@pytest.fixture(autouse=True)
def small(monkeypatch, request):
    """No more than 30 bytes, of which the label takes 9 in each line; in a rank the real limits count."""
    if "machine" not in request.fixturenames:
        monkeypatch.setattr(output, "FIRST_BYTES", 30)
        monkeypatch.setattr(output, "LAST_BYTES", 22)


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        ([], ""),
        ([b""], ""),
        ([b"a" * 21], "rank 1 | " + "a" * 21),
        ([b"a\nb", b"", b"c\n"], "rank 1 | a\nrank 1 | bc\n"),
        ([b"\n\na\r", b"\nb\n"], "\n\nrank 1 | a\r\nrank 1 | b\n"),
        ([b"a" * 25], "rank 1 | " + "a" * 21 + "a" * 4),
        ([b"%d\n" % i for i in range(5)], "".join(f"rank 1 | {i}\n" for i in range(5))),
        ([b"%d\n" % i for i in range(9)], "rank 1 | 0\nrank 1 | 1\nrank 1 | ... 6 bytes left out ...\n"
         + "".join(f"rank 1 | {i}\n" for i in range(5, 9))),
        ([b"".join(b"%d\n" % i for i in range(10))], "rank 1 | 0\nrank 1 | 1\nrank 1 | ... 12 bytes left out ...\n"
         "rank 1 | 8\nrank 1 | 9\n"),
        ([b"a" * 3000], "rank 1 | " + "a" * 21 + "\nrank 1 | ... 2.96 kB left out ...\nrank 1 | " + "a" * 22),
        (["é".encode() * 3000], "rank 1 | " + "é" * 10 + "\nrank 1 | ... 5.96 kB left out ...\nrank 1 | " + "é" * 11),
        ([b"a" * 12, b"b" * 3000 + b"\n"], "rank 1 | " + "a" * 12 + "b" * 9 + "\nrank 1 | ... 2.97 kB left out ...\n"
         "rank 1 | " + "b" * 21 + "\n"),
    ],
)  # fmt: skip
def test_the_first_lines_the_sentence_and_the_last_lines(pieces, wanted, tmp_path):
    assert shown(tmp_path, *pieces) == wanted


@pytest.mark.thorough("more ranks, sizes and kinds", keep=4)
@pytest.mark.parametrize("piece", [b"\n", b"x\n", b"x" * 1000, b"\xff\xfe", "∑".encode(), b"x\r", b"\r 10%", b"\r\n"])
@pytest.mark.parametrize("rank", [1, 63])
def test_of_no_flood_more_is_kept(piece, rank, tmp_path, monkeypatch):
    monkeypatch.undo()
    writer = output.Writer(str(tmp_path / "out"), rank)
    for _ in range(30_000):
        writer.write(piece)
    sizes = [(tmp_path / f"out{part}").stat().st_size for part in ("", "end")]
    assert 13_000 < sum(sizes) < MOST_BYTES
    (said,) = re.findall(rb"\.\.\. ([\d.]+) ([kM])B left out", (tmp_path / "outend").read_bytes())
    assert float(said[0]) * {b"k": 1e3, b"M": 1e6}[said[1]] > 30_000 * len(piece) - MOST_BYTES


def test_a_progress_bar_of_rank_0_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "BAR_BYTES", 2000)
    text = shown(tmp_path, b"begin\n", *[b"\r%3d%%" % i for i in range(100)], b"\nend\n", rank=0)
    assert (tmp_path / "out0").read_bytes().decode() == text and text.endswith("\rrank 0 |  99%\nrank 0 | end\n")
    assert "left out" in shown(tmp_path, *[b"\r%3d%%" % i for i in range(1000)], rank=0)


def test_the_other_ranks_begin_in_a_line_of_their_own(tmp_path, capsys):
    for rank in range(3):
        shown(tmp_path, b"a", b"b", rank=rank)
    reader = output.Reader(str(tmp_path), 4)
    reader.show_rank_0()
    assert capsys.readouterr().out == "rank 0 | ab"
    reader.show_all()
    assert capsys.readouterr().out == "\nrank 1 | ab\nrank 2 | ab"


# ---- in ranks -------------------------------------------------------------------------------------------------------


def disk_bytes(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.name.startswith(("out", "noise")))


def memory_bytes():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def a_million_lines(world, look):
    for i in range(1_000_000):
        print("step", i, "loss 0.1234")


def one_endless_line(world, look):
    piece = "x" * MIB
    for _ in range(200):
        print(piece, end="")


def past_python(world, look):
    """As a C library does it: nobody sees it, but it must not fill the disk."""
    piece = b"chatter\n" * (MIB // 8)
    for _ in range(200):
        os.write(1 + world.rank % 2, piece)
        time.sleep(0.002)
        look()


def speaks(world, fault, folder, speakers):
    """The rank, the most bytes on disk that it saw, and the memory that it took."""
    before, seen = memory_bytes(), []
    if world.rank in speakers:
        fault(world, lambda: seen.append(disk_bytes(folder)))
    return world.rank, max(seen, default=disk_bytes(folder)), memory_bytes() - before


@pytest.mark.thorough("a million lines")
@pytest.mark.timed("it measures memory, and how long much text takes")
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("fault", "within_s"), [(a_million_lines, 45), (one_endless_line, 5), (past_python, 5)])
@pytest.mark.parametrize("speakers", [(1,), (0, 2)])
def test_much_is_cut_and_the_result_still_comes(fault, within_s, speakers, capsys, private_temp_folder):
    before, began = memory_bytes(), time.monotonic()
    got = run(speaks, 3, fault, tempfile.gettempdir(), speakers)
    with on_time():
        assert time.monotonic() - began < within_s
    assert [rank for rank, *_ in got] == [0, 1, 2]
    for _, disk, memory in got:
        assert disk < 3 * MOST_BYTES + 100e6 * (fault is past_python)
        assert memory < 20e6
    assert memory_bytes() - before < 20e6
    out = capsys.readouterr().out
    assert len(out) < len(speakers) * MOST_BYTES
    if fault is past_python:
        assert out == ""
        return
    for rank in speakers:
        assert len(re.findall(rf"^rank {rank} \| \.\.\. [\d.]+ MB left out \.\.\.$", out, re.MULTILINE)) == 1
    if fault is a_million_lines:
        assert all(f"rank {rank} | step 0 loss" in out and f"rank {rank} | step 999999 " in out for rank in speakers)


@pytest.mark.usefixtures("machine")
def test_a_rank_that_is_killed_has_shown_its_last_lines(capsys):
    def speaks_and_dies(world):
        for i in range(100_000):
            print("step", i)
        os.kill(os.getpid(), 9)

    with pytest.raises(RankError, match="rank 0 of 1 was killed by SIGKILL"):
        run(speaks_and_dies, 1)
    out = capsys.readouterr().out
    assert (
        " left out ...\n" in out
        and len(out) < MOST_BYTES
        and out.startswith("rank 0 | step 0\n")
        and out.endswith("rank 0 | step 99999\n")
    )
