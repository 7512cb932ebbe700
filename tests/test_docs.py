"""The code in the README runs as it stands, top to bottom, and prints what it says it prints."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_readme_runs_and_its_error_is_the_one_that_is_printed(capsys):
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 4
    exec("\n".join(blocks), {"__name__": "readme"})
    printed = capsys.readouterr().out.split()
    shown = re.findall(r"^# (.*)$", blocks[-1], flags=re.MULTILINE)
    assert printed == " ".join(shown).split()


def test_every_file_that_the_documents_link_to_exists():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert len(documents) >= 5
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
