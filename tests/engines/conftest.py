"""The engines' tests use the network's small place: data files of sites, certificates, the simulator's numbers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "net"))
