"""Functions out of source files: stand-alone ones as HumanEval writes them, and docstring -> function pairs."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

BUILTINS = frozenset(dir(builtins))
LINES = range(3, 61)  # of a function worth taking, its first line not counted


@dataclass(frozen=True)
class Function:
    name: str
    summary: str  # first paragraph of the docstring, on one line
    imports: str  # the import lines that the function needs; "" when it needs none
    head: str  # from `def` to the end of the docstring, with a newline
    code: str  # the whole function, dedented, with a newline
    alone: bool  # stands alone: all its names are its own, builtins or imported ones

    @property
    def prompt(self) -> str:
        return (self.imports + "\n\n" if self.imports else "") + self.head

    @property
    def text(self) -> str:
        return (self.imports + "\n\n" if self.imports else "") + self.code


def parse(source: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in other people's strings
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _imports(tree: ast.Module) -> dict[str, str]:
    """Name -> the line that imports it, for absolute imports at the top of a file."""
    lines = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                line = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                lines[alias.asname or alias.name.split(".")[0]] = line
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
            for alias in node.names:
                line = f"from {node.module} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                lines[alias.asname or alias.name] = line
    return lines


def _free_names(function: ast.FunctionDef) -> set[str]:
    """Names the function reads and does not bind itself (a flat look, without scopes)."""
    read, bound = set(), {function.name}
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound - BUILTINS


def functions(tree: ast.Module, source: str) -> Iterator[Function]:
    """Every documented function of a file, methods included (they are never `alone`)."""
    imports, lines, top = _imports(tree), source.split("\n"), set(map(id, tree.body))
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("test"):
            continue
        docstring = ast.get_docstring(node)
        if not docstring or len(node.body) < 2 or node.end_lineno - node.lineno not in LINES:
            continue
        summary = re.sub(r"\s+", " ", docstring.split("\n\n")[0]).strip()
        free = _free_names(node)
        alone = id(node) in top and not node.decorator_list and free <= imports.keys()
        needed = "\n".join(sorted({imports[n] for n in free})) if alone else ""
        yield Function(
            name=node.name,
            summary=summary,
            imports=needed + "\n" if needed else "",
            head=textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])) + "\n",
            code=textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n",
            alone=alone,
        )
