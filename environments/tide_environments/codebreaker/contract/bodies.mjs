// What the calls' bodies may hold. A checker takes a value and its field's name, and returns the value or throws a
// Problem that names the field; a field that the contract does not know is refused by name.

import { CLOCKS } from "./clocks.mjs";
import { depth, write } from "./json.mjs";
import { invalid, Problem } from "./problem.mjs";

const MAX_TASK_BYTES = 4 * 1024 * 1024;
const MAX_TASK_LEVELS = 64;
const MAX_PARTS = 1024;
const MAX_LIMIT_S = 30 * 24 * 3600;

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

// Lengths count characters of Unicode, not JavaScript's units of 16 bits.
const text = (min, max, allowed, words) => (value, field) => {
  if (typeof value !== "string") throw invalid(field, "must be a string");
  const length = [...value].length;
  if (length < min || length > max) throw invalid(field, `must have ${min} to ${max} characters`);
  if (!allowed.test(value)) throw invalid(field, words);
  return value;
};
const word = (min, max) => text(min, max, /^[^\x00-\x1f\x7f]*$/, "must hold no control characters");
const prose = (max) => text(0, max, /^[^\x00]*$/, "must hold no NUL");

const whole = (min, max) => (value, field) => {
  if (typeof value !== "bigint" && !Number.isInteger(value)) throw invalid(field, "must be a whole number");
  if (value < min || value > max) throw invalid(field, `must be ${min} to ${max}`);
  return value;
};

const oneOf = (...words) => (value, field) => {
  if (!words.includes(value)) throw invalid(field, `must be one of: ${words.join(", ")}`);
  return value;
};

const objects = (value, field) => {
  if (!Array.isArray(value) || !value.every(isObject)) throw invalid(field, "must be a list of objects");
  if (value.length > MAX_PARTS) throw invalid(field, `must have at most ${MAX_PARTS} parts`);
  return value;
};

const taskParameters = (value, field) => {
  if (!isObject(value)) throw invalid(field, "must be an object");
  if (Buffer.byteLength(write(value)) > MAX_TASK_BYTES) {
    const words = `${field}: it may have at most ${MAX_TASK_BYTES} bytes as JSON`;
    throw new Problem("too_large", words, { field, max_bytes: MAX_TASK_BYTES });
  }
  if (depth(value) > MAX_TASK_LEVELS + 1) throw invalid(field, `it may be nested at most ${MAX_TASK_LEVELS} deep`);
  return value;
};

const limits = (value, field) => {
  if (!isObject(value)) throw invalid(field, "must be an object");
  for (const [name, seconds] of Object.entries(value)) {
    if (!CLOCKS.includes(name)) throw invalid(`${field}.${name}`, `no such clock; there are ${CLOCKS.join(", ")}`);
    if (!(typeof seconds === "number" && seconds > 0 && seconds <= MAX_LIMIT_S)) {
      throw invalid(`${field}.${name}`, `must be seconds above 0, at most ${MAX_LIMIT_S}`);
    }
  }
  return value;
};

// An OpenAI message: further members pass through unchanged.
const assistantMessage = (value, field) => {
  if (!isObject(value)) throw invalid(field, "must be an object");
  oneOf("assistant")(value.role, `${field}.role`);
  const { content = null, tool_calls: calls = null, tool_call_id: call = null } = value;
  if (content !== null && typeof content !== "string") objects(content, `${field}.content`);
  if (calls !== null) objects(calls, `${field}.tool_calls`);
  if (call !== null) text(0, 512, /^/, "")(call, `${field}.tool_call_id`);
  return value;
};

const required = (check) => (value, field) => {
  if (value === undefined) throw invalid(field, "is missing");
  return check(value, field);
};
const nullable = (check) => (value, field) => (value === undefined || value === null ? null : check(value, field));
const standard = (check, fallback) => (value, field) => (value === undefined ? fallback : check(value, field));

const body = (fields) => (data) => {
  if (!isObject(data)) throw invalid("body", "must be a JSON object");
  for (const name of Object.keys(data)) if (!Object.hasOwn(fields, name)) throw invalid(name, "unknown field, remove it");
  return Object.fromEntries(Object.entries(fields).map(([name, check]) => [name, check(data[name], name)]));
};

const taskId = required(word(1, 128));

export const startBody = body({
  environment: required(word(1, 128)),
  key: required(word(1, 512)),
  task: nullable(taskParameters),
  seed: nullable(whole(0n, 2n ** 63n - 1n)),
  split: nullable(word(0, 64)),
  kind: standard(oneOf("train", "eval"), "train"),
  limits: nullable(limits),
  attempt: standard(whole(0, 2 ** 31 - 1), 0),
});
export const observationBody = body({
  task_id: taskId,
  turn: required(whole(0, 2 ** 31 - 1)),
  message: required(assistantMessage),
});
export const epochBody = body({ task_id: taskId, epoch: nullable(whole(1n, 2n ** 63n - 1n)) });
export const endBody = body({ task_id: taskId, reason: nullable(prose(1024)) });
