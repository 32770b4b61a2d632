"""Reading a user's training data: files, folders of files and Hub datasets, and finding the columns that a task needs.

Everything that can be wrong with a user's data is a `ValueError` that says where and what would be right. Imports
`datasets` only inside functions, so that the command line can be listed quickly.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

# Suffix -> the builder of `datasets` that reads it.
READERS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".txt": "text",
}
_EVAL_STEMS = ("validation", "valid", "val", "dev", "eval")

# Usual column names, the likeliest first; compared without regard to case.
TEXT_NAMES = ("text", "sentence", "sentence1", "content", "review", "document", "premise", "question", "input", "tweet")
PAIR_NAMES = {"sentence1": "sentence2", "premise": "hypothesis", "question1": "question2", "text": "text_pair"}
LABEL_NAMES = ("label", "labels", "target", "class", "category", "score", "sentiment", "intent", "y")
WORD_NAMES = ("tokens", "words", "text", "sentence")
TAG_NAMES = ("ner_tags", "tags", "labels", "label", "pos_tags")


def load_data(source: str, *, field: str = "data", config: str | None = None) -> "dict[str, Dataset]":
    """Read a file, a folder of files or a Hub dataset.

    Args:
        source: csv, tsv, json, jsonl, parquet or txt file (one row a line), a folder of such files of one kind, or a
            Hub dataset's name. In a folder, files named `validation*`, `valid*`, `val*`, `dev*` or `eval*` are
            evaluation rows and `test*` is left alone; everything else is training rows.
        field: the setting's name, for messages.
        config: configuration of a Hub dataset.

    Returns:
        {"train": rows} and, where the source has them, "eval".

    Raises:
        ValueError: missing, unsupported, unreadable, mixed or empty.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _load_folder(path, field)
    if path.is_file():
        return {"train": _read([path], field)}
    if path.suffix.lower() in READERS or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ValueError(f"{field}: there is no file or folder {source!r} (looked from {Path.cwd()})")
    return _load_hub(source, field, config)


def _load_folder(folder: Path, field: str) -> "dict[str, Dataset]":
    files = sorted(
        item for item in folder.iterdir() if item.suffix.lower() in READERS and not item.name.startswith(".")
    )
    if not files:
        raise ValueError(f"{field}: folder {str(folder)!r} holds no file of a supported type ({', '.join(READERS)})")
    readers = sorted({READERS[item.suffix.lower()] for item in files})
    if len(readers) > 1:
        raise ValueError(
            f"{field}: folder {str(folder)!r} mixes file types ({', '.join(item.name for item in files)}); "
            "keep one type in it, or name one file"
        )
    # "evaluation.csv" and "dev-00.csv" are splits; "devices.csv" and "testimonials.csv" are not
    split = re.compile(r"(validation|valid|val|dev|evaluation|eval|test)(?=[^a-z]|$)")
    stems = {item: split.match(item.stem.lower()) for item in files}
    evaluation = [item for item, found in stems.items() if found and found[1] != "test"]
    train = [item for item, found in stems.items() if not found]
    if not train:
        raise ValueError(
            f"{field}: folder {str(folder)!r} has no training file, only {', '.join(item.name for item in files)}; "
            "name it train" + files[0].suffix
        )
    tables = {"train": _read(train, field)}
    if evaluation:
        tables["eval"] = _read(evaluation, field)
    return tables


def _read(files: list[Path], field: str) -> "Dataset":
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    names = ", ".join(str(item) for item in files)
    suffix = files[0].suffix.lower()
    if suffix not in READERS:
        raise ValueError(f"{field}: {names} has type {suffix or '(none)'!r}; supported are {', '.join(READERS)}")
    if all(item.stat().st_size == 0 for item in files):
        raise ValueError(f"{field}: {names} is empty; there are no rows to train on")
    if READERS[suffix] == "csv":
        return _read_csv(files, "\t" if suffix == ".tsv" else ",", field)
    try:
        table = load_dataset(READERS[suffix], data_files=[str(item) for item in files], split="train")
    except (DatasetGenerationError, UnicodeDecodeError, ValueError, OSError, IndexError) as error:
        if "corresponds to no data" in str(error):
            raise ValueError(f"{field}: {names} has no rows") from error
        cause = error.__cause__ or error
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise ValueError(f"{field}: {names} cannot be read as {READERS[suffix]}: {reason}") from error
    if len(table) == 0:
        raise ValueError(f"{field}: {names} has no rows")
    return table


def _read_csv(files: list[Path], separator: str, field: str) -> "Dataset":
    """All values as texts, as they are in the file: guessed types would turn the code 007 into 7.0, and the words "NA"
    and "None" into missing values. An empty cell is None."""
    import pandas
    from datasets import Dataset

    tables = []
    for file in files:
        _check_csv(file, separator, field)
        try:
            tables.append(
                pandas.read_csv(
                    file, sep=separator, dtype=str, keep_default_na=False, na_values=[""], encoding="utf-8-sig"
                )
            )
        except (pandas.errors.ParserError, pandas.errors.EmptyDataError) as error:
            raise ValueError(f"{field}: {file} cannot be read as csv: {error}") from error
    names = [list(table.columns) for table in tables]
    other = next((number for number, columns in enumerate(names) if columns != names[0]), None)
    if other is not None:
        raise ValueError(
            f"{field}: {files[other]} has the columns {', '.join(names[other])}, but {files[0]} has "
            f"{', '.join(names[0])}; files of one data set need the same columns."
        )
    table = pandas.concat(tables, ignore_index=True)
    if not len(table):
        raise ValueError(f"{field}: {', '.join(str(file) for file in files)} has no rows")
    table = table.astype(object).where(table.notna(), None)
    return Dataset.from_dict({name: table[name].tolist() for name in table.columns})


def _check_csv(file: Path, separator: str, field: str) -> None:
    """Raise `ValueError` for what pandas would read as something else: rows longer than the header, another separator,
    another encoding."""
    limit = csv.field_size_limit(2**31 - 1)  # documents may be longer than the default allows
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.reader(lines, delimiter=separator)
            header = next(rows, [])
            other = next((mark for mark in ";\t|," if mark != separator and mark in "".join(header)), None)
            if len(header) == 1 and other is not None:
                raise ValueError(
                    f"{field}: {file} has one column, {header[0]!r}; its separator seems to be {other!r}. "
                    f"Save it with {separator!r} between the columns."
                )
            for number, row in enumerate(rows, start=1):
                if len(row) > len(header):
                    raise ValueError(
                        f"{field}: row {number} of {file} has {len(row)} values, the header names {len(header)} "
                        f"columns; put texts that contain {separator!r} in quotes."
                    )
    except UnicodeDecodeError as error:
        raise ValueError(f"{field}: {file} is not UTF-8 ({error.reason}); save it as UTF-8.") from error
    except csv.Error as error:
        raise ValueError(f"{field}: {file} cannot be read as csv: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _load_hub(name: str, field: str, config: str | None) -> "dict[str, Dataset]":
    from datasets import load_dataset

    try:
        splits = load_dataset(name, config)
    except Exception as error:  # the Hub client, the network and the dataset itself each raise their own kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{field}: {name!r} is neither a file or folder here nor a dataset that the Hub gave: {reason}"
        ) from error
    if "train" not in splits:
        raise ValueError(f"{field}: dataset {name!r} has no 'train' split, only {', '.join(splits)}")
    evaluation = next((split for stem in _EVAL_STEMS for split in splits if split.startswith(stem)), None)
    tables = {"train": splits["train"]}
    if evaluation is not None:
        tables["eval"] = splits[evaluation]
    return tables


def pick_column(table: "Dataset", wanted: str | None, usual: Iterable[str], field: str) -> str:
    """The column to use: `wanted` if given, else the first of the `usual` names that exists, in any case.

    Raises `ValueError` that lists the columns that exist.
    """
    columns = table.column_names
    have = ", ".join(columns)
    if wanted is not None:
        if wanted not in columns:
            raise ValueError(f"{field}: the data has no column {wanted!r}; its columns are {have}")
        return wanted
    lowered = {column.lower(): column for column in reversed(columns)}
    for name in usual:
        if name in lowered:
            return lowered[name]
    raise ValueError(f"{field}: no column has a usual name ({', '.join(usual)}); the columns are {have}: name one")


def text_values(table: "Dataset", column: str, field: str) -> list[str]:
    """A column as texts; raises `ValueError` with the row's number where one is missing or blank."""
    values = table[column][:]
    for number, value in enumerate(values, start=1):
        if value is None or isinstance(value, (list, dict)) or not str(value).strip():
            what = "no text" if value is None or not isinstance(value, (list, dict)) else f"a {type(value).__name__}"
            raise ValueError(f"{field}: row {number} has {what} in column {column!r}; every row needs a text there")
    return [value if isinstance(value, str) else str(value) for value in values]


def label_values(table: "Dataset", column: str, field: str) -> list[Any]:
    """A column's values; raises `ValueError` with the row's number where one is missing."""
    values = table[column][:]
    for number, value in enumerate(values, start=1):
        if value is None or value != value or value == "":
            raise ValueError(f"{field}: row {number} has no value in column {column!r}; every row needs a label")
    return values


def as_number(value: Any) -> Any:
    """A number where a text is one (csv files hold texts only), else the value itself."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def class_names(table: "Dataset", column: str) -> list[str] | None:
    """Names of the classes where the column's type carries them (Hub datasets), else None."""
    feature = table.features[column]
    feature = getattr(feature, "feature", feature)  # a list of labels, one per word
    return list(getattr(feature, "names", None) or []) or None


def hold_out(table: "Dataset", share: float, seed: int, strata: list[Any] | None = None) -> "tuple[Dataset, Dataset]":
    """Split off `share` of the rows (at least one) for evaluation, by strata where each is large enough."""
    from sklearn.model_selection import train_test_split

    rows = list(range(len(table)))
    count = max(1, round(share * len(rows)))
    if strata is not None:
        sizes = Counter(strata)
        # each stratum must be able to give one row to either side
        if min(sizes.values()) < 2 or count < len(sizes) or len(rows) - count < len(sizes):
            strata = None
    train, held = train_test_split(rows, test_size=count, random_state=seed, stratify=strata)
    return table.select(sorted(train)), table.select(sorted(held))
