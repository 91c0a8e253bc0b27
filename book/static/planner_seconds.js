// Seconds of a step by kind, and what follows from them: lib/planner/seconds.py for a page without Python.

const plannerSeconds = (of) => {
  const {
    limits, model, device, stack, recipe, gpus, perNode, batch, h, layers, vocab, s, queries, kv, blockWeights,
    blockParameters, endParameters, gathered, stageLayers, keptOnce, mean, weightsAgain,
  } = of;

  const bandwidth = (ranks, stride, share = stack.network_share) => {
    const link = device.link_Bps * stack.link_share;
    if (ranks * stride <= perNode) return link;
    const onNode = Math.max(1, Math.min(ranks, Math.floor(perNode / stride)));
    return Math.min(link, onNode * device.network_Bps * share);
  };
  const matmulS = (flops, rows, columns) => {
    const slower = 1 + stack.half_width / rows + stack.half_width / columns;
    return (flops * slower) / (device.peak_flops * stack.matmul_share);
  };

  const blockOnce = (layout, recompute) => {
    const { tp, cp, rows } = layout;
    const full = recompute === "full", again = recompute === "selective", fused = stack.fused_attention;
    const tokens = (rows * s) / cp;
    const matmuls = matmulS(((6 * blockWeights + 2 * weightsAgain(recompute)) * tokens) / tp, tokens, h / tp);
    const scores = ((4 * tokens * s * queries) / tp) * (fused ? 0.5 : 1);
    const passes = (fused ? 3.5 : 3) + (full || (again && !fused) ? 1 : 0);
    const reached = device.peak_flops * (fused ? stack.attention_share : stack.matmul_share);
    const attention = ((passes * scores) / reached) * (stack.balanced_cp ? 1 : (2 * cp - 1) / cp);
    const whole = keptOnce(layout, "none");
    const moved = stack.traffic * (5 * whole + 2 * (whole - keptOnce(layout, recompute)));
    const sums = limits.tp_sums[recompute] * 2 * gathered(2 * tokens * h, tp);
    const overTp = tp > perNode
      ? sums / bandwidth(tp, 1, stack.message_share)
      : (stack.exposed_tp * sums) / bandwidth(tp, 1);
    const keys = (full ? 4 : 3) * gathered((4 * rows * s * kv) / tp, cp);
    const overCp = (stack.exposed_tp * keys) / bandwidth(cp, tp);
    return [matmuls, attention, moved / (stack.memory_share * device.memory_Bps), overTp, overCp];
  };
  const blockS = (layout) => {
    const again = blockOnce(layout, layout.recompute);
    return blockOnce(layout, "none").map((time, i) => mean(time, again[i], layout.every));
  };

  const seconds = (layout) => {
    const { tp, cp, pp, dp, rows, stages_per_rank: v, zero, schedule, replicas, loss_chunks: chunks } = layout;
    const tokens = (rows * s) / cp, m = batch / (dp * rows), shards = Math.floor((dp * cp) / replicas);
    const block = blockS(layout), ofBlock = block.reduce((a, b) => a + b);
    const [most, withHead] = stageLayers(layout);
    const head = matmulS((6 * tokens * endParameters) / tp, tokens / chunks, h);
    const inside = tp * cp * dp * pp <= perNode;
    const link = bandwidth(inside ? 1 : pp, tp * cp * dp, stack.message_share);
    const exposedPp = v > 1 ? stack.exposed_pp : 1;
    const messages = pp > 1 ? ((2 * v * 2 * tokens * h) / tp / link) * exposedPp : 0;
    const ends = Math.max(0, withHead * ofBlock + head - most * ofBlock); // of the head, what other stages wait for

    const mine = (blockParameters * layers) / pp / tp + endParameters / tp;
    const overCopies = (bytes) => (2 * gathered(bytes / shards, replicas)) / bandwidth(replicas, tp * shards);
    let exposed;
    if (zero === 3) {
      const once = gathered(3 * 2 * mine, shards) / bandwidth(shards, tp) + overCopies(2 * mine);
      exposed = stack.exposed_zero3 * m * once;
    } else {
      const times = zero === 2 ? m : 1; // who keeps a piece of the gradients has to sum each microbatch's
      const bytes = times * recipe.gradient_bytes + (zero ? recipe.weight_bytes : recipe.gradient_bytes);
      const hidden = times * most * ((2 / 3) * block[0] + (2 / 3) * block[1] + (3 / 5) * block[2]);
      exposed = gathered(mine * bytes, shards) / bandwidth(shards, tp);
      exposed += times * overCopies(recipe.gradient_bytes * mine);
      if (stack.overlaps_dp) exposed = Math.max(0, exposed - hidden);
    }
    const updated = mine / (zero ? shards : 1);
    const stage = most * ofBlock + messages;
    const weights = (most * block[0]) / 3, other = (stage - weights) / 2; // of a rank: the gradients nobody waits for
    const bubble = {
      "1f1b": ((pp - 1) / v) * stage,
      "zb-h1": (pp - 1) * (2 * other - weights),
      "zb-v": ((pp - 1) / 2) * Math.max(other, 2 * (other - weights)),
    }[schedule];
    const [matmuls, attention, memory, overTp, overCp] = block.map((time) => m * most * time);
    return {
      matmuls: matmuls + m * ends,
      attention,
      memory,
      tp: overTp,
      cp: overCp,
      pp: m * messages,
      dp: exposed,
      bubble,
      optimizer: (limits.optimizer_bytes * updated) / (stack.memory_share * device.memory_Bps),
    };
  };
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
  return { seconds, answers };
};
