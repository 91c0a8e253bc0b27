// What a reader has done, in this browser: boxes, or a record that `course.check` wrote.
(() => {
  const KEY = "parallel-by-hand.progress";
  const page = document.getElementById("progress");
  const boxes = [...page.querySelectorAll("input[type=checkbox]")];
  const status = page.querySelector("[role=status]");
  const idOf = (box) => box.id.slice("done-".length);

  const read = () => {
    try {
      const kept = JSON.parse(localStorage.getItem(KEY));
      return Array.isArray(kept) ? kept : [];
    } catch {
      return []; // no storage, or somebody else's
    }
  };

  const show = (note = "") => {
    const sum = (of) => of.reduce((points, box) => points + Number(box.dataset.points), 0);
    const left = boxes.find((box) => !box.checked);
    const next = left ? ` Next to do: ${left.closest("tr").querySelector("label").textContent}.` : "";
    status.textContent = `${note}${sum(boxes.filter((box) => box.checked))} of ${sum(boxes)} points.${next}`;
  };

  const keep = () => {
    try {
      localStorage.setItem(KEY, JSON.stringify(boxes.filter((box) => box.checked).map(idOf)));
    } catch {
      // a private window: the boxes last as long as the page
    }
  };

  const tick = (ids) => boxes.forEach((box) => { box.checked ||= ids.includes(idOf(box)); });

  page.addEventListener("change", async (event) => {
    const file = event.target.files && event.target.files[0];
    let note = "";
    if (file) {
      try {
        const record = JSON.parse(await file.text());
        tick(Object.keys(record).filter((id) => record[id].points >= record[id].max));
      } catch {
        note = `${file.name} is no record of course.check. `;
      }
    }
    keep();
    show(note);
  });

  page.querySelector("a[download]").addEventListener("click", (event) => {
    const points = (box) => ({ points: Number(box.dataset.points), max: Number(box.dataset.points) });
    const record = boxes.filter((box) => box.checked).map((box) => [idOf(box), points(box)]);
    const text = JSON.stringify(Object.fromEntries(record), null, 1);
    event.currentTarget.href = `data:application/json,${encodeURIComponent(text)}`;
  });

  tick(read());
  show();
})();
