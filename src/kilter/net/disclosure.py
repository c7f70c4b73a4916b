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
    "statistics": "They show what is usual at this site. A mean of few rows comes close to them.",
    "rows": "Everything: these are your rows.",
}
STATISTICS = {  # what leaves of a column
    "number": "count, mean and standard deviation",
    "date": "count, mean and standard deviation of dates",
    "category": "the values that several rows have, and how many have them",
    "text": "the number of texts, and the words of a vocabulary that several rows have",
}
TASK = ("loss", "metrics", "augment", "personal", "lora", "server")  # settings shown if they are set
ALWAYS = (
    "the shape of a row, the names of the classes, how many rows this site has; of a table, the names and kinds of its columns",
    "for each fit the mean training loss and the number of steps; short notes of the method",
    "evaluation metrics and the numbers of rows behind them, as far as the policy allows",
)


def explain(terms: Terms, experiment: Experiment, method: Method) -> list[str]:
    """Settings, model, training plan, what would leave, what could be inferred, and the digest."""
    plan = ", ".join(f"{key}={value}" for key, value in experiment.local.items())
    settings = ", ".join(f"{key}={value}" for key, value in experiment.settings.items()) or "none"
    reader = "other sites (sealed: the server cannot read it)" if terms.sealed else "the server"
    if terms.rotates:
        reader = "the site that aggregates in a round (sealed: nobody else can read it)"
    if terms.group_of("")[1]:
        reader = "the aggregator of its group (sealed: the server cannot read it)"
    kinds = sorted(
        method.discloses() | terms.discloses() | ({"statistics"} if terms.description.needs_statistics else set())
    )
    lines = [
        f"Method: {experiment.method} (settings: {settings})",
        f"Model: {experiment.model}, {method.task.size()} weights"
        + (", pre-trained" if terms.weights else "")
        + (f", frozen weights {terms.frozen}" if terms.frozen else ""),
        f"Task: {method.task.kind}" + "".join(f", {name}={v}" for name in TASK if (v := getattr(experiment, name))),
        f"Training: {experiment.optimiser}, {plan}; {experiment.rounds} rounds, valid={experiment.valid:g}, seed={experiment.seed}",
        f"Participants: {', '.join(terms.ids)}" + (f"; robust rule {experiment.robust}" if experiment.robust else ""),
        *_turns(terms),
        f"What would leave this site, to {reader}:",
        *(f"  - {DISCLOSURES.get(kind, kind)}" for kind in kinds if kind != "statistics"),
        *_statistics(terms),
        f"And to {'the site that aggregates' if terms.rotates else 'the server'}, in every run:",
        *(f"  - {text}" for text in ALWAYS),
        "What could be inferred:",
        *(f"  - {INFERENCES[kind]}" for kind in kinds if kind in INFERENCES),
        f"Digest of these terms: {terms.digest}",
    ]
    return lines


def _turns(terms: Terms) -> list[str]:
    """Where sites aggregate in turn or in groups: who does, and what that means."""
    _, aggregators = terms.group_of("")
    if aggregators:
        groups = "; ".join(", ".join(terms.group_of(name)[0]) for name in aggregators)
        return [
            f"Groups, the aggregator first: {groups}" + (f" (roles {terms.roles})" if terms.roles else ""),
            "  - an aggregator combines what its group sends, and exchanges the result with the other aggregators",
        ]
    if not terms.rotates:
        return []
    lines = [
        f"Aggregators, in turn: {', '.join(terms.aggregators)}" + (f"; roles {terms.roles}" if terms.roles else "")
    ]
    lines.append("  - an aggregator hands the model, and what it remembers of the sites, to the next one")
    lines.append("  - the relay reads only the record of each round: means over sites, bytes, failures")
    return lines


def _statistics(terms: Terms) -> list[str]:
    """What leaves before the first round, to the server in any case."""
    schema = terms.description.schema
    if not terms.description.needs_statistics:
        return []
    lines = ["Before the first round, to the server:"]
    if schema is None:
        return [*lines, "  - the mean and standard deviation of each colour channel"]
    for kind, what in STATISTICS.items():
        names = [column.name for column in schema.measured if column.kind == kind]
        lines += [f"  - {what}: {', '.join(names)}"] if names else []
    sketched = [c.name for c in schema.measured if c.kind in ("number", "date") and (c.clip or c.fill == "median")]
    if sketched:
        lines.append(
            f"  - how many values lie in each of many narrow ranges, including the extremes: {', '.join(sketched)}"
        )
    return lines
