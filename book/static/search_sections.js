// A result of the search leads to the section of its page that says most of what was asked for.
(() => {
  const asked = (new URLSearchParams(location.search).get("q") || "").toLowerCase().match(/[\w-]{3,}/g) || [];
  const results = document.getElementById("search-results");
  if (location.protocol === "file:" || !asked.length) return; // a page on the disk may not be read by another

  const stem = (word) => word.replace(/(ing|ies|es|s|y)$/, "");
  const often = (text, word) => Math.min(5, text.split(stem(word)).length - 1);
  const worth = (section) => {
    const copy = section.cloneNode(true);
    copy.querySelectorAll("section, script, style, pre").forEach((inner) => inner.remove());
    const text = copy.textContent.toLowerCase(), title = copy.querySelector("h1, h2, h3")?.textContent.toLowerCase() ?? "";
    const each = asked.map((word) => often(text, word) + 3 * often(title, word));
    const isList = /^(papers|summary|quiz|key-terms|practice)$/.test(section.id); // it says a little of everything
    return isList ? each.filter(Boolean).length : 10 * each.filter(Boolean).length + each.reduce((a, b) => a + b, 0); // all the words, before one of them often
  };
  const lead = async (item) => {
    const link = item.querySelector("a");
    if (!link || link.hash) return;
    const page = new DOMParser().parseFromString(await (await fetch(link.href)).text(), "text/html");
    const sections = Array.from(page.querySelectorAll("article section section[id]"), (one) => [worth(one), one]);
    const [most, section] = sections.reduce((a, b) => (b[0] > a[0] ? b : a), [0, null]);
    if (!most) return;
    link.hash = section.id;
    link.append(` › ${section.querySelector("h2, h3").firstChild.textContent.trim()}`);
  };
  new MutationObserver((changes) => {
    for (const change of changes)
      for (const node of change.addedNodes) if (node.nodeName === "LI" && node.closest("ul.search")) lead(node);
  }).observe(results, { childList: true, subtree: true });
})();
