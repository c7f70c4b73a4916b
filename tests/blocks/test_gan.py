"""The GAN: it learns where the data lie."""

import torch

from kilter.blocks.gan import GAN, closeness
from kilter.seeds import derive


def test_gan_learns_where_the_mass_is():
    """On rows around two far points, what it paints lies near them, not between."""
    from kilter.core import Fit, Rows
    from kilter.train import Adam, run_one

    gan = GAN((2,))
    torch.manual_seed(0)
    x = torch.where(
        torch.rand(500, 1) < 0.5, torch.tensor([[3.0, 3.0]]), torch.tensor([[-3.0, -3.0]])
    ) + 0.1 * torch.randn(500, 2)
    rows = Rows.of(x=x).extend(z=gan.noise(500, 0))
    made = run_one(Fit(gan.loss, gan.init(0), rows, Adam(lr=5e-3, beta1=0.5, epochs=60, batch=64), seed=derive(0)))
    rows_made = gan.sample(made.params, 400, 1)
    assert rows_made.dtype == torch.float32
    distance = torch.minimum((rows_made - 3).norm(dim=1), (rows_made + 3).norm(dim=1))
    assert distance.median() < 2.0


def test_samples_that_repeat_rows_have_no_distance_to_them():
    rng = torch.Generator().manual_seed(0)
    rows, fresh = (torch.randint(0, 256, (50, 1, 4, 4), generator=rng, dtype=torch.uint8) for _ in range(2))
    assert closeness(rows[10:20], rows, fresh) < 1e-3
    assert closeness(fresh, rows, fresh) == 1.0
    assert closeness(torch.full_like(rows, 255), rows, fresh) > 1.2
    assert closeness(rows, rows, fresh[:0]) is None
    assert closeness(rows, rows[:0], fresh) is None
