// Bytes that a rank holds at the peak of a step: lib/planner/memory.py for a page without Python.

const plannerMemory = (of) => {
  const {
    model, device, stack, recipe, batch, vocab, s, blockParameters, endParameters, sum, stageLayers, keptOnce,
    keptBytes,
  } = of;

  const keptBy = (rank, pp, m, v) => {
    if (v === 1) return Math.min(m, pp - rank);
    return Math.min(2 * (pp - rank - 1) + (v - 1) * pp + 1, m * v) / v;
  };
  const ofRank = (layout, rank) => {
    const { tp, cp, pp, dp, rows, stages_per_rank: v, zero, recompute, schedule } = layout;
    const isV = schedule === "zb-v", hasEmbedding = rank === 0, hasHead = rank === (isV ? 0 : pp - 1);
    const blocks = stageLayers(layout)[hasEmbedding || hasHead ? 1 : 0];
    const ends = hasEmbedding + (hasHead && !(hasEmbedding && model.tied));
    const held = (blocks * blockParameters + ends * endParameters) / tp;
    const shards = Math.floor((dp * cp) / layout.replicas);
    const m = Math.max(1, Math.floor(batch / (dp * rows)));
    const underWay = isV ? Math.min(m, pp) : keptBy(rank, pp, m, v);
    // Of one block, while it is recomputed; beside the input from which it is all recomputed.
    const inside = keptOnce(layout, "none") - (recompute === "full" ? 0 : keptOnce(layout, recompute));
    const kept = underWay * blocks * keptBytes(layout) + inside;
    return {
      parameters: (held * recipe.weight_bytes) / (zero >= 3 ? shards : 1),
      gradients: (held * recipe.gradient_bytes) / (zero >= 2 ? shards : 1),
      optimizer: (held * (recipe.master_bytes + recipe.state_bytes)) / (zero >= 1 ? shards : 1),
      activations: stack.spare_activations * kept,
      logits: hasHead ? (((stack.logits_bytes * rows * s) / cp) * vocab) / tp / layout.loss_chunks : 0,
      gathered: zero === 3 ? (2 * (recipe.weight_bytes + 2) * blockParameters) / tp : 0,
    };
  };
  const memory = (layout) => {
    const ranks = [0, Math.min(1, layout.pp - 1), layout.pp - 1].map((rank) => ofRank(layout, rank));
    return ranks.reduce((most, one) => (sum(one) > sum(most) ? one : most));
  };
  const room = device.memory_bytes * stack.usable_share;
  return { memory, room };
};
