"""Doors open downward only: compat, ray, cli -> storages -> engine -> kernels -> native. Parsed, not imported."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import rlstore
from rlstore import Storage

PACKAGE = Path(rlstore.__file__).parent
NATIVE = Path(__file__).parents[1] / "csrc"
TOP = ("compat", "ray", "cli")
LONGEST_FILE = 450


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_by(name: str, *, at_run_time: bool = False) -> set[str]:
    """The modules of rlstore that a module imports, wherever in it; without those for type checkers, if so asked."""
    found: set[str] = set()
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if at_run_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(part for statement in node.body for part in ast.walk(statement))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(_known(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, node)
            # `from package import module` imports the module, `from module import name` the module that has it.
            found.update(_known(f"{base}.{alias.name}") for alias in node.names)
    return found - {"", name}


def _absolute(name: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


def _known(target: str) -> str:
    """The module of rlstore that an import of this name brings in; empty for other libraries."""
    while target and target not in MODULES and target != "rlstore.kernels._native":
        target = target.rpartition(".")[0]
    return target


def room(name: str) -> str:
    """kernels, engine, errors, top, the root, or (the rest) storages."""
    parts = name.split(".")
    if len(parts) == 1:
        return "root"
    if parts[1] in TOP:
        return "top"
    return parts[1] if parts[1] in ("kernels", "engine", "errors") else "storages"


DOORS = {
    "errors": set(),
    "kernels": {"kernels", "errors"},
    "engine": {"engine", "kernels", "errors"},
    "storages": {"storages", "engine", "errors"},
    "root": {"storages", "engine", "errors"},
    "top": {"top", "root", "storages", "engine", "errors"},
}


def storage_modules() -> list[str]:
    """The modules of the public storages: one public class each."""
    public = [getattr(rlstore, name) for name in rlstore.__all__]
    return sorted(
        part.__module__
        for part in public
        if inspect.isclass(part) and issubclass(part, Storage) and not inspect.isabstract(part)
    )


@pytest.mark.parametrize("name", MODULES)
def test_doors_open_downward_only(name):
    wrong = {target for target in imported_by(name) if room(target) not in DOORS[room(name)]}
    assert not wrong, f"{name} is in {room(name)} and imports {sorted(wrong)}"


def test_only_the_table_and_two_modules_for_cuda_know_the_native_module():
    knows = {name for name in MODULES if "rlstore.kernels._native" in imported_by(name)}
    assert knows == {"rlstore.kernels", "rlstore.kernels.cuda.launch", "rlstore.kernels.cuda.rows"}


@pytest.mark.parametrize("name", ["select", "gather", "returns"])
def test_select_gather_and_returns_do_not_import_one_another(name):
    others = {f"rlstore.engine.{other}" for other in ("select", "gather", "returns") if other != name}
    assert not imported_by(f"rlstore.engine.{name}") & others


def test_storages_do_not_import_each_other():
    modules = storage_modules()
    assert {"rlstore.rollout", "rlstore.decoupled"} <= set(modules)
    assert len(modules) == len(set(modules)), "one public storage a module"
    for name in MODULES:
        if room(name) == "storages":
            wrong = imported_by(name) & (set(modules) - {name})
            assert not wrong, f"{name} imports {sorted(wrong)}"


def test_modules_do_not_import_in_a_circle():
    waiting = {name: imported_by(name, at_run_time=True) & set(MODULES) for name in MODULES}
    while waiting:
        free = {name for name, needs in waiting.items() if not needs & set(waiting)}
        assert free, f"a circle among {sorted(waiting)}"
        waiting = {name: needs for name, needs in waiting.items() if name not in free}


def test_imports_are_seen_as_they_are():
    """The tests above look for what must not be there: what they look with must see what is."""
    assert "rlstore.engine.returns" in imported_by("rlstore.rollout")  # from rlstore.engine import returns
    assert "rlstore.engine.schema" in imported_by("rlstore.engine.spaces")  # from rlstore.engine.schema import Field
    assert "rlstore.kernels._native" in imported_by("rlstore.kernels")
    assert "rlstore.kernels.reference" in imported_by("rlstore.kernels")


def sources() -> list[Path]:
    return [*MODULES.values(), *NATIVE.glob("*.cpp"), *NATIVE.glob("*.h")]


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_no_source_file_is_too_long(path):
    assert len(path.read_text().splitlines()) <= LONGEST_FILE


PYTHON_WORDS = ("nanobind", "Python.h", "PyObject", "nb::", "torch/")


@pytest.mark.parametrize("path", sorted(NATIVE.iterdir()), ids=lambda path: path.name)
def test_only_the_bindings_of_the_native_module_know_python(path):
    text = path.read_text()
    knows = any(word in text for word in PYTHON_WORDS)
    includes_bindings = '#include "bindings' in text
    assert (knows or includes_bindings) == path.name.startswith("bindings")


def test_every_file_of_the_native_module_is_looked_at():
    """One folder of plain files, so that none escapes the tests above."""
    assert {path.suffix for path in NATIVE.iterdir()} == {".cpp", ".h"}
    assert {path.name for path in NATIVE.iterdir()} == {path.name for path in sources() if path.parent == NATIVE}
    assert (NATIVE / "bindings.cpp").is_file()


# ---------------------------------------------------------------------------------------------------- public names


def test_the_public_names_exist_and_are_sorted():
    assert list(rlstore.__all__) == sorted(set(rlstore.__all__))
    for name in rlstore.__all__:
        assert hasattr(rlstore, name)


def test_the_package_exports_what_it_imports_and_nothing_else():
    tree = ast.parse(MODULES["rlstore"].read_text())
    imported = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == set(rlstore.__all__)


def documented(part: object) -> bool:
    return bool((inspect.getdoc(part) or "").strip())


@pytest.mark.parametrize("name", rlstore.__all__)
def test_a_public_name_and_its_public_methods_say_what_they_are(name):
    part = getattr(rlstore, name)
    assert documented(part)
    if inspect.isclass(part):
        assert part.__doc__, "a docstring of its own, not its base's"
        silent = [
            method
            for method, value in vars(part).items()
            if not method.startswith("_") and (inspect.isfunction(value) or isinstance(value, (property, classmethod)))
            if not documented(getattr(part, method))
        ]
        assert silent == []


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name):
    assert ast.get_docstring(ast.parse(MODULES[name].read_text()))
