"""What a lying server can and cannot get out of a site: every order is checked, and what leaves is on record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sites import RUN, ask, known, make_site, make_terms, order

from kilter.errors import Mistake
from kilter.net.approvals import NotApproved
from kilter.net.audit import verify
from kilter.net.messages import Order
from kilter.net.policy import SitePolicy
from kilter.net.site import Site
from kilter.records import wire


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = make_site(tmp_path)
    made.agree(make_terms(made))
    return made


@pytest.fixture
def relayed(tmp_path: Path) -> Site:
    """In a run whose letters the server must not read."""
    made = make_site(tmp_path)
    made.agree(make_terms(made, "full"))
    return made


def test_in_a_sealed_run_no_step_gives_the_server_a_model(relayed: Site) -> None:
    """Finding 3: ordering `train` instead of `spread:train` returned the model in the clear."""
    reply, content = ask(relayed, order("train"), relayed.method.task.init(0))
    assert reply.error == ""
    assert content is None
    ask(relayed, order(":adopt", 1, 2), relayed.method.task.init(0))
    cards = {"a": relayed.seal.card()}
    mark = relayed.state.mark  # type: ignore[union-attr]
    reply, content = ask(
        relayed,
        order("spread:train", 1, 3, cards=cards, accepted=(1, 2), state=mark),
        {"to": ["a", "b"], "view": None},
    )
    assert reply.letters
    assert set(content) == {"a"}  # nobody proved b's key
    assert content["a"].dtype == torch.uint8


def test_whether_letters_are_sealed_is_part_of_what_is_approved(tmp_path: Path) -> None:
    """Finding 3: whether letters are sealed was the relay's decision."""
    made = make_site(tmp_path, SitePolicy())
    sealed, plain = make_terms(made, "full"), make_terms(made)
    assert sealed.digest != plain.digest
    made.approvals.add(sealed.digest, "test")
    made.agree(sealed)
    with pytest.raises(Mistake, match="changed the terms"):
        made.agree(plain)


def test_an_order_outside_the_approved_run_is_refused(site: Site) -> None:
    w = site.method.task.init(0)
    for what in (order("train", 4), order("train", 1, 10**6), order("train", 1, 1, cards={})):
        reply, _ = ask(site, what, w)
        assert bool(reply.error) is (what.round == 4 or what.seq > 1)


def test_a_model_with_nan_is_not_trained_on(site: Site) -> None:
    """Finding 13: sites trained on NaN models."""
    w = site.method.task.init(0)
    next(iter(w.values())).fill_(float("nan"))
    reply, content = ask(site, order("train"), w)
    assert "failed" in reply.error
    assert content is None


@pytest.mark.parametrize(
    "message", [None, 3, "x", [], {"to": 1}, {"w": torch.ones(2)}, {"to": [], "view": "__class__"}]
)
def test_a_message_that_does_not_fit_costs_only_that_step(site: Site, message: object) -> None:
    for step in ("train", "combine", ":evaluate", ":look", "spread:train", "gather:combine"):
        reply, _ = ask(site, order(step, 1, 1), message)
        site._last = None
        assert reply.error
    reply, content = ask(site, order("train", 1, 2), site.method.task.init(0))
    assert reply.error == ""
    assert content[1] == len(site.data.train)


@pytest.mark.parametrize(
    "changed",
    [
        {"session": None},
        {"session": []},
        {"session": {"a": 1}},
        {"round": [1]},
        {"round": 2**70},
        {"step": "__init__ x"},
        {"step": ["train"]},
        {"accepted": [1]},
        {"accepted": "x"},
        {"state": []},
        {"mail": 3},
        {"mail": {"round": 1}},
        {"cards": []},
        {"cards": {"a\nb": {}}},
        {"cards": {"a": {"public": 3}}},
    ],
)
def test_an_order_that_does_not_parse_is_malformed(changed: dict[str, object]) -> None:
    """Finding 13: orders without `life`, or with lists, crashed a site."""
    head = order("train").head()
    assert Order.parse(head) == order("train")
    with pytest.raises(wire.Malformed):
        Order.parse({**head, **changed})
    for key in ("run", "session", "round", "seq", "step"):
        with pytest.raises(wire.Malformed):
            Order.parse({k: v for k, v in head.items() if k != key})


def test_terms_are_approved_by_digest_and_changed_terms_need_a_new_approval(tmp_path: Path) -> None:
    made = make_site(tmp_path, SitePolicy())
    terms = make_terms(made)
    with pytest.raises(NotApproved, match=terms.digest):
        made.agree(terms)
    made.approvals.add(terms.digest, "test")
    made.agree(terms)
    made.close()
    again = make_site(tmp_path, SitePolicy())  # after a restart
    again.agree(terms)
    again.close()
    other = make_site(tmp_path, SitePolicy())
    with pytest.raises(NotApproved):
        other.agree(make_terms(other, seed=4))


def test_a_person_at_the_terminal_is_shown_the_terms_in_plain_words(tmp_path: Path) -> None:
    shown: list[str] = []
    made = make_site(tmp_path, SitePolicy(), ask=lambda lines: bool(shown.extend(lines)))
    with pytest.raises(NotApproved):
        made.agree(make_terms(made))
    text = "\n".join(shown)
    for words in (
        "mlp:8, 610 weights",
        "lr=0.1",
        "model weights",
        "how many rows",
        "could be inferred",
        "to the server",
    ):
        assert words in text
    made.ask = lambda lines: True
    made.agree(make_terms(made))


def test_everything_that_leaves_is_in_the_audit_log(site: Site) -> None:
    _, body = site.carry_out(order("train"), wire.encode(site.method.task.init(0)))
    (approval, entry) = list(verify(site.audit.path))
    assert approval.event == "approval"
    assert site.terms
    assert (entry.event, entry.run, entry.round, entry.step) == ("reply", RUN, 1, "train")
    assert (entry.kinds, entry.bytes, entry.to, entry.approval) == (
        "counts model",
        len(body),
        "server",
        site.terms.digest,
    )


def test_a_lost_state_directory_is_refused_by_the_site(tmp_path: Path) -> None:
    """Finding 6: silently wrong results after a state directory was lost in the middle of a run."""
    first = make_site(tmp_path / "one")
    terms = make_terms(first, method="scaffold")
    first.agree(terms)
    state = first.method.setup(_Alone())  # type: ignore[arg-type]
    message = (state["x"], state["c"]) if isinstance(state, dict) and "c" in state else state
    reply, _ = ask(first, order("train"), message)
    assert reply.error == ""
    assert reply.state.generation == 1
    second = make_site(tmp_path / "two")
    second.agree(terms)
    reply, _ = ask(second, order("train", 2, 1, accepted=(1, 1), state=known(reply)), message)
    assert "Mistake" in reply.error


class _Alone:
    seed, ids = 3, ("a",)


def test_a_site_computes_in_the_precision_of_the_run(tmp_path: Path) -> None:
    weights = {}
    for precision in ("fp32", "tf32", "bf16"):
        made = make_site(tmp_path / precision)
        made.agree(make_terms(made, precision=precision))
        reply, content = ask(made, order("train"), made.method.task.init(0))
        assert reply.error == ""
        trained, *_ = content
        weights[precision] = torch.cat([w.flatten() for _, w in sorted(trained.items())])
    assert torch.equal(weights["fp32"], weights["tf32"])  # there is no CUDA here
    assert not torch.equal(weights["fp32"], weights["bf16"])
    assert torch.allclose(weights["fp32"], weights["bf16"], atol=0.05)
