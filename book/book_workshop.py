"""The words of *Try a schedule*: what `course.workshop.typed` says, as JSON in the page.

A page says `{workshop}`. In the browser `static/schedule.js` checks, times and scores what is typed, and
`static/workshop.js` draws it. No sentence is written twice: the library is made to say each of them once, and what is
particular in it (an action, a number) becomes a hole, `{0}`, which the script fills.
"""

import json
import re

from live_page import add_live_page

from course.workshop.typed import SHORT, WHY, Par, Verdict, workshop
from lib.pipeline.schedules.action import Op
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v

SCRIPTS = "schedule.js", "workshop.js"
HTML = """<div id="workshop"><noscript><p><strong>This page computes in your browser, and JavaScript is switched off.
</strong> In a notebook, <code>workshop(text, Par(4, 6))</code> says the same.</p></noscript>
<script type="application/json">{words}</script></div>"""

CIRCLE = "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"
LATE_FIRST = "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4\n"
LATE_FIRST += "1F1 1F0 1I0 1I1 1F2 1I2 1F3 1I3 1F4 1I4 1W0 1W1 1W2 1W3 1W4"
# A name for the script: what makes the library say it, and what is particular in it, in the order of the holes.
PROBLEMS = {
    "no_action": (workshop("0X0"), "'0X0'", ", ".join(Op)),
    "other_line": (workshop("rank 7: 0F0"), "1", "7", "0"),
    "empty": (workshop(""),),
    "wrong_rank": (workshop("5F0\n5F1"), "5F1", "1", "0", "5"),
    "no_rank": (workshop("0F0 2F0 5F0"), "1", "5"),
    "other_sizes": (workshop("0F0 0F1 0F2", Par(4, 6)), "1", "3", "4", "6"),
    "unequal": (workshop("0F0 1F0\n2F0", Par(2, 1)),),
    "no_backward": (workshop("0F0", Par(1, 1)),),
    "repeated": (workshop("0F0 0F0 0F0 0B0", Par(1, 1)), "0F0", "3"),
    "missing_forward": (workshop("0B0", Par(1, 1)), "0F0"),
    "missing_backward": (workshop("0F0 0F1 0B1", Par(1, 2)), "0B0", "0I0", "0W0"),
    "half": (workshop("0F0 0I0", Par(1, 1)), "0I0", "0W0"),
    "half_again": (workshop("0F0 0B0 0W0", Par(1, 1)), "0B0", "0W0"),
    "too_early": (workshop("0B0 0F0", Par(1, 1)), "0B0", "0F0"),
    "endless": (workshop("1F0 0F0 1B0 0B0", Par(1, 1)), "0"),
    "circle": (workshop(CIRCLE, Par(2, 2)),),
    "waits": (workshop(CIRCLE, Par(2, 2)), "0", "0B0", "1B0", "1"),
    "too_long": (workshop("9" * 5000 + "F0"),),
}
LINES = {"waits": 1}  # all others stand on the first line
HEADLINES = {
    "wrong": (workshop(""),),
    "par": (workshop(zb_h1(4, 6).to_text()), "21"),
    "over": (workshop(one_f_one_b(4, 6).to_text()), "27", "6", "21"),
    "under": (workshop(zb_v(4, 6).to_text()), "19.5", "1.5", "21"),
    "par_too_much": (workshop(zb_h2(4, 6).to_text()), "21", "4"),
    "over_too_much": (workshop(gpipe(4, 6).to_text()), "27", "6", "21", "4"),
    "under_too_much": (workshop(zb_h1(4, 6).to_text(), Par(limit=1)), "21", "51", "72", "1"),
}
ADVICE = {
    "keep_less": (workshop(zb_h2(4, 6).to_text()), "0", "6", "4"),
    "no_faster": (workshop(zb_h1(4, 6).to_text()), "21", "16"),
    "split": (workshop(one_f_one_b(4, 6).to_text()), "1I5", "1W5", "1B5"),
    "fill": (
        workshop("0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2\n1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1W2", Par(2, 3, 3)),
        *("0", "6", "9", "0W0", "0I2"),
    ),
    "put_off": (workshop("0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1W0 1F1 1I1 1W1", Par(2, 2)), "1W0", "1F1"),
    "sooner": (
        workshop("0F1 0F0 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2", Par(2, 3, 3)),
        *("0", "2", "4", "0I0"),
    ),
    "at_the_ends": (workshop(LATE_FIRST, Par(2, 5, 5)),),
}


def with_holes(sentence: str, *particular: str) -> str:
    """The sentence, with `{0}` where the first of what is particular stands, and so on.

    Raises:
        ValueError: the library says something else by now.
    """
    longest_first = sorted(particular, key=len, reverse=True)
    one = re.compile("|".join(rf"(?<![\w.]){re.escape(words)}(?![\w]|\.\d)" for words in longest_first) or "$^")
    made = one.sub(lambda match: f"{{{particular.index(match[0])}}}", sentence)
    if lost := [words for i, words in enumerate(particular) if f"{{{i}}}" not in made]:
        raise ValueError(f"{sentence!r} does not say {', '.join(lost)}: the schedule beside it says something else")
    return made


def sentences() -> dict[str, dict[str, str]]:
    """All that a verdict says: what is wrong and why, how it compares, and what to try next."""

    def problem(name: str, verdict: Verdict) -> str:
        return verdict.problem.removeprefix("yours: ").splitlines()[LINES.get(name, 0)]

    return {
        "problems": {name: with_holes(problem(name, v), *holes) for name, (v, *holes) in PROBLEMS.items()},
        "headlines": {name: with_holes(v.headline(), *holes) for name, (v, *holes) in HEADLINES.items()},
        "advice": {name: with_holes(v.advice, *holes) for name, (v, *holes) in ADVICE.items()},
        "why": {fault.name: words for fault, words in WHY.items()},
        "short": SHORT,
    }


def html() -> str:
    """Where the page will be, with its words in it."""
    return HTML.format(words=json.dumps(sentences()))


def setup(app):
    return add_live_page(app, "workshop", html, ("lib/pipeline/*.py", "lib/pipeline/schedules/*.py"), SCRIPTS)
