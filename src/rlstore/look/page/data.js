// What the page shows: JSON in elements of their own, in which arrays are deflated and written in base64.

/** The JSON in an element. */
function jsonOf(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

/** Inflates what zlib has deflated. */
async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fromBase64(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

const ARRAYS = {
  u1: Uint8Array, i1: Int8Array, u2: Uint16Array, i2: Int16Array, u4: Uint32Array, i4: Int32Array,
  f4: Float32Array, f8: Float64Array,
};

/** A typed array, of which all first bytes come first, then all second ones: so they deflate better. */
async function decoded(array) {
  const Kind = ARRAYS[array.type];
  const bytes = await inflated(fromBase64(array.data));
  const width = Kind.BYTES_PER_ELEMENT;
  if (width === 1) return new Kind(bytes.buffer);
  const count = bytes.length / width;
  const whole = new Uint8Array(bytes.length);
  for (let b = 0; b < width; b++) {
    for (let i = 0; i < count; i++) whole[i * width + b] = bytes[b * count + i];
  }
  return new Kind(whole.buffer);
}

/** Frames, of which all but the first are differences from the one before. */
async function decodedFrames(array, size) {
  const bytes = await inflated(fromBase64(array.data));
  for (let i = size; i < bytes.length; i++) bytes[i] += bytes[i - size];
  return bytes;
}
