// What a search shows first: what chapters and the glossary say, then the functions of the library.
var Scorer = {
  objNameMatch: 4, objPartialMatch: 2,
  objPrio: { 0: 0, 1: 0, 2: 0 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
