// What happens when the page is opened, and what the keys do.

const KEYS = [
  [['1', '2'], 'overview, episodes'],
  [['←', '→'], 'one step back, forward'],
  [['shift ←', 'shift →'], 'ten steps'],
  [['space'], 'play and pause'],
  [['home', 'end'], 'first and last step'],
  [['[', ']'], 'previous and next episode of the list'],
  [['+', '−', '0'], 'show fewer or more steps around the cursor, all steps'],
  [['↑', '↓', 'enter'], 'in the list: move, open; ctrl home and ctrl end: first and last'],
  [['d'], 'dark or light'],
  [['?'], 'this list'],
];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  redrawAll();
}

function followTheme() {
  const dark = matchMedia('(prefers-color-scheme: dark)');
  let is_chosen = false;
  dark.addEventListener('change', () => {
    if (!is_chosen) setTheme(dark.matches ? 'dark' : 'light');
  });
  byId('theme').addEventListener('click', () => {
    is_chosen = true;
    setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark');
  });
  setTheme(dark.matches ? 'dark' : 'light');
}

function showView(name) {
  for (const view of ['overview', 'episodes']) {
    byId(view).hidden = view !== name;
    byId(`tab-${view}`).setAttribute('aria-selected', view === name);
    byId(`tab-${view}`).tabIndex = view === name ? 0 : -1;
  }
  redrawAll();
}

/** The address says what is shown, so that one can go back, and link to a step of an episode: #episodes/12/40. */
function showAddress(open) {
  const [view, at, step] = location.hash.slice(1).split('/');
  showView(view === 'episodes' ? 'episodes' : 'overview');
  if (view === 'episodes' && at !== undefined) open(Number(at), Number(step || 0));
}

function addKeys(player) {
  for (const [keys, about] of KEYS) {
    const names = keys.flatMap((key) => [element('kbd', {}, key), ' ']);
    byId('key-list').append(element('dt', {}, ...names), element('dd', {}, about));
  }
  byId('help').addEventListener('click', () => byId('keys').showModal());
  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId('keys').open) return;
    if (pressed(event.key, event, player)) event.preventDefault();
  });
  byId('tab-overview').parentElement.addEventListener('keydown', (event) => {
    if (event.key !== 'ArrowLeft' && event.key !== 'ArrowRight') return;
    const other = byId('overview').hidden ? 'overview' : 'episodes';
    location.hash = other;
    byId(`tab-${other}`).focus();
    event.stopPropagation();
  });
}

/** Does what a key stands for; returns whether it stands for anything here. */
function pressed(key, event, player) {
  const { tagName, type } = event.target;
  if ((tagName === 'INPUT' && type !== 'range' && type !== 'checkbox') || tagName === 'SELECT') return false;
  if (key === ' ' && (tagName === 'BUTTON' || type === 'checkbox')) return false; // it presses the button
  const anywhere = {
    '?': () => byId('keys').showModal(),
    d: () => byId('theme').click(),
    1: () => (location.hash = 'overview'),
    2: () => (location.hash = 'episodes'),
  };
  if (key in anywhere) return anywhere[key](), true;
  if (byId('episodes').hidden || !player.is_open) return false;
  const stride = event.shiftKey ? 10 : 1;
  const moves = { ArrowLeft: -stride, ArrowRight: stride, Home: -Infinity, End: Infinity };
  if (key in moves) {
    player.pause();
    player.go(player.step + moves[key]);
    return true;
  }
  const others = {
    ' ': () => player.toggle(),
    '[': () => player.beside(-1),
    ']': () => player.beside(1),
    '+': () => player.zoom(0.5),
    '=': () => player.zoom(0.5),
    '-': () => player.zoom(2),
    0: () => player.zoom(Infinity),
  };
  if (!(key in others)) return false;
  others[key]();
  return true;
}

async function main() {
  const storage = jsonOf('storage');
  followTheme();
  byId('title').textContent = storage.title;
  byId('subtitle').textContent = byId('subtitle').title = storage.subtitle;
  const { episodes } = storage;
  const arrays = await Promise.all(Object.entries(episodes.arrays).map(async ([name, array]) => [name, await decoded(array)]));
  Object.assign(episodes, Object.fromEntries(arrays), { count: episodes.listed });
  const open = (at, step) => {
    if (episodes.opened[at]) location.hash = step ? `episodes/${at}/${step}` : `episodes/${at}`;
    else list.select(at);
  };
  const list = new EpisodeList(episodes, open);
  const player = new Player(episodes, list);
  byId('hint').textContent = episodes.count
    ? 'Choose an episode with a dot: its steps are in this page.'
    : 'The storage holds no episode.';
  const pictures = showOverview(storage, episodes, open);
  byId('tab-overview').addEventListener('click', () => (location.hash = 'overview'));
  byId('tab-episodes').addEventListener('click', () => (location.hash = 'episodes'));
  const show = () =>
    showAddress((at, step) => {
      if (episodes.opened[at]) player.open(at, step).catch(failed);
    });
  window.addEventListener('hashchange', show);
  addKeys(player);
  show();
  await pictures;
}

function failed(error) {
  byId('problem').hidden = false;
  byId('problem').textContent = `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`;
}

main().catch(failed);
