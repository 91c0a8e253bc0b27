// Shows the frame that Python has drawn for a setting of the knobs: no subject logic here, see book/figures/explorer.py.
function showExplorer(figure) {
  const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
  const box = figure.querySelector(".pbh-box"), [wide, narrow] = box.children; // its style shows the one that fits
  const sentence = figure.querySelector("[aria-live='polite']");
  const knobs = Array.from(figure.querySelectorAll(".pbh-knob")); // sliders, and groups of buttons
  const get = (knob) => Number((knob.querySelector(":checked") || knob.querySelector("input")).value);
  const isInBook = figure.closest(".bd-article") !== null; // other pages have addresses of their own
  const address = `#${figure.dataset.address}=`;

  function show() {
    let place = 0; // the last knob turns fastest, as in itertools.product
    knobs.forEach((knob, i) => {
      const words = data.values[i][get(knob)], output = knob.querySelector("output");
      if (output) knob.querySelector("input").setAttribute("aria-valuetext", (output.textContent = words));
      place = place * data.values[i].length + get(knob);
    });
    const frame = data.frames.map((all) => all[data.order[place]]), words = frame[2];
    [wide.innerHTML, narrow.innerHTML] = frame;
    box.setAttribute("aria-label", words);
    if (sentence.textContent !== words) sentence.textContent = words;
  }
  function open() { // what somebody has sent; a setting that is none changes nothing
    const setting = location.hash.slice(address.length).split(".").map(Number);
    if (!isInBook || !location.hash.startsWith(address) || setting.length !== knobs.length) return;
    if (!setting.every((at, i) => at in data.values[i])) return;
    knobs.forEach((knob, i) => {
      if (knob.querySelector("output")) knob.querySelector("input").value = setting[i];
      else knob.querySelectorAll("input")[setting[i]].checked = true;
    });
    show();
    figure.scrollIntoView();
  }
  // A finger on a slider may be about to scroll the page, and the browser moves the slider as soon as it is touched:
  // until it has gone sideways, the slider stays. Then it follows; a tap moves it when the finger is lifted.
  const SIDEWAYS_PX = 8;
  let finger = null; // the slider it is on, and what was set before
  function begin({ target, pointerType, clientX }) {
    finger = null;
    if (pointerType === "touch" && target.type === "range")
      finger = { slider: target, x: clientX, before: target.value, meant: target.value, address: location.href, drags: false };
  }
  function move({ clientX }) {
    if (finger) finger.drags ||= Math.abs(clientX - finger.x) >= SIDEWAYS_PX;
  }
  function isHeld({ target }) { // the slider goes back to its place, which says nothing of an event
    if (finger?.slider !== target || finger.drags) return false;
    finger.meant = target.value;
    target.value = finger.before;
    return true;
  }
  function end({ type }) {
    if (!finger) return;
    const { slider, before, meant, address, drags } = finger;
    finger = null;
    if (type === "pointerup" && !drags && meant !== before) {
      slider.value = meant;
      changed();
    } else if (type === "pointercancel" && slider.value !== before) {
      slider.value = before;
      show();
      if (isInBook) history.replaceState(null, "", address);
    }
  }
  function changed(event) {
    if (event && isHeld(event)) return;
    show();
    if (isInBook) history.replaceState(null, "", address + knobs.map(get).join("."));
  }
  figure.addEventListener("keydown", (event) => event.stopPropagation()); // JupyterLab would move between cells
  figure.querySelectorAll("input").forEach((input) => (input.disabled = false)); // without this script they do nothing
  figure.addEventListener("pointerdown", begin);
  figure.addEventListener("pointermove", move);
  for (const name of ["pointerup", "pointercancel"]) figure.addEventListener(name, end);
  figure.addEventListener("input", changed);
  addEventListener("hashchange", open);
  show();
  open();
}
