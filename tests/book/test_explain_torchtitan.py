"""torchtitan's files and names: flavors, schedules without a pipeline, HSDP of any shape, configurations in Python."""

import json

import pytest

from book.explain.configs import read_foreign
from tests.book.test_explain import TITAN, answered, of, refused
from tests.book.test_explain_files import MEGATRON


@pytest.fixture
def ask_titan(tmp_path, capsys):
    """The plan of torchtitan's 8B on 64 GPUs with further keys of [parallelism]."""

    def ask(keys, text=TITAN, *words):
        for line in keys.splitlines():
            key = line.partition(" ")[0]
            text = "\n".join(one for one in text.splitlines() if not one.startswith(key))
        text = text.replace("[parallelism]", f"[parallelism]\n{keys}")
        (tmp_path / "a.toml").write_text(text)
        read_foreign([str(tmp_path / "a.toml")])
        return json.loads(answered(capsys, tmp_path / "a.toml", "--gpus", 64, "--batch", 128, "--json", *words))

    return ask


def test_the_flavor_is_the_model_and_an_option_overrules_it(capsys, tmp_path):
    (tmp_path / "a.toml").write_text(TITAN)
    said = json.loads(answered(capsys, tmp_path / "a.toml", "--gpus", 64, "--json"))
    assert said["report"]["assumes"]["model"].startswith("8.03 billion parameters")
    assert said["model"]["context"] == 8192 and said["by"]["model"] == "model.flavor 8B"
    said = json.loads(answered(capsys, tmp_path / "a.toml", "--gpus", 64, "--model", "llama3.2-1b", "--json"))
    assert said["report"]["assumes"]["model"].startswith("1.236 billion parameters")
    (tmp_path / "a.toml").write_text(TITAN.replace('"8B"', '"9B"'))
    assert "give --model" in refused(capsys, tmp_path / "a.toml", "--gpus", 64)
    (tmp_path / "a.toml").write_text(TITAN.replace('"llama3"', '"llama4"'))
    assert "model.name llama4 is not modelled" in refused(capsys, tmp_path / "a.toml", "--gpus", 64)


def test_a_schedule_without_a_pipeline_is_no_error(ask_titan):
    interleaved = 'pipeline_parallel_schedule = "Interleaved1F1B"'
    layout = ask_titan(interleaved)["report"]["layout"]
    assert (layout["pp"], layout["stages_per_rank"], layout["zero"]) == (1, 1, 3)
    layout = ask_titan(interleaved, TITAN, "--pp", 2)["report"]["layout"]
    assert (layout["pp"], layout["stages_per_rank"], layout["zero"]) == (2, 2, 2)
    old = TITAN.replace("[parallelism]", "[experimental]\npipeline_parallel_degree = 4\n[parallelism]")
    with pytest.raises(ValueError, match=r"experimental.pipeline_parallel_degree 4 .*speaks of parallelism"):
        ask_titan("", old)


@pytest.mark.parametrize(("copies", "shards"), [(2, 32), (16, 4), (64, 1), (4, -1)])
def test_hsdp_of_any_shape(copies, shards, ask_titan):
    keys = f"data_parallel_replicate_degree = {copies}\ndata_parallel_shard_degree = {shards}"
    said = ask_titan(keys)["report"]["layout"]
    zero = 0 if copies == 64 else 3
    assert (said["zero"], said["replicas"], said["dp"]) == (zero, copies if zero else 1, 64)


def test_zero_3_in_a_pipeline_for_software_that_has_it(ask_titan, capsys):
    said = ask_titan('pipeline_parallel_degree = 2\nfsdp_reshard_after_forward = "always"')
    assert (said["report"]["layout"]["zero"], said["report"]["layout"]["pp"]) == (3, 2)
    both = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --pipeline-model-parallel-size 2"
    assert "ZeRO-3 is planned without pipeline" in refused(capsys, *MEGATRON.split(), *both.split(), "--gpus", 64)


def test_configurations_in_python_by_name(capsys):
    by_name = "--module llama3 --config llama3_8b --gpus 64 --json".split()
    said = json.loads(answered(capsys, *by_name, "--parallelism.tensor_parallel_degree", 2))
    layout = said["report"]["layout"]
    assert (layout["tp"], layout["zero"], layout["recompute"], layout["rows"]) == (2, 3, "ops", 1)
    assert said["model"]["context"] == 8192 and said["notes"] == []
    tokens = "--training.num_tokens_per_microbatch_per_dp_rank 32768 --training.num_tokens_per_train_step 2097152"
    said = json.loads(answered(capsys, *by_name, *tokens.split()))
    assert said["report"]["layout"]["rows"] == 4 and said["global_batch"] == 256
    launched = "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_70b".split()
    assert of(read_foreign(launched), "gpus", "tp", "model", "recompute") == (8, 8, "llama3-70b", "full")
    wrong = refused(capsys, *"--module llama3 --config llama3_8b_mxfp8 --gpus 64".split())
    assert (
        "is a Python function of torchtitan, which is not run here; known are llama3_debugmodel, llama3_8b" in wrong
    )
