"""Mistakes that people make, each planted in a foreign program, and what an instrument should say of it."""

from typing import NamedTuple

from tests.lib.foreign import wrong_starts as start
from tests.lib.foreign import wrong_sums as sums
from tests.lib.foreign import wrong_terms as terms
from tests.lib.foreign.run import Case
from tests.lib.foreign.training import Settings, Training


class Mistake(NamedTuple):
    """A mistake in a layout.

    Attributes:
        program: the training with the mistake; its docstring says what it is.
        link: the first link of the chain that differs; "a or b" where each would be right.
        cause: what is named, likewise.
        step: at which it shows.
    """

    program: type[Training]
    layout: str
    ranks: int
    link: str
    cause: str
    settings: Settings = Settings()
    step: int = 1

    @property
    def name(self) -> str:
        return f"{self.program.__name__}, {self.layout}"

    @property
    def case(self) -> Case:
        return Case(self.layout, self.ranks, self.program, self.settings)

    @property
    def planted_in(self) -> list[str]:
        """The methods of `Training` that have the mistake; of Muon none: any layout that cuts matrices has it."""
        return [name for name in vars(Training) if name in vars(self.program) and not name.startswith("__")]

    def is_found(self, step: int, link: str, cause: str) -> bool:
        return step == self.step and link in self.link.split(" or ") and cause in self.cause.split(" or ")


MISTAKES = [
    # Before the first step.
    Mistake(start.WeightsDrawnAgain, "ddp", 2, "weights", "own weights"),
    Mistake(start.OneSeedForAllShards, "handsp", 2, "weights", "same seed on shards"),
    Mistake(start.FusedInOnePiece, "hand", 2, "weights", "shards of several pieces", Settings(fused=True)),
    Mistake(start.CutToldInOnePiece, "hand", 2, "weights", "shards of several pieces", Settings(fused=True)),
    Mistake(start.WeightsRounded, "ddp", 2, "updates", "copies step apart"),
    Mistake(start.NotDivided, "ddp", 2, "data", "data not divided"),
    Mistake(start.DividedTwice, "fsdp2", 2, "data", "rows missing"),
    Mistake(start.RowsByGlobalRank, "hand", 2, "data", "a replica reads different rows"),
    Mistake(start.RowsByGlobalRank, "fsdp_tp", 4, "data", "a replica reads different rows"),
    # The loss, and what it is divided by.
    Mistake(terms.LocalCount, "ddp", 2, "loss", "wrong terms"),
    Mistake(terms.LocalCount, "fsdp2", 2, "loss", "wrong terms"),
    Mistake(terms.AveragedTwice, "fsdp2", 2, "gradients or loss", "one factor"),
    Mistake(terms.SummedForMean, "fsdp2", 4, "loss", "one factor"),
    Mistake(terms.MicrobatchesUndivided, "fsdp2", 2, "gradients or loss", "one factor", Settings(microbatches=2)),
    Mistake(terms.StagesUndivided, "pipeline", 2, "gradients", "one factor"),
    Mistake(terms.MeansOfMicrobatches, "pipeline", 2, "loss", "wrong terms"),
    Mistake(terms.EmptyMicrobatch, "ddp", 2, "loss", "not finite", Settings(microbatches=4)),
    Mistake(terms.ShiftedInsideShards, "handsp", 2, "loss", "wrong terms"),
    Mistake(terms.Dropout, "ddp", 2, "loss", "wrong terms"),
    Mistake(terms.ScaledGradientsClipped, "ddp", 2, "gradients", "one factor"),
    # Its gradients are 2e-5 apart: so small that they may be taken for rounding.
    Mistake(start.OtherEps, "tp", 2, "loss or gradients", "wrong terms or narrow sums"),
    # Layers and stages.
    Mistake(terms.MissingF, "hand", 2, "gradients", "missing sum inside"),
    Mistake(terms.VocabularyMask, "handsp", 2, "gradients", "some rows"),
    Mistake(terms.BiasOnEachRank, "hand", 2, "loss", "wrong terms", Settings(row_bias=True)),
    Mistake(terms.StageInputDetached, "pipeline", 2, "gradients", "missing sum inside or no gradient"),
    Mistake(terms.FrozenNorm, "ddp", 2, "gradients", "no gradient"),
    Mistake(terms.BufferOfOwnRows, "ddp", 2, "buffers", "buffer"),
    # Sums over ranks.
    Mistake(sums.NormsNotSummed, "handsp", 2, "gradients", "missing sum"),
    Mistake(sums.NormsNotSummed, "hand_dp", 4, "gradients", "missing sum"),
    Mistake(sums.NormsNotInPlan, "sp", 2, "gradients", "missing sum"),
    Mistake(sums.NormsSummedTwice, "handsp", 2, "gradients", "counted twice"),
    Mistake(sums.WrongAxis, "hand_dp", 4, "gradients", "wrong axis"),
    Mistake(sums.NeverSynchronised, "ddp", 2, "gradients", "missing sum", Settings(microbatches=2)),
    Mistake(sums.ClippedBeforeSum, "ddp", 2, "gradients", "missing sum"),
    Mistake(sums.OneRankDivides, "ddp", 2, "gradients", "one factor"),
    Mistake(sums.TiedSummedTwice, "ddp", 2, "gradients", "counted twice", Settings(tied=True)),
    Mistake(sums.TiedStagesNotSummed, "pipeline", 2, "gradients", "missing sum", Settings(tied=True)),
    Mistake(sums.AccumulatedInBfloat16, "fsdp2", 2, "gradients", "narrow sums", Settings(microbatches=4)),
    Mistake(start.ReducedInBfloat16, "fsdp2", 2, "gradients", "narrow sums"),
    Mistake(sums.GradientsKept, "ddp", 2, "gradients", "stale gradients", step=2),
    # The norm and the clip.
    Mistake(sums.LocalNorm, "handsp", 2, "norm", "local norm"),
    Mistake(sums.LocalNorm, "tp", 2, "norm", "local norm"),
    Mistake(sums.LocalNorm, "pipeline", 2, "norm", "local norm"),
    Mistake(sums.NormCountsCopies, "handsp", 2, "norm", "norm counts copies"),
    Mistake(sums.NormOfFirstRank, "handsp", 2, "norm", "norm leaves out shards"),
    Mistake(sums.ClippedByValue, "ddp", 2, "clipped", "clip"),
    # The optimizer.
    Mistake(start.RateOfOneRank, "ddp", 2, "options", "options"),
    Mistake(start.RateOfOneRank, "fsdp2", 2, "options", "options"),
    Mistake(start.RateOfOneRankLater, "ddp", 2, "options", "options", step=2),
    Mistake(start.DecayOfNorms, "ddp", 2, "options", "options"),
    Mistake(start.DecayOfOneRank, "pipeline", 2, "options", "options"),
    Mistake(start.OtherBetas, "tp", 2, "options", "options"),
    Mistake(start.OptimizerBeforeSharding, "fsdp2", 2, "options or updates", "not in the optimizer"),
    Mistake(start.MomentsLost, "ddp", 2, "updates", "optimizer state", step=2),
    Mistake(start.MomentsLostOfOneRank, "ddp", 2, "updates", "copies step apart", step=2),
    Mistake(start.MuonOnShards, "hand", 2, "updates", "optimizer state", Settings(optimizer="muon")),
    # Its second step has no batch and no backward, only what the first left in the gradients.
    Mistake(sums.StepTwice, "ddp", 2, "gradients or clipped", "no gradient or stale gradients", step=2),
]

# `watch` refuses these in the program itself, on all ranks: of each the words that its error must have.
REFUSED = [
    (Case("fsdp2", 2, sums.NeverReduced, Settings(microbatches=2)), "no parameter has a gradient"),
]
