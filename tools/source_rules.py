"""Rules on the tracked files: nothing of one machine, no forbidden import, no unclear or idle name.

import-linter sees imports of other distributions only by their first name, so the ban on
`torchtitan.experiments` (gt_trainer may import the rest of torchtitan) is checked here.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

from page_programs import PAGES, MissingPieceError, with_pieces
from workspace import Workspace

FORBIDDEN_MODULE = "torchtitan.experiments"
LOCK_FILES = {"uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "pylock.toml"}
VAGUE_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py"}

# An absolute path below a folder that belongs to one machine or one person.
MACHINE_PATH = re.compile(r"(?<![\w.~}/-])/(?:root|home|Users|work)/[\w.]+")
# Which registry is used is for each machine to configure.
REGISTRY = re.compile(
    r"files\.pythonhosted\.org|pypi\.org/simple|(?:extra-)?index-url\s*=|\[\[tool\.uv\.index\]\]"
)


def no_lock_file(workspace: Workspace) -> Iterator[str]:
    """A lock file records the registry of the machine that made it (docs/decisions/0001)."""
    for path in workspace.tracked:
        if PurePosixPath(path).name in LOCK_FILES:
            yield f"{path} is tracked; lock files are not committed: `git rm --cached {path}`"


def no_machine_in_text(workspace: Workspace) -> Iterator[str]:
    """No tracked text names an absolute machine path or a registry host."""
    for path, text in _tracked_text(workspace):
        for number, line in enumerate(text.splitlines(), start=1):
            for what, pattern in (("machine path", MACHINE_PATH), ("registry", REGISTRY)):
                match = pattern.search(line)
                if match:
                    yield f"{path}:{number} names a {what}: {match.group()!r}"


def no_forbidden_import(workspace: Workspace) -> Iterator[str]:
    """No package imports the competing system, not even by a string."""
    for path, text in _tracked_text(workspace):
        if not path.startswith("packages/") or not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text, filename=path)):
            for module in _imported_modules(node):
                if module == FORBIDDEN_MODULE or module.startswith(FORBIDDEN_MODULE + "."):
                    yield f"{path}:{getattr(node, 'lineno', 0)} imports {module}"


def no_vague_name(workspace: Workspace) -> Iterator[str]:
    """A file is named for its one idea."""
    for path in workspace.tracked:
        if PurePosixPath(path).name in VAGUE_NAMES:
            yield f"{path}: name the file for its one idea (STYLE.md, Names)"


def no_name_with_two_meanings(workspace: Workspace) -> Iterator[str]:
    """A public class, or a public set of words, has a name that no other of any package has."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, text in _tracked_text(workspace):
        if not re.fullmatch(r"packages/[^/]+/src/.+\.py", path):
            continue
        for node in ast.parse(text, filename=path).body:
            name = _defined_type(node)
            if name is not None and not name.startswith("_"):
                places[name].append(f"{path}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"{' and '.join(found)} each define {name}: name each for what it is"


def every_export_is_used(workspace: Workspace) -> Iterator[str]:
    """What a package or one of its folders exports is used outside of it, or a README promises it.

    Tests of a package may import from its modules, so they are no use. READMEs, and what stands
    beside them, may also name a class by its kebab-case name, as they do passes.
    """
    readmes: set[str] = set()
    exports: dict[str, tuple[str, list[str]]] = {}
    uses: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for path, text in _tracked_text(workspace):
        if path.endswith(".md") and "docs/" not in path and not path.endswith("CHANGELOG.md"):
            readmes.update(re.findall(r"[\w-]+", text), re.findall(r"\w+", text))
        if not path.endswith(".py") or re.match(r"packages/[^/]+/tests/", path):
            continue
        tree = ast.parse(text, filename=path)
        init = re.fullmatch(r"packages/[^/]+/src/(.+)/__init__\.py", path)
        if init and "/_" not in init[1]:
            exports[init[1].replace("/", ".")] = path, _exported_names(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    uses[node.module, alias.name].add(path)
    for module, (path, names) in exports.items():
        folder = str(PurePosixPath(path).parent) + "/"
        for name in names:
            is_used = any(not user.startswith(folder) for user in uses[module, name])
            kebab = re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()
            if not (is_used or name.startswith("__") or {name, kebab} & readmes):
                yield (
                    f"{path} exports {name}, which nothing outside of it imports and no README "
                    "names: take it out of `__all__`, and import it from its module"
                )


def pages_show_their_programs(workspace: Workspace) -> Iterator[str]:
    """What a page shows of a program is what a test runs."""
    for path in sorted(workspace.root.glob(PAGES)):
        page, name = path.read_text(encoding="utf-8"), path.relative_to(workspace.root)
        if "--8<--" in page:
            yield f"{name} names a piece as no tool here reads it: tools/page_programs.py"
        try:
            if with_pieces(page, workspace.root) != page:
                yield f"{name} shows a program as it was: `make format`"
        except MissingPieceError as error:
            yield f"{name} shows a piece of {error}"


SOURCE_RULES = (
    every_export_is_used,
    no_lock_file,
    no_machine_in_text,
    no_forbidden_import,
    no_vague_name,
    no_name_with_two_meanings,
    pages_show_their_programs,
)


def _tracked_text(workspace: Workspace) -> Iterator[tuple[str, str]]:
    for path in workspace.tracked:
        content = (workspace.root / path).read_bytes()
        if b"\0" not in content:
            yield path, content.decode("utf-8", errors="replace")


def _exported_names(tree: ast.Module) -> list[str]:
    """What a module's ``__all__`` lists."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _defined_type(node: ast.stmt) -> str | None:
    """The name of a class or of a Literal that a statement defines."""
    if isinstance(node, ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign):
        target, value = node.targets[0], node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        target, value = node.target, node.value
    else:
        return None
    is_literal = isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Literal"
    return target.id if is_literal and isinstance(target, ast.Name) else None


def _imported_modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        called = node.func.id if isinstance(node.func, ast.Name) else called
        if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
            yield node.args[0].value
