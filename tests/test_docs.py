"""What the documents and examples show is true: their Python code runs, on the software device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[str]:
    """Each block, with empty lines in front so that a traceback shows the document's line numbers."""
    return ["\n" * text.count("\n", 0, found.start(1)) + found[1] for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_documents_code_runs_from_top_to_bottom(document, monkeypatch):
    monkeypatch.setenv("RSTREAM_DEVICE", "soft")
    names = {"__name__": "__main__"}
    for block in blocks(document.read_text(encoding="utf-8")):
        exec(compile(block, document, "exec"), names)


def test_the_documents_have_code():
    assert sum(len(blocks(document.read_text(encoding="utf-8"))) for document in DOCUMENTS) > 8


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.name
)
def test_relative_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example):
    done = subprocess.run(
        [sys.executable, "-W", "error", example],
        env=os.environ | {"RSTREAM_DEVICE": "soft"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
