"""The page: what is written into it, against what the storage holds."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import math
import os
import re
import shutil
import socket
import stat
import subprocess
from importlib import resources

import gymnasium as gym
import numpy as np
import pytest
import torch
from look_storages import ENVS, STEPS, episodes_planned, filled, step_id
from pages import Page
from rich.console import Console

import rlstore
from rlstore.data import write_npz
from rlstore.look import excerpts
from rlstore.look.subject import of_storage
from rlstore.look.summary import summarize
from rlstore.look.terminal import rendered

STATE = 'observations["</script><b>state"]'
CAMERA = 'observations["camera"]'


def page_of(storage, folder, **more):
    storage.to_html(folder / "page.html", **more)
    return Page(folder / "page.html")


def test_every_episode_is_in_it_step_by_step(tmp_path):
    storage = filled(frame_stack=1)
    page = page_of(storage, tmp_path)
    assert page.episodes == list(range(6))
    for place, planned in enumerate(episodes_planned()):
        episode, env = page.episode(place), planned["env"]
        ids = [step_id(env, step) for step in planned["steps"]]
        after = ids[-1] + (1 if planned["end"] == "open" else 0.5)
        arrays = episode["arrays"]
        assert (episode["first"], episode["steps"], episode["final"], episode["note"]) == (0, len(ids), True, "")
        assert arrays[STATE].tolist() == [[number, -number, number / 2] for number in [*ids, after]]
        assert arrays["rewards"][:, 0].tolist() == pytest.approx([number / 100 for number in ids])
        assert arrays["costs"][:, 0].tolist() == [-number for number in ids]
        assert arrays["actions"][:, 0].tolist() == [(step + env) % 4 for step in planned["steps"]]
        # The last of two channels, whose number is one more than the first's.
        assert arrays[CAMERA][:, 3, 4, 0].tolist() == [int(number % 50) + 1 for number in [*ids, after]]


def test_the_list_is_the_storage_s(tmp_path):
    storage = filled()
    listed, episodes = page_of(storage, tmp_path).listed, storage.episodes()
    assert listed["env"] == episodes.envs.tolist()
    assert listed["length"] == episodes.lengths.tolist()
    assert listed["return"] == pytest.approx(episodes.returns.tolist(), rel=1e-6)
    assert listed["opened"] == [1] * 6
    assert listed["index"] == list(range(6))


def test_it_knows_how_full_the_storage_is(tmp_path):
    told = page_of(filled(), tmp_path, title="mine").storage
    assert (told["title"], told["held"], told["capacity"], told["envs"]) == ("mine", 2 * STEPS, 40, ENVS)
    assert ["storage_size", "40"] in told["settings"]
    assert told["priorities"] is None
    assert told["subtitle"] == "ReplayStorage · a storage in memory"
    assert ["inserts", 2 * STEPS] in told["stats"]


def test_names_from_the_data_are_no_part_of_the_page(tmp_path):
    page = page_of(filled(), tmp_path, title="</title></script><script>alert(1)</script><img src=x>")
    assert page.title == "</title></script><script>alert(1)</script><img src=x>"
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 1 + 1 + 6  # the storage, the program, six episodes
    assert "img" not in tags
    assert "b" not in tags
    assert page.storage["fields"][0]["name"] == STATE


def test_it_names_no_other_place_and_allows_none(tmp_path):
    storage = filled()
    storage.to_html(tmp_path / "page.html")
    text, page = (tmp_path / "page.html").read_text(), Page(tmp_path / "page.html")
    (policy,) = (attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    for kind, content in (("script", page.scripts[""]), ("style", re.search(r"<style>(.*?)</style>", text, re.S)[1])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href")]
    assert all(link.startswith("data:") for link in links)
    assert re.findall(r"https?://[^'\"\s]+", text) == ["http://www.w3.org/2000/svg"]  # the name of a format


def test_of_a_large_storage_it_has_the_episodes_of_most_interest(tmp_path, monkeypatch):
    storage = filled()
    whole = page_of(storage, tmp_path)
    size = max(len(whole.scripts[f"episode-{place}"]) for place in range(6))
    monkeypatch.setattr(excerpts, "MOST_TEXT", 3 * size)
    monkeypatch.setattr(excerpts, "_LARGEST", 1)
    page = page_of(storage, tmp_path)
    # The newest; the best, episode 3; the worst, of which the returns are 0.03 for the steps of env 0.
    returns = storage.episodes().returns
    assert {5, int(returns.argmax()), int(returns.argmin())} <= set(page.episodes)
    assert len(page.episodes) < 6
    assert page.listed["opened"] == [int(place in page.episodes) for place in range(6)]
    assert page.storage["notes"][-1].startswith(f"The steps of {len(page.episodes)} of 6 listed episodes are in this")


def test_no_more_is_read_than_some_gigabytes(tmp_path, monkeypatch):
    monkeypatch.setattr(excerpts, "_MOST_READ", 1)
    assert page_of(filled(), tmp_path).episodes == [5]  # the newest


def test_of_a_long_episode_the_last_steps_are_shown_and_the_rest_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(excerpts, "_MOST_STEPS", 2)
    episode = page_of(filled(), tmp_path).episode(2)  # env 0, steps 3 to 7
    assert (episode["first"], episode["steps"], episode["note"]) == (3, 2, "The last 2 of 5 steps are shown.")
    assert episode["arrays"][STATE][:, 0].tolist() == [6.0, 7.0, 7.5]
    assert episode["before"] == pytest.approx(0.03 + 0.04 + 0.05)


def test_nan_before_the_steps_that_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(excerpts, "_MOST_STEPS", 2)
    storage = rlstore.ReplayStorage(
        gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2), storage_size=10, allow_nonfinite_rewards=True
    )
    for reward in (math.nan, 1.0, 2.0):
        storage.add([0.0], 1, reward, False, False, {}, [0.0])
    episode = page_of(storage, tmp_path).episode(0)
    assert (episode["first"], episode["before"]) == (1, None)
    assert episode["arrays"]["rewards"][:, 0].tolist() == [1.0, 2.0]


def test_an_episode_that_is_too_large_is_cut_until_it_is_not(tmp_path, monkeypatch):
    whole = page_of(filled(), tmp_path)
    monkeypatch.setattr(excerpts, "_LARGEST", 10**9)  # each has less than a byte
    page = page_of(filled(), tmp_path)
    assert page.episodes == whole.episodes
    assert {page.episode(place)["steps"] for place in page.episodes} == {1}


def test_windows_with_their_priorities(tmp_path):
    storage = filled(rlstore.SequenceReplayStorage, sequence_length=3, burn_in=1, alpha=1.0)
    storage.update([3 * ENVS, 4 * ENVS], [0.5, 0.75])
    page = page_of(storage, tmp_path)
    assert page.episode(2)["windows"] == {  # env 0, steps 3 to 7
        "burn_in": 1,
        "list": [{"start": 0, "stop": 4, "priority": 0.5}, {"start": 1, "stop": 5, "priority": 0.75}],
    }
    assert page.episode(0)["windows"]["list"][0]["stop"] == 3  # shorter than a window


def test_an_episode_whose_beginning_was_overwritten_says_so(tmp_path):
    storage = filled(storage_size=2 * (STEPS - 1))
    page = page_of(storage, tmp_path)
    assert page.listed["whole"][:2] == [0, 0]
    assert page.episode(0)["note"] == "Its first steps are not held any more; those that are held are counted."
    assert page.episode(0)["arrays"][STATE][0, 0] == 1.0


def test_nan_everywhere(tmp_path):
    spaces = gym.spaces.Box(-np.inf, np.inf, (2,)), gym.spaces.Box(-1, 1, (1,))
    storage = rlstore.ReplayStorage(*spaces, storage_size=10, allow_nonfinite_rewards=True)
    none = np.full(2, math.nan, np.float32)
    for _ in range(4):
        storage.add(none, [math.nan], math.nan, False, False, {}, none)
    page = page_of(storage, tmp_path)
    assert page.storage["fields"][0]["numbers"]["nans"] == 8
    assert page.storage["fields"][0]["numbers"]["median"] is None
    assert np.isnan(page.listed["return"]).all()
    assert np.isnan(page.episode(0)["arrays"]["observations"]).all()


@pytest.mark.parametrize("steps", [0, 1])
def test_almost_nothing(tmp_path, steps):
    storage = rlstore.ReplayStorage(gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2), storage_size=10)
    for _ in range(steps):
        storage.add([0.1, 0.2], 1, 0.5, False, False, {}, [0.3, 0.4])
    page = page_of(storage, tmp_path)
    assert (page.storage["held"], page.episodes) == (steps, list(range(steps)))
    assert page.storage["episodes"]["count"] == steps


def test_rewards_with_several_entries_are_added_up(tmp_path):
    spaces = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    storage = rlstore.ReplayStorage(*spaces, storage_size=10, reward_shape=(2,))
    for i in range(3):
        storage.add([0.0, 0.0], 1, [1.0, 10.0 * i], False, i == 2, {}, [0.0, 0.0])
    page = page_of(storage, tmp_path)
    assert page.listed["return"] == [33.0]
    assert page.episode(0)["arrays"]["rewards"].tolist() == [[1.0, 0.0], [1.0, 10.0], [1.0, 20.0]]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    (tmp_path / "page.html").write_text("before")
    storage = filled()
    with pytest.raises(rlstore.InvalidInputError, match=r"title is 3; to_html\(\) needs a string, or None"):
        storage.to_html(tmp_path / "page.html", title=3)
    with pytest.raises(rlstore.InvalidInputError, match=r"there is no folder .*none for page\.html; create it"):
        storage.to_html(tmp_path / "none" / "page.html")
    with pytest.raises(rlstore.InvalidInputError, match="is a folder; give the name of a file"):
        storage.to_html(tmp_path)
    with pytest.raises(rlstore.InvalidInputError, match=r"path is 7; to_html\(\) needs the path of a file"):
        storage.to_html(7)
    assert (tmp_path / "page.html").read_text() == "before"
    storage.to_html(str(tmp_path / "page.html"))
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("thing", ["folder", "FIFO", "socket", "device", "a link to a device"])
def test_what_is_no_file_is_not_replaced(thing, tmp_path):
    place, null = tmp_path / "page.html", os.stat(os.devnull)
    with socket.socket(socket.AF_UNIX) as server:
        if thing == "folder":
            place.mkdir()
        elif thing == "FIFO":
            os.mkfifo(place)
        elif thing == "socket":
            here = os.getcwd()
            os.chdir(tmp_path)  # its address may have no more than 107 bytes
            server.bind("page.html")
            os.chdir(here)
        elif thing == "device" and os.geteuid() == 0:
            with contextlib.suppress(PermissionError):  # a container that may make none
                os.mknod(place, stat.S_IFCHR | 0o666, null.st_rdev)
        if not place.exists():
            place.symlink_to(os.devnull)
    before = place.lstat()
    for write in (filled().to_html, lambda path: write_npz(filled(), path)):
        with pytest.raises(rlstore.InvalidInputError, match=r"is a (folder|FIFO, a socket or a device); give"):
            write(place)
    assert place.lstat().st_ino == before.st_ino
    assert stat.S_IFMT(place.lstat().st_mode) == stat.S_IFMT(before.st_mode)
    assert os.stat(os.devnull).st_ino == null.st_ino
    assert os.listdir(tmp_path) == ["page.html"]


def test_what_comes_to_be_there_meanwhile_is_not_replaced_either(tmp_path, monkeypatch):
    def meanwhile(summary):
        os.mkfifo(tmp_path / "page.html")
        return "<html></html>"

    monkeypatch.setattr("rlstore.look.page.page", meanwhile)
    with pytest.raises(rlstore.InvalidInputError, match="is a FIFO"):
        filled().to_html(tmp_path / "page.html")
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_link_stays_one_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/page.html").write_text("before")
    for name, target in (("a.html", "there/page.html"), ("b.html", "there/new.html")):
        (tmp_path / name).symlink_to(tmp_path / target)
        filled().to_html(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        assert "</html>" in (tmp_path / target).read_text()
    assert sorted(os.listdir(tmp_path / "there")) == ["new.html", "page.html"]
    (tmp_path / "loop.html").symlink_to(tmp_path / "loop.html")
    with pytest.raises((OSError, rlstore.InvalidInputError)):
        filled().to_html(tmp_path / "loop.html")
    assert (tmp_path / "loop.html").is_symlink()


@pytest.mark.parametrize(
    "error",
    [MemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), OSError(5, "no")],
)
def test_a_page_that_fails_leaves_nothing(error, tmp_path, monkeypatch):
    def fail(*arguments):
        raise error

    storage = filled()
    (tmp_path / "page.html").write_text("before")
    monkeypatch.setattr("rlstore.look.page.summarize" if not isinstance(error, OSError) else "os.replace", fail)
    expected = OSError if isinstance(error, OSError) else rlstore.DoesNotFitError
    with pytest.raises(expected):
        storage.to_html(tmp_path / "page.html")
    assert os.listdir(tmp_path) == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "before"


EXTREME = {
    "3e38": [3e38],
    "both ends of float32": [3e38, -3e38],
    "the largest": [1.7976931348623157e308],
    "both ends": [1.79e308, -1.79e308],
    "the least": [5e-324],
    "the least and 0": [5e-324, 0.0],
    "next to one another": [1e308, float(np.nextafter(1e308, 2e308))],
    "fences beyond floats": [-1e308, -0.5e308, 0.0, 0.5e308, 1e308],
    "NaN": [math.nan],
    "infinite": [math.inf],
    "all of these": [math.nan, math.inf, -math.inf, 3e38, 1.7e308, 5e-324, 0.0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EXTREME)
def test_numbers_at_the_ends_of_floats_are_shown(name, dtype, tmp_path):
    with np.errstate(all="ignore"):
        values = torch.tensor(EXTREME[name], dtype=torch.float64).to(dtype).tolist()
    kind = np.float32 if dtype == torch.float32 else np.float64
    space = gym.spaces.Box(-np.inf, np.inf, (2,), kind)
    storage = rlstore.PrioritizedReplayStorage(
        space,
        gym.spaces.Discrete(2),
        storage_size=20,
        allow_nonfinite_rewards=True,
        extra_fields={"cost": ((), dtype)},
    )
    steps = [values[i % len(values)] for i in range(12)]
    large = next(filter(math.isfinite, values), 0.0)
    for i, value in enumerate(steps):
        now, after = (np.array([place, large], kind) for place in (i, i + 0.5 if i % 4 == 3 else i + 1))
        with np.errstate(over="ignore"):
            reward = np.float32(value)
        storage.add(now, 0, reward, i % 4 == 3, False, {}, after, cost=value)
    page = page_of(storage, tmp_path)
    costs = page.episode(0)["arrays"]["cost"].flatten()
    assert costs.tolist() == pytest.approx(steps[:4], rel=1e-6, abs=0.0, nan_ok=True)
    finite = [value for value in steps if math.isfinite(value)]
    (cost,) = (field["numbers"] for field in page.storage["fields"] if field["name"] == "cost")
    assert (cost["least"], cost["most"]) == ((min(finite), max(finite)) if finite else (None, None))
    if finite and math.isfinite(max(finite) - min(finite)):
        assert sum(cost["histogram"]) + cost["outliers"] == len(finite)
    console = Console(width=140, file=io.StringIO())
    console.print(rendered(summarize(of_storage(storage)), 140))
    assert "cost" in console.file.getvalue()


TICKS = """
const few = (...given) => {
  const found = ticks(...given);
  if (found.length > 60) throw new Error(given);
  return found;
};
if (String(few(0, 10, 5)) !== '0,2,4,6,8,10') throw new Error(few(0, 10, 5));
if (String(few(-1, 1, 4)) !== '-1,-0.5,0,0.5,1') throw new Error(few(-1, 1, 4));
if (String(few(0.5, 3.5, 9, true)) !== '1,2,3') throw new Error(few(0.5, 3.5, 9, true));
few(1e308, 1.0000000000000002e308, 8); few(1e17, 1e17 + 16, 8); few(0, 5e-324, 8); few(-1.7e308, 1.7e308, 8);
few(3e38 * (1 - 2 ** -20), 3e38 * (1 + 2 ** -20), 8); few(NaN, NaN, 8); few(-(2 ** 63), -(2 ** 63) + 2048, 8, true);
"""


@pytest.mark.timeout(60)
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_an_axis_has_a_few_round_numbers_whatever_it_spans():
    chart = (resources.files("rlstore.look") / "page" / "chart.js").read_text()
    begin = chart.index("function ticks")
    program = chart[begin : chart.index("\n}\n", begin) + 3] + TICKS
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_two_who_write_the_same_page_do_not_meet(tmp_path, monkeypatch):
    """One writes while the other has not replaced the page yet; what is there under other names stays."""
    (tmp_path / "page.html.new").write_text("somebody's")
    one, replace = filled(), os.replace

    def meanwhile(source, target):
        monkeypatch.setattr(os, "replace", replace)
        one.to_html(tmp_path / "page.html", title="second")
        assert "second" in (tmp_path / "page.html").read_text()
        replace(source, target)

    monkeypatch.setattr(os, "replace", meanwhile)
    one.to_html(tmp_path / "page.html", title="first")
    text = (tmp_path / "page.html").read_text()
    assert "first" in text
    assert text.rstrip().endswith("</html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "page.html.new"]
    assert (tmp_path / "page.html.new").read_text() == "somebody's"


def test_a_storage_that_cannot_show_its_episodes_says_so(tmp_path):
    class Other(rlstore.Storage):
        create_factory = init_tensors = get_all_buffer_data = insert_data_slice = insert_transition = None
        before_gradients = after_gradients = generate_batches = reset = update_storage_parameter = None

    with pytest.raises(NotImplementedError, match=r"Other cannot show its episodes and rows"):
        Other(4).to_html(tmp_path / "page.html")


def test_the_order_of_interest_begins_with_the_newest_the_best_and_the_worst():
    from rlstore.look.subject import of_storage
    from rlstore.look.summary import summarize

    storage = rlstore.ReplayStorage(gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2), storage_size=100)
    returns = [5.0, 1.0, 9.0, 3.0, 4.0, 6.0, 7.0]
    for total in returns:
        storage.add([0.0], 0, total, True, False, {}, [0.0])
    order = list(excerpts.in_order_of_interest(summarize(of_storage(storage))))
    assert order[:3] == [6, 2, 1]  # the newest, the best, the worst
    assert 0 in order[3:5]  # the median, or the first of those that are spread over all
    assert sorted(order) == list(range(7))
    assert torch.tensor(returns)[order[0]] == 7.0
