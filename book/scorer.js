// What a search shows first: chapters, in their order; then the glossary and its like; exercises, solutions and the
// library's functions last. A page of which only the title matches is worth more than all of that.
var Scorer = {
  objNameMatch: 4, objPartialMatch: 2,
  objPrio: { 0: 0, 1: 0, 2: 0 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score]) => {
    const chapter = /^chapters\/(\d+)(b?)/.exec(page); // b: what goes deeper comes after the chapter
    if (chapter) return score + (chapter[2] ? -4 : 8) - (Number(chapter[1]) || 15) / 10; // Start says a bit of everything
    return score - (/^(exercises|solutions)\//.test(page) ? 8 : page.startsWith("book/library/") ? 4 : 0);
  },
};
