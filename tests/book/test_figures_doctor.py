"""What the doctor measured, and the traces of a run, as pages that need no other file."""

import json

import pytest

from book.figures.doctor import in_pixels, main
from lib.trace import CommEvent, Span, Trace
from tests.lib.test_kineto import nccl, written


def found(**more):
    """What `lib.doctor --json` writes of two ranks."""
    links = [{"from": a, "to": 1 - a, "seconds": 0.002 + a / 1e3} for a in (0, 1)]
    return {
        "ranks": [],
        "bytes": 2**20,
        "latency": [{"a": 0, "b": 1, "seconds": 50e-6}],
        "transfer": links,
        "compute": [{"rank": 0, "seconds": 0.001}, {"rank": 1, "seconds": 0.003}],
        "all_reduce": [],
        "findings": [],
    } | more


def page_of(tmp_path, data, capsys):
    path = tmp_path / "found.json"
    path.write_text(json.dumps(data))
    main([str(path)])
    assert capsys.readouterr().out == f"open {tmp_path / 'found.html'}\n"
    return (tmp_path / "found.html").read_text()


def test_an_examination(tmp_path, capsys):
    page = page_of(tmp_path, found(), capsys)
    assert "Nothing looks wrong." in page and "No rank is slow." in page
    assert (
        "The slowest link sends 350 MB/s, from rank 1 to rank 0." in page and "The longest latency is 50 µs." in page
    )
    wrong = [
        {"kind": "link", "ranks": [0, 1], "text": "the link <0>"},
        {"kind": "slow", "ranks": [1], "text": "rank 1 is slow"},
    ]
    page = page_of(tmp_path, found(findings=wrong), capsys)
    assert "<li>the link &lt;0&gt;</li>" in page and "Slow: rank 1." in page and "looks wrong" in page


def test_the_table_of_the_terminal_and_what_was_not_judged(tmp_path, capsys):
    text = "from \\ to    0    1\n   <0>    ·  600\nnot judged: rank speeds: busy machine"
    page = page_of(tmp_path, found(page=text, not_judged=["rank speeds: busy machine <vm>"]), capsys)
    assert "<pre>from \\ to    0    1\n   &lt;0&gt;    ·  600\n" in page
    assert "<li>rank speeds: busy machine &lt;vm&gt;</li>" in page and "No rank is slow" not in page
    assert "There was nothing to compare." in page_of(tmp_path, found(exit_code=2), capsys)


def test_an_examination_that_ended_before_it_measured(tmp_path, capsys):
    hang = {"ranks": [], "findings": [{"kind": "hang", "ranks": [1], "text": "the others wait for rank 1"}]}
    page = page_of(tmp_path, hang, capsys)
    assert "the others wait for rank 1" in page and "<svg" not in page


def test_traces(tmp_path, capsys):
    paths = written(tmp_path, nccl(0), nccl(1))
    main([*map(str, paths)])
    page = (tmp_path / "trace0.html").read_text()
    assert "Rank 0 waits 0.07 ms for rank 1." in page and "all_gather bfloat16" in page


def test_operators_without_a_gap_are_one_bar():
    spans = [Span(0, "compute", name, start, start + 0.9) for name, start in (("a", 0.0), ("b", 1.0), ("c", 50.0))]
    spans += [Span(1, "compute", "d", 0.0, 0.5), Span(0, "compute", "inside b", 1.1, 1.2)]
    event = CommEvent(0, "send", "world", (1,), 0, 0.0, "send", 0.0, 100.0)
    one = in_pixels(Trace([event], spans), pixels=700)
    assert [(s.rank, s.start_s, s.end_s) for s in one.spans] == [(0, 0.0, 1.9), (0, 50.0, 50.9), (1, 0.0, 0.5)]
    assert one.events == [event]


def test_what_is_neither(tmp_path, capsys):
    path = tmp_path / "no.json"
    path.write_text("{}")
    with pytest.raises(SystemExit) as end:
        main([str(path)])
    assert end.value.code == 2 and "is no trace of torch.profiler" in capsys.readouterr().err
