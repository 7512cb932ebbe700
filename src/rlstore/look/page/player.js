// One episode: frames, plots, and a cursor that all of them share.

const SPEEDS = [1, 2, 5, 10, 20, 30, 60, 120, 240];

class Player {
  constructor(episodes, list) {
    this.episodes = episodes;
    this.list = list;
    this.step = 0;
    this.count = 0; // places of the cursor: the steps, and what was observed after the last
    this.view = [0, 1];
    this.tracks = [];
    this.pictures = [];
    this.playing = null;
    for (const speed of SPEEDS) byId('speed').append(element('option', { value: speed }, `${speed} / s`));
    byId('scrubber').addEventListener('input', () => this.go(Number(byId('scrubber').value)));
    byId('play').addEventListener('click', () => this.toggle());
    byId('previous').addEventListener('click', () => this.beside(-1));
    byId('next').addEventListener('click', () => this.beside(1));
  }

  get is_open() {
    return !byId('player').hidden;
  }

  /** Shows an episode, from a step on. */
  async open(at, step = 0) {
    const { episodes } = this;
    this.pause();
    this.wanted = at;
    const episode = jsonOf(`episode-${at}`);
    for (const field of episode.fields) {
      if (field.kind === 'frames') field.values = await decodedFrames(field.data, field.height * field.width * field.channels);
      else field.values = await decoded(field.data);
    }
    if (this.wanted !== at) return; // another one was asked for meanwhile
    this.first = episode.first;
    this.before = episode.before;
    this.count = episode.steps + (episode.final ? 1 : 0);
    this.steps = episode.steps;
    this.end = episodes.end[at];
    this.view = [0, this.count];
    byId('hint').hidden = true;
    byId('player').hidden = false;
    byId('episode-name').textContent = `Episode ${shown(episodes.index[at])}`;
    byId('episode-facts').replaceChildren(...this.facts(at));
    byId('episode-note').textContent = episode.note;
    byId('episode-note').hidden = !episode.note;
    byId('scrubber').max = this.count - 1;
    this.show(episode);
    const has_frames = this.pictures.length > 0;
    byId('speed').value = has_frames ? 10 : this.count > 300 ? 60 : 30;
    this.list.select(at);
    byId('previous').disabled = this.list.beside(-1) < 0;
    byId('next').disabled = this.list.beside(1) < 0;
    this.go(step);
  }

  facts(at) {
    const { episodes } = this;
    const fact = (name, value) => element('span', {}, `${name} `, element('b.number', {}, value));
    return [
      fact('environment', shown(episodes.env[at])), fact('steps', shown(episodes.length[at])),
      fact('return', shown(episodes.return[at])), endChip(episodes.end[at]),
    ];
  }

  show(episode) {
    const observed = episode.fields.filter((field) => field.role === 'observation');
    const frames = observed.filter((field) => field.kind === 'frames');
    const vectors = observed.filter((field) => field.kind === 'numbers');
    const others = episode.fields.filter((field) => field.role !== 'observation');
    this.pictures = frames.map((field) => new Picture(field));
    byId('stage').replaceChildren(...this.pictures.map((picture) => picture.element));
    this.tracks = [];
    const made = [];
    if (vectors.length) made.push(this.chooser(vectors));
    for (const field of others) made.push(this.added(trackOf(this, field, field.name)));
    if (episode.windows) made.push(this.added(new WindowTrack(this, episode.windows)));
    byId('tracks').replaceChildren(...made);
  }

  added(track) {
    this.tracks.push(track);
    return track.element;
  }

  /** The plot of one observation, with a choice of them if there are several, and of lines or a heat map. */
  chooser(vectors) {
    const holder = element('div');
    const select = element('select.small', { 'aria-label': 'Observation' });
    vectors.forEach((field, i) => select.append(element('option', { value: i }, field.name)));
    const kind = element('button.small', { 'aria-label': 'Lines or heat map' });
    let current = null;
    const show = (field, as) => {
      const track = as === 'lines' ? new LineTrack(this, field, field.name) : as === 'heat' ? new HeatTrack(this, field, field.name) : trackOf(this, field, field.name);
      this.tracks = [track, ...this.tracks.filter((other) => other !== current)];
      current = track;
      const is_heat = track instanceof HeatTrack;
      kind.textContent = is_heat ? 'as lines' : 'as heat map';
      kind.onclick = () => show(field, is_heat ? 'lines' : 'heat');
      if (vectors.length > 1) track.heading.replaceChildren(select);
      if (field.entries > 1) track.heading.append(kind);
      holder.replaceChildren(track.element);
      track.move(this.step);
    };
    select.addEventListener('change', () => {
      show(vectors[Number(select.value)]);
      select.focus();
    });
    show(vectors[0]);
    return holder;
  }

  /** Moves the cursor. */
  go(step) {
    this.step = Math.min(Math.max(step, 0), this.count - 1);
    this.follow();
    this.nameStep();
    for (const track of this.tracks) track.move(this.step);
    for (const picture of this.pictures) picture.show(this.step);
    const at = this.first + this.step;
    const is_final = this.step >= this.steps;
    byId('scrubber').value = this.step;
    byId('scrubber').setAttribute('aria-valuetext', is_final ? 'after the last step' : `step ${at}`);
    byId('step').textContent = is_final ? 'after the last step' : `step ${shown(at)} of ${shown(this.first + this.steps)}`;
  }

  /** Names the step in the address once the cursor rests: browsers allow no change for every step. */
  nameStep() {
    clearTimeout(this.naming);
    const address = `#episodes/${this.wanted}/${this.step}`;
    this.naming = setTimeout(() => {
      if (location.hash.startsWith('#episodes/')) history.replaceState(null, '', address);
    }, 300);
  }

  /** Keeps the cursor in view when it is a part of the episode. */
  follow() {
    const [from, to] = this.view;
    const span = to - from;
    if (this.step >= from && this.step + 1 <= to) return;
    const start = Math.min(Math.max(this.step - span / 4, 0), this.count - span);
    this.view = [start, start + span];
    for (const track of this.tracks) track.canvas.redraw();
  }

  /** Shows less (a factor below 1) or more of the episode around a step. */
  zoom(factor, around = this.step) {
    const [from, to] = this.view;
    const span = Math.min(Math.max((to - from) * factor, Math.min(10, this.count)), this.count);
    const share = (around + 0.5 - from) / (to - from);
    const start = Math.min(Math.max(around + 0.5 - share * span, 0), this.count - span);
    this.view = [start, start + span];
    for (const track of this.tracks) track.canvas.redraw();
  }

  beside(direction) {
    const at = this.list.beside(direction);
    if (at >= 0) this.list.open(at);
  }

  toggle() {
    if (this.playing !== null) this.pause();
    else this.play();
  }

  play() {
    if (this.step >= this.count - 1) this.go(0);
    this.pressed(true);
    let before = performance.now();
    let due = 0;
    const advance = (now) => {
      due += ((now - before) * Number(byId('speed').value)) / 1000;
      before = now;
      if (due >= 1) this.go(this.step + Math.floor(due));
      due %= 1;
      if (this.step >= this.count - 1) this.pause();
      else this.playing = requestAnimationFrame(advance);
    };
    this.playing = requestAnimationFrame(advance);
  }

  pause() {
    if (this.playing !== null) cancelAnimationFrame(this.playing);
    this.playing = null;
    this.pressed(false);
  }

  pressed(is_playing) {
    byId('play').setAttribute('aria-pressed', is_playing);
    byId('play').setAttribute('aria-label', is_playing ? 'Pause' : 'Play');
  }
}

/** An observation that is an image, at the step of the cursor. */
class Picture {
  constructor(field) {
    this.field = field;
    const { width, height } = field;
    this.canvas = element('canvas', { width, height, role: 'img', 'aria-label': `${field.name} at the cursor` });
    const scale = Math.max(1, Math.floor(Math.min(330 / height, 480 / width)));
    this.canvas.style.width = `${width * scale}px`;
    this.canvas.style.aspectRatio = `${width} / ${height}`;
    this.context = this.canvas.getContext('2d');
    this.image = this.context.createImageData(width, height);
    this.element = element('figure', {}, this.canvas, element('figcaption.soft', {}, `${field.name}${field.about ? `, ${field.about}` : ''}`));
  }

  show(step) {
    const { values, width, height, channels, count } = this.field;
    const pixels = width * height;
    const begin = Math.min(step, count - 1) * pixels * channels;
    const { data } = this.image;
    for (let i = 0; i < pixels; i++) {
      for (let c = 0; c < 3; c++) data[4 * i + c] = values[begin + i * channels + (channels === 3 ? c : 0)];
      data[4 * i + 3] = 255;
    }
    this.context.putImageData(this.image, 0, 0);
  }
}
