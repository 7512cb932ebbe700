"""Write the golden data anew, from the rlstore that is installed: ``python tests/golden/make.py FOLDER [DEVICE]``.

They are to be made of a version whose draws and snapshots later versions must keep, and never to make a test pass.
"""

from __future__ import annotations

import json
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


MAPPED: dict[str, Any] = {"replay": rlstore.ReplayStorage, "prioritized": rlstore.PrioritizedReplayStorage}


def mapped_arguments(path: Path) -> dict[str, Any]:
    """A storage in mapped files."""
    return {**ARGUMENTS, "memory": "mapped", "path": path}


def episode_arguments(path: Path) -> dict[str, Any]:
    """A storage that keeps its episodes on disk."""
    return {**ARGUMENTS, "save_snapshot": True, "snapshot_dir": path, "num_workers": 0}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu")
