"""A hand-written loop in plain PyTorch, as one would write it for a paper; `--form channels_last` for the faster layout."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from work import BATCH, LR, MU, Watch, accuracy, network, order, rows, table, weighted_loss, weights

task = order()
work = task.work
torch.set_num_threads(task.threads)
layout = torch.channels_last if task.form == "channels_last" else torch.contiguous_format
x, y = (column.to(task.device) for column in table(task.folder, work.data, "train"))
mine = rows(work).to(task.device)
row_weights = weights(work).to(task.device) if work.method == "feddisk" else None
net = network(work.model).to(task.device, memory_format=layout)
state = {k: v.clone() for k, v in net.state_dict().items()}
control = {k: torch.zeros_like(v) for k, v in net.named_parameters()}  # SCAFFOLD's c
controls: dict[int, dict[str, Tensor]] = {}  # SCAFFOLD's c_i


def train(client: int) -> tuple[int, Tensor]:
    """One epoch at one client, from the weights in `net`: how many steps, and the sum of their losses."""
    optimiser = torch.optim.SGD(net.parameters(), lr=LR)
    own = controls.get(client) or {k: torch.zeros_like(v) for k, v in control.items()}
    steps, total = 0, torch.zeros((), device=task.device)  # no step waits for the device
    for at in torch.randperm(work.images, device=task.device).split(BATCH):
        batch = mine[client][at]
        outputs = net(x[batch].contiguous(memory_format=layout))
        if row_weights is None:
            loss = cross_entropy(outputs, y[batch])
        else:
            loss = weighted_loss(outputs, y[batch], row_weights[client][at])
        if work.method == "fedprox":
            loss = loss + MU / 2 * sum((w - state[k]).square().sum() for k, w in net.named_parameters())
        optimiser.zero_grad()
        loss.backward()
        if work.method == "scaffold":
            for k, w in net.named_parameters():
                w.grad += control[k] - own[k]
        optimiser.step()
        steps, total = steps + 1, total + loss.detach()
    if work.method == "scaffold":
        way = LR * steps
        new = {k: own[k] - control[k] + (state[k] - w.detach()) / way for k, w in net.named_parameters()}
        for k, c in changes.items():
            c += (new[k] - own[k]) / work.clients
        controls[client] = new
    return steps, total


watch = Watch()
for _ in range(work.rounds):
    summed = {k: torch.zeros_like(v) for k, v in state.items()}
    changes = {k: torch.zeros_like(v) for k, v in control.items()}
    steps, total = 0, torch.zeros((), device=task.device)
    for client in random.sample(range(work.clients), work.sampled):
        net.load_state_dict(state)
        done, loss = train(client)
        steps, total = steps + done, total + loss
        for k, v in net.state_dict().items():
            summed[k] += v / work.sampled
    state = summed
    control = {k: c + changes[k] for k, c in control.items()}
    watch.tick(steps, float(total) / steps)
net.load_state_dict(state)
watch.end(accuracy=accuracy(net, task.folder, work.data))
