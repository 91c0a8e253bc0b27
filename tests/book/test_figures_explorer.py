"""Explorers: the right frame for every setting, alive in a page without a kernel and in a kernel without a page."""

import itertools
import json
import random
import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from book.figures.curves import draw_bars
from book.figures.explorer import Explorer
from book.figures.ranks import draw_rank
from book.figures.svg import Figure
from book.figures.timeline import draw_timeline

ROOT = Path(__file__).parents[2]
GRADIENTS_MB, FORWARD_MS, BACKWARD_MS = 100, 10.0, 20.0


def step(bucket_MB: int, ranks: int, bandwidth: int) -> tuple[Figure, str]:
    """A training step whose all-reduces, a bucket each, overlap with the backward; bandwidth in Gbit/s."""
    sizes = [bucket_MB] * (GRADIENTS_MB // bucket_MB) + [GRADIENTS_MB % bucket_MB] * (GRADIENTS_MB % bucket_MB > 0)
    done, free, sent, messages = FORWARD_MS + BACKWARD_MS, 0.0, 0, []
    for i, size in enumerate(sizes):
        sent += size
        start = max(free, FORWARD_MS + BACKWARD_MS * sent / GRADIENTS_MB)
        free = start + 2 * (ranks - 1) * (0.01 + size * 8 / bandwidth / ranks)
        messages.append((f"bucket {i}", start, free))
    bars = []
    for rank in range(2):
        bars += [(rank, "compute", "forward", "", 0, FORWARD_MS), (rank, "compute", "backward", "", FORWARD_MS, done)]
        bars += [(rank, "compute", "idle", f"waits {free - done:.1f} ms", done, free)]
        bars += [(rank, "network", "comm", *message) for message in messages]
    sentence = (
        f"{len(sizes)} buckets on {ranks} ranks: the step takes {free:.1f} ms, {free - done:.1f} ms of it waiting."
    )
    return draw_timeline(bars, title="One step", alt=sentence, end=75), sentence


def memory(ranks: int) -> tuple[Figure, str]:
    sentence = f"With {ranks} ranks, ZeRO-1 keeps {4 + 12 / ranks:g} bytes per parameter & rank."
    parts = {"parameter": 2, "gradient": 2, "optimizer state": 12 / ranks}
    return draw_bars({"ZeRO-1": parts}, unit="bytes", title="Memory", alt=sentence, end=16), sentence


def buckets() -> Explorer:
    return Explorer(
        step,
        "How large should a bucket be?",
        labels={"bucket_MB": ("bucket size", "{} MB"), "bandwidth": ("bandwidth", lambda v: f"{v} Gbit/s")},
        start={"bucket_MB": 25},
        bucket_MB=[5, 25, 100],
        ranks=[2, 4, 8, 16],
        bandwidth=[50, 400],
    )


def tiny(**setting: object) -> tuple[str, str]:
    return f'<svg viewBox="0 0 9 9"><text>{setting}</text></svg>', f"It is {setting}."


class Tags(HTMLParser):
    """The elements that a browser finds."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append(tag)


HOSTILE = 'a <!-- <script>alert("1")</script> & \u2028'


def carried(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html, re.DOTALL).group(1))


# ---- The data


def test_every_setting_has_its_frame():
    explorer = Explorer(tiny, "t", a=[1, 2], b=["x", "y", "z"])
    data = carried(explorer._repr_html_())
    for place, (a, b) in enumerate(itertools.product([1, 2], "xyz")):
        svg, sentence = tiny(a=a, b=b)
        assert [column[data["order"][place]] for column in data["frames"]] == [svg, svg, sentence]
    assert data["values"] == [["1", "2"], ["x", "y", "z"]]


def test_equal_frames_are_kept_once():
    explorer = Explorer(lambda a, b: tiny(a=a), "t", a=[1, 2, 3], b=[1, 2, 3, 4])
    data = carried(explorer._repr_html_())
    assert list(map(len, data["frames"])) == [3, 3, 3] and data["order"] == [0] * 4 + [1] * 4 + [2] * 4


def test_first_frame_needs_no_script():
    html = re.sub(r"<script.*?</script>", "", buckets()._repr_html_(), flags=re.DOTALL)
    sentence = step(25, 4, 50)[1]  # start where given, in the middle elsewhere
    assert f'<span aria-live="polite">{sentence}</span></figcaption>' in html and f'aria-label="{sentence}"' in html
    assert html.count("<svg") == 2 and "bucket size" in html and ">25 MB</output>" in html
    assert html.count('<input type="range"') == html.count("disabled>") == 3  # no slider that moves and does nothing
    assert 'aria-valuetext="50 Gbit/s"' in html
    assert repr(buckets()) == f"How large should a bucket be?: {sentence}"


def test_labels_default_to_the_names():
    html = Explorer(tiny, "t", micro_batches=[1, 2], share=[0.5, 1e-6])._repr_html_()
    assert ">micro batches</label>" in html
    assert carried(html)["values"][1] == ["0.5", "1e-06"]


def hostile() -> Explorer:
    def compute(a):
        return f"<svg viewBox='0 0 9 9'><title>{a}</title></svg>", HOSTILE

    return Explorer(compute, HOSTILE, labels={"a": (HOSTILE, HOSTILE + "{}")}, a=[1, 2])


def test_hostile_words_stay_words():
    html = hostile()._repr_html_()
    tags = Tags()
    tags.feed(html)
    assert tags.found.count("script") == 2 and tags.found.count("figcaption") == 1
    assert carried(html)["frames"][2][0] == HOSTILE
    assert HOSTILE == unescape(re.search(r'<span aria-live="polite">(.*?)</span>', html).group(1))


def test_words_are_chosen_by_buttons():
    html = Explorer(tiny, "t", n=[1, 2], way=["TP", "TP & SP"], start={"way": "TP & SP"})._repr_html_()
    assert html.count('type="range"') == 1 and html.count('type="radio"') == 2
    assert "<legend>way</legend>" in html and "disabled checked><span>TP &amp; SP</span>" in html


def test_all_frames_are_as_large_as_the_largest():
    def growing(n):
        return f'<svg viewBox="0 0 {10 * n} {7.5 * n:g}"></svg>', f"{n}"

    def mesh(n):
        return draw_rank(0, {"dp": 1, "pp": 1, "tp": n}, alt="a"), f"{n}"

    frames = carried(Explorer(growing, "t", n=[1, 2, 4])._repr_html_())["frames"]
    assert frames[0] + frames[1] == ['<svg viewBox="0 0 40 30"></svg>'] * 6
    _, narrow, _ = carried(Explorer(mesh, "t", n=[1, 3])._repr_html_())["frames"]
    assert [re.findall(r"min-width:(\d+)px", svg) for svg in narrow] == [["455"]] * 2, "and shown at one scale"
    html = Explorer(lambda n: (growing(n)[0], "x" * n), "t", n=[1, 2, 9])._repr_html_()
    assert '<span class="pbh-longest" aria-hidden="true">xxxxxxxxx</span>' in html, (
        "its place for the longest sentence"
    )


def test_html_is_small_and_needs_nothing_from_elsewhere():
    html = buckets()._repr_html_()
    assert not re.findall(r"(?:src|href)=|@import|fetch\(|import\(", html)
    assert set(re.findall(r"https?://[^\s\"'\\]+", html)) == {"http://www.w3.org/2000/svg"}
    script = (ROOT / "book" / "figures" / "explorer.js").read_text(encoding="utf-8")
    assert len(script.splitlines()) <= 80 and "bucket" not in script


def test_ids_follow_the_content():
    ids = {
        re.search(r'data-pbh="([\w-]+)"', Explorer(tiny, t, a=[1, n])._repr_html_()).group(1)
        for t in "tu"
        for n in (2, 3)
    }
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"a": range(4), "b": range(5), "c": range(6)}, r"4 x 5 x 6 = 120 frames, at most 64; split"),
        ({"a": [1], "b": [1], "c": [1], "d": [1]}, "4 sliders"),
        ({}, "0 sliders"),
        ({"a": []}, r"\[0\] values"),
        ({"a": [1, 2], "start": {"a": 3}}, r"a=3 is none of its values \[1, 2\]"),
        ({"a": [1, 2], "start": {"b": 3}}, "no parameter 'b'; it has a"),
        ({"a": [1, 2], "labels": {"c": ("c", "{}")}}, "no parameter 'c'"),
    ],
)
def test_wrong_use_says_so(options, message):
    with pytest.raises(ValueError, match=message):
        Explorer(tiny, "t", **options)


def test_wrong_compute_says_so():
    for compute, message in (
        (lambda a: "<svg></svg>", r"compute\(a=1\) returned str; return \(picture, sentence\)"),
        (lambda a: ("<p>", "s"), "one <svg> element"),
        (lambda a: ("<svg></svg>", 3), "returned tuple"),
    ):
        with pytest.raises(ValueError, match=message):
            Explorer(compute, "t", a=[1])


def test_too_many_bytes_say_so():
    noise = random.Random(0)

    def heavy(a):
        return f"<svg>{''.join(noise.choices('abcdefghijklmnopqrstuvwxyz', k=10_000))}</svg>", "s"

    with pytest.raises(ValueError, match=r"40 frames take \d{3} KB compressed, at most 300"):
        Explorer(heavy, "t", a=range(40))


# ---- The live version


def test_widget_chooses_the_slider_that_fits():
    sliders = {}
    for values in ([2, 4, 8], [0.1, 0.5], [1e-4, 1e-2], ["a", "b"], [3], [True, False]):
        explorer = Explorer(tiny, "t", n=values)
        sliders[str(values)] = type(explorer.widget().children[1].children[0]).__name__
    assert list(sliders.values()) == ["IntSlider", "FloatSlider", "FloatLogSlider", *["SelectionSlider"] * 3]


def test_widget_takes_values_between_those_of_the_page():
    box = Explorer(memory, "Memory", labels={"ranks": ("ranks", "{} GPUs")}, ranks=[1, 2, 8]).widget()
    slider, shown = box.children[1].children
    picture = box.children[-1]
    assert (slider.value, slider.min, slider.max, slider.description) == (2, 1, 8, "ranks")
    slider.value = 3
    assert "ZeRO-1 keeps 8 bytes per parameter &amp; rank." in picture.value
    assert picture.value.count("<svg") == 2, "wide and narrow"
    assert shown.value == "<b>3 GPUs</b>"


def test_live_shows_the_widget_in_its_place():
    data = Explorer(memory, "Memory", live=True, ranks=[1, 2, 8])._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data and "text/html" not in data
    assert Explorer(memory, "Memory", ranks=[1, 2, 8])._repr_mimebundle_().keys() == {"text/html", "text/plain"}


def test_widget_shows_what_compute_refuses():
    def even(n):
        if n % 2:
            raise ValueError(f"n={n} cannot be split over 2 < 3 ranks")
        return tiny(n=n)

    box = Explorer(even, "t", n=[2, 4]).widget()
    box.children[1].children[0].value = 3
    assert (
        "n=3 cannot be split over 2 &lt; 3 ranks" in box.children[-1].value and "<svg" not in box.children[-1].value
    )
    box.children[1].children[0].value = 4
    assert "<svg" in box.children[-1].value


def test_widget_without_ipywidgets_says_what_to_install(monkeypatch):
    explorer = Explorer(tiny, "t", n=[2, 4])
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match="pip install ipywidgets"):
        explorer.widget()
