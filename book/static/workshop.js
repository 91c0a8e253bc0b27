// The page "Try a schedule": a text, the grid of blocks that it is, and what becomes of it, computed by schedule.js.
//
// The form is the only state. Who moves a block rewrites the text, and the grid is drawn from the text, whoever wrote
// it. The address holds what is in the form, so that a reader can send it.
(() => {
  const box = document.getElementById("workshop");
  const of = scheduler(JSON.parse(box.querySelector("script").textContent));
  const { naive, gpipe, oneFOneB, zbH1 } = of.makers;

  // ---- Controls: name in the address → its words, its values; a value may have words of its own ----
  const upTo = (n) => Array.from({ length: n }, (_, i) => i + 1);
  const COSTS = [0.5, 1, 1.5, 2, 2.5, 3, 4];
  const MENUS = {
    ranks: ["Ranks", upTo(8)],
    microbatches: ["Microbatches", upTo(16)],
    limit: ["Memory limit", [["", "= ranks"], ...upTo(16)]],
    F: ["F takes", COSTS],
    I: ["I takes", COSTS],
    W: ["W takes", COSTS],
  };
  const PRESETS = { // name in the address → its words, its schedule
    one: ["rank 0 keeps one", (n, m) => ({ actions: [naive(n, m).actions[0], ...oneFOneB(n, m).actions.slice(1)] })],
    naive: ["naive", naive],
    gpipe: ["GPipe", gpipe],
    "1f1b": ["1F1B", oneFOneB],
    "zb-h1": ["ZB-H1", zbH1],
  };
  const presets = Object.entries(PRESETS).map(([name, [words]]) => [name, words]);
  const CONTROLS = { ...MENUS, schedule: ["Begin with", presets] };
  const START = { ranks: 4, microbatches: 6, limit: "", F: 1, I: 1, W: 1, schedule: "one" };
  const INKS = { F: "forward", B: "backward", I: "backward", W: "weight" };
  const LEGEND = [["forward", "F forward"], ["backward", "B backward, or I, its half for the input"],
    ["weight", "W, its half for the weights"], ["idle", "idle"]];

  const options = (name) => CONTROLS[name][1].map((value) => (Array.isArray(value) ? value : [value, value]));
  const menu = (name) => `<label>${MENUS[name][0]}<select name="${name}">${
    options(name).map(([value, words]) => `<option value="${value}">${words}</option>`).join("")}</select></label>`;
  const chip = ([value, words]) =>
    `<label><input type="radio" name="schedule" value="${value}"><span>${words}</span></label>`;
  const tool = ([name, words, title]) => `<button type="button" name="${name}" title="${title}"${
    /\w/.test(words) ? "" : ` aria-label="${title}"`}>${words}</button>`;
  box.innerHTML = `<form autocomplete="off">
    <div class="panel">
      <fieldset><legend>${CONTROLS.schedule[0]}</legend>${options("schedule").map(chip).join("")}</fieldset>
      <div class="menus">${Object.keys(MENUS).map(menu).join("")}</div>
    </div>
    <p class="verdict" aria-live="polite"></p>
    <div class="grid">
      <ol class="ranks"></ol>
      <div class="time"><svg>
        <pattern id="waits" width="6" height="6" patternTransform="rotate(45)" patternUnits="userSpaceOnUse">
          <rect width="6" height="6"/><path d="M0 0V6"/></pattern>
        <g class="ground" aria-hidden="true"></g>
        <g class="blocks" role="listbox" aria-label="The schedule in blocks"></g>
        <g class="front" aria-hidden="true"></g>
      </svg></div>
    </div>
    <ul class="legend" aria-hidden="true">${
      LEGEND.map(([ink, words]) => `<li><i class="${ink}"></i>${words}</li>`).join("")}</ul>
    <div class="tools" role="group" aria-label="Change the schedule">${[
      ["left", "←", "Move the block to the left"],
      ["right", "→", "Move the block to the right"],
      ["remove", "Remove", "Remove the block"],
      ...[..."FBIW"].map((op) => [`add${op}`, `+ ${op}`, ""]),
      ["split", "Split every B", "Write I and W for each B"],
      ["undo", "Undo", "Undo the last change"],
    ].map(tool).join("")}</div>
    <label class="text">The same as text, a line for each rank
      <textarea name="text" wrap="off" spellcheck="false" autocapitalize="off" autocorrect="off"></textarea></label>
    <div class="outcome">
      <div>
        <div class="advice" aria-live="polite"></div>
        <p><button type="button" name="link">Copy link</button>
          <button type="button" name="python">Copy as Python</button></p>
      </div>
      <div class="scores"></div>
    </div>
  </form>`;
  const part = (selector) => box.querySelector(selector);
  const form = part("form"), { elements } = form, text = elements.text, grid = part(".time"), svg = part(".time svg");
  const put = (selector, content) => { // only what is new, as a screen reader says it
    const element = part(selector);
    if (element.content !== content) element.innerHTML = element.content = content;
  };
  const html = (words) => words.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt()};`);

  // ---- What the form says ----
  const state = () => { // a text that a preset writes need not be in the address
    const all = Object.fromEntries(new FormData(form));
    if (all.schedule) delete all.text;
    return all;
  };
  const fill = (values) => { // what is no choice of a control, such as a misspelt address has it, changes nothing
    for (const [name, value] of Object.entries(values))
      if (Object.hasOwn(CONTROLS, name) && options(name).some(([known]) => String(known) === String(value)))
        elements[name].value = value;
  };
  const sizes = () => [Number(elements.ranks.value), Number(elements.microbatches.value)];
  const costs = () => Object.fromEntries([..."FIW"].map((name) => [name, Number(elements[name].value)]));
  const limit = () => (elements.limit.value ? Number(elements.limit.value) : null);
  const textOf = (name) => of.toText(PRESETS[name][1](...sizes()));
  const choose = () => { // mark the preset that the text is, if it is one
    const now = elements.schedule.value, names = Object.keys(PRESETS); // two may be the same, as on one rank
    const chosen = [...(now ? [now] : []), ...names].find((name) => textOf(name) === text.value);
    for (const chip of elements.schedule) chip.checked = chip.value === chosen;
  };

  // ---- From the text to blocks with a place in time ----
  let blocks = [], selected = null, drag = null; // `selected` is {rank, at}: a place in the order of a rank
  const same = (one, other) => Boolean(one && other) && one.rank === other.rank && one.at === other.at;
  const find = (where) => blocks.find((block) => same(block, where));
  const inRow = (rank) => blocks.filter((block) => block.rank === rank);

  const place = (rows, par) => {
    const made = rows.map(({ words }, rank) => words.map((word, at) => ({ rank, at, ...of.actionOf(word) })));
    const all = made.flat(), stages = new Set(all.filter(({ op }) => op).map(({ stage }) => stage));
    const perRank = Math.max(1, Math.round(stages.size / rows.length)); // a number mistyped makes no stage
    const takes = par.costsOf({ numRanks: 1, numStages: perRank });
    const { slots } = of.simulate({ actions: made, numStages: perRank * rows.length }, takes);
    for (const { action, start, end } of slots) Object.assign(action, { start, end, runs: true });
    for (const row of made) {
      const first = Math.min(...row.map(({ stage }) => stage ?? Infinity)), count = {};
      let end = 0;
      for (const block of row) {
        const { rank, name, op, stage, runs } = block;
        count[name] = (count[name] ?? 0) + 1;
        Object.assign(block, { key: `${rank} ${name} ${count[name]}`, isOfLater: stage > first });
        if (!runs) Object.assign(block, { start: end, end: end + (op === "B" ? takes.I + takes.W : takes[op] ?? 1) });
        end = block.end;
      }
    }
    return all;
  };
  // Mark what is wrong, and what that waits for; returns what is missing, each behind all that its rank does.
  const accuse = ({ kind, actions = [], waits = new Map() } = {}) => {
    const namesOf = (some) => new Set([...some].map(({ name }) => name));
    const wrong = namesOf(waits.size ? actions : actions.slice(0, 1)), awaited = namesOf(waits.values());
    for (const block of blocks) {
      const { name, op } = block;
      Object.assign(block, { isWrong: wrong.has(name) || (kind === "NO_ACTION" && !op), isAwaited: awaited.has(name) });
    }
    const there = namesOf(blocks);
    return actions.filter(({ name }) => !there.has(name)).map((action) => {
      const rank = blocks.find(({ stage }) => stage === action.stage)?.rank ?? 0;
      return { ...action, rank, start: Math.max(0, ...inRow(rank).map(({ end }) => end)) };
    });
  };

  // ---- The grid ----
  const TALL = 29, LEAST = matchMedia("(pointer: coarse)").matches ? 16 : 12; // pixels, and of the shortest block
  let scale = 1, pitch = 37, above = 24; // from row to row; above the first
  const x = (time) => time * scale;
  const y = (rank) => above + rank * pitch;
  const tag = (name, attributes, content = "") =>
    `<${name} ${Object.entries(attributes).map(([key, value]) => `${key}="${value}"`).join(" ")}>${content}</${name}>`;

  const drawGround = (ranks, end, par) => {
    const bottom = y(ranks) - pitch + TALL, width = x(end), late = x(par.time);
    const idle = upTo(ranks).map((n) => tag("rect", { y: y(n - 1), width, height: TALL, rx: 3, class: "idle" }));
    const step = [1, 2, 5, 10, 20, 50, 100].find((n) => x(n) >= 34) ?? 200;
    const ticks = upTo(1 + Math.floor(end / step)).map((n) => (n - 1) * step);
    const axis = `M0 ${bottom + 7}H${width}${ticks.map((t) => `M${x(t)} ${bottom + 7}v4`).join("")}`;
    const word = (at, top, words, ink, anchor = "middle") =>
      tag("text", { x: at, y: top, class: ink, "text-anchor": anchor }, words);
    const numbers = ticks.map((t) => word(x(t), bottom + 25, t, "soft", t ? "middle" : "start"));
    const line = late > width ? "" : tag("path", { d: `M${late} 18V${bottom + 7}`, class: "par" }) +
      word(late, 13, `par ${of.g(par.time)}`, "par", late > width - 30 ? "end" : "middle");
    put(".ground", idle.join("") + tag("path", { d: axis, class: "axis" }) + numbers.join("") + line);
    svg.setAttribute("width", width + 12);
    svg.setAttribute("height", bottom + 32);
  };
  const makeBlock = () => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "g");
    made.innerHTML = `<title></title><rect height="${TALL}" rx="2"/><text y="${TALL / 2 + 4.5}"/><path/>`;
    made.setAttribute("role", "option");
    return made;
  };
  const drawBlock = (element, block, hasLetters) => {
    const [title, rect, text, line] = element.children;
    const { rank, name, op, stage, microbatch, start, end, runs, isWrong, isAwaited, isOfLater } = block;
    const width = x(end - start) - 1, isSelected = same(block, selected);
    const long = op ? op + microbatch : name, isLong = (hasLetters || !op) && 7.6 * long.length < width;
    const when = runs ? `${of.g(start)} to ${of.g(end)}` : "it never runs";
    const who = op ? `${isLong ? long : `${op} ${microbatch}`}, stage ${stage}` : name; // begins with what is seen
    const is = { wrong: isWrong, awaited: isAwaited, never: !runs, selected: isSelected };
    element.block = block;
    element.style.transform = `translate(${x(start)}px, ${y(rank)}px)`;
    element.setAttribute("class", ["block", INKS[op], ...Object.keys(is).filter((one) => is[one])].join(" "));
    element.setAttribute("aria-label", `${who}, rank ${rank}, ${when}${isWrong ? ", wrong" : ""}`);
    element.setAttribute("aria-selected", isSelected);
    element.setAttribute("tabindex", isSelected || (!selected && block === blocks[0]) ? 0 : -1);
    title.textContent = `${name}: ${when}`;
    rect.style.width = `${width}px`;
    text.textContent = isLong ? long : op ? microbatch : "?";
    text.setAttribute("x", width / 2);
    line.setAttribute("d", isOfLater ? `M3 ${TALL - 3}H${width - 3}` : "");
  };
  let shown = new Map(); // key → its element, which stays while the block does, so that it glides
  const drawBlocks = (hasLetters) => {
    const parent = part(".blocks"), hasFocus = parent.contains(document.activeElement), old = shown;
    shown = new Map(blocks.map(({ key }) => [key, old.get(key) ?? makeBlock()]));
    for (const [key, element] of old) if (!shown.has(key)) element.remove();
    let child = parent.firstChild; // a screen reader goes in the order of the text; the fewer move, the more glide
    for (const block of blocks) {
      const element = shown.get(block.key);
      drawBlock(element, block, hasLetters);
      if (child !== element && child?.nextSibling === element) parent.append(child);
      else if (child !== element) parent.insertBefore(element, child);
      child = element.nextSibling;
    }
    if (hasFocus) (elementOf(selected) ?? parent.firstChild)?.focus({ preventScroll: true });
  };
  const elementOf = (where) => shown.get(find(where)?.key);
  const drawMissing = ({ rank, start, op, microbatch }) => {
    const left = x(start) + 1, width = Math.max(LEAST, x(1)) - 3;
    return tag("rect", { x: left, y: y(rank) + 1, width, height: TALL - 2, rx: 2, class: "missing" }) +
      tag("text", { x: left + width / 2, y: y(rank) + TALL / 2 + 4.5, class: "missing" }, op + microbatch);
  };
  const draw = (rows, par, { error, score }) => {
    blocks = place(rows, par);
    const missing = accuse(error), ranks = Math.max(rows.length, par.numRanks);
    if (!find(selected)) selected = null;
    const last = Math.max(1, ...blocks.map(({ end }) => end), ...missing.map(({ start }) => start + 1));
    const end = par.time < 1.3 * last ? Math.max(par.time, last) : last; // a par that is far off is not in the picture
    const isNarrow = matchMedia("(max-width: 700px)").matches; // then a rank's name stands above its row
    [pitch, above] = isNarrow ? [53, 41] : [37, 24];
    const digits = Math.max(...blocks.map(({ microbatch = 0 }) => String(microbatch).length), 1);
    const shortest = Math.min(2, ...blocks.filter(({ op }) => op).map(({ start, end }) => end - start));
    scale = Math.max((grid.clientWidth - 13) / end, Math.min(50, Math.max(LEAST, 4 + 7 * digits) / shortest));
    drawGround(ranks, end, par);
    drawBlocks(x(shortest) >= 20); // else only numbers, on all of them
    part(".front").innerHTML = `${missing.map(drawMissing).join("")}<path class="caret"/>`;
    const isOther = (rank) => error?.kind === "OTHER_LINE" && Number(rows[rank]?.rank ?? rank) !== rank;
    const keeps = (kept) => `<small class="${kept > par.most ? "bad" : ""}">keeps ${of.g(kept)}</small>`;
    put(".ranks", upTo(ranks).map((n) => `<li><span class="${isOther(n - 1) ? "bad" : ""}">rank ${n - 1}</span>${
      score ? keeps(score.kept[n - 1]) : ""}</li>`).join(""));
  };

  // ---- Words, scores, tools ----
  const sayAdvice = ({ error, advice }) => {
    const [first, ...waits] = error?.message.split("\n") ?? [];
    const lines = waits.map((line) => `<li>${html(line.trim())}</li>`).join("");
    const problem = error ? `<p>${html(first)}${lines ? `:</p><ul>${lines}</ul>` : ".</p>"}` : "";
    return `${problem}<p>${html(advice)}</p>`;
  };
  const tableOf = ({ score }, par) => {
    const scores = [...(score ? [score] : []), ...par.scores].sort((a, b) => a.time - b.time);
    const row = (one) => {
      const cells = [...of.words(one), one.inLimit ? "" : "too much"].map((words) => `<td>${words}</td>`).join("");
      return `<tr${one === score ? ' class="yours"' : ""}>${cells}</tr>`;
    };
    const names = ["schedule", "time", "bubble", "kept by each rank", "limit"];
    const head = names.map((name) => `<th scope="col">${name}</th>`).join("");
    return `<table><caption>Par is ${of.g(par.time)}, and a rank may keep ${par.most}</caption>
      <thead><tr>${head}</tr></thead><tbody>${scores.map(row).join("")}</tbody></table>`;
  };
  // What a button would add: the first action of its kind that a rank lacks, behind the block that is selected.
  const lacks = (op) => {
    const [ranks, count] = sizes(), start = selected?.rank ?? 0;
    for (let i = 0; i < ranks; i++) {
      const rank = (start + i) % ranks, row = inRow(rank);
      const stages = [...new Set(row.filter((one) => one.op).map(({ stage }) => stage))];
      for (const stage of stages.length ? stages.sort((a, b) => a - b) : [rank])
        for (let m = 0; m < count; m++)
          if (!row.some((one) => one.stage === stage && one.microbatch === m &&
            { F: "F", B: "BIW", I: "BI", W: "BW" }[op].includes(one.op))) return { rank, word: `${stage}${op}${m}` };
    }
    return null;
  };
  const showTools = () => {
    const block = find(selected), row = block ? inRow(block.rank) : [];
    elements.left.disabled = !block || block.at === 0;
    elements.right.disabled = !block || block.at === row.length - 1;
    elements.remove.disabled = !block;
    elements.split.disabled = !blocks.some(({ op }) => op === "B");
    elements.undo.disabled = !past.length;
    for (const op of "FBIW") {
      const one = lacks(op);
      elements[`add${op}`].disabled = !one;
      elements[`add${op}`].textContent = `+ ${one?.word ?? op}`;
      elements[`add${op}`].title = one ? `Add ${one.word} to rank ${one.rank}` : `No ${op} is missing`;
    }
  };

  const show = () => {
    const [numRanks, numMicrobatches] = sizes();
    const par = of.makePar({ numRanks, numMicrobatches, limit: limit(), costs: costs() });
    const verdict = of.workshop(text.value, par);
    text.rows = 1 + text.value.trimEnd().split("\n").length; // one for a scroll bar
    draw(of.read(text.value).filter(({ counts }) => counts), par, verdict);
    showTools();
    put(".verdict", `<strong class="${verdict.error ? "bad" : "ok"}">${verdict.headline}</strong>`);
    put(".advice", sayAdvice(verdict));
    put(".scores", tableOf(verdict, par));
  };

  // ---- Changes, and the address that says all of the form ----
  const past = [];
  let last = "";
  const address = () => new URLSearchParams(state()).toString();
  const enter = (sent) => {
    const values = Object.fromEntries(new URLSearchParams(sent));
    fill(START);
    fill(values);
    const isTyped = values.schedule === undefined && values.text !== undefined;
    text.value = isTyped ? values.text : textOf(elements.schedule.value);
    choose();
  };
  const changed = () => {
    choose();
    const now = address();
    if (now !== last) past.push(last);
    last = now;
    elements.link.textContent = "Copy link";
    elements.python.textContent = "Copy as Python";
    show();
    try {
      history.replaceState(null, "", `#${now}`);
    } catch {} // Safari allows a hundred in half a minute, and letters are typed faster
  };
  const undo = () => {
    if (!past.length) return;
    last = past.pop();
    enter(last);
    changed();
  };
  const rewrite = (rank, change) => { // the words of a rank; comments and the other lines stay as they are
    const lines = text.value.trim() ? of.read(text.value) : [], rows = lines.filter(({ counts }) => counts);
    while (rows.length <= rank) {
      const made = { line: `rank ${rows.length}:`, head: `rank ${rows.length}:`, words: [], tail: "" };
      lines.push(made);
      rows.push(made);
    }
    const row = rows[rank];
    change(row.words);
    const head = row.words.length ? row.head.replace(/:$/, ": ") : row.head.trimEnd() || `rank ${rank}:`;
    row.line = head + row.words.join(" ") + row.tail;
    text.value = lines.map(({ line }) => line).join("\n");
    changed();
    reveal();
  };
  const reveal = () => elementOf(selected)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  const select = ({ rank, at }) => {
    selected = { rank, at };
    show();
  };
  const move = ({ rank, at }, to) => {
    if (to < 0 || to >= inRow(rank).length || to === at) return;
    selected = { rank, at: to };
    rewrite(rank, (words) => words.splice(to, 0, ...words.splice(at, 1)));
  };
  const remove = ({ rank, at }) => {
    selected = { rank, at: Math.min(at, inRow(rank).length - 2) };
    rewrite(rank, (words) => words.splice(at, 1));
  };
  const add = ({ rank, word }) => {
    const at = selected?.rank === rank ? selected.at + 1 : inRow(rank).length;
    selected = { rank, at };
    rewrite(rank, (words) => words.splice(at, 0, word));
  };
  const beside = ({ rank, start }, step) => { // of the next rank, what is nearest in time
    const row = inRow(rank + step);
    return row.length ? row.reduce((a, b) => (Math.abs(b.start - start) < Math.abs(a.start - start) ? b : a)) : null;
  };

  // ---- Mouse, finger, keyboard ----
  const goal = ({ block, dx }) => { // the place in its rank's order to which a block is dragged
    const others = inRow(block.rank).filter((one) => one !== block);
    const edge = dx > 0 ? x(block.end) + dx : x(block.start) + dx;
    const to = others.filter(({ start, end }) => x(start + end) / 2 < edge).length;
    return { to, at: to === block.at ? null : to < others.length ? x(others[to].start) : x(others.at(-1)?.end ?? 0) };
  };
  const follow = () => {
    const { block, dx } = drag, { at } = goal(drag);
    drag.element.style.transform = `translate(${x(block.start) + dx}px, ${y(block.rank) - 5}px)`;
    const caret = at === null ? "" : `M${at} ${y(block.rank) - 4}v${TALL + 8}`;
    part(".caret").setAttribute("d", caret);
  };
  const take = () => {
    select(drag.block);
    drag.element.focus({ preventScroll: true });
    drag.block = drag.element.block; // what is drawn anew is another
  };
  const drop = (isMeant) => {
    if (!drag) return;
    if (isMeant && !drag.isMoving) take();
    const { block, element, isMoving } = drag, { to } = goal(drag);
    element.classList.remove("lifted");
    drag = null;
    if (isMoving && isMeant && to !== block.at) move(block, to);
    else if (isMoving) show();
  };
  grid.addEventListener("pointerdown", (event) => {
    const element = event.target.closest(".block");
    if (!element || event.button) return;
    drag = { element, block: element.block, from: event, dx: 0, isMoving: false };
    if (event.pointerType !== "touch") take(); // a finger may be about to scroll the page
    grid.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  grid.addEventListener("pointermove", (event) => {
    if (!drag) return;
    drag.dx = event.clientX - drag.from.clientX;
    if (!drag.isMoving) {
      if (Math.abs(drag.dx) < Math.max(8, Math.abs(event.clientY - drag.from.clientY))) return;
      take();
      drag.isMoving = true;
      drag.element.classList.add("lifted");
      drag.element.parentNode.append(drag.element); // above all others
      drag.element.focus({ preventScroll: true });
    }
    follow();
  });
  grid.addEventListener("touchmove", (event) => { // a finger that goes along the rank moves the block, else the page
    if (drag?.isMoving) event.preventDefault();
  }, { passive: false });
  grid.addEventListener("pointerup", () => drop(true));
  grid.addEventListener("pointercancel", () => drop(false));
  grid.addEventListener("keydown", (event) => {
    const block = event.target.closest(".block")?.block;
    if (!block) return;
    const { rank, at } = block, row = inRow(rank), walk = (to) => () => to && (select(to), reveal());
    const keys = {
      ArrowLeft: event.shiftKey ? walk(row[at - 1]) : () => move(block, at - 1),
      ArrowRight: event.shiftKey ? walk(row[at + 1]) : () => move(block, at + 1),
      ArrowUp: walk(beside(block, -1)),
      ArrowDown: walk(beside(block, 1)),
      Home: walk(row[0]),
      End: walk(row.at(-1)),
      Delete: () => remove(block),
      Backspace: () => remove(block),
      Escape: () => drop(false),
    };
    if (event.ctrlKey || event.metaKey || event.altKey) {
      if (event.key !== "z" || event.altKey) return;
      undo();
    } else if (event.key in keys) keys[event.key]();
    else return;
    event.preventDefault();
  });
  grid.addEventListener("focusin", ({ target }) => {
    if (target.block && !same(target.block, selected)) select(target.block);
  });

  // ---- Buttons ----
  const python = () => { // a cell of this page as a notebook
    const { F, I, W } = costs(), most = limit();
    const isUnit = F === 1 && I === 1 && W === 1, more = [...sizes()];
    if (most) more.push(`limit=${most}`);
    if (!isUnit) more.push(`costs=Costs(${F}, ${I}, ${W})`);
    const typed = text.value.trim().replaceAll("\\", "\\\\").replaceAll('"', '\\"');
    const first = isUnit ? "" : "from lib.pipeline.simulate import Costs\n\n";
    return `${first}verdict = workshop(\n    """\n${typed}\n""",\n    Par(${more.join(", ")}),\n)\nverdict\n`;
  };
  const copy = async (button, words) => {
    try {
      await navigator.clipboard.writeText(words);
      button.textContent = "Copied";
    } catch {
      button.textContent = "The browser does not let it be copied";
    }
  };
  const TOOLS = {
    left: () => move(selected, selected.at - 1),
    right: () => move(selected, selected.at + 1),
    remove: () => remove(selected),
    split: () => {
      text.value = text.value.replace(/(\d+)B(\d+)/g, "$1I$2 $1W$2");
      changed();
    },
    undo,
    link: (button) => {
      changed();
      copy(button, new URL(`#${last}`, location).href);
    },
    python: (button) => copy(button, python()),
  };
  for (const op of "FBIW") TOOLS[`add${op}`] = () => add(lacks(op));
  form.addEventListener("click", ({ target }) => Object.hasOwn(TOOLS, target.name) && TOOLS[target.name](target));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => {
    if (target !== text && elements.schedule.value) text.value = textOf(elements.schedule.value);
    changed();
    showWrong();
  });
  const showWrong = () => { // a grid may be wider than its box
    const at = Math.min(...blocks.filter(({ isWrong }) => isWrong).map(({ start }) => x(start)));
    if (at < grid.scrollLeft || (at > grid.scrollLeft + grid.clientWidth - LEAST && at < Infinity))
      grid.scrollLeft = at - grid.clientWidth / 2;
  };
  const open = () => {
    enter(location.hash.slice(1));
    last = address();
    show();
    showWrong();
  };
  addEventListener("hashchange", () => location.hash.includes("=") && open()); // else it names a section of the page
  addEventListener("resize", show);
  open();
})();
