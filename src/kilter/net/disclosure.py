"""In plain words: what a run would send from a site, and what somebody could infer from it."""

from __future__ import annotations

from kilter.core import DISCLOSURES, Method
from kilter.experiment import Experiment
from kilter.net.terms import Terms

INFERENCES = {
    "model": "A curious receiver can test whether a known row was among yours, and may reconstruct rows that are rare.",
    "density": "It shows which inputs are common at this site, and how common.",
    "sums": "With few rows of a class, sums over them come close to single rows.",
    "counts": "It shows how many rows this site has.",
    "label_counts": "It shows how many rows of each class this site has, and which classes it lacks.",
    "means": "An average of few rows resembles them.",
    "prototypes": "The prototype of a class with one row describes that row.",
    "pictures": "A generator may reproduce rows that it was trained on.",
    "opinions": "They show which other sites have similar data.",
    "shares": "Single shares show nothing; their sums show what an average model shows.",
    "predictions": "They show, like a model, what this site has learnt, on public rows only.",
    "rows": "Everything: these are your rows.",
}
ALWAYS = (
    "the shape of a row, the names of the classes, how many rows this site has (and channel means of colour images)",
    "of a table: the names of its columns, counts, means and deviations of numbers, category values in 5 rows or more",
    "for each fit the mean training loss and the number of steps; short notes of the method",
    "evaluation metrics and the numbers of rows behind them, as far as the policy allows",
)


def explain(terms: Terms, experiment: Experiment, method: Method) -> list[str]:
    """Settings, model, training plan, what would leave, what could be inferred, and the digest."""
    plan = ", ".join(f"{key}={value}" for key, value in experiment.local.items())
    settings = ", ".join(f"{key}={value}" for key, value in experiment.settings.items()) or "none"
    reader = "other sites (sealed: the server cannot read it)" if terms.sealed else "the server"
    lines = [
        f"Method: {experiment.method} (settings: {settings})",
        f"Model: {experiment.model}, {method.task.size()} weights" + (", pre-trained" if terms.weights else ""),
        f"Training: {experiment.optimiser}, {plan}; {experiment.rounds} rounds, valid={experiment.valid:g}, seed={experiment.seed}",
        f"Participants: {', '.join(terms.ids)}" + (f"; robust rule {experiment.robust}" if experiment.robust else ""),
        f"What would leave this site, to {reader}:",
        *(f"  - {DISCLOSURES.get(kind, kind)}" for kind in sorted(method.discloses())),
        "And to the server, in every run:",
        *(f"  - {text}" for text in ALWAYS),
        "What could be inferred:",
        *(f"  - {INFERENCES[kind]}" for kind in sorted(method.discloses()) if kind in INFERENCES),
        f"Digest of these terms: {terms.digest}",
    ]
    return lines
