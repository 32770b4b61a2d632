"""The tasks of `finetune`: which columns they read, how rows become tensors, which head they train, what they measure.

A task works in two steps, so that mistakes in the data show before a model is loaded: `read` turns the user's table
into canonical columns, `encode` tokenises them for the model at hand.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from hf_ext.data.loading import (
    LABEL_NAMES,
    PAIR_NAMES,
    TAG_NAMES,
    TEXT_NAMES,
    WORD_NAMES,
    as_number,
    class_names,
    label_values,
    pick_column,
    text_values,
)
from hf_ext.training import metrics
from hf_ext.training.metrics import IGNORED
from hf_ext.training.settings import FinetuneSettings

Columns = dict[str, list[Any]]


@dataclass
class Rows:
    """A table in canonical columns, and the label names in it (None: the task has none)."""

    columns: Columns
    names: list[str] | None = None
    notes: list[str] = field(default_factory=list)

    def dataset(self) -> Dataset:
        return Dataset.from_dict(self.columns)


class FinetuneTask:
    """Base of all tasks; a subclass says what differs."""

    auto_class: str  # the Auto class of transformers that builds the model
    head_suffix: str  # how the architecture names with this head end
    peft_type: str | None = None
    problem_type: str | None = None
    language_model = False
    loss_counts_items = True  # whether the head's loss honours `num_items_in_batch`
    label_inputs: tuple[str, ...] = ("labels",)

    def read(self, table: Dataset, settings: FinetuneSettings, where: str) -> Rows:
        """Canonical columns of a table; `where` is the setting it came from, for messages."""
        raise NotImplementedError

    def encode(
        self, rows: Columns, tokenizer: PreTrainedTokenizerBase, max_length: int, ids: dict[str, int]
    ) -> Columns:
        """Tokenise a batch of canonical rows; "cut" in the answer marks rows that did not fit in `max_length`."""
        raise NotImplementedError

    def strata(self, rows: Rows) -> list[Any] | None:
        """What to balance over when evaluation rows are split off."""
        return None

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
        """Pads each batch to its own longest row."""
        return DataCollatorWithPadding(tokenizer)

    def prepare_eval(self, table: Dataset, tokenizer: PreTrainedTokenizerBase, seed: int) -> Dataset:
        return table

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerBase, model: str) -> PreTrainedTokenizerBase:
        return tokenizer

    def measure(self, predictions: Any, labels: Any, names: list[str]) -> dict[str, float]:
        """Metrics of one evaluation from what the head returned and the labels."""
        raise NotImplementedError

    def compute_metrics(self, names: list[str] | None) -> Callable[[EvalPrediction], dict[str, float]]:
        return lambda result: self.measure(result.predictions, result.label_ids, names or [])


def _first(predictions: Any) -> np.ndarray:
    """The logits, where a model returns more besides them."""
    return predictions[0] if isinstance(predictions, tuple) else predictions


def _cut(encoded: Any, count: int) -> list[bool]:
    """Which rows of a tokenised batch lost tokens; a tokenizer without that knowledge says none."""
    if not encoded.is_fast:
        return [False] * count
    return [bool(item.overflowing) for item in encoded.encodings]


def _read_texts(table: Dataset, settings: FinetuneSettings, where: str) -> Columns:
    field_name = f"text_column ({where})"
    text = pick_column(table, settings.text_column, TEXT_NAMES, field_name)
    columns = {"text": text_values(table, text, field_name)}
    pair = settings.text_pair_column
    if pair is None and settings.text_column is None and PAIR_NAMES.get(text.lower()) in table.column_names:
        pair = PAIR_NAMES[text.lower()]
    if pair is not None:
        pair = pick_column(table, pair, (), f"text_pair_column ({where})")
        columns["pair"] = text_values(table, pair, f"text_pair_column ({where})")
    return columns


def _label_column(table: Dataset, settings: FinetuneSettings, usual: Sequence[str], where: str) -> str:
    if isinstance(settings.label_column, list):
        if len(settings.label_column) != 1:
            raise ValueError(
                f"label_column: {settings.label_column!r} names several columns; only task "
                "'multi-label' reads more than one"
            )
        return pick_column(table, settings.label_column[0], (), f"label_column ({where})")
    return pick_column(table, settings.label_column, usual, f"label_column ({where})")


def _label_name(value: Any, names: list[str] | None, where: str) -> str:
    """One class label as its name: by the dataset's own names, else its text."""
    if names is not None and isinstance(value, int):
        if not 0 <= value < len(names):
            raise ValueError(f"label_column ({where}): class {value} has no name; the data names {len(names)} classes")
        return names[value]
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(
                f"label_column ({where}): {value!r} is not a class; for numbers to predict use task 'regression'"
            )
        value = int(value)
    if isinstance(value, (list, dict)):
        raise ValueError(
            f"label_column ({where}): {value!r} is a {type(value).__name__}, not one class; several labels a row are "
            "task 'multi-label', one label a word is 'token-classification'"
        )
    return str(value).strip()


def sorted_names(names: set[str]) -> list[str]:
    """Label names in a fixed order: numbers by value, texts by alphabet."""
    if all(re.fullmatch(r"-?\d+", name) for name in names):
        return sorted(names, key=int)
    return sorted(names)


def label_order(names: list[str], config: PreTrainedConfig, head_suffix: str, new_head: bool) -> list[str]:
    """The label names in the order of the model's outputs.

    A checkpoint without this head, or `new_head`, takes the data's order. A checkpoint that has the head keeps its own
    order, and must have the data's labels: outputs quietly re-used for other labels would look trained and be wrong.
    Raises `ValueError` when they differ.
    """
    if new_head or not any(name.endswith(head_suffix) for name in config.architectures or []):
        return names
    known = [config.id2label[index] for index in range(config.num_labels)]
    anonymous = known == [f"LABEL_{index}" for index in range(len(known))]
    numbered = names == [str(index) for index in range(len(names))]
    if set(names) <= set(known):
        return known
    if len(names) == len(known) and (anonymous or numbered):
        return names if anonymous else known
    raise ValueError(
        f"label count mismatch: the model's head has {len(known)} labels ({_shorten(known)}), the data has "
        f"{len(names)} ({_shorten(names)}); give data with the model's labels, or use --new-head to train a new head"
    )


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


class TextClassification(FinetuneTask):
    auto_class = "AutoModelForSequenceClassification"
    head_suffix = "ForSequenceClassification"
    peft_type = "SEQ_CLS"
    problem_type = "single_label_classification"

    def read(self, table: Dataset, settings: FinetuneSettings, where: str) -> Rows:
        columns = _read_texts(table, settings, where)
        column = _label_column(table, settings, LABEL_NAMES, where)
        known = class_names(table, column)
        values = label_values(table, column, where)
        numbers = [as_number(value) for value in values]
        if any(isinstance(number, float) and not number.is_integer() for number in numbers) and not any(
            isinstance(number, str) for number in numbers
        ):
            values = numbers  # a csv file's measurements, which are texts there: refused as such below
        columns["label"] = [_label_name(value, known, where) for value in values]
        found = set(columns["label"])
        if where == "data" and len(found) < 2:
            raise ValueError(
                f"label_column ({where}): column {column!r} holds one label only ({found.pop()!r}); "
                "a classifier needs two"
            )
        return Rows(columns, known or sorted_names(found))

    def strata(self, rows: Rows) -> list[Any] | None:
        return rows.columns["label"]

    def encode(
        self, rows: Columns, tokenizer: PreTrainedTokenizerBase, max_length: int, ids: dict[str, int]
    ) -> Columns:
        encoded = tokenizer(rows["text"], rows.get("pair"), truncation=True, max_length=max_length)
        labels = [self.label(value, ids) for value in rows["label"]]
        return {**encoded, "labels": labels, "cut": _cut(encoded, len(labels))}

    def label(self, value: Any, ids: dict[str, int]) -> Any:
        return ids[value]

    def measure(self, predictions: Any, labels: Any, names: list[str]) -> dict[str, float]:
        return metrics.classification(_first(predictions), labels)


class Regression(TextClassification):
    problem_type = "regression"
    loss_counts_items = False

    def read(self, table: Dataset, settings: FinetuneSettings, where: str) -> Rows:
        columns = _read_texts(table, settings, where)
        column = _label_column(table, settings, LABEL_NAMES, where)
        values = [as_number(value) for value in label_values(table, column, where)]
        for number, value in enumerate(values, start=1):
            if isinstance(value, (str, list, dict)):
                raise ValueError(
                    f"label_column ({where}): row {number} has {value!r} in column {column!r}, not a number; "
                    "for classes use task 'text-classification'"
                )
        columns["label"] = [float(value) for value in values]
        return Rows(columns, ["value"])

    def strata(self, rows: Rows) -> list[Any] | None:
        return None

    def label(self, value: Any, ids: dict[str, int]) -> Any:
        return value

    def measure(self, predictions: Any, labels: Any, names: list[str]) -> dict[str, float]:
        return metrics.regression(_first(predictions), labels)


class MultiLabel(TextClassification):
    """Labels as a list in each row, as text with "," ";" or "|" between them, or as several columns of 0 and 1."""

    problem_type = "multi_label_classification"
    loss_counts_items = False

    def read(self, table: Dataset, settings: FinetuneSettings, where: str) -> Rows:
        columns = _read_texts(table, settings, where)
        if isinstance(settings.label_column, list) and len(settings.label_column) > 1:
            names = [pick_column(table, name, (), f"label_column ({where})") for name in settings.label_column]
            flags = [[as_number(value) for value in label_values(table, name, where)] for name in names]
            for name, values in zip(names, flags, strict=True):
                odd = next((value for value in values if value not in (0, 1)), None)
                if odd is not None:
                    raise ValueError(f"label_column ({where}): column {name!r} holds {odd!r}; it must be 0 or 1")
            columns["label"] = [[name for name, flag in zip(names, row) if flag] for row in zip(*flags, strict=True)]
            return Rows(columns, names)
        column = _label_column(table, settings, LABEL_NAMES, where)
        known = class_names(table, column)
        # a row may well have no label at all, so a missing cell is an empty list here
        columns["label"] = [self._split(value, known, where) for value in table[column][:]]
        found = {name for row in columns["label"] for name in row}
        if not found:
            raise ValueError(f"label_column ({where}): column {column!r} holds no label in any row")
        return Rows(columns, known or sorted_names(found))

    def _split(self, value: Any, known: list[str] | None, where: str) -> list[str]:
        if value is None:
            return []
        parts = re.split(r"[,;|]", value) if isinstance(value, str) else value if isinstance(value, list) else [value]
        return [_label_name(part, known, where) for part in parts if str(part).strip()]

    def strata(self, rows: Rows) -> list[Any] | None:
        return None

    def label(self, value: Any, ids: dict[str, int]) -> Any:
        row = [0.0] * len(ids)
        for name in value:
            row[ids[name]] = 1.0
        return row

    def measure(self, predictions: Any, labels: Any, names: list[str]) -> dict[str, float]:
        return metrics.multi_label(_first(predictions), labels)


class TokenClassification(FinetuneTask):
    """Words and one label per word: lists, or texts with spaces between. A word's first token carries its label."""

    auto_class = "AutoModelForTokenClassification"
    head_suffix = "ForTokenClassification"
    peft_type = "TOKEN_CLS"

    def read(self, table: Dataset, settings: FinetuneSettings, where: str) -> Rows:
        words = pick_column(table, settings.text_column, WORD_NAMES, f"text_column ({where})")
        usual = [name for name in TAG_NAMES if name != words]
        tags = _label_column(table, settings, usual, where)
        known = class_names(table, tags)
        columns: Columns = {"words": [], "tags": []}
        for number, (row, labels) in enumerate(zip(table[words][:], table[tags][:], strict=True), start=1):
            row = row.split() if isinstance(row, str) else row
            labels = labels.split() if isinstance(labels, str) else labels
            if not isinstance(row, list) or not isinstance(labels, list) or not row:
                raise ValueError(
                    f"data ({where}): row {number} needs words in {words!r} and labels in {tags!r}, as lists or "
                    f"as texts with spaces between, not {row!r} and {labels!r}"
                )
            if len(row) != len(labels):
                raise ValueError(
                    f"data ({where}): row {number} has {len(row)} words in {words!r} and {len(labels)} labels in "
                    f"{tags!r}; there must be one label a word"
                )
            columns["words"].append([str(word) for word in row])
            columns["tags"].append([_label_name(label, known, where) for label in labels])
        found = {name for row in columns["tags"] for name in row}
        if where == "data" and len(found) < 2:
            raise ValueError(f"label_column ({where}): column {tags!r} holds one label only ({found.pop()!r})")
        return Rows(columns, known or sorted_names(found))

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerBase, model: str) -> PreTrainedTokenizerBase:
        _need_fast(tokenizer, "token-classification")
        if getattr(tokenizer, "add_prefix_space", None) is False:
            # byte-level BPE: a word inside a sentence is another token than the same word at its start
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(model, add_prefix_space=True)
        return tokenizer

    def encode(
        self, rows: Columns, tokenizer: PreTrainedTokenizerBase, max_length: int, ids: dict[str, int]
    ) -> Columns:
        encoded = tokenizer(rows["words"], is_split_into_words=True, truncation=True, max_length=max_length)
        labels = []
        for index, tags in enumerate(rows["tags"]):
            row, previous = [], None
            for word in encoded.word_ids(index):
                row.append(ids[tags[word]] if word is not None and word != previous else IGNORED)
                previous = word
            labels.append(row)
        return {**encoded, "labels": labels, "cut": _cut(encoded, len(labels))}

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
        return DataCollatorForTokenClassification(tokenizer, label_pad_token_id=IGNORED)

    def measure(self, predictions: Any, labels: Any, names: list[str]) -> dict[str, float]:
        return metrics.token_classification(_first(predictions), labels, names)


class QuestionAnswering(FinetuneTask):
    """Extractive, SQuAD's columns: question, context, and answers as {"text": [...], "answer_start": [...]}, or the
    columns answer and, optionally, answer_start (characters). A context that is too long becomes overlapping windows;
    a window without the answer points at token 0, and so does a question without one. Metrics count windows.
    """

    auto_class = "AutoModelForQuestionAnswering"
    head_suffix = "ForQuestionAnswering"
    peft_type = "QUESTION_ANS"
    label_inputs = ("start_positions", "end_positions")

    def read(self, table: Dataset, settings: FinetuneSettings, where: str) -> Rows:
        question = pick_column(table, settings.text_column, ("question", "query"), f"text_column ({where})")
        context = pick_column(
            table, settings.text_pair_column, ("context", "passage", "document", "text"), f"text_pair_column ({where})"
        )
        answer = _label_column(table, settings, ("answers", "answer", "answer_text", "label"), where)
        contexts = text_values(table, context, f"text_pair_column ({where})")
        columns: Columns = {"question": text_values(table, question, f"text_column ({where})"), "context": contexts}
        starts = table["answer_start"][:] if "answer_start" in table.column_names else [None] * len(table)
        columns["start"], columns["end"] = [], []
        for number, (value, start, text) in enumerate(zip(table[answer][:], starts, contexts, strict=True), start=1):
            if isinstance(value, dict):
                texts, places = value.get("text") or [], value.get("answer_start") or []
                value, start = (texts[0], places[0] if places else None) if texts else (None, None)
            first, last = -1, -1
            if value is not None and str(value).strip():
                value = str(value)
                first = text.find(value) if start is None else int(start)
                last = first + len(value)
                if first < 0 or text[first:last] != value:
                    raise ValueError(
                        f"data ({where}): row {number}: the answer {value!r} does not stand in {context!r}"
                        + (f" at character {first}" if start is not None else "")
                    )
            columns["start"].append(first)
            columns["end"].append(last)
        return Rows(columns)

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerBase, model: str) -> PreTrainedTokenizerBase:
        _need_fast(tokenizer, "question-answering")
        return tokenizer

    def encode(
        self, rows: Columns, tokenizer: PreTrainedTokenizerBase, max_length: int, ids: dict[str, int]
    ) -> Columns:
        try:
            encoded = tokenizer(
                rows["question"],
                rows["context"],
                truncation="only_second",
                max_length=max_length,
                stride=max_length // 4,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
        except BaseException as error:  # the tokenizers library panics, which is not an Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ValueError(
                f"max_length: {max_length} leaves no room for the context beside the longest question; raise it"
            ) from error
        owners = encoded.pop("overflow_to_sample_mapping")
        offsets = encoded.pop("offset_mapping")
        starts, ends = [], []
        for index, owner in enumerate(owners):
            first, last = rows["start"][owner], rows["end"][owner]
            # tokens of the context that hold a character of the answer
            held = [
                token
                for token, (part, (begin, stop)) in enumerate(zip(encoded.sequence_ids(index), offsets[index]))
                if part == 1 and begin < last and stop > first
            ]
            whole = bool(held) and offsets[index][held[0]][0] <= first and offsets[index][held[-1]][1] >= last
            starts.append(held[0] if whole else 0)
            ends.append(held[-1] if whole else 0)
        return {**encoded, "start_positions": starts, "end_positions": ends, "cut": [False] * len(owners)}

    def measure(self, predictions: Any, labels: Any, names: list[str]) -> dict[str, float]:
        return metrics.question_answering(predictions[0], predictions[1], labels[0], labels[1])


class MultipleChoice(FinetuneTask):
    """A question and the same number of choices in every row: a list column, or columns such as choice0, ending1, A."""

    auto_class = "AutoModelForMultipleChoice"
    head_suffix = "ForMultipleChoice"
    loss_counts_items = False

    def read(self, table: Dataset, settings: FinetuneSettings, where: str) -> Rows:
        text = pick_column(
            table, settings.text_column, ("question", "prompt", "context", "sent1", "text"), f"text_column ({where})"
        )
        column = _label_column(table, settings, ("label", "answer", "answerkey", "correct", "target"), where)
        choices = self._choices(table, {text, column}, where)
        sizes = {len(row) for row in choices}
        if len(sizes) > 1 or max(sizes) < 2:
            raise ValueError(
                f"data ({where}): rows have {sorted(sizes)} choices; all rows need the same number, 2 or more"
            )
        columns: Columns = {"text": text_values(table, text, f"text_column ({where})"), "choices": choices}
        values = [as_number(value) for value in label_values(table, column, where)]
        letters = class_names(table, column)
        columns["label"] = [
            self._index(letters[value] if letters and isinstance(value, int) else value, row, number, where)
            for number, (value, row) in enumerate(zip(values, choices, strict=True), start=1)
        ]
        return Rows(columns)

    def _choices(self, table: Dataset, used: set[str], where: str) -> list[list[str]]:
        for name in ("choices", "options", "endings", "answers"):
            if name in table.column_names and name not in used:
                rows = table[name][:]
                return [[str(item) for item in (row["text"] if isinstance(row, dict) else row)] for row in rows]
        names = [
            name
            for name in table.column_names
            if name not in used and re.fullmatch(r"(?i)(choice|ending|option|answer|sol)_?[0-9a-e]|[A-E]", name)
        ]
        if len(names) < 2:
            raise ValueError(
                f"data ({where}): no choices: neither a list column (choices, options, endings) nor columns such as "
                f"choice0 and choice1; the columns are {', '.join(table.column_names)}"
            )
        return [[str(item) for item in row] for row in zip(*(table[name][:] for name in sorted(names)), strict=True)]

    def _index(self, value: Any, choices: list[str], number: int, where: str) -> int:
        """The right choice's position, given as 0-based number, letter A, B, ... or the choice's own text."""
        text = str(value).strip()
        if text in choices:
            return choices.index(text)
        index = int(text) if text.isdigit() else ord(text.upper()) - ord("A") if len(text) == 1 else -1
        if not 0 <= index < len(choices):
            raise ValueError(
                f"label_column ({where}): row {number} has {value!r}; give 0 to {len(choices) - 1}, a letter or the "
                "choice's text"
            )
        return index

    def strata(self, rows: Rows) -> list[Any] | None:
        return rows.columns["label"]

    def encode(
        self, rows: Columns, tokenizer: PreTrainedTokenizerBase, max_length: int, ids: dict[str, int]
    ) -> Columns:
        count = len(rows["choices"][0])
        texts = [text for text in rows["text"] for _ in range(count)]
        flat = [choice for choices in rows["choices"] for choice in choices]
        encoded = tokenizer(texts, flat, truncation=True, max_length=max_length)
        cut = _cut(encoded, len(flat))
        nested = {
            name: [values[at : at + count] for at in range(0, len(values), count)] for name, values in encoded.items()
        }
        return {
            **nested,
            "labels": rows["label"],
            "cut": [any(cut[at : at + count]) for at in range(0, len(cut), count)],
        }

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
        return DataCollatorForMultipleChoice(tokenizer)

    def measure(self, predictions: Any, labels: Any, names: list[str]) -> dict[str, float]:
        return metrics.classification(_first(predictions), labels)


class LanguageModel(FinetuneTask):
    """What both language-modeling tasks share: one text a row, and an exact loss per token instead of logits."""

    language_model = True

    def read(self, table: Dataset, settings: FinetuneSettings, where: str) -> Rows:
        field_name = f"text_column ({where})"
        column = pick_column(table, settings.text_column, TEXT_NAMES, field_name)
        texts = [str(text) for text in table[column][:] if text is not None and str(text).strip()]
        if not texts:
            raise ValueError(f"{field_name}: column {column!r} has no rows with text")
        # text files are full of blank lines; they carry nothing to learn
        blank = len(table) - len(texts)
        notes = [f"{where}: left out {blank} of {len(table)} rows without text"] if blank else []
        return Rows({"text": texts}, notes=notes)

    def measure(self, predictions: Any, labels: Any, names: list[str]) -> dict[str, float]:
        """predictions (B, 2): each row's share of its batch's summed loss in nats, and of its number of targets."""
        loss = float(predictions[:, 0].sum(dtype=np.float64) / predictions[:, 1].sum(dtype=np.float64))
        return {"token_loss": loss, "perplexity": metrics.perplexity(loss)}


class CausalLM(LanguageModel):
    auto_class = "AutoModelForCausalLM"
    head_suffix = "ForCausalLM"
    peft_type = "CAUSAL_LM"

    def encode(
        self, rows: Columns, tokenizer: PreTrainedTokenizerBase, max_length: int, ids: dict[str, int]
    ) -> Columns:
        end = tokenizer.eos_token_id
        encoded: Columns = {"input_ids": [], "attention_mask": [], "cut": []}
        for tokens in tokenizer(rows["text"], verbose=False)["input_ids"]:
            # the model must learn to stop, and most tokenizers of decoders do not write the end themselves
            tokens = tokens if end is None or (tokens and tokens[-1] == end) else [*tokens, end]
            encoded["cut"].append(len(tokens) > max_length)
            encoded["input_ids"].append(tokens[:max_length])
            encoded["attention_mask"].append([1] * len(encoded["input_ids"][-1]))
        return encoded

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
        return CausalLMCollator(tokenizer)


class MaskedLM(LanguageModel):
    auto_class = "AutoModelForMaskedLM"
    head_suffix = "ForMaskedLM"

    def encode(
        self, rows: Columns, tokenizer: PreTrainedTokenizerBase, max_length: int, ids: dict[str, int]
    ) -> Columns:
        encoded = tokenizer(rows["text"], truncation=True, max_length=max_length)
        return {**encoded, "cut": _cut(encoded, len(rows["text"]))}

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerBase, model: str) -> PreTrainedTokenizerBase:
        if tokenizer.mask_token is None:
            raise ValueError(f"task: 'masked-lm' needs a tokenizer with a mask token, which that of {model!r} has not")
        return tokenizer

    def prepare_eval(self, table: Dataset, tokenizer: PreTrainedTokenizerBase, seed: int) -> Dataset:
        """Mask the evaluation rows once, so that epochs are compared on the same positions."""
        masker = MaskedLMCollator(tokenizer, seed)
        rows: Columns = {"input_ids": [], "labels": []}
        for row in table:
            batch = masker([row])
            for name in rows:
                rows[name].append(batch[name][0].tolist())
        return Dataset.from_dict({**{name: table[name][:] for name in table.column_names}, **rows})

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
        return MaskedLMCollator(tokenizer)


class CausalLMCollator:
    """Pads a batch; labels are the inputs, ignored only where the attention mask says padding.

    The library's own collator ignores every pad *token*, which loses the end of each text when pad and end are one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.pad = DataCollatorWithPadding(tokenizer)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.pad([{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows])
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return batch


class MaskedLMCollator:
    """Pads and masks 15 % of the tokens; rows that already have labels are only padded.

    Draws again when nothing was masked, as happens to short texts in small batches: the loss of no targets is 0/0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int | None = None) -> None:
        self.mask = DataCollatorForLanguageModeling(tokenizer, seed=seed)
        self.pad = DataCollatorForTokenClassification(tokenizer, label_pad_token_id=IGNORED)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if "labels" in rows[0]:
            return self.pad(rows)
        for _ in range(200):
            # the collator may write into what it is given
            batch = self.mask(copy.deepcopy(rows))
            if (batch["labels"] != IGNORED).any():
                break
        return batch


def _need_fast(tokenizer: PreTrainedTokenizerBase, task: str) -> None:
    if not tokenizer.is_fast:
        raise ValueError(
            f"task: {task!r} needs a tokenizer that knows words and characters (tokenizer.json), not a slow one"
        )


TASK_CLASSES: dict[str, type[FinetuneTask]] = {
    "text-classification": TextClassification,
    "regression": Regression,
    "multi-label": MultiLabel,
    "token-classification": TokenClassification,
    "question-answering": QuestionAnswering,
    "multiple-choice": MultipleChoice,
    "masked-lm": MaskedLM,
    "causal-lm": CausalLM,
}
