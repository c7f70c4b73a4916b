"""The report in a real browser: every chart has data, controls work, nothing leaves the page, no serious accessibility fault."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Watched, chromium
from finished_runs import run

from kilter.report.html_report import write_report

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("report")
    for seed in (0, 1):
        run(home / "runs" / f"fedavg-{seed}", "fedavg", seed=seed)
        run(home / "runs" / f"feddisk-{seed}", "feddisk", seed=seed, settings={"density_rounds": 2, "own_epochs": 2})
    run(
        home / "runs" / "slfed",
        "slfed",
        clients=8,
        rounds=6,
        topology="full",
        settings={"gan_epochs": 1, "pictures": 4},
    )
    run(home / "runs" / "fedpdc", "fedpdc", public=2)
    run(home / "runs" / "fedsbme", "fedsbme", public=2, settings={"samples": 2, "server_epochs": 1})
    run(home / "runs" / "clustered", "clustered")
    write_report([home / "runs"], home / "report.html")
    return home / "report.html"


@pytest.fixture(scope="module")
def opened(report: Path) -> Iterator[Watched]:
    with chromium() as browser:
        watched = Watched(browser.new_page(viewport={"width": 1200, "height": 900}, accept_downloads=True))
        watched.page.goto(report.as_uri())
        watched.page.wait_for_selector("figure svg")
        yield watched


def choose_run(opened: Watched, label: str) -> None:
    select = opened.page.locator("[data-runs] select")
    value = select.locator("option", has_text=label).first.get_attribute("value")
    select.select_option(value)


def test_every_chart_has_data_and_nothing_leaves_the_page(opened: Watched) -> None:
    choose_run(opened, "fedavg")
    opened.page.wait_for_selector("[data-chart=confusion] svg")
    names = opened.page.eval_on_selector_all("figure", "all => all.map(f => f.dataset.chart)")
    assert {
        "curve-global",
        "curve-loss",
        "clients",
        "pareto",
        "forest",
        "partition",
        "phases",
        "traffic",
        "confusion",
    } <= set(names)
    marks = "all => all.map(f => [f.dataset.chart, f.querySelectorAll('svg path, svg circle, svg rect, svg line, img').length])"
    for name, count in opened.page.eval_on_selector_all("figure", marks):
        assert count > 2, name
    assert opened.errors == []
    assert [u for u in opened.requests if not u.startswith(("file:", "data:", "blob:"))] == []


def test_sort_and_filter(opened: Watched) -> None:
    table = opened.page.locator("[data-table=results]")
    table.locator("th button", has_text="seconds").click()
    methods = table.locator("tbody tr td:first-child")
    by_time = methods.all_inner_texts()
    table.locator("th button", has_text="seconds").click()
    assert methods.all_inner_texts() == by_time[::-1]
    table.locator("input[type=search]").fill("feddisk")
    assert methods.all_inner_texts() == ["feddisk"]
    table.locator("input[type=search]").fill("")
    assert len(methods.all_inner_texts()) == 6


def test_what_each_method_does(opened: Watched) -> None:
    choose_run(opened, "feddisk")
    assert opened.page.locator("[data-chart='exhibit sample weights'] svg rect").count() > 4
    choose_run(opened, "fedpdc")
    opened.page.wait_for_selector("[data-chart='exhibit score on public rows'] svg rect")
    choose_run(opened, "fedsbme")
    opened.page.wait_for_selector("[data-chart='exhibit loss on public rows'] svg rect")
    names = opened.page.locator("[data-chart='exhibit loss on public rows'] svg").last.text_content()
    assert "sample 2" in (names or "")
    choose_run(opened, "clustered")
    opened.page.wait_for_selector("[data-chart='exhibit cluster'] svg rect")
    choose_run(opened, "slfed")
    assert opened.page.locator("[data-chart='exhibit synthetic pictures'] img").count() >= 8


def test_the_slider_changes_the_round(opened: Watched) -> None:
    choose_run(opened, "slfed")
    slider = opened.page.locator("[data-trust] input[type=range]")
    assert int(slider.get_attribute("max") or 0) >= 1
    before = opened.page.locator("[data-trust] output").inner_text()
    slider.fill("0")
    assert opened.page.locator("[data-trust] output").inner_text() != before
    opened.page.wait_for_selector("[data-chart=trust-network] svg path")


def test_charts_can_be_saved(opened: Watched, tmp_path: Path) -> None:
    for kind, start in (("SVG", b"<svg"), ("PNG", b"\x89PNG"), ("CSV", b"method,round,mean")):
        with opened.page.expect_download() as saved:
            opened.page.locator(f"[data-chart=curve-global] [data-save={kind}]").click()
        path = tmp_path / kind
        saved.value.save_as(path)
        assert path.read_bytes().startswith(start), kind
    rows = list(csv.DictReader((tmp_path / "CSV").open()))
    assert {row["method"] for row in rows} >= {"fedavg", "feddisk"}
    assert all(0 <= float(row["mean"]) <= 1 for row in rows)


def test_theme_phone_and_print(opened: Watched) -> None:
    page = opened.page
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.click("#theme")
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.emulate_media(media="print")
    assert not page.locator("#theme").is_visible()
    page.emulate_media(media="screen")
    page.set_viewport_size({"width": 1200, "height": 900})
    assert opened.errors == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_serious_accessibility_fault(opened: Watched, theme: str) -> None:
    page = opened.page
    page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
    page.evaluate((Path(__file__).with_name("axe.min.js")).read_text())
    violations = page.evaluate("axe.run().then(result => result.violations)")
    serious = [v for v in violations if v["impact"] in ("serious", "critical")]
    assert [(v["id"], v["nodes"][0]["html"][:200], v["nodes"][0]["failureSummary"][:300]) for v in serious] == []
