// What lib/planner says of a training and its layouts, for a page without Python: the search, and its words.
//
// Formulas only: every number (models, GPUs, what a stack reaches, limits) comes from Python, as JSON in the page. A
// test compares both on a thousand random trainings; names are Python's, and so is the order of the formulas. A
// training is {model, device, stack, gpus, per_node, global_batch}, a layout has the fields of Layout4D.

const planner = (training, limits) => {
  const sizes = plannerSizes(training, limits);
  const { model, recipe, offload, noSeconds, gpus, perNode, batch, layers, heads, s, blockParameters } = sizes;
  const { parameters, sum } = sizes;
  const { stepAndWaits, answers } = plannerSeconds(sizes), { memory, room } = plannerMemory(sizes);
  const { verdict, verdictText, ranText } = plannerMargin(sizes, room);
  const { axes, refusal, layoutsOf, allLayouts, layoutText, upTo, powers, divisors } = plannerLayouts(sizes);

  const planned = (layout) => {
    const held = memory(layout);
    if (noSeconds) return { layout, seconds: {}, waits: {}, memory: held, stepS: NaN, bytes: sum(held) };
    const [time, waits] = stepAndWaits(layout);
    return { layout, seconds: time, waits, memory: held, stepS: sum(time), bytes: sum(held) };
  };
  // What each axis sends in a step, where, and how long, as the command prints it.
  const sends = ({ layout: { tp, cp, dp }, waits }) => {
    const ofAxes = {
      tp: [tp, "activations"],
      cp: [tp * cp, "keys and values"],
      dp: [tp * cp * dp, "gradients, parameters"],
      pp: [gpus, "activations, their gradients"],
    };
    return Object.entries(ofAxes).filter(([axis]) => waits[axis].messages.bytes).map(([axis, [reach, what]]) => {
      const { messages, hidden_s } = waits[axis], where = reach <= perNode ? "inside a node" : "between nodes";
      const Bps = messages.bytes / (messages.seconds - messages.latency_s);
      return { axis, what, where, Bps, ...messages, hidden_s, exposed_s: messages.seconds - hidden_s };
    });
  };
  // The fastest layouts that fit, tight ones last, and the smallest of all. Recomputation and a loss in pieces only
  // where necessary.
  const best = ({ most = 3, headroom = limits.headroom, ...choices } = {}) => {
    const enough = new Set(), easy = (1 - headroom) * room;
    const all = allLayouts(choices).flatMap((layout) => {
      const { tp, cp, pp, rows, stages_per_rank: v, zero, schedule, replicas, recompute, loss_chunks: chunks } = layout;
      const plain = [tp, cp, pp, rows, v, zero, schedule, replicas].join();
      if ((recompute !== "none" || chunks > 1) && enough.has(plain)) return [];
      const one = planned(layout);
      if (recompute === "none" && one.bytes <= easy) enough.add(plain);
      return [one];
    });
    const fitting = all.filter((one) => one.bytes <= room).sort((a, b) =>
      (a.bytes > easy) - (b.bytes > easy) || a.stepS - b.stepS || a.bytes - b.bytes);
    const smallest = all.reduce((a, b) => (a && a.bytes <= b.bytes ? a : b), null);
    return { found: fitting.slice(0, most), smallest };
  };
  // Without seconds: those that fit, tight ones last, then the least split and the least sharded first.
  const leastSplit = ({ most = 3, headroom = limits.headroom, ...choices } = {}) => {
    const all = allLayouts(choices).filter(({ zero }) => offload !== "parameters" || zero === 3).map(planned);
    const order = ({ layout: one, bytes }) => [bytes > (1 - headroom) * room, one.tp * one.cp * one.pp, one.loss_chunks,
      limits.recompute.indexOf(one.recompute), one.zero, -one.rows, bytes].map(Number);
    const fitting = all.filter((one) => one.bytes <= room).map((one) => [one, order(one)]);
    fitting.sort(([, a], [, b]) => a.map((x, i) => x - b[i]).find((x) => x) ?? 0);
    const smallest = all.reduce((a, b) => (a && a.bytes <= b.bytes ? a : b), null);
    return { found: fitting.slice(0, most).map(([one]) => one), smallest };
  };
  const someFits = (choices) => {
    for (const layout of layoutsOf(choices)) if (sum(memory(layout)) <= room) return true;
    return false;
  };
  // Why there is no layout, with all choices open, and a way out that was tried. The smallest is null if there is none.
  const nothing = (choices, smallest) => {
    const other = (changes) => planner({ ...training, ...changes }, limits), gb = (bytes) => (bytes / 1e9).toFixed(1);
    const first = (values, change) => values.find((n) => other(change(n)).someFits(choices));
    const batches = () => first(
      [...new Set(divisors(gpus).map((n) => Math.ceil(batch / n) * n))].sort(
        (a, b) => (a < 2 * batch ? -a : a) - (b < 2 * batch ? -b : b)),
      (n) => ({ global_batch: n }));
    const ofNodes = [...powers(2 ** 20), ...upTo(64).map((k) => perNode * k)].sort((a, b) => a - b);
    const states = recipe.weight_bytes + recipe.gradient_bytes + recipe.master_bytes + recipe.state_bytes;
    const least = layers * blockParameters * states; // which is somewhere at least once
    const more = () => first(ofNodes.filter((n) => n > gpus && n * room >= least), (n) => ({ gpus: n }));
    const shorter = () => first(
      powers(s).map((n) => Math.floor(s / n)).slice(1), (n) => ({ model: { ...model, context: n } }));
    const needed = smallest ? [] : other({ global_batch: gpus }).allLayouts(choices).map(({ dp }) => dp);
    const dps = [...new Set(needed)].sort((a, b) => a - b);
    const why = smallest
      ? `nothing fits: the smallest layout (${layoutText(smallest.layout)}) needs ${gb(smallest.bytes)} GB on a GPU, ${
        gb(smallest.bytes - room)} GB more than available`
      : dps.length
        ? `the batch is the reason: ${layers} layers and ${heads} heads on ${many(gpus)} GPUs need dp ${
          oneOf(dps.map(many))}, and a batch of ${many(batch)} divides by none of them`
        : `no layout cuts ${layers} layers and ${heads} heads evenly over ${many(gpus)} GPUs`;
    const ways = [
      [() => !dps.length && more(), (n) => `${n} GPUs`],
      [batches, (n) => `a batch of ${n} sequences`],
      [shorter, (n) => `sequences of ${n} tokens`],
    ];
    for (const [find, words] of ways) {
      const n = find();
      if (n) return `${why}; use ${words(many(n))}`;
    }
    return `${why}; use a GPU with more memory`;
  };
  // What the other takes longer for: the largest difference of a kind.
  const whySlower = (one, other) => {
    const more = Object.entries(other.seconds).map(([kind, time]) => [kind, time - one.seconds[kind]]);
    const [kind, extraS] = more.reduce((a, b) => (b[1] > a[1] ? b : a));
    return { fraction: other.stepS / one.stepS - 1, kind, extraS };
  };
  return {
    parameters, memory, verdict, verdictText, ranText, leastSplit, noSeconds, planned, sends, answers, room, refusal,
    allLayouts, someFits, best, nothing, layoutText, whySlower, axes,
  };
};
