// A guess on a picture: until it is made, the picture waits. Python has written the question and all that is said, see
// book/figures/guess.py.
function askFirst(box) {
  const KEPT = "parallel-by-hand.guesses", { question, options, right, shown } = JSON.parse(box.querySelector(":scope > script").textContent);
  const picture = box.querySelector(".pbh-player"); // others have no beats: they open at once
  const [row, said] = box.querySelectorAll(".guess, [role=status]");

  const read = () => {
    try {
      return JSON.parse(localStorage.getItem(KEPT)) || {};
    } catch {
      return {}; // no storage, or somebody else's
    }
  };
  let guess = read()[box.dataset.pbh] ?? null; // an option's number; -1 is none, the reader wants to see the picture

  function show() {
    const beat = picture ? +picture.dataset.beat : shown * (guess !== null), answered = guess !== null && beat >= shown;
    const [words, why] = options[guess] || [], [is] = options[right];
    const own = words ? `You guessed ${words}` : "";
    const verdict = guess === right ? `${own}: right. ${why}` : own ? `${own}. ${why} It is ${is}.` : `It is ${is}. ${options[right][1]}`;
    box.classList.toggle("pbh-asks", guess === null);
    box.classList.toggle("pbh-told", beat > 0);
    box.dataset.verdict = answered ? (guess === right ? "right" : own && "wrong") : "";
    const text = beat ? (answered ? verdict : own && `${own}.`) : "";
    if (said.textContent !== text) said.textContent = text;
    buttons.forEach((button, i) => i < options.length && button.setAttribute("aria-pressed", i === guess));
  }
  function choose(i) {
    guess = i;
    try {
      if (i >= 0) localStorage.setItem(KEPT, JSON.stringify({ ...read(), [box.dataset.pbh]: i }));
    } catch {
      // a private window: the guess lasts as long as the page
    }
    show();
    const next = picture ? picture.querySelector(".pbh-play") : said; // the buttons are gone, and the focus goes on
    next.focus({ preventScroll: true });
    if (picture) next.click();
  }

  const buttons = [...options.map(([words]) => words), "Skip"].map((words, i) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: words });
    button.addEventListener("click", () => choose(i < options.length ? i : -1));
    return button;
  });
  row.replaceChildren(...buttons); // without this script they are folds
  row.setAttribute("role", "group");
  row.setAttribute("aria-label", question);
  if (picture) picture.addEventListener("pbh-beat", show);
  box.classList.add("pbh-live");
  show();
}
