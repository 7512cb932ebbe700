"""The results of benchmarks in the docs: tables from the JSON of one run or two."""

import json
import sys

from benchmarks import markdown


def run_json(ours, met):
    timings = [("rlstore", "ours", "add", ours), ("SB3", "peer", "add", 8.0), ("SB3", "peer", "sample", 1234.5)]
    return {
        "machine": {"cpu": "a processor", "cores": 2, "python": "3.11"},
        "versions": {"torch": "2"},
        "aims": [
            {"row": "add 1", "us": ours, "peer": "SB3", "peer_us": 8.0}
            | {"aim": "0.5 x SB3", "measured": ours / 8, "met": met},
            {"row": "held", "us": 10.0, "peer": None, "peer_us": None}
            | {"aim": "1.3 x memcpy", "measured": 1.5, "met": False},
        ],
        "workloads": [
            {"title": "Replay", "rounds": 5, "clock": "wall", "load": [0.5, 1.0]}
            | {"labels": {"add": "add one", "sample": "sample 256"}}
            | {"timings": [dict(zip(("contender", "role", "phase", "median_us"), t, strict=True)) for t in timings]}
        ],
        "bytes_a_transition": [
            {"title": "vectors", "capacity": 1000, "sizes": [{"buffer": "rlstore", "size": 101.4}]},
        ],
    }


def test_aims_of_two_runs_and_figures_of_the_first_replace_what_stands_between_the_marks(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{markdown.BEGIN}\nold\n{markdown.END}\nafter\n")
    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    for path, run in zip(paths, (run_json(2.0, met=True), run_json(6.0, met=False)), strict=True):
        path.write_text(json.dumps(run))
    monkeypatch.setattr(markdown, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["markdown", *map(str, paths)])
    markdown.main()
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1], lines.count("old")) == ("before", "after", 0)
    assert "| row | aim |  | run 1 | run 2 | rlstore, us | fastest peer, us | ratio to it |" in lines
    assert "| add 1 | 0.5 x SB3 | in some runs | 0.25 | 0.75 | 2 | SB3 8 | 0.25 |" in lines
    assert "| held | 1.3 x memcpy | missed | 1.5 | 1.5 | 10 | - | - |" in lines
    assert "Microseconds; medians of 5 rounds, wall clock, load 0.5 to 1.0." in lines
    assert lines[lines.index("|  | rlstore | SB3 |") :][2:4] == ["| add one | 2 | 8 |", "| sample 256 |  | 1,234 |"]
    assert "- vectors (1,000 held): rlstore 101." in lines
