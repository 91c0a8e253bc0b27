// How far the planner missed published runs, in the words of the command: lib/planner/evidence.py for a page without
// Python. The words are Python's, one for each GPU and stack; here a training finds its own.

// The words behind ± of the seconds and of the memory.
const errorsOf = ({ device, stack }, { errors: { words, speeds, memory, ignored }, stacks, evidence }) => {
  const mine = [device.peak_flops, device.memory_Bps, device.link_Bps];
  const apart = (name) => Math.abs(memory[name] - device.memory_bytes);
  // The GPU with these speeds; of several the one with the nearest memory.
  const same = Object.keys(speeds).filter((name) => speeds[name].every((x, i) => x === mine[i]));
  const gpu = same.reduce((one, name) => (one && apart(one) <= apart(name) ? one : name), "");
  // The stacks with these constants, but for bytes that are kept: exactly the same first.
  const isRecipe = (recipe) => Object.keys(recipe).every((key) => recipe[key] === stack.recipe[key]);
  const names = Object.entries(stacks).map(([name, of]) => [name, of[gpu] ?? of.h100])
    .filter(([, of]) => Object.keys(of).every((key) => ignored.includes(key) || of[key] === stack[key]))
    .sort(([, a], [, b]) => isRecipe(b.recipe) - isRecipe(a.recipe)).map(([name]) => name);
  const said = (quantity) => {
    const known = names.find((name) => evidence[`${name}, ${gpu}`]?.[quantity]);
    return words[gpu][known ?? names[0] ?? ""][quantity];
  };
  return { seconds: said("seconds"), memory: said("memory") };
};
