// Models with experts on the page "Will it fit?": book/explain/experts.py, lib/cost/experts.py and lib/planner/experts.py
// without Python. It reads a config.json, and finds for each ep the layout that fits; there are no seconds.
//
// The tables are Python's, as JSON in the page, and so are the words; a test compares both.

const withExperts = ({ models, table, no_seconds: noSeconds, no_error: noError, counted }, config, limits) => {
  // Key → what is as if it were not there.
  const USUAL = { n_shared_experts: 0, first_k_dense_replace: 0, mlp_only_layers: [], decoder_sparse_step: 1, moe_layer_freq: 1 };
  const PLACES = Object.keys(USUAL);
  const { text, written } = config;
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const places = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, i) => from + i);
  const gcd = (a, b) => (b ? gcd(b, a % b) : a);

  // ---- A config.json ----
  const size = (given, key, least = 1) => {
    const value = given[key];
    if (!Number.isSafeInteger(value) || value < least)
      throw new Error(`${key}=${written(value)} must be a whole number of at least ${least}`);
    return value;
  };
  const familyOf = ({ model_type: kind }) =>
    typeof kind === "string" && Object.hasOwn(table.families, kind) ? table.families[kind] : null;
  const isNone = (value) => value === null || value === undefined;
  const sizesOf = (family) => ({ num_experts: family.num_experts, top_k: "num_experts_per_tok", d_expert: family.d_expert });
  const takenBy = (family) =>
    [...Object.values(sizesOf(family)), ...Object.values(family.latent ?? {}), ...PLACES, "attention_bias"]
      .filter((key) => key !== "intermediate_size");
  const noEffect = new RegExp(`^(${table.no_effect.trim().split(/\s+/).join("|")})`);
  // The config of the dense model with the same attention; its heads are as wide as queries of low rank.
  const densePart = (given, family) => {
    const taken = takenBy(family), { d_rope: rope, d_nope: nope } = family.latent ?? {};
    const plain = Object.fromEntries(Object.entries(given).filter(([key]) => !taken.includes(key) && !noEffect.test(key)));
    return { ...plain, model_type: family.like, ...(rope ? { head_dim: given[rope] + given[nope] } : {}) };
  };
  // How many experts are shared, and the places of the blocks that have none.
  const sharedAndDense = (given, layers) => {
    const { mlp_only_layers: _, ...numbers } = USUAL;
    for (const [key, usual] of Object.entries(numbers)) if (!isNone(given[key])) numbers[key] = size(given, key, usual);
    if (numbers.moe_layer_freq !== 1)
      throw new Error(`moe_layer_freq ${numbers.moe_layer_freq} is not counted: only 1, experts in each block after ` +
        "the dense ones");
    const only = given.mlp_only_layers || [];
    if (!Array.isArray(only) || !only.every(Number.isInteger))
      throw new Error(`mlp_only_layers=${written(only)} must be a list of places of blocks`);
    const { first_k_dense_replace: first, decoder_sparse_step: step } = numbers;
    const dense = places(0, layers).filter((one) => one < first || (one + 1) % step || only.includes(one));
    return [numbers.n_shared_experts, dense];
  };
  const checked = (shape) => {
    const { num_experts: all, top_k: k, dense, base } = shape;
    if (k < 1 || k > all) throw new Error(`${k} experts per token of ${all}; use 1 to ${all}`);
    if (dense.length === base.num_layers)
      throw new Error(`none of the ${base.num_layers} blocks has experts; count it as a dense model`);
    return shape;
  };
  // The shape and notes on its keys; null for a config without experts.
  const readConfig = (said, tokens) => {
    const given = config.parsed(said), family = familyOf(given), kind = given.model_type;
    if (!family) return null;
    const sizes = sizesOf(family), latent = family.latent ?? {};
    const needs = [...Object.values(sizes), ...family.needs, ...Object.values(latent).filter((key) => key !== "q_lora_rank")];
    const lacks = needs.filter((key) => isNone(given[key]));
    if (family.latent && given.q_lora_rank === undefined) lacks.push("q_lora_rank");
    if (lacks.length)
      throw new Error(`it lacks ${lacks.join(", ")}, without which the size of a ${kind} model is not known`);
    const bias = given.attention_bias ?? null;
    if (bias !== null && Boolean(bias) !== family.attention_bias)
      throw new Error(`attention_bias ${text(bias)} is not counted in a ${kind} model, whose published configs have ${
        written(!bias)}`);
    for (const key of PLACES)
      if (!family.places.includes(key) && !isNone(given[key]) && written(given[key]) !== written(USUAL[key]))
        throw new Error(`${key} ${text(given[key])} is not counted in a ${kind} model, which does not have it: leave it out`);
    const from = (keys, of) => Object.fromEntries(Object.entries(keys).map(([field, key]) => [field, of(key)]));
    const found = from(sizes, (key) => size(given, key));
    const ranks = from(latent, (key) => (given[key] === null ? 0 : size(given, key)));
    const dense = config.read(JSON.stringify(densePart(given, family)), tokens);
    const base = { ...dense.model, biases: family.biases };
    const [shared, without] = sharedAndDense(given, base.num_layers);
    const shape = checked({ base, ...found, d_shared: shared * found.d_expert, dense: without,
      latent: family.latent ? ranks : null });
    const entries = [...Object.entries(sizes), ...Object.entries(latent)];
    const own = entries.map(([field, key]) => `${field} ${{ ...found, ...ranks }[field]}: from ${key}`);
    own.push(...PLACES.filter((key) => !isNone(given[key])).map((key) => `${key} ${text(given[key])}`));
    if (family.apart) own.push(`not counted: ${family.apart}`);
    const notes = dense.notes.map((note) => note.replace(`of model_type ${family.like}`, `of model_type ${kind}`)
      .replace("biases none,", `biases ${family.biases},`));
    return { shape, notes: [...own, ...notes.filter((note) => !family.latent || !note.startsWith("head_dim "))] };
  };
  const bare = (name) => name.slice(name.lastIndexOf("/") + 1).replaceAll("-", "");
  // The same of a config or of a name; null for a model without experts.
  const read = (said, tokens) => {
    if (said.startsWith("{")) return readConfig(said, tokens);
    const name = Object.keys(models).find((one) => bare(one) === bare(said.trim().toLowerCase()));
    return name ? { shape: models[name], notes: [] } : null;
  };
  // The same config, as short as it can be without another answer; one without experts as `modelConfig` has it.
  const shortened = (said) => {
    const given = config.parsed(said), family = familyOf(given);
    if (!family) return config.shortened(said);
    const { head_dim: width, ...rest } = JSON.parse(config.shortened(JSON.stringify(densePart(given, family))));
    const kept = takenBy(family).filter((key) => given[key] !== undefined).map((key) => [key, given[key]]);
    return JSON.stringify({ ...rest, ...(family.latent || isNone(width) ? {} : { head_dim: width }),
      ...Object.fromEntries(kept), model_type: given.model_type });
  };

  // ---- Parameters; `blocks` are the places of some blocks ----
  const ofShape = (shape) => {
    const { base, num_experts: all, top_k: k, d_expert: inside, d_shared: shared, latent } = shape;
    const { d_model: width, num_heads: heads, num_kv_heads: keys, head_dim: head, d_mlp: mlp } = base;
    const hasBiases = base.biases === "all";
    const queries = heads * head, ofKeys = keys * head, qkv = queries + 2 * ofKeys;
    const lowRank = () => {
      const { q_rank: q, kv_rank: kv, d_rope: rope, d_nope: nope, d_value: value } = latent;
      const wide = heads * (nope + rope);
      return (q ? width * q + q + q * wide : width * wide) + width * (kv + rope) + kv
        + heads * (kv * (nope + value) + value * width);
    };
    const biases = { all: qkv + width, qkv, none: 0 }[base.biases];
    const attention = (latent ? lowRank() : width * (qkv + queries) + biases) + 2 * width;
    const expert = 3 * width * inside + (hasBiases ? 2 * inside + width : 0), ends = base.vocab_size * width;
    const numDense = (blocks) => blocks.filter((one) => shape.dense.includes(one)).length;
    const replicated = (blocks) => {
      const without = numDense(blocks), router = all * (width + Number(hasBiases));
      return blocks.length * attention + (blocks.length - without) * (router + 3 * width * shared)
        + without * 3 * width * mlp;
    };
    const routed = (blocks) => (blocks.length - numDense(blocks)) * all * expert;
    const blocks = places(0, base.num_layers);
    const parameters = ends * (base.tied ? 1 : 2) + width + replicated(blocks) + routed(blocks);
    const active = parameters - routed(blocks) + Math.floor((routed(blocks) * k) / all);
    // Bytes per token that a block keeps: of attention, and of its routed copies.
    const kept = (tp) => {
      const perRank = Math.floor(queries / tp) + 2 * Math.max(Math.floor(ofKeys / tp), head); // queries, keys, values
      if (!latent) return (8 * width + 2 * queries) / tp + 2 * perRank;
      const { q_rank: q, kv_rank: kv, d_rope: rope, d_nope: nope, d_value: value } = latent;
      return (8 * width + 4 * (q + kv) + 2 * heads * (2 * (nope + rope) + 2 * value)) / tp;
    };
    const copies = (tp, each) => k * (2 * width + (each * inside) / tp);
    return { numDense, replicated, routed, parameters, active, ends, kept, copies };
  };

  // ---- Memory and messages of a layout ----
  const stageBlocks = (layers, pp) => {
    const most = (layers + 2) / pp, isUneven = layers % pp !== 0 && (layers + 2) % pp === 0;
    const cuts = isUneven ? [0, ...places(1, pp).map((one) => most * one - 1), layers]
      : places(0, pp + 1).map((one) => Math.floor((layers * one) / pp));
    return places(0, pp).map((one) => places(cuts[one], cuts[one + 1]));
  };
  const planned = (shape, training) => {
    const { base, num_experts: all, top_k: k } = shape, { gpus, stack, device, per_node: perNode } = training;
    const of = ofShape(shape), { recipe } = stack, batch = training.global_batch, sequence = base.context;
    const each = stack.fused_swiglu ? 6 : 8, room = device.memory_bytes * stack.usable_share;
    const { verdict, ranText } = plannerMargin({ limits }, room);
    const states = ({ blocks, embedding, head }, zero, ranks, m) => {
      const trained = blocks + embedding + head, [ofBlock, ofEmbedding, ofHead] = limits.optimizers[training.optimizer];
      const more = embedding * (ofEmbedding - ofBlock) + head * (ofHead - ofBlock);
      const areWhole = zero >= 2 && ranks > 1 && stack.whole_gradient_bytes > 0 && m > 1;
      return (trained * recipe.weight_bytes) / (zero >= 3 ? ranks : 1)
        + trained * (areWhole ? stack.whole_gradient_bytes : recipe.gradient_bytes / (zero >= 2 ? ranks : 1))
        + (trained * (recipe.master_bytes + recipe.state_bytes) + more) / (zero >= 1 ? ranks : 1);
    };
    const activations = ({ tp, rows, recompute }, blocks, inFlight) => {
      const tokens = rows * sequence, without = of.numDense(blocks), attention = of.kept(tp), routed = of.copies(tp, each);
      const shared = (each * shape.d_shared) / tp, dense = (each * base.d_mlp) / tp;
      if (recompute === "none") {
        const every = blocks.length * attention + (blocks.length - without) * shared + without * dense;
        return [inFlight * tokens * every, inFlight * tokens * (blocks.length - without) * routed];
      }
      const inputs = (inFlight * blocks.length * 2 * base.d_model) / tp;
      const ways = [blocks.length > without ? [shared, routed] : [0, 0], [without ? dense : 0, 0]];
      const largest = sum(ways[1]) > sum(ways[0]) ? ways[1] : ways[0];
      return [tokens * (inputs + attention + largest[0]), tokens * largest[1]];
    };
    const ofRank = (layout, place) => {
      const { tp, pp, dp, ep, rows, zero } = layout, edp = dp / ep, isLast = place === pp - 1;
      const blocks = stageBlocks(base.num_layers, pp)[place];
      const tpOfWords = stack.splits_vocabulary ? tp : 1; // of the embedding, and of the logits
      const replicated = {
        blocks: (of.replicated(blocks) + Number(isLast) * base.d_model) / tp,
        embedding: (Number(place === 0) * of.ends) / tpOfWords,
        head: (Number(isLast && !(place === 0 && base.tied)) * of.ends) / tp,
      };
      const routed = { blocks: of.routed(blocks) / (tp * ep), embedding: 0, head: 0 };
      const m = Math.max(1, Math.floor(batch / (dp * rows))), kept = activations(layout, blocks, Math.min(m, pp - place));
      const units = blocks.map((one) => of.replicated([one]) + (edp > 1 ? of.routed([one]) / ep : 0));
      const twoUnits = units.length > 1 ? Math.max(...units.slice(1).map((one, i) => units[i] + one)) : 2 * units[0];
      const held = {
        replicated: states(replicated, zero, dp, m),
        experts: states(routed, zero, edp, m),
        activations: stack.spare_activations * kept[0],
        routed: stack.spare_activations * kept[1],
        logits: isLast ? (stack.logits_bytes * rows * sequence * base.vocab_size) / tpOfWords : 0,
        gathered: zero < 3 ? 0 : ((recipe.weight_bytes + 2) * Math.max(twoUnits, Number(isLast) * of.ends)) / tp,
      };
      return { ...held, total: sum(Object.values(held)) };
    };
    const most = (layout) =>
      places(0, layout.pp).map((place) => ofRank(layout, place)).reduce((a, b) => (b.total > a.total ? b : a));
    // How probable it is that a share of the experts has any of the k experts of a token.
    const anyOf = (share) => {
      const outside = all - Math.round(all * share);
      return 1 - places(0, k).reduce((ratio, i) => (ratio * Math.max(0, outside - i)) / (all - i), 1);
    };
    // Of n neighbours that are a group, how many are on each node: first on that of the rank with the fewest beside it.
    const onNodes = (n, inNode, ranks) => {
      let fewest = null;
      for (let start = 0; start < Math.min(ranks, (n * inNode) / gcd(n, inNode)); start += n) {
        const first = Math.min(n, inNode - (start % inNode)), rest = (n - first) % inNode;
        const parts = [first, ...Array(Math.floor((n - first) / inNode)).fill(inNode), ...(rest ? [rest] : [])]
          .sort((a, b) => a - b);
        if (!fewest || parts[0] < fewest[0]) fewest = parts;
      }
      return fewest;
    };
    const sent = ({ tp, pp, dp, ep: n, recompute }) => {
      const tokens = (batch * sequence) / dp / tp, times = recompute === "full" ? 6 : 4;
      const total = (times * k * tokens * base.d_model * 2 * (n - 1)) / n;
      const others = onNodes(n, Math.max(1, Math.floor(perNode / tp)), pp * dp).slice(1), away = sum(others);
      const across = n > 1 ? (total * away) / (n - 1) : 0, once = sum(others.map((part) => anyOf(part / n)));
      return { inside: total - across, across, across_once: away ? (across * once * n) / (k * away) : 0 };
    };
    const possibleTp = () => {
      const widths = [shape.d_expert, shape.d_shared, shape.dense.length ? base.d_mlp : 0].reduce(gcd);
      return divisors(gcd(base.num_heads, widths))
        .filter((n) => n <= perNode && (base.num_kv_heads % n === 0 || n % base.num_kv_heads === 0));
    };
    const ways = possibleTp();
    const refusal = ({ tp, pp, dp, ep, rows, zero, recompute }) => {
      const ranks = tp * pp, layers = base.num_layers;
      if (!stack.fused_attention)
        return "Experts are counted with fused attention, and this stack keeps the scores: choose the stack megatron.";
      if (!["none", "full"].includes(recompute))
        return `Recomputation ${recompute} is not counted with experts: choose none or full.`;
      if (!ways.includes(tp))
        return `Heads and experts cannot be shared by ${tp} ranks of a node along tp: choose tp ${oneOf(ways)}.`;
      if (pp > layers) return `${layers} blocks do not fill ${pp} stages: choose pp ${layers} or less.`;
      if (gpus % ranks)
        return `${many(gpus)} GPUs do not divide by tp × pp = ${many(ranks)}: choose less, or ${many(ranks)} GPUs.`;
      const eps = divisors(gcd(dp, all));
      if (!eps.includes(ep))
        return `${all} experts and dp ${many(dp)} do not both divide by ep ${ep}: choose ep ${oneOf(eps)}.`;
      if (batch % dp)
        return `${many(batch)} sequences do not divide among dp ${many(dp)}: choose a batch of ${
          many(Math.ceil(batch / dp) * dp)}.`;
      if ((batch / dp) % rows)
        return `The ${many(batch / dp)} sequences of a data-parallel rank do not divide by ${rows}: choose b ${
          oneOf(divisors(batch / dp).filter((n) => n <= 8))}.`;
      if (zero === 3 && pp > 1) return "ZeRO-3 is planned without pipeline parallelism: choose pp 1, or ZeRO stage 1.";
      if (zero && dp === 1)
        return `ZeRO shards over data-parallel ranks, and there is one: choose ZeRO stage 0, or ${many(2 * gpus)} GPUs.`;
      return null;
    };
    // For each ep the layout that fits with the fewest tp · pp ranks, a tight one only where all are tight, or the
    // smallest; as lib.planner.experts has it.
    const byEp = (rows, zero, recompute) => {
      const found = new Map(), counts = divisors(gpus);
      for (const tp of counts)
        for (const pp of counts.filter((n) => gpus % (tp * n) === 0)) {
          const dp = gpus / (tp * pp);
          for (const ep of divisors(gcd(dp, all))) {
            const layout = { tp, pp, dp, ep, rows, zero: zero ?? Number(dp > 1), recompute };
            if (refusal(layout) === null) found.set(ep, [...(found.get(ep) ?? []), { layout, held: most(layout) }]);
          }
        }
      if (!found.size) {
        const plain = { tp: 1, pp: 1, dp: gpus, ep: 1, rows, zero: zero ?? Number(gpus > 1), recompute };
        throw new Error(refusal(plain) ?? "no layout is possible: choose more GPUs, or a batch of 1,024 sequences");
      }
      const less = (keys) => (a, b) => keys(a).map((x, i) => x - keys(b)[i]).find((apart) => apart !== 0) ?? 0;
      return [...found].sort(([a], [b]) => a - b).map(([, tried]) => {
        const cut = ({ held, layout: { tp, pp } }) => [Number(verdict(held.total) === "tight"), tp * pp, pp];
        const fitting = tried.filter(({ held }) => held.total <= room).sort(less(cut));
        const one = fitting[0] ?? tried.sort(less(({ held, layout: { tp } }) => [held.total, tp]))[0];
        return { layout: { ...one.layout, edp: one.layout.dp / one.layout.ep }, held: one.held,
          verdict: verdict(one.held.total), sent: sent(one.layout) };
      });
    };
    // How many published layouts ran that were planned as full: a sentence for the rows with the same share.
    const ranByEp = (rows) => {
      const same = new Map();
      for (const { layout: { ep }, held } of rows) {
        const said = ranText(held.total);
        same.set(said, [...(same.get(said) ?? []), ep]);
      }
      return [...same].map(([said, eps]) => `ep ${eps.join(", ")}: ${said}`);
    };
    return { byEp, ranByEp, ofRank, sent, refusal, room };
  };

  // ---- Words ----
  const modelText = (shape) => {
    const { base, num_experts: all, top_k: k } = shape, { parameters, active, ends } = ofShape(shape);
    const billions = (n) => `${Number((n / 1e9).toPrecision(4))}`;
    return `${billions(parameters)} billion parameters, ${billions(active)} billion active for a token (${
      billions(active - ends)} without the token embedding): ${all} experts of width ${many(shape.d_expert)} in ${
      base.num_layers - shape.dense.length} of ${base.num_layers} blocks, ${k} for each token.`;
  };
  const html = (shape, rows, room, ran) => {
    const gb = (n, digits = 1) => (n / 1e9).toFixed(digits);
    const ink = { tight: ' class="tight"', "does not fit": ' class="bad"', fits: "" };
    const sentence = (words) => `${words[0].toUpperCase()}${words.slice(1)}.`;
    const cells = ({ layout, held, verdict, sent }) => {
      const states = held.replicated + held.experts;
      return [...["ep", "edp", "tp", "pp", "dp"].map((axis) => layout[axis]), gb(states), gb(held.total - states),
        gb(held.total), `${((100 * held.total) / room).toFixed(0)}%`, verdict, gb(sent.inside + sent.across, 3), gb(sent.across, 3)];
    };
    const head = ["ep", "edp", "tp", "pp", "dp", "states", "activ.", "total", `of ${gb(room, 0)} GB`, "verdict", "sent",
      "across"];
    return `<p>${modelText(shape)}</p><div class="pst-scrollable-table-container" tabindex="0"><table class="table by-ep">
      <thead><tr>${head.map((one) => `<th scope="col">${one}</th>`).join("")}</tr></thead>
      <tbody>${rows.map((row) => `<tr${ink[row.verdict]}>${cells(row).map((one) => `<td>${one}</td>`).join("")}</tr>`).join("")}</tbody>
      </table></div>
      <p class="ran">${ran.map((words) => `${words}.`).join("<br>")}</p>
      <p>Decimal GB. For each ep, the layout that fits with the fewest tp × pp ranks, a tight one only where all are tight,
      or the smallest where none fits. The form gives
      microbatch, ZeRO stage and recomputation; tp, pp and dp are searched. edp ranks hold the same experts. States are
      parameters, gradients and optimizer states; activ. are activations and logits. Sent: by a rank in a step for a block
      with experts, and across nodes.</p>
      <p>${[noError, noSeconds, counted].map(sentence).join(" ")}</p>`;
  };
  // What the page says: a word and a sentence for the verdict, and the table; the choices are those of the form.
  const answer = (shape, training, { b, zero, recompute, cp, v, schedule, every, loss }) => {
    const left = Object.entries({ cp, "stages-per-rank": v, schedule, every: recompute === "full" ? every : "1", loss, zero })
      .find(([name, value]) => (name === "zero" ? value === "hsdp" : !["1", "1f1b"].includes(value)));
    const instead = { schedule: "1F1B", zero: "a stage of ZeRO" };
    if (left) throw new Error(`${left.join(" ")} is not counted with experts: choose ${instead[left[0]] ?? 1}.`);
    const of = planned({ ...shape, base: { ...shape.base, context: training.model.context } }, training);
    const rows = of.byEp(Number(b), Number(zero), recompute);
    const [easy, tight] = ["fits", "tight"]
      .map((word) => rows.filter(({ verdict }) => verdict === word).map(({ layout }) => layout.ep));
    const least = Math.min(...rows.map(({ held }) => held.total));
    const sentence = easy.length ? `With ep ${oneOf(easy)} there is a layout that fits; there are no seconds.`
      : tight.length ? `With ep ${oneOf(tight)} a layout fits, and leaves less than ${100 * limits.headroom} % of memory; there are no seconds.`
      : `The smallest layout needs ${(least / 1e9).toFixed(1)} GB per GPU; there are no seconds.`;
    const word = easy.length ? "It fits." : tight.length ? "It is tight." : "It does not fit.";
    return { word, sentence, html: html(shape, rows, of.room, of.ranByEp(rows)) };
  };
  return { read, shortened, planned, ofShape, answer };
};
