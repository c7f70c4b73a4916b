"""Peers with tables exchange statistics without a server and fit one preparation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("grpc")

from place import free_ports
from rich.console import Console

from kilter.core import Tree
from kilter.data import Preparation, load
from kilter.data.preparation import fit_whole
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.net.audit import verify
from kilter.net.peer_preparation import PeerExchange, agree_on_preparation
from kilter.net.peer_run import PeerRun
from kilter.net.peer_transport import PeerTransport
from kilter.net.policy import PolicyViolation, SitePolicy
from kilter.records.run_folder import read_rounds, read_summary

NAMES = ("a", "b", "c")
POLICY = SitePolicy(approval="policy")
EXPERIMENT = {"model": "mlp:4", "rounds": 2, "topology": "ring", "data": "none", "local": {"lr": 0.5}}


@pytest.fixture
def addresses() -> dict[str, str]:
    return {name: f"127.0.0.1:{port}" for name, port in zip(NAMES, free_ports(3), strict=True)}


def write_tables(folder: Path) -> dict[str, Path]:
    """One table for each peer: other means, other orders of columns; `c` lacks a class, and `b` has more."""
    rng = np.random.default_rng(0)
    paths = {}
    for at, name in enumerate(NAMES):
        rows = ["age,ward,label" if at else "label,age,ward"]
        for k in range(60):
            label = ("ill", "well", "gone")[k % (3 if name == "b" else 2)]
            cells = [f"{rng.normal(40 + 10 * at, 5):.2f}", "XYZ"[k % (at + 1)], label]
            rows.append(",".join(cells if at else [cells[2], *cells[:2]]))
        paths[name] = folder / f"{name}.csv"
        paths[name].write_text("\n".join(rows) + "\n")
    return paths


def everyone(work: Callable[[str], object]) -> dict[str, object]:
    """Let all peers work at the same time; the results, or the exceptions."""
    results: dict[str, object] = {}

    def one(name: str) -> None:
        try:
            results[name] = work(name)
        except BaseException as error:
            results[name] = error

    threads = [threading.Thread(target=one, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def peer_run(name: str, paths: Mapping[str, Path], addresses: dict[str, str], policy: SitePolicy = POLICY) -> PeerRun:
    experiment = Experiment.of(EXPERIMENT)
    return PeerRun(experiment, name, addresses, str(paths[name]), None, str(paths[name].parent / f"run-{name}"), policy)


def test_peers_fit_the_preparation_of_the_pooled_rows_and_train_with_it(tmp_path, addresses):
    paths = write_tables(tmp_path)

    def work(name: str) -> str:
        run = peer_run(name, paths, addresses)
        with run.open(addresses[name], None, 2**24, None, 0, 60.0, 5.0) as fed:
            train = fed.clients[name].train.index
            run.run(fed, Console(quiet=True))
        return [run.dataset.raw["age"].cells[train.numpy()], train]

    results = everyone(work)
    assert not [r for r in results.values() if isinstance(r, BaseException)], results
    texts = {name: (tmp_path / f"run-{name}" / "preparation.toml").read_text() for name in NAMES}
    assert len(set(texts.values())) == 1
    preparation = Preparation.load(tmp_path / "run-a")
    assert preparation.classes == ("gone", "ill", "well")
    ages = np.concatenate([results[name][0] for name in NAMES])
    fitted = preparation.columns[0]
    assert fitted.count == len(ages)
    assert (fitted.mean, fitted.std) == pytest.approx((ages.mean(), ages.std()), rel=1e-12)
    summary = read_summary(tmp_path / "run-b")
    assert summary.rounds == 2
    assert read_rounds(tmp_path / "run-b")[0].bytes_up > 0  # the statistics
    kinds = [entry.kinds for entry in verify(tmp_path / "run-a" / "audit.jsonl")]
    assert kinds[:2] == ["schema", "schema"]
    assert kinds.count("statistics") == 2


@pytest.fixture
def exchanges(addresses) -> Iterator[dict[str, PeerExchange]]:
    transports = {name: PeerTransport(name, addresses, addresses[name], "run", None) for name in NAMES}
    yield {name: PeerExchange(transport, NAMES, 20.0) for name, transport in transports.items()}
    for transport in transports.values():
        transport.close()


def test_tables_that_do_not_fit_are_named_by_everyone(tmp_path, exchanges):
    paths = write_tables(tmp_path)
    paths["c"].write_text(paths["c"].read_text().replace("ward", "room"))
    results = everyone(lambda name: agree_on_preparation(exchanges[name], load(paths[name], prepare=False), 0, 0.1, 5))
    for result in results.values():
        assert isinstance(result, Mistake)
        assert "'ward'" in str(result)


def test_a_peer_that_tells_different_statistics_is_noticed(tmp_path, exchanges, monkeypatch):
    paths = write_tables(tmp_path)
    plain_send = exchanges["b"].transport.send

    def lying(at: object, letters: dict[str, tuple[object, bytes]]) -> None:
        from kilter.records import wire

        letter, body = letters["c"]
        told: Tree = wire.decode(body)
        if isinstance(told, dict) and "age" in told.get("columns", {}):
            told["columns"]["age"]["mean"] += 1.0
            letters = {**letters, "c": (letter, wire.encode(told))}
        plain_send(at, letters)

    monkeypatch.setattr(exchanges["b"].transport, "send", lying)
    results = everyone(lambda name: agree_on_preparation(exchanges[name], load(paths[name], prepare=False), 0, 0.1, 5))
    assert all(isinstance(r, Mistake) and "different statistics to different peers" in str(r) for r in results.values())


def test_a_missing_peer_is_named_after_the_deadline(exchanges):
    exchanges["a"].deadline = 0.3
    with pytest.raises(Mistake, match=r"No statistics came from 'b', 'c' within 0\.3 s: start these peers"):
        exchanges["a"].exchange({"x": 1}, "schema")


def test_a_policy_can_forbid_the_exchange(tmp_path, addresses):
    paths = write_tables(tmp_path)
    with pytest.raises(PolicyViolation, match="means and deviations"):
        peer_run("a", paths, addresses, replace(POLICY, sends=POLICY.sends - {"statistics"}))


def test_a_dataset_under_a_schema_with_more_classes_keeps_its_labels(tmp_path):
    paths = write_tables(tmp_path)
    data, other = load(paths["a"], prepare=False), load(paths["b"])
    assert other.schema is not None
    both = data.matching(replace(other.schema, columns=data.schema.columns))
    assert [both.classes[k] for k in both.y] == [data.classes[k] for k in data.y]
    assert fit_whole(both.raw, both.schema, both.train.numpy()).classes == ("gone", "ill", "well")
