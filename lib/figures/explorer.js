// Shows, for each setting of the sliders, the frame that Python has drawn for it.
// No subject logic here: `figure` carries its frames as JSON, see lib/figures/explorer.py.
function showExplorer(figure) {
  const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
  const picture = figure.querySelector(".pbh-picture");
  const sentence = figure.querySelector("figcaption");
  const sliders = Array.from(figure.querySelectorAll("input"));
  const outputs = Array.from(figure.querySelectorAll("output"));

  function show() {
    let place = 0; // the last slider turns fastest, as in itertools.product
    sliders.forEach((slider, i) => {
      const words = data.values[i][slider.value];
      slider.setAttribute("aria-valuetext", words);
      outputs[i].textContent = words;
      place = place * data.values[i].length + Number(slider.value);
    });
    const [svg, words] = data.frames[data.order[place]];
    picture.innerHTML = svg;
    picture.firstElementChild.setAttribute("role", "img");
    picture.firstElementChild.setAttribute("aria-label", words);
    if (sentence.textContent !== words) sentence.textContent = words;
  }

  // JupyterLab takes arrow keys for itself, to move between cells.
  figure.addEventListener("keydown", (event) => event.stopPropagation());
  sliders.forEach((slider) => {
    slider.disabled = false; // Python draws them disabled: without this script they would move and change nothing
    slider.addEventListener("input", show);
  });
  show();
}
