import re
from pathlib import Path

import pytest

from book.figures.show import show
from lib.data_parallel import bucketed_gradients, ddp

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_the_source_and_its_place():
    finish = bucketed_gradients.Gradients.finish
    text = repr(show(finish))
    place, line = re.match(r"# (lib/data_parallel/bucketed_gradients\.py), line (\d+)\n", text).groups()
    source = (ROOT / place).read_text(encoding="utf-8").splitlines()
    shown = text.splitlines()[1:]
    assert [x.strip() for x in shown] == [x.strip() for x in source[int(line) - 1 :][: len(shown)]]
    assert shown[:2] == ["@torch.no_grad()", "def finish(self) -> None:"]  # no longer indented
    assert show(finish)._repr_markdown_() == f"```python\n{text}\n```"


def test_docstrings_keep_their_first_line():
    text = repr(show(ddp.global_mean))
    assert '"""This rank\'s term of the mean over all tokens: its losses / Σ count."""' in text
    assert "Raises" not in text and "return loss_sum / total" in text
    whole = repr(show(ddp.BucketedDDP))
    assert whole.count('"""') % 2 == 0 and "Args:" not in whole
    compile(whole, "shown", "exec")


@pytest.mark.parametrize("thing", [3, len, "text"])
def test_what_has_no_source(thing):
    with pytest.raises(TypeError):
        show(thing)
