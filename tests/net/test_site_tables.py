"""Sites with tables: columns are matched by name, and what does not fit is named at the site and at the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from place import Place

from kilter import data as kdata
from kilter.data import Schema
from kilter.errors import Mistake
from kilter.net.data_description import DataDescription
from kilter.net.site import Site
from kilter.net.terms import agree_on_data, describe, describe_own, difference
from kilter.records.wire import Malformed

NAMES = ("age", "sex", "label")


def write_table(path: Path, names: tuple[str, ...] = NAMES, shift: int = 0, count: int = 40) -> Path:
    lines = [",".join(names)]
    for i in range(count):
        cells = {"age": str(shift + i), "sex": "fm"[i % 2], "label": "no" if i < count // 2 else "yes", "ward": "1"}
        lines.append(",".join(cells[name] for name in names))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_sites_agree_on_pooled_moments_whatever_the_order_of_columns(tmp_path: Path) -> None:
    paths = [write_table(tmp_path / "a.csv"), write_table(tmp_path / "b.csv", NAMES[::-1], shift=100)]
    own = {path.stem: describe_own(kdata.load(path)) for path in paths}
    agreed, different = agree_on_data(own)
    assert different == []
    (tmp_path / "both").mkdir()
    write_table(tmp_path / "both" / "a.csv")
    write_table(tmp_path / "both" / "b.csv", shift=100)
    pooled = kdata.load(tmp_path / "both").schema
    assert agreed.schema is not None
    assert pooled is not None
    assert [c.name for c in agreed.schema.columns] == ["age", "sex"]
    assert agreed.schema.columns[0].count == pooled.columns[0].count == 64
    assert agreed.schema.columns[0].mean == pytest.approx(70, abs=2)
    assert agreed.schema.columns[0].std == pytest.approx(pooled.columns[0].std, rel=0.05)


def test_a_site_with_reordered_columns_prepares_the_same_rows(tmp_path: Path) -> None:
    plain, turned = write_table(tmp_path / "a.csv"), write_table(tmp_path / "b.csv", NAMES[::-1])
    agreed = describe(kdata.load(write_table(tmp_path / "server.csv", shift=7)))
    rows = []
    for path in (plain, turned):
        site = Site(path.stem, kdata.load(path), tmp_path / f"state-{path.stem}", data_path=str(path))
        site._match_table(agreed)
        rows.append(site.dataset.x)
        site.close()
    assert torch.equal(rows[0], rows[1])
    assert rows[0][0, 0] < rows[0][39, 0]


@pytest.mark.parametrize(
    ("names", "message"),
    [(("age", "label"), "column 'sex' is missing"), ((*NAMES, "ward"), "column 'ward' is not expected")],
)
def test_other_columns_are_named(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    usual, other = (kdata.load(write_table(tmp_path / f"{k}.csv", n)) for k, n in enumerate((NAMES, names)))
    assert message in difference(describe_own(usual), describe_own(other))
    site = Site("s", other, tmp_path / "state", data_path=str(tmp_path / "1.csv"))
    with pytest.raises(Mistake, match=message):
        site._match_table(describe(usual))
    site.close()


def test_a_table_needs_terms_with_columns(tmp_path: Path) -> None:
    table = kdata.load(write_table(tmp_path / "a.csv"))
    site = Site("s", table, tmp_path / "state", data_path=str(tmp_path / "a.csv"))
    with pytest.raises(Mistake, match="the terms name no columns"):
        site._match_table(replace(describe(table), schema=None))
    site.dataset = kdata.load("digits")
    with pytest.raises(Mistake, match="this site has arrays"):
        site._match_table(describe(table))
    site.close()


def test_means_of_few_values_do_not_leave_a_site(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("age,rare,label\n" + "".join(f"{i},{'77' if i == 3 else ''},{i % 2}\n" for i in range(40)))
    assert "77" not in str(describe_own(kdata.load(path)).schema)


def test_a_description_survives_the_wire_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    description = describe(kdata.load(write_table(tmp_path / "a.csv")))
    assert DataDescription.parse(description.plain()) == description
    with pytest.raises(Malformed, match="another shape"):
        DataDescription.parse({**description.plain(), "shape": [3]})
    with pytest.raises(Malformed, match="impossible schema"):
        DataDescription.parse({**description.plain(), "schema": {"target": "label"}})


def test_a_run_with_tables_leaves_out_the_site_that_does_not_fit(place: Callable[..., Place]) -> None:
    here = place(method="fedavg", rounds=1)
    write_table(here.folder / "a.csv")
    write_table(here.folder / "b.csv", NAMES[::-1], shift=100)
    write_table(here.folder / "c.csv", ("age", "label"))
    server = here.serve("--data", "none", "--quorum", "2", "--grace", "1")
    here.join("a", "--data", "a.csv")
    server.until("a is here")
    assert "column 'sex' is missing" in here.join("c", "--data", "c.csv").wait(code=2)
    here.join("b", "--data", "b.csv")
    server.wait()
    assert here.rounds()[-1]["participants"] == ["a", "b"]
    assert Schema.read(here.folder / "run" / "schema.toml").names == ("age", "sex")
