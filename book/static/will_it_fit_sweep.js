// A sweep on the page "Will it fit?": throughput per GPU as a line over the values, and a table of the best layouts.

const sweepFigure = (what, rows, sec) => {
  const [unit, say] = {
    batch: ["sequences in a step", (x) => many(x)],
    gpus: ["GPUs", (x) => many(x)],
    network: ["GB/s of network per GPU", (x) => many(Number((x / 1e9).toPrecision(3)))],
  }[what];
  const ordered = rows.toSorted((a, b) => a.value - b.value); // a picture goes from the left to the right
  const [width, height, left, right, top, floor] = [600, 190, 40, 40, 34, 150];
  const at = (i) => left + ((width - left - right) * i) / Math.max(1, ordered.length - 1);
  const most = Math.max(...rows.map(({ rate = 0 }) => rate)), up = (rate) => floor - ((floor - top) * rate) / most;
  const points = ordered.map((row, i) => [at(i), row]).filter(([, { rate }]) => rate);
  const line = points.map(([x, { rate }]) => `${x.toFixed(1)},${up(rate).toFixed(1)}`).join(" ");
  const dots = points.map(([x, { rate }]) => `<circle cx="${x.toFixed(1)}" cy="${up(rate).toFixed(1)}" r="4"/>
    <text x="${x.toFixed(1)}" y="${(up(rate) - 10).toFixed(1)}" text-anchor="middle">${many(Math.round(rate))}</text>`);
  const marks = ordered.map((row, i) => `<text class="mark" x="${at(i).toFixed(1)}" y="${floor + 18}"
    text-anchor="middle">${say(row.value)}</text>`);
  const body = rows.map(({ value, planned, rate, nothing, reason }) => `<tr><th scope="row">${say(value)}</th>${planned
    ? `<td>${sec(planned.stepS)}</td><td>${many(Math.round(rate))}</td><td>${(planned.bytes / 1e9).toFixed(1)}</td>
       <td>${planned.text}${reason && `<small>${reason}</small>`}</td>`
    : `<td colspan="3">nothing fits</td><td><small>${nothing}</small></td>`}</tr>`);
  return `<figure><figcaption>Tokens/s per GPU over ${unit}, each with its best layout</figcaption>
    <svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Tokens per second and GPU, from ${
      say(ordered[0].value)} to ${say(ordered.at(-1).value)} ${unit}; the numbers are in the table below">
    <line class="mark" x1="${left - 20}" x2="${width - right + 20}" y1="${floor}" y2="${floor}"/>
    <polyline points="${line}"/>${dots.join("")}${marks.join("")}</svg></figure>
    <div class="pst-scrollable-table-container" tabindex="0"><table><thead><tr><th scope="col">${unit}</th>
    <th scope="col">step</th><th scope="col">tokens/s/GPU</th><th scope="col">GB</th><th scope="col">layout</th></tr></thead>
    <tbody>${body.join("")}</tbody></table></div>`;
};
