"""docs/how-to/hub.md, run from top to bottom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_deploy import run_page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_page_works(tmp_path: Path) -> None:
    printed = run_page("how-to/hub.md", tmp_path, ("9743", "9744"))
    assert "Job 1 is finished." in printed
    assert "Job 2 is finished." in printed
    assert "here: hospital-a, hospital-b" in printed
    assert 'kilter_hub_jobs{state="finished"} 4.0' in printed
    assert json.loads((tmp_path / "fetched/summary.json").read_text())["failures"] == 0
    assert "fedprox" in (tmp_path / "study/table.md").read_text()
