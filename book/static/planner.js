// What lib/planner says of a training and its layouts, for a page without Python.
//
// Formulas only: every number (models, GPUs, what a stack reaches, limits) comes from Python, as JSON in the page. A
// test compares both on a thousand random trainings; names are Python's, and so is the order of the formulas. A
// training is {model, device, stack, gpus, per_node, global_batch}, a layout has the fields of Layout4D.

const many = new Intl.NumberFormat("en").format; // 16,384
const oneOf = (ns) => new Intl.ListFormat("en-GB", { type: "disjunction" }).format(ns.map(String)); // 1, 2 or 4

// A recipe with the states of an optimizer.
const recipeOf = (recipe, [ofBlock]) => ({ ...recipe, state_bytes: ofBlock });

const planner = (training, limits) => {
  const { model, device, stack, gpus, per_node: perNode, global_batch: batch } = training;
  const { d_model: h, num_layers: layers, num_heads: heads, vocab_size: vocab, context: s, d_mlp: ffn, gated } = model;
  const { num_kv_heads: keyHeads, head_dim: headDim, biases, dropout_masks: masks } = model;
  const { recipe } = stack, { adapters = null, offload = "", optimizer = "adam" } = training;
  const noSeconds = Object.entries({ adapters, offload, muon: optimizer === "muon" }).filter(([, holds]) => holds)
    .map(([name]) => `seconds are not modelled: ${limits.no_seconds[name]}`).join("; ");
  const queries = headDim * heads, kv = headDim * keyHeads;
  const blockWeights = h * (2 * queries + 2 * kv + (gated ? 3 : 2) * ffn);
  const ofQkv = queries + 2 * kv;
  const ofBiases = { all: ofQkv + 2 * h + (gated ? 2 : 1) * ffn, qkv: ofQkv, none: 0 }[biases];
  const norm = (model.rms_norm ? 1 : 2) * h;
  const blockParameters = blockWeights + ofBiases + 2 * norm;
  const endParameters = vocab * h; // of the embedding, and as many of the head
  const positions = model.rotary ? 0 : s * h;
  const parameters = layers * blockParameters + norm + positions + (model.tied ? 1 : 2) * endParameters;

  const sum = (kinds) => Object.values(kinds).reduce((a, b) => a + b, 0);
  const gathered = (bytes, n) => ((n - 1) / n) * bytes; // what each of n ranks sends in an all-gather

  const bandwidth = (ranks, stride, share = stack.network_share) => {
    const link = device.link_Bps * stack.link_share;
    if (ranks * stride <= perNode) return link;
    const onNode = Math.max(1, Math.min(ranks, Math.floor(perNode / stride)));
    return Math.min(link, onNode * device.network_Bps * share);
  };
  const hasEvenStages = (stages) => layers % stages === 0 || (layers + 2) % stages === 0;
  const stageLayers = ({ pp, stages_per_rank: v, schedule }) => {
    if (layers % (pp * v) === 0 || !hasEvenStages(pp * v)) return [layers / pp, layers / pp];
    const most = Math.floor((layers + 2) / pp);
    return [most, most - (schedule === "zb-v" ? 2 : 1)];
  };
  // Of a microbatch and block: outside of the parallel layers, inside, of the heads of a rank.
  const keptOnce = ({ tp, cp, rows, sequence_parallel: slices }, recompute) => {
    const whole = 8 * h + (masks ? 2 * h : 0);
    const inside = 2 * queries + (!gated ? 4 : stack.fused_swiglu ? 6 : 8) * ffn;
    const ofKeys = 2 * Math.max(Math.floor(kv / tp), headDim);
    const qkv = 2 * Math.floor(queries / tp) + 2 * ofKeys;
    const matrix = stack.fused_attention ? 0 : ((masks ? 5 : 2) * heads * s) / tp;
    const [outside, split, ofHeads] = {
      none: [whole, inside, qkv + matrix],
      selective: [whole, inside, qkv],
      mlp: [whole, 2 * queries, qkv + matrix],
      ops: [gated ? 4 * h : 2 * h, 2 * queries + 2 * ffn, qkv - ofKeys],
      full: [2 * h, 0, 0],
    }[recompute];
    return (rows * s * (outside / (slices ? tp : 1) + split / tp + ofHeads)) / cp;
  };
  // Of plain blocks and recomputed ones, one in `every`.
  const mean = (plain, again, every) => plain + (again - plain) / every;
  const keptBytes = (layout) => mean(keptOnce(layout, "none"), keptOnce(layout, layout.recompute), layout.every);
  const weightsAgain = (recompute) =>
    ({ none: 0, selective: 0, mlp: (gated ? 3 : 2) * h * ffn, ops: h * (kv + queries + ffn), full: blockWeights })[
      recompute];

  // -- seconds
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

  // -- bytes
  const keptBy = (rank, pp, m, v) => {
    if (v === 1) return Math.min(m, pp - rank);
    return Math.min(2 * (pp - rank - 1) + (v - 1) * pp + 1, m * v) / v;
  };
  // Until the last microbatch of a step, instead of the shards.
  const keepsWholeGradients = ({ cp, dp, rows, zero, replicas }) =>
    zero >= 2 && Math.floor((dp * cp) / replicas) > 1 && stack.whole_gradient_bytes > 0 && batch / (dp * rows) > 1;
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
    const offloaded = (kind) => offload === "parameters" || offload === kind;
    return {
      parameters: offloaded("parameters") ? 0 : state.parameters,
      gradients: offloaded("gradients") && !keepsWholeGradients(layout) ? 0 : state.gradients,
      optimizer: offloaded("optimizer") ? 0 : state.optimizer,
      activations: stack.spare_activations * kept,
      logits: hasHead ? (((stack.logits_bytes * rows * s) / cp) * vocab) / tpOfWords / layout.loss_chunks : 0,
      gathered: gatheredBytes(layout, hasHead),
    };
  };
  const memory = (layout) => {
    const ranks = [0, Math.min(1, layout.pp - 1), layout.pp - 1].map((rank) => ofRank(layout, rank));
    return ranks.reduce((most, one) => (sum(one) > sum(most) ? one : most));
  };
  const room = device.memory_bytes * stack.usable_share;
  // lib/planner/margin.py: three values, what would turn them, and the published layouts that ran as full.
  const verdict = (bytes, headroom = limits.headroom) =>
    bytes > room ? "does not fit" : bytes > (1 - headroom) * room ? "tight" : "fits";
  const perParameter = (of) => of.weight_bytes + of.gradient_bytes + of.master_bytes + of.state_bytes;
  const verdictText = (layout, name, headroom) => {
    const four = (x) => Number(x.toPrecision(4)), bits = (base) => base.slice(0, -3);
    const heldBy = (change) => {
      const bytes = sum(planner({ ...training, ...change }, limits).memory(layout));
      return { word: verdict(bytes, headroom), gb: (bytes / 1e9).toFixed(1) };
    };
    const mine = perParameter(recipe);
    const ofStacks = () => Object.entries(limits.compared)
      .map(([of, one]) => [of, optimizer === "adam" ? one : recipeOf(one, limits.optimizers[optimizer])])
      .map(([of, one]) => ({ of, count: perParameter(one), change: { stack: { ...stack, recipe: one } } }))
      .sort((a, b) => Math.abs(a.count - mine) - Math.abs(b.count - mine) || a.count - b.count);
    const ofBases = () => Object.entries(limits.bases).filter(([base]) => base !== adapters.base)
      .map(([base, base_bytes]) => [`a base in ${bits(base)} bit`, { adapters: { ...adapters, base, base_bytes } }]);
    const stacks = ofStacks(), counts = stacks.map(({ count }) => four(count));
    const others = adapters
      ? [...ofBases(), ["all parameters trained", { adapters: null }]]
      : stacks.map(({ of, count, change }) => [`${four(count)} (${of})`, change]);
    const own = heldBy({}), label = optimizer === "adam" ? name : optimizer;
    const said = `${own.word}: ${own.gb} of ${(room / 1e9).toFixed(1)} GB with ${adapters
      ? `adapters of rank ${adapters.rank} on a base in ${bits(adapters.base)} bit`
      : `${four(mine)} bytes per parameter${label ? ` (${label})` : ""}`}`;
    const turning = others.map(([words, change]) => ({ words, ...heldBy(change) }))
      .filter(({ word }) => word !== own.word);
    const turned = turning.find(({ word }) => [word, own.word].includes("does not fit")) ?? turning[0];
    if (turned) return `${said}; with ${turned.words} ${turned.gb}: ${turned.word}`;
    return `${said}; the same with ${adapters
      ? "a base in 4 or 16 bit, and with all parameters trained"
      : `${Math.min(...counts)} to ${Math.max(...counts)}, which the stacks keep`}`;
  };
  const ranText = (bytes) => {
    const fills = limits.ran_at_fill.filter(([start]) => start === 0 || (100 * bytes) / room >= start);
    const [start, ran, tried] = fills.at(-1), end = limits.ran_at_fill[fills.length]?.[0];
    const where = end === undefined ? `above ${start}%` : start === 0 ? `below ${end}%` : `at ${start} to ${end}%`;
    return `of ${tried} published layouts planned ${where} of the memory (A100), ${ran} ran: ${
      Math.round((100 * ran) / tried)}%`;
  };

  // -- choices
  const upTo = (n) => Array.from({ length: n }, (_, i) => i + 1);
  const powers = (most) => upTo(Math.floor(Math.log2(most)) + 1).map((k) => 2 ** (k - 1));
  const divisors = (n) => {
    const small = upTo(Math.floor(Math.sqrt(n))).filter((k) => n % k === 0);
    return [...new Set([...small, ...small.map((k) => n / k).reverse()])];
  };
  const mostTp = Math.min(heads, limits.nodes_of_tp * perNode);
  const sharesHeads = (n) => n <= mostTp && heads % n === 0 && (keyHeads % n === 0 || n % keyHeads === 0);
  const ofNode = (tp) => Math.max(1, Math.floor(perNode / tp)); // data-parallel ranks, over which HSDP shards
  const mostCp = Math.max(1, 2 ** Math.floor(Math.log2(s / limits.tokens_of_cp)));

  // Which layouts cannot be, and what would make them possible.
  const REFUSALS = [
    [({ tp }) => !sharesHeads(tp),
      ({ tp }) => `${heads} heads${keyHeads < heads ? `, ${keyHeads} of keys and values,` : ""} cannot be shared by ${
        tp} tensor-parallel ranks: choose tp ${oneOf(divisors(heads).filter((n) => sharesHeads(n) && gpus % n === 0))}.`],
    [({ cp }) => cp > mostCp || !Number.isInteger(Math.log2(cp)),
      ({ cp }) => `A context-parallel rank needs ${many(limits.tokens_of_cp)} tokens of a sequence or more: choose cp ${
        oneOf(powers(mostCp))}, or sequences of ${many(cp * limits.tokens_of_cp)} tokens.`],
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
    cp: powers(mostCp).filter((n) => gpus % n === 0),
    pp: divisors(gpus).filter(hasEvenStages),
    v: (pp) => upTo(limits.stages_per_rank).filter((v) => hasEvenStages(pp * v)),
  };
  const canBe = (layout) => !REFUSALS.some(([hits]) => hits(layout));
  const refusal = (layout) => REFUSALS.find(([hits]) => hits(layout))?.[1](layout) ?? null;

  // Choices are those of lib/planner/search.py, with the same defaults.
  const layoutsOf = function* (choices) {
    const { zeroBubble = false, hybrid = false, ways = ["none", "full"], everies = [1], pieces = [1] } = choices;
    const schedules = zeroBubble ? ["1f1b", "zb-h1", "zb-v"] : ["1f1b"];
    const recomputes = ways.flatMap((recompute) =>
      (recompute === "full" ? everies : [1]).map((every) => ({ recompute, every })))
      .filter(({ recompute }) => recompute !== "selective" || !stack.fused_attention);
    for (const tp of axes.tp)
      for (const cp of axes.cp)
        for (const pp of axes.pp) {
          const dp = gpus / (tp * cp * pp), copies = (dp * cp) / ofNode(tp);
          // Written out, because there are many thousands of them.
          const layoutOf = (rows, v, zero, recompute, schedule, replicas, every, chunks) => ({
            tp, cp, pp, dp, rows, stages_per_rank: v, zero, sequence_parallel: tp > 1, recompute, schedule, replicas,
            every, loss_chunks: chunks,
          });
          // What the plainest layout on these ranks cannot do, no other can.
          const possible = (rows, v) => canBe(layoutOf(rows, v, 0, "none", "1f1b", 1, 1, 1));
          if (!possible(1, 1)) continue;
          const zeros = [[0, 1], [1, 1], ...(tp === 1 || hybrid ? [[3, 1]] : [])];
          if (hybrid && Number.isInteger(copies) && copies > 1 && copies < dp * cp) zeros.push([3, copies]);
          for (const rows of powers(limits.rows))
            for (const v of upTo(pp > 1 ? limits.stages_per_rank : 1)) {
              if (!possible(rows, v)) continue;
              for (const { recompute, every } of recomputes)
                for (const [zero, replicas] of zeros)
                  for (const schedule of recompute === "none" && pp > 1 ? schedules : ["1f1b"])
                    for (const chunks of pieces) {
                      const layout = layoutOf(rows, v, zero, recompute, schedule, replicas, every, chunks);
                      if (canBe(layout)) yield layout;
                    }
            }
        }
  };
  const allLayouts = (choices) => [...layoutsOf(choices)];
  const planned = (layout) => {
    const held = memory(layout);
    if (noSeconds) return { layout, seconds: {}, memory: held, stepS: NaN, bytes: sum(held) };
    const time = seconds(layout);
    return { layout, seconds: time, memory: held, stepS: sum(time), bytes: sum(held) };
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
  const layoutText = (layout) => {
    const { tp, cp, pp, dp, rows, stages_per_rank: v, zero, recompute, every, schedule } = layout;
    const again = recompute !== "none" && `recompute ${recompute}${every > 1 ? `, 1 in ${every}` : ""}`;
    return [`tp ${tp} · ${cp > 1 ? `cp ${cp} · ` : ""}pp ${pp} · dp ${dp}`, `b ${rows}`, v > 1 && `v ${v}`,
      zero && `ZeRO-${zero}`, layout.sequence_parallel && "sp", layout.replicas > 1 && `${layout.replicas} copies`,
      again, layout.loss_chunks > 1 && `loss in ${layout.loss_chunks}`, schedule !== "1f1b" && schedule,
    ].filter(Boolean).join(", ");
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
    parameters, memory, verdict, verdictText, ranText, leastSplit, noSeconds, planned, answers, room, refusal, allLayouts,
    someFits, best, nothing,
    layoutText, whySlower, axes,
  };
};
