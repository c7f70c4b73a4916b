"""The versions of a run that was extended under others."""

from __future__ import annotations

from kilter.records.versions import BEGAN_WITH, versions


def test_the_versions_that_began_a_run_are_kept() -> None:
    now = versions()
    assert BEGAN_WITH not in now
    assert versions(now) == now
    older = versions({**now, "torch": "2.6.0", "commit": "abc"})
    assert older == {**now, BEGAN_WITH: "torch 2.6.0, commit abc"}
    assert versions(older) == older  # extended again, under the same versions as the last time
    assert versions({**older, "numpy": "1.26"})[BEGAN_WITH] == "torch 2.6.0, commit abc; numpy 1.26"
    assert versions({"python": now["python"]}) == now  # an old record without a commit says nothing against it
