"""What people type into the search of the built book, and where it leads them: forty questions. `make site` runs it."""

import pytest

from tests.book.test_site import PAGES, Visit, bases  # noqa: F401

pytestmark = pytest.mark.skipif(not PAGES, reason="no built book: make book")

SYMPTOMS, FIT = "book/symptoms.html#", "book/will_it_fit.html"
ASKED = {  # words → the end of the first address, or of one of the first three
    "out of memory": SYMPTOMS + "out-of-memory-on-one-rank",
    "CUDA out of memory": SYMPTOMS + "out-of-memory-on-one-rank",
    "oom": SYMPTOMS + "out-of-memory-on-one-rank",
    "nccl timeout": SYMPTOMS + "a-hang",
    "training hangs": SYMPTOMS + "a-hang",
    "watchdog caught collective operation timeout": SYMPTOMS + "a-hang",
    "loss goes up after resume": SYMPTOMS + "a-restart-that-does-not-continue",
    "resume training": SYMPTOMS + "a-restart-that-does-not-continue",
    "loss spike": SYMPTOMS + "a-spike",
    "loss is nan": SYMPTOMS + "nan",
    "loss differs between 1 and 2 gpus": SYMPTOMS + "the-loss-differs-between-layouts",
    "low mfu": SYMPTOMS + "a-slow-step",
    "straggler": SYMPTOMS + "one-slow-rank",
    "connection refused": SYMPTOMS + "it-does-not-start",
    "how many gpus for 70b": FIT,
    "will it fit": FIT,
    "8b": FIT,
    "vram": FIT,
    "torchrun multi node": "chapters/16_on_a_cluster.html#the-same-program",
    "slurm": "chapters/16_on_a_cluster.html#the-same-program",
    "moe": "chapters/18_experts.html#there-and-home",
    "flash attention": "chapters/01b_memory_deeper.html#fused-and-unfused-attention",
    "ring attention": "chapters/17_context_parallelism.html#around-a-ring",
    "long context": "chapters/17_context_parallelism.html#around-a-ring",
    "fsdp2": "chapters/05_fsdp.html#pytorch-fully-shard-fsdp2",
    "ddp": "chapters/03_data_parallelism.html#pytorch-distributeddataparallel",
    "gradient accumulation": "chapters/03_data_parallelism.html#gradient-accumulation",
    "gradient checkpointing": "chapters/01_memory.html#activation-checkpointing-recomputation",
    "deepspeed zero stage 2": "chapters/04_zero.html#zero-stages-compared",
    "bf16": "chapters/01_memory.html#mixed-precision-16-bytes-per-parameter",
    "how often to save a checkpoint": "chapters/16_on_a_cluster.html#how-often-to-save",
    "which parallelism should i use": "chapters/14_choosing.html",
    "hugging face": "chapters/own_model.html",
    "pipeline simulator": "chapters/workshop.html",
    "cheat sheet": "book/",
    "tied embeddings": "chapters/10c_latency.html#tied-embeddings-on-the-first-and-last-stage",
    "gradient clipping": "chapters/04_zero.html#gradient-clipping-with-sharded-gradients",
    "zero bubble": "chapters/12_zero_bubble.html",
    "dualpipe": "chapters/12b_zero_bubble_deeper.html#dualpipe-v",
    "meta device": "chapters/05b_fsdp_deeper.html#meta-device-initialisation-a-model-larger-than-one-rank",
    "vocabulary parallel": "chapters/06_tensor_parallelism.html#vocabulary-parallel-embedding-and-cross-entropy",
}
FINISHED = "/Search finished|did not match/.test(document.getElementById('search-results').innerText)"
FOUND = "[...document.querySelectorAll('#search-results li > a')].map((a) => a.href)"


@pytest.mark.parametrize("origin", ["server", "disk"])
def test_people_are_led_where_the_answer_is_and_see_no_result_twice(browser, bases, origin):  # noqa: F811
    questions = ASKED if origin == "server" else dict.fromkeys(["constructor", "__proto__", *list(ASKED)[:4]])
    wrong = {}
    with Visit(browser, bases[origin], "search.html") as visit:
        for words in questions:
            visit.page.goto(f"{bases[origin]}/search.html?q={words.replace(' ', '+')}")
            visit.page.wait_for_function(FINISHED, timeout=20_000)
            found = visit.page.evaluate(FOUND)
            wanted = ASKED.get(words, "chapters/" if words == "constructor" else None)
            if len(found) != len(set(found)):
                wrong[words] = "twice: " + ", ".join(one for one in set(found) if found.count(one) > 1)
            elif wanted and (not found or wanted not in found[0]):
                wrong[words] = f"leads to {[one.split('/', 3)[-1] for one in found[:3]]}"
        assert visit.errors == []
    assert wrong == {}


def test_forty_questions_are_asked():
    assert len(ASKED) >= 40
