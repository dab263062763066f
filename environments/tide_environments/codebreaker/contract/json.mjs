// JSON as the contract means it: UTF-8, at most 250 levels, whole numbers exact to 64 bits, no lone surrogates.

import { randomUUID } from "node:crypto";

import { invalid } from "./problem.mjs";

const MAX_DEPTH = 250;
// A JavaScript number is exact up to 2^53 only, seeds and epochs go to 2^63 - 1. A larger whole number becomes a BigInt:
// it passes JSON.parse and JSON.stringify as a string that begins with a mark which no body can hold.
const MARK = `whole-${randomUUID()}-`;
const MARKED = new RegExp(`"${MARK}(-?\\d+)"`, "g");
const NUMBER = /-?\d+(\.\d+)?([eE][+-]?\d+)?/y;
const SURROGATE = /\p{Surrogate}/u;

/** The value of a body. Throws a Problem (invalid) where the bytes are not JSON within the limits. */
export function parse(bytes) {
  let data;
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    data = JSON.parse(text);
  } catch (error) {
    throw invalid("body", `not valid JSON: ${error.message}`);
  }
  if (depth(data) > MAX_DEPTH) throw invalid("body", `nested deeper than ${MAX_DEPTH}`);
  if (/\d{16}/.test(text)) data = JSON.parse(markWholeNumbers(text), unmark);
  if (/\\u[dD][89a-fA-F]/.test(text) && some(data, (value) => typeof value === "string" && SURROGATE.test(value))) {
    throw invalid("body", "a string holds a lone surrogate, which UTF-8 cannot carry");
  }
  if (/[eE]\+?\d{3}|\d{200}/.test(text) && some(data, isBeyondDouble)) {
    throw invalid("body", "a number is too large");
  }
  return data;
}

/** Plain data as JSON text. */
export function write(data) {
  const text = JSON.stringify(data, (_name, value) => (typeof value === "bigint" ? MARK + value : value));
  return text.includes(MARK) ? text.replace(MARKED, "$1") : text;
}

/** True if two parsed values are the same JSON: names in any order, 1 equals 1.0, an absent member is not a null one. */
export function same(one, other) {
  if (isContainer(one) && isContainer(other)) {
    const names = Object.keys(one);
    return (
      Array.isArray(one) === Array.isArray(other) &&
      names.length === Object.keys(other).length &&
      names.every((name) => Object.hasOwn(other, name) && same(one[name], other[name]))
    );
  }
  return one === other || (typeof one !== typeof other && isNumber(one) && isNumber(other) && one == other);
}

/** Levels of arrays and objects: 0 for a string, 1 for `[]`, 2 for `[[]]`. */
export function depth(data) {
  let level = [data].filter(isContainer);
  let levels = 0;
  while (level.length > 0 && levels <= MAX_DEPTH) {
    levels += 1;
    level = level.flatMap((container) => Object.values(container).filter(isContainer));
  }
  return levels;
}

function isContainer(value) {
  return typeof value === "object" && value !== null;
}

function isNumber(value) {
  return typeof value === "number" || typeof value === "bigint";
}

function isBeyondDouble(value) {
  return isNumber(value) && !Number.isFinite(Number(value));
}

/** Whether any value or name in the data is such a one. */
function some(data, test) {
  if (!isContainer(data)) return test(data);
  return Object.entries(data).some(([name, value]) => test(name) || some(value, test));
}

// The text is valid JSON already: outside of strings, whatever begins with a digit or a minus is a number.
function markWholeNumbers(text) {
  const pieces = [];
  let done = 0;
  for (let at = 0; at < text.length; at += 1) {
    const letter = text[at];
    if (letter === '"') {
      for (at += 1; text[at] !== '"'; at += 1) if (text[at] === "\\") at += 1;
    } else if (letter === "-" || (letter >= "0" && letter <= "9")) {
      NUMBER.lastIndex = at;
      const [word, fraction, exponent] = NUMBER.exec(text);
      if (fraction === undefined && exponent === undefined && !Number.isSafeInteger(Number(word))) {
        pieces.push(text.slice(done, at), `"${MARK}${word}"`);
        done = at + word.length;
      }
      at += word.length - 1;
    }
  }
  return pieces.join("") + text.slice(done);
}

function unmark(_name, value) {
  return typeof value === "string" && value.startsWith(MARK) ? BigInt(value.slice(MARK.length)) : value;
}
