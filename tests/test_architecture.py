"""What may import what (ray -> storages -> engine -> kernels -> native; adapters -> storages), classes and names."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

import rlstore
from rlstore import Storage

PACKAGE = Path(rlstore.__file__).parent
NATIVE = Path(__file__).parents[1] / "csrc"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imported_by(name: str) -> frozenset[str]:
    """The modules of rlstore that a module imports, wherever in it: for type checkers, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found.update(_known(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, node)
            # `from package import module` imports both, `from module import name` the module that has it.
            found.add(_known(base))
            found.update(_known(f"{base}.{alias.name}") for alias in node.names)
    return frozenset(found - {"", name})


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


def package(name: str) -> str:
    """kernels, engine, errors, ray, adapters, the root, the command line, or (the rest) storages."""
    parts = name.split(".")
    if len(parts) == 1:
        return "root"
    if parts[1] in ADAPTERS:
        return "adapters"
    if parts[1] in ("__main__", "demo", "doctor"):
        return "command"
    return parts[1] if parts[1] in ("kernels", "engine", "errors", "ray") else "storages"


ADAPTERS = ("sb3", "torchrl", "fast_td3", "rsl_rl")  # modules that give storages the interface of another library
ALLOWED = {
    "errors": set(),
    "kernels": {"kernels", "errors"},
    "engine": {"engine", "kernels", "errors"},
    "storages": {"storages", "engine", "errors"},
    "root": {"storages", "engine", "errors"},
    "command": {"command", "root", "storages", "engine", "kernels", "errors"},
    "ray": {"ray", "root", "storages", "engine", "errors"},
    "adapters": {"root", "storages", "engine", "errors"},
}


def storages() -> list[type[Storage]]:
    """The public storages."""
    public = [getattr(rlstore, name) for name in rlstore.__all__]
    return [part for part in public if inspect.isclass(part) and issubclass(part, Storage)]


def test_packages_import_only_those_below_them():
    for name in MODULES:
        wrong = {target for target in imported_by(name) if package(target) not in ALLOWED[package(name)]}
        assert not wrong, f"{name} is in {package(name)} and imports {sorted(wrong)}"


def test_ray_uses_what_storages_offer_to_everybody():
    """No base class, and nothing private, of a family of storages."""
    public = {"rlstore", "rlstore.storage", "rlstore.errors", "rlstore.distributed.batch"}
    for name in MODULES:
        if package(name) == "ray":
            wrong = {target for target in imported_by(name) if package(target) == "storages"} - public
            assert not wrong, f"{name} imports {sorted(wrong)}"


def test_only_the_table_and_modules_for_cuda_know_the_native_module():
    knows = {name for name in MODULES if "rlstore.kernels._native" in imported_by(name)}
    for_cuda = {f"rlstore.kernels.{name}" for name in ("cuda.launch", "cuda.rows", "pieces", "plans")}
    assert knows == {"rlstore.kernels", *for_cuda}


def test_modules_do_not_import_in_a_circle():
    waiting = {name: imported_by(name) & set(MODULES) for name in MODULES}
    while waiting:
        free = {name for name, needs in waiting.items() if not needs & set(waiting)}
        assert free, f"a circle among {sorted(waiting)}"
        waiting = {name: needs for name, needs in waiting.items() if name not in free}


def test_no_public_storage_is_deeper_than_three_classes():
    found = {
        kind.__name__: [base.__name__ for base in kind.__mro__ if base.__module__.startswith("rlstore")]
        for kind in storages()
    }
    assert len(found) == 9
    assert {name: classes for name, classes in found.items() if len(classes) > 3} == {}


def test_imports_are_seen_as_they_are():
    """The tests above look for what must not be there: what they look with must see what is."""
    assert "rlstore.engine.returns" in imported_by("rlstore.rollout.core")  # from rlstore.engine import returns
    assert "rlstore.engine.rows.schema" in imported_by("rlstore.engine.rows.spaces")
    assert "rlstore.kernels._native" in imported_by("rlstore.kernels")


PYTHON_WORDS = ("nanobind", "Python.h", "PyObject", "nb::", "torch/")


def test_only_the_bindings_of_the_native_module_know_python():
    for path in NATIVE.iterdir():
        text = path.read_text()
        knows = any(word in text for word in PYTHON_WORDS)
        includes_bindings = '#include "bindings' in text
        assert (knows or includes_bindings) == path.name.startswith("bindings"), path.name


def test_every_file_of_the_native_module_is_looked_at():
    """One folder of plain files, so that none escapes the test above."""
    assert {path.suffix for path in NATIVE.iterdir()} == {".cpp", ".h"}
    assert (NATIVE / "bindings.cpp").is_file()


# ---------------------------------------------------------------------------------------------------- public names


def test_the_public_names_exist_and_are_sorted():
    assert list(rlstore.__all__) == sorted(set(rlstore.__all__))
    for name in rlstore.__all__:
        assert hasattr(rlstore, name)


def test_the_package_exports_what_it_imports_and_nothing_else():
    tree = ast.parse(MODULES["rlstore._public"].read_text())
    imported = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == set(rlstore.__all__)


def documented(part: object) -> bool:
    return bool((inspect.getdoc(part) or "").strip())


def test_public_names_and_their_public_methods_say_what_they_are():
    for name in rlstore.__all__:
        part = getattr(rlstore, name)
        assert documented(part), name
        if inspect.isclass(part):
            assert part.__doc__, f"{name} needs a docstring of its own, not its base's"
            silent = [
                method
                for method, value in vars(part).items()
                if not method.startswith("_")
                if inspect.isfunction(value) or isinstance(value, (property, classmethod))
                if not documented(getattr(part, method))
            ]
            assert silent == [], name


def test_every_module_says_what_it_is():
    for name, path in MODULES.items():
        assert ast.get_docstring(ast.parse(path.read_text())), name
