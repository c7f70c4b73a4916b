"""Recorded numbers as people read them: accuracies, bytes, durations."""

from __future__ import annotations


def accuracy(value: tuple[float, float | None] | None) -> str:
    """A mean and a standard deviation in per cent.

    >>> accuracy((0.51, 0.012)), accuracy((0.51, None)), accuracy(None)
    ('51.0 ± 1.2', '51.0', '-')
    """
    if value is None:
        return "-"
    mean, std = value
    return f"{100 * mean:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "")


def size(n: float) -> str:
    """A number of bytes, in powers of 1000.

    >>> size(999), size(1_234_567)
    ('999 B', '1.23 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def counted(n: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "round"), counted(20, "round")
    ('1 round', '20 rounds')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def percent(value: float | None) -> str:
    """An accuracy in per cent."""
    return "-" if value is None else f"{100 * value:.1f} %"


SHARES = frozenset(
    {"accuracy", "balanced_accuracy", "precision", "recall", "specificity", "f1", "top5", "pixel_accuracy"}
    | {"label_accuracy", "token_accuracy", "exact_match"}
)  # metrics that people read in per cent


def metric(name: str, value: float | None) -> str:
    """A metric: accuracies in per cent, others as they are.

    >>> metric("accuracy", 0.5), metric("mae", 12.3456), metric("c_index", None)
    ('50.0 %', '12.35', '-')
    """
    return percent(value) if name.partition(":")[0] in SHARES else "-" if value is None else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """A number of seconds in larger units.

    >>> duration(42), duration(200), duration(7300), duration(None)
    ('42 s', '3 min 20 s', '2 h 1 min', 'not yet known')
    """
    if seconds is None:
        return "not yet known"
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    return f"{s // 60} min {s % 60} s" if s < 3600 else f"{s // 3600} h {s % 3600 // 60} min"
