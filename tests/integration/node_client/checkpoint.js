// One rank's files of a checkpoint, as docs/checkpoints.md describes them.

const fs = require("node:fs");
const path = require("node:path");
const { xxhash128 } = require("hash-wasm");

const VERSION = 1;
const CHUNK_BYTES = 8 << 20;
const ALIGNMENT = 4096;

const five = (rank) => String(rank).padStart(5, "0");
const named = async (bytes) => `xxh3-128:${await xxhash128(bytes)}`;

// Shows the whole file under its name, or none, whenever the machine stops.
function put(file, bytes) {
  fs.mkdirSync(path.dirname(file), { recursive: true });
  const temporary = `${file}.${process.pid}.tmp`;
  const handle = fs.openSync(temporary, "wx");
  fs.writeSync(handle, bytes);
  fs.fsyncSync(handle);
  fs.closeSync(handle);
  fs.renameSync(temporary, file);
  syncFolder(path.dirname(file));
}

// Makes a file that nobody else has made.
function createOnce(file, bytes) {
  fs.mkdirSync(path.dirname(file), { recursive: true });
  const temporary = `${file}.${process.pid}.tmp`;
  const handle = fs.openSync(temporary, "wx");
  fs.writeSync(handle, bytes);
  fs.fsyncSync(handle);
  fs.closeSync(handle);
  try {
    fs.linkSync(temporary, file);
  } catch (error) {
    if (error.code !== "EEXIST") throw error;
  } finally {
    fs.unlinkSync(temporary);
    syncFolder(path.dirname(file));
  }
}

function syncFolder(folder) {
  const handle = fs.openSync(folder, "r");
  fs.fsyncSync(handle);
  fs.closeSync(handle);
}

function claim(root, job, uid) {
  const owned = (owner) => JSON.stringify({ format: "strata-root", version: 1, owner });
  createOnce(path.join(root, "strata.json"), owned("coordinated"));
  createOnce(path.join(root, job, "strata.json"), owned(`coordinated:${uid.split(".")[0]}/${job}`));
}

function identity(record) {
  return {
    step: record.step,
    generation: record.generation,
    attempt: record.attempt,
    world_size: record.ranks,
    epoch: record.epoch,
    type: "full",
  };
}

// Writes one float32 tensor under the key `weights`, and `step` beside it; returns what to ack.
async function writePart(folder, record, rank, weights) {
  const bytes = Buffer.from(weights.buffer, weights.byteOffset, weights.byteLength);
  const shape = [weights.length];
  const text = Buffer.from(
    JSON.stringify({
      __metadata__: { format: "pt", writer: "node" },
      weights: { dtype: "F32", shape, data_offsets: [0, bytes.length] },
    }),
  );
  const padding = (ALIGNMENT - ((8 + text.length) % ALIGNMENT)) % ALIGNMENT;
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length + padding));
  const header = Buffer.concat([length, text, Buffer.alloc(padding, " ")]);
  const image = `rank-${five(rank)}.safetensors`;
  put(path.join(folder, image), Buffer.concat([header, bytes]));

  const chunks = [];
  for (let start = 0; start < bytes.length; start += CHUNK_BYTES)
    chunks.push(await xxhash128(bytes.subarray(start, start + CHUNK_BYTES)));
  const manifest = Buffer.from(
    JSON.stringify({
      format: "strata-rank-manifest",
      version: VERSION,
      ...identity(record),
      rank,
      digest: "xxh3-128",
      chunk_bytes: CHUNK_BYTES,
      image: {
        file: image,
        size_bytes: header.length + bytes.length,
        header_bytes: header.length,
        header_digest: await xxhash128(header),
      },
      tensors: {
        weights: { kind: "numpy", dtype: "float32", shape, range: [header.length, header.length + bytes.length], chunks },
      },
      tree: { d: [["weights", { t: "weights" }], ["step", record.step]], c: "dict" },
      rng: null,
    }),
  );
  put(path.join(folder, `rank-${five(rank)}.json`), manifest);
  return { digest: await named(manifest), sizeBytes: header.length + bytes.length };
}

// Writes the global manifest once all ranks have acked; returns what to seal.
async function compose(folder, record, predecessor) {
  const ranks = [];
  let size = 0;
  let weights = "";
  for (let rank = 0; rank < record.ranks; rank++) {
    const manifest = `rank-${five(rank)}.json`;
    const bytes = fs.readFileSync(path.join(folder, manifest));
    const { image, tensors } = JSON.parse(bytes);
    if (rank === 0) weights = `weights\0float32\0[${tensors.weights.shape}]\0${tensors.weights.chunks}`;
    ranks.push({ rank, manifest, digest: await named(bytes), image: image.file, image_bytes: image.size_bytes });
    size += image.size_bytes;
  }
  const modelHash = await named(Buffer.from(weights));
  const manifest = Buffer.from(
    JSON.stringify({
      format: "strata-manifest",
      version: VERSION,
      ...identity(record),
      digest: "xxh3-128",
      created_unix_ms: record.createdUnixMs,
      size_bytes: size,
      model_hash: modelHash,
      metadata: record.metadata,
      predecessor,
      ranks,
    }),
  );
  put(path.join(folder, "manifest.json"), manifest);
  return { manifestDigest: await named(manifest), sizeBytes: size, modelHash };
}

// Makes the marker of a committed checkpoint. Whoever makes it writes the same bytes.
async function mark(folder, record) {
  const { predecessor } = JSON.parse(fs.readFileSync(path.join(folder, "manifest.json")));
  const before = predecessor ? `[${predecessor[0]}, ${predecessor[1]}, "${predecessor[2]}"]` : "null";
  const body =
    `{"format": "strata-commit", "version": ${VERSION}, "step": ${record.step}, ` +
    `"generation": ${record.generation}, "attempt": "${record.attempt}", "manifest": "manifest.json", ` +
    `"manifest_digest": "${record.manifestDigest}", "predecessor": ${before}`;
  createOnce(path.join(folder, "COMMIT"), `${body}, "self": "${await xxhash128(`${body}}`)}"}`);
}

module.exports = { claim, compose, mark, writePart };
