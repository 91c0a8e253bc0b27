"""A shell script is read as a shell runs it; what nothing in it decides is asked for, and never guessed."""

import pytest

from book.explain.configs import read_foreign
from book.explain.shell import commands
from book.explain.shell_words import Undecided

RUN = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 \\
    --seq-length 1024 --micro-batch-size 1 --global-batch-size 8 --swiglu"""
WORDS = {  # script → the words of its last command
    "A=1; run $A ${A} '$A' \"$A b\"": "run|1|1|$A|1 b",
    "run ${A:-two} ${B:-'three'} ${C:-\"five\"} ${1:-six}": "run|two|three|five|six",
    "A='--x 1 --y'\nrun $A \"$A\"": "run|--x|1|--y|--x 1 --y",
    "A=(1 2 # no\n 'three 3')\nA+=(4)\nrun ${A[@]} - \"${A[@]}\"": "run|1|2|three|3|4|-|1|2|three 3|4",
    "A=x\nA+=y\nexport B=$A\nrun $B": "run|xy",
    "A=8; B=4; run $((A*B)) $(( $A / 2 + 1 ))": "run|32|5",
    "run a\\\n  b # c\n": "run|a|b",
    "run a > log 2>&1 | tee x\nrun b 2> /dev/null": "run|b",
    "f() { run $A; }\nA=1\nf": "run|1",
    "for n in 1 2; do A=$n; done\nrun $A": "run|2",
    "while [ $# -gt 0 ]; do A=$2; shift; done\nrun ${A:-0}": "run|0",
    "if [ 2 -gt 1 ] && [[ a == a ]]; then A=1; else A=2; fi; run $A": "run|1",
    "A=8B\nif [ $A = 7B ]; then N=1\nelif [ \"$A\" == 8B ]; then N=2\nelse N=3\nfi\nrun $N": "run|2",
    "A=b\ncase $A in a) N=1;; b|c) N=2;; *) N=3;; esac\nrun $N": "run|2",
    "[ -n \"\" ] && A=1\n[ -z \"\" ] && B=2 || B=3\nrun ${A:-0} $B": "run|0|2",
    "[ -d x ] || exit 1\nif [ ! -f y ]; then echo no; exit 1; fi\nrun a": "run|a",
    "if [ $# -ne 2 ]; then exit 1; fi\nrun a": "run|a",
    "mkdir x || { echo; exit 1; }\nrun a && run b": "run|b",
    "sbatch <<EOF\nrun a\nEOF\n": "run|a",
    "cat > f <<'EOF'\nrun a '\nEOF\nrun b": "run|b",
}  # fmt: skip


@pytest.mark.parametrize("script", WORDS)
def test_words_as_a_shell_makes_them(script):
    ran = [one for one in commands(script).run if one[0] == "run"]
    assert "|".join(ran[-1]) == WORDS[script]


def test_what_nothing_sets_stays_as_it_is():
    (run,) = commands('run $A ${B} "$(nproc) x" ${C%%.*} $((D+1))').run
    assert run == ["run", "$A", "${B}", "$(nproc) x", "${C%%.*}", "$((D+1))"]


@pytest.mark.parametrize("script", ["run 'a", 'run "a', "if true; then run", "A=(1 2", "case a in b) run", "run $(a"])
def test_what_does_not_end_is_an_error(script):
    with pytest.raises(ValueError):
        commands(script)


def test_a_sweep_of_sweeps_ends():
    loops = "".join(f"for {name} in 1 2 3 4 5 6 7 8; do\n" for name in "abcd") + "run $a\n" + "done\n" * 4
    with pytest.raises(ValueError, match="its loops run more than 500 commands"):
        commands(loops)
    with pytest.raises(ValueError, match="its functions call themselves without an end"):
        commands("f() { f; }\nf")


def test_what_a_condition_leaves_open_is_undecided():
    (run,) = commands('A=1; B="--y 2"\nif [ $X = a ]; then A=2; B="--z"; C=(--w 1); fi\nrun $A $B ${C[@]}').run
    assert run == ["run", "$A", "--z", "--y", "--w"] and all(isinstance(word, Undecided) for word in run[1:])
    assert {word.condition for word in run[1:]} == {"[ $X = a ]"}
    same = commands("if [ $X = a ]; then A=1; else A=1; fi\nrun $A").run
    assert same == [["run", "1"]] and not isinstance(same[0][1], Undecided)


@pytest.fixture
def read(tmp_path):
    def read(script, *words):
        (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
        return read_foreign([str(tmp_path / "run.sh"), *words])

    return read


def test_the_fsdp_script_of_megatron(read):
    """NVIDIA/Megatron-LM examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh at 09fde85, what it turns on."""
    said = read(f"""
USE_MEGATRON_FSDP=${{USE_MEGATRON_FSDP:-1}}
SHARDING_STRATEGY=${{SHARDING_STRATEGY:-"optim_grads_params"}}
DTYPE="fp8"
ARGS=(--bf16 --use-distributed-optimizer)
if [ "${{USE_MEGATRON_FSDP}}" = 1 ]; then
    ARGS=(
        "${{ARGS[@]}}"
        --use-megatron-fsdp
        --data-parallel-sharding-strategy ${{SHARDING_STRATEGY}}
        # --num-distributed-optimizer-instances 2
    )
fi
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=("--fp8-format hybrid" "--fp8-param-gather")
fi
{RUN} ${{ARGS[@]}} ${{DTYPE_ARGS[@]}}""")
    assert (said.found["zero"], said.found["gpus"]) == (3, 8) and "replicas" not in said.found
    assert [note.split(": ")[1] for note in said.notes] == ["fp8-param-gather"]
    assert said.found["fp8"] is True


def test_a_field_that_hangs_on_something_outside_is_asked_for(read):
    sizes = "case $1 in\n8B) L=32;;\n70B) L=80;;\nesac\n" + RUN.replace("--num-layers 4", "--num-layers $L")
    with pytest.raises(
        ValueError, match=r"num-layers depends on case \$1, which nothing sets; add --num-layers after"
    ):
        read(sizes)
    assert read(sizes, "--num-layers", "32").found["num_layers"] == 32
    both = sizes.replace("--seq-length 1024", "--seq-length $2")
    with pytest.raises(
        ValueError, match="run.sh leaves open --seq-length, --num-layers: add them after it, with val"
    ):
        read(both)
    assert read(both, "--num-layers", "32", "--seq-length", "4096").found["context"] == 4096
    switch = 'if [ $2 = on ]; then SP="--sequence-parallel"; fi\n' + f"{RUN} --tensor-model-parallel-size 2 $SP"
    with pytest.raises(ValueError, match=r"sequence-parallel depends on \[ \$2 = on \], which nothing sets; add"):
        read(switch)
    assert read(switch, "--sequence-parallel", "true").found["sequence_parallel"] is True
    speaks = 'if [ $2 = on ]; then A="--moe-layer-freq 2"; fi\n' + f"{RUN} $A"
    with pytest.raises(ValueError, match="moe-layer-freq depends on"):
        read(speaks)
    harmless = 'if [ -n "$WANDB" ]; then A="--wandb-project x"; fi\n' + f"{RUN} $A"
    assert read(harmless).notes == []
    with pytest.raises(ValueError, match=r"use-distributed-optimizer is \$MORE, which nothing sets"):
        read(f"{RUN} --use-distributed-optimizer $MORE")


def test_the_command_that_trains(read):
    said = read(f"python tools/preprocess_data.py --vocab-size 9 --num-layers 7\necho --num-layers 5\n{RUN}")
    assert said.found["num_layers"] == 4 and "vocab_size" not in said.found
    for script in (f'CMD="{RUN}"\necho $CMD\neval $CMD', f'bash -c "{RUN}"', f"sbatch <<EOF\n{RUN}\nEOF"):
        assert read(script).found["num_layers"] == 4, script
    sweep = f"for T in 1 2 4; do\n{RUN} --tensor-model-parallel-size $T\ndone"
    with pytest.raises(ValueError, match=r"has 3 commands \(pretrain_gpt.py, .*: leave in it the one that trains"):
        read(sweep)
    with pytest.raises(ValueError, match=r"has 2 commands .* and nothing sets \[ \$X = 1 \]"):
        read(f"if [ $X = 1 ]; then\n{RUN} --bf16\nelse\n{RUN}\nfi")
