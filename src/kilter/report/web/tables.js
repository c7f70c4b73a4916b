"use strict";
// Tables that can be sorted, filtered and copied.

// columns: [{ key, title, show: value -> text, text: true for words }]
function dataTable({ caption, rows, columns, name }) {
  let shown = rows.slice();
  const body = element("tbody");
  const fill = () => body.replaceChildren(...shown.map((row) => element("tr", {}, ...columns.map((c) => {
    const value = row[c.key];
    if (c.node) return element("td", {}, c.node(row));
    return element("td", { class: c.text ? "text" : undefined, text: c.show ? c.show(value, row) : value ?? "" });
  }))));
  const heads = columns.map((c) => {
    const head = element("th", { scope: "col", "aria-sort": "none", class: c.text ? "text" : undefined },
      element("button", { type: "button", text: c.title, onclick: () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((h) => h.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const order = (a, b) => (a === b ? 0 : a === null || a === undefined ? 1 : b === null || b === undefined ? -1
          : (up ? 1 : -1) * (typeof a === "string" ? a.localeCompare(b) : a - b));
        rows.sort((a, b) => order(a[c.key], b[c.key]));
        search();
      } }));
    return head;
  });
  const filter = element("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${caption}`, oninput: () => search() });
  function search() {
    const wanted = filter.value.toLowerCase();
    shown = rows.filter((row) => columns.some((c) => String(c.show ? c.show(row[c.key], row) : row[c.key] ?? "").toLowerCase().includes(wanted)));
    fill();
  }
  const said = element("span", { role: "status", class: "quiet" });
  const text = () => [columns.map((c) => c.title).join("\t"), ...shown.map((row) => columns.map((c) => (c.show ? c.show(row[c.key], row) : row[c.key] ?? "")).join("\t"))].join("\n");
  const copy = element("button", { type: "button", text: "Copy", onclick: async () => {
    try { await navigator.clipboard.writeText(text()); said.textContent = "Copied."; } catch { said.textContent = "The browser did not allow copying."; }
  } });
  const save = element("button", { type: "button", "data-save": "CSV", text: "CSV", onclick: () => download(`${name}.csv`, "text/csv", csv(shown.map((row) => Object.fromEntries(columns.map((c) => [c.title, row[c.key]]))))) });
  fill();
  return element("div", { "data-table": name },
    element("div", { class: "controls filter" }, filter, copy, save, said),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      element("table", {}, element("caption", { text: caption }), element("thead", {}, element("tr", {}, ...heads)), body)));
}

function resultTable(comparison, cell) {
  const some = (key) => comparison.lines.some((line) => line[key] !== null && line[key] !== undefined);
  const rows = comparison.lines.filter((line) => cell === null || line.cell === cell).map((line) => ({ ...line }));
  const columns = [{ key: "method", title: "method", text: true }];
  const [unit, digits] = comparison.in_percent ? [100, (v) => v.toFixed(1)] : [1, (v) => number(v, 4)];
  if (cell === null) columns.unshift({ key: "cell", title: "setting", text: true });
  for (const m of ["global", "client", "local"]) {
    if (!some(`${m}_mean`)) continue;
    columns.push({ key: `${m}_mean`, title: m, show: (v, row) => (v === null || v === undefined ? "" : `${digits(unit * v)}${row[`${m}_std`] ? ` ± ${digits(unit * row[`${m}_std`])}` : ""}`) });
    if (some(`${m}_difference`)) columns.push({ key: `${m}_difference`, title: `${m} - ${comparison.reference}`, show: (v) => (v === null || v === undefined ? "" : `${v > 0 ? "+" : ""}${digits(unit * v)}`) });
    if (some(`${m}_paper`)) columns.push({ key: `${m}_paper`, title: `${m}, paper`, show: (v) => (comparison.in_percent ? percent(v) : number(v)) });
  }
  if (some("worst_tenth")) columns.push({ key: "worst_tenth", title: "worst tenth", show: (v) => (comparison.in_percent ? percent(v) : number(v)) });
  if (some("rounds_to_target")) columns.push({ key: "rounds_to_target", title: "rounds to target", show: (v) => number(v) }, { key: "bytes_to_target", title: "bytes to target", show: bytes });
  columns.push({ key: "bytes", title: "traffic", show: bytes }, { key: "seconds", title: "seconds", show: (v) => number(v) }, { key: "seeds", title: "seeds" });
  if (some("tuned")) columns.push({ key: "tuned", title: "tuned", text: true });
  return dataTable({ caption: `Results: ${comparison.metric}${comparison.in_percent ? " in %" : ""}, mean ± standard deviation over seeds`, rows, columns, name: "results" });
}

function failureTable(comparison, runs) {
  const rows = [
    ...comparison.failures.map((f) => ({ run: f.title || f.run, where: "run", what: f.reason })),
    ...runs.flatMap((run) => run.failures.map(([round, node, step, reason]) => ({ run: `${run.label}, seed ${run.seed}`, where: `round ${round}, ${node}, ${step}`, what: reason }))),
    ...comparison.lines.flatMap((line) => line.runs.flatMap((run) => (run.notices || []).map((n) => ({
      run: `${line.cell}, ${line.method}, seed ${run.seed}`, where: `${n.count} times, rounds ${n.rounds.slice(0, 5).join(" ")}${n.rounds.length > 5 ? " ..." : ""}`, what: n.what })))),
  ];
  if (!rows.length) return element("p", { text: "Nothing failed, and nothing fell back." });
  return dataTable({ caption: "What failed or did not happen as intended", rows, name: "failures", columns: [
    { key: "run", title: "run", text: true }, { key: "where", title: "where", text: true }, { key: "what", title: "what", text: true }] });
}

function clientTable(run) {
  if (!run.clients.length) return null;
  const metrics = [...new Set(run.clients.flatMap((c) => Object.keys(c.received || c.own || {})))];
  const rows = run.clients.map((c) => ({ client: c.name, n_test: c.n_test, up: c.bytes_up, down: c.bytes_down,
    ...Object.fromEntries(metrics.flatMap((m) => [[`received ${m}`, c.received?.[m]], [`own ${m}`, c.own?.[m]]])) }));
  const has = (key) => rows.some((row) => row[key] !== null && row[key] !== undefined);
  const columns = [{ key: "client", title: "client", text: true }, { key: "n_test", title: "test rows" },
    ...metrics.flatMap((m) => [`received ${m}`, `own ${m}`]).filter(has).map((key) => ({ key, title: key, show: (v) => number(v, 4) })),
    { key: "up", title: "sent", show: bytes }, { key: "down", title: "received", show: bytes }];
  return dataTable({ caption: `Clients of ${run.label}, seed ${run.seed}`, rows, columns, name: "clients" });
}
