"use strict";
// Charts: every function returns a <figure> with a caption, buttons to save it, and a legend where colours have a meaning.

const PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7A5195", "#2F9C95", "#B22222"];
// The metric of the comparison that is being drawn: charts read it when they are made.
let METRIC = { name: "accuracy", percent: true };
const MEASURES = ["global", "client", "local"];
function measureName(measure) {
  return { global: `global ${METRIC.name}`, client: `mean client ${METRIC.name}`, local: `mean local ${METRIC.name}`, loss: "training loss" }[measure] || measure;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const percent = (v) => (v === null || v === undefined ? "" : `${(100 * v).toFixed(1)} %`);
const number = (v, digits = 3) => (v === null || v === undefined ? "" : Number(v.toPrecision(digits)).toString());
function bytes(n) {
  if (n === null || n === undefined) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (n >= 1000 && at < units.length - 1) { n /= 1000; at += 1; }
  return `${at ? Number(n.toPrecision(3)) : Math.round(n)} ${units[at]}`;
}

// The reference is drawn in the colour of the text; other methods keep their colour in all charts of a comparison.
function colours(labels, reference) {
  const others = labels.filter((label) => label !== reference);
  return Object.fromEntries(labels.map((label) => [
    label, label === reference ? "var(--text)" : PALETTE[others.indexOf(label) % PALETTE.length],
  ]));
}
const DASHES = ["none", "6 3", "2 2", "8 3 2 3"];
const dash = (labels, label) => DASHES[Math.floor(labels.indexOf(label) / PALETTE.length) % DASHES.length];

function chart({ title, about = "", rows, draw, colour = null, wide = false, name = "" }) {
  const plot = element("div", { class: "plot", tabindex: "0", role: "group", "aria-label": title });
  const figure = element("figure", { class: wide ? "wide" : undefined, "data-chart": name || title });
  const file = (name || title).toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const save = (kind, action) => element("button", { type: "button", "data-save": kind, "aria-label": `Save ${title} as ${kind}`, text: kind, onclick: action });
  figure.append(
    element("figcaption", {}, element("h3", { text: title }),
      save("SVG", () => download(`${file}.svg`, "image/svg+xml", svgText(plot))),
      save("PNG", () => downloadPicture(`${file}.png`, plot)),
      save("CSV", () => download(`${file}.csv`, "text/csv", csv(rows))),
      about ? element("p", { text: about }) : null),
    colour ? legend(colour) : "", plot);
  let drawn = 0;
  const redraw = () => {
    const width = Math.round(plot.clientWidth || 500);
    if (width === drawn) return;
    drawn = width;
    const picture = draw(width);
    const svg = picture.tagName === "svg" ? picture : picture.querySelector("svg");
    for (const part of picture.querySelectorAll("g[aria-label]")) part.removeAttribute("aria-label"); // the whole picture has one
    if (svg) { svg.setAttribute("role", "img"); svg.setAttribute("aria-label", `${title}. ${about}`); }
    plot.replaceChildren(picture);
  };
  new ResizeObserver(redraw).observe(plot);
  return figure;
}

function legend(colour) {
  return element("ul", { class: "legend", "aria-label": "Legend" }, ...Object.entries(colour).map(([label, shade]) => {
    const mark = element("span");
    mark.style.borderTopColor = shade;
    return element("li", {}, mark, label);
  }));
}

// Saving -------------------------------------------------------------------------------------------------------------

function download(name, type, text) {
  const link = element("a", { href: URL.createObjectURL(text instanceof Blob ? text : new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function svgText(plot) {
  const svg = plot.querySelector("svg").cloneNode(true);
  const style = getComputedStyle(document.documentElement);
  svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  svg.style.background = style.getPropertyValue("--page");
  svg.style.color = style.getPropertyValue("--text");
  const text = new XMLSerializer().serializeToString(svg);
  return text.replace(/var\(--([a-z-]+)(?:,[^)]*)?\)/g, (whole, name) => style.getPropertyValue(`--${name}`).trim() || style.getPropertyValue("--page").trim());
}

function downloadPicture(name, plot) {
  const svg = plot.querySelector("svg");
  const [width, height] = [svg.clientWidth, svg.clientHeight];
  const image = new Image();
  image.onload = () => {
    const canvas = element("canvas", { width: 2 * width, height: 2 * height });
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    context.drawImage(image, 0, 0, width, height);
    canvas.toBlob((blob) => download(name, "image/png", blob));
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(plot))}`;
}

function csv(rows) {
  const columns = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const cell = (v) => (v === null || v === undefined ? "" : /[",\n]/.test(String(v)) ? `"${String(v).replace(/"/g, '""')}"` : String(v));
  return [columns.join(","), ...rows.map((row) => columns.map((c) => cell(row[c])).join(","))].join("\n") + "\n";
}

// Curves over rounds -------------------------------------------------------------------------------------------------

const mean = (values) => d3.mean(values);
const spread = (values) => (values.length > 1 ? d3.deviation(values) : 0);

function curveRows(lines, measure) {
  const rows = [];
  for (const line of lines) {
    const curves = line.runs.map((run) => run.curves[measure]).filter((c) => c && Object.keys(c).length);
    if (!curves.length) continue;
    for (const round of Object.keys(curves[0]).map(Number).sort((a, b) => a - b)) {
      const values = curves.map((c) => c[round]).filter((v) => v !== undefined);
      if (values.length < curves.length) continue; // a round that not every seed evaluated
      if (measure === "loss" && round === 0) continue; // the set-up trains other models
      const [middle, deviation] = [mean(values), spread(values)];
      rows.push({ method: line.method, round, mean: middle, low: middle - deviation, high: middle + deviation, seeds: values.length });
    }
  }
  return rows;
}

// Whole numbers only, also where there are few rounds.
const wholeTicks = (rows, key) => d3.ticks(...d3.extent(rows, (r) => r[key]), 10).filter(Number.isInteger);

function curveChart(lines, measure, colour) {
  const rows = curveRows(lines, measure);
  if (!rows.length) return null;
  const labels = Object.keys(colour);
  const share = measure !== "loss" && METRIC.percent;
  const unit = share ? "%" : measure === "loss" ? "loss" : METRIC.name;
  return chart({
    title: `${capital(measureName(measure))} by round`,
    name: `curve-${measure}`, rows, colour: only(colour, rows),
    about: "Mean over seeds; the band is one standard deviation.",
    draw: (width) => Plot.plot({
      width, height: 300, marginLeft: 48,
      x: { label: "round", tickFormat: "d", ticks: wholeTicks(rows, "round") }, y: { label: unit, grid: true, percent: share, nice: true },
      marks: [
        Plot.areaY(rows, { x: "round", y1: "low", y2: "high", z: "method", fill: (r) => colour[r.method], fillOpacity: 0.15 }),
        ...d3.groups(rows, (r) => r.method).map(([label, some]) => Plot.lineY(some, {
          x: "round", y: "mean", stroke: colour[label], strokeWidth: 2, strokeDasharray: dash(labels, label) })),
        Plot.dot(rows, { x: "round", y: "mean", r: 2.2, fill: (r) => colour[r.method], channels: { method: "method", seeds: "seeds" }, tip: { format: { x: "d", fill: false } } }),
      ],
    }),
  });
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const only = (colour, rows) => Object.fromEntries(Object.entries(colour).filter(([label]) => rows.some((r) => r.method === label)));

// Clients ------------------------------------------------------------------------------------------------------------

function boxChart(lines, colour) {
  const rows = lines.flatMap((line) => line.runs.flatMap((run) => (run.clients || []).map((accuracy) => ({ method: line.method, seed: run.seed, accuracy }))));
  if (!rows.length) return null;
  const labels = [...new Set(rows.map((r) => r.method))];
  const scale = METRIC.percent ? { percent: true, label: "%" } : { label: METRIC.name };
  return chart({
    title: `${capital(METRIC.name)} of each client`, name: "clients", rows,
    about: "Clients of all seeds, on their own test rows: median, quartiles, and dots for outliers.",
    draw: (width) => Plot.plot({
      width, height: 60 + 30 * labels.length, marginLeft: margin(labels),
      x: { ...scale, grid: true }, y: { label: null, domain: labels },
      marks: [Plot.boxX(rows, { x: "accuracy", y: "method", fill: (r) => colour[r.method], fillOpacity: 0.45, stroke: "currentColor" })],
    }),
  });
}

const margin = (labels) => Math.min(180, 20 + 7 * d3.max(labels, (l) => l.length));

function ownChart(runs, colour) {
  const rows = runs.flatMap((run) => run.clients.filter((c) => c.received && c.own).map((c) => ({
    method: run.label, client: c.name, received: c.received[METRIC.name], own: c.own[METRIC.name] })));
  if (!rows.length) return null;
  const share = METRIC.percent;
  const ends = share ? [0, 1] : d3.extent(rows.flatMap((r) => [r.received, r.own]));
  return chart({
    title: "Global against personal model, by client", name: "own-models", rows, colour: only(colour, rows),
    about: "One dot for each client, on its own test rows. Above the line, the client's own model is better than the one it received.",
    draw: (width) => Plot.plot({
      width, height: 320, marginLeft: 48, grid: true, x: { percent: share, label: "received model" }, y: { percent: share, label: "own model" },
      marks: [Plot.link([0], { x1: ends[0], y1: ends[0], x2: ends[1], y2: ends[1], stroke: "currentColor", strokeOpacity: 0.4 }),
        Plot.dot(rows, { x: "received", y: "own", stroke: (r) => colour[r.method], channels: { method: "method", client: "client" }, tip: { format: { stroke: false } } })],
    }),
  });
}

function partitionChart(run) {
  const clients = Object.keys(run.partition);
  if (!clients.length) return null;
  const names = run.classes.length ? run.classes : run.partition[clients[0]].map((_, k) => String(k));
  const rows = clients.flatMap((client) => run.partition[client].map((count, k) => ({ client, class: names[k], rows: count })));
  return chart({
    title: "Rows of each class at each client", name: "partition", rows,
    about: `Training rows; seed ${run.seed}. Darker is more.`,
    draw: (width) => Plot.plot({
      width, height: Math.min(900, 60 + Math.max(14, 300 / clients.length) * clients.length), marginLeft: margin(clients), padding: 0.05,
      x: { label: "class", domain: names }, y: { label: null, domain: clients }, color: { type: "sqrt", scheme: "blues", label: "rows", legend: true },
      marks: [Plot.cell(rows, { x: "class", y: "client", fill: "rows", tip: true })],
    }),
  });
}

// Cost ---------------------------------------------------------------------------------------------------------------

function paretoChart(lines, measure, colour) {
  const rows = lines.map((line) => ({ method: line.method, bytes: line.bytes, accuracy: line[`${measure}_mean`] })).filter((r) => r.accuracy !== null && r.accuracy !== undefined && r.bytes > 0);
  if (rows.length < 2) return null;
  let best = -1;
  const front = d3.sort(rows, (r) => r.bytes, (r) => -r.accuracy).filter((r) => r.accuracy > best && ((best = r.accuracy), true));
  for (const row of rows) row.front = front.includes(row);
  const share = METRIC.percent;
  return chart({
    title: `${capital(measureName(measure))} against bytes sent`, name: "pareto", rows, colour: only(colour, rows),
    about: "Up and left is better. The line joins the methods that no other beats in both. Methods that send nothing are left out.",
    draw: (width) => Plot.plot({
      width, height: 300, marginLeft: 48, grid: true, x: { type: "log", label: "bytes in all", tickFormat: bytes, ticks: 5 }, y: { percent: share, label: share ? "%" : null, nice: true },
      marks: [Plot.lineY(share ? front : [], { x: "bytes", y: "accuracy", curve: "step-after", stroke: "currentColor", strokeOpacity: 0.4 }),
        Plot.dot(rows, { x: "bytes", y: "accuracy", r: 6, fill: (r) => colour[r.method], channels: { method: "method" }, tip: { format: { fill: false, x: bytes } } })],
    }),
  });
}

function targetChart(lines, colour) {
  const rows = lines.filter((line) => line.target).map((line) => ({
    method: line.method, rounds: line.rounds_to_target, bytes: line.bytes_to_target, seeds_that_reach_it: line.seeds_rounds_to_target, seeds: line.seeds, target: line.target }));
  if (!rows.length) return null;
  const labels = rows.map((r) => r.method);
  return chart({
    title: `Rounds to ${METRIC.percent ? percent(rows[0].target) : number(rows[0].target)}`, name: "target", rows,
    about: "Median over seeds; seeds that never reach the target count as infinite. Bytes are in the CSV and the table.",
    draw: (width) => Plot.plot({
      width, height: 60 + 26 * labels.length, marginLeft: margin(labels), marginRight: 110, x: { label: "rounds", grid: true }, y: { label: null, domain: labels },
      marks: [Plot.barX(rows, { x: "rounds", y: "method", fill: (r) => colour[r.method], fillOpacity: 0.7 }),
        Plot.text(rows, { x: (r) => r.rounds ?? 0, y: "method", textAnchor: "start", dx: 6, fill: "currentColor",
          text: (r) => (r.rounds === null ? `not reached (${r.seeds_that_reach_it} of ${r.seeds} seeds)` : `${number(r.rounds)}, ${bytes(r.bytes)}`) })],
    }),
  });
}

function forestChart(lines, measure, reference, colour) {
  const key = `${measure}_difference`;
  const unit = METRIC.percent ? 100 : 1;
  const words = METRIC.percent ? "percentage points" : METRIC.name;
  const points = (v) => (v === null || v === undefined ? null : unit * v);
  const rows = lines.filter((line) => line[key] !== null && line[key] !== undefined).map((line) => ({
    method: line.method, difference: unit * line[key], low: points(line[`${key}_low`]), high: points(line[`${key}_high`]), p: line[`${key}_p`], verdict: line[`${key}_verdict`] }));
  if (!rows.length) return null;
  const labels = rows.map((r) => r.method);
  return chart({
    title: `Difference from ${reference}`, name: "forest", rows,
    about: `${capital(words)}${METRIC.percent ? ` of ${measureName(measure)}` : ""}, paired by seed, with 95 % intervals where there are enough seeds.`,
    draw: (width) => Plot.plot({
      width, height: 60 + 26 * labels.length, marginLeft: margin(labels), x: { label: words, grid: true, nice: true }, y: { label: null, domain: labels },
      marks: [Plot.ruleX([0]), Plot.ruleY(rows.filter((r) => r.low !== null), { y: "method", x1: "low", x2: "high", stroke: (r) => colour[r.method], strokeWidth: 2.5 }),
        Plot.dot(rows, { x: "difference", y: "method", r: 5, fill: (r) => colour[r.method], channels: { verdict: "verdict" }, tip: { format: { fill: false } } })],
    }),
  });
}
function phaseChart(runs) {
  const rows = runs.flatMap((run) => Object.entries(run.phases).map(([step, seconds]) => ({ method: run.label, phase: step, seconds })));
  if (!rows.length) return null;
  const labels = [...new Set(rows.map((r) => r.method))];
  return chart({
    title: "Training time by phase", name: "phases", rows, about: "Seconds of training in each step, all clients together.",
    draw: (width) => Plot.plot({
      width, height: 90 + 26 * labels.length, marginLeft: margin(labels), x: { label: "seconds", grid: true }, y: { label: null, domain: labels }, color: { legend: true, range: PALETTE },
      marks: [Plot.barX(rows, { x: "seconds", y: "method", fill: "phase", tip: true })],
    }),
  });
}

function trafficChart(runs) {
  const rows = runs.flatMap((run) => Object.entries(run.spent).flatMap(([round, [up, down]]) => [
    { method: run.label, part: round === "0" ? "before the first round" : "rounds, up", bytes: up },
    { method: run.label, part: round === "0" ? "before the first round" : "rounds, down", bytes: down }]));
  const sums = d3.flatRollup(rows, (some) => d3.sum(some, (r) => r.bytes), (r) => r.method, (r) => r.part).map(([method, part, sum]) => ({ method, part, bytes: sum })).filter((r) => r.bytes);
  if (!sums.length) return null;
  const labels = [...new Set(sums.map((r) => r.method))];
  return chart({
    title: "Traffic by phase", name: "traffic", rows: sums, about: "Bytes that clients sent (up) and received (down) in one run.",
    draw: (width) => Plot.plot({
      width, height: 90 + 26 * labels.length, marginLeft: margin(labels), x: { label: "bytes", grid: true, tickFormat: bytes, ticks: 5 }, y: { label: null, domain: labels }, color: { legend: true, range: PALETTE },
      marks: [Plot.barX(sums, { x: "bytes", y: "method", fill: "part", tip: { format: { x: bytes } } })],
    }),
  });
}

function confusionChart(run) {
  if (!run.confusion) return null;
  const names = run.classes.length ? run.classes : run.confusion.map((_, k) => String(k));
  const rows = run.confusion.flatMap((counts, k) => counts.map((count, j) => ({
    truth: names[k], predicted: names[j], count, share: count / Math.max(1, d3.sum(counts)) })));
  return chart({
    title: `Confusion matrix of ${run.label}`, name: "confusion", rows, about: `Global model, common test set, seed ${run.seed}. Shares of each true class.`,
    draw: (width) => Plot.plot({
      width: Math.min(width, 460), height: Math.min(width, 460), padding: 0.03, marginLeft: margin(names), x: { label: "predicted", domain: names }, y: { label: "true", domain: names },
      color: { scheme: "blues", label: "share", legend: true, percent: true },
      marks: [Plot.cell(rows, { x: "predicted", y: "truth", fill: "share", tip: true, channels: { count: "count" } }),
        names.length <= 12 ? Plot.text(rows.filter((r) => r.count), { x: "predicted", y: "truth", text: "count", fill: (r) => (r.share > 0.5 ? "white" : "black") }) : null],
    }),
  });
}
