// The page "Will it fit?": controls, two stacked bars and the best layouts, computed by planner.js.
//
// The form is the only state. The address holds what was chosen in it, so that a reader can send it.
(() => {
  const box = document.getElementById("planner");
  const numbers = JSON.parse(box.querySelector("script").textContent);

  // ---- Controls: name in the address → its words, its values; a value may have words of its own ----
  const doubled = (from, to) => (from > to ? [] : [from, ...doubled(2 * from, to)]);
  const gb = (bytes, digits = 1) => `${(bytes / 1e9).toFixed(digits)} GB`;
  const gpuWords = ([name, { memory_bytes: memory }]) => [name, `${name.toUpperCase()} ${gb(memory, 0)}`];
  const inWords = (n) => [n, many(n)];
  const RUN = {
    model: ["Model", Object.keys(numbers.models)],
    gpu: ["GPU", Object.entries(numbers.gpus).map(gpuWords)],
  };
  const MENUS = {
    gpus: ["GPUs", doubled(8, 16_384).map(inWords)],
    seq: ["Sequence length", doubled(1024, 131_072).map(inWords)],
    batch: ["Global batch, sequences", doubled(8, 16_384).map(inWords)],
    stack: ["Stack", Object.keys(numbers.stacks)],
  };
  const LAYOUT = {
    tp: ["Tensor parallel (tp)", doubled(1, 16)],
    cp: ["Context parallel (cp)", doubled(1, 16)],
    pp: ["Pipeline parallel (pp)", doubled(1, 128)],
    v: ["Stages per rank (v)", Array.from({ length: numbers.limits.stages_per_rank }, (_, i) => i + 1)],
    schedule: ["Schedule", [["1f1b", "1F1B, interleaved"], ["zb-h1", "ZB-H1"], ["zb-v", "ZB-V"]]],
    b: ["Sequences per microbatch (b)", doubled(1, numbers.limits.rows)],
    zero: ["ZeRO stage", [0, 1, 2, 3]],
    sp: ["Sequence parallelism", [[1, "with tp"], [0, "off"]]],
    recompute: ["Recomputation", ["none", "full"]],
  };
  const CONTROLS = { ...RUN, ...MENUS, ...LAYOUT };
  const START = { // 64 GPUs have 5,120 GB together, and this does not fit
    model: "llama-70b", gpu: "h100", gpus: 64, seq: 4096, batch: 1024, stack: "megatron",
    tp: 8, cp: 1, pp: 1, v: 1, schedule: "1f1b", b: 4, zero: 1, sp: 1, recompute: "none",
  };
  const KINDS = { // a kind of lib/planner: its words, its colour
    parameters: ["parameters", "param"],
    gradients: ["gradients", "gradient"],
    optimizer: ["optimizer", "opt"],
    activations: ["activations", "activation"],
    logits: ["logits", "weight"],
    gathered: ["gathered block", "soft"],
    matmuls: ["matmuls", "backward"],
    attention: ["attention", "forward"],
    memory: ["memory traffic", "soft"],
    tp: ["tp", "comm"],
    cp: ["cp", "comm"],
    pp: ["pp", "comm"],
    dp: ["dp", "comm"],
    bubble: ["bubble", "idle"],
  };

  const options = (name) => CONTROLS[name][1].map((value) => (Array.isArray(value) ? value : [value, value]));
  const chips = (name) => {
    const chip = ([value, words]) =>
      `<label><input type="radio" name="${name}" value="${value}"><span>${words}</span></label>`;
    return `<fieldset><legend>${CONTROLS[name][0]}</legend>${options(name).map(chip).join("")}</fieldset>`;
  };
  const menu = (name) => {
    const option = ([value, words]) => `<option value="${value}">${words}</option>`;
    return `<label>${CONTROLS[name][0]}<select name="${name}">${options(name).map(option).join("")}</select></label>`;
  };
  const all = (controls, html) => Object.keys(controls).map(html).join("");
  box.innerHTML = `
    <form autocomplete="off">
      ${all(RUN, chips)}
      <div class="menus">${all(MENUS, menu)}</div>
      <div class="layout">${all(LAYOUT, chips)}</div>
      <p class="ranks"></p>
    </form>
    <p class="verdict" aria-live="polite"></p>
    <div class="outcome">
      <div class="bars"><figure></figure><figure></figure></div>
      <div class="best"></div>
    </div>
    <p><button type="button" class="copy">Copy link</button></p>
    <svg height="0" aria-hidden="true"><pattern id="hatched" width="6" height="6" patternTransform="rotate(45)"
      patternUnits="userSpaceOnUse"><path d="M0 0V6"/></pattern></svg>`;
  const part = (selector) => box.querySelector(selector);
  const form = part("form");

  // ---- What the form says, in the planner's words ----
  const state = () => Object.fromEntries(new FormData(form));
  const fill = (values) => { // what is no choice of a control, such as a misspelt address has it, changes nothing
    for (const [name, value] of Object.entries(values))
      if (Object.hasOwn(CONTROLS, name) && options(name).some(([known]) => String(known) === String(value)))
        form.elements[name].value = value;
  };
  const trainingOf = (at) => ({
    model: { ...numbers.models[at.model], context: Number(at.seq) },
    device: numbers.gpus[at.gpu],
    stack: numbers.stacks[at.stack][at.gpu],
    gpus: Number(at.gpus),
    per_node: numbers.per_node,
    global_batch: Number(at.batch),
  });
  const layoutOf = (at) => {
    const [tp, cp, pp, rows, v, zero] = [at.tp, at.cp, at.pp, at.b, at.v, at.zero].map(Number);
    const [dp, slices] = [at.gpus / (tp * cp * pp), at.sp === "1" && tp > 1];
    const { recompute, schedule } = at;
    const whole = { replicas: 1, every: 1, loss_chunks: 1 };
    return { tp, cp, pp, dp, rows, stages_per_rank: v, zero, sequence_parallel: slices, recompute, schedule, ...whole };
  };
  const choicesOf = ({ rows: b, stages_per_rank: v, ...layout }) => ({ ...layout, b, v, sp: 1 });

  // ---- Words and bars ----
  const sec = (x) => `${x >= 1000 ? many(Math.round(x)) : x.toPrecision(3)} s`;
  const layoutText = ({ tp, cp, pp, dp, rows, stages_per_rank: v, zero, recompute, schedule }) => {
    const axes = `tp ${tp} · ${cp > 1 ? `cp ${cp} · ` : ""}pp ${pp} · dp ${dp}`;
    const named = schedule !== "1f1b" && schedule.toUpperCase();
    const more = [v > 1 && `v ${v}`, named, zero && `ZeRO-${zero}`, recompute === "full" && "recompute"];
    return [axes, `b ${rows}`, ...more].filter(Boolean).join(", ");
  };
  const slower = (of, one, other) => {
    const { fraction, kind, extraS } = of.whySlower(one, other);
    const percent = fraction < 0.001 ? "less than 0.1" : (100 * fraction).toFixed(1);
    return `${percent}% slower than the fastest: ${sec(extraS)} more for ${KINDS[kind][0]}`;
  };
  // A stacked bar with its marks above it; below it each kind with its number.
  const draw = (figure, words, kinds, full, marks, say) => {
    const percent = (x) => `${((100 * x) / full).toFixed(2)}%`;
    const there = Object.entries(kinds).filter(([, x]) => x > 0);
    let end = 0;
    const bars = there.map(([kind, x]) => {
      const [label, ink] = KINDS[kind], [start, middle] = [end, end + x / 2];
      end += x;
      const hasRoom = (x / full) * figure.clientWidth > 8 * label.length + 8;
      const text = hasRoom ? `<text x="${percent(middle)}" y="46" class="on ${ink}">${label}</text>` : "";
      return `<rect x="${percent(start)}" width="${percent(x)}" y="22" height="38" class="${ink}"/>${text}`;
    });
    const lines = marks.map(([x, label, isMain]) => {
      const anchor = x / full > 0.85 ? "end" : x / full < 0.15 ? "start" : "middle";
      const style = isMain ? 'class="mark main"' : 'class="mark"';
      return `<line x1="${percent(x)}" x2="${percent(x)}" y1="16" y2="66" ${style}/>
        <text x="${percent(x)}" y="12" text-anchor="${anchor}" ${style}>${label}</text>`;
    });
    const entry = ([kind, x]) => `<li><i class="${KINDS[kind][1]}"></i>${KINDS[kind][0]} <b>${say(x)}</b></li>`;
    figure.innerHTML = `<figcaption>${words}</figcaption>
      <svg height="68" aria-hidden="true">${bars.join("")}${lines.join("")}</svg><ul>${there.map(entry).join("")}</ul>`;
  };

  const show = () => {
    const at = state(), of = planner(trainingOf(at), numbers.limits);
    const layout = layoutOf(at), own = of.planned(layout), refusal = of.refusal(layout);
    const { found, smallest } = of.best({ zeroBubble: at.schedule !== "1f1b" });
    const gpu = at.gpu.toUpperCase(), spare = of.room - own.bytes;
    for (const name of Object.keys(LAYOUT))
      for (const input of form.elements[name]) // what a press on it would say; the style sheet marks those that have it
        input.title = of.refusal(layoutOf({ ...at, [name]: input.value })) ?? "";
    const { tp, cp, pp, dp } = layout;
    part(".ranks").textContent = `Data parallel (dp): ${many(Number(at.gpus))} GPUs ÷ ${tp * cp * pp} = ${
      many(dp)}. A step has ${many(at.batch * at.seq)} tokens.`;

    const size = `Peak memory is ${gb(own.bytes)} per GPU, ${gb(Math.abs(spare))} ${
      spare < 0 ? "more" : "less"} than the ${gpu} has.`;
    const time = `${sec(own.stepS)} at ${(100 * of.mfu(own.stepS)).toFixed(1)}% MFU`;
    const best = found[0]?.stepS < own.stepS ? `, ${slower(of, found[0], own)}` : ", the fastest that fits";
    const [word, reason] = refusal
      ? ["Impossible.", refusal]
      : spare < 0
        ? ["It does not fit.", `${size} With enough memory a step would take ${time}.`]
        : ["It fits.", `${size} A step takes ${time}${best}.`];
    part(".verdict").innerHTML = `<strong class="${word === "It fits." ? "ok" : "bad"}">${word}</strong> ${reason}`;

    part(".bars").hidden = refusal !== null;
    if (!refusal) {
      const [memory, step] = box.querySelectorAll("figure");
      const sizes = [...new Set(Object.values(numbers.gpus).map((one) => one.memory_bytes))];
      const full = 1.02 * Math.max(own.bytes, ...sizes);
      const near = (x) => Math.abs(x - of.room) * memory.clientWidth < 90 * full;
      const marks = sizes.filter((x) => !near(x)).map((x) => [x, (x / 1e9).toFixed(0)]);
      draw(memory, `Peak memory per GPU: ${gb(own.bytes)}`, own.memory, full,
        [...marks, [of.room, `${gpu} ${gb(of.room, 0)}`, true]], gb);
      const fastest = found.slice(0, 1).map(({ stepS }) => [stepS, `fastest ${sec(stepS)}`, true]);
      draw(step, `Time of a step: ${sec(own.stepS)}`, own.seconds,
        1.02 * Math.max(own.stepS, found[0]?.stepS ?? 0), fastest, sec);
    }

    const isChosen = (one) => Object.entries(one.layout).every(([name, value]) => layout[name] === value);
    const button = (one, why) => `<li><button type="button" aria-pressed="${isChosen(one)}"><b>${
      layoutText(one.layout)}</b>${sec(one.stepS)}, ${gb(one.bytes)}, MFU ${(100 * of.mfu(one.stepS)).toFixed(1)}%${why}</button></li>`;
    const ways = "Take more GPUs, shorter sequences or a GPU with more memory.";
    const [title, offered] = found.length
      ? ["The fastest that fit", found.map((one, i) => button(one, i ? `<br>${slower(of, found[0], one)}` : ""))]
      : smallest
        ? [`No layout fits. ${ways} The smallest:`, [button(smallest, "")]]
        : ["No layout divides these GPUs and this batch evenly. Take fewer GPUs or a larger batch.", []];
    part(".best").innerHTML = `<p>${title}</p><ol>${offered.join("")}</ol>`;
    box.querySelectorAll(".best button").forEach((one, i) =>
      one.addEventListener("click", () => {
        fill(choicesOf((found[i] ?? smallest).layout));
        changed();
        box.querySelectorAll(".best button")[i]?.focus(); // the list was written anew
      }));
  };

  // ---- The address ----
  const changed = () => {
    part(".copy").textContent = "Copy link";
    history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
    show();
  };
  const open = () => {
    fill(START);
    fill(Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
    show();
  };
  form.addEventListener("change", changed);
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
  addEventListener("resize", show);
  open();
})();
