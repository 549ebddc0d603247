"""For mkdocstrings: what docstrings write as aligned columns, `name   what it is`, becomes a list of the page."""

import re

from griffe import Docstring, Extension

NAMES = re.compile(r"(\w+(?:, \w+)*)( +)(?=\S)")


def as_lists(text: str) -> str:
    """The text with each paragraph of two aligned columns as a Markdown list."""
    return "\n\n".join(_as_list(paragraph.split("\n")) for paragraph in re.split(r"\n{2,}", text))


def _as_list(lines: list[str]) -> str:
    """Names begin a line, and what is said about them begins in one column, in which it continues."""
    starts = [NAMES.match(line) for line in lines]
    columns = [start.end() for start in starts if start and len(start[2]) > 1]
    columns += [len(line) - len(line.lstrip()) for line in lines if line.startswith("  ")]
    if not columns or not starts[0] or set(columns) != {columns[0]} or columns[0] < 6:
        return "\n".join(lines)
    items, column = list[str](), columns[0]
    for line in lines:
        if line[:column].strip():
            if line[column - 1 : column] != " ":
                return "\n".join(lines)
            items.append(f"* `{line[:column].strip()}`: {line[column:]}")
        else:
            items.append(f"  {line[column:]}")
    return "\n".join(items)


class AlignedColumns(Extension):
    """Applied to every docstring that is read."""

    def on_instance(self, *, obj, **_):
        if not obj.is_alias and isinstance(obj.docstring, Docstring):
            obj.docstring.value = as_lists(obj.docstring.value)
