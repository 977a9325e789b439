"""What ``TORCH_TRACE`` and a dump directory leave behind: one record a graph, and a summary."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gt_passes import PassContext, PassManager
from gt_passes import CanonicalizeViews, RemoveDeadCode

graph_module = make_fx(lambda x: x.view(2).sin(), tracing_mode="fake")(torch.ones(2))
PassManager(
    [RemoveDeadCode(), CanonicalizeViews()],
    context=PassContext.from_graph(graph_module),
    dump_directory=Path(sys.argv[1]) if len(sys.argv) > 1 else None,
).run(graph_module)
"""

NAMES = [
    "graph_pass_00_remove-dead-code_before",
    "graph_pass_00_remove-dead-code_after",
    "graph_pass_01_canonicalize-views_before",
    "graph_pass_01_canonicalize-views_after",
    "graph_passes_summary",
]


def run_traced(folder: Path, *arguments: str) -> dict[str, str]:
    """Texts of the records of ours, by name."""
    environment = os.environ | {"TORCH_TRACE": str(folder)}
    subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True, env=environment)
    found: dict[str, str] = {}
    for log in folder.glob("*.log"):
        name = None
        for line in log.read_text().splitlines():
            if line.startswith("\t"):  # of the text that belongs to the record above
                if name is not None:
                    found[name] += line[1:] + "\n"
                continue
            record = json.loads(line[line.index("{") :])
            name = record.get("artifact", {}).get("name", "")
            name = name if name.startswith("graph_pass") else None
            if name is not None:
                found[name] = ""
    return found


def test_graphs_and_summary_are_records_of_the_trace(tmp_path: Path) -> None:
    found = run_traced(tmp_path / "trace", str(tmp_path / "dump"))
    assert list(found) == NAMES
    assert "aten.view" in found[NAMES[2]]
    assert "aten.view" not in found[NAMES[3]]
    assert "canonicalize-views\n  -1 aten.view.default\n" in found[NAMES[4]]


def test_the_summary_is_a_file_too(tmp_path: Path) -> None:
    found = run_traced(tmp_path / "trace", str(tmp_path / "dump"))
    assert (tmp_path / "dump" / "summary.txt").read_text() == found["graph_passes_summary"]


def test_nothing_is_traced_without_a_dump_directory(tmp_path: Path) -> None:
    assert run_traced(tmp_path / "trace") == {}
