// Three values of a verdict, what would turn them, and the published layouts that ran as full: lib/planner/margin.py
// for a page without Python.

const plannerMargin = ({ training, limits, stack, recipe, adapters, optimizer, sum }, room) => {
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
  return { verdict, verdictText, ranText };
};
