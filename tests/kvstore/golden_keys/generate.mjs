// A second implementation of namespaces, image extras and block hashes, written from the formulas alone.
// `node generate.mjs > vectors.json` writes the vectors that tests/kvstore/test_golden_keys.py checks the first one against.

import { createHash } from "node:crypto";

const sha256 = (...pieces) => pieces.reduce((hash, piece) => hash.update(piece), createHash("sha256")).digest();

function u32(value) {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32LE(value);
  return bytes;
}

function i64(value) {
  const bytes = Buffer.alloc(8);
  bytes.writeBigInt64LE(BigInt(value));
  return bytes;
}

function f64(value) {
  const bytes = Buffer.alloc(8);
  bytes.writeDoubleLE(value);
  return bytes;
}

const frame = (bytes) => Buffer.concat([u32(bytes.length), bytes]);
const text = (value) => Buffer.from(value, "utf8");
const list = (items) => Buffer.concat([u32(items.length), ...items.map(frame)]);
const ints = (values) => list(values.map(i64));

// A real number is written {"real": x}, because 1.0 and 1 are one thing in JavaScript.
function scalar(value) {
  if (typeof value === "string") return text(value);
  return typeof value === "object" ? f64(value.real) : i64(value);
}

function mapping(entries) {
  const names = Object.keys(entries).sort();
  return list(names.flatMap((name) => [text(name), scalar(entries[name])]));
}

function canonicalEncoding(ns) {
  return Buffer.concat(
    [
      i64(1),
      text(ns.model_id),
      Buffer.from(ns.weights_fingerprint, "hex"),
      text(ns.prompt_version),
      ints(ns.compress_ratios),
      ints(ns.kv_sources),
      ints(ns.index_sources),
      i64(ns.window_tokens),
      mapping(ns.rope),
      mapping(ns.record_formats),
      i64(ns.block_tokens),
      text(ns.layout),
      text(ns.truncation),
      i64(ns.kept_rows),
      Buffer.from([ns.has_draft ? 1 : 0]),
      text(ns.endianness),
      text(ns.numerics),
    ].map(frame),
  );
}

function imageExtra(images, blockStart, blockTokens) {
  const blockEnd = blockStart + blockTokens;
  const touching = images
    .filter((image) => image.start < blockEnd && image.start + image.tokens > blockStart)
    .sort((left, right) => left.start - right.start);
  if (touching.length === 0) return Buffer.alloc(0);
  const spans = touching.map((image) =>
    Buffer.concat([
      frame(Buffer.from(image.content_hash, "hex")),
      i64(image.start - blockStart),
      u32(image.tokens),
      frame(text(image.processor_version)),
    ]),
  );
  return Buffer.concat([u32(spans.length), ...spans]);
}

// Token i is (first + i * step) mod vocabulary.
const tokenIds = ({ count, first, step, vocabulary }) =>
  Array.from({ length: count }, (_, i) => (first + i * step) % vocabulary);

function expected(request) {
  const encoding = canonicalEncoding(request.namespace);
  const ns = sha256(encoding).subarray(0, 16);
  const root = sha256(text("dikv"), ns, frame(Buffer.from(request.salt, "hex")), frame(text(request.adapter)));
  const tokens = tokenIds(request.tokens);
  const size = request.namespace.block_tokens;
  const hashes = [];
  for (let start = 0, parent = root; start + size <= tokens.length; start += size) {
    const ids = Buffer.concat(tokens.slice(start, start + size).map(u32));
    parent = sha256(parent, ids, frame(imageExtra(request.images, start, size)));
    hashes.push(parent);
  }
  const runs = hashes.map((_, depth) => hashes[depth - (depth % 16)].subarray(0, 8).toString("hex"));
  return {
    encoding_sha256: sha256(encoding).toString("hex"),
    namespace: ns.toString("hex"),
    root: root.toString("hex"),
    hashes: hashes.map((hash) => hash.toString("hex")),
    store_keys: hashes.map((hash, depth) =>
      Buffer.concat([text(`b:{${runs[depth]}}:`), hash]).toString("hex"),
    ),
  };
}

const release = {
  model_id: "deepseek-v4.1-flash",
  weights_fingerprint: sha256(text("weights one")).toString("hex"),
  prompt_version: "tokenizer 1, prompt 4.1",
  compress_ratios: [0, 0, 2, 2, 2, 1, 1, 0],
  kv_sources: [2, 8, 14, 20],
  index_sources: [2, 8, 14, 20],
  window_tokens: 128,
  rope: { theta: 10000, compress_theta: 160000, factor: { real: 16.0 }, scaling: "yarn" },
  record_formats: { WINDOW_ROWS: "fp8_e4m3", GLOBAL_KV: "fp4_e2m1", INDEX_KEYS: "mxfp4" },
  block_tokens: 256,
  layout: "canonical",
  truncation: "compact",
  kept_rows: 140,
  has_draft: true,
  endianness: "little",
  numerics: "",
};
const tiny = {
  ...release,
  model_id: "tiny ü",
  kv_sources: [2],
  index_sources: [],
  rope: {},
  block_tokens: 16,
  window_tokens: 16,
  kept_rows: 28,
  truncation: "off",
  has_draft: false,
  numerics: "cpu-reference",
};

const tokens = (count, first = 7, step = 31, vocabulary = 129280) => ({ count, first, step, vocabulary });
const image = (start, count, seed, version = "processor 1") => ({
  content_hash: sha256(text(seed)).toString("hex"),
  start,
  tokens: count,
  processor_version: version,
});
const hex = (value) => text(value).toString("hex");
const request = (overrides) => ({
  namespace: release, salt: "", adapter: "", tokens: tokens(600), images: [], ...overrides,
});

const requests = {
  "empty salt": request({}),
  "a tenant's salt": request({ salt: sha256(text("tenant")).toString("hex") }),
  "salt that ends where another's adapter begins": request({ salt: hex("org_1"), adapter: "2345" }),
  "salt that swallowed the adapter": request({ salt: hex("org_12345"), adapter: "" }),
  "an adapter": request({ adapter: "adapter-7" }),
  "blocks of 64": request({ namespace: { ...release, block_tokens: 64 } }),
  "blocks of 16, two runs and a rest": request({ namespace: tiny, tokens: tokens(16 * 18 + 5) }),
  "one token short of a block": request({ tokens: tokens(255) }),
  "exactly one block": request({ tokens: tokens(256) }),
  "no tokens": request({ tokens: tokens(0) }),
  "ids above 31 bits": request({ namespace: tiny, tokens: tokens(33, 4294967290, 1, 4294967296) }),
  "an image inside a block": request({ images: [image(10, 64, "cat")] }),
  "an image across a border": request({ images: [image(250, 64, "cat")] }),
  "an image across a whole block": request({ tokens: tokens(1024), images: [image(200, 700, "cat")] }),
  "an image that ends at a border": request({ images: [image(192, 64, "cat")] }),
  "another image at the same place": request({ images: [image(10, 64, "dog")] }),
  "two images in one block, given backwards": request({ images: [image(150, 64, "dog"), image(10, 64, "cat")] }),
  "another image processor": request({ images: [image(10, 64, "cat", "processor 2")] }),
  "other weights": request({
    namespace: { ...release, weights_fingerprint: sha256(text("weights two")).toString("hex") },
  }),
};

const cases = Object.entries(requests).map(([name, given]) => ({ name, given, expected: expected(given) }));
process.stdout.write(`${JSON.stringify({ cases }, null, 1)}\n`);
