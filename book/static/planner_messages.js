// Seconds of messages, and how many of them computation hides: lib/planner/messages.py for a page without Python.
//
// Messages are {bytes, seconds, latency_s}, what a rank sends; a wait is {messages, beside_s, hidden_s}. All seconds of
// its messages that are not hidden are waited for.

const plannerMessages = ({ limits, device, stack, perNode, cached }) => {
  const { begin_s: begin, link_step_s: linkStep, network_step_s: networkStep } = limits.messages;
  const { tree_begin_s: treeBegin, tree_link_s: treeLink, tree_network_s: treeNetwork } = limits.messages;
  // Of a GPU to a group in its node; cards with a link to each peer use those to the group.
  const linkAmong = (ranks) => {
    const part = device.peers && ranks > 1 ? Math.min(ranks - 1, device.peers) / device.peers : 1;
    return device.link_Bps * part * stack.link_share;
  };

  const NONE = { bytes: 0, seconds: 0, latency_s: 0 };
  const times = (one, n) => ({ bytes: n * one.bytes, seconds: n * one.seconds, latency_s: n * one.latency_s });
  const plus = (a, b) =>
    ({ bytes: a.bytes + b.bytes, seconds: a.seconds + b.seconds, latency_s: a.latency_s + b.latency_s });
  const waits = {
    times: (one, n) => ({
      messages: times(one.messages, n), beside_s: n * one.beside_s, hidden_s: n * one.hidden_s,
    }),
    plus: (a, b) => ({
      messages: plus(a.messages, b.messages), beside_s: a.beside_s + b.beside_s, hidden_s: a.hidden_s + b.hidden_s,
    }),
    exposedS: (one) => one.messages.seconds - one.hidden_s,
  };
  const hide = (messages, besideS, exposed = 0) => ({
    messages, beside_s: besideS, hidden_s: Math.min((1 - exposed) * messages.seconds, Math.max(0, besideS)),
  });

  const bandwidth = (ranks, stride) => {
    const onNode = Math.max(1, Math.min(ranks, Math.floor(perNode / stride))), link = linkAmong(onNode);
    if (ranks * stride <= perNode) return link;
    return Math.min(link, onNode * device.network_Bps * stack.network_share);
  };
  // Latency of a ring that each rank passes once, and of a tree up and down; the bandwidth of both.
  const ways = cached((ranks, stride) => {
    const onNode = Math.min(ranks, Math.max(1, Math.floor(perNode / stride))), nodes = ranks / onNode;
    return {
      ringS: (ranks - nodes) * linkStep + (nodes - 1) * networkStep,
      treeS: 2 * ((onNode - 1) * treeLink + Math.log2(nodes) * treeNetwork),
      speed: bandwidth(ranks, stride),
    };
  });
  // Of an all-gather or a reduce-scatter, and of an all-reduce, which is a ring or a tree.
  const allGather = (payload, ranks, stride, calls = 1) => {
    if (ranks === 1 || !payload) return NONE;
    const { ringS, speed } = ways(ranks, stride), sent = ((ranks - 1) / ranks) * payload;
    const latency = calls * (begin + ringS);
    return { bytes: sent, seconds: latency + sent / speed, latency_s: latency };
  };
  const allReduce = (payload, ranks, stride, calls = 1) => {
    if (ranks === 1 || !payload) return NONE;
    const { ringS, treeS, speed } = ways(ranks, stride), sent = ((2 * (ranks - 1)) / ranks) * payload;
    const ofRing = calls * (begin + 2 * ringS), ofTree = calls * (treeBegin + treeS);
    const ring = ofRing + sent / speed, tree = ofTree + (2 * payload) / (limits.messages.tree_bandwidth * speed);
    return ring <= tree
      ? { bytes: sent, seconds: ring, latency_s: ofRing }
      : { bytes: sent, seconds: tree, latency_s: ofTree };
  };
  // Of n pieces of a payload, one for each rank, those that a rank sends, one after the other.
  const exchange = (payload, ranks, stride) => {
    if (ranks === 1) return NONE;
    const onNode = Math.min(ranks, Math.max(1, Math.floor(perNode / stride)));
    const near = onNode - 1, far = ranks - onNode, piece = payload / ranks, link = linkAmong(onNode);
    const latency = begin + near * linkStep + far * networkStep;
    const card = far ? Math.min(link, device.network_Bps * stack.network_share) : Infinity;
    const longest = Math.max((near * piece) / link, (far * piece) / card);
    return { bytes: (near + far) * piece, seconds: latency + longest, latency_s: latency };
  };
  // A message between neighbours of a pipeline where it takes longest; and the seconds of one over all hops.
  const betweenStages = (payload, ranks, stride) => {
    if (ranks === 1) return [NONE, 0];
    const over = (latency, speed) => ({ bytes: payload, seconds: latency + payload / speed, latency_s: latency });
    const out = Math.ceil(ranks / Math.max(1, Math.floor(perNode / stride))) - 1; // hops that leave a node
    const link = linkAmong(2), near = over(linkStep, link);
    if (!out) return [near, (ranks - 1) * near.seconds];
    const far = over(networkStep, Math.min(link, device.network_Bps * stack.message_share));
    return [far, out * far.seconds + (ranks - 1 - out) * near.seconds];
  };
  return { NONE, times, plus, waits, hide, allGather, allReduce, exchange, betweenStages };
};
