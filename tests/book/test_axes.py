"""Axis by axis: one table of chapter 13, made of the sheet, with formulas that the library and the planner share."""

import importlib
import re
from dataclasses import replace

import pytest

from book import axes, terms
from book.axes_table import NOT_IN_PYTORCH, axes_table
from book.terms import ON_DATA, ON_MODEL, Term
from lib.planner import Cluster, Layout4D, Training
from lib.planner.experts import ExpertLayout, ExpertTraining, exchanged_bytes, rank_bytes
from lib.planner.seconds import block_s, step_and_waits
from lib.planner.training import GPUS, stack_for
from tests.book.drawn import painted, parse


def words_of(svg):
    return " ".join(element.text for element, _ in painted(parse(svg)) if element.tag == "text").replace(
        "\u00a0", " "
    )


def test_it_has_each_axis_once_with_its_formulas_and_fits_on_a_screen():
    drawn = axes_table()
    for said in (words_of(drawn.svg), words_of(drawn.narrow)):
        for one in axes.AXES:
            name = one.names[axes.PYTORCH] or NOT_IN_PYTORCH
            assert said.count(f"{one.name} {one.cut[:4]}") == 1 and name.split(".")[-1] in said
            for term in (*one.memory, *one.sends, *([one.bubble] if one.bubble else [])):
                assert (term.formula if isinstance(term, Term) else term) in said
    height = float(re.search(r'viewBox="0 0 720 ([\d.]+)"', drawn.svg)[1])
    assert height < 850


def test_a_formula_that_the_library_contradicts_is_not_drawn(monkeypatch):
    whole = terms.cost.wire_bytes
    monkeypatch.setattr(
        terms.cost, "wire_bytes", lambda kind, *rest: whole(kind, *rest) * (1 + (kind == "all_gather"))
    )
    with pytest.raises(ValueError, match=r"Keys and values.*lib.cost says"):
        axes_table()


def test_the_planner_sends_along_the_context_what_the_table_says():
    letters = ON_MODEL
    stack = stack_for("megatron-lm", "h100")
    training = Training(terms.shape_of(letters), Cluster(GPUS["h100"], letters["c"]), stack, letters["m"])
    layout = Layout4D(tp=1, cp=letters["c"], pp=1, dp=1)
    sent = step_and_waits(training, layout)[1]["cp"].messages.bytes
    assert terms.value(axes.CONTEXT.sends[0].formula, letters) == pytest.approx(sent)
    kept = letters["l"] * terms.cost.activation_bytes(training.model, 1, "none", fused_attention=True) / letters["c"]
    assert terms.value(axes.CONTEXT.memory[1].formula, letters) == pytest.approx(kept)


def test_the_planner_sends_copies_of_tokens_as_the_table_says():
    letters = {**ON_DATA, "m": 1}
    shape = terms.expert_shape_of(letters)
    stack, cluster = stack_for("megatron-lm", "h100"), Cluster(GPUS["h100"], letters["e"])
    of = ExpertTraining(shape, Training(shape.base, cluster, stack, letters["e"]))
    layout = ExpertLayout(tp=1, pp=1, dp=letters["e"], ep=letters["e"])
    sent = letters["l"] * exchanged_bytes(of, layout).total
    assert terms.value(axes.EXPERTS.sends[0].formula, letters) == pytest.approx(sent)
    held = rank_bytes(of, layout, 0).experts * 16 / stack.recipe.bytes_per_parameter
    assert terms.value(axes.EXPERTS.memory[0].formula, letters) == pytest.approx(held)


def test_tensor_parallel_ranks_wait_in_forward_as_the_table_says():
    """Half of the all-reduces is in backward, and hides next to weight gradients."""
    stack = stack_for("megatron-lm", "h100")
    training = Training(terms.shape_of(ON_MODEL), Cluster(GPUS["h100"], 8), stack, 32)
    over_tp = block_s(training, 8, 1, 1, False, "none").tp
    assert over_tp.hidden_s == pytest.approx(over_tp.messages.seconds / 2)
    slow = replace(GPUS["h100"], link_Bps=10e9)
    over_tp = block_s(replace(training, cluster=Cluster(slow, 8)), 8, 1, 1, False, "none").tp
    assert over_tp.hidden_s < over_tp.messages.seconds / 4, "weight gradients hide no more than they last"


def test_pytorch_has_context_parallelism_under_this_name():
    module, _, name = axes.CONTEXT.names[axes.PYTORCH].rpartition(".")
    assert hasattr(importlib.import_module(module), name)
