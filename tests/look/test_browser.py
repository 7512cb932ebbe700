"""The page in a real browser, without a network: what is seen, clicked and typed, and that nothing complains."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from look_storages import episodes_planned, filled, step_id

import rlstore

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from browser import Browser, missing

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"needs {' and '.join(missing())}"),
    pytest.mark.slow,
]
ROW = "#rows [role=row]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages")
    storage = filled(rlstore.SequenceReplayStorage, sequence_length=3, alpha=1.0)
    storage.to_html(path / "page.html", title="<b>mine</b></script>")
    return path


@pytest.fixture(scope="module")
def window():
    with Browser(1280, 800) as browser:
        yield browser


@pytest.fixture
def browser(window, folder):
    window.size(1280, 800)
    window.prefer("light")
    window.open(folder / "page.html")
    yield window
    assert window.problems() == []


def rows_of(browser):
    """What the rows of the list say, top down."""
    return browser.run(
        "return [...document.querySelectorAll('#rows [role=row]')]"
        ".map((row) => [...row.children].slice(1).map((cell) => cell.innerText.trim()))"
    )


def numbers_of(browser):
    """The numbers of the episodes in the list."""
    return [int(row[0]) for row in rows_of(browser)]


def step_of(browser):
    return browser.text("#step")


def show_list(browser):
    """Go to the list of episodes."""
    browser.press("2")
    browser.wait("!document.querySelector('#episodes').hidden")


def open_first(browser):
    """Open the first episode of the list with the keyboard."""
    show_list(browser)
    browser.run("document.querySelector('#table').focus()")
    browser.press("down", "enter")
    browser.wait("!document.querySelector('#player').hidden")


def test_the_overview_is_shown_first(browser):
    text = browser.text("#overview")
    for part in ("24", "60 % of 40", "12 steps of each", "terminated 2", "broken off 1", "both flags 1", "Priorities"):
        assert part in text
    assert 'observations["</script><b>state"]' in text
    assert browser.text("#title") == "<b>mine</b></script>"
    assert browser.run("return document.querySelectorAll('b, img').length") == 0
    blank = "[...document.querySelectorAll('#overview canvas')].filter((c) => !c.getContext('2d')"
    blank += ".getImageData(0, 0, c.width, c.height).data.some(Boolean)).length"
    assert browser.run(f"return {blank}") == 0


def test_nothing_could_be_loaded(browser):
    assert browser.run("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []
    assert browser.run("return fetch('https://example.org/').then(() => 'loaded', () => 'refused')") == "refused"
    assert [line for line in browser.problems() if "Content Security Policy" not in line] == []


def test_entries_of_a_field_are_opened(browser):
    browser.click(".disclose")
    assert browser.run("return document.querySelector('.disclose').getAttribute('aria-expanded')") == "true"
    assert "Of each entry: least to most" in browser.text("#overview")


def test_the_list_has_every_episode_newest_first(browser):
    show_list(browser)
    listed = rows_of(browser)
    expected = []
    for number, planned in reversed(list(enumerate(episodes_planned()))):
        total = sum(step_id(planned["env"], step) / 100 for step in planned["steps"])
        names = {None: "broken off", "both": "both flags", "open": "going on"}
        end = names.get(planned["end"], planned["end"])
        expected.append([str(number), str(planned["env"]), str(len(planned["steps"])), f"{total:.4g}", end])
    assert listed == expected
    assert browser.text("#shown") == "6 episodes; all can be opened"


def test_it_is_sorted_by_the_headers(browser):
    show_list(browser)
    lengths = [len(planned["steps"]) for planned in episodes_planned()]  # 3, 6, 5, 2, 4, 4
    for clicks, direction in ((1, "descending"), (2, "ascending")):
        browser.click('[data-key="length"] button')
        order = sorted(range(6), key=lambda i: (lengths[i] * (1 if direction == "ascending" else -1), i))
        assert numbers_of(browser) == order, clicks
        state = browser.run("return document.querySelector('[data-key=length]').getAttribute('aria-sort')")
        assert state == direction


def test_it_is_filtered(browser):
    show_list(browser)
    browser.write("#least-length", "4")
    assert sorted(numbers_of(browser)) == [1, 2, 4, 5]
    browser.write("#most-length", "5")
    assert sorted(numbers_of(browser)) == [2, 4, 5]
    browser.write("#most-return", "0.3")  # episode 2 has 0.25, episode 4 has 0.38
    assert numbers_of(browser) == [2]
    assert browser.text("#shown") == "1 of 6 episodes; all can be opened"
    browser.click("#filters [type=reset]")
    browser.wait(f"document.querySelectorAll('{ROW}').length === 6")
    browser.run(
        "const end = document.querySelector('#end'); end.value = '1';"
        "end.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert sorted(numbers_of(browser)) == [0, 1]
    browser.write("#least-return", "1000")
    assert (rows_of(browser), browser.text("#shown")) == ([], "0 of 6 episodes; all can be opened")


def test_an_episode_is_opened_and_stepped_through_by_keyboard(browser):
    open_first(browser)  # the newest: environment 1, steps 8 to 11, which goes on
    assert browser.text("#episode-name") == "Episode 5"
    assert "environment 1 steps 4 return 4.38 going on" in " ".join(browser.text("#episode-facts").split())
    assert step_of(browser) == "step 0 of 4"
    assert values(browser, "observations") == ["0: 108", "1: −108", "2: 54"]
    browser.press("right", "right")
    assert (step_of(browser), values(browser, "observations")[0]) == ("step 2 of 4", "0: 110")
    assert values(browser, "costs") == ["−110"]
    assert "1.1 · so far 3.27 (line)" in browser.text("[aria-label=rewards] .values")
    assert browser.text("[aria-label=actions] .values") == "3"  # (10 + 1) % 4
    assert pixel(browser) == 110 % 50 + 1
    browser.press("left")
    assert step_of(browser) == "step 1 of 4"
    browser.press("end")
    assert (step_of(browser), values(browser, "observations")[0]) == ("after the last step", "0: 112")
    assert browser.text("[aria-label=actions] .values") == "–"
    browser.press("home")
    assert step_of(browser) == "step 0 of 4"
    browser.press("shift right")
    assert step_of(browser) == "after the last step"  # ten steps are more than there are


def values(browser, name):
    return browser.run(
        "return [...document.querySelectorAll('.track')].find((track) => track.getAttribute('aria-label')"
        ".startsWith(arguments[0])).querySelector('.values').innerText.split('\\n')",
        name,
    )


def pixel(browser):
    """The gray of the picture that is shown."""
    return browser.run(
        "return document.querySelector('#stage canvas').getContext('2d').getImageData(3, 3, 1, 1).data[0]"
    )


def cursors(browser):
    """Where the cursor of each plot is, in pixels."""
    return browser.run(
        "return [...document.querySelectorAll('.cursor')].map((c) => Math.round(c.getBoundingClientRect().left))"
    )


def test_all_plots_have_one_cursor_and_the_mouse_moves_it(browser):
    open_first(browser)
    before = cursors(browser)
    browser.press("right")
    after = cursors(browser)
    assert len(after) == 5  # observations, actions, rewards, costs, windows
    assert len(set(after)) == 1
    assert after[0] > before[0]
    browser.run(
        "const plot = document.querySelectorAll('.track .plot')[2], box = plot.getBoundingClientRect();"
        "plot.setPointerCapture = () => {};"
        "plot.dispatchEvent(new PointerEvent('pointerdown', {clientX: box.right - 15, bubbles: true}))"
    )
    assert step_of(browser) == "after the last step"
    assert len(set(cursors(browser))) == 1


def test_it_plays_to_the_end_and_pauses(browser):
    open_first(browser)
    browser.press("space")
    assert browser.run("return document.querySelector('#play').getAttribute('aria-pressed')") == "true"
    browser.wait("document.querySelector('#play').getAttribute('aria-pressed') === 'false'")
    assert step_of(browser) == "after the last step"
    browser.run("const speed = document.querySelector('#speed'); speed.value = 1")
    browser.press("space", "space")  # from the beginning, and paused at once
    assert browser.run("return document.querySelector('#play').getAttribute('aria-pressed')") == "false"
    assert step_of(browser) == "step 0 of 4"


def test_the_neighbours_in_the_list_are_next(browser):
    open_first(browser)
    browser.press("]")
    browser.wait("document.querySelector('#episode-name').innerText === 'Episode 4'")
    browser.press("]")
    browser.wait("document.querySelector('#episode-name').innerText === 'Episode 3'")
    browser.press("[")
    browser.wait("document.querySelector('#episode-name').innerText === 'Episode 4'")
    selected = browser.run("return document.querySelector('[aria-selected=true].row').children[1].innerText")
    assert selected == "4"


def test_a_part_of_an_episode_is_shown_larger(browser):
    open_first(browser)
    browser.press("]")
    browser.wait("document.querySelector('#episode-name').innerText === 'Episode 4'")
    before = cursors(browser)[0]
    browser.press("right")
    near = cursors(browser)[0] - before
    assert near > 0
    browser.press("+", "0")
    assert cursors(browser)[0] - before == near


def test_lines_a_heat_map_and_hidden_entries(browser):
    open_first(browser)
    button = "[aria-label='Lines or heat map']"
    assert browser.text(button) == "as heat map"
    browser.click(button)
    assert browser.text(button) == "as lines"
    assert values(browser, "observations")[0] == "0: 108"
    browser.click(button)
    browser.click(".track .values button")
    state = "return document.querySelector('.track .values button').getAttribute('aria-pressed')"
    assert browser.run(state) == "false"


def test_dark_and_light(browser):
    color = "return getComputedStyle(document.body).backgroundColor"
    light = browser.run(color)
    browser.press("d")
    dark = browser.run(color)
    assert light != dark
    browser.press("d")
    assert browser.run(color) == light


def test_what_the_system_prefers_is_followed(window, folder):
    window.prefer("dark")
    window.open(folder / "page.html")
    assert window.run("return document.documentElement.dataset.theme") == "dark"
    window.prefer("light")
    window.wait("document.documentElement.dataset.theme === 'light'")


def test_the_keys_are_explained(browser):
    browser.press("?")
    assert "play and pause" in browser.text("#keys")
    browser.press("escape")
    browser.wait("!document.querySelector('#keys').open")


def test_pictures_of_the_best_episode_lead_into_it(browser):
    browser.wait("document.querySelectorAll('.film button').length === 6")  # episode 1, with 6 steps
    browser.click(".film button:nth-child(3)")
    browser.wait("document.querySelector('#episode-name').innerText === 'Episode 1'")
    browser.wait("document.querySelector('#step').innerText === 'step 2 of 6'")


def test_an_episode_and_a_step_have_an_address(browser):
    browser.run("location.hash = 'episodes/1/4'")
    browser.wait("document.querySelector('#episode-name').innerText === 'Episode 1'")
    assert step_of(browser) == "step 4 of 6"
    browser.press("left")
    browser.wait("location.hash === '#episodes/1/3'")
    browser.run("location.hash = 'overview'")
    browser.wait("!document.querySelector('#overview').hidden")
    browser.run("history.back()")
    browser.wait("!document.querySelector('#episodes').hidden")


def test_a_phone_shows_all_without_scrolling_sideways(browser):
    browser.size(390, 844, 2, is_phone=True)
    for key, view in (("1", "overview"), ("2", "episodes")):
        browser.press(key)
        browser.wait(f"!document.querySelector('#{view}').hidden")
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    open_first(browser)
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert step_of(browser) == "step 0 of 4"


def test_buttons_and_inputs_have_names(browser):
    open_first(browser)
    nameless = browser.run(
        "return [...document.querySelectorAll('button, input, select')].filter((e) => !(e.innerText || '').trim()"
        " && !e.getAttribute('aria-label') && !e.closest('label')).map((e) => e.outerHTML)"
    )
    assert nameless == []


def test_an_empty_storage_has_a_page(window, tmp_path):
    import gymnasium as gym

    storage = rlstore.ReplayStorage(gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2), storage_size=10)
    storage.to_html(tmp_path / "empty.html")
    window.open(tmp_path / "empty.html")
    assert "0 % of 10" in window.text("#overview")
    show_list(window)
    assert window.text("#hint") == "The storage holds no episode."
    assert window.problems() == []


def test_many_episodes_are_listed_and_only_those_seen_are_drawn(window, tmp_path):
    import gymnasium as gym

    spaces = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    storage = rlstore.ReplayStorage(*spaces, storage_size=3000, autoreset="SameStep")
    for step in range(3000):
        storage.add([0.5], 1, float(step), True, False, {}, [0.5])
    storage.to_html(tmp_path / "many.html")
    window.open(tmp_path / "many.html")
    show_list(window)
    assert window.text("#shown").startswith("3,000 episodes; ")
    assert window.run(f"return document.querySelectorAll('{ROW}').length") < 60
    window.run("document.querySelector('#table').focus()")
    window.press("ctrl end")
    window.wait("document.querySelector('.row.at') && document.querySelector('.row.at').children[1].innerText === '0'")
    assert json.loads(window.run("return JSON.stringify(document.querySelector('#rows').style.height)")) == "84000px"
    assert window.problems() == []
