// What lib/pipeline says of a schedule that somebody types, for a page without Python.
//
// Rules only: every sentence comes from Python, as JSON in the page. A test compares both on a thousand random texts;
// names are Python's, and so is the order of the rules. Messages and sums are no actions here: a schedule has F, B, I
// and W. A cost is {F, I, W}, a par {numRanks, numMicrobatches, limit, costs}.

const scheduler = ({ problems, headlines, advice, why, short }) => {
  const SLACK = 1e-9; // times that differ by less are equal
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const upTo = (n) => Array.from({ length: n }, (_, i) => i);
  const firstMost = (items, of) => items.reduce((a, b) => (of(b) > of(a) ? b : a));

  // -- numbers and words as Python writes them
  const g = (x) => { // f"{x:g}"
    const [digits, power] = x.toExponential(5).split("e").map(Number);
    if (power >= -4 && power < 6) return String(Number(x.toPrecision(6)));
    return `${digits}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  };
  const percent = (x) => { // f"{x:.1%}", which rounds a half to even
    const y = 100 * x;
    return `${y % 1 === 0.25 ? `${Math.floor(y)}.2` : y.toFixed(1)}%`;
  };
  const quoted = (word) => { // repr
    const mark = word.includes("'") && !word.includes('"') ? '"' : "'";
    return mark + word.replaceAll("\\", "\\\\").replaceAll(mark, `\\${mark}`) + mark;
  };
  const fill = (sentence, ...values) => sentence.replace(/\{(\d)\}/g, (_, i) => values[i]);

  class ScheduleError {
    constructor(kind, message, actions = [], waits = new Map()) {
      Object.assign(this, { kind, message, actions, waits });
    }
  }
  const fail = (kind, message, actions, waits) => {
    throw new ScheduleError(kind, message, actions, waits);
  };

  // -- action.py: a schedule is a list for each rank
  const act = (stage, op, microbatch) => ({ stage, op, microbatch, name: `${stage}${op}${microbatch}` });
  const parse = (word) => {
    const found = word.match(/^(\d+)([FBIW])(\d+)$/);
    if (!found) fail("NO_ACTION", fill(problems.no_action, quoted(word), "F, B, I, W"));
    const [stage, microbatch] = [Number(found[1]), Number(found[3])];
    if (!Number.isSafeInteger(stage) || !Number.isSafeInteger(microbatch)) fail("NO_ACTION", problems.too_long);
    return act(stage, found[2], microbatch);
  };
  const actionOf = (word) => { // for a picture, which shows also what is not an action
    try {
      return parse(word);
    } catch {
      return { name: word };
    }
  };
  // The lines of a text: `head` + words + `tail` is the line; it is that of a rank if there is more in it than a tail.
  const read = (text) => text.split(/\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]/).map((line) => {
    const [, head, rank, words, tail] = line.match(/^(\s*(?:rank\s+(\d+)\s*:\s*)?)([^#]*?)(\s*(?:#.*)?)$/);
    const counts = Boolean(head.trim() || words);
    return { line, head, rank, words: words.split(/[\s,]+/).filter(Boolean), tail, counts };
  });
  const schedule = (actions, numMicrobatches, rankOf = [...actions.keys()]) => {
    const isForwardOnly = actions.flat().every(({ op }) => op === "F");
    return { actions, numMicrobatches, rankOf, numRanks: actions.length, numStages: rankOf.length, isForwardOnly };
  };
  const fromText = (text) => {
    const actions = read(text).filter(({ counts }) => counts).map(({ rank: said, words }, rank) => {
      if (said !== undefined && Number(said) !== rank)
        fail("OTHER_LINE", fill(problems.other_line, rank + 1, said, rank));
      return words.map(parse);
    });
    if (!actions.flat().length) fail("EMPTY", problems.empty);
    const owner = new Map();
    actions.forEach((row, rank) => row.forEach((action) => {
      const { stage, name } = action;
      if (!owner.has(stage)) owner.set(stage, rank);
      const other = owner.get(stage);
      if (other !== rank) fail("WRONG_RANK", fill(problems.wrong_rank, name, rank, other, stage), [action]);
    }));
    const last = Math.max(...owner.keys()), rankOf = [];
    for (let stage = 0; stage <= last; stage++) {
      if (!owner.has(stage)) fail("NO_RANK", fill(problems.no_rank, stage, last));
      rankOf.push(owner.get(stage));
    }
    return schedule(actions, 1 + Math.max(...actions.flat().map(({ microbatch }) => microbatch)), rankOf);
  };
  const toText = ({ actions }) =>
    actions.map((row, rank) => `rank ${rank}: ${row.map(({ name }) => name).join(" ")}`.trimEnd()).join("\n");

  // -- simulate.py: when each action runs, if each takes its time
  const IN = 0, BACK = 1, FORWARD = 2, BACKWARD = 3; // input; gradient of the output; forward is done, backward is
  const NEEDS = { F: [IN], B: [FORWARD, BACK], I: [FORWARD, BACK], W: [BACKWARD] };
  const DONE = { F: FORWARD, B: BACKWARD, I: BACKWARD };
  const GIVES = { F: [1, IN], B: [-1, BACK], I: [-1, BACK] }; // to which stage
  const UNIT = { F: 1, I: 1, W: 1 };

  // What has run, and where those ranks stand that wait for ever: rank → what it waits for.
  const simulate = ({ actions, numStages }, { F, I, W } = UNIT) => {
    const takes = { F, B: I + W, I, W };
    const since = new Map(), waiting = new Map(), slots = [];
    const clock = actions.map(() => 0), place = actions.map(() => 0), awake = [...actions.keys()];
    const isEnd = (stage, what) => stage === { [IN]: 0, [BACK]: numStages - 1 }[what];
    const there = (stage, what, m) => (isEnd(stage, what) ? 0 : since.get(`${stage} ${what} ${m}`));
    const runs = (rank, action) => {
      const { stage, op, microbatch: m } = action;
      let start = clock[rank];
      for (const what of NEEDS[op] ?? []) {
        const from = there(stage, what, m);
        if (from === undefined) {
          waiting.set(`${stage} ${what} ${m}`, { rank, stage, what, m });
          return false;
        }
        start = Math.max(start, from);
      }
      const end = (clock[rank] = start + (takes[op] ?? 1));
      slots.push({ rank, action, start, end });
      if (op in DONE) since.set(`${stage} ${DONE[op]} ${m}`, end);
      if (op in GIVES) {
        const [step, what] = GIVES[op], key = `${stage + step} ${what} ${m}`;
        since.set(key, end);
        if (waiting.has(key)) awake.push(waiting.get(key).rank);
        waiting.delete(key);
      }
      return true;
    };
    while (awake.length) {
      const rank = awake.pop(), row = actions[rank];
      while (place[rank] < row.length && runs(rank, row[place[rank]])) place[rank]++;
    }
    const waits = new Map();
    for (const { rank, stage, what, m } of waiting.values()) {
      const [of, ops] = [[stage - 1, "F"], [stage + 1, "BI"], [stage, "F"], [stage, "BI"]][what];
      waits.set(rank, { place: place[rank], stage: of, ops, microbatch: m });
    }
    return { slots: slots.sort((a, b) => a.start - b.start || a.rank - b.rank), waits };
  };
  const timeline = (of, costs) => {
    const { slots } = simulate(of, costs);
    const makespan = Math.max(...slots.map(({ end }) => end)) - Math.min(...slots.map(({ start }) => start));
    const busy = (rank) => sum(slots.filter((slot) => slot.rank === rank).map(({ start, end }) => end - start));
    const bubble = sum(of.actions.map((_, rank) => makespan - busy(rank))) / (of.numRanks * makespan);
    const peak = (rank) => { // a microbatch and stage is kept from F until B or W; what ends goes before what begins
      const steps = [];
      for (const { rank: its, action: { op }, start, end } of slots)
        if (its === rank && op !== "I") steps.push(op === "F" ? [start, 1] : [end, -1]);
      let count = 0;
      return Math.max(0, ...steps.sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, step]) => (count += step)));
    };
    return { schedule: of, slots, makespan, bubble, peak };
  };
  const stuck = ({ actions, rankOf }, waits) => {
    let [rank] = waits.keys();
    const path = [];
    for (; waits.has(rank) && !path.includes(rank); rank = rankOf[waits.get(rank).stage]) path.push(rank);
    const cycle = path.slice(path.indexOf(rank)), whom = new Map();
    const lines = cycle.map((one) => {
      const { place, stage, ops, microbatch } = waits.get(one), other = rankOf[stage];
      const makes = (a) => a.stage === stage && ops.includes(a.op) && a.microbatch === microbatch;
      whom.set(one, actions[other].findLast(makes));
      return fill(problems.waits, one, actions[one][place].name, whom.get(one).name, other);
    });
    const several = cycle.length > 1, first = several ? problems.circle : fill(problems.endless, cycle[0]);
    const at = cycle.map((one) => actions[one][waits.get(one).place]);
    fail(several ? "CIRCLE" : "ENDLESS", [first, ...lines].join("\n"), at, whom);
  };

  // -- prove.py
  const once = ({ actions, numStages, numMicrobatches, isForwardOnly }) => {
    const counts = new Map();
    for (const { name } of actions.flat()) counts.set(name, (counts.get(name) ?? 0) + 1);
    const again = actions.flat().find(({ name }) => counts.get(name) > 1);
    if (again) fail("REPEATED", fill(problems.repeated, again.name, counts.get(again.name)), [again]);
    const has = ({ name }) => counts.has(name);
    for (let stage = 0; stage < numStages; stage++)
      for (let m = 0; m < numMicrobatches; m++) {
        const [f, b, i, w] = [..."FBIW"].map((op) => act(stage, op, m));
        if (!has(f)) fail("MISSING", fill(problems.missing_forward, f.name), [f]);
        if (has(b) && (has(i) || has(w))) {
          const half = has(i) ? i : w;
          fail("HALF_AGAIN", fill(problems.half_again, b.name, half.name), [half, b]);
        }
        if (has(i) !== has(w)) {
          const [is, lacks] = has(i) ? [i, w] : [w, i];
          fail("HALF", fill(problems.half, is.name, lacks.name), [is, lacks]);
        }
        if (!(has(b) || has(i) || isForwardOnly))
          fail("MISSING", fill(problems.missing_backward, b.name, i.name, w.name), [b]);
      }
  };
  const inOrder = ({ actions }) => {
    for (const row of actions)
      row.forEach((action, i) => {
        const before = { B: "F", I: "F", W: "I" }[action.op];
        const needs = before && act(action.stage, before, action.microbatch);
        if (needs && row.findIndex(({ name }) => name === needs.name) > i)
          fail("TOO_EARLY", fill(problems.too_early, action.name, needs.name), [action, needs]);
      });
  };
  const prove = (of) => {
    once(of);
    inOrder(of);
    const { waits } = simulate(of);
    if (waits.size) stuck(of, waits);
  };

  // -- the schedules of the book
  const inTurns = (count, warmUp) => {
    const first = Math.min(warmUp, count);
    return [
      ...upTo(first).map((k) => ["F", k]),
      ...upTo(count - first).flatMap((k) => [["F", first + k], ["B", k]]),
      ...upTo(first).map((k) => ["B", count - first + k]),
    ];
  };
  const inRow = (stage, turns) => turns.map(([op, m]) => act(stage, op, m));
  const split = (stage, count, warmUp, putOff) => {
    const turns = [];
    let late = 0;
    for (const [op, k] of inTurns(count, warmUp)) {
      turns.push([op === "B" ? "I" : op, k]);
      if (op === "B" && k >= putOff) turns.push(["W", late++]);
    }
    while (late < count) turns.push(["W", late++]);
    return inRow(stage, turns);
  };
  const oneStageEach = (n, m, rowOf) => schedule(upTo(n).map(rowOf), m);
  const naive = (n, m) => oneStageEach(n, m, (s) => inRow(s, upTo(m).flatMap((k) => [["F", k], ["B", k]])));
  const gpipe = (n, m) => oneStageEach(n, m, (s) => inRow(s, [..."FB"].flatMap((op) => upTo(m).map((k) => [op, k]))));
  const oneFOneB = (n, m) => oneStageEach(n, m, (s) => inRow(s, inTurns(m, n - s - 1)));
  const zbH1 = (n, m) => oneStageEach(n, m, (r) => split(r, m, n - r - 1, r));
  const zbH2 = (n, m) => oneStageEach(n, m, (r) => split(r, m, 2 * (n - r - 1), 2 * r));
  const interleaved = (n, m, v) => {
    const action = (rank, op, at) => {
      const group = Math.floor(at / (n * v)), k = at % (n * v), turn = Math.floor(k / n);
      return act(rank + n * (op === "F" ? turn : v - 1 - turn), op, n * group + (k % n));
    };
    const warmUp = (rank) => 2 * (n - rank - 1) + (v - 1) * n;
    const rows = upTo(n).map((rank) => inTurns(v * m, warmUp(rank)).map(([op, k]) => action(rank, op, k)));
    return schedule(rows, m, upTo(n * v).map((stage) => stage % n));
  };

  // -- workshop.py
  const makePar = ({ numRanks: n, numMicrobatches: m, limit = null, costs = UNIT }) => {
    const most = limit ?? n;
    const share = (of) => of.numRanks / of.numStages;
    const costsOf = (of) => ({ F: share(of) * costs.F, I: share(of) * costs.I, W: share(of) * costs.W });
    const play = (of) => timeline(of, costsOf(of));
    const score = (of, name) => {
      const kept = of.schedule.actions.map((_, rank) => share(of.schedule) * of.peak(rank));
      return { name, time: of.makespan, bubble: of.bubble, kept, inLimit: Math.max(...kept) <= most };
    };
    const known = [["ZB-H1", zbH1], ["ZB-H2", zbH2], ["1F1B", oneFOneB], ["GPipe", gpipe], ["naive", naive]];
    if (m % n === 0) known.push(["interleaved, 2 stages each", (n, m) => interleaved(n, m, 2)]);
    const scores = known.map(([name, make]) => score(play(make(n, m)), name)).sort((a, b) => a.time - b.time);
    const time = (scores.find(({ inLimit }) => inLimit) ?? scores[0]).time;
    const least = (stagesPerRank = 1) => {
      const work = m * (costs.F + costs.I + costs.W);
      const lastWaits = (n - 1) * (costs.F / stagesPerRank);
      const firstBack = n * costs.F + (n - 1) * costs.I;
      return work + Math.max(lastWaits, stagesPerRank === 1 ? firstBack - Math.min(most, m) * costs.F : 0);
    };
    return { numRanks: n, numMicrobatches: m, most, costsOf, play, score, scores, time, least };
  };
  const fits = ({ numRanks, numMicrobatches, rankOf, isForwardOnly }, par) => {
    if (numRanks !== par.numRanks || numMicrobatches !== par.numMicrobatches)
      fail("OTHER_SIZES",
        fill(problems.other_sizes, numRanks, numMicrobatches, par.numRanks, par.numMicrobatches));
    const counts = upTo(numRanks).map((rank) => rankOf.filter((one) => one === rank).length);
    if (!counts[0] || counts.some((count) => count !== counts[0])) fail("UNEQUAL", problems.unequal);
    if (isForwardOnly) fail("NO_BACKWARD", problems.no_backward);
  };

  const holesOf = ({ schedule: { actions }, slots }) => actions.flatMap((_, rank) => {
    const mine = slots.filter((slot) => slot.rank === rank);
    return mine.slice(1).map((slot, i) => [mine[i], slot]).filter(([a, b]) => b.start - a.end > SLACK);
  });
  const couldFill = ({ slots }, before, { rank, start }) => {
    const mine = slots.filter((slot) => slot.rank === rank);
    const ready = mine.filter(({ action, end }) => action.op === "I" && end <= before.end + SLACK);
    return mine.find(({ action: w, start: late }) => w.op === "W" && late >= start &&
      ready.some(({ action: i }) => i.stage === w.stage && i.microbatch === w.microbatch))?.action;
  };
  const senderOf = ({ schedule: { rankOf }, slots }, { rank, action: { stage, op, microbatch } }) => {
    const from = stage + (op === "F" ? -1 : 1);
    if (op === "W" || !(from in rankOf) || rankOf[from] === rank) return undefined;
    return slots.find(({ action: a }) =>
      a.stage === from && a.microbatch === microbatch && (op === "F" ? "F" : "BI").includes(a.op));
  };
  const inTheWay = (of) => { // an action whose input arrives just as its rank is free waits for the message
    const { slots } = of, last = firstMost(slots, ({ end }) => end);
    for (let slot = last; ;) {
      const sender = senderOf(of, slot);
      if (sender && sender.end >= slot.start - SLACK) {
        slot = sender;
        continue;
      }
      const earlier = slots.filter(({ rank, end }) => rank === slot.rank && end <= slot.start + SLACK);
      const before = earlier.length ? firstMost(earlier, ({ end }) => end) : null;
      if (!before || before.end < slot.start - SLACK) return null;
      if (before.action.op === "W" && slot.rank !== last.rank) return [before.action, slot.action];
      slot = before;
    }
  };
  const next = (of, par, { kept, time, inLimit }) => {
    const { schedule: { numStages, numRanks }, slots } = of, least = par.least(numStages / numRanks);
    if (!inLimit) {
      const rank = firstMost(upTo(numRanks), (one) => kept[one]);
      return fill(advice.keep_less, rank, g(kept[rank]), par.most);
    }
    if (time <= least + SLACK) return fill(advice.no_faster, g(least), g(sum(kept)));
    const whole = slots.findLast(({ action: { op, stage } }) => op === "B" && stage)?.action;
    if (whole) return fill(advice.split, ...[..."IWB"].map((op) => act(whole.stage, op, whole.microbatch).name));
    const holes = holesOf(of).sort(([a, b], [c, d]) => a.end - b.start - (c.end - d.start));
    for (const [before, slot] of holes) {
      const late = couldFill(of, before, slot);
      if (late) return fill(advice.fill, slot.rank, g(before.end), g(slot.start), late.name, slot.action.name);
    }
    const way = inTheWay(of);
    if (way) return fill(advice.put_off, ...way.map(({ name }) => name));
    if (!holes.length) return advice.at_the_ends;
    const [before, slot] = holes[0];
    return fill(advice.sooner, slot.rank, g(before.end), g(slot.start), slot.action.name);
  };
  const headlineOf = ({ time, inLimit }, par) => {
    const over = time - par.time, name = Math.abs(over) < SLACK ? "par" : over > 0 ? "over" : "under";
    const values = name === "par" ? [g(time)] : [g(time), g(Math.abs(over)), g(par.time)];
    return fill(headlines[inLimit ? name : `${name}_too_much`], ...values, par.most);
  };

  // The verdict: {headline, error, advice}, and if it works its timeline and its score.
  const workshop = (text, par) => {
    let of;
    try {
      of = fromText(text);
      fits(of, par);
      prove(of);
    } catch (error) {
      if (!(error instanceof ScheduleError)) throw error;
      const reason = error.message === problems.too_long ? short : why[error.kind] ?? short;
      return { headline: headlines.wrong, error, advice: reason };
    }
    const played = par.play(of), score = par.score(played, "yours");
    return { headline: headlineOf(score, par), timeline: played, score, advice: next(played, par, score) };
  };
  const words = ({ name, time, bubble, kept }) => [name, g(time), percent(bubble), kept.map(g).join(" ")];
  const makers = { naive, gpipe, oneFOneB, zbH1, zbH2, interleaved };
  return { actionOf, read, toText, simulate, makePar, workshop, words, g, percent, makers };
};
