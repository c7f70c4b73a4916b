"use strict";
// The views of one comparison, which the report and the dashboard share.

function chooser(text, options, change) {
  const select = element("select", { onchange: () => change(select.value) }, ...options.map(([value, shown]) => element("option", { value, text: shown })));
  return element("label", {}, text, select);
}

// The runs whose details belong to a comparison: those of a study's folder, or single runs with the same metric.
const runsOf = (comparison, runs) => runs.filter((run) => (comparison.folder ? run.folder.startsWith(comparison.folder) : run.metric === comparison.metric));

function comparisonView(comparison, summary, runs, key) {
  const cells = [...new Set(comparison.lines.map((line) => line.cell))];
  const labels = [...new Set(comparison.lines.map((line) => line.method))];
  const colour = colours(labels, comparison.reference);
  const metric = { name: comparison.metric, percent: comparison.in_percent };
  METRIC = metric;
  const measures = MEASURES.filter((m) => comparison.lines.some((line) => line[`${m}_mean`] !== null && line[`${m}_mean`] !== undefined));
  let [cell, measure] = [cells[0], measures[0] || "global"];
  const charts = element("div", { class: "grid" });
  const table = element("div");
  const inside = element("div");
  const draw = () => {
    METRIC = metric;
    const lines = comparison.lines.filter((line) => line.cell === cell);
    const here = runs.filter((run) => run.cell === cell);
    const first = here[0];
    charts.replaceChildren(...[
      curveChart(lines, measure, colour), curveChart(lines, "loss", colour), forestChart(lines, measure, comparison.reference, colour), boxChart(lines, colour),
      paretoChart(lines, measure, colour), targetChart(lines, colour), ownChart(here, colour), first ? partitionChart(first) : null, phaseChart(here), trafficChart(here),
    ].filter(Boolean));
    table.replaceChildren(resultTable(comparison, cells.length > 1 ? null : cell));
    inside.replaceChildren(here.length ? runView(here) : element("p", { class: "quiet", text: "Details of single runs are not here: build the report from the study's own folder, with its runs." }));
  };
  draw();
  return element("section", { id: key, "aria-labelledby": `${key}-title` },
    element("h2", { id: `${key}-title`, text: comparison.name }),
    comparison.about ? element("p", { text: comparison.about }) : null,
    element("p", { class: "summary", text: summary.join(" ") }),
    table,
    element("div", { class: "controls" },
      cells.length > 1 ? chooser("Setting", cells.map((c) => [c, c]), (v) => { cell = v; draw(); }) : null,
      measures.length > 1 ? chooser("Measure", measures.map((m) => [m, measureName(m)]), (v) => { measure = v; draw(); }) : null),
    charts,
    element("h3", { text: "Inside a run" }), inside,
    element("h3", { text: "What failed or did not happen" }), failureTable(comparison, runs),
    originView(comparison));
}

function runView(runs) {
  const place = element("div");
  const show = (folder) => {
    const run = runs.find((r) => r.folder === folder);
    place.replaceChildren(...[
      element("p", { class: "quiet", text: `${run.method}, seed ${run.seed}, ${run.rounds} rounds, ${number(run.seconds)} s on ${run.device || "an unknown device"}, topology ${run.topology}. Folder: ${run.folder}` }),
      insights(run), element("div", { class: "grid" }, ...[confusionChart(run)].filter(Boolean)), clientTable(run), settingsView(run),
    ].filter(Boolean));
  };
  const interesting = runs.find((r) => Object.keys(r.listens).length || r.exhibits.length) || runs[0];
  const choice = chooser("Run", runs.map((r) => [r.folder, `${r.label}, seed ${r.seed}`]), show);
  choice.querySelector("select").value = interesting.folder;
  show(interesting.folder);
  return element("div", { "data-runs": "" }, element("div", { class: "controls" }, choice), place);
}

function settingsView(run) {
  const text = Object.entries(run.settings).map(([k, v]) => `${k} = ${JSON.stringify(v)}`).join("\n");
  return element("details", {}, element("summary", { text: "Settings" }), element("pre", { class: "scroll", tabindex: "0", text }));
}

function originView(comparison) {
  const o = comparison.origin;
  if (!o.command) return null;
  const versions = Object.entries(o.versions).map(([k, v]) => `${k} ${v}`).join(", ");
  return element("details", {}, element("summary", { text: "How these results were made" }),
    element("p", { text: `${o.command}; commit ${o.commit}; ${o.date}; ${versions}; ${o.machine}; ${o.runs} runs, ${o.minutes} minutes of one core.` }));
}

function themeButton() {
  const button = document.getElementById("theme");
  const set = (dark) => {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "Light theme" : "Dark theme";
    button.setAttribute("aria-pressed", String(dark));
  };
  button.addEventListener("click", () => set(document.documentElement.dataset.theme !== "dark"));
  set(matchMedia("(prefers-color-scheme: dark)").matches);
}
