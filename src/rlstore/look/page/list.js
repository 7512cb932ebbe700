// The list of episodes: sorted, filtered, and drawn only where it is seen, so that it may be long.

const ROW_HEIGHT = 28;
const COLUMNS = [
  ['', 'opened', 'Can be opened'],
  ['Episode', 'index', 'In the order of their first steps held'],
  ['Env', 'env', 'Environment'],
  ['Length', 'length', 'Steps held'],
  ['Return', 'return', 'Sum of the rewards held'],
  ['End', 'end', 'How it ended'],
];

class EpisodeList {
  /** `open(i)` is called for an episode that was chosen. */
  constructor(episodes, open) {
    this.episodes = episodes;
    this.open = open;
    this.sorted = ['index', -1];
    this.order = [];
    this.at = -1; // the place in the order that the keys move
    this.selected = -1; // the episode that is open
    const shownReturns = [...episodes.return].filter(Number.isFinite);
    this.lowest = shownReturns.reduce((a, b) => Math.min(a, b), 0);
    this.highest = shownReturns.reduce((a, b) => Math.max(a, b), 0);
    this.makeColumns();
    this.makeFilters();
    byId('body').addEventListener('scroll', () => this.draw());
    new ResizeObserver(() => this.draw()).observe(byId('body'));
    byId('table').addEventListener('keydown', (event) => this.press(event));
    byId('rows').addEventListener('click', (event) => {
      const row = event.target.closest('[role="row"]');
      if (row) this.choose(Number(row.dataset.place));
    });
    this.arrange();
  }

  makeColumns() {
    for (const [name, key, about] of COLUMNS) {
      const button = element('button', { title: about, 'aria-label': name || about, onclick: () => this.sortBy(key) }, name || '●');
      byId('columns').append(element('div', { role: 'columnheader', 'data-key': key }, button));
    }
  }

  makeFilters() {
    byId('end').append(element('option', { value: '' }, 'any'));
    const there = new Set(this.episodes.end);
    ENDS.forEach(([name], end) => {
      if (there.has(end)) byId('end').append(element('option', { value: end }, name));
    });
    byId('filters').addEventListener('input', () => this.arrange());
    byId('filters').addEventListener('submit', (event) => event.preventDefault());
    byId('filters').addEventListener('reset', () => setTimeout(() => this.arrange()));
  }

  sortBy(key) {
    const [before, direction] = this.sorted;
    // Of numbers the largest come first, at the second click the smallest.
    this.sorted = [key, key === before ? -direction : ['env', 'end'].includes(key) ? 1 : -1];
    this.arrange();
  }

  /** Filters and sorts. */
  arrange() {
    const { episodes } = this;
    const range = (name) => ['least', 'most'].map((which) => byId(`${which}-${name}`).value).map((text) => (text === '' ? null : Number(text)));
    const within = (value, [least, most]) => (least === null || value >= least) && (most === null || value <= most);
    const [returns, lengths] = [range('return'), range('length')];
    const [end, only] = [byId('end').value, byId('only-opened').checked];
    this.order = [...Array(episodes.count).keys()].filter(
      (i) =>
        within(episodes.return[i], returns) && within(episodes.length[i], lengths) &&
        (end === '' || episodes.end[i] === Number(end)) && (!only || episodes.opened[i]),
    );
    const [key, direction] = this.sorted;
    const values = episodes[key];
    // What is not a number comes last, whichever way; equal ones stay in the order of time.
    const rank = (i) => (Number.isNaN(values[i]) ? 1 : 0);
    this.order.sort((a, b) => rank(a) - rank(b) || (values[a] < values[b] ? -direction : values[a] > values[b] ? direction : a - b));
    for (const header of byId('columns').children) {
      if (header.dataset.key === key) header.setAttribute('aria-sort', direction > 0 ? 'ascending' : 'descending');
      else header.removeAttribute('aria-sort');
    }
    const opened = this.order.reduce((sum, i) => sum + episodes.opened[i], 0);
    const of = this.order.length === episodes.count ? counted(episodes.count, 'episode') : `${shown(this.order.length)} of ${counted(episodes.count, 'episode')}`;
    byId('shown').textContent = `${of}; ${opened === this.order.length ? 'all' : shown(opened)} can be opened`;
    byId('table').setAttribute('aria-rowcount', this.order.length + 1);
    this.at = this.order.indexOf(this.selected);
    byId('body').scrollTop = 0;
    if (this.at >= 0) this.reveal();
    this.draw();
  }

  /** Draws the rows that are seen. */
  draw() {
    const body = byId('body');
    const first = Math.max(0, Math.floor(body.scrollTop / ROW_HEIGHT) - 4);
    const last = Math.min(this.order.length, Math.ceil((body.scrollTop + body.clientHeight) / ROW_HEIGHT) + 4);
    byId('rows').style.height = `${this.order.length * ROW_HEIGHT}px`;
    byId('columns').style.setProperty('--bar-width', `${body.offsetWidth - body.clientWidth}px`);
    const made = [];
    for (let place = first; place < last; place++) made.push(this.row(place));
    byId('rows').replaceChildren(...made);
    const at = this.at >= first && this.at < last ? `row-${this.at}` : null;
    if (at) byId('table').setAttribute('aria-activedescendant', at);
    else byId('table').removeAttribute('aria-activedescendant');
  }

  row(place) {
    const { episodes } = this;
    const i = this.order[place];
    const cell = (...children) => element('div', { role: 'gridcell' }, ...children);
    const part = element('div.meter', { role: 'gridcell' }, element('i'), element('span', {}, shown(episodes.return[i])));
    const span = this.highest - this.lowest || 1;
    const value = Number.isFinite(episodes.return[i]) ? episodes.return[i] : 0;
    part.firstChild.style.width = `${(94 * Math.abs(value)) / span}%`;
    part.firstChild.style.right = `${value < 0 ? (94 * this.highest) / span : (94 * (this.highest - value)) / span}%`;
    const length = `${shown(episodes.length[i])}${episodes.whole[i] ? '' : '*'}`;
    const made = element(
      'div.row',
      { role: 'row', id: `row-${place}`, 'data-place': place, 'aria-rowindex': place + 2, 'aria-selected': i === this.selected },
      cell(), cell(shown(episodes.index[i])), cell(shown(episodes.env[i])), cell(length), part, cell(endChip(episodes.end[i])),
    );
    if (!episodes.whole[i]) made.title = 'Its first steps were overwritten';
    made.classList.toggle('can', Boolean(episodes.opened[i]));
    made.classList.toggle('at', place === this.at);
    made.style.top = `${place * ROW_HEIGHT}px`;
    return made;
  }

  press(event) {
    const page = Math.max(1, Math.floor(byId('body').clientHeight / ROW_HEIGHT) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    if (event.ctrlKey) Object.assign(moves, { Home: -Infinity, End: Infinity }); // alone they are of the episode
    if (event.target.tagName === 'BUTTON') return;
    if (event.key in moves && this.order.length) {
      this.at = Math.min(Math.max(this.at + moves[event.key], 0), this.order.length - 1);
      this.reveal();
      this.draw();
    } else if (event.key === 'Enter' && this.at >= 0) {
      this.choose(this.at);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  reveal() {
    const body = byId('body');
    const top = this.at * ROW_HEIGHT;
    if (top < body.scrollTop) body.scrollTop = top;
    else if (top + ROW_HEIGHT > body.scrollTop + body.clientHeight) body.scrollTop = top + ROW_HEIGHT - body.clientHeight;
  }

  choose(place) {
    this.at = place;
    this.open(this.order[place]);
  }

  /** An episode was opened. */
  select(episode) {
    this.selected = episode;
    this.at = this.order.indexOf(episode);
    if (this.at >= 0) this.reveal();
    this.draw();
  }

  /** The next episode that can be opened after (1) or before (-1) the one that is, in the order of the list; or -1. */
  beside(direction) {
    let place = this.order.indexOf(this.selected);
    if (place < 0 && direction < 0) place = this.order.length;
    for (place += direction; place >= 0 && place < this.order.length; place += direction) {
      if (this.episodes.opened[this.order[place]]) return this.order[place];
    }
    return -1;
  }
}
