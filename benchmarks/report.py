"""Build the report of a study with 500 runs and open it: seconds, megabytes, and seconds of scripting in Chromium.

Run it with `.venv/bin/python benchmarks/report.py`. The targets are 20 s, 8 MB and 2 s.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from kilter.report.html_report import write_report

CELLS, METHODS, SEEDS, ROUNDS, CLIENTS = 10, 10, 5, 100, 20


def study(folder: Path) -> None:
    """A results.json of the size that a study with 500 runs writes."""
    rng = np.random.default_rng(0)
    lines = []
    for cell in range(CELLS):
        for method in range(METHODS):
            runs = []
            for seed in range(SEEDS):
                curve = np.clip(0.9 - 0.8 * np.exp(-np.arange(1, ROUNDS + 1) / 20) + rng.normal(0, 0.02, ROUNDS), 0, 1)
                by_round = {str(t + 1): round(float(a), 6) for t, a in enumerate(curve)}
                names = ("global", "client", "local", "loss")
                runs.append(
                    {
                        "seed": seed,
                        "folder": f"run-{cell}-{method}-{seed}",
                        "accuracy": {name: by_round[str(ROUNDS)] for name in names[:3]},
                        "curves": dict.fromkeys(names, by_round),
                        "spent": {str(t): 1_000_000 for t in range(ROUNDS + 1)},
                        "clients": [round(float(a), 6) for a in rng.random(CLIENTS)],
                        "failures": 0,
                        "notices": [],
                    }
                )
            mean = float(np.mean([r["accuracy"]["global"] for r in runs]))
            line: dict[str, object] = {
                "cell": f"data-{cell}, dirichlet:0.1",
                "method": f"method-{method}",
                "seeds": SEEDS,
            }
            for name in names[:3]:
                line |= {f"{name}_mean": mean, f"{name}_std": 0.01, f"{name}_difference": 0.01 if method else None}
                line |= {f"{name}_difference_low": -0.01, f"{name}_difference_high": 0.03}
                line |= {f"{name}_difference_verdict": "no difference shown" if method else None}
            line |= {"target": 0.8, "rounds_to_target": 40, "seeds_rounds_to_target": 5, "bytes_to_target": 40_000_000}
            lines.append({**line, "bytes": 1e8 * (1 + method), "seconds": 12.0, "runs": runs})
    origin = {
        "command": "-",
        "preset": "",
        "commit": "-",
        "date": "-",
        "versions": {},
        "machine": "-",
        "runs": 500,
        "minutes": 1,
    }
    seeds = list(range(SEEDS))
    results = {"study": "large", **origin, "reference": "method-0", "seeds": seeds, "lines": lines, "failures": []}
    (folder / "results.json").write_text(json.dumps(results))


def scripting_seconds(page: Path) -> float | None:
    """Seconds of scripting until the page is drawn; None without Playwright and Chromium."""
    browser = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if browser is None:
        return None
    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        tab = chromium.new_page()
        session = tab.context.new_cdp_session(tab)
        session.send("Performance.enable")
        tab.goto(page.as_uri())
        tab.wait_for_selector("figure svg")
        tab.wait_for_timeout(1000)
        metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
        chromium.close()
        return float(metrics["ScriptDuration"])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        study(folder)
        began = time.perf_counter()
        write_report([folder], folder / "report.html")
        print(f"built in {time.perf_counter() - began:.1f} s (target 20)")
        print(f"size {(folder / 'report.html').stat().st_size / 1e6:.1f} MB (target 8)")
        seconds = scripting_seconds(folder / "report.html")
        print(
            "scripting: not measured, needs Playwright and Chromium"
            if seconds is None
            else f"scripting {seconds:.2f} s (target 2)"
        )


if __name__ == "__main__":
    main()
