// A link into something that is folded opens it: when a page is loaded, when its address changes, and when a link to the
// place where the reader is already is pressed once more. A link to a section opens the line behind which it lies.
(() => {
  const plain = (text) => {
    try {
      return decodeURIComponent(text);
    } catch {
      return text; // a stray %
    }
  };
  const place = (hash) => {
    const name = plain(hash.slice(1));
    return document.getElementById(name) ?? document.querySelector(`figure[data-address="${CSS.escape(name.split("=")[0])}"]`);
  };
  function open(hash = location.hash) {
    const target = hash.length > 1 && place(hash);
    if (!target) return;
    const section = target.matches("section, h2, h3") ? target.closest("section") : null;
    const around = [];
    for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) around.push(fold);
    const folds = [...around, ...(section?.querySelectorAll(":scope > details.deeper") ?? [])].filter((fold) => !fold.open);
    for (const fold of folds) fold.open = true;
    if (folds.length) target.scrollIntoView();
  }
  open();
  addEventListener("hashchange", () => open());
  document.addEventListener("click", ({ target }) => {
    const link = target.closest?.("a[href]");
    if (link && link.hash && link.href === location.href) open();
  });
})();
