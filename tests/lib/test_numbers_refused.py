"""What the numbers of a step refuse: programs that cannot be recorded, files that are none, runs that do not fit."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from lib import run
from lib.doctor.__main__ import main
from lib.doctor.numbers import CannotSee, compare_numbers, page_of_numbers, read_numbers, start_from, watch
from lib.doctor.numbers import recorded_numbers as files

ROOT = Path(__file__).parents[2]


def recorded(folder, steps=2, rate=0.1, width=3, dtype=torch.float64, batch=4, **options):
    """A linear layer in one process takes some steps, and they are recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    seen = watch(folder, model, optimizer, steps=steps, **options)
    x = (torch.arange(3.0 * batch).view(batch, 3) / 10).to(dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        seen.batch(x)
        loss = model(x).square().mean()
        loss.backward()
        seen.backward(loss)
        seen.norm(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
    return folder


def verdict(capsys, *folders):
    """Exit code and page of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["numbers", *map(str, folders)])
    said = capsys.readouterr()
    return ended.value.code, said.out + said.err


def test_the_command_says_the_same_and_what_it_compared(tmp_path, capsys):
    code, page = verdict(capsys, recorded(tmp_path / "one"), recorded(tmp_path / "two"))
    assert code == 0 and "the same training: no link that was compared differs" in page
    assert "compared: the weights before the step (4 tensors" in page and "the norm that clips" in page


def test_the_command_says_what_differs(tmp_path, capsys):
    code, page = verdict(capsys, recorded(tmp_path / "one"), recorded(tmp_path / "two", rate=0.2))
    assert code == 1 and "the options of the optimizer" in page and "lr is 0.2 for 0.weight on rank 0" in page


def test_a_program_without_backward_is_not_called_the_same(tmp_path, capsys):
    """Its gradients are still seen before the optimizer; a run whose optimizer has none says nothing."""
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for folder in ("one", "two"):
        watch(tmp_path / folder, model, optimizer, steps=1)
        optimizer.step()
    code, page = verdict(capsys, tmp_path / "one", tmp_path / "two")
    assert code == 2 and "could not see" in page and "backward() was not called" in page


# ---- files -----------------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-200])


def foreign(path):
    torch.save({"model": torch.ones(3)}, path)


def runs_code(path):
    torch.save({"format": files.FORMAT, "evil": Evil()}, path)


def edited(**more):
    def edit(path):
        torch.save(torch.load(path) | more, path)

    return edit


def lies_about_a_shape(path):
    plain = torch.load(path)
    part = plain["steps"][0]["tensors"]["weights"]["0.weight"]
    part["region"] = ((10**9, 10**9), (((0, 10**9),), ((0, 10**9),)), False)
    torch.save(plain, path)


FILES = {
    cut_short: "cannot be read",
    foreign: "was not written by watch",
    runs_code: "cannot be read",
    edited(world=4): "no file of rank 1: 1 of 4 ranks",
    edited(rank=2): "is damaged",
    edited(rank="first"): "is damaged",
    edited(steps=[{}]): "is damaged",
    edited(axes=3): "is damaged",
    lies_about_a_shape: "is damaged",
    Path.unlink: r"has no rank\*.pt",
}


@pytest.mark.parametrize(("damage", "says"), FILES.items())
def test_a_file_that_is_none_is_refused_by_name(tmp_path, monkeypatch, capsys, damage, says):
    monkeypatch.chdir(tmp_path)
    one, two = recorded(tmp_path / "one"), recorded(tmp_path / "two")
    damage(two / "rank0.pt")
    with pytest.raises(ValueError, match=says):
        read_numbers(two)
    code, page = verdict(capsys, one, two)
    assert code == 2 and str(two) in page and "Traceback" not in page
    assert not Path("ran").exists()


def test_files_of_two_runs_are_refused(tmp_path):
    folder = recorded(tmp_path / "one")
    plain = torch.load(folder / "rank0.pt") | {"world": 2}
    torch.save(plain, folder / "rank0.pt")
    late = {"rank": 1, "began_s": plain["ended_s"] + 3600, "ended_s": plain["ended_s"] + 3601}
    for more, says in (
        (late, "rank 1 began 3600 s after rank 0 had ended"),
        ({"rank": 1, "world": 3}, "rank 0 was one of 2, rank 1 one of 3"),
        ({"rank": 1, "steps": plain["steps"][:1]}, "recorded 2, 1 steps"),
        ({"rank": 1, "optimizer": "AdamW"}, "they differ in optimizer"),
        ({"rank": 1, "axes": {"tp": (0, 2)}, "rows": {"tp": "same"}}, "ranks name different axes"),
        ({"rank": 1}, "2 ranks have the same place"),
    ):
        torch.save(plain | more, folder / "rank1.pt")
        with pytest.raises(ValueError, match=says):
            read_numbers(folder)


# ---- runs that do not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 3}, "has 2 steps, .*two has 3"),
        ({"width": 4}, "0.weight has shape \\[3, 3\\] in .*one, \\[4, 3\\] in .*two"),
        ({"sketch": True}, "has every element, .*two has sums"),
        ({"cut": lambda name, tensor: (f"net.{name}", None, 0, 1)}, "4 tensors are only in .*one \\(0.weight"),
    ],
)
def test_runs_that_do_not_fit_are_refused_with_the_difference(tmp_path, options, says):
    one, two = read_numbers(recorded(tmp_path / "one")), read_numbers(recorded(tmp_path / "two", **options))
    with pytest.raises(ValueError, match=says):
        compare_numbers(one, two)


def test_runs_on_other_batches_are_refused(tmp_path):
    one, two = recorded(tmp_path / "one"), recorded(tmp_path / "two")
    plain = torch.load(two / "rank0.pt")
    for step in plain["steps"]:
        step["rows"] = [row + 1 for row in step["rows"]]
    torch.save(plain, two / "rank0.pt")
    with pytest.raises(ValueError, match="have no row of step 1 in common"):
        compare_numbers(read_numbers(one), read_numbers(two))


def test_an_exact_run_must_be_wider_and_of_the_same_step(tmp_path):
    one, wide, same, other = (
        read_numbers(recorded(tmp_path / name, **options))
        for name, options in {
            "one": {"dtype": torch.float32},
            "wide": {},
            "same": {"dtype": torch.float32},
            "other": {"batch": 5},
        }.items()
    )
    assert compare_numbers(one, same, wide).exit_code == 0
    with pytest.raises(ValueError, match="in each bit: record it in a wider type"):
        compare_numbers(one, same, same)
    with pytest.raises(ValueError, match="reads different rows"):
        compare_numbers(one, same, other)


def test_what_rounding_hides_is_listed(tmp_path):
    one, same = (read_numbers(recorded(tmp_path / name, dtype=torch.float32)) for name in ("one", "same"))
    assert "hidden by rounding: less than 5% of a gradient" in page_of_numbers(compare_numbers(one, same))
    wide = read_numbers(recorded(tmp_path / "wide"))
    exactly = " ".join(page_of_numbers(compare_numbers(one, same, wide)).split())
    assert "5 times the rounding of one process" in exactly
    assert "hidden" not in page_of_numbers(compare_numbers(wide, wide))


# ---- programs --------------------------------------------------------------------------------------------------------


def test_nothing_is_installed_where_nothing_is_recorded(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for folder, steps in ((None, 2), (tmp_path / "a", 0)):
        seen = watch(folder, model, optimizer, steps=steps)
        assert not any(hooks)
        seen.batch(torch.ones(1)), seen.backward(None), seen.norm(1.0)
        assert not (tmp_path / "a").exists()
    watch(tmp_path / "b", model, optimizer, steps=2)
    for left in (1, 0):
        assert all(hooks)
        optimizer.step()
        assert len(read_numbers(tmp_path / "b").ranks[0].steps) == 2 - left
    assert not any(hooks)
    optimizer.step()
    assert read_numbers(tmp_path / "b").steps == 2


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.complex64))


def cuts(*returned):
    return {"cut": lambda name, tensor: returned}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"axes": {"dp": (2, 2)}}, "rank 2 of 2 along dp does not exist"),
        ({"axes": {"x": (0, 2)}}, "ranks along 'x': do they read their own rows"),
        ({"axes": {"x": (0, 2)}, "rows": {"x": "all"}}, "must be one of 'own', 'same', 'parts'"),
        (cuts("w", 0), "which is not \\(whole name"),
        (cuts("w", 7, 0, 2), "which is not \\(whole name"),
        (cuts("w", 0, 2, 2), "has indices .* of "),
        (cuts("w", 0, [(0, 1)], 2), "has .* elements here, where"),
        ({"gradient": lambda parameter: None}, "no parameter has a gradient in .grad: call"),
        ({"like": "one"}, "like= has a meaning only with sketch=True"),
    ],
)
def test_a_program_that_cannot_be_seen_is_told_why(tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    recorded("one")
    with pytest.raises(CannotSee, match=says):
        recorded("two", **options)


def test_other_things_than_models_and_optimizers_are_refused(tmp_path):
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, says in (
        ((model, model), "Linear is no torch.optim.Optimizer"),
        ((nn.Identity(), sgd), "the model has no parameters on this rank"),
        (([model, nn.Linear(2, 1)], sgd), "two modules of this rank have a parameter called weight"),
    ):
        with pytest.raises(CannotSee, match=says):
            watch(tmp_path, *given)
    (tmp_path / "file").touch()
    with pytest.raises(CannotSee, match="file cannot be written: "):
        watch(tmp_path / "file", model, sgd)
    wild = Complex()
    wild_sgd = torch.optim.SGD(wild.parameters(), lr=0.1)
    watch(tmp_path, wild, wild_sgd)
    with pytest.raises(CannotSee, match="w has elements of type torch.complex64"):
        wild_sgd.step()


def test_start_from_says_what_it_lacks(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    whole = recorded(tmp_path / "whole")
    ((x,), _) = start_from(whole, model, steps=2)
    assert torch.equal(x[1], torch.tensor([0.3, 0.4, 0.5]).double())
    for folder, given, says in (
        (recorded(tmp_path / "sums", sketch=True), model, "has sums, not elements"),
        (whole, nn.Linear(3, 3), "and the model differ in"),
        (recorded(tmp_path / "wide", width=4), model, "0.weight has \\[3, 3\\] in the model and 12 elements"),
        (recorded(tmp_path / "parts", axes={"cp": (0, 1), "ring": (0, 2)}), model, "ranks have parts of rows"),
    ):
        with pytest.raises(ValueError, match=says):
            start_from(folder, given)
    with pytest.raises(ValueError, match="has 2 steps, not 3"):
        start_from(whole, model, steps=3)


# ---- what only private names of torch say ----------------------------------------------------------------------------


def without_private_names(world, folder):
    """What is said where a private name is missing."""
    mesh, said = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), {}
    sharded = nn.Linear(4, 2)
    fully_shard(sharded, mesh=mesh)
    wrapped = FullyShardedDataParallel(nn.Linear(4, 2), use_orig_params=True, device_id=torch.device("cpu"))
    flattened = FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"))
    flat = wrapped._handle.flat_param
    parts = {
        "_split_tensor": (sharded, type(sharded.weight.placements[0])),
        "_handle": (wrapped, wrapped),
        "_use_orig_params": (wrapped, wrapped._handle),
        **{name: (wrapped, flat) for name in ("_fqns", "_shapes", "_shard_param_infos")},
    }

    def record(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch(folder, model, optimizer, steps=1)
        optimizer.step()

    for name, (model, owner) in parts.items():
        kept = getattr(owner, name)
        delattr(owner, name)
        try:
            record(model)
        except CannotSee as error:
            said[name] = str(error)
        setattr(owner, name, kept)
    try:
        record(flattened)
    except CannotSee as error:
        said["flat"] = str(error)
    record(sharded), record(wrapped)
    return said


def test_a_missing_private_name_is_said(tmp_path):
    (said,) = run(without_private_names, 1, tmp_path)
    for name in ("_split_tensor", "_handle", "_use_orig_params", "_fqns", "_shapes", "_shard_param_infos"):
        assert f"torch {torch.__version__} has no " in said[name] and f".{name}, which says" in said[name]
        assert said[name].endswith("give watch() a cut= that says it")
    assert said["flat"].startswith("FSDP1 without use_orig_params has one flat parameter")


def test_private_names_of_torch_stand_in_one_file():
    for path in (ROOT / "lib" / "doctor" / "numbers").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        private = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "watching"))
        }
        assert not private, path.name


def test_a_framework_that_the_program_did_not_load_is_not_loaded(tmp_path):
    """(torch.optim loads FSDP by itself, so this program has no optimizer.)"""
    program = f"""
import sys
from lib.doctor.numbers import watch, read_numbers, compare_numbers, page_of_numbers
page_of_numbers(compare_numbers(*2 * [read_numbers({str(recorded(tmp_path))!r})]))
loaded = [name for name in sys.modules if name.startswith(("torch.distributed.tensor", "torch.distributed.fsdp"))]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
