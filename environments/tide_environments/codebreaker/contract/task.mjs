// One task: its state, its clocks, and the record of its last turn.
//
//   starting -> waiting <-> acting -> done      a cut (/end, an expired clock, a failure) leads from each
//                 |  ^        |                 to ending -> ended
//                 v  |        v
//                paused <- pausing
//
// Node runs one piece of code at a time. No await stands between a decision and the change of state that belongs to it:
// that is what makes a turn run once, however often and at whatever moment it is sent.

import { Clocks } from "./clocks.mjs";
import { same, write } from "./json.mjs";
import { Problem } from "./problem.mjs";

const PAUSED = { waiting: "paused", acting: "pausing" };
const RESUMED = { paused: "waiting", pausing: "acting" };
const OVER = ["ending", "ended"];
const MAX_TIMER_MS = 2 ** 31 - 1;

export class Task {
  state = "starting";
  superseded = false;
  startFailed = false;
  #makeGame;
  #game = null;
  #clocks;
  #limits;
  #onReleased;
  #turn = 0;
  #epoch = 0n;
  #reward = 0;
  #record = null; // the turn that runs or was the last to run: {turn, message, answer, numChars}
  #latest = null;
  #outcome = null;
  #problem = null; // what calls get once the task was cut
  #interrupt = null; // gives up waiting for the game's code
  #running = Promise.resolve(); // settles when the game's code, which nothing else can stop, has returned
  #released = null; // settles when the game was let go
  #endInfo = {};
  #account = null;

  /**
   * @param id its id
   * @param request the body of its /start
   * @param makeGame makes the author's object, this task's alone
   * @param limits seconds of each clock
   * @param now monotonic seconds
   * @param onReleased called once, with the task, when its place is free
   */
  constructor(id, request, makeGame, limits, now, onReleased) {
    this.id = id;
    this.request = request;
    this.#makeGame = makeGame;
    this.#limits = limits;
    this.#clocks = new Clocks(limits, now);
    this.#onReleased = onReleased;
    this.#enter("starting");
  }

  /** Begin, once; an older attempt of the same key is ended first. */
  begin(older) {
    this.started = this.#begin(older);
    this.started.catch(() => {}); // told to whoever waits; nobody may
  }

  /** Answer POST /observation: act once, or give the answer that the same turn got. */
  observe(turn, message) {
    this.sweep();
    const record = this.#record;
    if (record?.turn === turn) {
      if (!same(record.message, message)) {
        throw new Problem("turn_conflict", `turn ${turn} was already taken with another message`);
      }
      if (this.#outcome?.clock === "turn") this.#refuseIfOver(); // 504 is for the calls that waited
      return record.answer;
    }
    if (this.superseded) throw new Problem("stale_attempt", "a higher attempt of this task's key has started");
    this.#refuseIfOver();
    if (this.state === "done") throw new Problem("state_conflict", "the task is done; call /end", { state: this.state });
    if (turn !== this.#turn || this.state === "acting" || this.state === "pausing") {
      const words = `got turn ${turn}, the next one is turn ${this.#turn}`;
      throw new Problem("turn_order", words, { next_turn: this.#turn });
    }
    if (this.state === "paused") {
      throw new Problem("paused", "the task is paused; wait until it is resumed", { retry_after_s: 0.5 });
    }
    this.#refuseIfStarting();
    this.#enter("acting", { newTurn: true });
    this.#record = { turn, message, answer: this.#act(turn, message), numChars: write(message).length };
    this.#record.answer.catch(() => {}); // a caller that went away does not stop the action
    return this.#record.answer;
  }

  /** Answer GET /observation; changes nothing. */
  latest() {
    this.sweep();
    this.#refuseIfOver();
    this.#refuseIfStarting();
    return this.#observation();
  }

  /** Answer /pause and /resume. An epoch that is not newer changes nothing; none applies to the present state. */
  pause(epoch, paused) {
    this.sweep();
    this.#refuseIfOver();
    if (epoch === null || epoch > this.#epoch) {
      this.#epoch = epoch === null ? this.#epoch : BigInt(epoch);
      const next = (paused ? PAUSED : RESUMED)[this.state];
      if (next !== undefined) this.#enter(next);
    }
    return write({ state: this.state, epoch: this.#epoch, clocks: this.#clocks.view() });
  }

  /** Answer /end: cut the task off unless it is over, let the game go, give the account. Safe to repeat. */
  async end(reason) {
    this.sweep();
    if (this.state !== "done" && !OVER.includes(this.state)) {
      this.#cut({ kind: "aborted", clock: null, reason }, new Problem("ended", "the task was ended"));
    }
    await this.#released;
    if (this.state !== "ended") this.#enter("ended");
    this.#account ??= this.#finalAccount();
    return this.#account;
  }

  /** End the task if one of its running clocks has expired. The `end` clock is the release's own. */
  sweep() {
    const clock = this.#clocks.expired();
    if (clock === null || OVER.includes(this.state)) return;
    const code = clock === "turn" ? "turn_expired" : "expired";
    this.#cut({ kind: "expired", clock, reason: null }, new Problem(code, `the ${clock} clock expired`, { clock }));
  }

  /** About how much is kept of it, in characters: its start, the first and the last answer, the last action. */
  get numChars() {
    return write(this.request).length + 3 * (this.#latest?.length ?? 0) + (this.#record?.numChars ?? 0);
  }

  async #begin(older) {
    try {
      this.#game = this.#makeGame();
      if (older !== undefined) await older.end(`superseded by attempt ${this.request.attempt}`);
      const { task, seed, split, kind } = this.request;
      const { messages, tools = [] } = await this.#call("start", { task: task ?? {}, seed, split, kind });
      if (this.#problem !== null) throw this.#problem;
      this.#latest = observation({ messages });
      this.#enter("waiting", { newTurn: true });
      const answer = { task_id: this.id, turn: 0, messages, tools, limits: this.#limits };
      return write({ ...answer, clocks: this.#clocks.view() });
    } catch (error) {
      const problem = this.#fail("start", error);
      this.startFailed = this.#outcome.kind !== "aborted"; // then a repeated start tries anew
      await this.#released; // so that the caller's next try finds the place free
      throw problem;
    }
  }

  async #act(turn, message) {
    let step;
    try {
      step = await this.#call("step", message);
      if (this.#problem !== null) throw this.#problem;
      this.#latest = observation(step);
    } catch (error) {
      throw this.#fail("step", error);
    }
    this.#turn = turn + 1;
    this.#reward += step.reward ?? 0;
    if (step.terminated || step.truncated) {
      this.#outcome = { kind: step.terminated ? "completed" : "truncated", clock: null, reason: null };
      this.#enter("done");
      this.#released = this.#release(null);
    } else {
      const paused = this.state === "pausing";
      this.#enter("waiting", { newTurn: true });
      if (paused) this.#enter("paused");
    }
    return this.#observation();
  }

  /** Call the game, and wait for it or for a cut, whatever comes first. */
  async #call(method, argument) {
    if (this.#problem !== null) throw this.#problem;
    return new Promise((resolve, reject) => {
      this.#interrupt = reject;
      const result = (async () => this.#game[method](argument))();
      this.#running = result.then(resolve, reject);
    });
  }

  /** The problem that a failure of the game stands for; the task is over, since nobody knows what state it left. */
  #fail(method, error) {
    if (this.#problem !== null) return this.#problem;
    const refused = method === "start" && error instanceof Problem; // bad parameters, say
    if (!refused) console.error(`task ${this.id}: ${method} failed:`, error);
    const problem = refused ? error : new Problem("environment_failed", `${method} failed: ${error}`.slice(0, 500));
    this.#cut({ kind: "failed", clock: null, reason: problem.message }, problem);
    return problem;
  }

  #cut(outcome, problem) {
    this.#outcome = outcome;
    this.#problem = problem;
    this.#enter("ending");
    this.#interrupt?.(problem);
    this.#released = this.#release(outcome.reason ?? outcome.clock ?? outcome.kind);
  }

  async #release(reason) {
    try {
      this.#endInfo = (await within(this.#limits.end, this.#endGame(reason))) ?? {};
    } catch (error) {
      console.error(`task ${this.id}: end failed:`, error);
      this.#outcome = { kind: "failed", clock: null, reason: `end failed: ${error}`.slice(0, 500) };
    }
    this.#game = null;
    if (this.state === "ending") this.#enter("ended");
    this.#onReleased(this);
  }

  async #endGame(reason) {
    await this.#running; // the calls of one game never overlap
    return this.#game?.end?.(reason);
  }

  #finalAccount() {
    const { kind, clock } = this.#outcome;
    // A task whose environment did not do its part says nothing about the agent.
    const unknown = kind === "failed" || clock === "start" || clock === "turn";
    const { reward = this.#reward, metrics = {} } = this.#endInfo;
    const account = { reward: unknown ? null : reward, metrics, turns: this.#turn, outcome: this.#outcome };
    return write({ ...account, clocks: this.#clocks.view() });
  }

  #observation() {
    return `{"turn":${this.#turn},"clocks":${write(this.#clocks.view())},${this.#latest.slice(1)}`;
  }

  #refuseIfOver() {
    const clock = this.#outcome?.clock;
    if (clock) throw new Problem("expired", `the ${clock} clock expired`, { clock });
    if (OVER.includes(this.state)) throw new Problem("ended", "the task has ended");
  }

  #refuseIfStarting() {
    if (this.state === "starting") {
      throw new Problem("state_conflict", "the task is still starting", { state: this.state });
    }
  }

  #enter(state, options) {
    this.#clocks.enter(state, options);
    this.state = state;
  }
}

/** What the game says, checked: a gateway takes nothing else. */
function observation({ messages, reward = null, terminated = false, truncated = false, info = {} }) {
  if (!Array.isArray(messages)) throw new TypeError("messages must be a list of OpenAI messages");
  if (reward !== null && !Number.isFinite(reward)) throw new TypeError(`the reward is ${reward}`);
  return write({ messages, reward, terminated: Boolean(terminated), truncated: Boolean(truncated), info });
}

/** What the promise gives within so many seconds; later it is `{metrics: {end_expired: true}}` and the rest is dropped. */
function within(seconds, promise) {
  let timer;
  const late = new Promise((resolve) => {
    timer = setTimeout(resolve, Math.min(seconds * 1000, MAX_TIMER_MS), { metrics: { end_expired: true } });
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}
