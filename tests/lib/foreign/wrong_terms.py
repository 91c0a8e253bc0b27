"""Mistakes in what ranks add up: in the loss, its denominator, and the layers below."""

import torch
from torch import nn
from torch.autograd import Function
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.functional import cross_entropy, linear

from tests.lib.foreign.training import NO_LABEL, Training, tokens


class LocalCount(Training):
    """Each replica divides by its own count of tokens, and the means are averaged."""

    def count(self, y):
        return tokens(y)


class AveragedTwice(Training):
    """The loss is divided by the tokens of all replicas, and then averaged over them as well."""

    def count(self, y):
        return super().count(y) * self.dp.size


class SummedForMean(Training):
    """The loss is scaled for a sum over replicas, twice."""

    def count(self, y):
        return super().count(y) / self.dp.size


class MicrobatchesUndivided(Training):
    """Each microbatch has the loss of a whole batch, and they are added."""

    def run_backward(self, loss):
        super().run_backward(loss * self.settings.microbatches)


class StagesUndivided(Training):
    """The schedule adds the microbatches, where the loss is one to be averaged."""

    def make_schedule(self):
        return Schedule1F1B(self.made.stage, n_microbatches=2, loss_fn=self.stage_loss, scale_grads=False)


class MeansOfMicrobatches(Training):
    """Each microbatch of a pipeline is divided by its own count of tokens."""

    def stage_loss(self, logits, y):
        return cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=NO_LABEL)


class EmptyMicrobatch(Training):
    """Each microbatch takes the mean over its own mask, and one has no token: 0 / 0."""

    def loss(self, logits, y):
        mask = (y != NO_LABEL).flatten()
        of_tokens = cross_entropy(logits.flatten(0, 1), y.flatten().clamp(min=0), reduction="none")
        return (of_tokens * mask).sum() / mask.sum() / self.settings.microbatches


class ShiftedInsideShards(Training):
    """Labels are shifted after the tokens were divided: the last token of each shard has none."""

    def loss(self, logits, y):
        shards = [shard.clone() for shard in y.chunk(self.tp.size, dim=1)]
        for shard in shards:
            shard[:, -1] = NO_LABEL
        return super().loss(logits, torch.cat(shards, dim=1))


class Dropout(Training):
    """Dropout is on; no two layouts draw the same masks."""

    def draw(self):
        net = super().draw()
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return net


class ScaledGradientsClipped(Training):
    """A GradScaler scales the loss, and the gradients are clipped before it scales them back."""

    def make_optimizer(self):
        self.scaler = torch.amp.GradScaler("cpu")
        return super().make_optimizer()

    def run_backward(self, loss):
        self.scaler.scale(loss).backward()

    def update(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


# Layers.


class Nothing(Function):
    """In the place of Megatron's f."""

    @staticmethod
    def forward(ctx, x, group):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class MissingF(Training):
    """The last `up` is a column without the sum in its backward."""

    def make(self, net):
        made = super().make(net)
        net.blocks["1"].mlp.up.enter = Nothing
        return made


class VocabularyMask(Training):
    """Tokens of other ranks get zeros, and yet their gradient goes to the first entry of this rank."""

    def make(self, net):
        made = super().make(net)
        net.embed.masked = lambda y, elsewhere: y - (y * elsewhere).detach()
        return made


class BiasOnEachRank(Training):
    """Each rank adds the bias of a row before the sum."""

    def make(self, net):
        made = super().make(net)
        for block in net.blocks.values():
            row = block.mlp.down
            row.forward = lambda x, row=row: row.leave.apply(linear(x, row.weight, row.bias), row.group)
        return made


class StageInputDetached(Training):
    """The second stage detaches what it receives, to run it again in backward: the first gets zeros."""

    def make(self, net):
        made = super().make(net)
        if self.rank == 1:
            first = next(iter(net.blocks.values()))
            first.register_forward_pre_hook(lambda block, inputs: (inputs[0].detach() + 0 * inputs[0],))
        return made


class FrozenNorm(Training):
    """The layout does not train a norm."""

    def make(self, net):
        net.blocks["0"].norm2.weight.requires_grad_(False)
        return super().make(net)


class BufferOfOwnRows(Training):
    """Each rank sets a buffer by its own rows, and nobody shares it."""

    def clip(self):
        self.net.temperature += 0.1 * self.rank
        return super().clip()
