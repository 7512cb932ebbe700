"""Takes the pictures of the page in docs/look.md: ``python docs/pictures/shoot.py``; needs chromium and MinAtar.

Three storages are filled by simple controllers whose noise decreases, so that returns rise as if something had learned.
"""

from __future__ import annotations

import io
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from PIL import Image

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1] / "tools"))

from browser import Browser  # noqa: E402

import rlstore  # noqa: E402

SAME_STEP = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
GAME = 10  # cells of a side of a game of MinAtar
CELL = 8  # pixels of a side of a cell
COLORS = [(20, 22, 30), (76, 201, 240), (247, 127, 0), (128, 237, 153), (239, 71, 111)]


def vectors() -> Any:
    """Acrobot by a controller that pumps energy, drawn by priority."""
    envs = gym.make_vec("Acrobot-v1", num_envs=8, vectorization_mode="sync", vector_kwargs=SAME_STEP)
    spaces = envs.single_observation_space, envs.single_action_space
    extra = {"noise": ((), torch.float32)}
    storage = rlstore.PrioritizedReplayStorage(*spaces, storage_size=60_000, num_envs=8, extra_fields=extra, seed=0)
    rng = np.random.default_rng(0)
    observations, _ = envs.reset(seed=0)
    for step in range(5_000):
        noise = max(0.05, 1 - step / 3_000)
        chosen = np.where(observations[:, 5] > 0, 2, 0)
        actions = np.where(rng.random(8) < noise, rng.integers(0, 3, 8), chosen)
        following, rewards, terminated, truncated, infos = envs.step(actions)
        storage.add(
            observations, actions, rewards, terminated, truncated, infos, following, noise=np.full(8, noise, np.float32)
        )
        observations = following
    rows = storage.held_rows()
    speeds = storage[rows]["observations"][:, 4:].abs().sum(1)
    storage.update(rows, 0.01 + speeds / 12 * torch.rand(len(rows), generator=torch.Generator().manual_seed(0)))
    return storage


def sequences() -> Any:
    """Pendulum by a controller that swings it up, as windows with priorities."""
    envs = gym.make_vec("Pendulum-v1", num_envs=4, vectorization_mode="sync", vector_kwargs=SAME_STEP)
    spaces = envs.single_observation_space, envs.single_action_space
    windows = {"sequence_length": 40, "burn_in": 10, "overlap": 20, "alpha": 0.9}
    storage = rlstore.SequenceReplayStorage(*spaces, storage_size=40_000, num_envs=4, seed=0, **windows)
    rng = np.random.default_rng(0)
    observations, _ = envs.reset(seed=0)
    for step in range(6_000):
        cosine, sine, speed = observations.T
        swing = 1.5 * np.sign(speed) * np.clip(10 * (1 - cosine) - speed**2 / 2, -2, 2)
        torque = np.where(cosine > 0.8, -9.6 * sine - 2 * speed, swing)
        noise = max(0.1, 1.5 - step / 3_000)
        actions = np.clip(torque + 2 * noise * rng.normal(size=4), -2, 2).astype(np.float32)[:, None]
        following, rewards, terminated, truncated, infos = envs.step(actions)
        storage.add(observations, actions, rewards, terminated, truncated, infos, following)
        observations = following
    rows = storage.sample(4_000).rows.unique()
    storage.update(rows, 0.05 + 0.2 * storage[rows]["rewards"].flatten().abs())
    return storage


def pixels() -> Any:
    """Breakout of MinAtar by a player that follows the ball: pictures in color, four of them stacked."""
    from minatar import Environment

    games = [Environment("breakout") for _ in range(4)]
    for seed, game in enumerate(games):
        game.seed(seed)
        game.reset()
    space = gym.spaces.Box(0, 255, (12, GAME * CELL, GAME * CELL), np.uint8)
    storage = rlstore.ReplayStorage(
        space, gym.spaces.Discrete(6), storage_size=20_000, num_envs=4, frame_stack=4, autoreset="SameStep"
    )
    rng = np.random.default_rng(0)
    stacks = [np.concatenate([picture(game)] * 4) for game in games]
    for step in range(4_000):
        noise = max(0.02, 0.6 - step / 5_000)
        actions = [int(rng.integers(0, 6)) if rng.random() < noise else follow_ball(game.env) for game in games]
        ended = [game.act(action) for game, action in zip(games, actions, strict=True)]
        after = [np.concatenate([stack[3:], picture(game)]) for stack, game in zip(stacks, games, strict=True)]
        following = [begin(game) if over else stack for game, (_, over), stack in zip(games, ended, after, strict=True)]
        rewards, terminated = [reward for reward, _ in ended], [bool(over) for _, over in ended]
        infos = {"final_obs": np.stack(after)}
        storage.add(np.stack(stacks), actions, rewards, terminated, [False] * 4, infos, np.stack(following))
        stacks = following
    return storage


def begin(game: Any) -> Any:
    """The first stack of a new game."""
    game.reset()
    return np.concatenate([picture(game)] * 4)


def picture(game: Any) -> Any:
    """What a game shows, uint8 ``[3, height, width]``."""
    state = game.state()
    kinds = (state * np.arange(1, state.shape[2] + 1)).max(2).astype(int)
    cells = np.array(COLORS, np.uint8)[kinds].transpose(2, 0, 1)
    return cells.repeat(CELL, 1).repeat(CELL, 2)


def follow_ball(game: Any) -> int:
    """Move the paddle to where the ball will be."""
    target = game.ball_x + (-1 if game.ball_dir in (0, 3) else 1)
    return 1 if target < game.pos else 3 if target > game.pos else 0


def main() -> None:
    """Take all pictures."""
    warnings.simplefilter("ignore")
    shots: list[tuple[str, Callable[[], Any], list[tuple[str, str, Callable[[Browser], None]]]]] = [
        ("acrobot", vectors, [("overview", "light", lambda browser: None), ("vectors", "dark", open_late)]),
        ("breakout", pixels, [("pixels", "light", open_best)]),
        ("pendulum", sequences, [("sequences", "light", open_with_windows)]),
    ]
    with tempfile.TemporaryDirectory() as folder, Browser(1360, 850) as browser:
        for title, make, views in shots:
            page = Path(folder, f"{title}.html")
            make().to_html(page, title=title)
            for name, scheme, prepare in views:
                browser.prefer(scheme)
                browser.open(page)
                prepare(browser)
                save(browser.picture(), FOLDER / f"page-{name}.png")


def open_late(browser: Browser) -> None:
    """One of the newest episodes, in its middle."""
    show(browser, 12, 0.4)


def open_with_windows(browser: Browser) -> None:
    """As :func:`open_late`, with room for one plot more."""
    browser.size(1360, 920)
    open_late(browser)


def open_best(browser: Browser) -> None:
    """One of the episodes with the highest return."""
    show_list(browser)
    browser.click("[data-key=return] button")
    show(browser, 2, 0.6)


def show_list(browser: Browser) -> None:
    """Go to the list of episodes."""
    browser.click("#tab-episodes")
    browser.wait("!document.querySelector('#episodes').hidden")


def show(browser: Browser, row: int, share: float) -> None:
    """Open an episode of the list, at a part of its steps."""
    show_list(browser)
    browser.click(f"#rows [role=row]:nth-child({row})")
    browser.wait("!document.querySelector('#player').hidden")
    browser.run(
        "const s = document.querySelector('#scrubber'); s.value = Math.round(s.max * arguments[0]);"
        "s.dispatchEvent(new Event('input'))",
        share,
    )


def save(png: bytes, path: Path) -> None:
    """Write a picture with few colors, which is a third as large."""
    few = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    main()
