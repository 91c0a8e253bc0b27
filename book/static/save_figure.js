// Save a picture of a page, as SVG or PNG, as it stands now and with a line that says where it is from.
(() => {
  const MARGIN = 14, LINE = 26; // px around the drawing, and below it for the line
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const inked = (text) => // a file has no stylesheet: each colour becomes what the page makes of it
    text.replace(/var\((--pbh-[\w-]+),(?:[^()]|\([^()]*\))*\)/g, (_, name) => color(name));

  function drawn(figure) {
    const shown = [...figure.querySelectorAll("svg")].find((svg) => svg.checkVisibility());
    const copy = shown.cloneNode(true), { width, height } = shown.viewBox.baseVal;
    const things = shown.querySelectorAll("*"), copies = copy.querySelectorAll("*");
    things.forEach((thing, i) => { // what the stylesheet of a player says
      if (!thing.closest(".pbh-thing")) return;
      const style = getComputedStyle(thing);
      for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-weight", "text-anchor", "dominant-baseline", "transform", "width", "height"])
        if (style[name] && style[name] !== "auto") copies[i].style.setProperty(name, style[name]);
    });
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("viewBox", `${-MARGIN} ${-MARGIN} ${width + 2 * MARGIN} ${height + 2 * MARGIN + LINE}`);
    copy.setAttribute("width", width + 2 * MARGIN);
    copy.setAttribute("height", height + 2 * MARGIN + LINE);
    copy.removeAttribute("style");
    const paper = `<rect x="${-MARGIN}" y="${-MARGIN}" width="100%" height="100%" fill="${color("--paper")}"/>`;
    const source = `${document.title}, ${location.protocol === "file:" ? "Parallel by Hand" : location.href.split("#")[0]}`;
    const said = new Option(source).innerHTML; // escaped
    const line = `<text x="0" y="${height + LINE}" font-size="11" fill="${color("--pbh-soft")}">${said}</text>`;
    return inked(new XMLSerializer().serializeToString(copy)).replace(/(<svg[^>]*>)/, `$1${paper}`).replace(/<\/svg>$/, `${line}</svg>`);
  }

  function hand(blob, name) {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function save(figure, form, name) {
    const blob = new Blob([drawn(figure)], { type: "image/svg+xml" });
    if (form === "SVG") return hand(blob, `${name}.svg`);
    const image = new Image(), address = URL.createObjectURL(blob);
    image.onload = () => {
      const canvas = Object.assign(document.createElement("canvas"), { width: 2 * image.width, height: 2 * image.height });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((picture) => hand(picture, `${name}.png`));
      URL.revokeObjectURL(address);
    };
    image.src = address;
  }

  document.querySelectorAll("figure.pbh-figure, figure.pbh-explorer, figure.pbh-player").forEach((figure, k) => {
    const page = location.pathname.split("/").pop().replace(".html", ""), box = document.createElement("p");
    box.className = "pbh-save";
    for (const form of ["SVG", "PNG"]) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: form });
      button.setAttribute("aria-label", `Save this picture as ${form}`);
      button.addEventListener("click", () => save(figure, form, `${page}-${k + 1}`));
      box.append(button);
    }
    figure.append(box);
  });
})();
