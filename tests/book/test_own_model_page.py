"""The programs of the page *Your own model*, taken from it as a reader would: started by `run`, and under torchrun."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "chapters" / "own_model.md"
CONSTANTS = {"ADAMW", "parallel"}
STEPS = '''
def steps(world, folder):
    """Step of the page -> the full weights after it, on rank 0."""
    after = {"a wrapper in the loop": wrapped(world), "layers in shards": sharded(world)[1]}
    after["stages and shards"] = trained(world, Layout(pp=2, tp=2, microbatches=2))[1]
    assert saved(world, Layout(dp=2, pp=2, microbatches=2, zero=1), folder) == ""
    after["resumed in another layout"] = resumed(world, Layout(pp=2, tp=2, microbatches=4), folder)[1]
    return after


if __name__ == "__main__":
    under_torchrun = "RANK" in os.environ
    if under_torchrun:
        world = init()
        after = steps(world, sys.argv[1])
        is_first = world.rank == 0
        close(world, None)
    else:
        after, is_first = run(steps, 4, sys.argv[1])[0], True
    if is_first:
        model = start()
        train(model, ADAMW(model.parameters()))
        apart = {name: largest_difference(state, model.state_dict()) for name, state in after.items()}
        print("apart:", json.dumps(apart))
'''


def definitions() -> str:
    """Imports, classes, functions and constants of the page's cells, in their order; nothing that runs."""
    kept = ["import json"]
    for cell in jupytext.read(PAGE).cells:
        if cell.cell_type != "code" or "remove-cell" in cell.metadata.get("tags", []):
            continue
        for node in ast.parse(cell.source).body:
            is_constant = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in CONSTANTS
            if is_constant or isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
                kept.append(ast.get_source_segment(cell.source, node))
    return "\n\n\n".join(kept)


@pytest.mark.slow("four ranks in five programs, and torchrun, whose processes import torch")
@pytest.mark.parametrize("command", [[], "-m torch.distributed.run --standalone --nproc-per-node 4".split()])
def test_each_step_of_the_page_is_one_process(command, tmp_path):
    program = tmp_path / "own.py"
    program.write_text(definitions() + "\n\n" + STEPS, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, *command, program, tmp_path / "checkpoint"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    apart = json.loads(ended.stdout.partition("apart:")[2].partition("\n")[0])
    assert len(apart) == 4 and all(distance < 1e-12 for distance in apart.values()), apart
