"use strict";
(() => {
  const { data, summaries } = JSON.parse(document.getElementById("data").textContent);
  themeButton();
  const main = document.getElementById("main");
  data.comparisons.forEach((comparison, k) => {
    main.append(comparisonView(comparison, summaries[k], runsOf(comparison, data.runs), `c${k}`));
  });
  if (data.left_out.length) main.append(element("h2", { text: "Not shown" }), element("ul", {}, ...data.left_out.map((text) => element("li", { text }))));
  document.getElementById("contents").append(element("ul", {}, ...data.comparisons.map((c, k) => element("li", {}, element("a", { href: `#c${k}`, text: c.name })))));
})();
