"""Programs with the types of `spmd_types`: their bugs are real, and the checker says of them what chapter 15 says."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from book.trials import typed
from lib import run

FOUND = {  # program → whether its bug is found by the local types, and by the global ones
    typed.local_count: (False, True),
    typed.replicas_in_norm: (False, True),
    typed.bias_on_each_rank: (True, True),
    typed.router_gradient: (True, True),
    typed.gather_of_heads: (False, True),
    typed.wide_gather: (False, False),
    typed.muon_on_shards: (False, True),
}
installed = pytest.mark.skipif(not typed.spmd_types, reason="spmd_types is not installed")


@installed
@pytest.mark.parametrize("program", FOUND)
def test_the_checker_finds_what_the_chapter_says_and_spares_the_healthy_program(program):
    for local, found in zip((True, False), FOUND[program], strict=True):
        assert typed.checked(program, local, sick=False) == ""
        assert bool(typed.checked(program, local, sick=True)) == found


def test_each_bug_of_the_chapter_is_here():
    assert {*typed.BUGS} == {*FOUND, typed.fused_weight}


@installed
def test_a_bias_that_is_typed_as_replicated_is_found_by_the_global_types_only():
    said = [typed.checked(typed.bias_on_each_rank, local, sick=True, invariant=False) for local in (True, False)]
    assert said[0] == "" and "gets summed N times across ranks" in said[1]


@installed
def test_a_fused_weight_cannot_be_told_from_a_wrong_one():
    assert [typed.checked(typed.fused_weight, True, sick=sick) for sick in (False, True)] == ["", ""]
    assert all(typed.checked(typed.fused_weight, sick=sick) for sick in (False, True))


def copied(spmd, copies, needs_gradient):
    x, weight = torch.randn(4, 8).requires_grad_(needs_gradient), torch.randn(8, 8).requires_grad_()
    spmd.assert_type(x, {"dp": spmd.S(0), "tp": spmd.I})
    spmd.assert_type(weight, {"dp": spmd.R, "tp": spmd.S(1)})
    return (spmd.convert(x, "tp", src=spmd.I, dst=spmd.R) if copies else x) @ weight


@installed
@pytest.mark.parametrize("local", [True, False])
def test_a_missing_copy_matters_only_where_a_gradient_is_needed(local):
    for copies, needs_gradient in ((True, True), (True, False), (False, False)):
        assert typed.checked(copied, local, copies=copies, needs_gradient=needs_gradient) == ""
    said = typed.checked(copied, local, copies=False, needs_gradient=True)
    assert "Invariant type on axis" in said and "src=I, dst=R" in said


def both_ways(world):
    """On real ranks, without a checker: how far each sick program is from its healthy one, relative to it."""
    mesh = init_device_mesh("cpu", tuple(typed.SIZES.values()), mesh_dim_names=tuple(typed.SIZES))
    apart = {}
    with typed.spmd_types.set_current_mesh(mesh):
        for program in typed.BUGS:
            healthy, sick = (program(typed.spmd_types, sick=sick).double() for sick in (False, True))
            if sick.shape != healthy.shape:  # a rank's rows
                healthy = healthy.chunk(typed.SIZES["tp"])[world.rank % typed.SIZES["tp"]]
            apart[program.__name__] = ((sick - healthy).norm() / healthy.norm()).item()
    return apart


@installed
def test_the_bugs_are_real():
    apart = run(both_ways, 4)
    assert min(known.pop("wide_gather") for known in apart) > 0  # float32 is float64 rounded
    assert min(min(known.values()) for known in apart) > 0.005


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(typed, "spmd_types", None)
    said = typed.checked(typed.local_count, sick=True)
    assert said == typed.INSTALL and len(said.splitlines()) == 1


@installed
def test_the_group_that_only_pretends_is_gone_afterwards():
    def wrong(spmd):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        typed.checked(wrong)
    assert not torch.distributed.is_initialized()
