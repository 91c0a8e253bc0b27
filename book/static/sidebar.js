// The sidebar: the page one reads is in view, arrow keys walk through the links, and chapters that were read to their end
// bear a mark, in this browser alone.
(() => {
  const KEY = "parallel-by-hand.read";
  const bar = document.querySelector(".bd-sidebar-primary"), nav = bar?.querySelector("nav.bd-links");
  if (!nav) return;
  const nameOf = (address) => new URL(address, location.href).pathname.split("/").slice(-2).join("/").replace(/\.html$/, "");

  addEventListener("load", () => { // the theme does it for some pages
    const here = nav.querySelector("a.current"), { top, bottom } = bar.getBoundingClientRect();
    const at = here?.getBoundingClientRect().top;
    if (at < 0 || at > bottom - 60) bar.scrollTop += at - (top + bottom) / 2;
  });
  nav.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], stops = [...nav.querySelectorAll("a, summary")].filter((stop) => stop.checkVisibility());
    const next = step && stops[stops.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });

  const read = () => {
    try {
      const kept = JSON.parse(localStorage.getItem(KEY));
      return new Set(Array.isArray(kept) ? kept : []);
    } catch {
      return new Set(); // no storage, or somebody else's
    }
  };
  function mark() {
    const done = read();
    for (const link of nav.querySelectorAll("li.toctree-l1 > a")) {
      if (!done.has(nameOf(link.href)) || link.querySelector(".read")) continue;
      link.append(Object.assign(document.createElement("span"), { className: "read", textContent: " read" }));
    }
  }
  mark();
  const own = nameOf(location.href), end = [...document.querySelectorAll("article section")].at(-1);
  if (!/^chapters\/\d\dc?_/.test(own) || !end) return;
  const watch = new IntersectionObserver((seen) => {
    if (!seen.some((one) => one.isIntersecting) || scrollY === 0) return; // a link into the page is no reading of it
    watch.disconnect();
    try {
      localStorage.setItem(KEY, JSON.stringify([...read().add(own)]));
    } catch {
      return; // a private window: nothing is kept, and nothing is marked
    }
    mark();
  });
  watch.observe(end);
})();
