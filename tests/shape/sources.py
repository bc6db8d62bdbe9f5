"""The source of the packages, as modules, imports and classes."""

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = {"pswire": ROOT / "protos" / "pswire"}


@dataclass(frozen=True, slots=True)
class ShapeOfClass:
    """How much there is to know of a class to use it.

    Attributes:
        name: Its name.
        module: Where it is.
        method_count: Public methods and properties.
        argument_count: Arguments of its constructor, or fields of a dataclass.
    """

    name: str
    module: str
    method_count: int
    argument_count: int


class Sources:
    """All modules of some packages, but for generated ones.

    Args:
        paths: Where each module is.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._trees = {
            name: ast.parse(path.read_text(encoding="utf-8"))
            for name, path in paths.items()
        }
        self._imports = {name: self._imports_of(name) for name in paths}

    @classmethod
    def of(cls, packages: Sequence[str]) -> Self:
        """Reads some packages of this repository; leaves out those it has not."""
        paths = {}
        for package in packages:
            folder = FOLDERS.get(package, ROOT / package)
            for path in sorted(folder.rglob("*.py")):
                if "_pb2" in path.name:
                    continue
                parts = path.relative_to(folder).with_suffix("").parts
                named = parts[:-1] if parts[-1] == "__init__" else parts
                paths[".".join((package, *named))] = path
        return cls(paths)

    def modules_of(self, package: str) -> list[str]:
        """Names of a package's modules."""
        return [each for each in self._paths if _is_in(each, package)]

    def rooms(self, package: str) -> set[str]:
        """Packages right inside of a package."""
        return {
            name
            for name, path in self._paths.items()
            if path.name == "__init__.py"
            and name.count(".") == 1
            and _is_in(name, package)
        }

    def loose(self, package: str) -> set[str]:
        """Modules right inside of a package."""
        return {
            name
            for name, path in self._paths.items()
            if path.name != "__init__.py"
            and name.count(".") == 1
            and _is_in(name, package)
        }

    def line_count(self, module: str) -> int:
        """All lines of a module."""
        return len(self._paths[module].read_text(encoding="utf-8").splitlines())

    def code_line_count(self, module: str) -> int:
        """Lines of a module that are no blank ones, comments or docstrings."""
        text = self._paths[module].read_text(encoding="utf-8")
        left_out = {
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        }
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in left_out:
                lines.update(range(token.start[0], token.end[0] + 1))
        return len(lines - set(_docstring_lines(self._trees[module])))

    def floor_count(self, package: str) -> int:
        """Modules on the longest way down from one that imports to one that does not.

        By what is imported as a module is: this has no circle.
        """
        inside = set(self.modules_of(package))

        @cache
        def floors(module: str) -> int:
            below = self._imports_of(module, at_once=True) & inside
            return 1 + max(map(floors, below), default=0)

        return max(map(floors, inside), default=0)

    def arrow_count(self, package: str) -> int:
        """Imports between parts of a package: its rooms, and its loose modules."""
        return len(
            {
                (_part(module), _part(imported))
                for module in self.modules_of(package)
                for imported in self._imports[module]
                if _is_in(imported, package) and _part(module) != _part(imported)
            }
        )

    def imports_between(self, one: str, other: str) -> set[tuple[str, str]]:
        """Imports from one package into another, in either direction."""
        return {
            (module, imported)
            for module in self._paths
            for imported in self._imports[module]
            if (_is_in(module, one) and _is_in(imported, other))
            or (_is_in(module, other) and _is_in(imported, one))
        }

    def classes(self) -> list[ShapeOfClass]:
        """All classes, those with most methods first."""
        found = [
            ShapeOfClass(node.name, module, _method_count(node), _argument_count(node))
            for module, tree in self._trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        ]
        return sorted(found, key=lambda each: (-each.method_count, each.module))

    def splinters(self, lines_max: int) -> list[tuple[str, int, str]]:
        """Short modules that one other module imports, with their lines and it."""
        importers = defaultdict(set)
        for module, imported in self._imports.items():
            for each in imported:
                importers[each].add(module)
        return [
            (module, lines, next(iter(importers[module])))
            for module, path in self._paths.items()
            if path.name != "__init__.py"
            and len(importers[module]) == 1
            and (lines := self.line_count(module)) < lines_max
        ]

    def _imports_of(self, module: str, *, at_once: bool = False) -> set[str]:
        """Modules of ours that a module imports: all, or those as it is imported."""
        tree = self._trees[module]
        found: set[str] = set()
        for node in tree.body if at_once else ast.walk(tree):
            if isinstance(node, ast.Import):
                found.update(each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for each in node.names:
                    inner = f"{node.module}.{each.name}"
                    found.add(inner if inner in self._paths else node.module)
        return (found & set(self._paths)) - {module}


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _part(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node, clean=False):
            first = node.body[0]
            yield from range(first.lineno, (first.end_lineno or 0) + 1)


def _method_count(node: ast.ClassDef) -> int:
    return sum(
        isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and not each.name.startswith("_")
        for each in node.body
    )


def _argument_count(node: ast.ClassDef) -> int:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return len(each.args.args) - 1 + len(each.args.kwonlyargs)
    return 0
