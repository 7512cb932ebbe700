// Pictures of the best episode that can be opened, for the overview of a storage of images.

const PICTURES = 10;

/** Fills a panel with pictures, evenly spaced over an episode; `open(i, step)` opens it at one of them. */
async function showFilm(panel, episodes, open) {
  const at = bestOpened(episodes);
  if (at < 0) return;
  const episode = jsonOf(`episode-${at}`);
  const field = episode.fields.find((one) => one.kind === 'frames');
  if (!field) return;
  field.values = await decodedFrames(field.data, field.height * field.width * field.channels);
  const about = `episode ${shown(episodes.index[at])}, the best of those that can be opened; a click opens it there`;
  const strip = element('div.film');
  const count = Math.min(PICTURES, episode.steps);
  for (let i = 0; i < count; i++) {
    const step = Math.floor((i * (episode.steps - 1)) / Math.max(count - 1, 1));
    const picture = new Picture(field);
    picture.show(step);
    picture.canvas.style.width = '100%';
    const label = `Open at step ${shown(episode.first + step)}`;
    strip.append(element('button', { 'aria-label': label, title: label, onclick: () => open(at, step) }, picture.canvas));
  }
  panel.append(title('Pictures', about), strip);
  panel.hidden = false;
}

function bestOpened(episodes) {
  let best = -1;
  for (let i = 0; i < episodes.count; i++) {
    if (episodes.opened[i] && (best < 0 || episodes.return[i] > episodes.return[best])) best = i;
  }
  return best;
}
