"""Sites with tables: columns are matched by name, statistics leave only after approval, and what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from place import Place
from sites import AUTOMATIC, ask, make_terms, order

from kilter import data as kdata
from kilter.data import Preparation, Schema
from kilter.data.preparation import ImagePreparation, fit
from kilter.errors import Mistake
from kilter.net.approvals import NotApproved
from kilter.net.audit import verify
from kilter.net.data_description import DataDescription
from kilter.net.policy import PolicyViolation, SitePolicy
from kilter.net.site import Site
from kilter.net.terms import Terms, agree_on_data, difference
from kilter.records.wire import Malformed

NAMES = ("age", "sex", "label")


def write_table(path: Path, names: tuple[str, ...] = NAMES, shift: int = 0, count: int = 40) -> Path:
    lines = [",".join(names)]
    for i in range(count):
        cells = {"age": str(shift + i), "sex": "fm"[i % 2], "label": "no" if i < count // 2 else "yes", "ward": "1"}
        lines.append(",".join(cells[name] for name in names))
    path.write_text("\n".join(lines) + "\n")
    return path


def table_site(path: Path, policy: SitePolicy = AUTOMATIC) -> Site:
    dataset = kdata.load(path, prepare=False)
    return Site(path.stem, dataset, path.parent / f"state-{path.stem}", policy, data_path=str(path))


def test_sites_agree_on_columns_whatever_their_order(tmp_path: Path) -> None:
    paths = [write_table(tmp_path / "a.csv"), write_table(tmp_path / "b.csv", NAMES[::-1], shift=100)]
    agreed, different = agree_on_data({path.stem: DataDescription.of(kdata.load(path)) for path in paths})
    assert different == []
    assert agreed.schema is not None
    assert [c.name for c in agreed.schema.columns] == ["age", "sex"]


def test_a_hello_names_columns_and_kinds_and_no_statistic(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.csv", shift=4711)
    site = table_site(path)
    described = json.dumps(site.hello().head()["data"])
    assert json.loads(described) == {
        "shape": [2],
        "classes": ["no", "yes"],
        "normalised": False,
        "schema": {
            "target": "label",
            "classes": ["no", "yes"],
            "columns": [{"name": "age", "kind": "number"}, {"name": "sex", "kind": "category"}],
        },
    }
    site.close()


def test_statistics_leave_after_approval_only_and_are_in_the_audit_log(tmp_path: Path) -> None:
    site = table_site(write_table(tmp_path / "a.csv"), SitePolicy())  # a person approves
    terms = make_terms(site)
    with pytest.raises(NotApproved):
        site.agree(terms)
    assert [entry.event for entry in verify(site.audit.path)] == []
    site.approvals.add(terms.digest, "test")
    site.agree(terms)
    _, statistics = ask(site, order(":summarise", round=0))
    assert statistics["columns"]["sex"]["values"] == {"f": 11, "m": 15}
    last = list(verify(site.audit.path))[-1]
    assert (last.event, last.kinds, last.approval) == ("reply", "statistics", terms.digest)
    site.close()


def test_a_policy_can_forbid_statistics(tmp_path: Path) -> None:
    site = table_site(write_table(tmp_path / "a.csv"), replace(AUTOMATIC, sends=AUTOMATIC.sends - {"statistics"}))
    with pytest.raises(PolicyViolation, match="means and deviations"):
        site.agree(make_terms(site))
    with pytest.raises(PolicyViolation, match="does not allow statistics"):
        site.statistics()
    site.close()


def test_statistics_of_few_rows_do_not_leave(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("age,rare,label\n" + "".join(f"{i},{'77' if i == 3 else ''},{i % 2}\n" for i in range(40)))
    site = table_site(path)
    site.agree(make_terms(site))
    assert site.statistics()["columns"]["rare"] == {"count": 0}  # type: ignore[index]
    site.close()


def test_orders_come_after_the_preparation_and_statistics_before_it(tmp_path: Path) -> None:
    site = table_site(write_table(tmp_path / "a.csv"))
    terms = make_terms(site)
    site.agree(terms)
    reply, _ = ask(site, order("train"))
    assert "not prepared yet" in reply.error
    _, statistics = ask(site, order(":summarise", round=0))
    schema = terms.description.schema
    assert schema is not None
    preparation = fit(schema, [statistics])
    site.agree(Terms.parse(replace(terms, preparation=preparation).head()))
    assert site.data.train["x"].shape[1:] == preparation.shape
    reply, _ = ask(site, order(":summarise", round=0, seq=2))
    assert "has them already" in reply.error
    with pytest.raises(Mistake, match="changed the preparation"):
        site.agree(terms)
    site.close()


def test_a_preparation_for_other_columns_is_refused(tmp_path: Path) -> None:
    site = table_site(write_table(tmp_path / "a.csv"))
    terms = make_terms(site)
    other = kdata.load(write_table(tmp_path / "b.csv", ("age", "label"))).preparation
    for preparation in (other, ImagePreparation((0.5,), (0.1,))):
        with pytest.raises(Malformed, match="other columns or channels"):
            site.agree(replace(terms, preparation=preparation))
    site.close()


def test_a_site_with_reordered_columns_prepares_the_same_rows(tmp_path: Path) -> None:
    server = kdata.load(write_table(tmp_path / "server.csv", shift=7))
    rows = []
    for path in (write_table(tmp_path / "a.csv"), write_table(tmp_path / "b.csv", NAMES[::-1])):
        site = table_site(path)
        terms = replace(make_terms(site), description=DataDescription.of(server), preparation=server.preparation)
        site.consider(terms)
        rows.append(site.dataset.x)
        site.close()
    assert torch.equal(rows[0], rows[1])
    assert rows[0][0, 0] < rows[0][39, 0]


@pytest.mark.parametrize(
    ("names", "message"),
    [(("age", "label"), "column 'sex' is missing"), ((*NAMES, "ward"), "column 'ward' is not expected")],
)
def test_other_columns_are_named(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    usual = DataDescription.of(kdata.load(write_table(tmp_path / "0.csv")))
    site = table_site(write_table(tmp_path / "1.csv", names))
    assert message in difference(usual, DataDescription.of(site.dataset))
    with pytest.raises(Mistake, match=message):
        site._match_table(usual)
    site.close()


def test_a_table_needs_terms_with_columns(tmp_path: Path) -> None:
    site = table_site(write_table(tmp_path / "a.csv"))
    described = DataDescription.of(site.dataset)
    with pytest.raises(Mistake, match="the terms name no columns"):
        site._match_table(replace(described, schema=None))
    site.dataset = kdata.load("digits")
    with pytest.raises(Mistake, match="this site has arrays"):
        site._match_table(described)
    site.close()


def test_a_description_survives_the_wire_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    description = DataDescription.of(kdata.load(write_table(tmp_path / "a.csv")))
    assert DataDescription.parse(description.plain()) == description
    with pytest.raises(Malformed, match="another shape"):
        DataDescription.parse({**description.plain(), "shape": [3]})
    with pytest.raises(Malformed, match="impossible schema"):
        DataDescription.parse({**description.plain(), "schema": {"target": "label"}})
    with pytest.raises(Malformed, match="normalised"):
        DataDescription.parse({**description.plain(), "normalised": True})


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
    assert here.rounds()[0]["bytes_up"] > 0  # the statistics
    assert Schema.read(here.folder / "run" / "schema.toml").names == ("age", "sex")
    age = Preparation.load(here.folder / "run").columns[0]
    assert age.count == 2 * 26
    assert age.mean == pytest.approx(70, abs=3)
    assert age.std == pytest.approx(np.std([*range(40), *range(100, 140)]), rel=0.1)


def test_time_series_named_by_the_experiment_or_by_a_site_are_those_of_all_sites(place: Callable[..., Place]) -> None:
    here = place(method="fedavg", rounds=1, sites=("a", "b"), model="auto", prepare="clip=0.01")
    for name in here.sites:
        more = ",1" if name == "b" else ""  # a column that b leaves out
        lines = [f"{i % 7},{i},{'xy'[i % 2]},{i % 5}{more}" for i in range(60)]
        header = "hr_1,age,sick,hr_0" + (",ward" if more else "")
        (here.folder / f"{name}.csv").write_text(header + "\n" + "\n".join(lines) + "\n")
    server = here.serve("--data", "none")
    here.join("a", "--data", "a.csv", "--label", "sick", "--test-size", "0.5")
    here.join("b", "--data", "b.csv", "--label", "sick", "--series", "hr_*", "--drop", "ward")
    server.wait()
    preparation = Preparation.load(here.folder / "run")
    assert [(c.name, c.series, c.clip) for c in preparation.schema.columns] == [
        ("hr_0", "hr", 0.01),
        ("hr_1", "hr", 0.01),
        ("age", "", 0.01),
    ]
    assert preparation.shape == (2, 2, 1)
    assert preparation.columns[0].count == 2 * (24 + 38)  # training rows of a series: both columns of both sites


def test_a_site_reports_skipped_images_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    from kilter.records import wire

    monkeypatch.setenv("KILTER_CACHE", str(tmp_path / "cache"))
    for at in range(40):
        path = tmp_path / "images" / "ab"[at % 2] / f"{at}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (at, 0, 100)).save(path)
    (tmp_path / "images" / "a" / "bad.png").write_bytes(b"not an image")
    dataset = kdata.load(tmp_path / "images", prepare=False)
    site = Site("a", dataset, tmp_path / "state", AUTOMATIC, data_path=str(tmp_path / "images"))
    site.agree(make_terms(site))
    for seq, expected in ((1, [{"notice": "an image could not be read and was skipped"}]), (2, [])):
        _, body = site.carry_out(order(":summarise", round=0, seq=seq), wire.encode(None))
        assert wire.decode(body)["notes"] == expected
    site.close()
