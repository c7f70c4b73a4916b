"""Flower: its message API, the FedAvg and FedProx strategies, the simulation runtime on Ray.

`--threads 1`: one actor; `--threads 2`: two actors, each with one thread. On a GPU the actors share it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PYTHONPATH"] = str(Path(__file__).parent)

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedProx
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy

from work import BATCH, LR, MU, Watch, Work, accuracy, network, order, rows, table, weighted_loss, weights

_at_hand: dict[str, Any] = {}  # in each actor: what it has read from the disk


def at_hand(work: Work, folder: Path, device: str) -> dict[str, Any]:
    if not _at_hand:
        torch.set_num_threads(1)
        _at_hand["x"], _at_hand["y"] = (column.to(device) for column in table(folder, work.data, "train"))
        _at_hand["rows"], _at_hand["net"] = rows(work).to(device), network(work.model).to(device)
        _at_hand["weights"] = weights(work).to(device) if work.method == "feddisk" else None
    return _at_hand


def client_app(work: Work, folder: Path, device: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        have = at_hand(work, folder, device)
        net, me = have["net"], int(context.node_config["partition-id"])
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        start = [w.detach().clone() for w in net.parameters()]
        optimiser = torch.optim.SGD(net.parameters(), lr=LR)
        steps, total = 0, torch.zeros((), device=device)  # no step waits for the device
        for at in torch.randperm(work.images, device=device).split(BATCH):
            batch = have["rows"][me][at]
            outputs = net(have["x"][batch])
            if have["weights"] is None:
                loss = cross_entropy(outputs, have["y"][batch])
            else:
                loss = weighted_loss(outputs, have["y"][batch], have["weights"][me][at])
            if work.method == "fedprox":
                mu = message.content["config"]["proximal-mu"]
                loss = loss + mu / 2 * sum((w - s).square().sum() for w, s in zip(net.parameters(), start, strict=True))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            steps, total = steps + 1, total + loss.detach()
        metrics = MetricRecord({"num-examples": work.images, "steps": steps, "loss": float(total) / steps})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


def watched(kind: type[FedAvg], watch: Watch) -> type[FedAvg]:
    """The strategy, which also says when a round has ended."""

    class Watched(kind):  # type: ignore[misc, valid-type]
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            replies = list(replies)
            aggregated = super().aggregate_train(server_round, replies)
            metrics = [next(iter(r.content.metric_records.values())) for r in replies if not r.has_error()]
            watch.tick(sum(m["steps"] for m in metrics), sum(m["loss"] for m in metrics) / max(1, len(metrics)))
            return aggregated

    return Watched


def main() -> None:
    task = order()
    work = task.work
    torch.set_num_threads(task.threads)
    watch = Watch()
    server_app = ServerApp()

    @server_app.main()
    def server(grid: Grid, context: Context) -> None:
        kind = watched(FedProx if work.method == "fedprox" else FedAvg, watch)
        more = {"proximal_mu": MU} if work.method == "fedprox" else {}
        strategy = kind(
            fraction_train=work.sampled / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.sampled,
            min_available_nodes=work.clients,
            **more,
        )
        net = network(work.model)
        result = strategy.start(grid, initial_arrays=ArrayRecord(net.state_dict()), num_rounds=work.rounds)
        net.load_state_dict(result.arrays.to_torch_state_dict())
        watch.end(accuracy=accuracy(net, task.folder, work.data))

    gpus = 1 / task.threads if task.device == "cuda" else 0.0
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": gpus}, "init_args": {"num_cpus": task.threads}}
    app = client_app(work, task.folder, task.device)
    run_simulation(server_app, app, num_supernodes=work.clients, backend_config=backend)


if __name__ == "__main__":
    main()
