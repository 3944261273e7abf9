"""The notebook runs from top to bottom; a cell that was interrupted runs again."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOK = Path(__file__).parents[3] / "docs" / "library.ipynb"
SECONDS = 240
"""Of one cell, on a machine where other tests run."""
INTERRUPTED = """
import signal
training = rc.grpo(policy, prompts, reward, config)
for step in training:
    signal.raise_signal(signal.SIGINT)
"""
AGAIN = """
import threading
from rollouts_core.library.training import _open
training = rc.grpo(policy, prompts, reward, config)
next(training)
print(len(_open))
training.close()
del training, step
for thread in threading.enumerate():
    thread.name in threads or thread.join(30)  # workers have been told to end
print(len(_open), [thread.name for thread in threading.enumerate() if thread.name not in threads])
"""
THREADS = "import threading; threads = {thread.name for thread in threading.enumerate()}"


@pytest.fixture(scope="module")
def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_runs_and_an_interrupted_cell_runs_again(notebook: Any, tmp_path: Path) -> None:
    written = len(notebook.cells)
    notebook.cells += [nbformat.v4.new_code_cell(code.strip()) for code in (THREADS, INTERRUPTED, AGAIN)]
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel():
        for place, cell in enumerate(notebook.cells[: written + 1]):
            client.execute_cell(cell, place)
        shown = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
        assert any("<th>advantage</th>" in output["data"].get("text/html", "") for output in shown)
        with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
            client.execute_cell(notebook.cells[written + 1], written + 1)
        again = client.execute_cell(notebook.cells[written + 2], written + 2)
        assert "".join(output["text"] for output in again["outputs"] if output.get("name") == "stdout") == "1\n0 []\n"


def test_its_outputs_are_not_kept(notebook: Any) -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in stored.cells)
