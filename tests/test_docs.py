"""The documentation: every Python block runs, every link leads somewhere, every page and every public name is listed.

The blocks of a page are one program, from top to bottom. A comment in the line before a block says what else it is:
``<!-- program -->`` a program of its own, run as a file in a new process; ``<!-- needs: ray -->`` a block that runs
only where these modules are installed; ``<!-- program; needs: ray -->`` both.
"""

import ast
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import rlstore

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
RUN_ELSEWHERE = {DOCS / "cuda.md"}  # tests/cuda/test_documented.py

BLOCK = re.compile(
    r"(?:^ *<!-- (?P<note>[^>\n]*) -->\n\s*)?^(?P<indent> *)```(?:python|py)\b[^\n]*\n(?P<code>.*?)^(?P=indent)```",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    line: int
    code: str
    is_program: bool
    needs: list[str]

    @property
    def is_missing(self) -> list[str]:
        return [name for name in self.needs if find_spec(name) is None]


def blocks_of(page):
    text = page.read_text()
    for match in BLOCK.finditer(text):
        indent = len(match["indent"])
        code = "".join(line[indent:] or "\n" for line in match["code"].splitlines(keepends=True))
        note = match["note"] or ""
        needs = re.search(r"needs: ([\w., ]+)", note)
        yield Block(
            line=text.count("\n", 0, match.start("code")),
            code=code,
            is_program="program" in note,
            needs=re.split(r", *", needs[1].strip()) if needs else [],
        )


def name_of(page):
    return str(page.relative_to(ROOT))


WITH_BLOCKS = [page for page in PAGES if page not in RUN_ELSEWHERE and any(blocks_of(page))]
PROGRAMS = [
    pytest.param(block, id=f"{name_of(page)}:{block.line}")
    for page in WITH_BLOCKS
    for block in blocks_of(page)
    if block.is_program
]
AS_ONE = [page for page in WITH_BLOCKS if not all(block.is_program for block in blocks_of(page))]


@pytest.mark.parametrize("page", AS_ONE, ids=name_of)
def test_the_blocks_of_a_page_run_from_top_to_bottom(page, tmp_path, monkeypatch):
    blocks = [block for block in blocks_of(page) if not block.is_program and not block.is_missing]
    if not blocks:
        pytest.skip("needs libraries that are not installed")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "documented"}
    for block in blocks:
        exec(compile("\n" * block.line + block.code, page, "exec"), names)


@pytest.mark.parametrize("block", PROGRAMS)
def test_the_programs_of_a_page_run(block, tmp_path):
    if block.is_missing:
        pytest.skip(f"needs {block.is_missing}")
    path = tmp_path / "program.py"
    path.write_text(block.code)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # as in tests/conftest.py: tests share the cores
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_the_error_that_is_shown_is_the_one_that_is_raised(capsys):
    (block,) = blocks_of(DOCS / "errors.md")
    exec(block.code, {})
    shown = re.findall(r"^# (.*)$", block.code, flags=re.MULTILINE)
    assert capsys.readouterr().out.split() == " ".join(shown).split()


def test_the_pictures_are_those_that_the_script_draws():
    """Its chart has the figures of docs/benchmarks.md: after new ones, run python docs/pictures/draw.py."""
    script = runpy.run_path(str(DOCS / "pictures" / "draw.py"))
    for file, draw in script["PICTURES"].items():
        assert (DOCS / "pictures" / file).read_text() == str(draw())


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) < 700
    replay, ppo = (block.code.splitlines() for block in blocks_of(ROOT / "README.md"))
    assert len([line for line in replay if line and "import" not in line]) <= 10
    loop = ppo[next(i for i, line in enumerate(ppo) if line.startswith("for")) : -1]  # the last line closes envs
    assert len(loop) <= 20


def test_the_version_is_the_same_everywhere():
    assert rlstore.__version__ == version("rlstore")
    assert f'version = "{rlstore.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {rlstore.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {rlstore.__version__} (" in (ROOT / "CHANGELOG.md").read_text()


def test_the_architecture_page_shows_every_module_and_no_other():
    text = (DOCS / "architecture.md").read_text()
    tree = text[text.index("src/rlstore/") : text.index("Where to look first")]
    shown = set(re.findall(r"\b\w+\.py\b", tree))
    assert shown == {module.name for module in (ROOT / "src" / "rlstore").rglob("*.py")}


def anchors_of(page):
    """The anchors of a page as mkdocs makes them: of its headings, or given in braces."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE):
        given = re.search(r"\{ *#([\w.-]+) *\}", heading)
        plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading)
        yield given[1] if given else re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_link_of_a_page_is_dead(page):
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)|src=\"([^\"]+)\"", text):
        file, _, anchor = "".join(target).partition("#")
        if ":" in file:
            continue  # on the network
        linked = page.parent / file if file else page
        assert linked.exists(), f"{name_of(page)} links to {file}"
        assert DOCS not in page.parents or DOCS in linked.resolve().parents, f"{file} is no part of the site"
        if anchor and linked.suffix == ".md":
            assert anchor in set(anchors_of(linked)), f"{name_of(page)} links to {file}#{anchor}"


def test_the_menu_lists_every_page_once():
    def pages(nav):
        for entry in nav:
            for value in entry.values() if isinstance(entry, dict) else [entry]:
                yield from [value] if isinstance(value, str) else pages(value)

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages(nav)) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("module", ["_public", "ray/__init__", "data/__init__", "sb3", "torchrl", "fast_td3", "rsl_rl"])
def test_the_reference_has_every_public_name(module):
    """Read without an import: other libraries are optional."""
    path = ROOT / "src" / "rlstore" / f"{module}.py"
    assigned = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign))
    public = next(ast.literal_eval(node.value) for node in assigned if node.targets[0].id == "__all__")
    shown = set(re.findall(r"^::: (\S+)", "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md")), re.M))
    # A function of the same name as its module is shown by its whole name: the short one is the module.
    shown |= {name.rpartition(".")[0] for name in shown if name.split(".")[-2:-1] == name.split(".")[-1:]}
    if "rlstore.errors" in shown:
        shown |= {f"rlstore.{name}" for name in vars(rlstore.errors) if name.endswith("Error")}
    package = "rlstore" if module == "_public" else f"rlstore.{module.removesuffix('/__init__')}"
    assert {f"{package}.{name}" for name in public} <= shown
