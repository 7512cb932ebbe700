// The first view: how full the storage is, what its fields hold, what is wrong with them, returns and priorities.

function showOverview(storage, episodes, open) {
  const view = byId('overview');
  view.append(element('div.tiles', {}, ...tiles(storage, episodes)));
  if (episodes.count) view.append(...returnPanels(episodes, open));
  const film = element('section.panel', { hidden: '' });
  view.append(film);
  view.append(fieldPanel(storage));
  if (storage.priorities) view.append(...priorityPanels(storage.priorities));
  if (storage.stats.length) {
    view.append(listPanel('Counters', 'of stats()', storage.stats.map(([key, value]) => [key, shown(value)])));
  }
  view.append(listPanel(storage.kind, 'as it was created', storage.settings));
  const notes = storage.notes.map((note) => element('p.soft', {}, note));
  view.append(element('div.notes', { 'aria-label': 'What was looked at' }, ...notes));
  return showFilm(film, episodes, open);
}

function tile(title, big, ...rest) {
  return element('div.panel.tile', {}, element('h3.soft', {}, title), element('div.big.number', {}, big), ...rest);
}

function tiles(storage, episodes) {
  const made = [
    tile(
      'Transitions',
      shown(storage.held),
      bar([[storage.held, 'var(--accent-fill)']], storage.capacity),
      element('p.soft', {}, `${percent(storage.held, storage.capacity)} of ${shown(storage.capacity)}`),
    ),
    tile('Episodes', shown(storage.episodes.count), ...endBar(episodes)),
    tile('Environments', shown(storage.envs), ...storage.about_envs.map((text) => element('p.soft', {}, text))),
    tile('Memory', bytesShown(storage.bytes), ...storage.about_bytes.map((text) => element('p.soft', {}, text))),
  ];
  made.push(healthTile(storage));
  return made;
}

function bar(parts, whole) {
  const made = element('div.bar', { 'aria-hidden': 'true' });
  for (const [count, color] of parts) {
    if (!count) continue;
    const piece = element('i');
    piece.style.width = `${(100 * count) / Math.max(whole, 1)}%`;
    piece.style.background = color;
    made.append(piece);
  }
  return made;
}

function endBar(episodes) {
  const counts = ENDS.map((_, end) => episodes.end.reduce((sum, e) => sum + (e === end), 0));
  const order = [1, 2, 4, 3, 0].filter((end) => counts[end]);
  const parts = order.map((end) => [counts[end], `var(${END_COLORS[end]})`]);
  const legend = order.map((end) => {
    const chip = endChip(end);
    chip.append(` ${shown(counts[end])}`);
    return chip;
  });
  return [bar(parts, episodes.count), element('div.legend', {}, ...legend)];
}

function healthTile(storage) {
  const total = (what) => storage.fields.reduce((sum, field) => sum + (field.numbers ? field.numbers[what] : 0), 0);
  const [nans, infs, outliers] = [total('nans'), total('infs'), total('outliers')];
  const lines = [];
  if (nans) lines.push(element('span.chip.bad', {}, counted(nans, 'NaN', 'NaN')));
  if (infs) lines.push(element('span.chip.bad', {}, counted(infs, 'infinite value')));
  if (outliers) lines.push(element('span.chip.warn', {}, counted(outliers, 'outlier')));
  const is_bad = nans + infs > 0;
  const big = is_bad ? 'not finite' : 'finite';
  const made = tile('Values', big, element('div.legend', {}, ...lines));
  made.querySelector('.big').style.color = is_bad ? 'var(--bad)' : 'var(--ok)';
  made.append(element('p.soft', {}, `in ${counted(storage.looked, 'transition')} looked at`));
  return made;
}

// ------------------------------------------------------------------------------------------------------- returns

function returnPanels(episodes, open) {
  const chart = element('section.panel.half', {}, title('Returns', 'oldest to newest; a click opens an episode'), returnChart(episodes, open));
  const hist = (numbers, name, about) =>
    element('section.panel.third', {}, title(name, about), histogram(numbers, 190, `Histogram of ${name.toLowerCase()}`));
  return [chart, hist(episodes.returns, 'Return', spread(episodes.returns)), hist(episodes.lengths, 'Length', spread(episodes.lengths))];
}

function title(name, about = '') {
  return element('div.title', {}, element('h2', {}, name), element('span.soft.number', {}, about));
}

function spread(numbers) {
  if (numbers.median === null) return 'no finite value';
  if (numbers.least === numbers.most) return `all ${shown(numbers.least)}`;
  return `${shown(numbers.least)} to ${shown(numbers.most)}, median ${shown(numbers.median)}`;
}

function returnChart(episodes, open) {
  const [left, margin] = [58, 8];
  const { least, most } = episodes.returns;
  const middle = movingMedian(episodes.return);
  let places = [];
  const canvas = canvasOf(190, 'Return of each episode, oldest to newest', (context, width, height) => {
    const bottom = height - 18;
    const [low, high] = most > least ? [least, most] : [(least ?? 0) - 1, (most ?? 0) + 1];
    drawValueAxis(context, low, high, left, width - margin, 6, bottom);
    drawPlaceAxis(context, episodes.index[0], episodes.index[episodes.count - 1], left, width - margin, bottom, true);
    const step = (width - margin - left) / Math.max(episodes.count - 1, 1);
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - 6);
    const size = episodes.count > 1500 ? 1.6 : episodes.count > 300 ? 2.2 : 3;
    places = [];
    for (let i = 0; i < episodes.count; i++) {
      const value = episodes.return[i];
      const x = left + i * step;
      places.push([x, Number.isFinite(value) ? y(value) : 6]);
      context.fillStyle = Number.isFinite(value) ? colors.ends[episodes.end[i]] : colors.bad;
      context.globalAlpha = episodes.opened[i] || !Number.isFinite(value) ? 0.9 : 0.45;
      context.beginPath();
      context.arc(places[i][0], places[i][1], episodes.opened[i] ? size + 0.4 : size, 0, 7);
      context.fill();
    }
    context.globalAlpha = 1;
    context.strokeStyle = colors.ink;
    context.lineWidth = 1.8;
    context.beginPath();
    middle.forEach(([at, value], i) => (i ? context.lineTo : context.moveTo).call(context, left + at * step, y(value)));
    context.stroke();
  });
  const nearest = (event) => {
    const box = canvas.getBoundingClientRect();
    let [best, distance] = [-1, 14 ** 2];
    places.forEach(([x, y], i) => {
      const away = (x - event.clientX + box.left) ** 2 + (y - event.clientY + box.top) ** 2;
      const rank = episodes.opened[i] ? away : away + 60; // those that can be opened are nearer
      if (rank < distance) [best, distance] = [i, rank];
    });
    return best;
  };
  canvas.addEventListener('click', (event) => {
    const at = nearest(event);
    if (at >= 0) open(at);
  });
  canvas.addEventListener('mousemove', (event) => {
    const at = nearest(event);
    canvas.style.cursor = at >= 0 && episodes.opened[at] ? 'pointer' : '';
    canvas.title = at < 0 ? '' : `Episode ${shown(episodes.index[at])}: return ${shown(episodes.return[at])}, ${shown(episodes.length[at])} steps`;
  });
  return canvas;
}

/** The median of the episodes around about a hundred of them. */
function movingMedian(values) {
  const finite = [...values.keys()].filter((i) => Number.isFinite(values[i]));
  if (finite.length < 10) return [];
  const reach = Math.max(3, Math.round(finite.length / 40));
  const stride = Math.max(1, Math.floor(finite.length / 150));
  const found = [];
  for (let at = 0; at < finite.length; at += stride) {
    const around = finite.slice(Math.max(0, at - reach), at + reach + 1).map((i) => values[i]);
    found.push([finite[at], around.sort((a, b) => a - b)[around.length >> 1]]);
  }
  return found;
}

// ------------------------------------------------------------------------------------------------------- fields

function fieldPanel(storage) {
  const heads = ['Field', 'Shape', 'Distribution', 'Least', 'Mean', 'Deviation', 'Most', ''];
  const body = element('tbody');
  for (const field of storage.fields) body.append(...fieldRows(field));
  const head = element('tr', {}, ...heads.map((name, i) => element(i > 2 && i < 7 ? 'th.right' : 'th', { scope: 'col' }, name)));
  const table = element('table.table', {}, element('thead', {}, head), body);
  return element('section.panel', {}, title('Fields', storage.about_fields), element('div.scroll', {}, table));
}

function fieldRows(field) {
  const { numbers, entries } = field;
  const name = element('span.code', {}, field.name);
  const row = element('tr');
  const rows = [row];
  let first = name;
  if (entries.length) {
    first = element('button.disclose', { 'aria-expanded': 'false', 'aria-label': `Entries of ${field.name}` }, name);
    const more = element('tr', { hidden: '' }, element('td.inner', { colspan: 8 }));
    first.addEventListener('click', () => {
      const is_open = more.hidden;
      more.hidden = !is_open;
      first.setAttribute('aria-expanded', is_open);
      if (is_open && !more.firstChild.firstChild) more.firstChild.append(...entryBoxes(field));
    });
    rows.push(more);
  }
  const cell = (value) => element('td.right', {}, shown(value));
  const picture = numbers.histogram.length ? smallHistogram(numbers, `Distribution of ${field.name}`) : '';
  row.append(
    element('td', {}, first),
    element('td.shape', {}, `${field.shape} ${field.dtype}`),
    element('td.picture', { title: numbers.low === null ? '' : `${shown(numbers.low)} to ${shown(numbers.high)}` }, picture),
    cell(numbers.least), cell(numbers.mean), cell(numbers.std), cell(numbers.most),
    element('td.marks', {}, ...marks(numbers)),
  );
  return rows;
}

function marks(numbers) {
  const chips = [];
  if (numbers.nans) chips.push(element('span.chip.bad', {}, `${shown(numbers.nans)} NaN`));
  if (numbers.infs) chips.push(element('span.chip.bad', {}, `${shown(numbers.infs)} infinite`));
  if (numbers.outliers) chips.push(element('span.chip.warn', {}, counted(numbers.outliers, 'outlier')));
  return chips.flatMap((chip) => [chip, ' ']);
}

function entryBoxes(field) {
  const finite = field.entries.filter((entry) => entry.least !== null);
  const low = Math.min(...finite.map((entry) => entry.least));
  const high = Math.max(...finite.map((entry) => entry.most));
  const wrong = field.entries.filter((entry) => entry.nans || entry.infs || entry.outliers);
  const chips = wrong.map((entry) => element('span', {}, `${entry.name}: `, ...marks(entry)));
  const about = element('p.soft', {}, 'Of each entry: least to most, half of all values in the box, the median. Squares mark outliers.');
  return [about, element('div.legend', {}, ...chips), ...(finite.length ? [boxes(field.entries, low, high)] : [])];
}

// ------------------------------------------------------------------------------------------------------- priorities

function priorityPanels(priorities) {
  const zeros = priorities.zeros ? `; ${shown(priorities.zeros)} are 0 and never drawn` : '';
  const hist = element('section.panel.half', {}, title('Priorities', spread(priorities.numbers) + zeros), histogram(priorities.numbers, 170, 'Histogram of priorities'));
  const ages = element('section.panel.half', {}, title('Priority by age', `of ${priorities.what}, in steps of their environment: median, and the middle 80 %`), ageChart(priorities.ages));
  return [hist, ages];
}

function ageChart(ages) {
  const [left, margin] = [58, 8];
  return canvasOf(170, 'Priorities by the age of rows', (context, width, height) => {
    if (!ages.length) return;
    const bottom = height - 18;
    const [low, high] = [0, Math.max(...ages.map((age) => age.high)) || 1];
    const oldest = ages[ages.length - 1].to || 1;
    drawValueAxis(context, low, high, left, width - margin, 6, bottom);
    drawPlaceAxis(context, 0, oldest, left, width - margin, bottom, true);
    const x = (age) => left + (((age.from + age.to) / 2) / oldest) * (width - margin - left);
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - 6);
    context.fillStyle = colors['accent-fill'];
    context.globalAlpha = 0.25;
    context.beginPath();
    ages.forEach((age) => context.lineTo(x(age), y(age.high)));
    [...ages].reverse().forEach((age) => context.lineTo(x(age), y(age.low)));
    context.fill();
    context.globalAlpha = 1;
    context.strokeStyle = colors.accent;
    context.lineWidth = 1.8;
    context.beginPath();
    ages.forEach((age) => context.lineTo(x(age), y(age.median)));
    context.stroke();
  });
}

/** Names and values side by side. */
function listPanel(name, about, pairs) {
  const rows = pairs.map(([key, value]) => element('div', {}, element('dt', {}, key), element('dd.code', {}, value)));
  return element('section.panel', {}, title(name, about), element('dl.settings', {}, ...rows));
}
