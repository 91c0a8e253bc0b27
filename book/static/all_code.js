// One switch for all folded code of a page: made here, as without a script it could do nothing. What the reader chose
// is kept, where the browser lets a page keep something.
(() => {
  const KEY = "all-code";
  const folds = [...document.querySelectorAll("details.folded")];
  const open = new Set(folds.filter((fold) => fold.open)); // tables that are seen from the start
  const button = document.createElement("button");
  button.type = "button";
  button.className = "all-code";
  button.textContent = "All code";
  button.title = "Open or close all folded code of this page";

  const show = (all) => {
    button.setAttribute("aria-pressed", all);
    for (const fold of folds) fold.open = all || open.has(fold);
  };
  button.addEventListener("click", () => {
    const all = button.getAttribute("aria-pressed") !== "true";
    show(all);
    try {
      localStorage.setItem(KEY, all);
    } catch {}
  });

  let kept = null;
  try {
    kept = localStorage.getItem(KEY);
  } catch {}
  show(kept === "true");
  document.querySelector(".article-header-buttons").prepend(button);
})();
