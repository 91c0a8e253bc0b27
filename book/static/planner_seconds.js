// Seconds of a step by kind, and what follows from them: lib/planner/seconds.py for a page without Python.

const plannerSeconds = (of) => {
  const {
    limits, model, device, stack, recipe, gpus, perNode, batch, h, layers, vocab, s, ffn, queries, blockWeights,
    blockParameters, endParameters, cached, stageLayers, keepsWholeGradients, keptOfOwnTokens, weightsAgain,
    ofContext: { overCp },
  } = of;
  const messages = plannerMessages(of);
  const { NONE, times, plus, waits, hide, allGather, allReduce, betweenStages } = messages;
  const memoryBps = stack.memory_share * device.memory_Bps;

  const matmulS = (flops, rows, columns) => {
    const slower = 1 + stack.half_width / rows + stack.half_width / columns;
    return (flops * slower) / (device.peak_flops * stack.matmul_share);
  };

  // -- of a block and microbatch, forward and backward
  // The sums over tensor-parallel ranks. Without sequence parallelism they hide behind weight gradients alone.
  const overTp = (tp, tokens, slices, recompute, matmuls, weightsS) => {
    if (tp === 1) return hide(NONE, matmuls);
    const x = 2 * tokens * h, full = recompute === "full", skipped = Number(stack.stops_early && full);
    const exposed = tp > perNode ? 1 : stack.exposed_tp; // what hides a part works only inside a node
    if (!slices) {
      const number = limits.tp_sums[recompute] - skipped;
      return hide(times(allReduce(x, tp, 1), number), weightsS, Math.max(exposed, 1 - 2 / number));
    }
    const half = allGather(x, tp, 1);
    const apart = (model.gated ? 3 : 2) * (full ? 3 : 2) * stack.gathers_apart;
    const sums = times(half, 2 * limits.tp_sums[recompute] - skipped + apart);
    const sent = plus(sums, times(half, stack.regathers ? 2 : 0));
    return hide(sent, exposed < 1 ? matmuls : weightsS, (exposed * sums.seconds) / sent.seconds);
  };
  // Of the matmuls, weightsS are gradients of weights; of all three, forwardS are in forward, the rest in backward.
  const ofParts = (matmuls, attention, memory, weightsS, forwardS, tp, cp) => {
    const computationS = matmuls + attention + memory;
    return {
      matmuls, attention, memory, weightsS, forwardS, tp, cp,
      totalS: computationS + waits.exposedS(tp) + waits.exposedS(cp),
      leftS: computationS - tp.hidden_s - cp.hidden_s, // computation that has hidden nothing yet
      ofBackward: 1 - forwardS / computationS,
    };
  };
  const blockOnce = cached((tp, cp, rows, slices, recompute, way) => {
    const isEven = stack.balanced_cp || way === "ulysses"; // whose ranks have all tokens
    const full = recompute === "full", fused = stack.fused_attention, tokens = (rows * s) / cp;
    const early = stack.stops_early && ["full", "mlp"].includes(recompute) ? h * ffn : 0;
    const again = weightsAgain(recompute) - early;
    const once = matmulS((2 * blockWeights * tokens) / tp, tokens, h / tp) / stack.fp8_speedup;
    const matmuls = (3 + again / blockWeights) * once;
    const scores = ((4 * tokens * s * queries) / tp) * (fused ? 0.5 : 1);
    const passes = (fused ? 3.5 : 3) + (full || (recompute === "selective" && !fused) ? 1 : 0);
    const reached = device.peak_flops * (fused ? stack.attention_share : stack.matmul_share);
    const attention = ((passes * scores) / reached) * (isEven ? 1 : (2 * cp - 1) / cp);
    const mine = { tp, cp, rows, sequence_parallel: slices };
    const [whole, kept] = ["none", recompute].map((how) => keptOfOwnTokens(mine, how));
    const moved = 5 * whole + 2 * (whole - kept);
    const memory = Math.max((stack.traffic * moved) / memoryBps, stack.launch_s - matmuls - attention);
    const forwardS = once + attention / passes + (memory * 2 * whole) / moved; // pauses are where the traffic is
    const ofTp = overTp(tp, tokens, slices, recompute, matmuls, once);
    const ofCp = overCp(messages, way, tp, cp, rows, attention, passes, full);
    return ofParts(matmuls, attention, memory, once, forwardS, ofTp, ofCp);
  });
  const blockS = cached((tp, cp, rows, slices, recompute, every, way) => {
    if (every === 1) return blockOnce(tp, cp, rows, slices, recompute, way);
    const [plain, again] = ["none", recompute].map((how) => blockOnce(tp, cp, rows, slices, how, way));
    const mean = (kind) => plain[kind] + (again[kind] - plain[kind]) / every;
    const both = (axis) => waits.plus(waits.times(plain[axis], 1 - 1 / every), waits.times(again[axis], 1 / every));
    const computed = ["matmuls", "attention", "memory", "weightsS", "forwardS"].map(mean);
    return ofParts(...computed, both("tp"), both("cp"));
  });
  const blockOf = ({ tp, cp, rows, sequence_parallel: slices, recompute, every, attention }) =>
    blockS(tp, cp, rows, slices, recompute, every, attention || stack.cp_attention);

  // -- of a step
  // With embedding or head, or both where one rank has both untied.
  const ownParameters = ({ tp, pp, schedule }) => {
    const ends = (pp === 1 || schedule === "zb-v") && !model.tied ? 2 : 1;
    return ((blockParameters * layers) / pp + ends * endParameters) / tp;
  };
  // Of a microbatch between stages; and the seconds of messages that fill and empty the pipeline.
  const overPp = ({ tp, cp, pp, dp, rows, stages_per_rank: v, schedule }, most, block, endsS) => {
    const payload = (2 * ((rows * s) / cp) * h) / tp, leftS = most * block.leftS + endsS;
    const [one, hopsS] = betweenStages(payload, pp, tp * cp * dp), sent = times(one, 2 * v);
    if (schedule !== "1f1b") {
      const weightsS = most * block.weightsS * (1 - block.tp.hidden_s / block.matmuls);
      return [hide(sent, Math.min(leftS, weightsS)), (schedule === "zb-v" ? 5 : 4) * hopsS];
    }
    const mean = pp > 1 ? hopsS / pp / one.seconds : 0;
    return [hide(sent, leftS, mean * (v > 1 ? stack.exposed_pp : 1)), 2 * v * hopsS];
  };
  // Gradients and parameters in a step.
  const overDp = (layout, most, leftS, ofBackward) => {
    const { tp, cp, dp, rows, zero, replicas } = layout;
    const shards = Math.floor((dp * cp) / replicas), m = batch / (dp * rows), mine = ownParameters(layout);
    const gather = (itemsize, calls) => allGather(itemsize * mine, shards, tp, calls);
    const overCopies = (itemsize, calls) => allReduce((itemsize * mine) / shards, replicas, tp * shards, calls);
    const forwardS = (1 - ofBackward) * leftS, backwardS = ofBackward * leftS;
    if (zero === 3) {
      const units = most + 1, share = stack.exposed_zero3, bytes = stack.reduced_bytes, once = gather(2, units);
      const summed = plus(gather(bytes, units), overCopies(bytes, units));
      const forward = hide(once, forwardS, share), backward = hide(plus(once, summed), backwardS, share);
      if (!keepsWholeGradients(layout)) return waits.plus(waits.times(forward, m), waits.times(backward, m));
      const before = waits.times(hide(once, backwardS, share), m - 1); // the last microbatch alone reduces
      return waits.plus(waits.plus(waits.times(forward, m), before), backward);
    }
    const beside = (computationS) => (stack.overlaps_dp ? computationS : 0);
    if (!zero) {
      const calls = Math.max(1, mine / limits.bucket);
      return hide(allReduce(recipe.gradient_bytes * mine, shards, tp, calls), beside(backwardS));
    }
    const calls = Math.max(1, mine / Math.max(limits.bucket, limits.bucket_of_a_rank * shards));
    const reduction = plus(gather(recipe.gradient_bytes, calls), overCopies(recipe.gradient_bytes, calls));
    const reduce = waits.times(hide(reduction, beside(backwardS)), zero === 2 && !keepsWholeGradients(layout) ? m : 1);
    return waits.plus(reduce, hide(gather(recipe.weight_bytes, calls), beside(forwardS)));
  };

  // The seconds by kind, and the messages of each axis.
  const stepAndWaits = (layout) => {
    const { tp, cp, pp, dp, rows, stages_per_rank: v, zero, schedule, replicas, loss_chunks: chunks } = layout;
    const tokens = (rows * s) / cp, m = batch / (dp * rows);
    const block = blockOf(layout);
    const [most, withHead] = stageLayers(layout);
    const mine = ownParameters(layout), copies = (mine * (zero === 3 ? stack.copied_bytes : 0)) / memoryBps;
    const stage = most * block.totalS + copies;
    const head = matmulS((6 * tokens * endParameters) / tp, tokens / chunks, h);
    const ends = Math.max(0, head - (most - withHead) * block.totalS); // of the head, what all stages wait for
    const [ofPp, fillS] = overPp(layout, most, block, ends);
    const ofDp = overDp(layout, most, Math.max(0, most * block.leftS - ofPp.hidden_s), block.ofBackward);
    const updated = mine / (zero ? Math.floor((dp * cp) / replicas) : 1);
    const weights = most * block.weightsS, other = (stage - weights) / 2; // of a rank: nobody waits for weights
    const bubble = {
      "1f1b": ((pp - 1) / v) * stage,
      "zb-h1": (pp - 1) * (2 * other - weights),
      "zb-v": ((pp - 1) / 2) * Math.max(other, 2 * (other - weights)),
    }[schedule];
    const ofAxes = {
      tp: waits.times(block.tp, m * most), cp: waits.times(block.cp, m * most), pp: waits.times(ofPp, m), dp: ofDp,
    };
    const seconds = {
      matmuls: m * (most * block.matmuls + ends),
      attention: m * most * block.attention,
      memory: m * (most * block.memory + copies),
      tp: waits.exposedS(ofAxes.tp),
      cp: waits.exposedS(ofAxes.cp),
      pp: waits.exposedS(ofAxes.pp),
      dp: waits.exposedS(ofDp),
      bubble: bubble + fillS,
      optimizer: (limits.optimizer_bytes * updated) / memoryBps,
    };
    return [seconds, ofAxes];
  };

  // Seconds that a layout takes at least, with any stage of ZeRO: lib/planner/least.py.
  const headS = cached((tp, cp, rows) => {
    const tokens = (rows * s) / cp;
    return matmulS((6 * tokens * endParameters) / tp, tokens, h);
  });
  const leastS = (layout, is1f1b) => {
    const { tp, cp, pp, dp, rows, stages_per_rank: v } = layout;
    const { totalS } = blockOf(layout);
    const [most, withHead] = stageLayers({ pp, stages_per_rank: v, schedule: is1f1b ? "1f1b" : "zb-v" });
    const m = batch / (dp * rows), waited = is1f1b ? (pp - 1) / v : 0;
    const ofStage = Math.max(most * totalS, withHead * totalS + headS(tp, cp, rows));
    return (1 - limits.rounding) * (m * ofStage + waited * most * totalS);
  };

  // -- what follows
  // Of the peak; with recomputation it is the hardware's (HFU). A causal kernel has half of the scores.
  const utilisation = (stepS, { recompute, every } = { recompute: "none", every: 1 }, causal = false) => {
    const scores = (causal ? 1 : 2) * s * queries;
    const again = weightsAgain(recompute) + (["selective", "full"].includes(recompute) ? scores : 0);
    const weights = layers * (blockWeights + scores) + vocab * h;
    return (2 * batch * s * (3 * weights + (layers * again) / every)) / stepS / gpus / device.peak_flops;
  };
  // What follows from the seconds of a step. `tokens` are of the whole training, `price` is of a GPU for an hour.
  const answers = ({ layout, stepS }, tokens = 0, price = 0) => {
    const perS = (batch * s) / stepS, hours = tokens / perS / 3600;
    return {
      step_s: stepS,
      tokens_per_s: perS,
      tokens_per_s_per_gpu: perS / gpus,
      mfu: utilisation(stepS),
      mfu_causal: utilisation(stepS, undefined, true),
      hfu: utilisation(stepS, layout),
      hfu_causal: utilisation(stepS, layout, true),
      ...(tokens && { tokens, days: hours / 24, gpu_hours: hours * gpus }),
      ...(tokens && price && { price_per_gpu_hour: price, money: price * hours * gpus }),
    };
  };
  return { stepAndWaits, leastS, answers };
};
