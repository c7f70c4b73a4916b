"""A user's table from its files: labels, clients, training and test rows, and parsed columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kilter.data.column_checks import alike, check_same_kind, check_words
from kilter.data.columns import Parsed, as_numbers, fit_kinds, infer, parse_column
from kilter.data.holdout import Index, hold_out, hold_out_share
from kilter.data.images import ImageFile, from_rows, is_image
from kilter.data.prepare_settings import is_decimal, parse_prepare, prepared_differently
from kilter.data.schema import Column, Schema, class_order, is_label, quoted, with_series
from kilter.data.statistics import TOKEN
from kilter.data.tables import Table, TableOptions, read_table, table_files
from kilter.data.targets import SEQUENCE, TASKS, names_of, read_targets
from kilter.errors import Mistake, unknown

LABELS, CLIENTS = ("label", "y"), ("client", "group")  # columns that are recognised by name
PATHS = ("path", "image", "file", "filename")  # likewise, of images
MOST_CLASSES = 100


@dataclass(frozen=True, eq=False)
class OwnTable:
    """A table as it was read, before its preparation."""

    raw: dict[str, Parsed]
    y: Index | NDArray[np.float32]
    train: Index
    test: Index
    groups: Index | None
    group_names: tuple[str, ...]
    schema: Schema
    client: str  # where the clients come from; empty: the table names none
    strata: Index | None = None  # a small class of each row, where the target is none
    notes: tuple[str, ...] = ()  # what may be wrong, for the first lines of a run


def open_table(path: Path, options: TableOptions) -> tuple[Table, Table]:
    """Read a table: its rows, and the same followed by the rows of a test file, if there is one."""
    files, test_file = table_files(path)
    if not files:
        raise Mistake(f"Folder '{path}' has no tables (.csv, .tsv, .parquet): put one file per client there.")
    apart = options.test_file or (str(test_file) if test_file else "")
    if apart and options.test_size:
        raise Mistake(f"The test rows are those of '{apart}': leave out --test-size.")
    if not apart:
        table = read_table(files, options.drop)
        return table, table
    whole = read_table([*files, Path(apart).expanduser()], options.drop)
    return whole.first(len(files)), whole


def divide_table(
    table: Table, whole: Table, options: TableOptions, schema: Schema | None, classes: tuple[str, ...] | None
) -> OwnTable:
    """Labels, clients, training and test rows of a table; the rows of `whole` after those of `table` are test rows.

    With `schema`, columns are matched by name and must be what it says.
    """
    task = options.task or (schema.task if schema else "")
    if task in TASKS:
        return _divide_by_target(table, whole, options, schema, task)
    target = label_column(table, options.label or (schema.target if schema else ""))
    client = client_column(table, options.client) if len(table.files) == 1 or options.client else ""
    if client == target:
        raise Mistake(f"--label and --client both name the column '{target}': they must differ.")
    features = [name for name in table.columns if name not in (target, client)]
    if len(table) == 0 or not features:
        raise Mistake(
            f"'{table.name}' has {len(table)} rows and {len(features)} feature columns: it needs at least one of each."
        )
    y, names = _labels(whole, target, classes or (schema.classes if schema else None), len(table))
    counted = [c.name for c in (schema.targets if schema else ()) if c.kind == "category"]
    labels = {name: Parsed("category", y, tuple(names)) for name in counted}
    return _finish(table, whole, options, schema, Divided(y, y, names, target, client, features, labels))


@dataclass(frozen=True, eq=False)
class Divided:
    """What is known of a table before its features are parsed."""

    y: Index | NDArray[np.float32]
    strata: Index
    classes: tuple[str, ...]
    target: str
    client: str
    features: list[str]
    raw: dict[str, Parsed]  # columns of the target whose statistics are pooled
    columns: tuple[Column, ...] = ()
    task: str = ""


def _divide_by_target(table: Table, whole: Table, options: TableOptions, schema: Schema | None, task: str) -> OwnTable:
    """A table whose target is not a class."""
    label, event = options.label or (schema.target if schema else ""), options.event
    if schema is not None and not options.label:
        label = ",".join(schema.classes) if task == "multi-label" else label
        event = schema.targets[1].name if task == "survival" and len(schema.targets) > 1 else event
    if task != "next-token" and "," not in label:
        label = label_column(table, label)
    targets = read_targets(whole, task, label, event)
    client = client_column(table, options.client) if len(table.files) == 1 or options.client else ""
    if client and task != "next-token" and client in names_of(task, label, event):
        raise Mistake(f"The column '{client}' is the client and part of the target: they must differ.")
    apart = {client, *([] if task == "next-token" else names_of(task, label, event))}
    features = [name for name in table.columns if name not in apart]
    if len(table) == 0 or not features:
        raise Mistake(
            f"'{table.name}' has {len(table)} rows and {len(features)} feature columns: it needs at least one of each."
        )
    if task == "next-token":
        features = [name for name in features if name in options.text or (schema and name in schema.names)]
        if len(features) != 1:
            raise Mistake("The task next-token reads one column of text: name it with --text.")
    target = targets.classes[0]
    divided = Divided(
        targets.y, targets.strata, targets.classes, target, client, features, targets.raw or {}, targets.columns, task
    )
    return _finish(table, whole, options, schema, divided)


def _finish(table: Table, whole: Table, options: TableOptions, schema: Schema | None, divided: Divided) -> OwnTable:
    groups, group_names = _clients(whole, divided.client, table.files)
    if len(whole) > len(table):
        train, test = np.arange(len(table)), np.arange(len(table), len(whole))
    elif options.test_size:
        train, test = hold_out_share(divided.strata, groups, options.test_size)
    else:
        train, test = hold_out(divided.strata, groups)
    if table is not whole:
        table.columns.clear()  # nothing else keeps the memory of columns that are parsed now
    raw = parse_features(whole, divided.features, options, schema)
    own = infer(raw, divided.target, divided.classes, parse_prepare(options.prepare))
    digest, in_order = tokenizer_digest(options.tokenizer), options.task in ("text", "next-token")
    texts = tuple(
        replace(c, tokenizer=digest, sequence=c.sequence or (SEQUENCE if in_order else 0)) if c.kind == "text" else c
        for c in own.columns
    )
    own = replace(own, columns=texts, task=divided.task, targets=divided.columns)
    own = with_series(own, options.series) if options.series else own
    if schema is not None:
        reason = schema.mismatch(own) or prepared_differently(schema, options.prepare, options.series)
        if reason:
            raise Mistake(f"'{table.name}' does not fit the schema: {reason}.")
    source = f"column '{divided.client}'" if divided.client else "files" if groups is not None else ""
    strata = divided.strata if divided.task else None
    raw |= divided.raw
    notes = (*(() if divided.task else alike("classes", divided.classes)), *alike("clients", group_names))
    return OwnTable(raw, divided.y, train, test, groups, group_names, schema or own, source, strata, notes)


def parse_features(
    table: Table, features: list[str], options: TableOptions, schema: Schema | None = None
) -> dict[str, Parsed]:
    """The columns of features. A column of text is named in the options or in the schema."""
    texts = {*options.text, *(c.name for c in schema.columns if c.kind == "text")} if schema else set(options.text)
    own_ids = parse_prepare(options.prepare).ids
    numbered = {c.name for c in schema.columns if c.ids} if schema else set(features if own_ids else ())
    for name in options.text:
        if name not in features:
            raise unknown(f"column for --text in '{table.name}'", name, features)
    raw: dict[str, Parsed] = {}
    declared = {*options.categories, *(c.name for c in (schema.columns if schema else ()) if c.kind == "category")}
    for name in features:
        raw[name] = parse_column(table, name, name in texts, name in options.categories)
        if raw[name].kind == "category":
            if len(table.files) > 1 and name not in declared:
                check_same_kind(table, name)
            check_words(table, name, raw[name], name in declared)
        del table.columns[name]  # frees its memory
        if raw[name].kind == "text" and options.tokenizer:
            raw[name] = tokenise(raw[name], options.tokenizer, name in numbered)
    return fit_kinds(raw, schema) if schema else raw


# Which columns are the label and the client ---------------------------------------------------------------------------


def label_column(table: Table, label: str) -> str:
    """The name of the column of the labels."""
    if label:
        if label not in table.columns:
            raise unknown(f"column for --label in '{table.name}'", label, table.columns)
        return label
    there = [name for name in LABELS if name in table.columns]
    if len(there) > 1:
        raise Mistake(f"'{table.name}' has both 'label' and 'y': name the column of the labels with --label.")
    if not there:
        raise Mistake(
            f"'{table.name}' has no column 'label' or 'y' (it has {quoted(list(table.columns)) or 'none'}): "
            "name the column of the labels with --label."
        )
    return there[0]


def client_column(table: Table, client: str) -> str:
    """The name of the column of the clients; empty if there is none."""
    if client:
        if client not in table.columns:
            raise unknown(f"column for --client in '{table.name}'", client, table.columns)
        return client
    there = [name for name in CLIENTS if name in table.columns]
    if len(there) > 1:
        raise Mistake(f"'{table.name}' has both 'client' and 'group': name the column of the clients with --client.")
    return there[0] if there else ""


def image_column(table: Table) -> str:
    """The column of the paths of images; empty if there is none."""
    for name in PATHS:
        if name in table.columns and pa.types.is_string(table.columns[name].type):
            first = next((cell for cell in table.columns[name].to_pylist() if cell), "")
            if is_image(Path(first)):
                return name
    return ""


def listed_images(table: Table, whole: Table, column: str, options: TableOptions) -> list[ImageFile]:
    """The images that a table lists, with their labels and clients."""
    target, client = label_column(table, options.label), client_column(table, options.client)
    others = [name for name in whole.columns if name not in (column, target, client)]
    if others:
        raise Mistake(
            f"'{table.name}' lists images, and columns that are not used: leave out {quoted(others)} (--drop)."
        )
    labels, paths = words(whole, target, "label"), words(whole, column, "image")
    if client:
        clients = words(whole, client, "client")
    else:
        stems = [file.stem if len(table.files) > 1 else "" for file in whole.files]
        clients = np.repeat(stems, whole.lengths).tolist()
    files = from_rows(paths, labels, clients, table.files[0].parent)
    if len(whole) == len(table):
        return files
    return [replace(file, part="train" if at < len(table) else "test") for at, file in enumerate(files)]


def encode(table: Table, column: str, what: str) -> tuple[list[str], Index]:
    """The different names in a column without gaps, and the place of each row's name among them."""
    cells = table.columns[column]
    if len(table.files) > 1 and what == "label":
        check_same_kind(table, column)
    numbers = as_numbers(cells, False)
    gaps = np.flatnonzero(cells.is_null().to_numpy() if numbers is None else np.isnan(numbers))
    if len(gaps):
        raise Mistake(
            f"Column '{column}' has no {what} in {table.places(gaps)}: fill in or remove {len(gaps)} rows like this."
        )
    if numbers is not None and (np.abs(numbers) < 2**53).all() and (numbers == np.floor(numbers)).all():
        values, places = np.unique(numbers.astype(np.int64), return_inverse=True)
        return [str(value) for value in values], places.astype(np.int64)
    parsed = parse_column(table, column, text=True)
    if what != "image" and not all(map(is_label, parsed.words)):
        raise Mistake(
            f"Column '{column}' of '{table.name}' holds a {what} that is longer than 200 characters or not printable: shorten it."
        )
    order = sorted(range(len(parsed.words)), key=lambda at: parsed.words[at])
    rank = np.argsort(order)
    return [parsed.words[at] for at in order], rank[parsed.cells].astype(np.int64)


def words(table: Table, column: str, what: str) -> list[str]:
    """A column of names without gaps. Whole numbers are written without a decimal point."""
    names, places = encode(table, column, what)
    return [names[place] for place in places]


def _labels(table: Table, target: str, classes: tuple[str, ...] | None, first: int) -> tuple[Index, tuple[str, ...]]:
    """Class numbers and class names: the labels that occur, unless the classes are listed."""
    distinct, numbers = encode(table, target, "label")
    occurring = class_order(distinct)
    names = classes or occurring
    foreign = [label for label in occurring if label not in names]
    if foreign:
        raise Mistake(
            f"'{table.name}': label '{foreign[0]}' is not among the classes {quoted(names)}: correct one or the other."
        )
    if classes is None and len(names) > MOST_CLASSES:
        raise Mistake(
            f"Column '{target}' of '{table.name}' has {len(names)} different labels, too many for classes: "
            "use --task regression if they are numbers, or name another column with --label."
        )
    if classes is None and any("." in name and is_decimal(name) for name in names):
        raise Mistake(
            f"Column '{target}' of '{table.name}' holds labels that are not whole numbers, such as "
            f"'{next(n for n in names if '.' in n)}': use --task regression, or name a column of classes with --label."
        )
    untrained = [distinct[k] for k in np.setdiff1d(numbers[first:], numbers[:first])]
    if untrained:
        raise Mistake(
            f"The test rows of '{table.name}' have the class {quoted(untrained)}, which no training row has: "
            "remove these rows or add training rows."
        )
    place = np.array([names.index(label) for label in distinct], dtype=np.int64)
    return place[numbers], names


def _clients(table: Table, column: str, files: tuple[Path, ...]) -> tuple[Index | None, tuple[str, ...]]:
    """The client of each row: from a column, or from the file if there are several."""
    if column:
        names, numbers = encode(table, column, "client")
        return numbers, tuple(names)
    if len(files) == 1:
        return None, ()
    if len(table.files) > len(files):
        raise Mistake(
            f"The rows of the test file '{table.files[-1]}' belong to no client: name their column with --client, or "
            "leave out --test-file."
        )
    return np.repeat(np.arange(len(files)), table.lengths).astype(np.int64), tuple(file.stem for file in files)


# Text -----------------------------------------------------------------------------------------------------------------


def tokenizer_digest(path: str) -> str:
    """Tells one tokenizer file from another; empty for none."""
    if not path:
        return ""
    try:
        return blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise Mistake(f"The tokenizer '{path}' cannot be read: {error.strerror}.") from None


def tokenise(parsed: Parsed, path: str, ids: bool = False) -> Parsed:
    """Divide texts into tokens with a tokenizer file of Hugging Face. With `ids`, the tokens are their numbers."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise Mistake("A tokenizer file needs the library tokenizers: `pip install 'kilter[text]'`.") from None
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing more specific
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Mistake(
            f"'{path}' is not a tokenizer file of Hugging Face ({reason}): save it with tokenizer.save."
        ) from None
    encodings = tokenizer.encode_batch(list(parsed.words))
    texts = tuple(TOKEN.join([*(map(str, e.ids) if ids else e.tokens), ""]) for e in encodings)
    return replace(parsed, words=texts)
