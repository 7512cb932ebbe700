// Elements and texts. Nothing that comes from the data is ever read as HTML.

/** An element: `element('p.soft', {title: 'x'}, 'text', child)`. */
function element(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split('.');
  const made = document.createElement(tag);
  made.className = classes.join(' ');
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const byId = (id) => document.getElementById(id);

/** A number for people: four digits, and thousands set apart. */
function shown(value) {
  if (value === null || value === undefined) return '–';
  if (!Number.isFinite(value)) return Number.isNaN(value) ? 'NaN' : value > 0 ? '∞' : '−∞';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2).replace('e+', 'e').replaceAll('-', '−');
  const digits = Number.isInteger(value) ? 0 : Math.max(0, 3 - Math.floor(Math.log10(size || 1)));
  const text = value.toLocaleString('en-US', { maximumFractionDigits: Math.min(digits, 6) });
  return text.replace('-', '−');
}

function bytesShown(count) {
  const units = ['bytes', 'kB', 'MB', 'GB', 'TB'];
  let unit = 0;
  for (; count >= 1000 && unit < 4; unit++) count /= 1000;
  return `${count.toLocaleString('en-US', { maximumSignificantDigits: 3 })} ${units[unit]}`;
}

function counted(count, one, many = `${one}s`) {
  return `${shown(count)} ${count === 1 ? one : many}`;
}

function percent(part, whole) {
  if (!whole || part === whole || !part) return part && whole ? '100 %' : '0 %';
  const share = (100 * part) / whole;
  return share < 0.1 ? '< 0.1 %' : share > 99.9 ? '> 99.9 %' : `${share.toFixed(share < 10 ? 1 : 0)} %`;
}

/** How episodes end, by the number that stands for it in the data. */
const ENDS = [
  ['going on', 'The episode goes on.'],
  ['terminated', 'It ended in a terminal state.'],
  ['truncated', 'It was cut off, for instance by a time limit.'],
  ['broken off', 'Its steps stop without a flag: the next observation was another one.'],
  ['both flags', 'Terminated and truncated in the same step.'],
];
const END_COLORS = ['--end-0', '--end-1', '--end-2', '--end-3', '--end-1'];

function endChip(end) {
  const dot = element('i.dot');
  dot.style.background = `var(${END_COLORS[end]})`;
  return element('span', { title: ENDS[end][1] }, dot, ENDS[end][0]);
}
