// Moves the things of a mechanism from step to step. No subject logic: Python has placed every thing in every step, see
// book/figures/player.py. What lies between two steps is a transition of the style sheet.
function showPlayer(figure) {
  const { sentences, scenes, still } = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
  const drawings = Array.from(figure.querySelectorAll("svg")); // one for wide pages, one for narrow ones
  const caption = figure.querySelector("[aria-live='polite']");
  const [back, play, next] = figure.querySelectorAll("button");
  const slider = figure.querySelector("input");
  const last = sentences.length - 1;
  let at = still, timer = 0;

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

  function show(step) {
    at = Math.max(0, Math.min(last, step));
    drawings.forEach((drawing, k) => {
      const things = drawing.querySelectorAll(".pbh-thing");
      scenes[k].forEach((steps, i) => place(things[i], steps[at]));
      drawing.setAttribute("aria-label", sentences[at]);
    });
    caption.textContent = sentences[at];
    slider.value = at;
    slider.setAttribute("aria-valuetext", `step ${at} of ${last}`);
    back.disabled = at === 0;
    next.disabled = at === last;
  }

  function pause() {
    clearTimeout(timer);
    timer = 0;
    play.textContent = "Play";
  }
  function tick() { // it ends with the last step: nothing moves on its own for ever
    if (at === last) return pause();
    show(at + 1);
    timer = setTimeout(tick, Math.min(700 + 25 * sentences[at].length, 30_000 / last)); // to read, and half a minute in all
  }
  function toggle() {
    if (timer) return pause();
    if (at === last) show(0);
    play.textContent = "Pause";
    timer = setTimeout(tick, 400);
  }
  function go(step) {
    pause();
    show(step);
  }

  figure.querySelector(".pbh-controls").hidden = false; // without this script they would do nothing
  back.addEventListener("click", () => go(at - 1));
  next.addEventListener("click", () => go(at + 1));
  play.addEventListener("click", toggle);
  slider.addEventListener("input", () => go(Number(slider.value)));
  figure.addEventListener("keydown", (event) => {
    event.stopPropagation(); // JupyterLab takes arrow keys for itself, to move between cells
    const steps = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last };
    if (!(event.key in steps) || event.target === slider) return;
    event.preventDefault();
    go(steps[event.key]);
  });
  window.addEventListener("beforeprint", () => go(still));
  show(still);
  requestAnimationFrame(() => figure.classList.add("pbh-moves")); // the first step is there, it does not arrive
}
