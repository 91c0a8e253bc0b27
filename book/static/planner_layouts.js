// Which layouts can be, why one cannot, and a layout in a line: lib/planner/refusals.py for a page without Python.

const plannerLayouts = (of) => {
  const { limits, gpus, perNode, batch, layers, heads, keyHeads, s, hasEvenStages } = of;
  const { wayOf, ranksShareHeads, headsOfRank } = of.ofContext;

  const powers = (most) => upTo(Math.floor(Math.log2(most)) + 1).map((k) => 2 ** (k - 1));
  const mostTp = Math.min(heads, limits.nodes_of_tp * perNode);
  const sharesHeads = (n) => n <= mostTp && heads % n === 0 && (keyHeads % n === 0 || n % keyHeads === 0);
  const ofNode = (tp) => Math.max(1, Math.floor(perNode / tp)); // data-parallel ranks, over which HSDP shards
  const cpRanks = limits.cp_ranks.filter((n) => n === 1 || (s % n === 0 && s / n >= limits.tokens_of_cp));

  // Which layouts cannot be, and what would make them possible.
  const REFUSALS = [
    [({ tp }) => !sharesHeads(tp),
      ({ tp }) => `${heads} heads${keyHeads < heads ? `, ${keyHeads} of keys and values,` : ""} cannot be shared by ${
        tp} tensor-parallel ranks: choose tp ${oneOf(divisors(heads).filter((n) => sharesHeads(n) && gpus % n === 0))}.`],
    [({ cp }) => !limits.cp_ranks.includes(cp),
      () => `Context parallelism is planned over powers of two, ${limits.cp_ranks.at(-1)} at most: choose cp ${
        oneOf(cpRanks)}.`],
    [({ cp }) => !cpRanks.includes(cp),
      ({ cp }) => {
        const needs = cp * limits.tokens_of_cp, ways = `choose cp ${oneOf(cpRanks)}, or sequences of ${
          many(Math.max(needs, Math.ceil(s / cp) * cp))} tokens.`;
        return s < needs
          ? `A context-parallel rank needs ${many(limits.tokens_of_cp)} tokens of a sequence or more: ${ways}`
          : `${many(s)} tokens of a sequence cannot be shared evenly by ${cp} context-parallel ranks: ${ways}`;
      }],
    [({ cp, attention }) => attention && cp === 1,
      ({ attention }) => `There are no ranks over which attention goes by ${attention}: choose cp 2 or more.`],
    [(layout) => layout.cp > 1 && wayOf(layout) === "ulysses" && !ranksShareHeads(layout.tp, layout.cp),
      ({ tp, cp }) => {
        const [own, ofKeys] = headsOfRank(tp), ways = cpRanks.filter((n) => n > 1 && ranksShareHeads(tp, n));
        return `${own} heads of a tensor-parallel rank, ${ofKeys} of keys and values, cannot be shared by ${
          cp} ranks of Ulysses: choose ${ways.length ? `cp ${oneOf(ways)}, or a ring` : "a ring"}.`;
      }],
    [({ tp, cp, pp }) => gpus % (tp * cp * pp),
      ({ tp, cp, pp }) => `${many(gpus)} GPUs do not divide by tp × cp × pp = ${many(tp * cp * pp)}: choose less, or ${
        many(tp * cp * pp)} GPUs.`],
    [({ pp, stages_per_rank: v }) => !hasEvenStages(pp * v) || v > limits.stages_per_rank,
      ({ pp, stages_per_rank: v }) => `${layers} layers do not cut evenly into ${pp * v} stages: choose ${
        hasEvenStages(pp)
          ? `v ${oneOf(upTo(limits.stages_per_rank).filter((n) => hasEvenStages(pp * n)))}`
          : `v 1 and pp ${oneOf(divisors(gpus).filter((n) => n < pp && hasEvenStages(n)))}`}.`],
    [({ pp, stages_per_rank: v }) => v > 1 && pp === 1,
      () => "Several stages per rank need a pipeline: choose pp 2 or more, or v 1."],
    [({ dp }) => batch % dp,
      ({ dp }) => `${many(batch)} sequences do not divide among ${many(dp)} data-parallel ranks: choose a batch of ${
        many(Math.ceil(batch / dp) * dp)}, or more ranks for tp, cp or pp.`],
    [({ dp, rows }) => (batch / dp) % rows,
      ({ dp, rows }) => `The ${many(batch / dp)} sequences of a data-parallel rank do not divide by ${rows}: choose b ${
        oneOf(powers(limits.rows).filter((n) => (batch / dp) % n === 0))}.`],
    [({ pp, dp, rows, stages_per_rank: v }) => v > 1 && (batch / dp / rows) % pp,
      ({ pp, dp, rows }) => `${many(batch / dp / rows)} microbatches do not divide by pp ${pp}: choose v 1, or batch ${
        many(Math.ceil(batch / dp / rows / pp) * pp * rows * dp)}.`],
    [({ pp, zero }) => zero === 3 && pp > 1,
      () => "ZeRO-3 is planned without pipeline parallelism: choose pp 1, or ZeRO stage 1."],
    [({ tp, cp, dp, zero, replicas }) => 
        replicas > 1 && (zero < 3 || dp * cp === replicas || dp * cp !== replicas * ofNode(tp)),
      ({ tp }) => `Copies are planned with ZeRO-3 over the ${ofNode(tp)} data-parallel ranks of a node: choose 1.`],
    [({ stages_per_rank: v, schedule }) => v > 1 && schedule === "zb-h1",
      () => "ZB-H1 has one stage per rank: choose v 1, or ZB-V."],
    [({ stages_per_rank: v, schedule }) => v !== 2 && schedule === "zb-v",
      () => "ZB-V has two stages per rank: choose v 2, or ZB-H1."],
    [({ pp, schedule }) => pp === 1 && schedule !== "1f1b",
      () => "A schedule needs a pipeline: choose pp 2 or more, or 1F1B."],
    [({ pp, dp, rows, schedule }) => batch / dp / rows < { "1f1b": 1, "zb-h1": pp, "zb-v": 2 * pp - 1 }[schedule],
      ({ pp, dp, rows, schedule }) => `${many(batch / dp / rows)} microbatches cannot fill ${
        schedule.toUpperCase()} on ${pp} stages: choose 1F1B, or batch ${
        many((schedule === "zb-h1" ? pp : 2 * pp) * rows * dp)}.`],
    [({ recompute, schedule }) => recompute !== "none" && schedule !== "1f1b",
      () => "A backward in halves is planned without recomputation: choose none, or 1F1B."],
    [({ cp, dp, zero }) => zero && dp * cp === 1,
      () => `ZeRO shards over data-parallel ranks, and there is one: choose ZeRO stage 0, or ${many(2 * gpus)} GPUs.`],
  ];
  // Those that heads, tokens and layers allow, and the GPUs divide by; stages per rank are those of a pipeline.
  const axes = {
    tp: divisors(heads).filter((n) => sharesHeads(n) && gpus % n === 0),
    cp: cpRanks.filter((n) => gpus % n === 0),
    pp: divisors(gpus).filter(hasEvenStages),
    v: (pp) => upTo(limits.stages_per_rank).filter((v) => hasEvenStages(pp * v)),
  };
  const refusal = (layout) => REFUSALS.find(([hits]) => hits(layout))?.[1](layout) ?? null;

  const layoutText = (layout) => {
    const { tp, cp, pp, dp, rows, stages_per_rank: v, zero, recompute, every, schedule } = layout;
    const again = recompute !== "none" && `recompute ${recompute}${every > 1 ? `, 1 in ${every}` : ""}`;
    const way = layout.attention ? ` ${layout.attention}` : "";
    return [`tp ${tp} · ${cp > 1 ? `cp ${cp}${way} · ` : ""}pp ${pp} · dp ${dp}`, `b ${rows}`, v > 1 && `v ${v}`,
      zero && `ZeRO-${zero}`, layout.sequence_parallel && "sp", layout.replicas > 1 && `${layout.replicas} copies`,
      again, layout.loss_chunks > 1 && `loss in ${layout.loss_chunks}`, schedule !== "1f1b" && schedule,
    ].filter(Boolean).join(", ");
  };
  return { axes, refusal, layoutText, ofNode, powers };
};
