"""Write the golden data anew, from the rlstore that is installed: ``python tests/golden/make.py FOLDER [DEVICE]``.

With ``segments`` for the device, only the snapshots of later versions are written, which keep rows in segments.

They are to be made of a version whose draws and snapshots later versions must keep, and never to make a test pass.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from programs import ARGUMENTS, BOX, DISCRETE, ON_CUDA, PROGRAMS, fill, next_draws, numbers
from surface import public_surface

import rlstore


def made(name: str, device: str, folder: Path | None) -> dict[str, Any]:
    """The draws of a program, and what its storage serves next."""
    make, run = PROGRAMS[name]
    storage = make(device)
    draws = [numbers(batch) for batch in run(storage)]
    if folder is not None:
        storage.save(snapshot_folder(folder, name))
    return {"draws": draws, "next": next_draws(storage)}


def snapshot_folder(folder: Path, name: str) -> Path:
    """Where the snapshot of a program's storage is."""
    return folder / "snapshots" / name.replace(", ", "-").replace(" ", "_")


def surface() -> dict[str, Any]:
    """The public surface, with the attributes of the storages of all programs."""
    instances = {type(storage).__name__: storage for storage in (make("cpu") for make, _ in PROGRAMS.values())}
    return public_surface(instances)


def main(folder: Path, device: str) -> None:
    """Everything."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    names = list(PROGRAMS) if device == "cpu" else ON_CUDA
    golden = {name: made(name, device, folder if device == "cpu" else None) for name in names}
    (folder / f"draws_{device}.json").write_text(json.dumps(golden, separators=(",", ":")))
    if device != "cpu":
        return
    (folder / "surface.json").write_text(json.dumps(surface(), indent=1) + "\n")
    for name, kind in MAPPED.items():
        mapped = kind(BOX, DISCRETE, **mapped_arguments(folder / "mapped" / name))
        fill(mapped, 0, 30)
        mapped.close()
    episodes = rlstore.NStepReplayStorage(BOX, DISCRETE, **episode_arguments(folder / "episodes"))
    fill(episodes, 0, 30)
    episodes.close()


# ------------------------------------------------------------------------------------------------------ segments

# A storage of each class whose rows, if it is replay, are saved in segments. What they serve next is in draws_cpu.json.
SEGMENTS = (
    *("replay", "n-step", "prioritized", "sequences", "hindsight, future", "frames"),
    *("rollout", "decoupled", "distributed"),
)


def write_segments(folder: Path) -> None:
    """Snapshots as they are since rows are apart: of each class, of one that was saved four times, and a journal."""
    for name in SEGMENTS:
        made(name, "cpu", folder / "segments")
    often = rlstore.PrioritizedReplayStorage(BOX, DISCRETE, **ARGUMENTS)
    for first, last in ((0, 5), (5, 12), (12, 25), (25, 40)):
        fill(often, first, last)
        often.update([3 * (last - 1) + 1], [float(last)])  # the newest row of the second environment
        often.save(folder / "segments" / "saved_four_times")
    journaled = rlstore.ReplayStorage(BOX, DISCRETE, **ARGUMENTS, journal=rlstore.Journal(folder / "journal", 3600))
    for first, last in ((0, 10), (10, 33)):
        fill(journaled, first, last)
        journaled.journal.commit()
    fill(journaled, 33, 35)
    shutil.copytree(folder / "journal", folder / "segments" / "journal")  # as if it were killed now
    journaled.close()
    shutil.rmtree(folder / "journal")


MAPPED: dict[str, Any] = {"replay": rlstore.ReplayStorage, "prioritized": rlstore.PrioritizedReplayStorage}


def mapped_arguments(path: Path) -> dict[str, Any]:
    """A storage in mapped files."""
    return {**ARGUMENTS, "memory": "mapped", "path": path}


def episode_arguments(path: Path) -> dict[str, Any]:
    """A storage that keeps its episodes on disk."""
    return {**ARGUMENTS, "save_snapshot": True, "snapshot_dir": path, "num_workers": 0}


if __name__ == "__main__":
    if sys.argv[2:] == ["segments"]:
        write_segments(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu")
