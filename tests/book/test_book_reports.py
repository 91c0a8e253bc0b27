"""Reports and sentences of a cell, made for a page."""

import pytest
from docutils import nodes

from lib.runtime.hang import RUNNING, WAITING, AwaitedCall, View
from tests.book.book_project import load

reports = load("book_reports")


def output(text: str) -> nodes.document:
    from docutils.utils import new_document

    block = nodes.literal_block("", text)
    made = new_document("page")
    made += nodes.container("", block, nb_element="cell_code_output")
    reports.shape(None, made, "page")
    return made.children[0].children[0]


@pytest.mark.parametrize("hosts", [{}, {0: "node-a", 1: "node-b"}])
def test_the_report_of_a_hang_is_a_table_with_all_that_it_says(hosts):
    wait = AwaitedCall("send to <1>, 'dp'", "in step, notebook cell 3, line 7", (1,), (1,), 2.4)
    view = View({0: WAITING, 1: RUNNING}, {0: wait}, hosts=hosts)
    html = output(view.explain(2)).astext()
    assert html.count("<tr>") == 3 and "<th" in html
    assert (
        "<code>send to &lt;1&gt;, &#x27;dp&#x27;</code></td><td>2.4 s</td><td>in step, notebook cell 3, line 7"
        in html
    )
    assert "<td>computes</td>" in html and all(host in html for host in hosts.values())
    summary, cure = view.summary(), view.cause()
    assert f"<p>{summary}" in html and f"<p>{cure}</p>" in html, "above the table, and below it"


def test_a_sentence_that_is_too_long_wraps_and_a_drawing_does_not():
    assert output("word " * 30)["classes"] == ["prose"]
    gantt = "rank 0  F0 F1 F2 F3 ·  ·  ·  B0-- F4 B1-- F5 B2-- F6 B3-- F7 B4-- ·  B5-- ·  B6-- ·  B7--"
    assert output(gantt)["classes"] == ["wide"] and output("short")["classes"] == []
