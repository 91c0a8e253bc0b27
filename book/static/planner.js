// What lib/planner says of a training and its layouts, for a page without Python: the search, and its words.
//
// Formulas only: every number (models, GPUs, what a stack reaches, limits) comes from Python, as JSON in the page. A
// test compares both on a thousand random trainings; names are Python's, and so is the order of the formulas. A
// training is {model, device, stack, gpus, per_node, global_batch}, a layout has the fields of Layout4D.

const planner = (training, limits) => {
  const sizes = plannerSizes(training, limits);
  const { noSeconds, gpus, perNode, parameters, sum } = sizes;
  const { stepAndWaits, leastS, answers } = plannerSeconds(sizes);
  const { memory, ofRank, leastBytes, room } = plannerMemory(sizes);
  const { verdict, verdictText, ranText } = plannerMargin(sizes, room);
  const layouts = plannerLayouts(sizes), { axes, refusal, layoutText } = layouts;

  const planned = (layout) => {
    const held = memory(layout);
    if (noSeconds) return { layout, seconds: {}, waits: {}, memory: held, stepS: NaN, bytes: sum(held) };
    const [time, waits] = stepAndWaits(layout);
    return { layout, seconds: time, waits, memory: held, stepS: sum(time), bytes: sum(held) };
  };
  // What each axis sends in a step, where, and how long, as the command prints it.
  const sends = ({ layout, waits }) => {
    const { tp, cp, dp } = layout, swaps = sizes.ofContext.wayOf(layout) === "ulysses";
    const ofAxes = {
      tp: [tp, "activations"],
      cp: [tp * cp, swaps ? "queries, keys, values, results" : "keys and values"],
      dp: [tp * cp * dp, "gradients, parameters"],
      pp: [gpus, "activations, their gradients"],
    };
    return Object.entries(ofAxes).filter(([axis]) => waits[axis].messages.bytes).map(([axis, [reach, what]]) => {
      const { messages, hidden_s } = waits[axis], where = reach <= perNode ? "inside a node" : "between nodes";
      const Bps = messages.bytes / (messages.seconds - messages.latency_s);
      return { axis, what, where, Bps, ...messages, hidden_s, exposed_s: messages.seconds - hidden_s };
    });
  };
  const choicesOf = plannerChoices(sizes, layouts), bounds = { leastS, memory, leastBytes, ofRank, room };
  const { best, leastSplit, recommended, lacking, someFits } = plannerSearch(sizes, planned, bounds, choicesOf);
  const { nothing } = plannerWaysOut(sizes, room, choicesOf, layouts);
  // What the other takes longer for: the largest difference of a kind.
  const whySlower = (one, other) => {
    const more = Object.entries(other.seconds).map(([kind, time]) => [kind, time - one.seconds[kind]]);
    const [kind, extraS] = more.reduce((a, b) => (b[1] > a[1] ? b : a));
    return { fraction: other.stepS / one.stepS - 1, kind, extraS };
  };
  return {
    training, parameters, memory, verdict, verdictText, ranText, leastSplit, noSeconds, planned, sends, answers, room, refusal,
    best, recommended, lacking, someFits, nothing, layoutText, whySlower, axes, ...choicesOf,
  };
};
