// Sizes of a training for a page without Python: of its model, of what a block keeps, and of the stages of a pipeline.
//
// `plannerSizes` returns the context of the remaining files, planner_*.js: the training, with these sizes.

const many = new Intl.NumberFormat("en").format; // 16,384
const oneOf = (ns) => new Intl.ListFormat("en-GB", { type: "disjunction" }).format(ns.map(String)); // 1, 2 or 4

const upTo = (n) => Array.from({ length: n }, (_, i) => i + 1); // 1, 2, …, n
const divisors = (n) => {
  const small = upTo(Math.floor(Math.sqrt(n))).filter((k) => n % k === 0);
  return [...new Set([...small, ...small.map((k) => n / k).reverse()])];
};

// A recipe with the states of an optimizer.
const recipeOf = (recipe, [ofBlock]) => ({ ...recipe, state_bytes: ofBlock });

const plannerSizes = (training, limits) => {
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

  const sum = (kinds) => { // plain, because the search calls it for many thousands of layouts
    let total = 0;
    for (const kind in kinds) total += kinds[kind];
    return total;
  };
  const cached = (of) => { // what of said of these arguments before, which are numbers and words
    const known = new Map();
    return (...given) => {
      const key = given.join();
      if (!known.has(key)) known.set(key, of(...given));
      return known.get(key);
    };
  };

  const hasEvenStages = (stages) => layers % stages === 0 || (layers + 2) % stages === 0;
  const stageLayers = ({ pp, stages_per_rank: v, schedule }) => {
    if (layers % (pp * v) === 0 || !hasEvenStages(pp * v)) return [layers / pp, layers / pp];
    const most = Math.floor((layers + 2) / pp);
    return [most, most - (schedule === "zb-v" ? 2 : 1)];
  };
  // Until the last microbatch of a step, instead of the shards.
  const keepsWholeGradients = ({ cp, dp, rows, zero, replicas }) =>
    zero >= 2 && Math.floor((dp * cp) / replicas) > 1 && stack.whole_gradient_bytes > 0 && batch / (dp * rows) > 1;
  // Of a microbatch and block: outside of the parallel layers, inside, of the heads of a rank.
  const ofContext = plannerContext({ stack, heads, keyHeads, headDim, s, queries, kv });
  const keptOfOwnTokens = ({ tp, cp, rows, sequence_parallel: slices }, recompute) => {
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
  const keptOnce = (layout, recompute) => keptOfOwnTokens(layout, recompute) + ofContext.moreKept(layout, recompute);
  // Of plain blocks and recomputed ones, one in `every`.
  const mean = (plain, again, every) => plain + (again - plain) / every;
  const keptBytes = (layout) => mean(keptOnce(layout, "none"), keptOnce(layout, layout.recompute), layout.every);
  const weightsAgain = (recompute) =>
    ({ none: 0, selective: 0, mlp: (gated ? 3 : 2) * h * ffn, ops: h * (kv + queries + ffn), full: blockWeights })[
      recompute];
  return {
    training, limits, model, device, stack, recipe, adapters, offload, optimizer, gpus, perNode, batch, noSeconds,
    h, layers, heads, vocab, s, ffn, gated, keyHeads, headDim, queries, kv, blockWeights, blockParameters,
    endParameters, parameters, sum, cached, hasEvenStages, stageLayers, keepsWholeGradients, keptOfOwnTokens, keptOnce,
    keptBytes, weightsAgain, ofContext,
  };
};
