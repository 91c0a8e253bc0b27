"""A training run as a page: whatever the run, everything that it measured, in one file that needs no other."""

import json
import re
from html.parser import HTMLParser

import pytest

from book.figures.report import MOST_POINTS, MOST_RANKS, figures, main, report_page, summary
from lib.memory import KINDS
from lib.train import main as train

FLAGS = "--context 16 --d-model 24 --num-layers 1 --num-heads 2 --steps 6 --global-batch 24 --validate-every 2"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two ranks report."""
    path = tmp_path_factory.mktemp("runs") / "two.json"
    train([*FLAGS.split(), "--dp", "2", "--report", str(path)])
    return path


def ranks_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["ranks"]


def made_up(num_ranks=2, steps=3, first=0):
    """A report without a run: `first` steps were done by another process."""
    usage = dict.fromkeys(KINDS, 1e9) | {"total": 4e9}
    config = {"global_batch": 8, "model": {"context": 100}, "layout": {"dp": num_ranks, "pp": 1, "tp": 1}}
    one = {
        "losses": [5 - k / steps for k in range(steps)],
        "validation": [],
        "step_s": [0.1] * (steps - first),
        "peak_bytes": usage if steps > first else {},
        "memory": [],
        "traffic": {},
        "config": config,
    }
    return [
        {**one, "peak_bytes": {k: n * (1 + r / 10) for k, n in one["peak_bytes"].items()}} for r in range(num_ranks)
    ]


def titles(page):
    return re.findall(r'<text x="0" y="15" font-weight="650">([^<]*)</text>', page)


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]


def test_a_run_of_two_ranks_becomes_one_file(two, capsys):
    page = two.with_suffix(".html")
    main([str(two)])
    assert capsys.readouterr().out == f"6 steps on 2 ranks: open {page}\n"
    text = page.read_text(encoding="utf-8")
    read = Page(text)
    assert read.links == [] and not {"script", "link", "img", "iframe"} & set(read.tags) and "url(http" not in text
    wanted = ["Loss", "Speed", "Memory of rank 0 in one step", "Peak memory of each rank", "Sent by rank 0 per step"]
    assert list(dict.fromkeys(titles(text))) == wanted
    assert "prefers-color-scheme:dark" in text and "--pbh-forward" in text
    assert "&quot;global_batch&quot;: 24" in text, "all settings"


def test_it_says_what_was_measured(two):
    ranks = ranks_of(two)
    said = summary(ranks)
    losses, validation = ranks[0]["losses"], ranks[0]["validation"][-1][1]
    assert said.startswith("6 steps of 24 sequences of 16 tokens, on 2 ranks (dp 2).")
    assert f"from {losses[0]:.3f} to {losses[-1]:.3f} nats" in said and f"it is {validation:.3f}." in said
    loss, speed, memory, peaks, traffic = figures(ranks)
    middle = sorted(max(pair) for pair in zip(*(rank["step_s"] for rank in ranks), strict=True))
    assert f"{24 * 16 / ((middle[2] + middle[3]) / 2):,.0f} tokens per second in the median step" in speed.caption
    top = max(usage["total"] for _, usage in ranks[0]["memory"])
    assert top == ranks[0]["peak_bytes"]["total"], "the step that the peaks are of"
    assert f"at most {top / 1e6:.3g} MB" in memory.caption
    assert "validation" in loss.svg and "rank 1" in peaks.svg and "all_reduce dp" in traffic.svg
    sent = sum(n_bytes for _, n_bytes in ranks[0]["traffic"].values()) / 6
    assert f"Rank 0 sent most: {sent / 1e3:.3g} kB per step." == traffic.caption


def test_one_process_has_sent_nothing_and_validated_nothing():
    ranks = made_up(num_ranks=1)
    assert "on one process" in summary(ranks) and "not trained on" not in summary(ranks)
    assert [titles(figure.svg)[0] for figure in figures(ranks)][-1] == "Peak memory of each rank"
    assert ">validation</text>" not in report_page(ranks, "one.json")


def test_the_other_ranks_do_not_carry_the_memory_of_a_step(two):
    first, second = ranks_of(two)
    assert len(first["memory"]) > 50 and second["memory"] == []


def test_a_long_run_is_drawn_with_few_points():
    ranks = made_up(steps=100_000)
    loss, speed, _ = figures(ranks)
    assert "A point stands for 250 steps, their mean." in loss.caption
    assert len(loss.svg) < 20_000 and MOST_POINTS < 1000
    ranks[0]["memory"] = [[k / 1e3, dict.fromkeys(KINDS, 1e6 + 1e9 * (k == 7)) | {"total": 1}] for k in range(50_000)]
    for k, (_, usage) in enumerate(ranks[0]["memory"]):
        usage["total"] = 4e6 + 4e9 * (k == 7)
    _, _, memory, _ = figures(ranks)
    assert "at most 4 GB" in memory.caption and "stands for 125 changes of memory, the highest" in memory.caption
    assert ">4</text>" in memory.svg, "the peak is drawn"
    assert len(memory.svg) < 100_000


def test_many_ranks_show_the_fullest():
    *_, peaks = figures(made_up(num_ranks=40))
    assert f"the {MOST_RANKS} fullest of 40 ranks" in peaks.caption and peaks.caption.startswith("Rank 39 held most")
    assert ">rank 24</text>" in peaks.svg and ">rank 23</text>" not in peaks.svg


def test_a_run_that_goes_on_is_drawn_from_where_it_went_on():
    _, speed, _ = figures(made_up(steps=1000, first=600))
    assert ">600</text>" in speed.svg and ">500</text>" not in speed.svg
    (loss,) = figures(made_up(steps=5, first=5))
    assert titles(loss.svg) == ["Loss"], "all steps were done before"


def test_a_stop_is_said():
    ranks = made_up()
    ranks[0]["stopped_by"] = 15
    assert summary(ranks).endswith("stopped by SIGTERM.")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file or directory"),
        ("nonsense", "Expecting value"),
        ("[]", "indices must be integers"),
        ('{"ranks": [{}]}', "'losses'"),
    ],
)
def test_one_clear_sentence_and_exit_2(content, says, tmp_path, capsys):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as left:
        main([str(path)])
    captured = capsys.readouterr()
    assert left.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"python -m book.figures.report: {path} is no report of lib.train: ")
    assert says in captured.err
    assert not path.with_suffix(".html").exists()


def test_a_report_is_not_overwritten(tmp_path, capsys):
    path = tmp_path / "run.html"
    path.write_text(json.dumps({"ranks": made_up()}))
    with pytest.raises(SystemExit):
        main([str(path)])
    assert "call the report" in capsys.readouterr().err and json.loads(path.read_text())["ranks"] == made_up()
