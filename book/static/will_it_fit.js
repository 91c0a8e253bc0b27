// The page "Will it fit?": controls, two stacked bars and the best layouts, computed by planner.js and planner_*.js.
//
// The form is the only state. The address holds what was chosen in it, so that a reader can send it.
(() => {
  const box = document.getElementById("planner");
  const numbers = JSON.parse(box.querySelector("script").textContent);
  const config = modelConfig(numbers.foreign, Object.keys(numbers.models));
  const experts = withExperts(numbers.experts, config, numbers.limits);

  // ---- Controls: name in the address → its words, and its values or what it reads ----
  const doubled = (from, to) => (from > to ? [] : [from, ...doubled(2 * from, to)]);
  const gb = (bytes, digits = 1) => `${(bytes / 1e9).toFixed(digits)} GB`;
  const ofPresets = ([name, { memory_bytes: memory }]) => [name, `${name.toUpperCase()} ${gb(memory, 0)}`];
  const MENUS = {
    model: ["Model", [...Object.keys(numbers.models), ...Object.keys(numbers.experts.models), ["config", "a config.json…"]]],
    gpu: ["GPU", [...Object.entries(numbers.gpus).map(ofPresets), ["other", "another card…"]]],
    stack: ["Stack", Object.keys(numbers.stacks)],
    trained: ["Trained", [["all", "all parameters"], ["16bit", "LoRA, base in 16 bit"], ["4bit", "LoRA, base in 4 bit"]]],
    optimizer: ["Optimizer", Object.keys(numbers.limits.optimizers)],
    offload: ["Offload", [["none", "nothing"], "optimizer", ["parameters", "all of ZeRO-3"]]],
  };
  // A text as a number, or NaN; thousands may have commas.
  const number = (text) => {
    const plain = /^\d{1,3}(,\d{3})+(\.\d+)?$/.test(text) ? text.replaceAll(",", "") : text;
    return /^\d+(\.\d*)?(e\d+)?$/i.test(plain) ? Number(plain) : NaN;
  };
  const count = (most, such) => [
    (text) => (Number.isInteger(number(text)) && number(text) >= 1 && number(text) <= most ? number(text) : NaN),
    `Give a whole number from 1 to ${many(most)}, such as ${many(such)}.`];
  const figure = (unit, such) => [
    (text) => (number(text) > 0 && number(text) <= 1e9 ? number(text) * unit : NaN),
    `Give a number above 0, such as ${such}.`];
  const optional = ([read, sentence]) => [(text) => (text === "" ? 0 : read(text)), sentence];
  const tokens = (text) => {
    const [, digits, unit] = /^(.*?)\s*([MBT]?)$/i.exec(text);
    return number(digits) > 0 ? number(digits) * { m: 1e6, b: 1e9, t: 1e12, "": 1 }[unit.toLowerCase()] : NaN;
  };
  const SIZES = { // words, what reads it, the sentence that refuses
    gpus: ["GPUs", ...count(2 ** 20, 64)],
    batch: ["Batch, sequences", ...count(2 ** 24, 1024)],
    seq: ["Sequence, tokens", ...count(2 ** 24, 4096)],
    rank: ["Rank of LoRA", ...count(2 ** 16, 16)],
  };
  const CARD = { // as in lib.planner's command; the field of Device, and how much one is
    peak: ["Peak, TFLOP/s, 16 bit", ...figure(1e12, 989), "peak_flops", 1e12],
    memory: ["Memory, GB", ...figure(1e9, 80), "memory_bytes", 1e9],
    "memory-bandwidth": ["Memory, GB/s", ...figure(1e9, "3,350"), "memory_Bps", 1e9],
    link: ["Link, GB/s one way", ...figure(1e9, 450), "link_Bps", 1e9],
    network: ["Network, GB/s per GPU", ...figure(1e9, 50), "network_Bps", 1e9],
    "per-node": ["GPUs per node", ...count(1024, 8), "per_node", 1],
  };
  const ANSWERS = {
    tokens: ["Tokens in all", ...optional([tokens, "Give a number and M, B or T, such as 15.6T."])],
    price: ["Price of a GPU hour", ...optional(figure(1, 2.5))],
  };
  const FIELDS = { ...SIZES, ...CARD, ...ANSWERS };
  const NUMBERED = "tp cp pp v b every loss".split(" "); // these may have any number
  const CHIPS = {
    tp: ["Tensor (tp)", doubled(1, 16)],
    cp: ["Context (cp)", doubled(1, 16)],
    pp: ["Pipeline (pp)", doubled(1, 16)],
    v: ["Stages (v)", [1, 2, 3, 4]],
    schedule: ["Schedule", [["1f1b", "1F1B"], ["zb-h1", "ZB-H1"], ["zb-v", "ZB-V"]]],
    b: ["Microbatch (b)", doubled(1, numbers.limits.rows)],
    zero: ["ZeRO stage", [0, 1, 2, 3, ["hsdp", "HSDP"]]],
    sp: ["Sequence parallel", [[1, "with tp"], [0, "off"]]],
    recompute: ["Recompute", numbers.limits.recompute],
    every: ["… one block in", [1, 2, 3, 4]],
    loss: ["Loss in pieces", doubled(1, 16)],
    whole: ["Whole gradients", [["stack", "as in the stack"], [0, "no"], [2, "16 bit"], [4, "32 bit"]]],
    search: ["Compared with", [["usual", "usual layouts"], ["all", "all"]]],
    sweep: ["Sweep", [["off", "off"], ["batch", "batch"], ["gpus", "GPUs"], ["network", "network"]]],
  };
  const START = { // 64 GPUs have 5,120 GB together, and this does not fit
    model: "llama-70b", gpu: "h100", gpus: 64, seq: 4096, batch: 1024, stack: "megatron", tokens: "", price: "",
    trained: "all", optimizer: "adam", offload: "none", rank: 16,
    tp: 8, cp: 1, pp: 1, v: 1, schedule: "1f1b", b: 4, zero: 1, sp: 1, recompute: "none", every: 1, loss: 1,
    whole: "stack", search: "usual", sweep: "off", config: "",
  };
  const KINDS = { // a kind of lib/planner: its words, its colour
    parameters: ["parameters", "param"],
    gradients: ["gradients", "gradient"],
    optimizer: ["optimizer", "opt"],
    activations: ["activations", "activation"],
    logits: ["logits", "activation"],
    gathered: ["gathered unit", "param"],
    matmuls: ["matmuls", "forward"],
    attention: ["attention", "forward"],
    memory: ["memory traffic", "forward"],
    tp: ["tp", "comm"],
    cp: ["cp", "comm"],
    pp: ["pp", "comm"],
    dp: ["dp", "comm"],
    bubble: ["bubble", "idle"],
  };

  const pairs = (values) => values.map((value) => (Array.isArray(value) ? value : [value, value]));
  const chip = (name) => ([value, words]) =>
    `<label><input type="radio" name="${name}" value="${value}"><span>${words}</span></label>`;
  const chips = (name) => `<fieldset name="${name}-chips"><legend>${CHIPS[name][0]}</legend>${
    pairs(CHIPS[name][1]).map(chip(name)).join("")}</fieldset>`;
  const menu = (name) => {
    const option = ([value, words]) => `<option value="${value}">${words}</option>`;
    return `<label>${MENUS[name][0]}<select name="${name}">${pairs(MENUS[name][1]).map(option).join("")}</select></label>`;
  };
  const wrong = (name) => `<small id="wrong-${name}" class="wrong"></small>`;
  const typed = (name) => `<label>${FIELDS[name][0]}<input name="${name}" inputmode="decimal" maxlength="20"
    aria-describedby="wrong-${name}">${wrong(name)}</label>`;
  const all = (controls, html) => Object.keys(controls).map(html).join("");
  box.innerHTML = `
    <form autocomplete="off">
      <div class="menus">${all(MENUS, menu)}${all(SIZES, typed)}</div>
      <div class="config" hidden>
        <label>config.json of Hugging Face<textarea name="config" rows="4" spellcheck="false"
          aria-describedby="wrong-config" placeholder="Paste it here, or the name of a model"></textarea></label>
        <label class="file">or pick the file <input type="file" accept=".json,application/json"></label>
        ${wrong("config")}<details><summary></summary><ul></ul></details>
      </div>
      <details class="card"><summary>Figures of the card, network, GPUs per node</summary>
        <div class="menus">${all(CARD, typed)}</div></details>
      <details class="money"><summary>Days and money</summary><div class="menus">${all(ANSWERS, typed)}</div></details>
      <div class="chips">${all(CHIPS, chips)}</div>
      <p class="hint">A dashed choice is impossible with the others; press it to read why.</p>
      <p class="ranks"></p>
    </form>
    <div class="out"><div class="now"><p class="verdict" aria-live="polite"></p>
      <div class="bars"><figure></figure><figure></figure></div></div>
    <div class="more">
      <p class="errors"></p><div class="kinds"><ul></ul><ul></ul></div><div class="experts" hidden></div>
      <p class="answers"></p><div class="best"></div><div class="sweep" hidden></div><div class="messages"></div>
      <p class="end"><button type="button" class="copy">Copy link</button> <span>Not modelled: ${
        numbers.limits.not_modelled.join(", ")}.</span></p>
    </div></div>
    <svg height="0" aria-hidden="true"><pattern id="hatched" width="6" height="6" patternTransform="rotate(45)"
      patternUnits="userSpaceOnUse"><path d="M0 0V6"/></pattern></svg>`;
  const part = (selector) => box.querySelector(selector);
  const form = part("form"), field = (name) => form.elements[name];

  // ---- Chips of numbers: those of old, those that are possible now, and the one that is chosen ----
  const offer = (name, more) => {
    const place = field(`${name}-chips`), inputs = [...place.querySelectorAll("input")];
    const [usual, chosen] = [CHIPS[name][1], inputs.find((input) => input.checked)?.value];
    const wanted = [...new Set([...usual, ...more, ...(chosen ? [Number(chosen)] : [])])].sort((a, b) => a - b);
    if (wanted.join() === inputs.map(({ value }) => value).join()) return;
    const focused = place.contains(document.activeElement);
    inputs.forEach((input) => input.parentNode.remove());
    place.insertAdjacentHTML("beforeend", pairs(wanted).map(chip(name)).join(""));
    if (chosen) field(name).value = chosen;
    if (focused) place.querySelector(":checked")?.focus();
  };

  // ---- What the form says, in the planner's words ----
  const figures = (gpu) => { // as the fields of a card have them; of another card only the GPUs of a node
    const usual = { per_node: numbers.per_node, ...numbers.gpus[gpu] };
    return Object.fromEntries(Object.entries(CARD).map(([name, [, , , of, unit]]) =>
      [name, of in usual ? usual[of] / unit : ""]));
  };
  const state = () => {
    const at = Object.fromEntries([...new FormData(form)].filter(([, value]) => typeof value === "string"));
    for (const name of [...Object.keys(FIELDS), "config"]) at[name] = at[name].trim();
    return at;
  };
  const fill = (values) => { // what is no choice of a control, such as a misspelt address has it, changes nothing
    for (const [name, value] of Object.entries(values).map(([key, one]) => [key, String(one)])) {
      const among = Object.hasOwn(MENUS, name) ? MENUS[name][1] : Object.hasOwn(CHIPS, name) ? CHIPS[name][1] : [];
      const isNew = NUMBERED.includes(name) && /^[1-9]\d{0,4}$/.test(value);
      if (isNew) offer(name, [Number(value)]);
      if (isNew || pairs(among).some(([one]) => String(one) === value)) field(name).value = value;
      else if (Object.hasOwn(FIELDS, name) || name === "config") field(name).value = value.slice(0, 20_000);
    }
  };
  const refuse = (name, sentence) => {
    part(`#wrong-${name}`).textContent = sentence;
    field(name)[sentence ? "setAttribute" : "removeAttribute"]("aria-invalid", "true");
  };
  // The training and the notes on its model, or the first of the sentences that stand beside wrong fields.
  const asked = (at) => {
    let first = "", model = numbers.models[at.model], notes = [], mixture = null;
    const given = {};
    for (const [name, [words, read, sentence]] of Object.entries(FIELDS)) {
      given[name] = read(at[name]);
      refuse(name, Number.isNaN(given[name]) ? sentence : "");
      if (Number.isNaN(given[name])) first ||= `${words}: ${sentence}`;
    }
    refuse("config", "");
    if (!model)
      try {
        if (at.config === "" && at.model === "config") throw new Error("Paste a config.json, or pick its file.");
        mixture = experts.read(at.model === "config" ? at.config : at.model, given.seq || 1);
        if (mixture) ({ shape: { base: model }, notes } = mixture);
        else if (!/^[{["]/.test(at.config)) model = numbers.models[config.known(at.config)];
        else ({ model, notes } = config.read(at.config, given.seq || 1));
      } catch ({ message }) {
        refuse("config", message);
        first ||= message;
      }
    if (first) return { first };
    const device = { ...numbers.gpus[at.gpu] }, of = numbers.stacks[at.stack];
    const usual = of[at.gpu] ?? of.h100; // as lib.planner does for a GPU without calibration
    for (const [name, [, , , key]] of Object.entries(CARD)) device[key] = given[name];
    const training = {
      model: { ...model, context: given.seq },
      device,
      ...trainedOf(at, given.rank),
      stack: {
        ...usual,
        ...(at.whole !== "stack" && { whole_gradient_bytes: Number(at.whole) }),
        ...(at.optimizer !== "adam" && { recipe: recipeOf(usual.recipe, numbers.limits.optimizers[at.optimizer]) }),
      },
      gpus: given.gpus,
      per_node: given["per-node"],
      global_batch: given.batch,
    };
    return { training, notes, mixture, tokens: given.tokens, price: given.price };
  };
  const trainedOf = ({ trained, optimizer, offload }, rank) => ({
    adapters: trained === "all" ? null : { rank, base: trained, base_bytes: numbers.limits.bases[trained] },
    offload: offload === "none" ? "" : offload,
    optimizer,
  });
  const layoutOf = (at, { gpus, per_node: perNode }) => {
    const [tp, cp, pp, rows, v, every, loss] = [at.tp, at.cp, at.pp, at.b, at.v, at.every, at.loss].map(Number);
    const dp = gpus / (tp * cp * pp), hybrid = at.zero === "hsdp";
    const copies = hybrid ? Math.max(1, Math.ceil((dp * cp) / Math.max(1, Math.floor(perNode / tp)))) : 1;
    const { recompute, schedule } = at;
    return {
      tp, cp, pp, dp, rows, stages_per_rank: v, zero: hybrid ? 3 : Number(at.zero),
      sequence_parallel: at.sp === "1" && tp > 1, recompute, schedule, replicas: copies, every, loss_chunks: loss,
      attention: "",
    };
  };
  const choicesOf = ({ rows: b, stages_per_rank: v, loss_chunks: loss, replicas, zero, ...layout }) =>
    ({ ...layout, b, v, loss, zero: replicas > 1 ? "hsdp" : zero, sp: 1 });

  // ---- Words and bars ----
  const sec = (x) => `${x >= 1000 ? many(Math.round(x)) : x.toPrecision(3)} s`;
  const percent = (x) => `${(100 * x).toFixed(1)}%`;
  const slower = (of, one, other) => {
    const { fraction, kind, extraS } = of.whySlower(one, other);
    return `${fraction < 0.001 ? "less than 0.1%" : percent(fraction)} slower than the fastest: ${
      sec(extraS)} more for ${KINDS[kind][0]}`;
  };
  const small = matchMedia("(max-width: 700px), (max-height: 500px)");
  // A stacked bar with its marks above it, and a list of each kind with its number.
  const draw = (i, words, kinds, full, marks, say) => {
    const figure = box.querySelectorAll("figure")[i], share = (x) => `${((100 * x) / full).toFixed(2)}%`;
    const there = Object.entries(kinds).filter(([, x]) => x > 0);
    const [top, high] = small.matches ? [2, 16] : [20, 34];
    let end = 0;
    const bars = there.map(([kind, x]) => {
      const [label, ink] = KINDS[kind], [start, middle] = [end, end + x / 2];
      end += x;
      const hasRoom = !small.matches && (x / full) * figure.clientWidth > 7.5 * label.length + 8;
      const text = hasRoom ? `<text x="${share(middle)}" y="42" class="on ${ink}">${label}</text>` : "";
      return `<rect x="${share(start)}" width="${share(x)}" y="${top}" height="${high}" class="${ink}"/>${text}`;
    });
    const lines = marks.map(([x, label, isMain]) => {
      const anchor = x / full > 0.85 ? "end" : x / full < 0.15 ? "start" : "middle";
      const style = isMain ? 'class="mark main"' : 'class="mark"';
      const name = small.matches ? "" : `<text x="${share(x)}" y="11" text-anchor="${anchor}" ${style}>${label}</text>`;
      return `<line x1="${share(x)}" x2="${share(x)}" y1="${top - 4}" y2="${top + high + 4}" ${style}/>${name}`;
    });
    const entry = ([kind, x]) => `<li><i class="${KINDS[kind][1]}"></i>${KINDS[kind][0]} <b>${say(x)}</b></li>`;
    figure.innerHTML = `<figcaption>${words}</figcaption>
      <svg height="${top + high + 4}" aria-hidden="true">${bars.join("")}${lines.join("")}</svg>`;
    box.querySelectorAll(".kinds ul")[i].innerHTML = there.map(entry).join("");
  };
  const answersText = (of, own, tokens, price) => {
    const it = of.answers(own, tokens, price), round = (x) => many(Math.round(x));
    const used = (mfu, hfu) => `MFU ${percent(mfu)}${hfu > 1.001 * mfu ? `, HFU ${percent(hfu)}` : ""}`;
    const causal = `; ${used(it.mfu_causal, it.hfu_causal)} with its causal half, all that a fused kernel computes`;
    const time = it.days && `${many(tokens / 1e9)} billion tokens: ${many(Math.round(10 * it.days) / 10)} days, ${
      round(it.gpu_hours)} GPU hours${price ? `, ${round(it.money)} at ${price} per GPU hour` : ""}.`;
    return [`<b>${round(it.tokens_per_s)} tokens/s</b>, ${round(it.tokens_per_s_per_gpu)} tokens/s per GPU.`,
      time && `<b>${time}</b>`, `${used(it.mfu, it.hfu)}, counting the full s × s matrix of attention${
        it.mfu > 1.1 * it.mfu_causal ? causal : ""}.`].filter(Boolean).join(" ");
  };

  const say = (word, html) => {
    const ink = { "It fits.": "ok", "It is tight.": "tight" }[word] ?? "bad";
    const words = `<strong class="${ink}">${word}</strong> <span>${html}</span>`;
    if (part(".verdict").innerHTML !== words) part(".verdict").innerHTML = words; // else it would be read out again
  };
  const listed = (words) => [words.slice(0, -1).join(", "), words.at(-1)].filter(Boolean).join(" and ");
  const escaped = (text) => new Option(text).innerHTML;
  let searched = {};
  // The fastest layouts: of the choices of the library, or of all, if the own layout goes beyond those or nothing fits.
  const search = (of, training, isWide) => {
    const key = JSON.stringify([training, isWide]);
    if (searched.key === key) return searched;
    searched = { key, ...of.recommended(isWide ? of.all : of.usual) };
    searched.isWide = isWide || searched.choices !== of.usual;
    const { found, choices, smallest } = searched;
    if (!found.length) searched.nothing = of.nothing(choices, smallest);
    else if (!searched.isWide && !of.noSeconds) searched.lack = of.lacking(found[0]);
    return searched;
  };
  // What the library of the stack lacks: parts of the first layout, or of a faster one.
  const lackText = (of, { found, isWide, lack }, library) => {
    if (lack) {
      const times = found[0].stepS / lack.one.stepS;
      const by = times < 2 ? `${((times - 1) * 100).toFixed(0)}% faster` : `${times.toFixed(1)} times as fast`;
      return `With ${listed(lack.parts)}, which ${library} does not have, ${by}: ${of.layoutText(lack.one.layout)}, ${
        gb(lack.one.bytes)}, ${sec(lack.one.stepS)}.`;
    }
    const parts = isWide && found.length ? of.beyond(of.usual, found[0].layout) : [];
    return parts.length ? `The first needs ${listed(parts)}, which ${library} does not have.` : "";
  };
  let swept = {};
  const showSweep = (at, training, choices) => {
    const what = at.sweep, place = part(".sweep");
    place.hidden = what === "off";
    if (place.hidden) return;
    const key = JSON.stringify([what, training, choices]);
    if (swept.key !== key) swept = { key, rows: plannerSweep(training, numbers.limits).sweep(what, choices) };
    place.innerHTML = typeof swept.rows === "string" ? `<p>${swept.rows}.</p>` : sweepFigure(what, swept.rows, sec);
  };

  // A model with experts has memory and no seconds: a table instead of bars and the fastest layouts.
  const showExperts = (at, shape, training) => {
    for (const name of [".bars", ".ranks", ".errors", ".kinds", ".messages", ".answers"]) part(name).hidden = true;
    box.querySelectorAll(".chips input").forEach((input) => { input.title = ""; });
    try {
      const { word, sentence, html } = experts.answer(shape, training, at);
      part(".experts").innerHTML = html;
      say(word, sentence);
    } catch ({ message }) {
      part(".experts").innerHTML = "";
      say("Impossible.", escaped(message));
    }
  };
  const show = () => {
    const at = state(), { first, training, notes, mixture, tokens, price } = asked(at);
    part(".config").hidden = at.model !== "config";
    if (at.gpu === "other") part(".card").open = true;
    for (const name of [".bars", ".more", ".ranks"]) part(name).hidden = Boolean(first);
    part(".config details").hidden = !notes?.length;
    part(".experts").hidden = !mixture;
    for (const name of [".best", ".sweep", ".end span"]) part(name).hidden = Boolean(mixture);
    if (first) return say("No answer.", escaped(first));
    part(".config summary").textContent = `${notes.length} notes: which key gave which size, and what is not counted`;
    part(".config ul").innerHTML = notes
      .map((note) => `<li>${escaped(note.replace(": --seq;", ": from the form;"))}</li>`).join("");

    if (mixture) return showExperts(at, mixture.shape, training);
    const of = planner(training, numbers.limits);
    for (const [name, possible] of Object.entries({ ...of.axes, v: of.axes.v(at.pp) })) offer(name, possible);
    const layout = layoutOf(at, training), own = of.planned(layout), refusal = of.refusal(layout) ?? (
      training.offload === "parameters" && layout.zero !== 3
        ? "Offloaded parameters are shards of ZeRO-3: choose ZeRO stage 3, or offload the optimizer." : null);
    const { tp, cp, pp, dp } = layout, isWide = at.search === "all" || of.beyond(of.usual, layout).length > 0;
    const best = search(of, training, isWide), { found, smallest } = best;
    const gpu = at.gpu === "other" ? "GPU" : at.gpu.toUpperCase(), spare = of.room - own.bytes;
    for (const name of Object.keys(CHIPS).filter((one) => !["search", "sweep", "whole"].includes(one)))
      for (const input of field(`${name}-chips`).querySelectorAll("input")) // what a press on it would say; the style
        input.title = of.refusal(layoutOf({ ...at, [name]: input.value }, training)) ?? ""; // sheet marks those with it
    part(".ranks").textContent = `${many(Number((of.parameters / 1e9).toPrecision(4)))} billion parameters. dp: ${
      many(training.gpus)} GPUs ÷ ${tp * cp * pp} = ${many(dp)}. A step has ${
      many(training.global_batch * training.model.context)} tokens.`;

    const name = at.whole === "stack" ? at.stack : "";
    const [, rests] = / of (.*)/.exec(of.verdictText(layout, name)); // memory, bytes per parameter, what turns it
    const ran = of.ranText(own.bytes).replace("of", "Of");
    const size = `Peak memory is ${gb(own.bytes)} per GPU, of ${rests}. <span class="ran">${ran}.</span>`;
    const time = of.noSeconds ? "" : `${sec(own.stepS)} at ${percent(of.answers(own).mfu)} MFU`;
    const stepOf = (words) => `<span>${of.noSeconds ? `${of.noSeconds}.` : words}</span>`;
    const rest = found[0]?.stepS < own.stepS
      ? `, ${slower(of, found[0], own)}`
      : found[0]?.stepS > own.stepS
        ? `, ${percent(found[0].stepS / own.stepS - 1)} faster than the fastest that is not tight`
        : ", the fastest that fits";
    if (refusal) say("Impossible.", refusal);
    else if (spare < 0) say("It does not fit.", `${size} ${stepOf(`With enough memory a step would take ${time}.`)}`);
    else {
      const word = of.verdict(own.bytes) === "tight" ? "It is tight." : "It fits.";
      say(word, `${size} ${stepOf(`A step takes ${time}${rest}.`)}`);
    }

    for (const name of [".bars", ".errors", ".kinds"]) part(name).hidden = refusal !== null;
    const missed = errorsOf(training, numbers); // as the command has them behind the same numbers
    part(".errors").innerHTML = [`${gb(own.bytes)}${missed.memory}.`,
      of.noSeconds ? "" : `${sec(own.stepS)}${missed.seconds}.`].filter(Boolean).map((one) => `<small>${one}</small>`).join("");
    for (const name of [".bars figure + figure", ".kinds ul + ul", ".messages", ".answers"])
      part(name).hidden = refusal !== null || of.noSeconds !== "";
    if (!refusal) {
      const width = part("figure").clientWidth;
      const sizes = [...new Set(Object.values(numbers.gpus).map((one) => one.memory_bytes))].sort((a, b) => a - b);
      const larger = spare < 0 ? sizes.find((x) => x >= own.bytes) ?? 0 : 0; // a GPU on which it would fit
      const full = 1.02 * Math.max(own.bytes, of.room, larger);
      const near = (x) => Math.abs(x - of.room) * width < 90 * full;
      const marks = sizes.filter((x) => x < full && !near(x)).map((x) => [x, (x / 1e9).toFixed(0)]);
      draw(0, `Peak memory per GPU: ${gb(own.bytes)} of ${gb(of.room, 0)}`, own.memory, full,
        [...marks, [of.room, `${gpu} ${gb(of.room, 0)}`, true]], gb);
      if (!of.noSeconds) {
        const fastest = found.slice(0, 1).map(({ stepS }) => [stepS, `fastest ${sec(stepS)}`, true]);
        draw(1, `Time of a step: ${sec(own.stepS)}`, own.seconds, 1.02 * Math.max(own.stepS, found[0]?.stepS ?? 0),
          fastest, (x) => `${sec(x)} (${((100 * x) / own.stepS).toFixed(0)}%)`);
        part(".messages").innerHTML = messagesTable(of.sends(own));
        part(".answers").innerHTML = answersText(of, own, tokens, price);
      }
    }

    const same = JSON.stringify(choicesOf(layout));
    const taken = (one) => `${of.noSeconds ? "" : `${sec(one.stepS)}, `}${gb(one.bytes)}${
      of.verdict(one.bytes) === "tight" ? ", tight" : ""}`;
    const button = (one, why) =>
      `<li><button type="button" aria-pressed="${JSON.stringify(choicesOf(one.layout)) === same}"><b>${
        of.layoutText(one.layout)}</b>${taken(one)}${why}</button></li>`;
    const [title, offered] = found.length
      ? [`${of.noSeconds ? "Those that fit, the least split first" : "The fastest that fit"}${
        best.isWide ? ", of all layouts" : ""}`,
        found.map((one, i) => button(one, i && !of.noSeconds ? `<br>${slower(of, found[0], one)}` : ""))]
      : [`${best.nothing}.`, smallest ? [button(smallest, "")] : []];
    const lack = lackText(of, best, numbers.limits.libraries[training.stack.library]);
    part(".best").innerHTML = `<p>${title}</p><ol>${offered.join("")}</ol>${lack && `<p class="lack">${lack}</p>`}`;
    if (of.noSeconds) part(".sweep").hidden = true;
    else showSweep(at, training, isWide ? of.all : of.usual);
    box.querySelectorAll(".best button").forEach((one, i) =>
      one.addEventListener("click", () => {
        fill({ ...choicesOf((found[i] ?? smallest).layout), search: best.isWide ? "all" : "usual" });
        changed();
        box.querySelectorAll(".best button")[i]?.focus(); // the list was written anew
      }));
  };

  // ---- The address ----
  const question = () => {
    const at = state(), ofCard = figures(at.gpu);
    for (const [name, usual] of Object.entries(ofCard)) if (String(usual) === at[name]) delete at[name];
    if (at.model !== "config") delete at.config;
    else if (at.config.startsWith("{"))
      try {
        at.config = experts.shortened(at.config);
      } catch {
        at.config = at.config.slice(0, 2000); // it is wrong, and goes as it is
      }
    return new URLSearchParams(Object.entries(at).filter(([, value]) => value !== ""));
  };
  const changed = () => {
    part(".copy").textContent = "Copy link";
    history.replaceState(null, "", `${location.pathname}?${question()}`);
    show();
  };
  const open = () => {
    const said = { // old links have it all behind a #
      ...Object.fromEntries(new URLSearchParams(location.search)),
      ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))),
    };
    if (said.model && said.model !== "config" && !MENUS.model[1].includes(said.model))
      try {
        said.model = config.known(said.model);
      } catch {
        Object.assign(said, { model: "config", config: said.model });
      }
    if (said.gpu && !MENUS.gpu[1].some(([name]) => name === said.gpu)) said.gpu = "other";
    fill({ ...START, ...figures(said.gpu ?? START.gpu) });
    fill(said);
    part(".card").open = Object.keys(CARD).some((name) => said[name]);
    part(".money").open = Boolean(said.tokens || said.price);
    show();
  };
  let later = 0;
  form.addEventListener("input", ({ target }) => {
    if (target.name === "gpu" && target.value !== "other") fill(figures(target.value));
    clearTimeout(later);
    later = 0;
    if (!target.matches("[inputmode], textarea")) return changed();
    later = setTimeout(() => {
      later = 0;
      changed();
    }, 300); // who types goes on
  });
  form.addEventListener("change", () => { // Enter, or on to the next field
    if (!later) return;
    clearTimeout(later);
    later = 0;
    changed();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  part("input[type=file]").addEventListener("change", async ({ target }) => {
    const [file] = target.files;
    if (!file) return;
    field("config").value = file.size > 1e6 ? file.name : await file.text(); // no config is so large, and a name is refused
    changed();
  });
  part(".copy").addEventListener("click", async ({ target }) => {
    changed();
    try {
      await navigator.clipboard.writeText(location.href);
      target.textContent = "Copied";
    } catch {
      target.textContent = "Copy it from the address bar";
    }
  });
  addEventListener("hashchange", open);
  let width = innerWidth;
  addEventListener("resize", () => { // a phone's address bar comes and goes
    if (width !== innerWidth) show();
    width = innerWidth;
  });
  open();
})();
