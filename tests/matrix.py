"""The README's table of what was tried with what, written from what a test run did:

pytest tests -m matrix --matrix=README.md
"""

from pathlib import Path

import pytest

START, END = "<!-- matrix -->\n", "<!-- end matrix -->"
YES, AS_STOCK, FAILED = "✓", "–", "✗"


def architecture_of(item: pytest.Item) -> str | None:
    """The architecture that a parametrised test is about."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    subject = parameters.get("subject")
    model_type = subject.model_type if subject is not None else parameters.get("model_type")
    return model_type and model_type.removeprefix("ext_")


class Matrix:
    """Collects the outcomes of tests with the marker `matrix(column)`."""

    def __init__(self) -> None:
        self.outcomes: dict[tuple[str, str], set[str]] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        name = architecture_of(item)
        for marker in item.iter_markers("matrix"):
            if name:  # plain values: they travel between the processes of a run
                item.user_properties.append(("matrix", [name, marker.args[0]]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            for kind, value in report.user_properties:
                if kind == "matrix":
                    self.outcomes.setdefault(tuple(value), set()).add(report.outcome)

    def cell(self, name: str, column: str, blocks_of: str | None) -> str:
        """One cell: where the blocks are another architecture's, what was found with that one, in brackets."""
        found = self.outcomes.get((name, column))
        if found is None:
            borrowed = self.cell(blocks_of, column, None) if blocks_of else ""
            return f"({borrowed})" if borrowed else ""
        if "failed" in found:
            return FAILED
        return YES if "passed" in found else AS_STOCK

    def table(self, architectures: dict[str, str | None]) -> str:
        """Markdown, from the architectures and whose blocks they have."""
        columns = list(dict.fromkeys(column for _, column in self.outcomes))
        lines = [f"| | {' | '.join(columns)} |", f"|---|{':-:|' * len(columns)}"]
        for name, blocks_of in architectures.items():
            cells = [self.cell(name, column, blocks_of) for column in columns]
            lines.append(f"| `ext_{name}` | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"

    def write(self, readme: Path, architectures: dict[str, str | None]) -> None:
        """Replace the table in a file that has a place for it."""
        before, mark, rest = readme.read_text().partition(START)
        _, end, after = rest.partition(END)
        if not (mark and end):
            raise ValueError(f"{readme} has no place for the table: {START.strip()} and {END}")
        readme.write_text(f"{before}{mark}\n{self.table(architectures)}\n{end}{after}")
