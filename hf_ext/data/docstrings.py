"""Labelled English text that every Python installation already holds: the docstrings of the standard library.

The task is to tell from a docstring which part of the library it documents. Sources are parsed with `ast`, nothing is
imported, and nothing is downloaded. To keep it a reading task rather than a look-up, the names of the topics and of
their modules (`asyncio`, `ipaddress`, ...) are cut out of all texts, whichever label they carry. Names that merely
contain one (`EmailMessage`) stay.

The rows depend on the Python version (docstrings change between releases), and on nothing else: the same interpreter
and arguments give the same rows in the same order. Splits are random by docstring, so one module has docstrings in all
three: the score says how well held-out docstrings of known modules are recognised.
"""

import ast
import random
import re
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # `datasets` takes a second to import
    from datasets import DatasetDict

# Topic -> modules and packages it covers. All are present from CPython 3.11 to 3.13 without a display and in
# distributions that ship tkinter or the test suite separately. A name that one version lacks is skipped:
# `_pydatetime` holds the text of `datetime` from 3.12 on, and `zipfile` is a package from then on.
TOPICS: Mapping[str, tuple[str, ...]] = {
    "archives": ("tarfile", "zipfile"),
    "asyncio": ("asyncio",),
    "datetime": ("datetime", "_pydatetime", "calendar"),
    "decimal": ("_pydecimal",),
    "email": ("email",),
    "http": ("http",),
    "importlib": ("importlib",),
    "ipaddress": ("ipaddress",),
    "logging": ("logging",),
    "multiprocessing": ("multiprocessing",),
    "unittest": ("unittest",),
    "xml": ("xml",),
}
TEST_SHARE, VALIDATION_SHARE = 0.2, 0.1  # of each label's rows, rounded
_TEST_FOLDERS = {"test", "tests"}
_SCOPES = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Docstring(NamedTuple):
    """One example: its text, its topic, and where it was found (`asyncio/queues.py:Queue.put`)."""

    text: str
    topic: str
    source: str


def _walk(node: ast.AST, prefix: str = "") -> list[tuple[str, str]]:
    """`(qualified name, docstring)` of a module ("" is its name), its classes and functions, in source order."""
    found = []
    if isinstance(node, ast.Module | _SCOPES) and (docstring := ast.get_docstring(node)):
        found.append((prefix, docstring))
    for child in ast.iter_child_nodes(node):
        is_scope = isinstance(child, _SCOPES)
        found += _walk(child, f"{prefix}.{child.name}".lstrip(".") if is_scope else prefix)
    return found


def collect_docstrings(
    root: str | Path | None = None, topics: Mapping[str, Sequence[str]] = TOPICS, min_words: int = 6
) -> list[Docstring]:
    """Read, clean and deduplicate the docstrings of `topics`.

    White space is collapsed, topic and module names are cut out, and texts with fewer than `min_words` words are
    dropped. Of texts that differ only in case and punctuation the first is kept; texts found under two topics have no
    right answer and are dropped altogether.

    Args:
        root: folder that holds the modules; default: the running interpreter's standard library.
        topics: topic name -> names of top-level modules or packages under `root`.
        min_words: least number of white-space separated words left after cleaning.

    Returns:
        Examples sorted by topic, then by file and position in the file.

    Raises:
        ValueError: a topic has no source file under `root`, as in Python builds that ship only compiled modules.
    """
    root = Path(sysconfig.get_path("stdlib") if root is None else root)
    names = set(topics) | {module for modules in topics.values() for module in modules}
    # No letter, digit or underscore on either side; longest first, so that no name cuts another one in two.
    own_names = re.compile(rf"(?<!\w)({'|'.join(sorted(map(re.escape, names), key=len, reverse=True))})(?!\w)", re.I)

    first: dict[str, Docstring] = {}
    topics_of_text: dict[str, set[str]] = defaultdict(set)
    for topic in sorted(topics):
        files = []
        for module in sorted(topics[topic]):
            files += [root / f"{module}.py"] if (root / f"{module}.py").is_file() else []
            files += sorted((root / module).rglob("*.py"))
        files = [file for file in files if not _TEST_FOLDERS.intersection(file.relative_to(root).parts)]
        if not files:
            raise ValueError(f"no Python source of topic {topic!r} ({', '.join(topics[topic])}) under {root}")
        for file in files:
            with warnings.catch_warnings():  # odd escapes in someone else's source are not the reader's concern
                warnings.simplefilter("ignore")
                tree = ast.parse(file.read_bytes())  # bytes: `ast` honours the file's coding line
            for name, docstring in _walk(tree):
                text = " ".join(own_names.sub(" ", docstring).split())
                key = " ".join(re.findall(r"\w+", text.casefold()))
                topics_of_text[key].add(topic)
                if len(text.split()) >= min_words and key not in first:
                    source = file.relative_to(root).as_posix() + (f":{name}" if name else "")
                    first[key] = Docstring(text, topic, source)
    return [example for key, example in first.items() if len(topics_of_text[key]) == 1]


def load_docstrings(
    seed: int = 0,
    max_examples: int | None = None,
    root: str | Path | None = None,
    topics: Mapping[str, Sequence[str]] = TOPICS,
    min_words: int = 6,
) -> "DatasetDict":
    """The docstrings as a text classification data set with train, validation and test splits (70/10/20 %).

    Each label is split separately, so that all splits have the same mix of labels. With `max_examples` every label
    keeps the same share of its rows, the total being at most `max_examples`.

    Args:
        seed: which rows go where, and their order.
        max_examples: most rows over the three splits together; None: all.
        root, topics, min_words: as in `collect_docstrings`.

    Returns:
        A `datasets.DatasetDict` with the columns `text` (str) and `label` (`ClassLabel`, names in alphabetical order).

    Raises:
        ValueError: no sources found, or too few examples for each label to have one in each split.
    """
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    examples = collect_docstrings(root, topics, min_words)
    share = 1.0 if max_examples is None else min(1.0, max_examples / max(1, len(examples)))
    names = sorted(topics)
    splits: dict[str, list[Docstring]] = {"train": [], "validation": [], "test": []}
    rng = random.Random(seed)
    for topic in names:
        rows = [example for example in examples if example.topic == topic]
        total = len(rows)
        rng.shuffle(rows)
        rows = rows[: int(total * share)]
        if len(rows) < 3:
            raise ValueError(
                f"topic {topic!r} keeps {len(rows)} of its {total} docstrings (max_examples={max_examples}, "
                f"{len(examples)} in all); train, validation and test need one each at least; use more"
            )
        test, validation = (max(1, round(len(rows) * part)) for part in (TEST_SHARE, VALIDATION_SHARE))
        splits["test"] += rows[:test]
        splits["validation"] += rows[test : test + validation]
        splits["train"] += rows[test + validation :]
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    data = DatasetDict()
    for split, rows in splits.items():
        rng.shuffle(rows)
        columns = {"text": [row.text for row in rows], "label": [names.index(row.topic) for row in rows]}
        data[split] = Dataset.from_dict(columns, features=features)
    return data
