// What book/explain/configs.py says of a Hugging Face config.json, and lib/cost/models.py of a name, without Python.
//
// The tables are Python's, as JSON in the page, and so are the words; a test compares both. A config comes as text;
// what goes into a link is the same config without the keys that change nothing.

const modelConfig = (tables, presets) => {
  const { config: table, refused, fields, off, usual_tokens: usualTokens, not_modelled: names } = tables;
  // As Python writes a value; alone, or inside of a list.
  const written = (value) => {
    if (typeof value === "string") return `'${value}'`;
    if (Array.isArray(value)) return `[${value.map(written).join(", ")}]`;
    if (typeof value === "object" && value)
      return `{${Object.entries(value).map(([key, one]) => `'${key}': ${written(one)}`).join(", ")}}`;
    return { true: "True", false: "False", null: "None", undefined: "None" }[value] ?? String(value);
  };
  const text = (value) => (typeof value === "string" ? value : written(value));
  const isTrue = (value) => Boolean(value) && !["[]", "{}"].includes(written(value));
  const isOff = (value) => off.includes(text(value).toLowerCase());
  const plain = (key) => key.replaceAll("-", "_").toLowerCase();
  const noEffect = new RegExp(`(^|\\.)(${table.no_effect.trim().split(/\s+/).join("|")})`);
  const [sizes, switches] = [table.sizes, table.switches].map((of) =>
    Object.entries(of).flatMap(([field, keys]) => keys.map((key) => [key, field])));
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

  const families = { ...table.families, ...table.aliases };
  const family = (kind) => {
    const { like, ...row } = families[kind];
    return like ? { ...family(like), ...row } : row;
  };
  // The key that says whether there are biases, and of what; of the family or of one that it is like.
  const biasOf = (kind) => table.bias_keys[kind] ?? (families[kind].like ? biasOf(families[kind].like) : ["", ""]);
  const parsed = (said) => {
    let config;
    try {
      config = JSON.parse(said);
    } catch (error) {
      throw new Error(`This is not JSON: ${error.message}`);
    }
    if (!isObject(config)) throw new Error("This must be a JSON object, as Hugging Face writes it.");
    const { text_config: inner, ...outer } = config; // of a model of images and text, the text
    return isObject(inner) ? { ...outer, ...inner } : outer;
  };
  const first = (patterns, said) => Object.entries(patterns).find(([one]) => new RegExp(one).test(said))?.[1] ?? "";
  // What a key that is no size changes, or nothing said of it; undefined if it has no effect. Some are refused.
  const changes = (key, value) => {
    const why = first(table.not_modelled, `${plain(key)} ${text(value)}`.toLowerCase());
    if (first(table.not_modelled, `${plain(key)} true`) && isOff(value)) return undefined;
    if (!why && noEffect.test(plain(key))) return undefined;
    const speaks = why ? "" : first(table.speaks, plain(key));
    if (speaks === "experts" && text(value) === "1") return undefined;
    if (speaks && !isOff(value))
      throw new Error(`${key} ${text(value)} is not understood, and speaks of ${speaks}: no number here would hold ` +
        "for this run; take it out if it changes nothing");
    return isOff(value) ? undefined : why;
  };
  // Keys that are no sizes: not modelled, with what that changes, or not understood.
  const leftOver = (config) => {
    const keys = new Map();
    for (const [key, value] of Object.entries(config)) {
      const why = changes(key, value);
      if (why === undefined) continue;
      const shown = typeof value === "object" || typeof value === "boolean" ? key : `${key} ${text(value)}`;
      keys.set(why, [...(keys.get(why) ?? []), shown]);
    }
    const unknown = keys.get("");
    keys.delete("");
    const notes = [...keys].map(([why, of]) => `not modelled: ${of.join(", ")}: ${why}`);
    return unknown ? [...notes, `not understood: ${unknown.join(", ")}`] : notes;
  };

  // The sizes as the planner takes them, and notes: what gave which size, and what was not understood.
  const read = (said, tokens) => {
    const config = parsed(said);
    for (const [key, value] of Object.entries(config))
      for (const [pattern, why] of Object.entries(refused))
        if (new RegExp(pattern).test(key.replaceAll("-", "_")) && ![...off, "1"].includes(text(value).toLowerCase()))
          throw new Error(`${key} ${text(value)} is not modelled; ${why}`);
    const kind = config.model_type;
    if (typeof kind !== "string" || !Object.hasOwn(families, kind))
      throw new Error(`model_type ${written(kind)} is not known; known are ${Object.keys(families).join(", ")}`);
    const { apart, ...ofFamily } = family(kind), found = {};
    for (const [key, field] of sizes) {
      const value = config[key] ?? null;
      if (value === null) continue;
      if (!Number.isSafeInteger(value) || value < 1)
        throw new Error(`${key}=${written(value)} must be a whole number of at least 1`);
      found[field] = [value, key];
    }
    for (const [key, field] of switches) {
      const value = config[key] ?? null;
      if (value === null) continue;
      if (!["boolean", "number"].includes(typeof value))
        throw new Error(`${key}=${written(value)} must be true, false or a number`);
      found[field] = [Boolean(value), key];
    }
    const [bias, biased] = biasOf(kind), hasBiases = config[bias] ?? null;
    if (isTrue(hasBiases) && isTrue(config.mlp_bias)) found.biases = ["all", "mlp_bias"];
    else if (isTrue(hasBiases)) found.biases = [biased, bias];
    else if (hasBiases !== null && ofFamily.biases !== "none") found.biases = ["none", bias];
    const given = { ...ofFamily };
    for (const [field, [value]] of Object.entries(found)) given[field] = value;
    const lacks = Object.entries(table.sizes).slice(0, -2).filter(([field]) => !(field in given));
    if (lacks.length) {
      const ways = lacks.map(([, keys]) => keys.join(" or ")).join(", ");
      throw new Error(`it lacks ${ways}, without which the size of a ${kind} model is not known`);
    }
    const most = given.context, context = tokens || Math.min(most, usualTokens);
    const shape = { ...fields, ...given, context };
    const { d_model: width, num_heads: heads, num_kv_heads: keys } = shape;
    if (shape.head_dim === null && width % heads)
      throw new Error(`${heads} heads do not divide a width of ${width}; use a number that does, or give ` +
        "the width of a head");
    if (keys && heads % keys)
      throw new Error(`${keys} heads of keys and values do not divide ${heads} heads; use a number that does`);
    const notes = Object.entries(found).filter(([field]) => field !== "context")
      .map(([field, [value, key]]) => `${field} ${text(value)}: from ${key}`);
    const rest = Object.keys(fields).filter((field) => !(field in found) && field !== "context");
    notes.push(`${rest.map((field) => `${field} ${text(shape[field])}`).join(", ")}: of model_type ${kind}`);
    notes.push(`context ${context}: ${tokens ? "--seq" : "a default"}; the config has a maximum, ${most}`);
    if (apart) notes.push(`not counted: ${apart}`);
    const others = Object.fromEntries(Object.entries(config).filter(([key]) => !sizes.some(([size]) => size === key)));
    if (config.use_sliding_window === false) delete others.sliding_window;
    const kinds = text(config.layer_types).match(/\w+/g) ?? [];
    if (kinds.length && kinds.every((one) => one === "full_attention")) delete others.layer_types;
    const model = { ...shape, num_kv_heads: keys || heads, d_mlp: shape.d_mlp || 4 * width };
    model.head_dim = shape.head_dim || Math.floor(width / heads);
    return { model, notes: [...notes, ...leftOver(others)] };
  };

  // The same config, as short as it can be without another answer.
  const shortened = (said) => {
    const kept = ["model_type", "attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "use_sliding_window",
      "layer_types"];
    const refusedOr = (key, value) => { try { return changes(key, value) !== undefined; } catch { return true; } };
    const counts = (key, value) =>
      [...sizes, ...switches].some(([one]) => one === key) ? value !== null
        : kept.includes(key) || refusedOr(key, value);
    const short = ([key, value]) => [key, typeof value === "object" && value && !kept.includes(key) ? true : value];
    return JSON.stringify(Object.fromEntries(
      Object.entries(parsed(said)).filter(([key, value]) => counts(key, value)).map(short)));
  };

  // The preset that a name means, also with its publisher and other hyphens.
  const known = (name) => {
    const small = name.trim().toLowerCase();
    for (const [part, pattern] of Object.entries(names))
      if (new RegExp(pattern).test(small)) throw new Error(`${name.trim()}: ${part} is not modelled`);
    const bare = (one) => one.slice(one.lastIndexOf("/") + 1).replaceAll("-", "");
    const found = presets.find((one) => bare(one) === bare(small));
    if (!found) throw new Error(`model '${name.trim()}' is not a preset: paste its config.json`);
    return found;
  };
  return { read, shortened, known, parsed, text, written };
};
