"""hub.toml and site.toml: paths are relative to the file, and a wrong setting is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kilter.errors import Mistake
from kilter.hub.config import read_hub, read_site

HUB = 'tls = "identity"\nsites = ["a", "b"]\n'
SITE = 'hub = "hub:9443"\ntls = "identity"\ndata = "rows.npz"\n'


def write(folder: Path, text: str) -> Path:
    (folder / "config.toml").write_text(text)
    return folder / "config.toml"


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "test.npz").touch()
    config = read_hub(write(tmp_path, HUB + '[data]\nours = "test.npz"\ndigits = "digits"\n'))
    assert config.tls == tmp_path / "identity"
    assert config.state == tmp_path / "hub-state"
    assert config.data == {"ours": str(tmp_path / "test.npz"), "digits": "digits"}


def test_a_policy_may_stand_in_the_file_of_the_site(tmp_path: Path) -> None:
    config = read_site(write(tmp_path, SITE + '[policy]\napproval = "policy"\n[policy.lr]\nat_most = 0.5\n'))
    assert config.policy == tmp_path / "kilter-state/policy.toml"
    assert 'approval = "policy"' in config.policy.read_text()


def test_a_policy_may_be_a_file(tmp_path: Path) -> None:
    assert read_site(write(tmp_path, SITE + 'policy = "p.toml"\n')).policy == tmp_path / "p.toml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('tls = "x"\n', "lacks the setting sites"),
        (HUB + "paralel = 2\n", "did you mean 'parallel'"),
        (HUB + "parallel = 0\n", "at least 1"),
        (HUB + "keep = -1\n", "keep must be a number from 0 to 100000, not -1"),
        (HUB + "keep = 1e30\n", "keep must be a number from 0 to 100000"),
        (HUB + "patience = nan\n", "patience must be a number of at least 0, not nan"),
        (HUB + "largest = 0\n", "largest must be a number of at least 1"),
        (HUB + 'parallel = "two"\n', "takes a whole number"),
        (HUB + "listen = 9443\n", "takes a text"),
        ('tls = "x"\nsites = []\n', "must list the sites"),
        ('tls = "x"\nsites = ["a", "a"]\n', "names a site twice"),
        ('tls = "x"\nsites = ["../a"]\n', "cannot be a site's name"),
        ('tls = "x"\nsites = "a"\n', "a list of texts"),
        ("tls = ", "not a TOML file"),
    ],
)
def test_a_wrong_setting_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(Mistake, match=message):
        read_hub(write(tmp_path, text))


def test_the_table_of_a_site_takes_the_options_of_join(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").touch()
    (tmp_path / "outcome").touch()  # a label that is called like a file stays a label
    lines = '[table]\nlabel = "outcome"\nseries = "hr_*"\ntest_size = 0.3\ntokenizer = "tokens.json"\n'
    table = read_site(write(tmp_path, SITE + lines)).table
    assert table == {
        "label": "outcome",
        "series": "hr_*",
        "test_size": "0.3",
        "tokenizer": str(tmp_path / "tokens.json"),
    }


def test_an_unknown_option_of_the_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="did you mean 'label'"):
        read_site(write(tmp_path, SITE + '[table]\nlabl = "y"\n'))
