"""Augmentation: what it does to images, and that its random numbers are each client's own, stacked or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kilter.core import Fit
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.fast.fits import run
from kilter.tasks import Task
from kilter.tasks.augment import colour, crop, flip, mixed_losses, parse_augmentation
from kilter.train import SGD, run_one
from small import digits, mlp_task, near, same

IMAGES = torch.arange(2 * 3 * 16 * 16).reshape(2, 3, 16, 16).float()


def test_flips_are_mirror_images_or_the_images_themselves() -> None:
    torch.manual_seed(0)
    seen = set()
    for _ in range(20):
        for before, after in zip(IMAGES, flip(IMAGES), strict=True):
            seen.add(
                "same" if torch.equal(before, after) else "mirror" if torch.equal(before.flip(-1), after) else "no"
            )
    assert seen == {"same", "mirror"}


def test_crops_are_the_images_moved() -> None:
    torch.manual_seed(0)
    for before, after in zip(IMAGES + 1, crop(IMAGES + 1), strict=True):
        padded = nn.functional.pad(before, (2, 2, 2, 2))
        moved = [padded[:, a : a + 16, b : b + 16] for a in range(5) for b in range(5)]
        assert sum(torch.equal(after, m) for m in moved) == 1


def test_colour_keeps_the_pattern() -> None:
    torch.manual_seed(0)
    changed = colour(IMAGES)
    for before, after in zip(IMAGES, changed, strict=True):
        assert torch.corrcoef(torch.stack([before.flatten(), after.flatten()]))[0, 1] > 0.9999
        assert not torch.equal(before, after)


def test_mixing_is_linear_in_the_losses() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(8)
    losses = mixed_losses(lambda x, y: x.sum(1) * 0 + y, x, y)
    assert float(losses.sum()) == pytest.approx(float(y.sum()), abs=1e-5)


@pytest.mark.parametrize("augment", ["flip", "crop", "colour", "mixup", "flip,crop,mixup"])
def test_random_numbers_are_the_clients_own_alone_and_stacked(augment: str) -> None:
    whole = mlp_task()
    task = Task(lambda: whole.load(whole.init(0)), augment=augment)
    rows = digits().take(torch.arange(48))

    def loss(params: dict, batch: dict, _: object) -> torch.Tensor:
        return task.loss(params, batch)

    fits = [Fit(loss, task.init(0), rows, SGD(lr=0.1, batch=16), seed) for seed in (1, 2)]
    alone = [run_one(fit).params for fit in fits]
    assert same(alone[0], run_one(fits[0]).params)
    assert not near(alone[0], alone[1], 1e-5)
    for one, stacked in zip(alone, run(fits), strict=True):
        assert near(one, stacked.params, 1e-5)
    plain = run_one(Fit(lambda p, b, _: whole.loss(p, b), whole.init(0), rows, SGD(lr=0.1, batch=16), 1)).params
    assert not near(plain, alone[0], 1e-5)


def test_evaluation_is_not_augmented() -> None:
    whole = mlp_task()
    task = Task(lambda: whole.load(whole.init(0)), augment="flip,mixup")
    rows = digits().take(torch.arange(20))
    assert task.evaluate(whole.init(0), rows) == whole.evaluate(whole.init(0), rows)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"augment": "flop"}, "did you mean 'flip'"),
        ({"augment": "flip", "data": "wine", "model": "mlp"}, "Only images"),
        ({"augment": "crop", "data": "shapes", "model": "unet"}, "masks"),
        ({"augment": "mixup", "data": "shapes", "model": "unet"}, "mixup"),
    ],
)
def test_what_cannot_be_augmented_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(Mistake, match=says):
        Experiment.of({"clients": 3, **fields}).build()
    assert parse_augmentation("") == ([], False)
