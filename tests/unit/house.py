"""The rules of the house as functions of source text, so that each can be shown to fail on a bad example.

Every checker takes {path relative to the repository: source text} and returns complaints, one a line.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping

Sources = Mapping[str, str]

FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 8

#: Rooms that need nothing but the standard library and themselves.
PURE = ("hpctrain/errors.py", "hpctrain/dtypes.py", "hpctrain/contracts.py", "hpctrain/plan/")
PURE_MAY_IMPORT = ("hpctrain.errors", "hpctrain.dtypes", "hpctrain.contracts", "hpctrain.plan")


def module_name(path: str) -> str:
    """hpctrain/plan/ring.py -> hpctrain.plan.ring; a package's __init__ is the package."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(source: str, *, typing_only: bool = False) -> Iterator[tuple[str, int]]:
    """(full name, line) of everything that a file imports, lazily too; `if TYPE_CHECKING` blocks only if asked for."""
    skipped: set[ast.AST] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not typing_only:
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def cycles(sources: Sources) -> list[str]:
    """Modules that import each other in a ring, lazy imports included."""
    names = {module_name(path): source for path, source in sources.items()}
    graph = {}
    for name, source in names.items():
        found = {_known(target, names) for target, _ in imports(source)}
        graph[name] = sorted(f for f in found if f is not None and f != name)
    complaints, done = [], set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            complaints.append(" -> ".join([*path[path.index(name):], name]))
        elif name not in done:
            for target in graph[name]:
                visit(target, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return complaints


def _known(target: str, names: Mapping[str, str]) -> str | None:
    """The module that an imported name comes from: `a.b.c` is module a.b.c, or something in a.b."""
    if target in names:
        return target
    parent = target.rpartition(".")[0]
    return parent if parent in names else None


def impure(sources: Sources) -> list[str]:
    """Imports of the pure rooms that are neither standard library nor another pure room."""
    return [
        f"{path}:{line}: imports {target}"
        for path, source in sources.items() if path.startswith(PURE)
        for target, line in imports(source, typing_only=True)
        if target.split(".")[0] not in sys.stdlib_module_names and not target.startswith(PURE_MAY_IMPORT)
    ]


def environment_reads(sources: Sources) -> list[str]:
    """Reads of environment variables outside hpctrain/env.py."""
    return [
        f"{path}:{node.lineno}: reads the environment"
        for path, source in sources.items() if path != "hpctrain/env.py"
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv", "environb"})
    ]


def too_large(sources: Sources) -> list[str]:
    """Files, functions and parameter lists above the caps."""
    complaints = []
    for path, source in sources.items():
        if (lines := source.count("\n")) > FILE_LINES:
            complaints.append(f"{path}: {lines} lines, at most {FILE_LINES}")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES:
                complaints.append(f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES}")
            count = len([a for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")])
            count += len(node.args.kwonlyargs)
            if count > PARAMETERS and not _is_command(path):
                complaints.append(f"{path}:{node.lineno}: {node.name} has {count} parameters, at most {PARAMETERS}")
    return complaints


def _is_command(path: str) -> bool:
    return path.startswith("hpctrain/cli/")  # each option of a command is one parameter


def global_statements(sources: Sources) -> list[str]:
    """`global` in functions."""
    return [f"{path}:{node.lineno}: global" for path, source in sources.items()
            for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Global)]


def vague_names(sources: Sources) -> list[str]:
    """Files and folders whose name says nothing."""
    vague = re.compile(r"(^|/|_)(utils?|common|helpers?|misc)(_|/|\.py$)")
    return [f"{path}: a vague name" for path in sources if vague.search(path)]


def undocumented_modules(sources: Sources) -> list[str]:
    """Files without a docstring that says what they own."""
    return [f"{path}: no module docstring" for path, source in sources.items()
            if ast.get_docstring(ast.parse(source)) is None]


def machine_paths(sources: Sources) -> list[str]:
    """Absolute paths of somebody's machine, in code or comments."""
    pattern = re.compile(r"(?<![\w.])/(home|root|work|Users|farm|mnt|scratch|tmp)/\w")
    return [f"{path}:{number}: {line.strip()}" for path, source in sources.items()
            for number, line in enumerate(source.splitlines(), 1) if pattern.search(line)]
