// Moves the things of a mechanism from frame to frame, one beat at a time. No subject logic: Python has placed every
// thing at every frame, see book/figures/player.py. What lies between two frames is a transition of the style sheet.
function showPlayer(figure) {
  const { beats, scenes, times, paper } = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
  const drawings = Array.from(figure.querySelectorAll("svg")); // one for wide pages, one for narrow ones
  const caption = figure.querySelector("[aria-live='polite']");
  const play = figure.querySelector(".pbh-play");
  const marks = Array.from(figure.querySelectorAll(".pbh-beats button"));
  const count = figure.querySelector(".pbh-count");
  const last = beats.length - 1;
  const NAME = 0, SENTENCE = 1, UNTIL = 2;
  let at = 0, timer = 0; // the frame that is shown, and what runs on

  const beatOf = (frame) => beats.findIndex((beat) => frame <= beat[UNTIL]);

  function place(thing, [x, y, width, height, ink, words, seen]) {
    const [box, text] = thing.children;
    thing.style.transform = `translate(${x}px, ${y}px)`;
    thing.style.opacity = seen;
    thing.dataset.ink = ink;
    box.style.width = `${width}px`;
    box.style.height = `${height}px`;
    text.style.transform = `translate(${width / 2}px, ${height / 2}px)`;
    if (text.textContent !== words) text.textContent = words;
  }

  function show(frame, glide = "0.35s ease-out") {
    at = Math.max(0, Math.min(beats[last][UNTIL], frame));
    const beat = beatOf(at), sentence = beats[beat][SENTENCE];
    figure.style.setProperty("--pbh-glide", glide);
    drawings.forEach((drawing, k) => {
      const things = drawing.querySelectorAll(".pbh-thing");
      scenes[k].forEach((frames, i) => place(things[i], frames[at]));
      drawing.setAttribute("aria-label", sentence);
    });
    if (caption.textContent !== sentence) caption.textContent = sentence;
    marks.forEach((mark, k) => {
      mark.className = k < beat ? "pbh-past" : "";
      k === beat ? mark.setAttribute("aria-current", "step") : mark.removeAttribute("aria-current");
    });
    count.textContent = `${beat + 1} of ${beats.length}`;
    const next = at < beats[beat][UNTIL] ? beat : beat + 1;
    figure.dataset.beat = beat;
    figure.dispatchEvent(new Event("pbh-beat")); // for a guess on it
    play.textContent = timer ? "❚❚ Pause" : next > last ? "↺ Again" : at ? `▶ Next: ${beats[next][NAME]}` : "▶ Start";
  }

  function stop() {
    clearTimeout(timer);
    timer = 0;
  }
  function run(until, pace) { // to the end of a beat: nothing moves on its own for longer
    timer = at + 1 < until ? setTimeout(run, pace, until, pace) : 0;
    show(at + 1, timer || pace < 500 ? `${pace}ms linear` : "0.6s ease-in-out");
  }
  function toggle() {
    if (timer) {
      stop();
      return show(at);
    }
    const beat = beatOf(at), next = at < beats[beat][UNTIL] ? beat : beat + 1;
    if (next > last) return show(0);
    const until = beats[next][UNTIL];
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return show(until);
    run(until, Math.max(180, Math.min(700, 2800 / (until - at))));
  }
  function go(frame) {
    stop();
    show(frame);
  }
  function drag(event) { // along time, if the drawing has an axis of it
    const k = drawings.indexOf(event.currentTarget), box = event.currentTarget.getBoundingClientRect();
    const x = ((event.clientX - box.left) * event.currentTarget.viewBox.baseVal.width) / box.width;
    const axis = times[k] || scenes[k][0].map((_, i, all) => (i * event.currentTarget.viewBox.baseVal.width) / (all.length - 1 || 1));
    stop();
    show(axis.reduce((best, place, i) => (Math.abs(place - x) < Math.abs(axis[best] - x) ? i : best), 0), "0.1s linear");
  }

  figure.querySelector(".pbh-controls").hidden = false; // without this script they would do nothing
  play.addEventListener("click", toggle);
  marks.forEach((mark, k) => mark.addEventListener("click", () => go(beats[k][UNTIL])));
  const SIDEWAYS_PX = 8; // before that a finger may be about to scroll the page, and time does not move
  let finger = null; // where it went down, the frame that was shown then, and whether it ran on
  function begin(event) {
    if (event.button || !event.isPrimary) return;
    finger = { id: event.pointerId, x: event.clientX, from: at, ran: timer > 0, drags: false };
    event.currentTarget.setPointerCapture(event.pointerId);
  }
  function move(event) {
    if (event.pointerId !== finger?.id) return;
    finger.drags ||= Math.abs(event.clientX - finger.x) >= SIDEWAYS_PX;
    if (finger.drags) drag(event);
  }
  function end(event) {
    if (event.pointerId !== finger?.id) return;
    const { from, ran, drags } = finger;
    finger = null;
    if (event.type !== "pointercancel" || !drags) return;
    go(from); // the finger scrolls the page: all is as it was
    if (ran) toggle();
  }
  for (const drawing of drawings) {
    drawing.addEventListener("pointerdown", begin);
    drawing.addEventListener("pointermove", move);
    for (const name of ["pointerup", "pointercancel"]) drawing.addEventListener(name, end);
  }
  figure.addEventListener("keydown", (event) => {
    event.stopPropagation(); // JupyterLab takes arrow keys for itself, to move between cells
    const beat = beatOf(at);
    const to = { ArrowLeft: beats[Math.max(0, beat - 1)], ArrowRight: beats[Math.min(last, beat + 1)], Home: beats[0], End: beats[last] };
    if (!(event.key in to)) return;
    event.preventDefault();
    go(to[event.key][UNTIL]);
  });
  figure.addEventListener("pbh-go", ({ detail }) => go(beats[detail][UNTIL])); // on paper, for the answer to a guess
  let onScreen = null; // the frame that a reader who prints goes back to
  window.addEventListener("beforeprint", () => {
    onScreen ??= at;
    go(beats[paper][UNTIL]);
  });
  window.addEventListener("afterprint", () => {
    if (onScreen !== null) go(onScreen);
    onScreen = null;
  });
  show(0);
  requestAnimationFrame(() => figure.classList.add("pbh-moves")); // the first frame is there, it does not arrive
}
