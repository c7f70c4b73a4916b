"""What `--precision bf16` costs on this CPU: seconds of one training step of ResNet-18 on 16 images, one thread, in turns.

python benchmarks/precision_step.py
"""

from __future__ import annotations

import time

import torch
from torch.nn.functional import cross_entropy

from kilter.models import build
from kilter.records.versions import cpu


def main() -> None:
    torch.set_num_threads(1)
    network, x, y = build("resnet18", (3, 32, 32), 10), torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    print(cpu())
    for precision in ("fp32", "bf16") * 2:
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = cross_entropy(network(x), y)
        loss.backward()
        print(f"{precision} {time.perf_counter() - began:.2f} s", flush=True)


if __name__ == "__main__":
    main()
