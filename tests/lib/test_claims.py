"""Claims that hold, claims that fail, and that the chapters' own claims notice when a counter is off."""

import json
import math
import os
from importlib import metadata
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
import torch

from lib import claim
from lib.lab import claims
from lib.lab.claims import ClaimError, number

ROOT = Path(__file__).resolve().parents[2]
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def no_file(monkeypatch):
    monkeypatch.delenv("BOOK_CLAIMS", raising=False)
    monkeypatch.setenv("INSIST_ON_TIME", "1")


def holds(*args, **kwargs):
    try:
        claim("it", *args, **kwargs)
    except ClaimError:
        return False
    return True


def test_exact_means_exact():
    assert holds(3, 3) and holds(3, 3.0) and holds(1, True) and holds(0, -0.0)
    assert holds(torch.tensor(2.0), torch.tensor([2.0])) and holds(np.float32(0.5), np.int64(1) / 2)
    assert not holds(3, 4) and not holds(0, 1e-300)
    assert not holds(0.1, math.nextafter(0.1, 1))
    assert not holds(2**53, 2**53 + 1) and holds(2**70, 2**70)  # no float tells these two apart
    assert not holds(2**53, torch.tensor(2**53 + 1))


def test_tolerances_add_up():
    assert holds(100, 101, rel=0.01) and holds(-100, -101, rel=0.01) and holds(100, 101, abs=1)
    assert holds(100, 102, rel=0.01, abs=1)
    assert not holds(100, 101.1, rel=0.01) and not holds(100, 102.1, rel=0.01, abs=1)
    assert not holds(0, 1e-9, rel=0.5)  # relative to the prediction, which is 0


def test_bounds():
    assert holds(3, 3, relation="<=") and holds(3, 2, relation="<=") and not holds(3, 3.1, relation="<=")
    assert holds(3, 3, relation=">=") and holds(3, 4, relation=">=") and not holds(3, 2.9, relation=">=")
    assert holds(3, 3.1, relation="<=", abs=0.2) and holds(3, 2.9, relation=">=", rel=0.1)


@pytest.mark.parametrize("relation", ["=", "<=", ">="])
@pytest.mark.parametrize(
    "pair", [(NAN, 1), (1, NAN), (NAN, NAN), (INF, 1), (1, INF), (-INF, 1), (1, -INF), (INF, INF)]
)
def test_nothing_holds_for_nan_or_infinity(pair, relation):
    assert not holds(*pair, relation=relation, rel=0.5, abs=1)


def test_wrong_use():
    for relation in ("<", "==", "≤", ""):
        with pytest.raises(ValueError, match="must be one of =, <=, >="):
            claim("it", 1, 1, relation=relation)
    for tolerance in (-1e-9, NAN, INF):
        with pytest.raises(ValueError, match="finite and not below 0"):
            claim("it", 1, 1, rel=tolerance)
        with pytest.raises(ValueError, match="finite and not below 0"):
            claim("it", 1, 1, abs=tolerance)


def test_a_function_is_measured_up_to_five_times_with_pauses(monkeypatch):
    slept = []
    monkeypatch.setattr(claims.time, "sleep", slept.append)

    def after(*values):
        left = list(values)
        return (lambda: left.pop(0)), left

    measure, left = after(1, 7)
    assert holds(1, measure) and left == [7]  # it holds: not measured again
    measure, left = after(9, 9, 1, 7)
    assert holds(1, measure) and left == [7]
    slept.clear()
    measure, left = after(9, 9, 9, 9, 9, 1)
    assert not holds(1, measure) and left == [1]
    assert slept == [0, 0, 2, 4, 8]
    with pytest.raises(ZeroDivisionError):
        claim("it", 1, lambda: 1 / 0)


def test_a_time_that_never_holds_fails_only_where_the_machine_must_be_quiet(monkeypatch, capsys):
    monkeypatch.setattr(claims.time, "sleep", lambda _: None)
    monkeypatch.setattr(claims, "_pauses_s", claims.PAUSES_S)
    monkeypatch.delenv("INSIST_ON_TIME", raising=False)
    tries = []
    claim("first", 1, lambda: tries.append(1) or 9, unit="s")
    claim("second", 1, lambda: tries.append(2) or 9, unit="s")
    assert tries == [1] * 5 + [2] * 2, "once it is known that the machine is busy, it is tried less often"
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "first  1 s  9 s  not measured here: the machine was busy"
    for never in (9, NAN):  # a value, a count, a number of bytes; and a time that is no number
        with pytest.raises(ClaimError):
            claim("it", 1, never if never == 9 else lambda: NAN)
    monkeypatch.setenv("INSIST_ON_TIME", "1")
    with pytest.raises(ClaimError, match="measured 9 s"):
        claim("third", 1, lambda: 9, unit="s")


def test_the_error_shows_both_numbers():
    with pytest.raises(ClaimError) as error:
        claim("bytes of rank 0", 1_000_000, 1_010_000.5, unit="bytes")
    said = "bytes of rank 0: predicted 1\u2009000\u2009000 bytes, measured 1\u2009010\u2009000 bytes (fails)"
    assert str(error.value) == said
    with pytest.raises(ClaimError, match="predicted ≥ 2 s, measured 1.5 s"):
        claim("it", 2, 1.5, unit="s", relation=">=")
    with pytest.raises(ClaimError, match="predicted 0.333333, measured 0.333334"):  # and where four digits agree
        claim("it", 0.333333, 0.333334)
    with pytest.raises(ClaimError, match=f"predicted {10**15}, measured {10**15 + 1}"):
        claim("it", 10**15, 10**15 + 1)
    with pytest.raises(ClaimError, match="measured nan"):
        claim("it", 1, NAN)


def test_outside_a_notebook_a_claim_is_a_line(capsys):
    claim("bytes", 1500, 1500.0, unit="B")
    claim("time", 1, 1.004, rel=0.01, unit="s")
    claim("apart", 0, 1e-16, abs=1e-12)
    claim("tiny", 1, 1, rel=1e-12)
    claim("most", 3, 2, relation="<=")
    assert capsys.readouterr().out.splitlines() == [
        "bytes  1\u2009500 B  1\u2009500 B  exact",
        "time  1 s  1.004 s  holds ± 1%",
        "apart  0  1e-16  holds ± 1e-12",
        "tiny  1  1  holds ± 1e-12 of it",
        "most  ≤ 3  2  holds",
    ]


def test_numbers():
    assert [number(x) for x in (0, -1234567, 12345.0, 12019876.5, 1234.56, 0.00012344, 1e20, NAN, INF)] == [
        "0", "-1\u2009234\u2009567", "12\u2009345", "12\u2009020\u2009000", "1\u2009235", "0.0001234", "1e+20", "nan",
        "inf",
    ]  # fmt: skip


def test_claims_are_filed_for_the_appendix(tmp_path, monkeypatch):
    path = tmp_path / "claims.jsonl"
    monkeypatch.setenv("BOOK_CLAIMS", str(path))
    monkeypatch.setenv("BOOK_PAGE", "chapters/99.ipynb")
    claim("first ½", 1, 1, unit="B")
    with pytest.raises(ClaimError):
        claim("second", 1, 2)
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert first["page"] == "chapters/99.ipynb" and first["claim"] == "first ½" and first["verdict"] == "exact"
    assert (first["predicted"], first["measured"]) == ("1 B", "1 B")
    assert f"torch {metadata.version('torch')}" in first["versions"] and "cores" in first["machine"]
    assert second["verdict"] == "fails"


def test_in_a_notebook_each_cell_has_one_table(tmp_path):
    cells = [
        "from lib import claim\nfrom book.figures.show import show\nfrom lib.lab.claims import number, ClaimError",
        "print('before')\nclaim('a < b', 1, 1)\nclaim('c', 2, 2.0, unit='B')\nclaim('d', 5, 4, relation='<=')",
        "claim('e', 3, 3)",
        "try:\n    claim('f', 3, 4)\nexcept ClaimError:\n    pass\nclaim('g', 1, 1)",
        "show(number)",
        "2 + 2",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3")
    client.execute(env={**os.environ, "BOOK_CLAIMS": str(tmp_path / "claims")}, cwd=str(ROOT))

    def tables(i):
        return [o["data"] for o in notebook.cells[i].outputs if "claims" in o.get("data", {}).get("text/html", "")]

    (first,), (second,), (third,) = tables(1), tables(2), tables(3)
    assert first["text/html"].count("<tr>") == 4 and "a &lt; b" in first["text/html"]
    assert [line.split()[0] for line in first["text/plain"].splitlines()] == ["quantity", "a", "c", "d"]
    assert second["text/html"].count("<tr>") == 2
    assert '<td class="bad">fails</td>' in third["text/html"] and '<td class="ok">exact</td>' in third["text/html"]
    assert notebook.cells[1].outputs[0]["text"] == "before\n"
    shown = notebook.cells[4].outputs[0]["data"]["text/markdown"]
    assert (
        shown.startswith("```python\n# lib/lab/claims.py, line ")
        and "def number(x: float | bool, digits: int" in shown
    )
    assert len(notebook.cells[5].outputs) == 1
    assert len((tmp_path / "claims").read_text(encoding="utf-8").splitlines()) == 6


def test_yes_and_no(capsys):
    claim("replicas are equal", True, torch.tensor(True))
    claim("one of them moved", False, np.bool_(False))
    assert capsys.readouterr().out.splitlines() == [
        "replicas are equal  yes  yes  exact",
        "one of them moved  no  no  exact",
    ]
    with pytest.raises(ClaimError, match="predicted yes, measured no"):
        claim("replicas are equal", True, False)


def test_as_many_digits_as_tell_two_numbers_apart(capsys):
    claim("seven digits at most", 0.672001000, 0.672001001, abs=1e-6)
    claim("six are enough", 0.672001, 0.672004, abs=1e-5)
    assert capsys.readouterr().out.splitlines() == [
        "seven digits at most  0.672  0.672  holds ± 1e-06",
        "six are enough  0.672001  0.672004  holds ± 1e-05",
    ]
