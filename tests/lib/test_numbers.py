"""Foreign programs beside one process: a healthy one is the same training, and each mistake is found with its cause."""

from functools import partial

import pytest
import torch

from lib.doctor.numbers import compare_numbers, page_of_numbers, read_numbers, start_from, watch
from tests.lib.foreign import training
from tests.lib.foreign.healthy import HEALTHY, ROUNDED
from tests.lib.foreign.mistakes import MISTAKES, REFUSED
from tests.lib.foreign.run import Case, record
from tests.lib.foreign.training import Settings, Training

PARTS = 10  # each starts its ranks once
FEW = pytest.mark.thorough("more programs", keep=1)
# What is planted, and too small for a narrow type: said on every page (`hidden by rounding`).
HIDDEN = {
    "float32": {"MomentsLost, ddp"},
    "autocast": {"MomentsLost, ddp", "OtherEps, tp", "AccumulatedInBfloat16, fsdp2", "ReducedInBfloat16, fsdp2"},
}


def compared(folder, case, exact=None):
    """A case beside the same training in one process."""
    runs = [read_numbers(folder / one.folder) for one in (case.alone, case)]
    return compare_numbers(*runs, read_numbers(folder / exact.folder) if exact else None)


def is_found(mistake, found):
    first = found.findings[0] if found.findings else None
    return first is not None and mistake.is_found(first.step, first.link, first.cause)


@FEW
@pytest.mark.parametrize("part", range(PARTS))
def test_a_healthy_program_is_the_same_training(part, tmp_path):
    cases = HEALTHY[part::PARTS]
    record(cases, tmp_path)
    for case in cases:
        found = compared(tmp_path, case)
        assert found.exit_code == 0 and not found.not_seen, page_of_numbers(found)


@FEW
@pytest.mark.parametrize("part", range(PARTS))
def test_each_mistake_is_found_with_its_cause(part, tmp_path):
    mistakes = MISTAKES[part::PARTS]
    record([mistake.case for mistake in mistakes], tmp_path)
    for mistake in mistakes:
        found = compared(tmp_path, mistake.case)
        assert is_found(mistake, found), f"{mistake.name}\n{page_of_numbers(found)}"


@FEW
@pytest.mark.parametrize("part", range(PARTS))
def test_rounding_is_no_mistake(part, tmp_path):
    """In float32 and bfloat16, with the exact step of float64 and without."""
    cases = ROUNDED[part::PARTS]
    exact = {case: case.alone._replace(settings=case.alone.settings._replace(dtype="float64")) for case in cases}
    record([*cases, *exact.values()], tmp_path)
    for case in cases:
        for found in (compared(tmp_path, case), compared(tmp_path, case, exact[case])):
            assert found.exit_code == 0, page_of_numbers(found)


@pytest.mark.thorough("all mistakes once more, in narrower types")
@pytest.mark.parametrize("dtype", HIDDEN)
def test_mistakes_stand_out_from_rounding(dtype, tmp_path):
    layouts = {case.layout for case in ROUNDED if case.settings.dtype == dtype}
    mistakes = [
        mistake._replace(settings=mistake.settings._replace(dtype=dtype))
        for mistake in MISTAKES
        if mistake.layout in layouts
    ]
    exact = {m: m.case.alone._replace(settings=m.case.alone.settings._replace(dtype="float64")) for m in mistakes}
    record([*(mistake.case for mistake in mistakes), *exact.values()], tmp_path)
    missed = {m.name for m in mistakes if compared(tmp_path, m.case, exact[m]).exit_code != 1}
    assert missed <= HIDDEN[dtype]


def test_what_cannot_be_recorded_is_refused_on_the_ranks(tmp_path):
    for case, words in REFUSED:
        with pytest.raises(torch.multiprocessing.ProcessRaisedException, match=words):
            record([case], tmp_path)


@FEW
@pytest.mark.parametrize("case", [HEALTHY[3], *HEALTHY[8:15]], ids=lambda case: case.folder)
def test_one_process_starts_from_the_recording_of_any_layout(case, tmp_path):
    record([case], tmp_path)
    alone = Training("one", case.settings, tmp_path / "started", steps=1)
    model = alone.make(alone.draw()).net
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    (x, y), _ = start_from(tmp_path / case.folder, model)
    wanted = read_numbers(tmp_path / case.alone.folder).ranks[0].steps[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.flatten(), wanted.tensors["weights"][name].values), name
    (right,) = wanted.batch
    assert sorted(x.tolist()) == sorted(right[0].tolist()) and sorted(y.tolist()) == sorted(right[1].tolist())


@pytest.mark.thorough("each pair of layouts")
def test_any_two_layouts_can_be_compared(tmp_path):
    cases = [case for case in HEALTHY if case.settings == Settings()]
    record(cases, tmp_path)
    runs = [read_numbers(tmp_path / case.folder) for case in cases]
    for one in runs:
        for other in runs:
            assert compare_numbers(one, other).exit_code == 0, (one.folder, other.folder)


def sketched(monkeypatch, folder, cases):
    """Record cases in sums, then one process in the same cuts; yield each case and its comparison."""
    monkeypatch.setattr(training, "watch", partial(watch, sketch=True))
    record(cases, folder / "ranks")
    for case in cases:
        ranks = folder / "ranks" / case.folder
        monkeypatch.setattr(training, "watch", partial(watch, sketch=True, like=ranks))
        record([case.alone], folder / "alone")
        runs = read_numbers(folder / "alone" / case.alone.folder), read_numbers(ranks)
        yield case, compare_numbers(*runs)


@pytest.mark.parametrize("layout", ["hand_dp", pytest.param("fsdp_tp", marks=pytest.mark.thorough("a second"))])
def test_sums_say_the_same(layout, monkeypatch, tmp_path):
    for _, found in sketched(monkeypatch, tmp_path, [Case(layout, 4)]):
        assert found.exit_code == 0 and not found.not_seen, page_of_numbers(found)


@pytest.mark.thorough("all mistakes once more, in sums")
@pytest.mark.parametrize("part", range(PARTS))
def test_sums_find_the_mistakes(part, monkeypatch, tmp_path):
    """But for which of two fused matrices a wrong piece is from."""
    mistakes = {mistake.case: mistake for mistake in MISTAKES[part::PARTS] if not mistake.settings.fused}
    for case, found in sketched(monkeypatch, tmp_path, [*mistakes]):
        assert is_found(mistakes[case], found), f"{mistakes[case].name}\n{page_of_numbers(found)}"


def test_sums_of_two_layouts_are_compared_as_whole_tensors(monkeypatch, tmp_path):
    monkeypatch.setattr(training, "watch", partial(watch, sketch=True))
    cases = [Case("ddp", 2), Case("hand", 2)]
    record(cases, tmp_path)
    found = compare_numbers(*(read_numbers(tmp_path / case.folder) for case in cases))
    assert found.exit_code == 0 and any("ranks one by one" in sentence for sentence in found.not_seen)


@pytest.mark.parametrize("closure", [True, False])
def test_an_optimizer_may_call_the_backward_itself(closure, tmp_path):
    """As that of Lightning: its hooks come before the backward."""

    def recorded(folder, closure):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        seen = watch(folder, model, optimizer, steps=3)
        for step in range(3):

            def backward(factor=step + 1.0):
                optimizer.zero_grad()
                loss = model(factor * torch.ones(4, 3).double()).square().mean()
                loss.backward()
                seen.backward(loss)
                return loss

            if closure:
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
        return read_numbers(folder)

    found = compare_numbers(recorded(tmp_path / "one", False), recorded(tmp_path / "two", closure))
    assert found.exit_code == 0, page_of_numbers(found)
