"""Models with experts on *Will it fit?*: the script against Python, and the page in a browser."""

import json
import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from book.explain.experts import expert_shape_of
from lib.cost.expert_models import EXPERT_MODELS
from lib.cost.hardware import GPUS
from lib.cost.sizes import OPTIMIZERS, recipe_of_optimizer
from lib.planner.expert_report import NO_ERROR_OF_EXPERTS, ran_by_ep, report_of_experts
from lib.planner.experts import (
    NO_SECONDS_OF_EXPERTS,
    ExpertLayout,
    ExpertTraining,
    exchanged_bytes,
    expert_refusal,
    layouts_by_ep,
    rank_bytes,
    rank_bytes_most,
)
from lib.planner.margin import memory_verdict
from lib.planner.training import STACKS, Cluster, Training, stack_for
from tests.book.book_project import BOOK, violations
from tests.book.test_explain_experts import BAD, COUNTED, MORE, inside_of_images
from tests.book.test_will_it_fit import NUMBERS, extension, page_at, tried, typed, verdict, wrong  # noqa: F401

START = """const config = modelConfig(numbers.foreign, Object.keys(numbers.models));
    const of = withExperts(numbers.experts, config, numbers.limits);"""
NEEDED = {name: NUMBERS[name] for name in ("experts", "foreign", "limits", "models")}


@pytest.fixture(scope="module")
def page(browser):
    page = browser.new_page()
    for script in extension.SCRIPTS[:-1]:
        page.add_script_tag(path=BOOK / "static" / script)
    return page


def ask(page, what, cases):
    """The expression `what` of `one`, each of the cases, as plain data; or the message of an error."""
    script = f"""text => {{
        const {{ numbers, cases }} = JSON.parse(text);
        {START}
        const tried = (one) => {{ try {{ return {what}; }} catch ({{ message }}) {{ return message; }} }};
        return JSON.stringify(cases.map(tried));
    }}"""
    return json.loads(page.evaluate(script, json.dumps({"numbers": NEEDED, "cases": cases})))


def some_training(rng):
    shape = rng.choice(list(EXPERT_MODELS.values()))
    shape = replace(shape, base=replace(shape.base, context=rng.choice((2048, 4096, 8192)), tied=rng.random() < 0.2))
    stack = stack_for(rng.choice(list(STACKS)) if rng.random() < 0.5 else "fsdp-eager", "h100")
    card = replace(GPUS["h100"], memory_bytes=rng.choice((24, 40, 64, 80, 80)) * 1e9)
    cluster = Cluster(card, rng.choice((1, 6, 8, 16, 64, 96, 256, 512)), rng.choice((1, 4, 8, 8, 12, 72)))
    optimizer = rng.choice(list(OPTIMIZERS))
    if optimizer != "adam":
        stack = replace(stack, recipe=recipe_of_optimizer(stack.recipe, optimizer))
    batch = rng.choice((96, 512, 1000, 1024, 4096))
    return ExpertTraining(shape, Training(shape.base, cluster, stack, batch, optimizer=optimizer))


def plain(of):
    return [extension.plain_experts(of.shape), extension.plain_training(of.training)]


def some_layout(rng, gpus):
    tp, pp = rng.choice((1, 2, 4, 8, 3)), rng.choice((1, 1, 2, 3, 4, 16, 64))
    dp = max(1, gpus // (tp * pp))
    ep = rng.choice((1, 2, 4, 8, 16))
    return ExpertLayout(
        tp, pp, dp, ep, rng.choice((1, 2, 3)), rng.choice((0, 1, 2, 3)), rng.choice(("none", "full", "ops"))
    )


def test_bytes_and_refusals_of_random_layouts(page):
    rng = random.Random(0)
    runs = [some_training(rng) for _ in range(600)]
    layouts = [some_layout(rng, of.training.cluster.gpus) for of in runs]
    what = """(([shape, training, layout]) => {
        const on = of.planned(shape, training), why = on.refusal(layout);
        return why ?? [on.ofRank(layout, 0), on.ofRank(layout, layout.pp - 1), on.sent(layout), on.room];
    })(one)"""
    cases = [[*plain(of), layout._asdict()] for of, layout in zip(runs, layouts, strict=True)]
    refused = 0
    for of, layout, said in zip(runs, layouts, ask(page, what, cases), strict=True):
        if isinstance(said, str):
            assert said == expert_refusal(of, layout)
            refused += 1
            continue
        assert expert_refusal(of, layout) is None
        *held, sent, room = said
        assert room == of.training.room_bytes
        for place, theirs in zip((0, layout.pp - 1), held, strict=True):
            ours = rank_bytes(of, layout, place)
            assert theirs == pytest.approx(ours._asdict() | {"total": ours.total}, rel=1e-12)
        assert sent == pytest.approx(exchanged_bytes(of, layout)._asdict(), rel=1e-9, abs=1e-3)
    assert 100 < refused < 570


def test_the_table_is_the_table_of_the_command(page):
    rng = random.Random(1)
    runs = [some_training(rng) for _ in range(80)]
    ways = [(rng.choice((1, 2)), rng.choice((None, 0, 1, 3)), rng.choice(("none", "full"))) for _ in runs]
    what = """(([shape, training, way]) => {
        const on = of.planned(shape, training), rows = on.byEp(...way);
        return { rows, ran: on.ranByEp(rows) };
    })(one)"""
    answered, verdicts = 0, Counter()
    for of, way, said in zip(
        runs, ways, ask(page, what, [[*plain(r), w] for r, w in zip(runs, ways, strict=True)]), strict=True
    ):
        ours = tried(layouts_by_ep, of, *way)
        if isinstance(ours, str):
            assert said == ours
            continue
        answered += 1
        rows = said["rows"]
        assert [one["layout"] for one in rows] == [one._asdict() | {"edp": one.edp} for one in ours]
        held = {one.ep: rank_bytes_most(of, one).total for one in ours}
        for theirs, need in zip(rows, held.values(), strict=True):
            assert math.isclose(theirs["held"]["total"], need)
            assert theirs["verdict"] == memory_verdict(need, of.training.room_bytes)
            verdicts[theirs["verdict"]] += 1
        assert said["ran"] == ran_by_ep(held, of.training.room_bytes)
    assert 30 < answered < 80 and len(verdicts) == 3 and min(verdicts.values()) > 2, verdicts


def some_config(rng):
    config = dict(rng.choice(list(COUNTED.values()))["config"])
    config |= {key: value for key, value in MORE[config["model_type"]].items() if rng.random() < 0.8}
    keys = [
        *config,
        "decoder_sparse_step",
        "first_k_dense_replace",
        "n_shared_experts",
        "moe_layer_freq",
        "warp",
        "lora_r",
    ]
    for key in rng.sample(keys, rng.choice((0, 1, 1, 2))):
        config[key] = rng.choice((None, 0, 1, 2, 7, 64, 1.5, "8", True, False, [1, 2], "x"))
    if rng.random() < 0.3:
        config.pop(rng.choice(list(config)), None)
    return config


def test_a_config_is_read_as_python_reads_it(page):
    rng = random.Random(2)
    configs = [one["config"] for one in COUNTED.values()] + [some_config(rng) for _ in range(400)]
    configs += [config for config, _ in BAD.values()]
    configs += [one["config"] | MORE[one["config"]["model_type"]] for one in COUNTED.values()]
    configs += [inside_of_images(one["config"]) for one in COUNTED.values()]
    cases = [[json.dumps(one), rng.choice((None, 4096))] for one in configs]
    what = """(([text, tokens]) => {
        const said = of.read(text, tokens);
        return said && [said, of.read(of.shortened(text), tokens), of.ofShape(said.shape), of.shortened(text).length];
    })(one)"""
    answered = 0
    for (text, tokens), said in zip(cases, ask(page, what, cases), strict=True):
        ours = tried(expert_shape_of, json.loads(text), tokens)
        if ours is None or isinstance(ours, str):
            assert said == ours, text
            continue
        answered += 1
        shape, notes = ours
        once, again, counts, length = said
        assert once == again and length <= len(text)
        assert once["notes"] == notes, text
        assert once["shape"] == json.loads(json.dumps(extension.plain_experts(shape))), text
        assert (counts["parameters"], counts["active"]) == (shape.num_parameters, shape.num_active_parameters)
    assert 150 < answered < 420


# ---- the page -------------------------------------------------------------------------------------------------------


def cells(page):
    rows = page.locator(".by-ep tbody tr")
    return [rows.nth(i).locator("td").all_text_contents() for i in range(rows.count())]


def test_a_preset_with_experts_shows_memory_by_ep(page_at):  # noqa: F811
    page = page_at("?model=mixtral-8x7b&gpus=64&seq=4096&batch=1024&b=1")
    assert verdict(page) == "It fits. With ep 1, 2, 4 or 8 there is a layout that fits; there are no seconds."
    shape = EXPERT_MODELS["mixtral-8x7b"]
    training = Training(shape.base, Cluster(GPUS["h100"], 64), stack_for("megatron", "h100"), 1024)
    report = str(report_of_experts(ExpertTraining(shape, training), {"zero": 1}))
    for row in cells(page):
        assert " ".join(row).split() in [line.split() for line in report.splitlines()], row
    ran = page.inner_text(".experts .ran").splitlines()
    assert len(ran) == 2 and all(words.removesuffix(".") in report for words in ran)
    assert NO_ERROR_OF_EXPERTS[1:] in page.inner_text(".experts")
    assert len(cells(page)) == 4
    said = page.inner_text(".experts")
    assert "46.7 billion parameters, 12.88 billion active for a token (12.75 without" in said
    assert NO_SECONDS_OF_EXPERTS[1:] in said and not page.is_visible(".bars") and not page.is_visible(".best")
    assert not page.is_visible(".answers") and page.is_visible(".copy")
    page.select_option("[name=model]", "llama-70b")
    assert page.is_visible(".best") and not page.is_visible(".experts") and "MFU" in verdict(page)
    page.select_option("[name=model]", "deepseek-v3")
    assert verdict(page).startswith("It does not fit. The smallest layout needs ")
    assert violations(page) == []


def test_a_config_with_experts_is_pasted_and_goes_into_the_link(page_at):  # noqa: F811
    page = page_at("?model=config&gpus=256&batch=512&b=1")
    config = COUNTED["DeepSeek-V3"]["config"] | MORE["deepseek_v3"]
    typed(page, config=json.dumps(config, indent=1))
    assert "671 billion parameters, 37.55 billion active" in page.inner_text(".experts") and wrong(page) == {}
    notes = page.locator(".config li").all_text_contents()
    assert "num_experts 256: from n_routed_experts" in notes
    again = page_at("?" + page.url.partition("?")[2])
    assert again.inner_text(".experts") == page.inner_text(".experts")
    assert again.locator(".config li").all_text_contents() == notes
    typed(page, config=json.dumps(config | {"num_experts_per_tok": 300}))
    assert wrong(page)["config"] == "300 experts per token of 256; use 1 to 256" and not page.is_visible(".experts")
    typed(page, config="mistralai/Mixtral-8x7B")
    assert "46.7 billion parameters" in page.inner_text(".experts")


def test_a_verdict_of_three_values(page_at):  # noqa: F811
    """On fewer and fewer GB a layout fits, all that fit are tight, none fits; each row has the word and a colour."""
    inks = {"fits": None, "tight": "tight", "does not fit": "bad"}
    seen = set()
    for memory, word, ink in (
        (110, "It fits.", "ok"),
        (97, "It is tight.", "tight"),
        (40, "It does not fit.", "bad"),
    ):
        page = page_at(f"?model=mixtral-8x7b&gpus=8&batch=1024&b=1&memory={memory}")
        assert verdict(page).startswith(word) and page.get_attribute(".verdict strong", "class") == ink
        colours = page.locator(".by-ep tbody tr").evaluate_all("all => all.map(one => one.getAttribute('class'))")
        words = [row[9] for row in cells(page)]
        assert colours == [inks[one] for one in words]
        seen |= {*words}
    assert seen == {*inks}


def test_choices_that_are_not_counted_are_refused(page_at):  # noqa: F811
    page = page_at("?model=mixtral-8x7b&gpus=64&b=1")
    for name, value, words in (
        ("cp", "2", "cp 2 is not counted with experts: choose 1."),
        ("zero", "hsdp", "zero hsdp is not counted with experts: choose a stage of ZeRO."),
        ("recompute", "ops", "Recomputation ops is not counted with experts: choose none or full."),
        ("schedule", "zb-v", "schedule zb-v is not counted with experts: choose 1F1B."),
    ):
        before = page.locator(f"input[name={name}]:checked").get_attribute("value")
        page.check(f"input[name={name}][value='{value}']")
        assert verdict(page) == f"Impossible. {words}" and cells(page) == []
        page.check(f"input[name={name}][value='{before}']")
        assert verdict(page).startswith("It fits.")
    page.check("input[name=zero][value='3']")
    assert all(row[3] == "1" for row in cells(page)), "ZeRO-3 has no pipeline"


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_on_a_phone_the_table_scrolls_and_the_page_does_not(page_at, mode):  # noqa: F811
    page = page_at("?model=gpt-oss-120b&gpus=64&b=1", width=390, mode=mode)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.is_visible(".by-ep") and violations(page) == []
