// Why no layout fits, and what would help, each of it tried: lib/planner/ways_out.py for a page without Python.

const plannerWaysOut = (of, room, { layoutsOf }, { powers, layoutText }) => {
  const { training, limits, model, device, gpus, perNode, batch, layers, heads, s } = of;
  const withChanges = (changes) => planner({ ...training, ...changes }, limits), gb = (bytes) => (bytes / 1e9).toFixed(1);
  const first = (values, changes, choices) =>
    values.find((value) => withChanges(changes(value)).someFits(choices));
  const sizes = [...new Set([...powers(2 ** 20), ...upTo(limits.most_nodes).map((k) => perNode * k)])]
    .sort((a, b) => a - b);
  const firstGpus = (ns, choices) => first(ns, (n) => ({ gpus: n }), choices);
  const moreGpus = (choices) => firstGpus(sizes.filter((n) => n > gpus), choices);
  const nearGpus = (choices) =>
    [firstGpus(sizes.filter((n) => n < gpus).reverse(), choices), moreGpus(choices)].filter(Boolean)
      .map((n) => (n > 1 ? `${many(n)} GPUs` : "1 GPU"));
  const largerCard = (choices) => {
    const larger = limits.cards.filter(([, bytes]) => bytes > device.memory_bytes);
    const found = first(larger, ([, bytes]) => ({ device: { ...device, memory_bytes: bytes } }), choices);
    return found ? [`GPUs of ${(found[1] / 1e9).toFixed(0)} GB (${found[0]})`] : [];
  };
  const larger = (choices) => {
    const differs = (wider) => JSON.stringify(wider) !== JSON.stringify(choices);
    const closed = Object.entries(limits.closed).filter(([, changes]) => differs({ ...choices, ...changes }));
    const more = moreGpus(choices);
    const ways = [
      ...(more ? [`${many(more)} GPUs`] : []),
      ...largerCard(choices),
      ...closed.filter(([, changes]) => withChanges({}).someFits({ ...choices, ...changes })).map(([words]) => words),
    ];
    if (ways.length) return ways;
    const wider = moreGpus(Object.assign({ ...choices }, ...Object.values(limits.closed)));
    return wider ? [`${many(wider)} GPUs, with ${closed.map(([words]) => words).join(" and ")}`] : [];
  };
  // The batch that fits the most layouts, but not twice as large if there is a smaller one.
  const otherBatch = (choices) => {
    const key = (n) => (n >= 2 * batch ? n : -n);
    const batches = [...new Set(divisors(gpus).map((n) => Math.ceil(batch / n) * n))].sort((a, b) => key(a) - key(b));
    const found = first(batches, (n) => ({ global_batch: n }), choices);
    return found ? [`a batch of ${many(found)} sequences`] : [];
  };
  const shorter = (choices) => {
    const tokens = upTo(29).map((k) => Math.floor(s / 2 ** k)).filter((n) => n >= 1);
    const found = first(tokens, (n) => ({ model: { ...model, context: n } }), choices);
    return found ? [`sequences of ${many(found)} tokens`] : [];
  };
  // The smallest layout is null if there is none.
  const nothing = (choices, smallest) => {
    const dps = smallest ? []
      : [...new Set([...withChanges({ global_batch: gpus }).layoutsOf(choices)].map(({ dp }) => dp))].sort((a, b) => a - b);
    const why = smallest
      ? `nothing fits: the smallest layout (${layoutText(smallest.layout)}) needs ${gb(smallest.bytes)} GB on a GPU, ${
        gb(smallest.bytes - room)} GB more than available`
      : dps.length
        ? `the batch is the reason: ${layers} layers and ${heads} heads on ${many(gpus)} GPUs need dp ${
          oneOf(dps.map(many))}, and a batch of ${many(batch)} divides by none of them`
        : `no layout cuts ${layers} layers and ${heads} heads evenly over ${many(gpus)} GPUs`;
    let ways = dps.length ? [...otherBatch(choices), ...nearGpus(choices)] : larger(choices);
    if (!ways.length) ways = otherBatch(choices);
    if (!ways.length) ways = shorter(choices);
    if (!ways.length) ways = ["a GPU with more memory"];
    return `${why}; use ${oneOf(ways)}`;
  };
  return { nothing };
};
