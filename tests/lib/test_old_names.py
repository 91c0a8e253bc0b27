"""What a reader's notebook imports by an old name is there, and is the same."""

from importlib import import_module

import pytest

OLD = {
    "lib.model.turned": "lib.model.rotary",
    "lib.planner.seconds.block_kept_bytes": "lib.planner.kept_of_block.block_kept_bytes",
    "lib.comm.agree": "lib.comm.broadcast_coalesced",
    "lib.tensor_parallel.sequence.see_slices": "lib.tensor_parallel.sequence.mark_partial",
    "lib.mesh.Group": "lib.runtime.group.Group",
    "lib.runtime.spy.watch": "lib.runtime.record_torch_calls.watch_calls",
    "lib.parallel.ParallelGPT": "lib.parallel_model.ParallelModel",
    "lib.parallel.facts_of": "lib.gradient_ranks.facts_of",
    "lib.runtime.transfer.Pending": "lib.runtime.pending.Pending",
    "lib.runtime.transfer.collective": "lib.runtime.pending.collective",
    "lib.runtime.transfer.message": "lib.runtime.pending.message",
    "lib.runtime.transfer.Link": "lib.runtime.emulated_link.Link",
    "lib.runtime.transfer.link": "lib.runtime.emulated_link.link",
    "lib.runtime.transfer.along": "lib.runtime.emulated_link.along",
    "lib.runtime.server.RunError": "lib.runtime.errors.RunError",
    "lib.runtime.ranks.RankError": "lib.runtime.errors.RankError",
    "lib.runtime.ranks.RunTimeout": "lib.runtime.errors.RunTimeout",
    "lib.torchrun.start.StartError": "lib.runtime.errors.StartError",
    "lib.training.config.Checkpoints": "lib.checkpoint.settings.Checkpoints",
    "lib.checkpoint.saver.SIGNALS": "lib.checkpoint.signals.SIGNALS",
    "lib.checkpoint.saver.on_signals": "lib.checkpoint.signals.on_signals",
    "lib.checkpoint.saver.pass_on": "lib.checkpoint.signals.pass_on",
    "lib.checkpoint.saver.passed_on": "lib.checkpoint.signals.passed_on",
    "lib.doctor.links.Measurement": "lib.doctor.measurement.Measurement",
    "lib.doctor.links.outliers": "lib.doctor.measurement.outliers",
    "lib.doctor.exam.Impatient": "lib.doctor.impatient.Impatient",
    "lib.planner.training.GPUS": "lib.cost.hardware.GPUS",
    "book.explain.configs.FOREIGN": "book.explain.tables.FOREIGN",
    "book.explain.configs.FRAMEWORKS": "book.explain.tables.FRAMEWORKS",
    "book.explain.configs.SWITCHES": "book.explain.tables.SWITCHES",
    "book.explain.configs.OFF": "book.explain.tables.OFF",
    "book.explain.configs.USUAL_TOKENS": "book.explain.tables.USUAL_TOKENS",
    "book.explain.configs.Asked": "book.explain.values.Asked",
    "book.explain.configs.left_over": "book.explain.values.left_over",
    "book.explain.configs.refuse_experts": "book.explain.values.refuse_keys",
    "book.explain.configs.read_text": "book.explain.files.read_text",
    "book.explain.configs.read_config": "book.explain.models.read_config",
    "book.explain.configs.shape_of": "book.explain.models.shape_of",
    "book.explain.configs.flags_text": "book.explain.flags.flags_text",
}


def named(path):
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@pytest.mark.parametrize(("old", "new"), OLD.items())
def test_an_old_name_is_the_new_thing(old, new):
    assert named(old) is named(new)
