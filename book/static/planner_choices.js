// The layouts among which a search chooses: lib/planner/choices.py for a page without Python.
//
// Choices are an object with the fields of Python's Choices, and come from there: those of each library, and all.

const plannerChoices = (of, { axes, ofNode, powers }) => {
  const { limits, stack, layers, gpus, batch, hasEvenStages } = of;
  const usual = limits.choices.usual[stack.library], all = limits.choices.all;

  const stagesPerRank = (choices, pp, m) => {
    const most = choices.interleaved && pp > 1 && m % pp === 0 ? limits.stages_per_rank : 1;
    return upTo(most).filter((v) => hasEvenStages(pp * v));
  };
  // All ranks, microbatch sizes and stages per rank; without ZeRO or recomputation, and with 1F1B.
  const plainLayouts = function* (choices) {
    for (const tp of axes.tp)
      for (const cp of choices.context_parallel ? axes.cp : [1])
        for (const pp of choices.pipeline ? axes.pp : [1]) {
          const dp = gpus / (tp * cp * pp);
          if (!Number.isInteger(dp) || pp > layers + 2 || batch % dp) continue;
          for (const rows of powers(limits.rows).filter((n) => (batch / dp) % n === 0))
            for (const v of stagesPerRank(choices, pp, batch / dp / rows))
              yield {
                tp, cp, pp, dp, rows, stages_per_rank: v, zero: 0, sequence_parallel: tp > 1, recompute: "none",
                schedule: "1f1b", replicas: 1, every: 1, loss_chunks: 1, attention: "",
              };
        }
  };
  const withRecomputation = (choices, plain) =>
    choices.recompute.filter((kind) => kind !== "selective" || !stack.fused_attention)
      .flatMap((kind) => (kind === "full" ? choices.every : [1]).map((n) => [kind, n]))
      .map(([recompute, every]) => ({ ...plain, recompute, every }));
  const possibleSchedules = (choices, { pp, dp, rows, stages_per_rank: v, recompute }) => {
    const m = batch / (dp * rows), fills = { "zb-h1": v === 1 && m >= pp, "zb-v": v === 2 && m >= 2 * pp - 1 };
    const defers = choices.zero_bubble && pp > 1 && recompute === "none";
    return ["1f1b", ...(defers ? choices.deferred.filter((schedule) => fills[schedule]) : [])];
  };
  // Stages of ZeRO on these ranks, each with its copies of the model.
  const possibleZero = (choices, { tp, cp, pp, dp }) => {
    const ranks = dp * cp, alone = pp === 1 && (tp === 1 || choices.hybrid), copies = ranks / ofNode(tp);
    const zeros = choices.zero.filter((zero) => (zero < 3 || alone) && (zero === 0 || ranks > 1)).map((zero) => [zero, 1]);
    const isHybrid = choices.hybrid && alone && choices.zero.includes(3);
    return isHybrid && Number.isInteger(copies) && copies > 1 && copies < ranks ? [...zeros, [3, copies]] : zeros;
  };
  const layoutsOf = function* (choices) {
    for (const plain of plainLayouts(choices)) {
      const zeros = possibleZero(choices, plain);
      for (const layout of withRecomputation(choices, plain))
        for (const [zero, replicas] of zeros)
          for (const schedule of possibleSchedules(choices, layout))
            for (const chunks of choices.loss_chunks)
              yield { ...layout, zero, replicas, schedule, loss_chunks: chunks };
    }
  };
  // The parts of a layout that are not among the choices, in words.
  const beyond = (choices, layout) => {
    const { tp, cp, pp, zero, schedule, recompute, every, replicas, stages_per_rank: v, loss_chunks: chunks } = layout;
    return [
      [pp > 1 && !choices.pipeline, "a pipeline"],
      [cp > 1 && !choices.context_parallel, "context parallelism"],
      [v > 1 && schedule === "1f1b" && !choices.interleaved, "several stages per rank"],
      [schedule !== "1f1b" && !(choices.zero_bubble && choices.deferred.includes(schedule)), schedule.toUpperCase()],
      [zero === 3 && tp > 1 && !choices.hybrid, "ZeRO-3 with tp"],
      [replicas > 1 && !choices.hybrid, "HSDP"],
      [!choices.zero.includes(zero), `ZeRO-${zero}`],
      [!choices.recompute.includes(recompute), `recomputation ${recompute}`],
      [recompute === "full" && !choices.every.includes(every), `recomputation of one block in ${every}`],
      [!choices.loss_chunks.includes(chunks), `a loss in ${chunks} pieces`],
    ].filter(([holds]) => holds).map(([, words]) => words);
  };
  return { usual, all, plainLayouts, withRecomputation, possibleSchedules, possibleZero, layoutsOf, beyond };
};
