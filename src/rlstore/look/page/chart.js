// Canvases: crisp on every screen, drawn again when their size or the colors change.

/** The colors of the present theme. */
let colors = {};

function readColors() {
  const style = getComputedStyle(document.documentElement);
  const names = ['ink', 'soft', 'line', 'well', 'panel', 'accent', 'accent-fill', 'bad', 'warn', 'low', 'mid', 'high'];
  colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  colors.series = style.getPropertyValue('--series').trim().split(' ');
  colors.ends = END_COLORS.map((name) => style.getPropertyValue(name).trim());
}

const resized = new ResizeObserver((entries) => {
  for (const entry of entries) entry.target.redraw();
});

/** A canvas of some height that fills the width it is given; `draw(context, width, height)` draws it. */
function canvasOf(height, label, draw) {
  const canvas = element('canvas', { role: 'img', 'aria-label': label });
  canvas.style.height = `${height}px`;
  canvas.redraw = () => {
    const width = canvas.clientWidth;
    if (!width) return; // it is not shown
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext('2d');
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = '11px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif';
    draw(context, width, height);
  };
  resized.observe(canvas);
  return canvas;
}

function redrawAll() {
  readColors();
  for (const canvas of document.querySelectorAll('canvas')) if (canvas.redraw) canvas.redraw();
}

/** Round numbers between two, about `most` of them; if asked for, whole ones alone. */
function ticks(low, high, most, whole = false) {
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  const rough = span / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const steps = [1, 2, 2.5, 5, 10].map((n) => n * power);
  const step = steps.find((n) => n >= rough * 0.8 && !(whole && n % 1)) ?? 1;
  const found = new Set();
  const first = Math.ceil(low / step);
  // Counted from 0: a whole number above 2^53 does not grow by 1.
  for (let i = 0; i <= 4 * most + 4 && (first + i) * step <= high + span * 1e-9; i++) found.add(Number(((first + i) * step).toPrecision(12)));
  return [...found];
}

/** Lines and numbers at the left, for values from `low` at `bottom` up to `high` at `top`. */
function drawValueAxis(context, low, high, left, right, top, bottom) {
  context.textAlign = 'right';
  context.textBaseline = 'middle';
  context.lineWidth = 1;
  for (const tick of ticks(low, high, Math.max(2, (bottom - top) / 32))) {
    const y = Math.round(high > low ? bottom - ((tick - low) / (high - low)) * (bottom - top) : (top + bottom) / 2) + 0.5;
    context.strokeStyle = colors.line;
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(right, y);
    context.stroke();
    context.fillStyle = colors.soft;
    context.fillText(shown(tick), left - 6, y);
  }
}

/** Numbers below, for values from `low` at `left` to `high` at `right`; if asked for, whole ones alone. */
function drawPlaceAxis(context, low, high, left, right, bottom, whole = false) {
  context.fillStyle = colors.soft;
  context.textBaseline = 'top';
  for (const tick of ticks(low, high, Math.max(2, (right - left) / 70), whole)) {
    const x = high > low ? left + ((tick - low) / (high - low)) * (right - left) : (left + right) / 2;
    context.textAlign = x - left < 16 ? 'left' : right - x < 16 ? 'right' : 'center';
    context.fillText(shown(tick), x, bottom + 5);
  }
}

/** The bars of a histogram. */
function drawBars(context, bars, left, right, top, bottom, color) {
  const most = Math.max(...bars, 1);
  const width = (right - left) / bars.length;
  context.fillStyle = color;
  bars.forEach((count, i) => {
    const height = count ? Math.max(1, (count / most) * (bottom - top)) : 0;
    context.fillRect(left + i * width, bottom - height, Math.max(width - (width > 4 ? 1 : 0), 0.75), height);
  });
}

/** A histogram with an axis. */
function histogram(numbers, height, label) {
  return canvasOf(height, label, (context, width) => {
    if (!numbers.histogram.length) return;
    const bottom = height - 18;
    drawBars(context, numbers.histogram, 2, width - 2, 4, bottom, colors['accent-fill']);
    context.strokeStyle = colors.line;
    context.strokeRect(2, bottom + 0.5, width - 4, 0);
    const whole = numbers.high - numbers.low === numbers.histogram.length; // a bar for each number
    drawPlaceAxis(context, numbers.low, numbers.high, 2, width - 2, bottom, whole);
  });
}

/** The bars of a histogram alone, for a table. */
function smallHistogram(numbers, label) {
  return canvasOf(34, label, (context, width, height) => {
    drawBars(context, numbers.histogram, 0, width, 2, height - 2, colors['accent-fill']);
    context.fillStyle = colors.line;
    context.fillRect(0, height - 1, width, 1);
  });
}

/** Of every entry of a field: from the least to the most, from quartile to quartile, the median, what is marked. */
function boxes(entries, low, high) {
  const row = 15;
  return canvasOf(entries.length * row + 22, 'Distribution of each entry', (context, width, height) => {
    const [left, right] = [64, width - 10];
    const place = (value) => left + ((value - low) / (high - low || 1)) * (right - left);
    drawPlaceAxis(context, low, high, left, right, height - 22);
    entries.forEach((entry, i) => {
      const y = i * row + row / 2;
      context.fillStyle = entry.nans || entry.infs ? colors.bad : colors.soft;
      context.textAlign = 'right';
      context.textBaseline = 'middle';
      context.fillText(entry.name, left - 8, y);
      if (entry.least === null) return;
      context.fillStyle = colors.line;
      context.fillRect(place(entry.least), y - 1, Math.max(place(entry.most) - place(entry.least), 1), 2);
      context.fillStyle = colors['accent-fill'];
      context.globalAlpha = 0.55;
      context.fillRect(place(entry.q1), y - 4.5, Math.max(place(entry.q3) - place(entry.q1), 1.5), 9);
      context.globalAlpha = 1;
      context.fillStyle = colors.ink;
      context.fillRect(place(entry.median) - 1, y - 5, 2, 10);
      if (entry.outliers) {
        context.fillStyle = colors.warn;
        for (const end of [entry.least, entry.most]) {
          if (end < entry.fences[0] || end > entry.fences[1]) context.fillRect(place(end) - 2.5, y - 2.5, 5, 5);
        }
      }
    });
  });
}
