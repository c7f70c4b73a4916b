"""The mathematics of the benchmark's tables, on made-up numbers: medians, better settings, ratios, refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True, scope="module")
def _path() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def run(peer: str, seconds: list[float], threads: int = 1, steps: int = 190, **more: Any) -> dict[str, Any]:
    rounds = [{"round": k + 1, "seconds": s, "steps": steps, "loss": 2.0 - k / 10} for k, s in enumerate(seconds)]
    base = {"work": "W1", "peer": peer, "threads": threads, "rounds": rounds, "accuracy": 0.5, "startup": 3.0}
    return base | {"rss": 100 * 2**20, "pss": 80 * 2**20} | more


def test_a_steady_round_is_the_median_without_the_first() -> None:
    import table

    assert table.steady(run("hand", [9.0, 1.0, 3.0, 2.0])) == 2.0
    assert table.steady(run("hand", [9.0])) == 9.0  # the only one counts


def test_lines_take_the_median_over_repetitions_and_say_the_spread() -> None:
    import table

    runs = [run("hand", [9, 1.0, 1.2], startup=3.0), run("hand", [9, 2.0, 2.2], startup=5.0, rss=300 * 2**20)]
    (line,) = table.lines([*runs, run("hand", [9, 4.0], startup=4.0)])
    assert (line.seconds, line.least, line.most) == pytest.approx((2.1, 1.1, 4.0))
    assert (line.startup, line.rss, line.times) == (4.0, 300 * 2**20, 3)
    assert line.loss == pytest.approx(1.8)  # of the last round


def test_ratios_compare_the_better_settings() -> None:
    import table

    runs = [run("kilter", [9, 1.0], 1), run("kilter", [9, 0.5], 2), run("flwr", [9, 6.0], 1), run("flwr", [9, 2.0], 2)]
    runs += [run("hand", [9, 1.5], 1), run("hand", [9, 1.8], 2), run("fluke", [9, 1.4], 1)]
    actual = table.lines(runs)
    assert table.ratios(actual) == pytest.approx({"flwr": 4.0, "hand": 3.0, "fluke": 2.8})
    v = table.verdict("W1", actual)
    assert (v["fastest"], v["flower_bar"], v["others_bar"]) == ("fluke", 3.0, 2.2)
    assert (v["flower"], v["others"]) == pytest.approx((4.0, 2.8))
    assert "met" in table.verdicts({"W1": actual})
    assert "MISSED" in table.verdicts({"W2": actual})  # whose bars are higher


def test_memory_is_compared_with_flower_and_what_was_not_measured_is_said() -> None:
    import table

    actual = table.lines([run("kilter", [9, 1.0], rss=10), run("flwr", [9, 1.0], rss=40)])
    assert table.verdict("W1", actual)["memory"] == 4.0
    alone = table.lines([run("kilter", [9, 1.0])])
    assert table.verdict("W1", alone)["flower"] is None
    assert "not measured" in table.verdicts({"W1": alone})
    assert table.ratios(table.lines([run("hand", [9, 1.0])])) == {}


def test_unequal_work_is_not_compared() -> None:
    import table

    table.check([run("hand", [1, 1]), run("flwr", [1, 1])], steps=190, rounds=2)
    with pytest.raises(table.Unequal, match="flwr with 1 did 180 steps in round 1, not 190"):
        table.check([run("hand", [1, 1]), run("flwr", [1, 1], steps=180)], steps=190, rounds=2)
    with pytest.raises(table.Unequal, match="did 1 rounds, not 2"):
        table.check([run("hand", [1])], steps=190, rounds=2)


def test_who_has_learnt_something_else_is_named() -> None:
    import table

    actual = table.lines([run("kilter", [1]), run("hand", [1]), run("pfl", [1], accuracy=0.1)])
    assert table.strangers(actual) == ["pfl with 1 has accuracy 0.10, the median is 0.50"]


def test_the_work_is_what_the_issue_says() -> None:
    import work

    assert [work.WORKS[w].steps for w in ("W1", "W2", "W3", "W4")] == [190, 200, 200, 160]
    one = work.WORKS["W2"]
    assert sorted(work.rows(one).flatten().tolist()) == list(range(60_000))  # every image is with one client
    assert work.rows(work.WORKS["G10000"]).shape == (10_000, 60)
    assert work.network("cnn")(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert sum(p.numel() for p in work.network("mlp").parameters()) == 784 * 64 + 64 + 64 * 10 + 10
    assert (
        sum(p.numel() for p in work.network("resnet").parameters()) == 11_173_962
    )  # ResNet-18 for 32x32 and 10 classes


def test_data_are_converted_as_kilter_reads_them(tmp_path: Path) -> None:
    import work

    pixels = np.arange(2 * 2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 2, 3)
    np.savez(tmp_path / "cifar10_25k.npz", x_train=pixels, y_train=[1, 0], x_test=pixels[:1], y_test=[1])
    work.convert(tmp_path, tmp_path, "cifar10")
    x, y = work.table(tmp_path, "cifar10", "train")
    assert x.shape == (2, 3, 2, 2)
    assert float(x[1, 2, 0, 1]) == pytest.approx(pixels[1, 0, 1, 2] / 255)
    assert y.tolist() == [1, 0]
    with pytest.raises(SystemExit, match="set KILTER_DATA"):
        work.convert(tmp_path, tmp_path, "mnist")
