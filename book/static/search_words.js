// What comes first in a search, and that it ends. Python has written `searchWords`, see book/book_search.py; the rest is
// Sphinx's searchtools.js.
(() => {
  // ---- it ends: a word that every JavaScript object has, such as "constructor", is in no page unless the index says so
  const inherited = Object.getOwnPropertyNames(Object.prototype).filter((name) => name === name.toLowerCase());
  function close(words) {
    for (const name of inherited) if (!Object.hasOwn(words, name)) Object.defineProperty(words, name, { value: undefined });
  }

  // ---- what was asked for
  const stemmer = new Stemmer();
  const stems = (text) => splitQuery(text.toLowerCase()).map((word) => stemmer.stemWord(word));
  const PAGE = 0, TITLE = 1, SECTION = 2, DESCRIPTION = 3, SCORE = 4;

  // Places for words that people use, those with the most of the words first.
  function meant(asked) {
    const { docnames, titles, alltitles, filenames } = Search._index;
    const named = new Map(Object.entries(alltitles).flatMap(([title, all]) => all.map(([file, id]) => [`${file}#${id ?? ""}`, title])));
    return searchWords
      .map(([page, section, phrases]) => {
        const most = Math.max(0, ...phrases.map(stems).filter((words) => words.every((word) => asked.has(word))).map((words) => words.length));
        const file = docnames.indexOf(page), title = section && named.get(`${file}#${section}`);
        return [page, title ? `${titles[file]} › ${title}` : titles[file], section && `#${section}`, null, most, filenames[file]];
      })
      .filter((result) => result[SCORE])
      .sort((a, b) => b[SCORE] - a[SCORE]);
  }
  // Sections whose title has all the words: the fewer others it has, the better.
  function titled(asked) {
    const { docnames, titles, alltitles, filenames } = Search._index, found = [];
    for (const [title, all] of Object.entries(alltitles)) {
      const words = new Set(stems(title));
      if (!asked.size || ![...asked].every((word) => words.has(word))) continue;
      for (const [file, id] of all) {
        const name = titles[file] === title ? title : `${titles[file]} › ${title}`;
        const result = [docnames[file], name, id ? `#${id}` : "", null, Scorer.title * (1 + asked.size / words.size), filenames[file]];
        found.push([...result.slice(0, SCORE), Scorer.score(result), result[5]]);
      }
    }
    return found;
  }

  const perform = Search._performSearch; // returns results, the best last
  Search._performSearch = (query, ...terms) => {
    close(Search._index.terms);
    close(Search._index.titleterms);
    const asked = new Set(stems(query)), telling = new Set([...asked].filter((word) => !stopwords.includes(word)));
    const found = [...perform(query, ...terms), ...titled(telling)].sort((a, b) => b[SCORE] - a[SCORE]);
    const first = meant(asked).slice(0, 4), seen = new Set();
    const isFunction = (result) => result[DESCRIPTION] !== null;
    return [...first, ...found].filter((result) => { // a page once, but for places that are meant and functions of the library
      const place = result[PAGE] + result[SECTION], name = isFunction(result) || first.includes(result) ? place : result[PAGE];
      if (seen.has(name)) return false;
      return seen.add(name).add(result[PAGE]);
    }).reverse();
  };
})();
