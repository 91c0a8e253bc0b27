// The best layout for a row of batches, GPUs or networks, and why throughput per GPU falls: lib/planner/sweep.py and
// why_fell.py for a page without Python.

const plannerSweep = (training, limits) => {
  const { device, gpus, per_node: perNode, global_batch: batch, model } = training;
  // The values with their trainings, or a sentence.
  const valuesOf = {
    batch: () => limits.times_batch.map((times) => batch * times).filter(Number.isInteger)
      .map((n) => [n, { ...training, global_batch: n }]),
    gpus: () => {
      const nodes = [...limits.nodes_swept.map((n) => n * perNode), gpus];
      return [...new Set(nodes)].sort((a, b) => a - b).map((n) => [n, { ...training, gpus: n }]);
    },
    network: () => (gpus <= perNode
      ? `${gpus} GPUs of one node send nothing over a network: give more GPUs, and --network`
      : limits.times_network.map((times) => times * device.network_Bps)
        .map((Bps) => [Bps, { ...training, device: { ...device, network_Bps: Bps } }])),
  };
  const short = (x) => (x >= 999.5 ? many(Math.round(x)) : x >= 0.001 ? String(Number(x.toPrecision(3))) : "less than 0.001");

  const perGpu = (of) => of.global_batch / of.gpus;
  const steps = (axis, { layout: { tp, cp, pp, dp }, of }) => {
    const inner = tp * cp;
    const [ranks, reach] = { tp: [tp, tp], cp: [cp, inner], dp: [dp * cp, inner * dp], pp: [pp, inner * pp * dp] }[axis];
    return [ranks - 1, reach > of.per_node ? "between nodes" : "inside a node"];
  };
  const causeOfMessages = (axis, now, then, wait, scale) => {
    const sentS = (of) => of.messages.seconds - of.messages.latency_s, latency = wait.messages.latency_s;
    const grew = {
      latency: latency - scale * then.messages.latency_s,
      bytes: sentS(wait) - (scale * then.messages.seconds - scale * then.messages.latency_s),
      hidden: scale * then.hidden_s - wait.hidden_s,
    };
    const part = Object.keys(grew).reduce((a, b) => (grew[b] > grew[a] ? b : a)), [count, where] = steps(axis, now);
    return {
      latency: () => `latency of ${many(count)} steps ${where}, ${short(latency)} s`,
      bytes: () => `${short(wait.messages.bytes / 1e9)} GB ${where} at ${
        short(wait.messages.bytes / sentS(wait) / 1e9)} GB/s, ${short(sentS(wait))} s`,
      hidden: () => `${short(wait.hidden_s)} s of its messages hide behind computation, after ${
        short(scale * then.hidden_s)}`,
    }[part]();
  };
  const cause = (kind, before, now) => {
    const microbatches = ({ of, layout: { dp, rows } }) => many(Math.round(of.global_batch / (dp * rows)));
    if (kind === "bubble")
      return `pp ${now.layout.pp} with ${microbatches(now)} microbatches, after pp ${before.layout.pp} with ${
        microbatches(before)}`;
    if (kind === "optimizer") return `${short(perGpu(now.of))} sequences per GPU, after ${short(perGpu(before.of))}`;
    return `${now.text}, after ${before.text}`;
  };
  const whyItFell = (before, now) => {
    const scale = perGpu(now.of) / perGpu(before.of), less = 1 - (scale * before.stepS) / now.stepS;
    const surplus = Object.entries(now.seconds).map(([kind, x]) => [kind, x - scale * before.seconds[kind]]);
    const [kind, more] = surplus.reduce((a, b) => (b[1] > a[1] ? b : a));
    const because = kind in now.waits
      ? causeOfMessages(kind, now, before.waits[kind], now.waits[kind], scale)
      : cause(kind, before, now);
    return `${(100 * less).toFixed(1)}% less per GPU: ${short(more)} s more for ${kind}: ${because}`;
  };
  // Rows of {value, planned, rate, nothing, reason}, or a sentence that refuses.
  const sweep = (what, choices) => {
    const values = valuesOf[what]();
    if (typeof values === "string") return values;
    let before = null;
    return values.map(([value, of]) => {
      const one = planner(of, limits), { found: [best], choices: taken, smallest } = one.recommended(choices, 1);
      if (!best) return { value, nothing: one.nothing(taken, smallest), reason: "" };
      const now = { ...best, of, text: one.layoutText(best.layout), rate: (of.global_batch * model.context) / best.stepS / of.gpus };
      const fell = before && now.rate < (1 - limits.fell) * before.rate;
      const reason = fell ? whyItFell(before, now) : "";
      before = now;
      return { value, planned: now, rate: now.rate, nothing: "", reason };
    });
  };
  return { sweep };
};
