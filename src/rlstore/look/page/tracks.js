// What is drawn of an episode over its steps. All tracks have one time axis and one cursor.

const LEFT = 64; // for numbers and names, the same in all tracks so that they line up
const RIGHT = 10;
const MOST_LINES = 12; // more entries begin as a heat map
const MOST_CHIPS = 64; // values that are written beside a track
const MOST_CHOICES = 24; // of a discrete action that get a line of their own

/** One field over the steps of an episode; `field.values` are `[entries, count]`, one entry after another. */
class Track {
  constructor(player, field, name, height) {
    this.player = player;
    this.field = field;
    this.hidden = new Set();
    this.canvas = canvasOf(height, `${name} over the steps of the episode`, (context, width) => {
      this.draw(context, width, height);
      this.move(player.step);
    });
    this.cursor = element('div.cursor');
    this.plot = element('div.plot', {}, this.canvas, this.cursor);
    this.heading = element('div.title', {}, element('h3', {}, name));
    this.chips = element('div.values');
    this.element = element('section.track', { 'aria-label': name }, this.heading, this.chips, this.plot);
    this.readouts = [];
    this.listen();
  }

  listen() {
    const move = (event) => this.player.go(this.stepAt(event.clientX));
    this.plot.addEventListener('pointerdown', (event) => {
      this.plot.setPointerCapture(event.pointerId);
      this.player.pause();
      move(event);
    });
    this.plot.addEventListener('pointermove', (event) => {
      if (event.buttons) move(event);
    });
    this.plot.addEventListener('wheel', (event) => {
      if (!event.ctrlKey) return; // the page scrolls
      event.preventDefault();
      this.player.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.stepAt(event.clientX));
    }, { passive: false });
  }

  /** The horizontal place of the middle of a step. */
  place(step, width) {
    const [from, to] = this.player.view;
    return LEFT + ((step + 0.5 - from) / (to - from)) * (width - LEFT - RIGHT);
  }

  stepAt(clientX) {
    const box = this.plot.getBoundingClientRect();
    const [from, to] = this.player.view;
    return Math.floor(from + ((clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * (to - from));
  }

  value(entry, step) {
    return step < this.field.count ? this.field.values[entry * this.field.count + step] : null;
  }

  /** The steps that are seen, and one to either side. */
  seen() {
    const [from, to] = this.player.view;
    return [Math.max(0, Math.floor(from) - 1), Math.min(this.field.count, Math.ceil(to) + 1)];
  }

  /** A button for each entry that shows and hides its line, with its value at the cursor. */
  addChips() {
    const { labels, entries } = this.field;
    if (entries > MOST_CHIPS) return;
    for (let entry = 0; entry < entries; entry++) {
      const dot = element('i');
      const text = element('span');
      const chip = element('button', { 'aria-pressed': 'true', 'aria-label': `Entry ${labels[entry] || entry}` }, dot, text);
      chip.addEventListener('click', () => {
        if (!this.hidden.delete(entry)) this.hidden.add(entry);
        chip.setAttribute('aria-pressed', !this.hidden.has(entry));
        this.canvas.redraw();
      });
      this.chips.append(chip);
      this.readouts.push([dot, text]);
    }
  }

  move(step) {
    const width = this.plot.clientWidth;
    const x = this.place(step, width);
    this.cursor.style.transform = `translateX(${x.toFixed(1)}px)`;
    this.cursor.hidden = x < LEFT || x > width - RIGHT;
    this.readouts.forEach(([dot, text], entry) => {
      dot.style.background = this.color(entry);
      const label = this.field.labels[entry];
      text.textContent = `${label ? `${label}: ` : ''}${shown(this.value(entry, step))}`;
    });
  }

  color(entry) {
    return colors.series[entry % colors.series.length];
  }

  clip(context, width, height) {
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT, height);
    context.clip();
  }

  drawSteps(context, width, bottom) {
    const [from, to] = this.player.view;
    const { first, steps, end } = this.player;
    const last = this.place(steps - 0.5, width);
    if (end && last >= LEFT && last <= width - RIGHT + 1) {
      context.fillStyle = colors.ends[end];
      context.fillRect(last - 1, 0, 2, bottom);
    }
    context.fillStyle = colors.soft;
    context.textBaseline = 'top';
    for (const tick of ticks(from + first, to + first - 1, Math.max(2, (width - LEFT) / 90), true)) {
      const x = this.place(tick - first, width);
      context.textAlign = x > width - 30 ? 'right' : 'center';
      context.fillText(shown(tick), x, bottom + 4);
    }
  }
}

/** The least and the most of finite values; of a single one, some room around it. */
function extent(values, skipped = () => false) {
  let [low, high] = [Infinity, -Infinity];
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (!Number.isFinite(value) || skipped(i)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [-1, 1];
  return low === high ? [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2] : [low, high];
}

/** Each entry as a line. */
class LineTrack extends Track {
  constructor(player, field, name, height = 150) {
    super(player, field, name, height);
    this.addChips();
  }

  draw(context, width, height) {
    const { field } = this;
    const [low, high] = extent(field.values, (i) => this.hidden.has(Math.floor(i / field.count)));
    const [top, bottom] = [6, height - 18];
    drawValueAxis(context, low, high, LEFT, width - RIGHT, top, bottom);
    this.drawSteps(context, width, bottom);
    context.save();
    this.clip(context, width, bottom + 2);
    context.lineWidth = 1.5;
    context.lineJoin = 'round';
    for (let entry = 0; entry < field.entries; entry++) {
      if (!this.hidden.has(entry)) this.drawLine(context, entry, width, (v) => bottom - ((v - low) / (high - low)) * (bottom - top));
    }
    context.restore();
  }

  /** One line, interrupted where a value is not finite: there is a mark at the top instead. */
  drawLine(context, entry, width, y) {
    const [begin, end] = this.seen();
    context.strokeStyle = this.color(entry);
    context.fillStyle = colors.bad;
    context.beginPath();
    let is_down = false;
    for (let step = begin; step < end; step++) {
      const value = this.value(entry, step);
      const x = this.place(step, width);
      if (Number.isFinite(value)) {
        if (is_down) context.lineTo(x, y(value));
        else context.moveTo(x, y(value));
        if (!is_down) context.lineTo(x + 0.01, y(value));
        is_down = true;
      } else {
        is_down = false;
        context.fillRect(x - 1.5, 0, 3, 8);
      }
    }
    context.stroke();
  }
}

/** Each entry as a row of cells, from its own least to its own most. */
class HeatTrack extends Track {
  constructor(player, field, name) {
    const row = Math.min(14, Math.max(2, Math.floor(320 / field.entries)));
    super(player, field, name, field.entries * row + 20);
    this.row = row;
    this.addChips();
    this.ranges = Array.from({ length: field.entries }, (_, e) => extent(field.values.subarray(e * field.count, (e + 1) * field.count)));
  }

  color(entry) {
    const [low, high] = this.ranges[entry];
    const value = this.value(entry, Math.min(this.player.step, this.field.count - 1));
    return Number.isFinite(value) ? mixed((value - low) / (high - low)) : colors.bad;
  }

  draw(context, width, height) {
    const { field, row } = this;
    const [begin, end] = this.seen();
    context.textBaseline = 'middle';
    context.textAlign = 'right';
    for (let entry = 0; entry < field.entries; entry++) {
      if (row >= 11 || entry % Math.ceil(14 / row) === 0) {
        context.fillStyle = colors.soft;
        context.fillText(field.labels[entry] || String(entry), LEFT - 6, entry * row + row / 2);
      }
    }
    this.drawSteps(context, width, height - 20);
    context.save();
    this.clip(context, width, height);
    const cell = this.place(1, width) - this.place(0, width);
    const stride = Math.max(1, Math.floor(0.5 / cell)); // less than half a pixel is not drawn
    for (let entry = 0; entry < field.entries; entry++) {
      if (this.hidden.has(entry)) continue;
      const [low, high] = this.ranges[entry];
      for (let step = begin; step < end; step += stride) {
        const value = this.value(entry, step);
        context.fillStyle = Number.isFinite(value) ? mixed((value - low) / (high - low)) : colors.bad;
        context.fillRect(this.place(step, width) - cell / 2, entry * row, cell * stride + 0.6, row - (row > 6 ? 1 : 0));
      }
    }
    context.restore();
  }
}

const MIXED = new Map();

/** A color between low (0), middle and high (1). */
function mixed(share) {
  const key = `${colors.mid}${Math.round(share * 40)}`;
  if (!MIXED.has(key)) {
    const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const [from, to, part] = share < 0.5 ? [colors.low, colors.mid, share * 2] : [colors.mid, colors.high, share * 2 - 1];
    const ends = channels(to);
    MIXED.set(key, `rgb(${channels(from).map((v, i) => Math.round(v + (ends[i] - v) * part)).join()})`);
  }
  return MIXED.get(key);
}

/** A number that is one of few: a row for each of them, filled where it was chosen. */
class ChoiceTrack extends Track {
  constructor(player, field, name, choices) {
    const row = choices.length > 10 ? 12 : 16;
    super(player, field, name, choices.length * row + 20);
    this.choices = choices;
    this.row = row;
    const dot = element('i');
    const text = element('span');
    this.chips.append(element('span', {}, text));
    this.readouts = [[dot, text]];
  }

  draw(context, width, height) {
    const { row, choices, field } = this;
    const cell = this.place(1, width) - this.place(0, width);
    context.textBaseline = 'middle';
    context.textAlign = 'right';
    choices.forEach((choice, at) => {
      context.fillStyle = at % 2 ? colors.panel : colors.well;
      context.fillRect(LEFT, at * row, width - LEFT - RIGHT, row);
      context.fillStyle = colors.soft;
      context.fillText(shown(choice), LEFT - 6, at * row + row / 2);
    });
    this.drawSteps(context, width, height - 20);
    context.save();
    this.clip(context, width, height);
    const rows = new Map(choices.map((choice, at) => [choice, at]));
    const [begin, end] = this.seen();
    for (let step = begin; step < end; step++) {
      const at = rows.get(field.values[step]);
      context.fillStyle = this.color(at);
      context.fillRect(this.place(step, width) - cell / 2, at * row + 2, Math.max(cell, 1) + (cell > 5 ? -1 : 0.4), row - 4);
    }
    context.restore();
  }
}

/** Rewards as bars, and their sum so far as a line on a scale of its own. */
class RewardTrack extends Track {
  constructor(player, field, name) {
    super(player, field, name, 130);
    this.sums = new Float64Array(field.count);
    let sum = player.before ?? NaN; // null: not finite
    for (let step = 0; step < field.count; step++) this.sums[step] = sum += field.values[step];
    this.text = element('span');
    this.chips.append(this.text);
  }

  move(step) {
    super.move(step);
    const is_there = step < this.field.count;
    const sum = is_there ? this.sums[step] : this.sums[this.field.count - 1];
    this.text.textContent = `${is_there ? shown(this.value(0, step)) : '–'} · so far ${shown(sum)} (line)`;
  }

  draw(context, width, height) {
    const [top, bottom] = [6, height - 18];
    const [low, high] = extent([0, ...this.field.values]);
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
    drawValueAxis(context, low, high, LEFT, width - RIGHT, top, bottom);
    this.drawSteps(context, width, bottom);
    context.save();
    this.clip(context, width, bottom + 2);
    const cell = this.place(1, width) - this.place(0, width);
    const [begin, end] = this.seen();
    for (let step = begin; step < end; step++) {
      const value = this.value(0, step);
      const is_finite = Number.isFinite(value);
      context.fillStyle = !is_finite ? colors.bad : value < 0 ? colors.series[2] : colors['accent-fill'];
      const [from, to] = is_finite ? [y(Math.max(value, 0)), y(Math.min(value, 0))] : [top, bottom];
      context.fillRect(this.place(step, width) - cell / 2, from, Math.max(cell - (cell > 4 ? 1 : 0), 1), Math.max(to - from, value ? 1 : 0));
    }
    this.drawSum(context, width, top, bottom, begin, end);
    context.restore();
  }

  drawSum(context, width, top, bottom, begin, end) {
    const [low, high] = extent(this.sums);
    context.strokeStyle = colors.ink;
    context.globalAlpha = 0.75;
    context.lineWidth = 1.5;
    context.beginPath();
    for (let step = begin; step < end; step++) {
      const y = bottom - ((this.sums[step] - low) / (high - low)) * (bottom - top);
      if (Number.isFinite(y)) context.lineTo(this.place(step, width), y);
    }
    context.stroke();
    context.globalAlpha = 1;
  }
}

/** The windows of a sequence storage: what can be drawn, and with which priority. */
class WindowTrack extends Track {
  constructor(player, windows) {
    const rows = [];
    for (const window of windows.list) {
      const free = rows.findIndex((stop) => stop <= window.start);
      window.row = free < 0 ? rows.length : free;
      rows[window.row] = window.stop;
    }
    const field = { count: 0, entries: 0, labels: [], values: [] };
    super(player, field, 'Windows', Math.min(rows.length, 8) * 15 + 20);
    this.windows = windows.list;
    this.burn_in = windows.burn_in;
    this.highest = Math.max(...windows.list.map((window) => window.priority ?? 0)) || 1;
    this.text = element('span');
    this.chips.append(this.text);
  }

  move(step) {
    super.move(step);
    const within = this.windows.filter((window) => window.start <= step && step < window.stop);
    const priorities = within.filter((window) => window.priority !== null).map((window) => shown(window.priority));
    this.text.textContent = `${counted(within.length, 'window')} with this step${priorities.length ? `, priority ${priorities.join(', ')}` : ''}`;
  }

  draw(context, width, height) {
    this.drawSteps(context, width, height - 20);
    context.save();
    this.clip(context, width, height);
    const half = (this.place(1, width) - this.place(0, width)) / 2;
    for (const { start, stop, row, priority } of this.windows) {
      const [x, to] = [this.place(start, width) - half, this.place(stop, width) - half];
      const trained = Math.min(this.place(start + this.burn_in, width) - half, to);
      context.fillStyle = colors.series[1];
      context.globalAlpha = 0.2;
      context.fillRect(x + 0.5, (row % 8) * 15 + 1, to - x - 1, 12);
      context.globalAlpha = priority === null ? 0.6 : 0.25 + (0.7 * priority) / this.highest;
      context.fillRect(trained + 0.5, (row % 8) * 15 + 1, Math.max(to - trained - 1, 1), 12);
    }
    context.restore();
  }
}

/** The track that suits a field. */
function trackOf(player, field, name) {
  if (field.role === 'reward' && field.entries === 1) return new RewardTrack(player, field, name);
  if (field.is_whole && field.entries === 1) {
    const [least, most] = [Math.min(0, ...field.values), Math.max(1, ...field.values)];
    const choices = Array.from({ length: Math.min(most - least + 1, MOST_CHOICES + 1) }, (_, at) => least + at);
    if (choices.length <= MOST_CHOICES) return new ChoiceTrack(player, field, name, choices);
  }
  return field.entries > MOST_LINES ? new HeatTrack(player, field, name) : new LineTrack(player, field, name, field.role === 'other' ? 90 : 150);
}
