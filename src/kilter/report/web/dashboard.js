"use strict";
(() => {
  const token = new URLSearchParams(location.search).get("token");
  const entries = new Map();
  const chosen = new Set();
  const main = document.getElementById("main");
  const said = document.getElementById("connection");
  const place = element("section", { "aria-label": "Comparison" });
  const sites = element("section", { "aria-label": "Sites" });
  const filter = element("input", { type: "search", placeholder: "Search runs", "aria-label": "Search runs", oninput: () => draw() });
  const inner = element("input", { type: "checkbox", onchange: () => draw() });
  const compare = element("button", { type: "button", text: "Compare", disabled: "", onclick: () => show() });
  const counts = element("span", { role: "status", class: "quiet" });
  const body = element("tbody");
  const heads = ["", "folder", "method", "data", "seed", "state", "progress", "time left", "loss", "global", "clients", "failures", "traffic"];
  themeButton();
  main.append(sites, element("h2", { text: "Runs and studies" }), element("div", { class: "controls" }, filter, element("label", {}, inner, "Runs of studies"), compare, counts),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs and studies" },
      element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((h, k) => (k ? element("th", { scope: "col", class: k < 4 ? "text" : undefined, text: h }) : element("td", {}))))), body)), place);

  const rows = new Map(); // folder -> [entry as text, row]
  function draw() {
    const wanted = filter.value.toLowerCase();
    const studies = [...entries.values()].filter((e) => e.kind === "study").map((e) => `${e.folder}/`);
    const shown = [...entries.values()].filter((e) => inner.checked || !studies.some((s) => e.folder.startsWith(s)));
    const list = shown.filter((e) => `${e.folder} ${e.method} ${e.data} ${e.state}`.toLowerCase().includes(wanted));
    list.sort((a, b) => (b.state === "running") - (a.state === "running") || b.updated - a.updated || a.folder.localeCompare(b.folder));
    body.replaceChildren(...list.map((e) => {
      const text = JSON.stringify(e);
      if (rows.get(e.folder)?.[0] !== text) rows.set(e.folder, [text, row(e)]);
      return rows.get(e.folder)[1];
    }));
    const running = list.filter((e) => e.state === "running").length;
    counts.textContent = `${list.length} shown, ${running} running`;
    compare.disabled = chosen.size === 0;
  }

  function row(e) {
    const box = element("input", { type: "checkbox", "aria-label": `Choose ${e.folder}`, onchange: () => {
      if (box.checked) chosen.add(e.folder); else chosen.delete(e.folder);
      compare.disabled = chosen.size === 0;
    } });
    box.checked = chosen.has(e.folder);
    const open = element("button", { type: "button", class: "link", text: e.folder, onclick: () => { chosen.clear(); chosen.add(e.folder); rows.clear(); draw(); show(); } });
    const done = e.rounds ? e.round / e.rounds : 0;
    const fill = element("div");
    fill.style.width = `${Math.min(100, 100 * done)}%`;
    const progress = e.kind === "study" ? `${e.round} runs` : `${e.round} of ${e.rounds || "?"}`;
    return element("tr", { "data-run": e.folder, "data-state": e.state }, element("td", {}, box), element("td", { class: "text" }, open), element("td", { class: "text", text: e.method }),
      element("td", { class: "text", text: e.data }), element("td", { text: e.seed ?? "" }), element("td", { class: e.state === "running" ? undefined : "quiet", text: e.state }),
      element("td", {}, progress, e.state === "running" && e.rounds ? element("div", { class: "bar", "aria-hidden": "true" }, fill) : null),
      element("td", { text: e.seconds_left === null ? "" : duration(e.seconds_left) }), element("td", { text: number(e.loss) }), element("td", { text: score(e, e.score) }),
      element("td", { text: score(e, e.client_score) }), element("td", { class: e.failures ? "warning" : undefined, text: e.failures || "" }), element("td", { text: e.bytes ? bytes(e.bytes) : "" }));
  }

  // Accuracies in per cent; other metrics with their name.
  const score = (e, value) => (value === null ? "" : e.metric === "accuracy" ? percent(value) : `${number(value)} ${e.metric}`);
  const duration = (s) => (s < 60 ? `${Math.round(s)} s` : s < 3600 ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s` : `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`);

  async function show() {
    const query = new URLSearchParams([["token", token], ...[...chosen].map((f) => ["folder", f])]);
    const answer = await fetch(`/compare?${query}`);
    if (!answer.ok) { place.replaceChildren(element("p", { class: "warning", role: "alert", text: await answer.text() })); return; }
    const { data, summaries } = await answer.json();
    place.replaceChildren(...data.comparisons.map((comparison, k) => comparisonView(comparison, summaries[k], runsOf(comparison, data.runs), `c${k}`)));
    for (const text of data.left_out) place.append(element("p", { class: "quiet", text: `Not shown: ${text}` }));
  }

  function status(now) {
    if (!now) return;
    const list = Object.entries(now.sites || {});
    sites.replaceChildren(element("h2", { text: "Sites" }), element("p", { text: `Round ${now.round} of ${now.rounds}, ${now.failures} failed calls, ${bytes(now.bytes_in)} received, ${bytes(now.bytes_out)} sent.` }),
      now.last_error ? element("p", { class: "warning", text: `Last error: ${now.last_error}` }) : "",
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Sites" }, element("table", { "data-table": "sites" },
        element("thead", {}, element("tr", {}, ...["site", "state", "last message", "last answer took", "failed calls", "received", "sent"].map((text) => element("th", { scope: "col", text })))),
        element("tbody", {}, ...list.map(([name, s]) => element("tr", {}, element("td", { text: name }), element("td", { class: s.connected ? undefined : "warning", text: s.connected ? "connected" : "away" }),
          element("td", { text: s.last_message === null ? "" : `${duration(s.last_message)} ago` }), element("td", { text: s.answer_seconds === null ? "" : `${number(s.answer_seconds)} s` }),
          element("td", { text: s.failures || "" }), element("td", { text: bytes(s.bytes_in) }), element("td", { text: bytes(s.bytes_out) })))))));
  }

  const events = new EventSource(`/events?token=${encodeURIComponent(token)}`);
  events.onopen = () => { said.textContent = "live"; };
  events.onerror = () => { said.textContent = "connection lost: trying again"; };
  events.onmessage = (message) => {
    const event = JSON.parse(message.data);
    for (const e of event.changed) entries.set(e.folder, e);
    for (const folder of event.gone) { entries.delete(folder); chosen.delete(folder); rows.delete(folder); }
    status(event.status);
    draw();
  };
})();
