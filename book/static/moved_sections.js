// A link to a section that is on a different page today leads there, also with the setting of an Explorer ("=1.0").
(() => {
  const lead = () => {
    const [place, ...setting] = location.hash.slice(1).split("=");
    if (!Object.hasOwn(movedSections, place)) return;
    location.replace([movedSections[place], ...setting].join("="));
  };
  lead();
  addEventListener("hashchange", lead);
})();
