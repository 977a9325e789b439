"""Rules on the packages' metadata that neither uv nor hatchling enforces.

uv replaces a sibling's version range by the workspace's copy without comparing the two, so that a
wrong range would first be noticed by whoever installs the wheels. Each rule yields one sentence
per violation: what is wrong, where, and what would be right.
"""

import re
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from site_links import REPOSITORY, relative_links
from workspace import Member, Workspace

REQUIRES_PYTHON = ">=3.11"
_STATED_VERSION = re.compile(r"""^__version__ = ["'](.*)["']$""", re.MULTILINE)


def required_files(workspace: Workspace) -> Iterator[str]:
    """Each member has its documents, an importable and typed module, and at least one test."""
    license_text = (workspace.root / "LICENSE").read_text(encoding="utf-8")
    for member in workspace.members.values():
        module = f"src/{member.module}"
        documents = ("README.md", "CHANGELOG.md", "LICENSE")
        for needed in (*documents, f"{module}/__init__.py", f"{module}/py.typed"):
            if not (member.path / needed).is_file():
                yield f"packages/{member.name}/{needed} is missing"
        license_file = member.path / "LICENSE"
        if license_file.is_file() and license_file.read_text(encoding="utf-8") != license_text:
            yield f"packages/{member.name}/LICENSE differs from the root LICENSE; copy that one"
        if not any((member.path / "tests").glob("**/test_*.py")):
            yield f"packages/{member.name}/tests has no test_*.py"


def project_table(workspace: Workspace) -> Iterator[str]:
    """Each member names itself, its static version, Python, licence and build backend alike."""
    for member in workspace.members.values():
        where = f"packages/{member.name}/pyproject.toml"
        wanted = {
            "name": member.name,
            "requires-python": REQUIRES_PYTHON,
            "license": "BSD-3-Clause",
            "license-files": ["LICENSE"],
            "readme": "README.md",
        }
        for key, value in wanted.items():
            found = member.project.get(key)
            if found != value:
                yield f"{where}: project.{key} is {found!r}, must be {value!r}"
        if not member.version or "dynamic" in member.project:
            yield f"{where}: the version must be static (project.version, no project.dynamic)"
        backend = member.pyproject.get("build-system", {}).get("build-backend")
        if backend != "hatchling.build":
            yield f"{where}: build-backend is {backend!r}, must be 'hatchling.build'"


def module_version(workspace: Workspace) -> Iterator[str]:
    """Each module states the package's version as `__version__`."""
    for member in workspace.members.values():
        init = member.path / "src" / member.module / "__init__.py"
        if not init.is_file():
            continue  # reported by required_files
        stated = _STATED_VERSION.findall(init.read_text(encoding="utf-8"))
        if stated != [member.version]:
            yield (
                f"packages/{member.name}/src/{member.module}/__init__.py: __version__ is "
                f"{', '.join(map(repr, stated)) or 'missing'}, project.version is "
                f"{member.version!r}"
            )


def readme_links(workspace: Workspace) -> Iterator[str]:
    """A README of a package, which wheels carry to a registry, links to addresses."""
    for member in workspace.members.values():
        readme = member.path / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
        for target in relative_links(text):
            yield (
                f"packages/{member.name}/README.md links to {target}, which leads nowhere from a "
                f"registry: begin it with {REPOSITORY}"
            )


def changelog_has_version(workspace: Workspace) -> Iterator[str]:
    """The CHANGELOG's newest heading is the version, so that no release goes undescribed."""
    for member in workspace.members.values():
        changelog = member.path / "CHANGELOG.md"
        if not changelog.is_file():
            continue  # reported by required_files
        lines = changelog.read_text(encoding="utf-8").splitlines()
        newest = next((line for line in lines if line.startswith("## ")), "nothing")
        if newest.split()[1:2] != [member.version]:
            yield (
                f"packages/{member.name}/CHANGELOG.md begins with {newest!r}, "
                f"must begin with '## {member.version}'"
            )


def sibling_ranges(workspace: Workspace) -> Iterator[str]:
    """Sibling ranges are bounded on both sides and hold the sibling's version in the workspace."""
    for member in workspace.members.values():
        where = f"packages/{member.name}/pyproject.toml"
        sources = member.pyproject.get("tool", {}).get("uv", {}).get("sources", {})
        siblings = _sibling_requirements(workspace, member)
        for requirement in siblings:
            sibling = workspace.members[canonicalize_name(requirement.name)]
            if not _is_bounded(requirement.specifier):
                yield f"{where}: {str(requirement)!r} needs a lower and an upper bound"
            if not requirement.specifier.contains(sibling.version, prereleases=True):
                yield f"{where}: {str(requirement)!r} excludes {sibling.name} {sibling.version}"
        names = {canonicalize_name(requirement.name) for requirement in siblings}
        for name in sorted(names):
            if sources.get(name) != {"workspace": True}:
                yield f"{where}: [tool.uv.sources] needs `{name} = {{ workspace = true }}`"
        for name in sorted(set(sources) - names):
            yield f"{where}: [tool.uv.sources] names {name}, which is not a declared sibling"


def torch_ranges(workspace: Workspace) -> Iterator[str]:
    """One torch range where a matrix is tested, one elsewhere; each holds what is tested."""
    default = _exact_pin(workspace, group="defaults", name="torch")
    if default is None:
        yield "pyproject.toml: dependency group 'defaults' must pin torch exactly"
        return
    ranges: dict[bool, dict[str, str]] = {True: {}, False: {}}
    matrices: dict[str, tuple[str, ...]] = {}
    for member in workspace.members.values():
        matrix = _torch_matrix(member)
        if matrix:
            matrices[member.name] = matrix
        for requirement in member.requirements(extras=member.extras):
            if canonicalize_name(requirement.name) != "torch":
                continue
            ranges[bool(matrix)][member.name] = str(requirement.specifier)
            for version in sorted({default, *matrix}):
                if not requirement.specifier.contains(version):
                    yield (
                        f"packages/{member.name}/pyproject.toml: {str(requirement)!r} excludes "
                        f"torch {version}, which we test"
                    )
    for alike in ranges.values():
        if len(set(alike.values())) > 1:
            yield f"packages declare different torch ranges: {alike}"
    if len(set(matrices.values())) > 1:
        yield f"packages declare different torch matrices: {matrices}"
    for name, matrix in matrices.items():
        if default not in matrix:
            yield f"packages/{name}/pyproject.toml: the torch matrix lacks the default {default}"


def pinned_tools(workspace: Workspace) -> Iterator[str]:
    """Dependency groups and the build backend are pinned exactly: there is no lock file."""
    pins = [
        (f"dependency group {group!r}", requirement)
        for group in workspace.pyproject.get("dependency-groups", {})
        for requirement in workspace.group(group)
    ]
    uv = workspace.pyproject.get("tool", {}).get("uv", {})
    backends = [Requirement(line) for line in uv.get("build-constraint-dependencies", ())]
    pins.extend(("tool.uv.build-constraint-dependencies", pin) for pin in backends)
    for where, requirement in pins:
        if _pinned_version(requirement) is None:
            yield f"pyproject.toml: {where}: {str(requirement)!r} must be pinned with =="
    if "hatchling" not in {canonicalize_name(pin.name) for pin in backends}:
        yield "pyproject.toml: tool.uv.build-constraint-dependencies must pin hatchling"


PACKAGE_RULES = (
    required_files,
    project_table,
    module_version,
    readme_links,
    changelog_has_version,
    sibling_ranges,
    torch_ranges,
    pinned_tools,
)


def _sibling_requirements(workspace: Workspace, member: Member) -> list[Requirement]:
    return [
        requirement
        for requirement in member.requirements(extras=member.extras)
        if canonicalize_name(requirement.name) in workspace.members
    ]


def _is_bounded(specifiers: SpecifierSet) -> bool:
    operators = {specifier.operator for specifier in specifiers}
    return bool(operators & {">=", ">"}) and bool(operators & {"<", "<="})


def _pinned_version(requirement: Requirement) -> str | None:
    specifiers = list(requirement.specifier)
    if len(specifiers) != 1 or specifiers[0].operator != "==" or "*" in specifiers[0].version:
        return None
    return specifiers[0].version


def _exact_pin(workspace: Workspace, *, group: str, name: str) -> str | None:
    for requirement in workspace.group(group):
        if canonicalize_name(requirement.name) == name:
            return _pinned_version(requirement)
    return None


def _torch_matrix(member: Member) -> tuple[str, ...]:
    environments = member.pyproject.get("tool", {}).get("hatch", {}).get("envs", {})
    rows = environments.get("torch", {}).get("matrix", ())
    return tuple(version for row in rows for version in row.get("torch", ()))
