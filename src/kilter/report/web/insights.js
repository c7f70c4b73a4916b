"use strict";
// What a method does inside: whom peers trust, what rows weigh, how models score, which clusters form.

function insights(run) {
  const parts = [trustView(run), ...exhibitViews(run), ...seriesViews(run), variantView(run)].filter(Boolean);
  if (!parts.length) return null;
  return element("div", { class: "grid", "data-insights": run.label }, ...parts);
}

// Peers' trust by round, with a slider -------------------------------------------------------------------------------

function trustView(run) {
  const rounds = Object.keys(run.listens).map(Number).sort((a, b) => a - b);
  if (!rounds.length) return null;
  const peers = [...new Set(rounds.flatMap((t) => Object.entries(run.listens[t]).flatMap(([node, from]) => [node, ...Object.keys(from)])))];
  peers.sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  const label = element("output", {});
  const slider = element("input", { type: "range", min: 0, max: rounds.length - 1, value: rounds.length - 1, "aria-label": "Round" });
  const place = element("div", { class: "grid" });
  const show = () => {
    const round = rounds[Number(slider.value)];
    label.textContent = `round ${round}`;
    place.replaceChildren(trustMatrix(run, round, peers), trustGraph(run, round, peers));
  };
  slider.addEventListener("input", show);
  show();
  return element("div", { class: "wide", style: "grid-column: 1 / -1", "data-trust": "" },
    element("div", { class: "controls" }, element("label", {}, `Who listens to whom (${run.label}): `, slider), label), place);
}

function shares(run, round) {
  return Object.entries(run.listens[round]).flatMap(([listener, from]) => {
    const whole = 1 + d3.sum(Object.values(from)); // its own model has weight 1
    return Object.entries(from).map(([source, weight]) => ({ listener, source, share: weight / whole }));
  });
}

function trustMatrix(run, round, peers) {
  const rows = shares(run, round);
  return chart({
    title: `Shares of others' models, round ${round}`, name: "trust-matrix", rows, about: "How much of a peer's next model comes from each other peer.",
    draw: (width) => Plot.plot({
      width, height: Math.min(width, 420), marginLeft: margin(peers), padding: 0.05, x: { label: "source", domain: peers, tickRotate: -45 }, y: { label: null, domain: peers },
      color: { scheme: "blues", label: "share", legend: true, percent: true }, marginBottom: 50, marks: [Plot.cell(rows, { x: "source", y: "listener", fill: "share", tip: true })],
    }),
  });
}

function trustGraph(run, round, peers) {
  const rows = d3.groups(shares(run, round), (r) => r.listener).flatMap(([, some]) => d3.sort(some, (r) => -r.share).slice(0, 3));
  const at = Object.fromEntries(peers.map((peer, k) => [peer, [Math.cos((2 * Math.PI * k) / peers.length), Math.sin((2 * Math.PI * k) / peers.length)]]));
  return chart({
    title: `Trust network, round ${round}`, name: "trust-network", rows, about: "Arrows lead from a source to the peers that listen to it most (three for each peer); thicker is more.",
    draw: (width) => Plot.plot({
      width, height: Math.min(width, 420), axis: null, margin: 30, x: { domain: [-1.15, 1.15] }, y: { domain: [-1.15, 1.15] },
      marks: [Plot.arrow(rows, { x1: (r) => at[r.source][0], y1: (r) => at[r.source][1], x2: (r) => at[r.listener][0], y2: (r) => at[r.listener][1], bend: true, inset: 12, stroke: "#0072B2", strokeWidth: (r) => 0.5 + 6 * r.share, strokeOpacity: 0.7 }),
        Plot.dot(peers, { x: (p) => at[p][0], y: (p) => at[p][1], r: 9, fill: "var(--panel)", stroke: "currentColor" }),
        Plot.text(peers, { x: (p) => 1.1 * at[p][0], y: (p) => 1.1 * at[p][1], text: (p) => p })],
    }),
  });
}

// What a method exhibits ---------------------------------------------------------------------------------------------

function exhibitViews(run) {
  const groups = d3.groups(run.exhibits, ([, exhibit]) => exhibit.name);
  return groups.flatMap(([name, some]) => {
    if (some[0][1].values) return [valuesView(run, name, some)];
    if (some[0][1].histogram) return [rowsView(run, name, some)];
    return [picturesView(run, name, some)];
  });
}

function valuesView(run, name, some) {
  const rows = some.flatMap(([round, exhibit]) => Object.entries(exhibit.values).map(([key, value]) => ({ round, node: exhibit.node, name: key, value })));
  const rounds = [...new Set(rows.map((r) => r.round))];
  const names = [...new Set(rows.map((r) => r.name))];
  const nodes = [...new Set(rows.map((r) => r.node))];
  const title = `${capital(name)} (${run.label})`;
  if (nodes.length > 1) { // a distribution by node
    return chart({ title, name: `exhibit ${name}`, rows, wide: names.length > 12,
      draw: (width) => Plot.plot({ width, height: 60 + 22 * nodes.length, marginLeft: margin(nodes), padding: 0.05, y: { label: null, domain: nodes }, x: { label: null, domain: names },
        color: { scheme: "blues", legend: true, label: name }, marks: [Plot.cell(rows.filter((r) => r.round === d3.max(rounds)), { x: "name", y: "node", fill: "value", tip: true })] }) });
  }
  if (rounds.length === 1) {
    return chart({ title, name: `exhibit ${name}`, rows,
      draw: (width) => Plot.plot({ width, height: 60 + 22 * names.length, marginLeft: margin(names), x: { grid: true, label: name }, y: { label: null, domain: names },
        marks: [Plot.barX(rows, { x: "value", y: "name", fill: PALETTE[0], fillOpacity: 0.75, tip: true })] }) });
  }
  return chart({ title, name: `exhibit ${name}`, rows, about: "One row for each name, one column for each round.",
    draw: (width) => Plot.plot({ width, height: 70 + 20 * names.length, marginLeft: margin(names), padding: 0.03, x: { label: "round", type: "band", tickFormat: "d", ticks: 12 }, y: { label: null, domain: names },
      color: name === "cluster" ? { type: "categorical", range: PALETTE, legend: true } : { scheme: "blues", legend: true, label: name },
      marks: [Plot.cell(rows, { x: "round", y: "name", fill: "value", tip: true })] }) });
}

function rowsView(run, name, some) {
  const rows = some.flatMap(([, e]) => e.histogram.counts.map((count, k) => ({ client: e.node, low: e.histogram.edges[k], high: e.histogram.edges[k + 1], count })));
  const histogram = chart({ title: `${capital(name)} (${run.label})`, name: `exhibit ${name}`, rows, about: "One histogram for each client, over its training rows.",
    draw: (width) => Plot.plot({ width, height: 60 + 34 * some.length, marginLeft: 10, marginRight: 70, fy: { label: null, axis: "right" }, x: { label: name }, y: { axis: null },
      marks: [Plot.rectY(rows, { x1: "low", x2: "high", y: "count", fy: "client", fill: PALETTE[0], insetLeft: 0.5, tip: true }), Plot.ruleY([0])] }) });
  const extremes = some.map(([, e]) => element("details", { open: some.length <= 2 ? "" : undefined }, element("summary", { text: `${e.node}: rows with the largest and the smallest values` }),
    e.pictures.length ? pictures(e.pictures) : element("p", { class: "quiet", text: e.rows.join("; ") })));
  return element("div", {}, histogram, ...extremes.slice(0, 12));
}

function picturesView(run, name, some) {
  return element("figure", { "data-chart": `exhibit ${name}`, class: "wide" }, element("figcaption", {}, element("h3", { text: `${capital(name)} (${run.label})` })),
    element("div", { class: "grid" }, ...some.slice(0, 30).map(([round, e]) => element("div", {}, element("p", { class: "quiet", text: `${e.node}, round ${round}` }), pictures(e.pictures)))));
}

function pictures(list) {
  return element("div", { class: "pictures" }, ...list.map((p) => element("div", {}, element("img", { src: `data:image/png;base64,${p.png}`, alt: p.caption || "picture" }), p.caption)));
}

function seriesViews(run) {
  return Object.entries(run.series).map(([name, nodes]) => {
    const rows = Object.entries(nodes).flatMap(([node, line]) => Object.entries(line).map(([at, value]) => ({ node, at: Number(at), value })));
    return chart({ title: `${capital(name)} (${run.label})`, name: `series ${name}`, rows, about: Object.keys(nodes).length > 1 ? "Thin: each node. Thick: their mean." : "",
      draw: (width) => Plot.plot({ width, height: 260, marginLeft: 55, x: { label: "round", tickFormat: "d", ticks: wholeTicks(rows, "at") }, y: { label: null, grid: true, nice: true },
        marks: [Plot.lineY(rows, { x: "at", y: "value", z: "node", stroke: "currentColor", strokeOpacity: 0.25 }),
          Plot.lineY(rows, Plot.groupX({ y: "mean" }, { x: "at", y: "value", stroke: PALETTE[0], strokeWidth: 2.5 })),
          Plot.dot(rows, { x: "at", y: "value", r: 1.5, fill: "currentColor", channels: { node: "node" }, tip: true })] }) });
  });
}

function variantView(run) {
  const names = Object.keys(run.variants);
  if (!names.length) return null;
  const metrics = Object.keys(run.variants[names[0]]);
  const rows = names.map((name) => ({ name, ...run.variants[name] }));
  return element("div", {}, dataTable({ caption: `Other results of ${run.label}`, rows, name: "variants",
    columns: [{ key: "name", title: "model", text: true }, ...metrics.map((m) => ({ key: m, title: m, show: (v) => number(v, 4) }))] }));
}
