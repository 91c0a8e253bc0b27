// Bytes that a rank holds at the peak of a step: lib/planner/memory.py for a page without Python.

const plannerMemory = (of) => {
  const {
    limits, model, device, stack, recipe, adapters, offload, optimizer, batch, h, layers, vocab, s, ffn, gated, headDim,
    queries, kv, blockParameters, endParameters, sum, keepsWholeGradients, stageLayers, keptOnce, keptBytes,
  } = of;

  const keptBy = (rank, pp, m, v) => {
    if (v === 1) return Math.min(m, pp - rank);
    return Math.min(2 * (pp - rank - 1) + (v - 1) * pp + 1, m * v) / v;
  };
  const adapterParameters = (tp) => adapters.rank * (2 * (h + queries / tp) + 2 * (h + Math.max(kv / tp, headDim))
    + (gated ? 3 : 2) * (h + ffn / tp));
  // Of a rank, before what is offloaded leaves the GPU.
  const stateOf = (layout, held) => {
    const { zero, dp, cp, replicas } = layout, shards = Math.floor((dp * cp) / replicas);
    const kept = adapters ? recipeOf(limits.adapter_recipe, limits.optimizers[optimizer]) : recipe;
    const trained = held.adapters || held.blocks + held.embedding + held.head;
    const [ofBlock, ofEmbedding, ofHead] = limits.optimizers[optimizer];
    const more = adapters ? 0 : held.embedding * (ofEmbedding - ofBlock) + held.head * (ofHead - ofBlock);
    const frozen = adapters ? held.blocks * adapters.base_bytes + 2 * (held.embedding + held.head) : 0;
    return {
      parameters: (trained * kept.weight_bytes + frozen) / (zero >= 3 ? shards : 1),
      gradients: keepsWholeGradients(layout)
        ? trained * stack.whole_gradient_bytes
        : (trained * kept.gradient_bytes) / (zero >= 2 ? shards : 1),
      optimizer: (trained * (kept.master_bytes + kept.state_bytes) + more) / (zero >= 1 ? shards : 1),
    };
  };
  // Units of ZeRO-3, with their gradients; a matrix of 4 bits back in 16.
  const gatheredBytes = ({ tp, zero }, hasHead) => {
    const unpacked = adapters?.base === "4bit" ? (2 * h * ffn) / tp : 0;
    if (zero < 3) return unpacked;
    const [ofBlock, ofHead] = adapters ? [adapters.base_bytes, 2] : Array(2).fill(recipe.weight_bytes + 2);
    return Math.max(2 * ofBlock * blockParameters, hasHead * ofHead * endParameters) / tp + unpacked;
  };
  // Without the kinds that are offloaded.
  const onGpu = (layout, state) => {
    const offloaded = (kind) => offload === "parameters" || offload === kind;
    return {
      parameters: offloaded("parameters") ? 0 : state.parameters,
      gradients: offloaded("gradients") && !keepsWholeGradients(layout) ? 0 : state.gradients,
      optimizer: offloaded("optimizer") ? 0 : state.optimizer,
    };
  };
  const ofRank = (layout, rank) => {
    const { tp, cp, pp, dp, rows, stages_per_rank: v, recompute, schedule } = layout;
    const isV = schedule === "zb-v", hasEmbedding = rank === 0, hasHead = rank === (isV ? 0 : pp - 1);
    const blocks = stageLayers(layout)[hasEmbedding || hasHead ? 1 : 0];
    const tpOfWords = stack.splits_vocabulary ? tp : 1; // of the embedding, and of the logits
    const held = {
      blocks: (blocks * blockParameters) / tp,
      embedding: (hasEmbedding * endParameters) / tpOfWords,
      head: (hasHead && !(hasEmbedding && model.tied) ? endParameters : 0) / tp,
      adapters: adapters ? blocks * adapterParameters(tp) : 0,
    };
    const state = stateOf(layout, held);
    const m = Math.max(1, Math.floor(batch / (dp * rows)));
    const underWay = isV ? Math.min(m, pp) : keptBy(rank, pp, m, v);
    // Of one block, while it is recomputed; beside the input from which it is all recomputed.
    const inside = keptOnce(layout, "none") - (recompute === "full" ? 0 : keptOnce(layout, recompute));
    const kept = underWay * blocks * keptBytes(layout) + inside;
    return {
      ...onGpu(layout, state),
      activations: stack.spare_activations * kept,
      logits: hasHead ? (((stack.logits_bytes * rows * s) / cp) * vocab) / tpOfWords / layout.loss_chunks : 0,
      gathered: gatheredBytes(layout, hasHead),
    };
  };
  const memory = (layout) => {
    const ranks = [0, Math.min(1, layout.pp - 1), layout.pp - 1].map((rank) => ofRank(layout, rank));
    return ranks.reduce((most, one) => (sum(one) > sum(most) ? one : most));
  };
  // Below the highest peak: the states of as many blocks as a rank has in the mean.
  const leastBytes = (layout) => {
    const { tp, pp } = layout, blocks = layers / pp;
    const ofBlocks = { blocks: (blocks * blockParameters) / tp, embedding: 0, head: 0 };
    const held = { ...ofBlocks, adapters: adapters ? blocks * adapterParameters(tp) : 0 };
    return sum(onGpu(layout, stateOf(layout, held)));
  };
  const room = device.memory_bytes * stack.usable_share;
  return { memory, ofRank, leastBytes, room };
};
