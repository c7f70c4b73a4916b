"""Keys must be private, and names printable."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509

from kilter.errors import Mistake
from kilter.net import tls


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o640, 0o620, 0o604])
def test_a_key_that_others_can_read_or_change_is_refused(mode: int, tmp_path: Path) -> None:
    """Finding 11: a key with mode 0666 drew no warning."""
    tls.new(tmp_path, ["a"])
    key = tmp_path / "a/key.pem"
    assert key.stat().st_mode & 0o077 == 0
    assert tls.Identity.read(tmp_path / "a").name == "a"
    key.chmod(mode)
    with pytest.raises(Mistake, match="chmod 600"):
        tls.Identity.read(tmp_path / "a")


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "../a", ".a", "x" * 65, "é"])
def test_names_in_certificates_are_plain(name: str, tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="cannot be a name"):
        tls.new(tmp_path, [name])


def test_a_trial_certificate_may_state_a_role(tmp_path: Path) -> None:
    tls.new(tmp_path, ["server", "alice:submitter"])
    roles = {
        n: tls.role(x509.load_pem_x509_certificate((tmp_path / n / "cert.pem").read_bytes()))
        for n in ("server", "alice")
    }
    assert roles == {"server": "", "alice": "submitter"}
    with pytest.raises(Mistake, match="did you mean 'submitter'"):
        tls.new(tmp_path, ["bob:submiter"])
