// A result of the search leads to the section of its page that says most of what was asked for, and shows its sentences.
(() => {
  const asked = (new URLSearchParams(location.search).get("q") || "").toLowerCase().match(/[\w-]{3,}/g) || [];
  const results = document.getElementById("search-results");
  if (location.protocol === "file:" || !asked.length) return; // a page on the disk may not be read by another

  // ---- what a page says in sentences: no code, drawings, answers to press, or lists of pages
  const SAID = "p, li, dd";
  const UNSAID = ".cell, figure, table, .computed, .toctree-wrapper, .cards, .kick, details[class]:not(.deeper)";
  function prepare(page) {
    page.querySelectorAll("article :is(script, style, svg, pre, button, .headerlink, div.math)").forEach((part) => part.remove());
    page.querySelectorAll("article .math").forEach((formula) => formula.replaceWith(plainFormula(formula.textContent)));
  }
  const blocks = (within) =>
    Array.from(within.querySelectorAll(SAID))
      .filter((block) => !block.querySelector(SAID) && !block.closest(UNSAID))
      .filter((block) => within.localName !== "section" || block.closest("section") === within)
      .map((block) => block.textContent.replace(/\s+/g, " ").trim());
  const isWhole = (sentence) => /^\P{Ll}.{20,}[.?!:]\W*$/su.test(sentence);
  const sentences = (text) => (Intl.Segmenter ? Array.from(new Intl.Segmenter("en", { granularity: "sentence" }).segment(text), (one) => one.segment) : [text]);

  // ---- which section, and which of its sentences
  const stem = (word) => word.replace(/(\w)\1ing$/, "$1ing").replace(/^(.{3,}?)(?:ing|ies|es|s|y)$|^(.{5,})e$/, "$1$2");
  const begun = asked.map((word) => new RegExp(`(?:^|\\W)${stem(word)}`, "gi"));
  const often = (text) => begun.map((word) => Math.min(5, text.match(word)?.length ?? 0));
  const weigh = (each) => 10 * each.filter(Boolean).length + each.reduce((a, b) => a + b, 0); // all the words, before one of them often
  const titled = (section) => section.querySelector("h1, h2, h3")?.textContent ?? "";
  const first = (all, worth) => all.map((one) => [worth(one), one]).reduce((a, b) => (b[0] > a[0] ? b : a), [0, null])[1];
  const worth = (section) => {
    const inText = often(blocks(section).join(" ")), inTitle = often(titled(section));
    const each = inText.map((count, i) => count + 3 * inTitle[i]);
    const isList = /^(papers|summary|quiz|key-terms|practice|worked-examples)$/.test(section.id); // it says a little of everything
    return isList ? each.filter(Boolean).length : weigh(each);
  };
  const LONG = 260; // characters
  function excerpt(within) {
    const said = blocks(within).map(sentences);
    const rests = said.flatMap((block) => block.map((_, i) => block.slice(i))); // from each sentence to the end of its block
    let text = "";
    for (const sentence of first(rests, (rest) => isWhole(rest[0]) && 1 + often(rest[0]).filter(Boolean).length) ?? []) {
      if (text && (text.length + sentence.length > LONG || sentence.endsWith(":"))) break;
      text += sentence;
    }
    return text.length > 1.5 * LONG ? `${text.slice(0, LONG).replace(/\s\S*$/, "")} …` : text.trim();
  }

  function once(link) { // the section of a page may be a result of its own: the first of them stays
    const same = [...results.querySelectorAll("ul.search > li")].filter((item) => item.querySelector("a")?.href === link.href);
    same.slice(1).forEach((item) => item.remove());
  }
  function count() {
    const said = results.querySelector(".search-summary"), there = `${results.querySelectorAll("ul.search > li").length}`;
    if (/\d/.test(said?.textContent) && said.textContent.match(/\d+/)[0] !== there) said.textContent = said.textContent.replace(/\d+/, there);
  }

  const lead = async (item) => {
    const link = item.querySelector("a");
    if (link) once(link);
    if (!link || item.querySelector(":scope > span")) return; // a function of the library says what it is
    const page = new DOMParser().parseFromString(await (await fetch(link.href)).text(), "text/html");
    prepare(page);
    let section = link.hash && page.getElementById(link.hash.slice(1))?.closest("section");
    if (!link.hash && (section = first(Array.from(page.querySelectorAll("article section section[id]")), worth))) {
      link.hash = section.id;
      link.append(` › ${titled(section)}`);
    }
    once(link);
    const summary = Object.assign(document.createElement("p"), { className: "context" });
    summary.textContent = excerpt(section || page.querySelector("article")) || page.querySelector("meta[name=description]")?.content;
    item.append(summary);
    asked.forEach((word) => _highlightText(summary, word, "highlighted"));
  };
  new MutationObserver((changes) => {
    for (const change of changes)
      for (const node of change.addedNodes) if (node.nodeName === "LI" && node.closest("ul.search")) lead(node);
    count();
  }).observe(results, { childList: true, subtree: true });
})();
