// The rules of Codebreaker; run by test_codebreaker.py, or by hand: node --test tests/environments

import assert from "node:assert/strict";
import { test } from "node:test";

import { Codebreaker, compare } from "../../environments/tide_environments/codebreaker/game.mjs";

const DIGITS = ["1", "2", "3", "4", "5", "6"];

function begin({ task = {}, seed = 3, split = null } = {}) {
  const game = new Codebreaker();
  return [game, game.start({ task, seed, split, kind: "train" })];
}

const say = (content) => ({ role: "assistant", content });
const call = (id, code) => ({ id, type: "function", function: { name: "guess", arguments: JSON.stringify({ code }) } });
const words = (step) => step.messages.map((message) => message.content).join("\n");

/** The code of a game of two digits, found by trying all. */
async function solve(parameters) {
  for (const code of DIGITS.flatMap((one) => DIGITS.map((other) => one + other))) {
    const [game] = begin(parameters);
    if ((await game.step(say(code))).terminated) return code;
  }
  throw new Error("no code is right");
}

test("digits are compared as in the board game", () => {
  const told = (secret, guess) => Object.values(compare(secret, guess)).join();
  assert.equal(told("1234", "1234"), "4,0");
  assert.equal(told("1234", "4321"), "0,4");
  assert.equal(told("1122", "2211"), "0,4");
  assert.equal(told("1123", "1111"), "2,0");
  assert.equal(told("1123", "4451"), "0,1");
  assert.equal(told("5566", "6655"), "0,4");
  assert.equal(told("1234", "5555"), "0,0");
});

test("a seed and a split give the same code each time, other ones another", async () => {
  const small = { length: 2 };
  assert.equal(await solve({ task: small, seed: 3 }), await solve({ task: small, seed: 3 }));
  const codes = new Set();
  for (let seed = 0; seed < 12; seed += 1) codes.add(await solve({ task: small, seed, split: "test" }));
  assert.ok(codes.size > 6, `${codes.size} codes for 12 seeds`);
});

test("a seed beyond a number's exact range is a seed of its own", async () => {
  const codes = new Set();
  for (let more = 0n; more < 8n; more += 1n) codes.add(await solve({ task: { length: 2 }, seed: 2n ** 63n - 1n - more }));
  assert.ok(codes.size > 1);
});

test("the right guess ends the game with a reward of 1", async () => {
  const code = await solve({ task: { length: 2 } });
  const [game] = begin({ task: { length: 2 } });
  const miss = await game.step(say(code === "11" ? "12" : "11"));
  assert.deepEqual([miss.reward, miss.terminated, miss.truncated], [0, false, false]);
  const hit = await game.step(say(`I think it is ${code}.`));
  assert.deepEqual([hit.reward, hit.terminated, hit.truncated], [1, true, false]);
  assert.deepEqual(game.end(), { metrics: { solved: true, turns: 2, invalid: 0 } });
});

test("the last guess cuts the game short and tells the code", async () => {
  const task = { length: 2, max_turns: 2 };
  const code = await solve({ task });
  const [game] = begin({ task });
  assert.equal((await game.step(say("nonsense"))).truncated, false);
  const last = await game.step(say("7"));
  assert.deepEqual([last.reward, last.terminated, last.truncated], [0, false, true]);
  assert.match(words(last), new RegExp(`it was ${code}`));
});

test("what is no guess is answered, counted, and costs a turn", async () => {
  for (const message of [say("hello"), say(null), say(""), say("12345"), say("1239"), say([{ type: "image_url" }])]) {
    const [game] = begin();
    const step = await game.step(message);
    assert.match(words(step), /no guess: I need 4 digits from 1 to 6/);
    assert.deepEqual(step.info, { solved: false, invalid: 1 });
    assert.equal(game.end().metrics.turns, 1);
  }
});

test("text parts are read", async () => {
  const [game] = begin();
  assert.match(words(await game.step(say([{ type: "text", text: "I say" }, { type: "text", text: "6543" }]))), /^6543: /);
});

test("all calls of one message are one turn, and after the right one the rest is not run", async () => {
  const task = { length: 2, tools: true };
  const code = await solve({ task: { length: 2 } });
  const wrong = code === "11" ? "12" : "11";
  const [game, start] = begin({ task });
  assert.equal(start.tools[0].function.name, "guess");
  const step = await game.step({ ...say(null), tool_calls: [call("a", wrong), call("b", code), call("c", wrong)] });
  assert.deepEqual(step.messages.map((message) => [message.role, message.tool_call_id]), [
    ["tool", "a"],
    ["tool", "b"],
    ["tool", "c"],
  ]);
  assert.equal(step.messages[2].content, "not_run");
  assert.deepEqual([step.reward, step.terminated, game.end().metrics.turns], [1, true, 1]);
});

test("whatever a model writes into a call is an answer, not a failure", async () => {
  const [game] = begin({ task: { tools: true } });
  const broken = [
    {},
    { id: 7, function: null },
    { id: "x".repeat(600), function: { name: "guess", arguments: "{" } },
    { id: "y", function: { name: "guess", arguments: "null" } },
    { id: "z", function: { name: "guess", arguments: '{"code": 1234}' } },
    { id: "w", function: { name: "peek", arguments: "{}" } },
  ];
  const step = await game.step({ ...say(null), tool_calls: broken });
  assert.deepEqual(step.messages.map((message) => message.tool_call_id), [undefined, undefined, undefined, "y", "z", "w"]);
  assert.ok(step.messages.every((message) => message.content.startsWith("That is no guess")));
});

test("bad parameters are refused by name", () => {
  const bad = [{ length: 1 }, { symbols: "6" }, { max_turns: 2.5 }, { tools: 1 }, { delay_s: -1 }, { lenght: 4 }];
  for (const task of bad) {
    const field = `task.${Object.keys(task)[0]}`;
    assert.throws(() => begin({ task }), { code: "invalid", extra: { field } });
  }
});
