// The fastest layouts that fit, from the least seconds on: lib/planner/search.py for a page without Python.

const plannerSearch = (of, planned, { leastS, memory, leastBytes, ofRank, room }, choicesOf) => {
  const { limits, offload, sum } = of;
  const { usual, all, plainLayouts, withRecomputation, possibleSchedules, possibleZero, layoutsOf, beyond } = choicesOf;

  const isTight = (choices, bytes) => bytes > (1 - choices.headroom) * room;
  const inOrder = (a, b) => {
    const [ours, theirs] = [a, b].map(({ stepS, bytes, layout }) => [stepS, bytes, ...Object.values(layout)]);
    const i = ours.findIndex((value, k) => value !== theirs[k]);
    return i < 0 ? 0 : ours[i] < theirs[i] ? -1 : 1;
  };
  // Of layouts that differ in recomputation, each with as few pieces of the loss as fit.
  const fastestThatFits = (choices, layouts) => {
    const fitting = [];
    search: for (const layout of layouts)
      for (const chunks of choices.loss_chunks) {
        const one = { ...layout, loss_chunks: chunks };
        if (sum(ofRank(one, 0)) > room || sum(memory(one)) > room) continue;
        fitting.push(planned(one));
        // Recomputation only adds to it.
        if (one.recompute === "none" && !isTight(choices, fitting.at(-1).bytes)) break search;
      }
    const order = (a, b) => isTight(choices, a.bytes) - isTight(choices, b.bytes) || a.stepS - b.stepS;
    return fitting.sort(order).slice(0, 1);
  };
  // Of each stage of ZeRO and schedule on these ranks.
  const fastestOn = (choices, plain, enoughS) => {
    const is1f1b = !choices.zero_bubble;
    const layouts = withRecomputation(choices, plain).filter((one) => leastS(one, is1f1b) <= enoughS);
    if (!layouts.length) return [];
    return possibleZero(choices, plain)
      .filter(([zero, replicas]) => leastBytes({ ...plain, zero, replicas }) <= room)
      .flatMap(([zero, replicas]) => possibleSchedules(choices, plain).flatMap((schedule) => {
        const same = layouts.filter(({ recompute }) => schedule === "1f1b" || recompute === "none");
        return fastestThatFits(choices, same.map((one) => ({ ...one, zero, replicas, schedule })));
      }));
  };
  const fastest = (choices, most) => {
    const ordered = [...plainLayouts(choices)].map((plain) => [leastS(plain, !choices.zero_bubble), plain]);
    const easy = [], tight = [];
    for (const [least, plain] of ordered.sort(([a], [b]) => a - b)) {
      const enoughS = easy.length === most ? easy.at(-1).stepS : Infinity;
      if (least > enoughS) break;
      for (const one of fastestOn(choices, plain, enoughS)) {
        const ofKind = isTight(choices, one.bytes) ? tight : easy;
        ofKind.push(one);
        ofKind.sort(inOrder).splice(most);
      }
    }
    return [...easy, ...tight].slice(0, most);
  };
  const ofOffload = ({ zero }) => offload !== "parameters" || zero === 3; // shards of ZeRO-3
  // The smallest of all; null if there is none.
  const smallestOf = (choices) => {
    let smallest = null, least = Infinity;
    for (const layout of layoutsOf(choices)) {
      const bytes = ofOffload(layout) ? sum(memory(layout)) : Infinity;
      if (bytes < least) [smallest, least] = [layout, bytes];
    }
    return smallest && planned(smallest);
  };
  // The fastest; and if none fits, the smallest.
  const best = (choices = usual, most = 3) => {
    const found = fastest(choices, most);
    return { found, smallest: found.length ? null : smallestOf(choices) };
  };
  // Without seconds: those that fit, tight ones last, then the least split and the least sharded first.
  const leastSplit = (choices = usual, most = 3) => {
    const order = ({ layout: one, bytes }) => [isTight(choices, bytes), one.tp * one.cp * one.pp, one.loss_chunks,
      limits.recompute.indexOf(one.recompute), one.zero, -one.rows, bytes].map(Number);
    const fitting = [...layoutsOf(choices)].filter(ofOffload).map(planned).filter((one) => one.bytes <= room)
      .map((one) => [one, order(one)]);
    fitting.sort(([, a], [, b]) => a.map((x, i) => x - b[i]).find((x) => x) ?? 0);
    return { found: fitting.slice(0, most).map(([one]) => one), smallest: fitting.length ? null : smallestOf(choices) };
  };
  // The choices of the library, and all where it has no layout; with the choices that were taken.
  const recommended = (choices = usual, most = 3) => {
    const way = of.noSeconds ? leastSplit : best, first = way(choices, most);
    if (first.found.length) return { choices, ...first };
    const open = { ...all, headroom: choices.headroom };
    return { choices: open, ...way(open, most) };
  };
  // The fastest of all, and the parts of it that the library lacks, if it is worth a change.
  const lacking = (mine, headroom = limits.headroom) => {
    const [one] = fastest({ ...all, loss_chunks: usual.loss_chunks, headroom }, 1), parts = beyond(usual, one.layout);
    return parts.length && mine.stepS >= limits.worth * one.stepS ? { parts, one } : null;
  };
  const someFits = (choices) => {
    for (const layout of layoutsOf(choices))
      if (leastBytes(layout) <= room && sum(memory(layout)) <= room) return true;
    return false;
  };
  return { best, leastSplit, recommended, lacking, someFits };
};
