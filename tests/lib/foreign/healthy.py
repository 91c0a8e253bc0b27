"""Foreign programs without a mistake: an instrument must be silent about each of them."""

from tests.lib.foreign.run import Case
from tests.lib.foreign.training import Settings

ON_TWO = ("ddp", "fsdp1", "fsdp2", "tp", "sp", "pipeline", "hand", "handsp")
ON_FOUR = ("ddp", "fsdp1", "fsdp2", "handsp", "ddp_tp", "fsdp_tp", "hand_dp")

HEALTHY = [
    *[Case(layout, 2) for layout in ON_TWO],
    *[Case(layout, 4) for layout in ON_FOUR],
    *[Case(layout, 2, settings=Settings(tied=True)) for layout in ("ddp", "pipeline")],
    *[Case(layout, 2, settings=Settings(row_bias=True)) for layout in ("hand", "handsp", "sp")],
    *[Case(layout, 2, settings=Settings(fused=True)) for layout in ("fsdp2", "hand", "handsp")],
    *[Case(layout, 2, settings=Settings(microbatches=4)) for layout in ("ddp", "fsdp2", "handsp")],
    *[Case(layout, 2, settings=Settings(optimizer="sgd")) for layout in ("ddp", "fsdp2", "tp", "pipeline")],
]
# These round; what one process rounds in the same type is no mistake.
ROUNDED = [
    *[Case(layout, 2, settings=Settings(dtype="float32")) for layout in ON_TWO],
    *[Case(layout, 4, settings=Settings(dtype="float32")) for layout in ON_FOUR],
    *[Case(layout, 2, settings=Settings(dtype="autocast")) for layout in ("ddp", "pipeline", "hand", "handsp")],
    Case("hand_dp", 4, settings=Settings(dtype="autocast")),
    *[Case("fsdp2", ranks, settings=Settings(dtype="bf16")) for ranks in (2, 4)],
]
