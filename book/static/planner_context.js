// Attention over context-parallel ranks: lib/planner/context.py for a page without Python.

const plannerContext = ({ stack, heads, keyHeads, headDim, s, queries, kv }) => {
  const wayOf = (layout) => layout.attention || stack.cp_attention;
  // Heads of queries, and of keys and values, on a tensor-parallel rank; whether Ulysses can share both.
  const headsOfRank = (tp) => [Math.floor(heads / tp), Math.max(1, Math.floor(keyHeads / tp))];
  const ranksShareHeads = (tp, cp) => {
    const [ofQueries, ofKeys] = headsOfRank(tp);
    return ofQueries % cp === 0 && (ofKeys % cp === 0 || cp % ofKeys === 0);
  };
  const copies = (tp, cp) => Math.max(1, cp / headsOfRank(tp)[1]);
  // Of the queries of a rank's tokens, and of their keys.
  const bytesOf = (tp, cp, rows) =>
    [queries / tp, Math.max(kv / tp, headDim)].map((width) => (2 * rows * s * width) / cp);

  const moreKept = ({ tp, cp, rows, attention }, recompute) => {
    if (cp === 1 || recompute === "full") return 0;
    const way = wayOf({ attention }), [ofQueries, ofKeys] = bytesOf(tp, cp, rows);
    const kept = recompute === "ops" ? ofKeys : 2 * ofKeys;
    if (way === "ulysses") return ofQueries + kept * (copies(tp, cp) - 1);
    return way === "gather" && stack.keeps_gathered ? kept * (cp - 1) : 0;
  };
  // The messages of a block and microbatch, and what attention hides of them.
  const overCp = (messages, way, tp, cp, rows, attentionS, passes, again) => {
    const { NONE, times, plus, waits, hide, allGather, exchange, betweenStages } = messages;
    if (cp === 1) return hide(NONE, 0);
    const [ofQueries, ofKeys] = bytesOf(tp, cp, rows);
    if (way === "ulysses") {
      const swap = plus(exchange(ofQueries, cp, tp), exchange(ofKeys * copies(tp, cp), cp, tp));
      return hide(times(swap, 2 * (again ? 3 : 2)), 0);
    }
    const forwards = again ? 2 : 1;
    if (way === "gather") {
      const sent = times(allGather(2 * ofKeys * cp, cp, tp), forwards + (stack.keeps_gathered ? 1 : 2));
      return hide(sent, (attentionS * (cp - 1)) / cp, stack.exposed_cp);
    }
    const [hop] = betweenStages(2 * ofKeys, cp, tp), forwardS = (attentionS * forwards) / passes;
    const around = (one, computedS) => { // each hop behind the block before it
      const own = stack.balanced_cp ? 1 : 0.5, blockS = computedS / (own + cp - 1);
      return waits.plus(hide(one, own * blockS), hide(times(one, cp - 2), (cp - 2) * blockS));
    };
    return waits.plus(around(times(hop, forwards), forwardS), around(times(hop, 2), attentionS - forwardS));
  };
  return { wayOf, ranksShareHeads, headsOfRank, moreKept, overCp };
};
