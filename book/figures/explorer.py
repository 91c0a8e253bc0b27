"""Pictures with sliders and choices that live in a page without a kernel.

The problem: an ipywidgets slider in a built page moves and changes nothing, because no Python runs there.
The idea: Python computes the picture and its sentence for every setting beforehand and is the only place with subject
logic; a few lines of JavaScript (`explorer.js`) show the frame that belongs to the setting. The HTML needs nothing
else: no kernel, no network, no widget manager. `live=True` shows the live version over the same function. In the book
the address keeps the setting, so that one can send it.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from book.figures.in_page import as_json, caption, scripts
from book.figures.svg import FONT, Figure, color, in_box

MOST_SLIDERS, MOST_FRAMES, MOST_BYTES = 3, 64, 300_000
Format = str | Callable[[Any], str]
_SHOWN = r"min-width:(\d+)px;max-width:(\d+)px"  # of a drawing, in the form that its canvas writes

_SCRIPT = Path(__file__).with_name("explorer.js")
_STYLE = f"""
.pbh-explorer{{margin:1.4em 0;padding:16px clamp(8px,2vw,18px);border-radius:10px;font:15px/1.5 {FONT};
  background:{color("panel")};color:{color("text")};border:1px solid {color("rule")}}}
.pbh-explorer .pbh-title{{margin:0 0 10px;font-weight:650;font-size:15px}}
.pbh-explorer .pbh-knobs{{display:flex;flex-wrap:wrap;gap:8px 24px;margin:0 0 12px}}
.pbh-explorer .pbh-knob{{flex:1 1 130px;max-width:260px;min-width:0;margin:0;padding:0;border:0}}
.pbh-explorer .pbh-choice{{flex:0 1 auto;max-width:none}}
.pbh-explorer legend{{float:none;width:auto;margin:0 0 2px;padding:0;font-size:14px;color:{color("soft")}}}
.pbh-explorer .pbh-choice label{{display:inline-block;position:relative;margin:0 4px 4px 0}}
.pbh-explorer .pbh-choice input{{position:absolute;inset:0;width:100%;height:100%;opacity:0}}
.pbh-explorer .pbh-choice span{{display:block;padding:2px 10px;border-radius:6px;border:1px solid {color("rule")};
  font-size:14px;color:{color("text")}}}
.pbh-explorer .pbh-choice :checked+span{{border-color:{color("accent")};box-shadow:inset 0 0 0 1px {color("accent")};
  font-weight:650}}
.pbh-explorer .pbh-choice :focus-visible+span{{outline:2px solid {color("accent")};outline-offset:2px}}
.pbh-explorer label{{color:{color("soft")};font-size:14px;margin:0}}
.pbh-explorer output{{display:inline;padding:0;font-weight:650;font-size:14px;font-variant-numeric:tabular-nums}}
.pbh-explorer input{{display:block;width:100%;height:28px;margin:3px 0 0;touch-action:pan-y;cursor:pointer;
  accent-color:{color("accent")}}}
.pbh-explorer figcaption{{display:grid;margin:12px 0 0;font:15px/1.5 {FONT};color:{color("text")};text-align:left}}
.pbh-explorer figcaption span{{grid-area:1/1}}
.pbh-explorer .pbh-longest{{visibility:hidden}}
""".replace("\n  ", "").strip()


class Explorer:
    """A picture and a sentence that follow up to three knobs; as a cell's last expression it shows itself.

    A knob is a slider over numbers, and buttons where the values are words. Every combination is computed when it is
    made (at most 64), wide and for a phone, and equal frames are kept once. All are as high as the highest: nothing
    below them jumps.

    Args:
        compute: called as `compute(**setting)`, returns (picture, sentence): a `Figure` or one `<svg>` element, and
            its result, with numbers and units. The sentence is both the caption and the alternative text.
        title: the subject.
        start: parameter to the value shown first. Default: the middle one of each.
        labels: parameter to (name, format): `{"bucket_MB": ("bucket size", "{} MB")}`; the format is a string or a
            function of the value. Default: the parameter's own name with spaces.
        live: show the widget in its place, for a reader with a kernel.
        values: parameter to its values, one knob each, the first at the left.

    Raises:
        ValueError: more than three sliders or 64 frames, a start value that is none of the values, or a page part of
            more than 300 KB compressed.
    """

    def __init__(
        self,
        compute: Callable[..., tuple[Figure | str, str]],
        title: str,
        /,
        *,
        start: Mapping[str, Any] | None = None,
        labels: Mapping[str, tuple[str, Format]] | None = None,
        live: bool = False,
        **values: Sequence[Any],
    ) -> None:
        self.compute, self.title, self.live = compute, title, live
        self.values = {name: list(choices) for name, choices in values.items()}
        labels, start = dict(labels or {}), dict(start or {})
        self._check(labels, start)
        self.labels = {name: labels.get(name, (name.replace("_", " "), _plain)) for name in values}
        self.start = {name: start.get(name, x[(len(x) - 1) // 2]) for name, x in self.values.items()}
        settings = (dict(zip(self.values, x, strict=True)) for x in itertools.product(*self.values.values()))
        wide, narrow, sentences = zip(*map(self._frame, settings), strict=True)
        frames = list(zip(_equally_high(wide), _equally_high(narrow), sentences, strict=True))
        self._frames = list(dict.fromkeys(frames))
        self._order = [self._frames.index(frame) for frame in frames]  # for each setting, the frame that it shows
        size = len(gzip.compress(self._repr_html_().encode(), mtime=0))
        if size > MOST_BYTES:
            raise ValueError(
                f"{self.title!r}: {len(self._frames)} frames take {size / 1000:.0f} KB compressed, "
                f"at most {MOST_BYTES / 1000:.0f}; use fewer values or a simpler picture"
            )

    def _check(self, labels: Mapping[str, Any], start: Mapping[str, Any]) -> None:
        sizes = [len(choices) for choices in self.values.values()]
        if not 1 <= len(sizes) <= MOST_SLIDERS or 0 in sizes:
            raise ValueError(
                f"{self.title!r} has {len(sizes)} sliders of {sizes} values; "
                f"use 1 to {MOST_SLIDERS}, each with at least one value, and split into several Explorers if need be"
            )
        if (frames := math.prod(sizes)) > MOST_FRAMES:
            raise ValueError(
                f"{self.title!r}: {' x '.join(map(str, sizes))} = {frames} frames, at most {MOST_FRAMES}; "
                "split it into several Explorers or thin the values"
            )
        for name in {**labels, **start}:
            if name not in self.values:
                raise ValueError(f"{self.title!r} has no parameter {name!r}; it has {', '.join(self.values)}")
        for name, value in start.items():
            if value not in self.values[name]:
                raise ValueError(f"start: {name}={value!r} is none of its values {self.values[name]}")

    def _frame(self, setting: Mapping[str, Any]) -> tuple[str, str, str]:
        """The picture, wide and narrow, without its own name, and the sentence for a setting."""
        result = self.compute(**setting)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], str)):
            raise ValueError(
                f"compute({_call(setting)}) returned {type(result).__name__}; return (picture, sentence)"
            )
        picture, sentence = result
        figure = picture if isinstance(picture, Figure) else Figure(str(picture).strip(), sentence)
        if not (figure.svg.startswith("<svg") and figure.svg.endswith("</svg>")):
            raise ValueError(f"compute({_call(setting)}): the picture must be a Figure or one <svg> element")
        return _nameless(figure.svg), _nameless(figure.narrow or figure.svg), sentence

    def _text(self, name: str, value: Any) -> str:
        form = self.labels[name][1]
        return form.format(value) if isinstance(form, str) else form(value)

    def __repr__(self) -> str:
        return f"{self.title}: {self._first()[-1]}"

    def _first(self) -> tuple[str, str, str]:
        place = 0
        for name, choices in self.values.items():
            place = place * len(choices) + choices.index(self.start[name])
        return self._frames[self._order[place]]

    def _repr_html_(self) -> str:
        texts = [[self._text(name, value) for value in choices] for name, choices in self.values.items()]
        wides, narrows, sentences = zip(*self._frames, strict=True)  # similar texts together compress better
        data = as_json({"values": texts, "order": self._order, "frames": [wides, narrows, sentences]})
        identity = "pbh-" + hashlib.sha256(f"{self.title}{self.start}{data}".encode()).hexdigest()[:10]
        knobs = []
        for i, (name, choices) in enumerate(self.values.items()):
            form = _slider_html if all(map(_is_number, choices)) else _buttons_html
            at = choices.index(self.start[name])
            knobs.append(form(f"{identity}-{i}", escape(self.labels[name][0]), list(map(escape, texts[i])), at))
        wide, narrow, sentence = self._first()
        return (
            f'<figure class="pbh-explorer" data-pbh="{identity}" data-address="{_address(self.title)}" '
            f'aria-labelledby="{identity}-title">'
            f"<style>{_STYLE}</style>"
            f'<p class="pbh-title" id="{identity}-title">{escape(self.title)}</p>'
            f'<div class="pbh-knobs">{"".join(knobs)}</div>'
            f"{in_box(wide, narrow, 'img', escape(sentence))}"
            f"{caption(sentence, sentences)}"
            f"{scripts(identity, data, _SCRIPT, 'showExplorer')}</figure>"
        )

    def _repr_mimebundle_(self, **kwargs: object) -> dict:
        if self.live:
            return self.widget()._repr_mimebundle_(**kwargs)
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}

    def widget(self) -> Any:
        """The live version, for a reader with a kernel: an ipywidgets box over the same `compute`.

        Numbers may take any value between their least and greatest, not only the values of the page. A `ValueError` of
        `compute` (ranks that do not divide) is shown as the sentence.

        Raises:
            ImportError: ipywidgets is not installed.
        """
        try:
            import ipywidgets
        except ImportError as error:
            raise ImportError(
                "Explorer.widget() needs ipywidgets (pip install ipywidgets); without it, show the Explorer itself"
            ) from error
        picture = ipywidgets.HTML()
        sliders = {name: _slider(ipywidgets, self, name) for name in self.values}
        shown = {name: ipywidgets.HTML() for name in self.values}

        def update(_: object = None) -> None:
            setting = {name: slider.value for name, slider in sliders.items()}
            for name, value in setting.items():
                shown[name].value = f"<b>{escape(self._text(name, value))}</b>"
            try:
                wide, narrow, sentence = self._frame(setting)
            except ValueError as error:
                wide, narrow, sentence = "", "", str(error)
            words = escape(sentence)
            picture.value = f"{in_box(wide, narrow, 'img', words)}<p>{words}</p>"

        for slider in sliders.values():
            slider.observe(update, names="value")
        update()
        rows = [ipywidgets.HBox([sliders[name], shown[name]]) for name in sliders]
        title = ipywidgets.HTML(f"<b>{escape(self.title)}</b>")
        return ipywidgets.VBox([title, *rows, picture])


def _slider_html(identity: str, name: str, words: Sequence[str], at: int) -> str:
    return (
        f'<div class="pbh-knob"><label for="{identity}">{name}</label> '
        f'<output for="{identity}" aria-live="off">{words[at]}</output>'
        f'<input type="range" id="{identity}" min="0" max="{len(words) - 1}" step="1" value="{at}" '
        f'aria-valuetext="{words[at]}" autocomplete="off" disabled></div>'
    )


def _buttons_html(identity: str, name: str, words: Sequence[str], at: int) -> str:
    buttons = "".join(
        f'<label><input type="radio" name="{identity}" value="{k}" autocomplete="off" disabled'
        f"{' checked' * (k == at)}><span>{each}</span></label>"
        for k, each in enumerate(words)
    )
    return f'<fieldset class="pbh-knob pbh-choice"><legend>{name}</legend>{buttons}</fieldset>'


def _equally_high(svgs: Sequence[str]) -> Sequence[str]:
    """Pictures of the size of the largest, for a page that keeps its place."""
    sizes = [re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg) for svg in svgs]
    if not all(sizes):
        return svgs
    width, height = (max((size[i] for size in sizes), key=float) for i in (1, 2))
    largest = f'viewBox="0 0 {width} {height}"'
    shown = [max(map(int, some)) for some in zip(*re.findall(_SHOWN, "".join(svgs)), strict=True)]
    style = "min-width:{}px;max-width:{}px".format(*shown) if shown else ""
    resized = (svg.replace(size[0], largest, 1) for svg, size in zip(svgs, sizes, strict=True))
    return [re.sub(_SHOWN, style, svg, count=1) for svg in resized]


def _address(title: str) -> str:
    """Its name in the address of a page: its title, in plain letters."""
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _nameless(svg: str) -> str:
    """An `<svg>` element without a name: its box has one."""
    opening, rest = svg.split(">", 1)
    return re.sub(r' (role|aria-label)="[^"]*"', "", opening) + ">" + rest


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _call(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in setting.items())


def _slider(ipywidgets: Any, explorer: Explorer, name: str) -> Any:
    """The slider that fits: whole numbers, decimals, powers of ten, or the values themselves."""
    choices, look = explorer.values[name], {"style": {"description_width": "initial"}, "readout": False}
    common = {"description": explorer.labels[name][0], "value": explorer.start[name], **look}
    if not all(map(_is_number, choices)) or min(choices) == max(choices):
        options = [(explorer._text(name, v), v) for v in choices]
        return ipywidgets.SelectionSlider(options=options, **common)
    low, high = min(choices), max(choices)
    if all(isinstance(v, int) for v in choices):
        return ipywidgets.IntSlider(min=low, max=high, **common)
    if low > 0 and high >= 100 * low:
        return ipywidgets.FloatLogSlider(min=math.log10(low), max=math.log10(high), **common)
    return ipywidgets.FloatSlider(min=low, max=high, step=(high - low) / 100, **common)
