// Codebreaker: find a secret code of digits. After each guess the referee says how many digits are right, and how many
// would be right elsewhere.

import { createHash, randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { invalid } from "./contract/problem.mjs";

// name: [default, least, most]
const NUMBERS = { length: [4, 2, 8], symbols: [6, 2, 9], max_turns: [10, 1, 100] };
const MAX_DELAY_S = 60;
const MAX_ID_CHARS = 512;

const GUESS = {
  type: "function",
  function: {
    name: "guess",
    description: "Guess the secret code.",
    parameters: { type: "object", properties: { code: { type: "string" } }, required: ["code"] },
  },
};

/** One game. Its methods are called one after the other, `step` exactly once for each turn. */
export class Codebreaker {
  #secret = "";
  #parameters;
  #numTurns = 0;
  #numInvalid = 0;
  #solved = false;

  /**
   * Begin the task. Its parameters, all optional: `length` of the code, `symbols` (digits 1 to that), `max_turns`,
   * `tools` (guess with a tool instead of words), and `delay_s`, the referee's time to think about a guess.
   *
   * The same seed and split give the same code.
   */
  start({ task, seed, split }) {
    this.#parameters = readParameters(task);
    const { length, symbols, max_turns: maxTurns, tools } = this.#parameters;
    const source = seed === null ? randomBytes(32) : `${split ?? ""}/${seed}`;
    const digest = createHash("sha256").update(source).digest();
    this.#secret = Array.from({ length }, (_, place) => 1 + (digest.readUInt32BE(4 * place) % symbols)).join("");
    const example = Array.from({ length }, (_, place) => 1 + (place % symbols)).join("");
    const how = tools ? "Call the tool guess" : `Answer with your guess, for example ${example}`;
    const words = [
      `I have a secret code of ${length} digits, each from 1 to ${symbols}; digits may repeat.`,
      `You have ${maxTurns} guesses. After each one I tell how many digits are right, and how many are misplaced.`,
      `${how}.`,
    ];
    return { messages: [{ role: "user", content: words.join(" ") }], tools: tools ? [GUESS] : [] };
  }

  /** Answer one assistant message. A bad guess is an answer too; an exception would fail the task for good. */
  async step(message) {
    const { max_turns: maxTurns, delay_s: delay } = this.#parameters;
    this.#numTurns += 1;
    const calls = message.tool_calls ?? [];
    const numInvalid = this.#numInvalid;
    const messages = calls.length > 0 ? calls.map((call) => this.#answerCall(call)) : [this.#answerWords(message)];
    if (delay > 0 && this.#numInvalid === numInvalid) await sleep(delay * 1000);
    const truncated = !this.#solved && this.#numTurns >= maxTurns;
    if (truncated && calls.length === 0) messages[0].content += ` No guesses are left: it was ${this.#secret}.`;
    const info = { solved: this.#solved, invalid: this.#numInvalid };
    return { messages, reward: this.#solved ? 1 : 0, terminated: this.#solved, truncated, info };
  }

  /** The final account. Without a `reward` of its own it is the sum of the turns' rewards. */
  end() {
    return { metrics: { solved: this.#solved, turns: this.#numTurns, invalid: this.#numInvalid } };
  }

  /** All calls of one message are one turn, in order. What follows the right guess is not run. */
  #answerCall(call) {
    const id = typeof call.id === "string" && [...call.id].length <= MAX_ID_CHARS ? { tool_call_id: call.id } : {};
    return { role: "tool", ...id, content: this.#solved ? "not_run" : this.#answer(codeOf(call)) };
  }

  #answerWords(message) {
    const found = textOf(message).match(/\d+/g) ?? [];
    return { role: "user", content: this.#answer(found.at(-1)) };
  }

  #answer(guess) {
    const { length, symbols } = this.#parameters;
    if (guess === undefined || guess.length !== length || !new RegExp(`^[1-${symbols}]+$`).test(guess)) {
      this.#numInvalid += 1;
      return `That is no guess: I need ${length} digits from 1 to ${symbols}.`;
    }
    const { right, misplaced } = compare(this.#secret, guess);
    this.#solved = right === length;
    return this.#solved ? `${guess} is right.` : `${guess}: ${right} right, ${misplaced} misplaced.`;
  }
}

/** How many digits of a guess are right, and how many others occur elsewhere in the code. */
export function compare(secret, guess) {
  const count = (code, digit) => code.split(digit).length - 1;
  const right = [...guess].filter((digit, place) => digit === secret[place]).length;
  const common = [...new Set(guess)].map((digit) => Math.min(count(secret, digit), count(guess, digit)));
  return { right, misplaced: common.reduce((sum, number) => sum + number, 0) - right };
}

function readParameters(task) {
  const parameters = { tools: false, delay_s: 0 };
  for (const [name, [usual]] of Object.entries(NUMBERS)) parameters[name] = usual;
  for (const [name, value] of Object.entries(task)) {
    const field = `task.${name}`;
    if (Object.hasOwn(NUMBERS, name)) {
      const [, least, most] = NUMBERS[name];
      if (!(Number.isInteger(value) && value >= least && value <= most)) throw invalid(field, `must be ${least} to ${most}`);
    } else if (name === "tools") {
      if (typeof value !== "boolean") throw invalid(field, "must be true or false");
    } else if (name === "delay_s") {
      if (!(typeof value === "number" && value >= 0 && value <= MAX_DELAY_S)) {
        throw invalid(field, `must be seconds, at most ${MAX_DELAY_S}`);
      }
    } else {
      throw invalid(field, "no such parameter");
    }
    parameters[name] = value;
  }
  return parameters;
}

/** The words of a message: a string, or its text parts. */
function textOf({ content }) {
  if (typeof content === "string") return content;
  return (content ?? []).map((part) => (part.type === "text" ? String(part.text) : "")).join(" ");
}

/** The code that a call of the tool guesses; undefined where it is no such call. A model may write anything. */
function codeOf(call) {
  if (call.function?.name !== "guess") return undefined;
  try {
    const { code } = JSON.parse(call.function.arguments);
    return typeof code === "string" ? code : undefined;
  } catch {
    return undefined;
  }
}
