// The table of messages on the page "Will it fit?": what a GPU sends in a step, the seconds that hide, and the rest.

const messagesTable = (sends) => {
  if (!sends.length) return "";
  const short = (x) =>
    x >= 999.5 ? many(Math.round(x)) : x >= 0.001 ? x.toPrecision(3) : x > 0 ? "<0.001" : "0";
  const longest = Math.max(...sends.map(({ seconds }) => seconds));
  const row = ({ axis, what, where, bytes, Bps, latency_s: latency, hidden_s: hidden, exposed_s: waited }) => {
    const width = (x) => `style="width: ${((100 * x) / longest).toFixed(2)}%"`;
    return `<tr><th scope="row">${axis} <small>${what}, ${where} at ${short(Bps / 1e9)} GB/s</small></th>
      <td>${short(bytes / 1e9)}</td>
      <td><div aria-hidden="true"><i class="hides" ${width(hidden)}></i><i class="comm" ${width(waited)}></i></div>
      <small>latency ${short(latency)}</small></td><td>${short(hidden)}</td><td>${short(waited)}</td></tr>`;
  };
  return `<div class="pst-scrollable-table-container" tabindex="0"><table><thead><tr><th scope="col">Sent by a GPU in a step</th><th scope="col">GB</th>
    <th scope="col">seconds:</th><th scope="col"><i class="hides"></i>hidden</th>
    <th scope="col"><i class="comm"></i>waited</th></tr></thead><tbody>${sends.map(row).join("")}</tbody></table></div>`;
};
